"""What a run leaves open is fixed once, by timing, and then written into its configuration."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from onward.model.config import at
from onward.model.decoder import Decoder
from onward.model.experts import BACKENDS, ExpertsModule
from onward.timing import fastest
from onward.training.config import RunConfig, seconds
from onward.training.loop import fit

if TYPE_CHECKING:
    from onward.training.run import Run

TRIAL_SECONDS = 2.0  # of steps, to tell how long one takes


def calibrated(config: RunConfig, trial: Callable[[RunConfig], Run]) -> RunConfig:
    """The configuration with precision, way of experts and number of steps fixed.

    `trial` makes a run to be timed and thrown away.
    """
    began = perf_counter()
    config = fastest_ways(trial(config))
    if config.time:
        budget = seconds(config.time)
        step, validations = durations(trial(config), min(TRIAL_SECONDS, budget / 20))
        left = max(budget / 2, budget - (perf_counter() - began) - validations)
        config = replace(config, time="", steps=max(1, int(0.95 * left / step)))  # saves and samples take time too
    return config


def fastest_ways(run: Run) -> RunConfig:
    """The run's configuration with its precision and the way of its experts fixed, and its epochs as steps."""
    config = run.config
    precisions = precisions_of(run.device) if config.precision == "auto" else [config.precision]
    ways = list(BACKENDS) if config.experts == "auto" and open_experts(run.model) else [config.experts]
    chosen: dict[str, Any] = {"precision": precisions[0], "experts": ways[0]}
    if len(precisions) * len(ways) > 1:
        trials = {f"{p} {way}": partial(one_step, run, p, way) for p, way in product(precisions, ways)}
        chosen = dict(zip(chosen, fastest(trials, rounds=3).split()))
    if config.epochs:
        per_step = config.batch_size * config.accumulation
        chosen |= {"epochs": 0.0, "steps": max(1, round(config.epochs * len(run.windows) / per_step))}
    return replace(config, **chosen)


def precisions_of(device: torch.device) -> list[str]:
    """fp32, and the one of bf16 and fp16 that the device computes products in, if any."""
    if device.type == "cuda":
        return ["fp32", "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"]
    hardware = (getattr(torch.cpu, f"_is_{name}_supported", bool) for name in ("avx512_bf16", "amx_tile"))
    return ["fp32", "bf16"] if device.type == "cpu" and any(has() for has in hardware) else ["fp32"]


def open_experts(model: Decoder) -> list[ExpertsModule]:
    """The mixtures of experts whose part leaves open how they are computed."""
    mlps = ((getattr(block, "mlp", None), at(model.config.mlp, layer)) for layer, block in enumerate(model.blocks))
    return [m for m, part in mlps if isinstance(m, ExpertsModule) and getattr(part, "backend", "") == "auto"]


def choose_experts(model: Decoder, way: Any) -> None:
    """Have these experts computed in that way."""
    for module in open_experts(model):
        module.part = replace(module.part, backend=way)


def one_step(run: Run, precision: str, way: str) -> None:
    """A step of one batch."""
    choose_experts(run.model, way)
    first = [(0, run.batches(range(run.config.batch_size)))]
    list(fit(run.model, first, run.optimizers, run.rate_at, replace(run.step_config, precision=precision), run.scaler))


def durations(run: Run, long_enough: float) -> tuple[float, float]:
    """Seconds per step, and for all validations of a run: twenty in its course, and the whole text at its end."""
    c, taken = run.config, []
    size = c.batch_size * c.accumulation
    source = ((step, run.batches(range(step * size, (step + 1) * size))) for step in range(1_000))
    start = perf_counter()
    for _ in fit(run.model, source, run.optimizers, run.rate_at, run.step_config, run.scaler):
        taken.append(perf_counter() - start)
        if sum(taken) > long_enough and len(taken) > 3:
            break
        start = perf_counter()
    start = perf_counter()
    seen = sum(validation.tokens for validation in run.validate())
    once = perf_counter() - start
    whole = once * len(run.inputs.validation) / seen if run.inputs.validation is not None else 0.0
    return statistics.median(taken[1:]), 20 * once + whole
