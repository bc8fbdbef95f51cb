"""The loop, the optimiser and the learning rate."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import UserError
from onward.model.config import DecoderConfig
from onward.model.decoder import Decoder
from onward.training.loop import IGNORED, Batch, fit, loss_sum, mean_loss
from onward.training.optimiser import adamw, learning_rate_share

CONFIG = DecoderConfig(vocab_size=20, d_model=32, n_layers=2, n_heads=4, context_length=16)


def fresh() -> Decoder:
    torch.manual_seed(0)
    return Decoder(CONFIG)


def windows(count: int, length: int = 16) -> Batch:
    ids = torch.randint(20, (count, length + 1), generator=torch.Generator().manual_seed(1))
    return Batch(ids[:, :-1].clone(), ids[:, 1:].clone())


@given(
    steps=st.integers(1, 500), warmup=st.floats(0, 1, exclude_max=True), final=st.floats(0, 1), peak=st.floats(0.1, 1)
)
def test_the_learning_rate_rises_then_falls_and_ends_exactly(
    steps: int, warmup: float, final: float, peak: float
) -> None:
    course = [learning_rate_share(step, steps, warmup, final) for step in range(steps)]
    rise = min(int(warmup * steps), steps - 1)
    assert all(0 <= share <= 1 + 1e-12 for share in course)
    assert course[:rise] == sorted(course[:rise])
    assert all(a >= b - 1e-12 for a, b in zip(course[rise:], course[rise + 1 :]))
    if steps - 1 > rise:
        assert course[-1] == final
        assert course[rise] == 1


def gradients(parts: list[Batch]) -> list[torch.Tensor]:
    """What one step of `fit` gave to the optimiser."""
    model, seen = fresh(), []

    class Watch(torch.optim.SGD):
        def step(self, *_: object) -> None:
            seen.extend(p.grad.clone() for p in model.parameters())

    optimiser = Watch(model.parameters(), lr=0.1)
    (step,) = fit(model, lambda _: parts, optimiser, lambda _: 0.1, range(1), clip=0.0, precision="fp32")
    assert step.loss == pytest.approx(mean_loss(model, parts)[0], rel=1e-5)
    return seen


@pytest.mark.parametrize("sizes", [[4, 4], [1, 7], [2, 2, 2, 2], [1] * 8])
def test_accumulation_equals_the_whole_batch(sizes: list[int]) -> None:
    whole = windows(8)
    whole.targets[3, 5:] = IGNORED  # so that a mean of means would differ
    parts = [Batch(*pair) for pair in zip(whole.tokens.split(sizes), whole.targets.split(sizes))]
    for one, many in zip(gradients([whole]), gradients(parts)):
        torch.testing.assert_close(many, one, rtol=1e-4, atol=1e-6)


def test_only_matrices_decay() -> None:
    model = fresh()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimiser = adamw(model, 0.1, 0.5, (0.9, 0.99))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.step()
    for name, p in model.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5 if p.ndim >= 2 else 1)
        torch.testing.assert_close(p.detach(), expected, msg=name)


def test_the_loss_is_the_mean_over_all_targets() -> None:
    model, batch = fresh(), windows(3)
    batch.targets[0, :9] = IGNORED
    logits = model(batch.tokens).double()
    expected = [
        math.log(sum(math.exp(z) for z in logits[b, t].tolist())) - float(logits[b, t, batch.targets[b, t]])
        for b in range(3)
        for t in range(16)
        if batch.targets[b, t] != IGNORED
    ]
    loss, count = mean_loss(model, [Batch(*pair) for pair in zip(batch.tokens.split(2), batch.targets.split(2))])
    assert count == len(expected) == 39
    assert loss == pytest.approx(math.fsum(expected) / 39, rel=1e-6)
    assert float(loss_sum(model, batch)) == pytest.approx(math.fsum(expected), rel=1e-6)


def test_clipping_bounds_the_gradient_and_reports_the_norm_before() -> None:
    model = fresh()
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    (step,) = fit(model, lambda _: [windows(4)], optimiser, lambda _: 1.0, range(1), clip=1e-3, precision="fp32")
    moved = math.sqrt(sum(float((p - b).detach().square().sum()) for p, b in zip(model.parameters(), before)))
    assert step.grad_norm > 1e-2
    assert moved == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loss_falls_on_what_is_seen_again_and_again(precision: str) -> None:
    model, batch = fresh(), windows(4)
    optimiser = adamw(model, 1e-2, 0.1, (0.9, 0.99))
    steps = list(fit(model, lambda _: [batch], optimiser, lambda _: 1e-2, range(60), clip=1.0, precision=precision))
    assert steps[0].loss == pytest.approx(math.log(20), abs=0.3)
    assert steps[-1].loss < 0.5
    assert [s.step for s in steps] == list(range(1, 61))
    assert {s.tokens for s in steps} == {64}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_one_sentence_and_never_reaches_the_weights(bad: float) -> None:
    model = fresh()
    optimiser = adamw(model, 1e-2, 0.1, (0.9, 0.99))
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[0, 0] = bad
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UserError, match="step 1 has loss"):
        list(fit(model, lambda _: [windows(2)], optimiser, lambda _: 1e-2, range(3), clip=1.0, precision="fp32"))
    for p, b in zip(model.parameters(), before):
        assert torch.equal(p.detach().nan_to_num(7), b.nan_to_num(7))
