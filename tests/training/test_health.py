"""The signs of a failing run, and the measurements of its layers."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onward import (
    AttentionOnly,
    Batch,
    Decoder,
    DecoderConfig,
    Experts,
    Gated,
    LogScale,
    NoPosition,
    Plain,
    PowerScale,
    SelfAttention,
    UserError,
)
from onward.families.gpt_oss import ClampedExperts
from onward.model import ExpertsModule, GatedFeedForwardModule, PlainFeedForwardModule
from onward.model.attention import Attend
from onward.model.reference import attention_weights
from onward.training import CrossEntropy, Spikes
from onward.training.step.health import matrices, update_ratio
from onward.training.step.layers import DEAD, measure
from onward.transforms import compile_blocks

from support.decoders import DECODERS, config, decoder, token_ids
from support.devices import device

LIMIT = 8.0  # default of RunConfig.spike
every_decoder = pytest.mark.parametrize("name", DECODERS)


def falling(random: np.random.Generator, steps: int = 3000, first: float = 10.4, last: float = 3.0) -> np.ndarray:
    """A loss curve that falls by a power law from the loss of a uniform guess."""
    return last + (first - last) * (1 + np.arange(steps) / 20) ** -0.5


def mixed(random: np.random.Generator, windows: int, hard: float, steps: int = 3000) -> np.ndarray:
    """The losses of batches of easy windows and a share `hard` of hard ones, with random variation."""
    difficulty = np.where(random.random((steps, windows)) < hard, 2.0, 0.7) * random.lognormal(
        0, 0.15, (steps, windows)
    )
    return falling(random) * difficulty.mean(1)


def bump(random: np.random.Generator) -> np.ndarray:
    """A loss curve that rises again while the learning rate warms up."""
    return falling(random) + 2.5 * np.exp(-(((np.arange(3000) - 150) / 40) ** 2)) + random.normal(0, 0.05, 3000)


HEALTHY = {
    "falling": lambda random: falling(random) + random.normal(0, 0.03, 3000),
    "hardly any noise": lambda random: falling(random) + random.normal(0, 1e-4, 3000),
    "much noise": lambda random: falling(random) * random.lognormal(0, 0.12, 3000),
    "easy and hard windows, one in a batch": lambda random: mixed(random, 1, 0.2),
    "easy and hard windows, eight in a batch": lambda random: mixed(random, 8, 0.1),
    "hard windows seldom": lambda random: mixed(random, 32, 0.02),
    "a bump in the warm-up": bump,
    "another source at once": lambda random: falling(random) + 0.8 * (np.arange(3000) > 1500),
    "heavy tails": lambda random: falling(random) + 0.05 * random.standard_t(4, 3000),
    "learned by heart": lambda random: falling(random, first=4, last=0.0) + np.abs(random.normal(0, 0.05, 3000)),
    "constant": lambda random: np.full(3000, 2.0),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_curves_have_no_spikes(name: str, seed: int) -> None:
    spikes, told = Spikes(LIMIT), []
    for loss in HEALTHY[name](np.random.default_rng(seed)).tolist():
        told.append(spikes.check_step(loss, 1.0))
        spikes.note(loss)
    assert [reason for reason in told if reason] == []


@pytest.mark.parametrize("name", HEALTHY)
def test_a_jump_of_the_loss_is_caught_wherever_it_comes(name: str) -> None:
    curve = HEALTHY[name](np.random.default_rng(0)).tolist()
    spikes, caught = Spikes(LIMIT), 0
    for step, loss in enumerate(curve):
        if step > 500 and step % 50 == 0:
            jump = 4 * max(curve[step - 64 : step]) + 1
            caught += (
                spikes.check_step(jump, 1.0)
                == f"the loss {jump:.2f} is far above {median(curve, step):.2f}, the median of recent steps"
            )
        spikes.note(loss)
    assert caught == 49


def median(curve: list[float], step: int) -> float:
    return float(np.median(curve[step - 64 : step]))


def test_a_spike_of_the_usual_size_is_caught() -> None:
    random, spikes = np.random.default_rng(0), Spikes(LIMIT)
    for loss in falling(random) + random.normal(0, 0.05, 3000):
        spikes.note(loss)
    usual = median(spikes.state, 64)
    assert not spikes.check_step(usual + 0.5, 1.0)
    assert spikes.check_step(usual + 1.5, 1.0)


@pytest.mark.parametrize("limit", [0.0, LIMIT])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_loss_or_gradient_that_is_not_finite_always_fails_a_step(bad: float, limit: float) -> None:
    assert Spikes(limit).check_step(bad, 1.0) == f"the loss is {bad}"
    assert Spikes(limit).check_step(3.0, bad) == "the gradient is not finite"
    assert Spikes(limit).check_step(3.0, 1.0) == ""


def test_without_a_limit_no_loss_is_too_high() -> None:
    spikes = Spikes(0.0)
    spikes.state = [1.0] * 64
    assert spikes.check_step(1e9, 1.0) == ""
    spikes.limit = LIMIT
    assert spikes.check_step(1e9, 1.0)


def test_spikes_continue_exactly_from_their_state() -> None:
    curve = mixed(np.random.default_rng(1), 4, 0.1)[:300].tolist()
    spikes = Spikes(LIMIT)
    for step, loss in enumerate(curve):
        known = list(spikes.state)
        told = [spikes.check_step(x, 1.0) for x in (loss, loss * 3, loss + 1, math.nan)]
        assert spikes.state == known
        restarted = Spikes(LIMIT)
        restarted.state = known
        assert [restarted.check_step(x, 1.0) for x in (loss, loss * 3, loss + 1, math.nan)] == told
        spikes.note(loss)
        restarted.note(loss)
        assert restarted.state == spikes.state == curve[: step + 1][-64:]


# ---------------------------------------------------------------- measured


def batch(c: DecoderConfig, rows: int = 3) -> Batch:
    ids = token_ids(c, rows, c.context_length + 1)
    return Batch(ids[:, :-1], ids[:, 1:])


def watched(model: Decoder, tokens: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs and outputs of each module by name, recorded by the test's own hooks."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def note(name: str, given: tuple[Tensor, ...], output: Tensor) -> None:
        inputs[name], outputs[name] = given[0], output

    hooks = [
        m.register_forward_hook(lambda _, given, output, name=name: note(name, given, output))
        for name, m in model.named_modules()
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return inputs, outputs


def dead_units(mlp: Any, name: str, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> float:
    """The share of dead units, computed by the formulas of the parts, unit by unit and token by token."""

    def peaks(module: nn.Module, x: Tensor) -> list[float]:
        units = (
            module.act(module.gate(x)) * module.up(x)
            if isinstance(module, GatedFeedForwardModule)
            else module.act(module.up(x))
        )
        return units.abs().flatten(0, -2).max(0).values.tolist()

    if isinstance(mlp, PlainFeedForwardModule):
        found = peaks(mlp, inputs[name])
    else:
        assert isinstance(mlp, ExpertsModule)
        tokens, (_, chosen) = inputs[f"{name}.router"], outputs[f"{name}.router"]
        found = []
        if mlp.part.d_latent:
            tokens = tokens @ mlp.latent_in.weight.T
        for expert in range(mlp.part.count):
            visitors = [t for t, visits in zip(tokens, chosen.tolist()) if expert in visits]
            answers = []
            for t in visitors:
                given = [getattr(mlp, inner)[expert] @ t for inner in mlp.inner]
                if mlp.part.bias:
                    given = [x + getattr(mlp, f"{inner}_bias")[expert] for x, inner in zip(given, mlp.inner)]
                answers.append(mlp.combine(*given).abs())
            found += torch.stack(answers).max(0).values.tolist() if answers else []
        if mlp.shared is not None:
            found += peaks(mlp.shared, inputs[f"{name}.shared"])
    return sum(peak <= DEAD * max(found) for peak in found) / len(found)


@torch.no_grad()
def kill(model: Decoder, units: int) -> None:
    """Make the first units of every feed-forward and of the first expert dead."""
    for module in model.modules():
        if isinstance(module, PlainFeedForwardModule):
            first = getattr(module, "gate", module.up)
            for parameter in first.parameters():
                parameter[:units] = 0
        if isinstance(module, ExpertsModule):
            weight, bias = (getattr(module, f"{module.inner[0]}{end}") for end in ("", "_bias"))
            weight[0, :units] = 0
            if bias is not None:
                bias[0, :units] = 0
                weight[0, units] = 0  # active only through its bias


def mean_entropy(model: Decoder, attend: Any, given: Batch) -> float:
    """The entropy of the attention weights of a layer, computed by its definition, row by row."""
    calls: list[tuple[Any, ...]] = []
    hook = attend.register_forward_hook(lambda _, g, output: calls.append(g))
    model(given.tokens[:1])
    hook.remove()
    return sum(entropy_of_call(attend, q, k, view) for q, k, _, view in calls) / len(calls)


def entropy_of_call(attend: Any, q: Tensor, k: Tensor, view: Any) -> float:
    positions = view.mask.query_positions[..., None, None].double()
    match getattr(attend, "part", None):
        case LogScale(weight, original, offset):
            q = q * (1 + weight * (1 + ((positions + offset) / original).floor()).log())
        case PowerScale(exponent, original):
            q = q * (1 + (positions + 1) / original) ** exponent
    bias = None if view.mask.causal_only else view.mask.dense(q.dtype)
    weights = attention_weights(q, k, scale=attend.scale, softcap=attend.softcap, bias=bias, sinks=attend.sinks)
    entropies = []
    for row in weights[0].flatten(0, 1).tolist():
        shares = [*row, 1 - sum(row)] if attend.sinks is not None else row
        entropies.append(-sum(p * math.log(p) for p in shares if p > 0))
    return sum(entropies) / len(entropies)


@every_decoder
def test_measurements_follow_the_formulas_in_double_precision(name: str) -> None:
    c = DECODERS[name]
    model, given = decoder(c, torch.float64), batch(c)
    kill(model, 2)
    found = measure(model, given)
    inputs, outputs = watched(model, given.tokens)
    wanted = {}
    for layer, block in enumerate(model.blocks):
        attend: Any = getattr(getattr(block, "attn", None), "attend", None)
        if attend is not None:
            wanted[f"attention_entropy/{layer}"] = mean_entropy(model, attend, given)
        if hasattr(block, "mlp"):
            wanted[f"dead_units/{layer}"] = dead_units(block.mlp, f"blocks.{layer}.mlp", inputs, outputs)
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    if name != "xielu":  # units of xielu are never 0
        assert all(value > 0 for key, value in found.items() if "dead" in key)


@pytest.mark.parametrize("window", [0, 3])
def test_uniform_attention_has_the_entropy_of_a_uniform_choice(window: int) -> None:
    c = config(position=NoPosition(), attention=SelfAttention(window=window), context_length=200)
    model = decoder(c)
    block: Any
    for block in model.blocks:
        nn.init.zeros_(block.attn.q.weight)
    seen = [min(t + 1, window or 200) for t in range(128)]  # only the first 128 tokens are measured
    wanted = sum(map(math.log, seen)) / 128
    found = measure(model, batch(c))
    assert found["attention_entropy/0"] == pytest.approx(wanted, rel=1e-5)
    documents = replace(batch(c), positions=torch.arange(200).repeat(3, 1) % 5)
    short = [min(t % 5 + 1, window or 5) for t in range(128)]
    assert measure(model, documents)["attention_entropy/1"] == pytest.approx(sum(map(math.log, short)) / 128, rel=1e-5)


def test_reading_from_one_has_no_entropy() -> None:
    model = decoder(config(attention=SelfAttention(scale=1e4)))
    assert measure(model, batch(model.config))["attention_entropy/0"] < 1e-2


UNITS = {
    "plain": Plain(bias=True),
    "gated": Gated(bias=True),
    "experts": Experts(count=3, top_k=3, bias=True, backend="loop"),
    "experts in one product": Experts(count=3, top_k=3, backend="grouped"),
    "GPT-OSS": ClampedExperts(count=3, top_k=3, bias=True, backend="loop"),
}


@pytest.mark.parametrize("name", UNITS)
def test_units_set_dead_are_counted(name: str) -> None:
    model = decoder(config(mlp=UNITS[name], d_ff=40))
    given = batch(model.config)
    assert measure(model, given)["dead_units/1"] == 0
    kill(model, 6)
    assert measure(model, given)["dead_units/1"] == pytest.approx(6 / (40 if name in ("plain", "gated") else 120))


def test_blocks_without_a_feed_forward_have_no_units() -> None:
    found = measure(decoder(config(block=AttentionOnly())), batch(config()))
    assert set(found) == {"attention_entropy/0", "attention_entropy/1"}


def steps(model: Decoder, given: Batch, looking: bool) -> Iterator[Tensor]:
    """Yield every weight and gradient of some training steps with dropout; if `looking`, measure the layers before and
    after each step."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        if looking:
            measure(model, given)
        CrossEntropy()(model, given)[0].backward()
        if looking:
            measure(model, given)
        yield from [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    yield from model.state_dict().values()
    yield torch.get_rng_state()


@every_decoder
def test_measuring_changes_no_bit_of_training_and_removes_its_hooks(name: str) -> None:
    c = replace(DECODERS[name], dropout=0.3)
    found = []
    for looking in False, True:
        model = decoder(c).train()
        found.append(list(steps(model, batch(c), looking)))
        assert all(module.training for module in model.modules())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for plain, looked in zip(*found, strict=True):
        assert torch.equal(plain, looked)


@pytest.mark.skipif(device().type != "cpu", reason="an id outside of the vocabulary is an error of the CPU's kernel")
def test_failed_measurement_leaves_no_hooks() -> None:
    model = decoder(config())
    with pytest.raises(UserError, match="out of range"):
        measure(model, Batch(torch.full((1, 4), 99), torch.zeros(1, 4, dtype=torch.long)))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.long
def test_compiled_blocks_are_measured_too() -> None:
    model = decoder(DECODERS["gpt-oss"])
    given = batch(model.config)
    wanted = measure(model, given)
    compile_blocks(model, backend="eager")
    model(given.tokens)
    assert measure(model, given) == wanted
    assert not any(m._forward_hooks for m in model.modules() if isinstance(m, Attend))


def test_update_ratio_is_change_over_norm_of_trainable_matrices() -> None:
    model = decoder(config(mlp=Experts(backend="loop"), tied=True))
    model.blocks[0].attn.q.weight.requires_grad_(False)
    before = [m.clone() for m in matrices(model)]
    assert update_ratio(before, model) == 0
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.25) if p.requires_grad and p.ndim > 1 else p.add_(100)
    assert update_ratio(before, model) == pytest.approx(0.25, rel=1e-6)
    assert sum(m.numel() for m in before) == sum(p.numel() for p in model.parameters() if p.ndim > 1) - 16 * 16
