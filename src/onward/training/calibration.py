"""Options that a run leaves open are fixed once, by timing, before it starts."""

import statistics
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import torch

from onward.data.tokens import Tokens
from onward.data.windows import Windows
from onward.model.decoder import Decoder
from onward.model.experts import BACKENDS
from onward.timing import fastest
from onward.training.build import build_trainer, choose_backend, open_experts
from onward.training.config import RunConfig, seconds
from onward.training.trainer import StepPlan, Trainer
from onward.training.validation import validate

TRIAL_SECONDS = 2.0  # of steps that are timed


def calibrated(config: RunConfig, model: Decoder, windows: Windows, validation: Tokens | None) -> RunConfig:
    """The configuration with precision, backend of experts and number of steps fixed. Steps are timed on copies of the
    model, which stays as it is."""
    began = perf_counter()
    trial = lambda config: build_trainer(config, deepcopy(model))
    config = fastest_options(config, trial(config), windows)
    if config.time:
        budget = seconds(config.time)
        step, validations = durations(config, trial(config), windows, validation, min(TRIAL_SECONDS, budget / 20))
        left = max(budget / 2, budget - (perf_counter() - began) - validations)
        config = replace(config, time="", steps=max(1, int(0.95 * left / step)))  # saves and samples take time too
    return config


def fastest_options(config: RunConfig, trainer: Trainer, windows: Windows) -> RunConfig:
    """The configuration with precision and backend of experts fixed, and epochs as steps."""
    precisions = precisions_of(trainer.model.device) if config.precision == "auto" else [config.precision]
    backends = list(BACKENDS) if config.experts == "auto" and open_experts(trainer.model) else [config.experts]
    chosen: dict[str, Any] = {"precision": precisions[0], "experts": backends[0]}
    if len(precisions) * len(backends) > 1:
        plan = StepPlan([windows.read(range(config.batch_size)).to(trainer.model.device)])
        trials = {f"{p} {b}": partial(one_step, trainer, plan, p, b) for p, b in product(precisions, backends)}
        chosen = dict(zip(chosen, fastest(trials, rounds=3).split()))
    if config.epochs:
        per_step = config.batch_size * config.accumulation
        chosen |= {"epochs": 0.0, "steps": max(1, round(config.epochs * len(windows) / per_step))}
    return replace(config, **chosen)


def precisions_of(device: torch.device) -> list[str]:
    """fp32, and bf16 or fp16 if the device computes matrix products in it."""
    if device.type == "cuda":
        return ["fp32", "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"]
    hardware = (getattr(torch.cpu, f"_is_{name}_supported", bool) for name in ("avx512_bf16", "amx_tile"))
    return ["fp32", "bf16"] if device.type == "cpu" and any(has() for has in hardware) else ["fp32"]


def one_step(trainer: Trainer, plan: StepPlan, precision: str, backend: str) -> None:
    """A step of one batch with a precision and a backend of experts."""
    choose_backend(trainer.model, backend)
    trainer.config = replace(trainer.config, precision=precision)
    trainer.train_step(plan)


def durations(
    config: RunConfig, trainer: Trainer, windows: Windows, validation: Tokens | None, long_enough: float
) -> tuple[float, float]:
    """Seconds per step, and seconds of all validations of a run: twenty during the run, and of the whole text at its
    end. Steps are timed until they took `long_enough` seconds together."""
    taken: list[float] = []
    start = perf_counter()
    for _ in trainer.train(first_plans(config, trainer, windows)):
        taken.append(perf_counter() - start)
        if sum(taken) > long_enough and len(taken) > 3:
            break
        start = perf_counter()
    step = statistics.median(taken[1:])
    if validation is None:
        return step, 0.0
    start = perf_counter()
    count = validate(trainer, validation, config).tokens
    once = perf_counter() - start
    return step, 20 * once + once * len(validation) / count


def first_plans(config: RunConfig, trainer: Trainer, windows: Windows) -> Iterator[StepPlan]:
    """The first thousand steps of a run."""
    size, device = config.batch_size, trainer.model.device
    for first in range(0, 1_000 * size * config.accumulation, size * config.accumulation):
        firsts = range(first, first + size * config.accumulation, size)
        yield StepPlan([windows.read(range(i, i + size)).to(device) for i in firsts])
