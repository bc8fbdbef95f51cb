"""A divided vocabulary: losses equal those with the full vocabulary, and no process has all logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onward import Batch, Decoder, DecoderConfig, RunConfig, StepPlan
from onward.config.mesh import Mesh
from onward.data import IGNORE_INDEX
from onward.model.divided import Scores, scores
from onward.parallel.parallelize import parallelize
from onward.parallel.parts import gathered, local
from onward.parallel.processes import Processes
from onward.training import CrossEntropy
from onward.training.losses.answers import target_logprobs
from onward.training.step.build import build_trainer
from onward.training.step.loss import LossFunction, Sums, as_loss

from support.decoders import config, decoder
from support.ranks import Ranks

ROWS, LENGTH = 2, 12
TENSOR = Mesh(tensor=2)
READINGS: dict[str, Callable[[Scores, Tensor], Tensor]] = {
    "log-probabilities": lambda scores, targets: scores.logprobs(targets.clamp(min=0)),
    "denominators": lambda scores, targets: scores.log_z,
    "means": lambda scores, targets: scores.mean,
    "cross-entropy": lambda scores, targets: scores.cross_entropy(targets, IGNORE_INDEX),
    "whole logits": lambda scores, targets: scores.exact,
}


def joined() -> Processes:
    return Processes.join().arranged(TENSOR).connected(torch.device("cpu"))


def readings(model: Decoder, hidden: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The result of every function in READINGS, with its gradients for the hidden states and the head."""
    found = {}
    for name, read in READINGS.items():
        of_logits = Scores(model.logits(hidden)) if name == "whole logits" else scores(model, hidden)
        value = read(of_logits, targets)
        weights = torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view_as(value)
        grads = torch.autograd.grad((value * weights).sum() + value.sum(), [hidden, model.head.weight])
        found |= {name: value.detach(), f"{name}, hidden": grads[0], f"{name}, head": gathered(grads[1])}
    return found


def divided_and_whole(changes: DecoderConfig) -> list[dict[str, Tensor]]:
    """The readings of a divided and of an undivided decoder."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS * LENGTH, changes.d_model, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(changes.vocab_size, (ROWS * LENGTH,), generator=generator)
    targets[:5] = IGNORE_INDEX
    models = [decoder(changes, torch.float64) for _ in range(2)]
    parallelize(models[0], TENSOR, joined().devices)
    return [readings(model, hidden, targets) for model in models]


@pytest.mark.parametrize(
    "changes",
    [config(vocab_size=12, head_bias=True), config(vocab_size=12, logit_scale=1e4), config(vocab_size=12, tied=True)],
    ids=["bias", "logits beyond the exponents", "tied"],
)
def test_readings_of_divided_logits_are_those_of_whole_ones(changes: DecoderConfig, two: Ranks) -> None:
    for divided, whole in two.run(divided_and_whole, changes):
        assert divided.keys() == whole.keys()
        for name, tensor in whole.items():
            assert tensor.isfinite().all()
            torch.testing.assert_close(divided[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


def of_targets(model: Decoder, batch: Batch) -> Sums:
    """A loss that compares answers, such as DPO's."""
    hidden = model.hidden(batch.tokens, batch.positions).flatten(0, 1)
    loss = -target_logprobs(model, hidden, batch.targets.flatten()).sum()
    return loss, loss.detach()


LOSSES: dict[str, LossFunction] = {
    "cross-entropy": CrossEntropy(),
    "z-loss and smoothing": CrossEntropy(z_loss=0.1, label_smoothing=0.1),
    "answers": of_targets,
}


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor, or local part of a tensor, that this process makes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.bytes = max([self.bytes, *(local(t).nbytes for t in tree_leaves(result) if isinstance(t, Tensor))])
        return result


def largest_tensor(name: str, vocab_size: int) -> int:
    """The bytes of the largest tensor that a step makes."""
    options = RunConfig(precision="fp32", optimizer="adamw", learning_rate=1e-3, steps=10)
    trainer = build_trainer(options, Decoder(config(vocab_size=vocab_size)), joined(), as_loss(LOSSES[name]))
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    with Largest() as made:
        trainer.train_step(StepPlan([Batch(tokens, tokens.clone())]))
    return made.bytes


@pytest.mark.parametrize("name", LOSSES)
def test_no_process_has_all_logits(name: str, two: Ranks) -> None:
    whole = 4 * ROWS * LENGTH * 1000
    assert max(two.run(largest_tensor, name, 1000)) == whole / 2
    assert max(two.run(largest_tensor, name, 1001)) > whole, "an odd vocabulary is not divided"


def look_up(token: int) -> str:
    """The result for a target outside the vocabulary."""
    model = Decoder(config(vocab_size=12))
    parallelize(model, TENSOR, joined().devices)
    try:
        return str(target_logprobs(model, torch.zeros(1, 16), torch.tensor([token])))
    except (IndexError, RuntimeError) as error:
        return type(error).__name__


@pytest.mark.parametrize("token", [-1, 12])
def test_a_target_outside_the_vocabulary_is_an_error(token: int, two: Ranks) -> None:
    assert {*two.run(look_up, token)} <= {"IndexError", "RuntimeError"}
