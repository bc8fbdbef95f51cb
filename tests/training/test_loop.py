"""The loop."""

import math
from dataclasses import replace

import pytest
import torch

from onward.data.windows import IGNORE_INDEX, Batch
from onward.model.config import DecoderConfig
from onward.model.decoder import Decoder
from onward.training.health import Spikes
from onward.training.loop import StepConfig, fit, mean_loss
from onward.training.loss import loss_sum
from onward.training.optimizer import optimizers

CONFIG = DecoderConfig(vocab_size=20, d_model=32, n_layers=2, n_heads=4, context_length=16)


def fresh() -> Decoder:
    torch.manual_seed(0)
    return Decoder(CONFIG)


def adamw(model: Decoder) -> list[torch.optim.Optimizer]:
    return optimizers(model, "adamw", 1e-2, 0.1, (0.9, 0.99))


def windows(count: int, length: int = 16) -> Batch:
    ids = torch.randint(20, (count, length + 1), generator=torch.Generator().manual_seed(1))
    return Batch(ids[:, :-1].clone(), ids[:, 1:].clone())


def gradients(parts: list[Batch]) -> list[torch.Tensor]:
    """What one step of `fit` gave to the optimizer."""
    model, seen = fresh(), []

    class Watch(torch.optim.SGD):
        def step(self, *_: object) -> None:
            seen.extend(p.grad.clone() for p in model.parameters())

    (step,) = fit(model, [(0, parts)], [Watch(model.parameters(), lr=0.1)], lambda _: 0.1)
    assert step.loss == pytest.approx(mean_loss(model, parts)[0], rel=1e-5)
    return seen


@pytest.mark.parametrize("sizes", [[4, 4], [1, 7], [2, 2, 2, 2], [1] * 8])
def test_accumulation_equals_the_whole_batch(sizes: list[int]) -> None:
    whole = windows(8)
    whole.targets[3, 5:] = IGNORE_INDEX  # so that a mean of means would differ
    parts = [Batch(*pair) for pair in zip(whole.tokens.split(sizes), whole.targets.split(sizes))]
    for one, many in zip(gradients([whole]), gradients(parts)):
        torch.testing.assert_close(many, one, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_over_all_targets() -> None:
    model, batch = fresh(), windows(3)
    batch.targets[0, :9] = IGNORE_INDEX
    logits = model(batch.tokens).detach().double()
    expected = [
        math.log(sum(math.exp(z) for z in logits[b, t].tolist())) - float(logits[b, t, batch.targets[b, t]])
        for b in range(3)
        for t in range(16)
        if batch.targets[b, t] != IGNORE_INDEX
    ]
    loss, count = mean_loss(model, [Batch(*pair) for pair in zip(batch.tokens.split(2), batch.targets.split(2))])
    assert count == len(expected) == 39
    assert loss == pytest.approx(math.fsum(expected) / 39, rel=1e-6)
    assert loss_sum(model, batch)[0].item() == pytest.approx(math.fsum(expected), rel=1e-6)


def test_clipping_bounds_the_gradient_and_reports_the_norm_before() -> None:
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    (step,) = fit(model, [(0, [windows(4)])], [optimizer], lambda _: 1.0, StepConfig(clip=1e-3))
    moved = math.sqrt(sum(float((p - b).detach().square().sum()) for p, b in zip(model.parameters(), before)))
    assert step.grad_norm > 1e-2
    assert moved == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loss_falls_on_what_is_seen_again_and_again(precision: str) -> None:
    model, batch = fresh(), windows(4)
    method = StepConfig(clip=1.0, precision=precision)
    steps = list(fit(model, ((i, [batch]) for i in range(60)), adamw(model), lambda _: 1e-2, method))
    assert steps[0].loss == pytest.approx(math.log(20), abs=0.3)
    assert steps[-1].loss < 0.5
    assert [s.step for s in steps] == list(range(1, 61))
    assert {s.tokens for s in steps} == {64}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_judged_to_be_trouble_leaves_weights_and_optimizer_as_they_were(bad: float) -> None:
    model = fresh()
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[0, 0] = bad
    before = [p.detach().clone() for p in model.parameters()]
    optimizers, method = adamw(model), StepConfig(check_step=Spikes(8.0).check_step)
    (step,) = fit(model, [(0, [windows(2)])], optimizers, lambda _: 1e-2, method)
    assert "loss is" in step.failure
    assert not any(optimizer.state for optimizer in optimizers)
    for p, b in zip(model.parameters(), before):
        assert p.grad is None
        assert torch.equal(p.detach().nan_to_num(7), b.nan_to_num(7))


def test_fp16_leaves_out_a_step_whose_gradient_overflows_and_scales_less() -> None:
    model, method = fresh(), StepConfig(precision="fp16", check_step=Spikes(8.0).check_step)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = model.embed.weight.detach().clone()
    (step,) = fit(model, [(0, [windows(2)])], adamw(model), lambda _: 1e-2, method, scaler)
    assert not step.failure
    assert torch.equal(model.embed.weight, before)
    assert scaler.get_scale() < 2.0**40


def test_dropout_is_a_function_of_the_windows_seed() -> None:
    torch.manual_seed(0)
    model = Decoder(replace(CONFIG, dropout=0.5))
    losses = []
    for state, seed in (1, 7), (2, 7), (1, 8):
        torch.manual_seed(state)
        (step,) = fit(model, [(0, [replace(windows(4), seed=seed)])], [], lambda _: 0.0)
        losses.append(step.loss)
        model.zero_grad()
    assert losses[0] == losses[1] != losses[2]


def test_fp16_gradients_that_are_never_finite_are_trouble() -> None:
    model, method = fresh(), StepConfig(precision="fp16", check_step=Spikes(8.0).check_step)
    model.blocks[0].mlp.down.weight.register_hook(lambda gradient: gradient * float("nan"))
    parts = ((i, [windows(2)]) for i in range(40))
    steps = list(fit(model, parts, adamw(model), lambda _: 1e-3, method))
    assert not steps[0].failure
    assert "gradient is not finite" in steps[-1].failure
