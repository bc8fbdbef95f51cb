"""Completions of a prompt as branches of one row: the states and gradients equal those of separate rows."""

import pytest
import torch

from onward import Batch, Decoder
from onward.data import IGNORE_INDEX
from onward.training.reinforcement import shared_prompts
from onward.training.reinforcement.shared_prompts import branches, shared_rows, target_states

from support.decoders import DECODERS, LENGTH, decoder

# (tokens of the prompt, tokens of each completion); consecutive completions of one prompt share it
GROUPS = [(6, [1, 5, 3]), (2, [4]), (7, [2, 2, 4, 1]), (1, [6, 6])]


def completions(vocab: int) -> Batch:
    """The groups as rows, padded at the end; the second token of each completion of more than two tokens is not a
    target, like a token of a reply."""
    torch.manual_seed(0)
    count = sum(len(sizes) for _, sizes in GROUPS)
    tokens, targets = torch.zeros(2, count, LENGTH - 1, dtype=torch.int64)
    targets[:], row = IGNORE_INDEX, 0
    for prompt, sizes in GROUPS:
        start = torch.randint(vocab, (prompt,))
        for size in sizes:
            ids = torch.cat([start, torch.randint(vocab, (size,))])
            tokens[row, : len(ids) - 1], targets[row, prompt - 1 : len(ids) - 1] = ids[:-1], ids[prompt:]
            if size > 2:
                targets[row, prompt] = IGNORE_INDEX
            row += 1
    return Batch(tokens, targets)


def gradients(model: Decoder, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The states at the targets, and the gradients of a function of these states."""
    model.zero_grad()
    states = target_states(model, batch)
    (states.square() * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
    return states.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", DECODERS)
def test_shared_prompts_change_no_state_and_no_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = decoder(DECODERS[name], torch.float64), completions(DECODERS[name].vocab_size)
    monkeypatch.setattr(shared_prompts, "branches", lambda *_: 1)
    wanted, wanted_gradients = gradients(model, batch)
    for most in 3, 9:
        monkeypatch.setattr(shared_prompts, "branches", lambda *_, most=most: most)
        shared = shared_rows(batch, 8)
        assert shared is not None
        assert shared.tokens.shape[0] == len(GROUPS) + (most == 3)
        states, found = gradients(model, batch)
        torch.testing.assert_close(states, wanted, rtol=1e-10, atol=1e-10)
        assert found.keys() == wanted_gradients.keys()
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, wanted_gradients[key], rtol=1e-8, atol=1e-9)


def test_number_of_branches_takes_the_least_work() -> None:
    for prompt, completion, width in (49, 31, 384), (500, 500, 384), (500, 100, 2048), (2, 300, 64):
        work = lambda g: (prompt + g * completion) * (6 * width + prompt + g * completion) / g  # noqa: B023
        best = min(range(1, 200), key=work)
        assert abs(branches(prompt, completion, width) - best) <= 1


def test_rows_without_shared_prompts_stay_as_they_are() -> None:
    batch = completions(50)
    assert shared_rows(batch.changed(tokens=batch.tokens[::3], targets=batch.targets[::3]), 8) is None
