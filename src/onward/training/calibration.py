"""Options that a run leaves open are fixed once, by timing, before it starts."""

import statistics
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from onward.checkpoint.training import Saver
from onward.data.tokens import Tokens
from onward.data.windows import Windows
from onward.files import PART
from onward.model.decoder import Decoder
from onward.model.experts import BACKENDS
from onward.text.tokenizer import Tokenizer
from onward.timing import fastest
from onward.training.build import build_trainer, choose_backend, open_experts
from onward.training.config import RunConfig, seconds
from onward.training.plans import Planner
from onward.training.processes import Processes
from onward.training.trainer import StepPlan, Trainer
from onward.training.validation import validate

Sampler = Callable[[Decoder, Tokenizer], object]  # does what the caller of a run will do at each validation

TRIAL_SECONDS = 2.0  # of steps that are timed
SLACK = 0.95  # share of the time that is planned, as machines are not equally fast all the time


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of a run take."""

    step: float
    validation: float = 0.0  # of a part of the validation text, with the save and the sample that come with it
    evaluation: float = 0.0  # of the whole validation text, once after the last step


def calibrated(
    config: RunConfig,
    model: Decoder,
    tokenizer: Tokenizer,
    windows: Windows,
    validation: Tokens | None,
    sample: Sampler = lambda model, tokenizer: None,
) -> RunConfig:
    """The configuration with precision, backend of experts and number of steps fixed. Steps, a validation, a save and a
    call of `sample`, which comes with each validation, are timed on copies of the model, which stays as it is."""
    began = perf_counter()
    trial = lambda config: build_trainer(config, deepcopy(model))
    config = fastest_options(config, trial(config), windows)
    if config.time:
        budget = seconds(config.time)
        long_enough = min(TRIAL_SECONDS, budget / 20)
        costs = measured_costs(config, trial(config), tokenizer, windows, validation, sample, long_enough)
        config = fitted(config, costs, budget, perf_counter() - began)
    return config


def fitted(config: RunConfig, costs: Costs, budget: float, spent: float) -> RunConfig:
    """The configuration with as many steps as fit into a budget of seconds, of which `spent` are gone.

    Validations at the interval that was asked for, or else twenty of them, but at most a quarter of the time. A quarter
    of the budget is for training even where evaluating the whole validation text takes longer than the rest.
    """
    left = SLACK * max(budget / 4, budget - spent - costs.evaluation) - costs.validation  # the sample before step 1
    if every := config.validate_every:  # the last step is validated too
        steps = (left - costs.validation) / (costs.step + costs.validation / every)
        return replace(config, time="", steps=max(1, int(steps)))
    count = 20
    if costs.validation:
        count = max(1, min(count, int(left / 4 / costs.validation)))
    steps = max(1, int((left - count * costs.validation) / costs.step))
    return replace(config, time="", steps=steps, validate_every=0 if count == 20 else -(-steps // count))


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


def measured_costs(
    config: RunConfig,
    trainer: Trainer,
    tokenizer: Tokenizer,
    windows: Windows,
    validation: Tokens | None,
    sample: Sampler,
    long_enough: float,
    clock: Callable[[], float] = perf_counter,
) -> Costs:
    """The costs of a run by a clock in seconds. Steps are timed until they took `long_enough` seconds together."""
    taken: list[float] = []
    planner = Planner(replace(config, time="", steps=1_000), windows, trainer.model.device, Processes())
    with closing(planner.plans(0, 0)) as plans:
        start = clock()
        for _ in trainer.train(plans):
            taken.append(clock() - start)
            if sum(taken) > long_enough and len(taken) > 3:
                break
            start = clock()
    step = statistics.median(taken[1:])
    start = clock()
    save_once(trainer, Path(config.out))
    save, start = clock() - start, clock()
    if validation is None:
        return Costs(step, save)
    count = validate(trainer, tokenizer, validation, config).tokens
    once, start = clock() - start, clock()
    sample(trainer.model, tokenizer)
    return Costs(step, save + once + clock() - start, once * len(validation) / count)


def save_once(trainer: Trainer, folder: Path) -> None:
    """Write a save beside those of a run, and remove it. A full disk is reported when the run saves."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".trial.", suffix=PART, dir=folder) as trial:
        saver = Saver(Path(trial), keep=1)
        saver.save(trainer.model, trainer.state_dict(), {})
        saver.finish()
