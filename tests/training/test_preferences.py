"""Preference losses equal their formulas in fp64, and runs use the configured reference."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward
from onward import LoRA, Method, PairMethod, Run, Step, UserError, add_lora
from onward.base import fields
from onward.data import ExampleBatch
from onward.training import Answers, sequence_logprobs

from support.finetuning import base_in, base_model, config, pairs, write_rows
from support.finetuning import method as method_of
from support.grids import first
from support.preferences import changed, example_batch, of
from support.runs import assert_same_run

PAIRS = [name for name, one in Method.choices().items() if issubclass(one, PairMethod)]
REFERENCED = [name for name, one in Method.choices().items() if "reference" in fields.hints(one)]
COMPARED = sorted(REFERENCED, key="kto".__ne__)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base"), dropout=0.3)


@pytest.fixture
def batch() -> ExampleBatch:
    return example_batch("dpo")


log_s = lambda x: -np.log1p(np.exp(-x))
sigmoid = lambda x: 1 / (1 + np.exp(-x))
log_odds = lambda x: x - np.log(1 - np.exp(x))
# functions in fp64, with beta 0.3, of the log-ratios c and r of the chosen and the rejected answer, their mean
# log-probabilities a and b, and their numbers of tokens n and k
FORMULAS: dict[str, Callable[..., Any]] = {
    "dpo": lambda c, r, a, b, n, k: -log_s(0.3 * (c - r)),
    "dpo(label_smoothing=0.2)": lambda c, r, a, b, n, k: -log_s(0.3 * (c - r)) * 0.8 - log_s(0.3 * (r - c)) * 0.2,
    "dpo(normalized=true)": lambda c, r, a, b, n, k: -log_s(0.3 * (c / n - r / k)),
    "robust(label_smoothing=0.2)": lambda c, r, a, b, n, k: (
        (-log_s(0.3 * (c - r)) * 0.8 + log_s(0.3 * (r - c)) * 0.2) / 0.6
    ),
    "hinge": lambda c, r, a, b, n, k: np.maximum(0, 1 - 0.3 * (c - r)),
    "ipo": lambda c, r, a, b, n, k: (c / n - r / k - 1 / 0.6) ** 2,
    "exo(label_smoothing=0.1)": lambda c, r, a, b, n, k: (
        sigmoid(0.3 * (c - r)) * np.log(sigmoid(0.3 * (c - r)) / 0.9)
        + sigmoid(0.3 * (r - c)) * np.log(sigmoid(0.3 * (r - c)) / 0.1)
    ),
    "nca": lambda c, r, a, b, n, k: -log_s(0.3 * c) - (log_s(-0.3 * c) + log_s(-0.3 * r)) / 2,
    "bco": lambda c, r, a, b, n, k: -log_s(0.3 * c) - log_s(-0.3 * r),
    "sppo": lambda c, r, a, b, n, k: (c - 1 / 0.6) ** 2 + (r + 1 / 0.6) ** 2,
    "apo": lambda c, r, a, b, n, k: 1 - sigmoid(0.3 * c) + sigmoid(0.3 * r),
    "apo(variant=down)": lambda c, r, a, b, n, k: sigmoid(0.3 * c) + 1 - sigmoid(0.3 * (c - r)),
    "discopop(tau=0.5)": lambda c, r, a, b, n, k: (
        -log_s(0.3 * (c - r)) * (1 - sigmoid(0.6 * (c - r))) + np.exp(-0.3 * (c - r)) * sigmoid(0.6 * (c - r))
    ),
    "simpo(gamma=0.7, label_smoothing=0.2)": lambda c, r, a, b, n, k: (
        -log_s(0.3 * (a - b) - 0.7) * 0.8 - log_s(-0.3 * (a - b) + 0.7) * 0.2
    ),
    "cpo(label_smoothing=0.2)": lambda c, r, a, b, n, k: (
        -log_s(0.3 * (a * n - b * k)) * 0.8 - log_s(0.3 * (b * k - a * n)) * 0.2
    ),
    "orpo": lambda c, r, a, b, n, k: -a - 0.3 * log_s(log_odds(a) - log_odds(b)),
    "dpo + 0.2 * sft": lambda c, r, a, b, n, k: -log_s(0.3 * (c - r)) - 0.2 * a,
    "ipo - 0.5 * simpo(gamma=0)": lambda c, r, a, b, n, k: (c / n - r / k - 1 / 0.6) ** 2 + 0.5 * log_s(0.3 * (a - b)),
}


def test_every_loss_of_pairs_has_a_formula() -> None:
    assert {fields.parse(name, "")["kind"] for name in FORMULAS} - {"sum"} == {*PAIRS}


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_is_its_formula_in_fp64(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda most: -torch.rand(40, dtype=torch.float64, generator=generator) * most
    chosen, rejected, theirs, others = draw(30), draw(30), draw(30), draw(30)
    counts = [torch.randint(1, 9, (40,), generator=generator) for _ in range(2)]
    got = of(name).of_pairs(Answers(chosen, theirs, counts[0]), Answers(rejected, others, counts[1]))
    c, r, n, o = (x.numpy() for x in (chosen - theirs, rejected - others, *counts))
    wanted = FORMULAS[name](c, r, chosen.numpy() / n, rejected.numpy() / o, n, o)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradient_stay_finite_far_from_0(name: str) -> None:
    far = torch.tensor([0.0, 1e-3, 30.0, 80.0])
    for sign in -1, 1:
        logprobs = (-100 - sign * far).requires_grad_()
        chosen, rejected = Answers(logprobs, torch.full((4,), -100.0), far + 1), Answers(far - 200, far - 100, far + 1)
        loss = of(name).of_pairs(chosen, rejected)
        (grad,) = torch.autograd.grad(loss.sum(), logprobs)
        assert loss.isfinite().all()
        assert grad.isfinite().all()


def test_tail_weighs_the_tokens_beyond_the_shorter_answer(base: Path, batch: ExampleBatch) -> None:
    model = onward.load(base).model
    whole, half = (sequence_logprobs(model, batch, tail) for tail in (1.0, 0.25))
    single = [sequence_logprobs(model, cut_after(batch, count)) for count in range(1, 40)]
    for pair in range(batch.num_sequences // 2):
        shorter = int(whole.count[2 * pair : 2 * pair + 2].min())
        for number in 2 * pair, 2 * pair + 1:
            shared = single[shorter - 1].total[number]
            wanted = shared + 0.25 * (whole.total[number] - shared)
            assert half.total[number].item() == pytest.approx(wanted.item(), abs=1e-4)
    assert torch.equal(whole.count, half.count)


def cut_after(batch: ExampleBatch, count: int) -> ExampleBatch:
    """The batch with only the first `count` targets of each sequence."""
    targets = batch.targets.clone()
    for number in range(batch.num_sequences):
        rows, columns = ((batch.sequences == number) & (targets >= 0)).nonzero(as_tuple=True)
        targets[rows[count:], columns[count:]] = -100
    return replace(batch, targets=targets)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [False, True])
def test_dpo_begins_at_ln_2(adapter: bool, precision: str, base: Path, batch: ExampleBatch) -> None:
    model = onward.load(base).model.train()
    if adapter:
        add_lora(model, LoRA(rank=2))
    loss = method_of("dpo").loss(base_in(base))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        value, _, figures = loss(model, batch)  # type: ignore[misc]
    assert value.item() / 4 == pytest.approx(np.log(2), abs=1e-6)
    assert {name: figure.item() for name, figure in figures.items()} == {
        "accuracy": 2.0,
        "margin": 0.0,
        "chosen_reward": 0.0,
        "rejected_reward": 0.0,
    }


@pytest.mark.parametrize("name", first(1, COMPARED))
def test_kept_reference_gives_the_loss_of_the_online_one(name: str, base: Path, tmp_path: Path) -> None:
    data, losses = write_rows(tmp_path / "pairs.jsonl", pairs()), []
    for reference in "online", "kept":
        options = {"method": name, "reference": reference, "template": "", "batch_size": 2, "validation": "none"}
        run = Run.start(config(base, data, tmp_path / reference, **options))
        losses.append([event.loss for event in run.train() if isinstance(event, Step)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0][0] != losses[0][-1]


def test_a_run_that_is_resumed_compares_with_the_same_base(tmp_path: Path) -> None:
    base, data = base_model(tmp_path / "base"), write_rows(tmp_path / "pairs.jsonl", pairs(20))
    run = Run.start(config(base, data, tmp_path / "run", method="dpo"))
    first, *_ = run.train(stop=lambda: run.step == 1)
    assert isinstance(first, Step)
    assert first.figures["accuracy"] == 0.5
    with torch.no_grad():
        lm = onward.load(base)
        lm.model.embed.weight.add_(1)
    onward.save(lm, base)
    with pytest.raises(UserError, match=r"base is not the model that .*run was started from .*dpo compares with it"):
        Run.resume(tmp_path / "run")


def test_sequence_logprobs_are_the_sums_of_those_of_tokens(base: Path, batch: ExampleBatch) -> None:
    model = onward.load(base).model
    found = sequence_logprobs(model, batch)
    for number in range(batch.num_sequences):
        here = batch.sequences == number
        where = here & (batch.tokens > 0) | here & (batch.positions > 0)
        tokens, targets = batch.tokens[where][None], batch.targets[where]
        logprobs = model(tokens)[0].log_softmax(-1)
        kept = [logprobs[i, t].item() for i, t in enumerate(targets.tolist()) if t >= 0]
        assert found.total[number].item() == pytest.approx(sum(kept), abs=1e-4)
        assert int(found.count[number]) == len(kept)


def test_a_synced_reference_moves_towards_the_model(base: Path, batch: ExampleBatch) -> None:
    loss, model = of("dpo(reference=synced(every=2, share=0.25))").loss(base_in(base)), changed(base)
    start = [p.clone() for p in onward.load(base).model.parameters()]
    loss(model, batch)
    for step in range(3):
        assert loss.prepare(model, [batch])[0] is batch
        moved = 0.25 if step == 2 else 0.0
        for own, before, new in zip(loss.reference.model.parameters(), start, model.parameters()):
            torch.testing.assert_close(own, before + moved * (new - before))


def test_a_run_with_a_synced_reference_resumes_exactly(base: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "pairs.jsonl", pairs())
    options = {"method": "dpo(reference=synced(every=2))", "template": "", "batch_size": 2, "validation": "none"}
    list(Run.start(config(base, data, tmp_path / "whole", **options)).train())
    run = Run.start(config(base, data, tmp_path / "run", **options))
    for _ in run.train(stop=lambda: run.step == 3):
        pass
    list(Run.resume(tmp_path / "run").train())
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    with pytest.raises(UserError, match="synced, which does not support adapters: leave out lora"):
        config(base, data, tmp_path / "lora", **options, lora=2)
