"""Dividing the tokens of windows among processes."""

import pytest
import torch
from torch import nn

from onward import Batch, Decoder, RunConfig, UserError
from onward.config.mesh import Mesh
from onward.parallel.context import DividedTokens, in_order, own_batch, own_tokens
from onward.parallel.processes import Processes
from onward.training import CrossEntropy
from onward.training.step.build import build_trainer
from onward.training.step.loss import LossOfFunction

from support.decoders import config

ROWS = torch.arange(48).view(2, 24)


def test_processes_have_all_tokens_once_and_equal_shares_of_the_scores() -> None:
    for count in 2, 3, 4:
        parts = [own_tokens(ROWS, count, rank) for rank in range(count)]
        assert torch.equal(in_order(parts), ROWS)
        assert len({int(part[0].sum()) for part in parts}) == 1  # token t attends to t + 1 tokens


def test_part_of_a_batch_has_the_positions_of_all_tokens() -> None:
    plain, packed = (own_batch(Batch(ROWS, ROWS + 1, at), 2, 1) for at in (None, ROWS % 12))
    assert torch.equal(plain.tokens, plain.targets - 1)
    assert plain.num_targets == 24
    assert torch.equal(torch.as_tensor(plain.positions), torch.arange(24))
    assert torch.equal(torch.as_tensor(packed.positions), ROWS % 12)


def test_a_call_with_all_tokens_needs_no_other_process() -> None:
    model = Decoder(config())
    tokens = ROWS % 5
    expected = model(tokens)
    DividedTokens(model, 1, 2, lambda x: pytest.fail("a gather"))
    assert torch.equal(model(tokens), expected)
    assert torch.equal(model(tokens, torch.arange(24).expand(2, -1)), expected)


def test_modules_and_losses_without_a_rule_are_refused() -> None:
    model = Decoder(config())
    model.blocks[1].attn = nn.Linear(4, 4)
    with pytest.raises(UserError, match=r"blocks.1.attn, a Linear, has no rule for context parallelism: use context=1"):
        DividedTokens(model, 0, 2, lambda x: x)
    processes = Processes(count=2, mesh=Mesh(context=2))
    with pytest.raises(UserError, match="Cannot compute the loss LossOfFunction over a context axis"):
        build_trainer(RunConfig(steps=1), Decoder(config()), processes, LossOfFunction(CrossEntropy()))
    with pytest.raises(UserError, match="cannot combine pipeline with context"):
        Mesh(pipeline=2, context=2).check_decoder(config())
