"""Chooses options that the user left open, once before a run starts, by timing."""

import math
import statistics
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, TypeVar

import torch

from onward.base.alone import ALONE, Alone
from onward.base.files import PART
from onward.base.timing import fastest
from onward.checkpoint.peft.bases import BaseModel
from onward.checkpoint.saves.saver import Saver
from onward.data.windows import TrainingWindows
from onward.model.adapters import adapter_names
from onward.model.decoder import Decoder
from onward.model.experts import BACKENDS
from onward.text.tokenizer import Tokenizer
from onward.training.clock.budget import Budget, Costs, time_left
from onward.training.config import RunConfig, seconds
from onward.training.inputs.texts import Inputs
from onward.training.step.build import build_trainer, choose_backend, open_experts
from onward.training.step.loss import CrossEntropy, Loss
from onward.training.step.plans import Planner
from onward.training.step.precision import Precision
from onward.training.step.schedule import ENDED_BY_CLOCK, extent
from onward.training.step.trainer import StepPlan, Trainer
from onward.training.step.validation import validate

T = TypeVar("T")
Sampler = Callable[[Decoder, Tokenizer], object]  # does the work of the run's caller at each validation

TRIAL_SECONDS, TRIAL_PART = 2.0, 40  # time limit of the timed steps: seconds, and 1/TRIAL_PART of the budget
FULL_MEASUREMENT = 60.0  # for shorter runs (in seconds), validation and evaluation are timed on less text
SLACK = 0.95  # share of the time to plan with if steps are fixed at the start, since a machine's speed varies
OPTIONAL = 20  # validations and the evaluation at the end each take at most 1/OPTIONAL of the time by default
REPORT = 0.4  # seconds for the report and the exit of the process
COMPILATION = 1.0  # maximum seconds to compile the kernels of a training step in another precision
TIMED_TOKENS = 4096  # maximum number of tokens of the validation text in the timed evaluation


def calibrated(
    config: RunConfig,
    model: Decoder,
    tokenizer: Tokenizer,
    inputs: Inputs,
    sample: Sampler = lambda model, tokenizer: None,
    processes: Alone = ALONE,
    loss: Loss | None = None,
    began: float | None = None,
) -> tuple[RunConfig, Budget | None]:
    """Return the configuration with its open options chosen by timing: precision, backend of experts, and steps in
    place of epochs. With a time limit, also return the Budget that keeps the limit during training (else None), and fix
    the warm-up and the validation interval; the number of steps is fixed now or during training, see `fitted`.

    The time limit starts at `began`, by default at this call. Steps, a validation, a save and a call of `sample`, which
    the caller makes at each validation, are timed on copies of the model.
    """
    if not (config.time or config.epochs or config.precision == "auto" or open_experts(model)):
        return config, None
    began = perf_counter() if began is None else began
    loss = loss or CrossEntropy.of(config)
    trial = lambda config: build_trainer(config, deepcopy(model), loss=loss)
    windows = inputs.windows(config, model.config.context_length)
    limit = seconds(config.time) if config.time else math.inf
    config = fastest_options(config, partial(trial, config), model, windows, limit / TRIAL_PART)
    loss.load_state({}, model.device)  # discard the loss state of the trial steps
    if not config.time:
        return config, None
    planner = Planner(config, windows, model.device, processes)
    costs = measured_costs(config, trial(config), tokenizer, planner, inputs, sample, limit)
    loss.load_state({}, model.device)
    config, costs = fitted(config, costs, limit, perf_counter() - began, len(inputs.validation or ()))
    return config, Budget.of(limit, perf_counter() - began, costs)


def fitted(config: RunConfig, costs: Costs, limit: float, spent: float, tokens: int) -> tuple[RunConfig, Costs]:
    """Fit a run into a time limit of `limit` seconds, of which `spent` have passed. Returns the configuration, and the
    measured `costs` with the time spent so far and the cost of the final evaluation as planned here. `tokens` is the
    length of the validation text.

    If the configuration does not set the validation interval, there are at most twenty validations, which together take
    at most about a twentieth of the time. The final evaluation uses at most as many tokens of the validation text as
    take a twentieth of the time, unless the number is given. The number of steps that fit determines the warm-up. With
    a schedule that has a stable phase, the number of steps is fixed later, from the time left during training; with any
    other it is fixed now, with a reserve of time.
    """
    given, by_clock = config.evaluation_tokens, config.schedule in ENDED_BY_CLOCK
    evaluated = given or tokens
    if not given and costs.end > limit / OPTIONAL:
        evaluated = max(2, int(tokens * limit / OPTIONAL / costs.end))
        config = replace(config, evaluation_tokens=evaluated)
    evaluation = costs.end * min(1.0, evaluated / max(1, tokens))
    shortened = 0.0 if given else evaluation
    costs = replace(costs, end=evaluation + REPORT, evaluation=shortened, start=spent)
    left = (1.0 if by_clock else SLACK) * time_left(limit, spent + costs.end) - costs.validation  # before step 1
    if every := config.validate_every:  # the last step is also validated
        steps = max(1, int((left - costs.validation) / (costs.step + costs.validation / every)))
    else:
        count = max(1, min(20, int(left / OPTIONAL / costs.validation))) if costs.validation else 20
        steps = max(1, int((left - count * costs.validation) / costs.step))
        every = -(-steps // count)
    config = replace(config, validate_every=every)
    if by_clock:
        return replace(config, warmup=extent(config.warmup, steps)), costs
    return replace(config, time="", steps=steps), costs


def fastest_options(
    config: RunConfig, trial: Callable[[], Trainer], model: Decoder, windows: TrainingWindows, limit: float
) -> RunConfig:
    """Return the configuration with the fastest precision and backend of experts, and with epochs converted to steps.
    If there is a choice, steps of the trainer that `trial` makes for a copy of `model`, on the first batch of
    `windows`, are timed for little more than `limit` seconds; if `limit` is too short to compile the kernels of another
    precision, the likely fastest precision is chosen."""
    precisions = precisions_of(model.device) if config.precision == "auto" else [config.precision]
    if limit < COMPILATION:
        precisions = precisions[-1:]
    backends = list(BACKENDS) if config.experts == "auto" and open_experts(model) else [config.experts]
    chosen: dict[str, Any] = {"precision": precisions[0], "experts": backends[0]}
    if len(precisions) * len(backends) > 1:
        trainer = trial()
        plan = StepPlan([windows.read(range(config.batch_size)).to(trainer.model.device)])
        trials = {f"{p} {b}": partial(one_step, trainer, plan, p, b) for p, b in product(precisions, backends)}
        chosen = dict(zip(chosen, fastest(trials, rounds=3, limit=limit).split()))
    if config.epochs:
        per_step = config.batch_size * config.accumulation
        chosen |= {"epochs": 0.0, "steps": max(1, round(config.epochs * len(windows) / per_step))}
    return replace(config, **chosen)


def precisions_of(device: torch.device) -> list[Precision]:
    """List the precisions to try on a device: fp32, and bf16 or fp16 if the hardware computes matrix products in it."""
    if device.type == "cuda":
        return ["fp32", "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"]
    hardware = (getattr(torch.cpu, f"_is_{name}_supported", bool) for name in ("avx512_bf16", "amx_tile"))
    return ["fp32", "bf16"] if device.type == "cpu" and any(has() for has in hardware) else ["fp32"]


def one_step(trainer: Trainer, plan: StepPlan, precision: Precision, backend: str) -> None:
    """Make one optimizer step on the batches of `plan` with a precision and a backend of experts, so that a caller can
    time it."""
    choose_backend(trainer.model, backend)
    trainer.config = replace(trainer.config, precision=precision)
    trainer.train_step(plan)


def measured_costs(
    config: RunConfig,
    trainer: Trainer,
    tokenizer: Tokenizer,
    planner: Planner,
    inputs: Inputs,
    sample: Sampler,
    limit: float,
    clock: Callable[[], float] = perf_counter,
) -> Costs:
    """Measure the seconds of a step, a validation (with its save and a call of `sample`) and the final evaluation of a
    run with a time limit of `limit` seconds. `planner` gives the batches, `inputs` the validation text; `clock` returns
    the current time in seconds."""
    taken: list[float] = []
    long_enough, part = min(TRIAL_SECONDS, limit / TRIAL_PART), min(1.0, limit / FULL_MEASUREMENT)
    with closing(planner.plans(0)) as plans:
        start = clock()
        for _ in trainer.train(plans):
            taken.append(clock() - start)
            if sum(taken) > long_enough and len(taken) > 2:
                break
            start = clock()
    step = statistics.median(taken[1:])
    start = clock()
    save_once(trainer, Path(config.out))
    save = clock() - start
    validation = inputs.validation_windows(config, trainer.model.config.context_length)
    if validation is None:
        return Costs(step, save)
    less = replace(config, validation_tokens=max(2, int(part * config.validation_tokens)))
    sets = inputs.validation_sets(config, trainer.model.config.context_length)
    timed: Callable[..., Any] = partial(warmed, limit=limit / OPTIONAL, clock=clock)
    measured, total = inputs.measure(trainer.loss), validation.num_tokens
    validated, once = timed(lambda: validate(trainer, tokenizer, validation, less, measured, sets))
    once *= max(1.0, min(config.validation_tokens, total) / max(1, validated.tokens))
    once += warmed(lambda: sample(trainer.model, tokenizer), math.inf, clock)[1]
    tokens = int(part * TIMED_TOKENS)
    figures, end = timed(lambda: inputs.evaluate(trainer.model, tokenizer, trainer.loss, tokens))
    return Costs(step, save + once, end * total / max(1, figures["tokens"]))


def warmed(call: Callable[[], T], limit: float, clock: Callable[[], float]) -> tuple[T, float]:
    """Call `call`, and a second time if the first took less than `limit` seconds, because the first call may compile
    kernels. Return the result of the last call, and the duration of that call in seconds, measured with `clock`."""
    start = clock()
    result, middle = call(), clock()
    if middle - start >= limit:
        return result, middle - start
    return call(), clock() - middle


def save_once(trainer: Trainer, folder: Path) -> None:
    """Write a save to a temporary folder inside the run folder `folder`, then remove it; the caller times this. A full
    disk is not an error here: the run reports it when it saves."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".trial.", suffix=PART, dir=folder) as trial:
        saver = Saver(Path(trial), keep=1, base=BaseModel("", "") if adapter_names(trainer.model) else None)
        saver.save(trainer.model, trainer.state_dict(), {})
        saver.finish()
