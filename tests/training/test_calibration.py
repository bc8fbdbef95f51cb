"""A run with a time limit, which includes validations, samples and saves."""

import shutil
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from onward import Decoder, Run, RunConfig, Step, StepPlan, Tokens, Trainer, Validation, Windows, train_tokenizer
from onward.base.timing import fastest
from onward.checkpoint.saves.folder import saves
from onward.checkpoint.saves.state import TrainerState
from onward.parallel.processes import Processes
from onward.training import optimizers
from onward.training.clock import calibration
from onward.training.clock.budget import Budget, Costs
from onward.training.clock.calibration import fitted, measured_costs
from onward.training.inputs.record import read_config
from onward.training.inputs.texts import Inputs
from onward.training.run.progress import expected_steps
from onward.training.step.plans import Planner

from support.decoders import LENGTH, decoder
from support.decoders import config as decoder_config
from support.runs import assert_same_run, config, metrics

COSTS = [
    Costs(0.01),
    Costs(0.01, 0.01),
    Costs(0.01, 0.5, 2.0),
    Costs(0.5, 0.1),
    Costs(0.2, 2.0, 20.0),
    Costs(1e-4, 1e-3),
]


@pytest.mark.parametrize("every", [0, 1, 5, 100])
@pytest.mark.parametrize("costs", COSTS)
def test_steps_validations_and_evaluation_fit_into_the_time(costs: Costs, every: int, tmp_path: Path) -> None:
    given = config(tmp_path, tmp_path, steps=0, time="60s", validate_every=every, schedule="cosine")
    run, costs = fitted(given, costs, 60.0, spent=3.0, tokens=1000)
    validations = 1 + -(-run.steps // run.validation_interval)
    total = 3.0 + run.steps * costs.step + validations * costs.validation + costs.end
    assert run.evaluation_tokens in (0, 150), "a part if all takes over a twentieth of the time"
    assert 40 < total <= 60
    assert run.time == ""
    assert every in (0, run.validate_every)


def test_validations_take_at_most_a_twentieth_unless_asked_for(tmp_path: Path) -> None:
    given = config(tmp_path, tmp_path, steps=0, time="10s", validate_every=0, schedule="cosine")
    run, _ = fitted(given, Costs(0.01, 0.5), 10.0, spent=0.0, tokens=1000)
    assert -(-run.steps // run.validation_interval) * 0.5 <= 0.5
    assert run.steps * 0.01 > 5


def simulated(
    costs: Costs, limit: float, slower_from: float = 1e9, factor: float = 1.0, stalled_step: int = 0
) -> tuple[float, int, int]:
    """Simulate a run with a time limit; return its end time, its number of steps, and the step at which this number was
    fixed. On the simulated clock, steps and validations take their `costs`, multiplied by `factor` from the time
    `slower_from` on, and `stalled_step` takes one second more."""
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds * (factor if now >= slower_from else 1.0)

    spend(3.0)
    run, costs_of_run = fitted(RunConfig(time=f"{limit}s"), costs, limit, spent=3.0, tokens=1000)
    budget = Budget(limit, costs_of_run, lambda: now, limit)
    step = steps = fixed_at = 0
    spend(2.0)  # time for checks of the model
    budget.begin_step()
    while not steps or step < steps:
        step += 1
        spend(costs.step + (step == stalled_step))
        budget.note_step()
        if not steps:
            steps = budget.last_step(step, run)
            fixed_at = step * bool(steps)
        due = step % run.validation_interval == 0 or step == steps
        if due and (not steps or step == steps or budget.affords_validation(steps - step)):
            with budget.validating():
                spend(costs.validation)
    spend(costs_of_run.end - (1 - budget.evaluated_share) * costs_of_run.evaluation)
    return now, steps, fixed_at


@pytest.mark.parametrize(("slower_from", "factor"), [(1e9, 1.0), (50.0, 2.0), (50.0, 0.5), (5.0, 3.0)])
@pytest.mark.parametrize("costs", [Costs(0.01), Costs(0.01, 0.5, 2.0), Costs(0.5, 0.1), Costs(0.2, 2.0, 20.0)])
def test_a_run_of_a_given_time_ends_on_time_however_slow_the_machine_becomes(
    costs: Costs, slower_from: float, factor: float
) -> None:
    now, steps, fixed_at = simulated(costs, 100.0, slower_from, factor)
    assert now == pytest.approx(100.0, rel=0.05)
    assert 0.2 < (steps - fixed_at) / steps < 0.6, "the decay has about the share of the steps that was asked for"


@pytest.mark.parametrize("costs", [Costs(0.01, 0.1, 0.5), Costs(0.002, 0.1, 2.0), Costs(0.1, 0.2, 1.0)])
def test_a_step_that_is_held_up_does_not_end_a_run_early(costs: Costs) -> None:
    now, steps, _ = simulated(costs, 14.0, stalled_step=20)
    assert now == pytest.approx(14.0, rel=0.05)
    assert steps > 0.8 * simulated(costs, 14.0)[1]


def test_a_validation_is_timed_with_its_sample_and_its_save(tmp_path: Path) -> None:
    seconds = 0.0

    def tick(more: float) -> None:
        nonlocal seconds
        seconds += more

    class Timed(Trainer):
        def train_step(self, plan: StepPlan) -> Step:
            tick(0.25)
            return super().train_step(plan)

        def averaged(self) -> AbstractContextManager[object]:
            tick(1)  # validation begins
            return super().averaged()

        def state_dict(self) -> TrainerState:
            tick(2)  # a save begins
            return super().state_dict()

    model, text = decoder(decoder_config()), Tokens.of(np.arange(500, dtype=np.uint16) % 13)
    trainer = Timed(model, optimizers(model, "adamw", 1e-3, 0.1, (0.9, 0.99)), lambda step: 1e-3)
    windows, given = Windows([text], LENGTH, seed=0), config(tmp_path, tmp_path / "run")
    tokenizer = train_tokenizer("char", ["abcdefghijklm"])
    inputs = Inputs((text,), text, 0)
    samples = iter([100, 4])  # the first call of a process compiles kernels; its cost must not be used
    planner = Planner(given, windows, model.device, Processes())
    costs = measured_costs(
        given, trainer, tokenizer, planner, inputs, lambda *_: tick(next(samples)), 200.0, lambda: seconds
    )
    assert (trainer.step, costs.step, costs.validation) == pytest.approx((9, 0.25, 7.0), rel=1e-3)
    assert list((tmp_path / "run").iterdir()) == []


def costs_by_simulation(limit: float, folder: Path) -> tuple[Costs, float]:
    """The costs measured for a run with a time limit if each token takes 0.1 ms, and the duration of the
    measurement."""
    now = 0.0

    def spend(module: object, arguments: tuple[torch.Tensor, ...]) -> None:
        nonlocal now
        now += 1e-4 * arguments[0].numel()

    model, text = decoder(decoder_config()), Tokens.of(np.arange(40_000, dtype=np.uint16) % 13)
    model.embed.register_forward_pre_hook(spend)
    trainer = Trainer(model, optimizers(model, "adamw", 1e-3, 0.1, (0.9, 0.99)), lambda step: 1e-3)
    given, inputs = config(folder, folder, batch_size=40), Inputs((text,), text, 0)
    planner = Planner(given, Windows([text], LENGTH, seed=0), model.device, Processes())
    tokenizer = train_tokenizer("char", ["abcdefghijklm"])
    costs = measured_costs(given, trainer, tokenizer, planner, inputs, lambda *_: None, limit, lambda: now)
    return costs, now


@pytest.mark.long
def test_costs_of_a_short_run_are_measured_in_an_eighth_of_its_time(tmp_path: Path) -> None:
    of_long, _ = costs_by_simulation(1000.0, tmp_path / "long")
    for limit in (10.0, 30.0):
        costs, spent = costs_by_simulation(limit, tmp_path / str(limit))
        assert spent < limit / 8
        assert (costs.step, costs.validation, costs.end) == pytest.approx(
            (of_long.step, of_long.validation, of_long.end), rel=0.25
        )


def test_options_are_timed_once_where_time_is_short() -> None:
    now, calls = 0.0, list[str]()

    def call(name: str, seconds: float) -> None:
        nonlocal now
        now += seconds
        calls.append(name)

    trials = {"slow": partial(call, "slow", 2.0), "fast": partial(call, "fast", 1.0)}
    assert fastest(trials, 3, limit=1.0, clock=lambda: now) == "fast"
    assert len(calls) == 4, "once to warm up, and once"
    assert fastest(trials, 3, clock=lambda: now) == "fast"
    assert len(calls) == 4 + 8


@pytest.mark.parametrize(("time", "compared"), [("30s", []), ("60s", ["fp32 auto", "bf16 auto"])])
def test_precisions_are_compared_only_where_compilation_is_short(
    time: str, compared: list[str], story_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = list[str]()

    def first(trials: dict[str, object], **_: object) -> str:
        timed.extend(trials)
        return "fp32 auto"

    monkeypatch.setattr(calibration, "precisions_of", lambda device: ["fp32", "bf16"])
    monkeypatch.setattr(calibration, "fastest", first)
    given = config(story_file, tmp_path / "run", steps=0, time=time, precision="auto")
    assert Run.start(given).config.precision == ("fp32" if compared else "bf16")
    assert timed == compared


def test_a_run_of_a_given_time_samples_to_know_how_long_it_takes(story_file: Path, tmp_path: Path) -> None:
    sampled: list[Decoder] = []
    run = Run.start(
        config(story_file, tmp_path / "run", steps=0, time="2s"), sample=lambda model, _: sampled.append(model)
    )
    assert len(sampled) == 2, "the first call, which may compile kernels, is not timed"
    assert run.model not in sampled
    assert not list(run.folder.glob(".trial*"))


@pytest.mark.parametrize(
    ("step", "validation", "validated"),
    [
        pytest.param(1.0, 2.0, [2, 4, 6, 8, 10], id="as planned"),
        pytest.param(3.0, 2.0, [10], id="slow steps"),
        pytest.param(1.0, 6.0, [2, 10], id="slow validations"),
    ],
)
def test_validations_before_the_last_are_left_out_where_time_is_short(
    step: float, validation: float, validated: list[int], story_file: Path, tmp_path: Path
) -> None:
    now = 0.0
    run = Run.start(config(story_file, tmp_path / "run", steps=10, validate_every=2))
    run.budget = Budget(10 * 1.0 + 5 * 2.0 + 4.0, Costs(step, 2.0, 4.0), lambda: now)
    steps: list[int] = []
    for event in run.train():
        now += step if isinstance(event, Step) else validation  # time that the caller spends on the event
        steps += [event.step] if isinstance(event, Validation) else []
    assert steps == validated


def test_a_resumed_run_repeats_the_decay_that_the_clock_began(story_file: Path, tmp_path: Path) -> None:
    """The clock fixes the number of steps in the middle of a run; if the run is killed before or during the decay and
    resumed, it ends with the same result."""
    whole, now = tmp_path / "whole", 0.0
    run = Run.start(config(story_file, whole, steps=0, time="40s", validate_every=4, warmup=3, evaluation_tokens=64))
    run.budget = Budget(40.0, Costs(1.0, 2.0, 4.0), lambda: now, 40.0)
    fixed, copies = run.config, list[Path]()
    for event in run.train():
        now += 1.0 if isinstance(event, Step) else 2.0
        recorded = read_config(whole)
        if recorded.steps and not fixed.steps:
            fixed = recorded
            assert event.step == fixed.steps - fixed.decay + 1, "recorded before the first step of the decay"
        if isinstance(event, Validation) and fixed.steps and len(copies) < 2:
            run.saver.finish()
            copies.append(shutil.copytree(whole, tmp_path / f"killed-{event.step}"))
    assert now + 4.0 == pytest.approx(40.0, rel=0.05)
    assert (fixed.time, fixed.steps) == ("", run.step)
    rates = [row["learning_rate"] for row in metrics(whole) if "learning_rate" in row]
    stable = run.step - int(fixed.decay)
    assert rates[2:stable] == [7.5e-3] + [1e-2] * (stable - 3)
    assert rates[-1] == pytest.approx(0.05 * 1e-2)
    shutil.rmtree(copies[0] / "checkpoints" / saves(copies[0])[-1].name)  # the save before the decay is then the newest
    for copy in copies:
        resumed = Run.resume(copy)
        assert resumed.log.messages == []
        list(resumed.train())
        assert_same_run(whole, copy)


@pytest.mark.long
def test_a_run_that_is_resumed_before_its_decay_has_the_time_that_is_left(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=0, time="1h"))
    spent = run.progress.seconds
    assert 0 < spent < 60, "the time of the calibration"
    assert expected_steps(run) > 1000
    list(run.train(stop=lambda: run.step == 2))
    resumed = Run.resume(run.folder)
    assert resumed.budget is not None
    assert resumed.budget.costs == run.budget.costs
    assert resumed.budget.end - resumed.budget.clock() == pytest.approx(3600 - run.progress.seconds, abs=60)
    assert resumed.progress.seconds == run.progress.seconds > spent
    assert (resumed.ended, resumed.config.steps) == (False, 0)
