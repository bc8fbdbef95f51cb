"""A run of a given time: validations, samples and saves are part of it."""

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from onward.checkpoint.training import TrainerState
from onward.data.tokens import Tokens
from onward.data.windows import Windows
from onward.model.decoder import Decoder
from onward.text.tokenizer import train_tokenizer
from onward.training.budget import Budget, Costs
from onward.training.calibration import fitted, measured_costs
from onward.training.inputs import Inputs
from onward.training.optimizer import optimizers
from onward.training.plans import Planner
from onward.training.processes import Processes
from onward.training.run import Run
from onward.training.trainer import Step, StepPlan, Trainer
from onward.training.validation import Validation

from support.decoders import LENGTH, decoder
from support.decoders import config as decoder_config
from support.runs import config


@pytest.mark.parametrize("every", [0, 1, 5, 100])
@pytest.mark.parametrize(
    "costs",
    [Costs(0.01), Costs(0.01, 0.01), Costs(0.01, 0.5, 2.0), Costs(0.5, 0.1), Costs(0.2, 2.0, 20.0), Costs(1e-4, 1e-3)],
)
def test_steps_validations_and_evaluation_fit_into_the_time(costs: Costs, every: int, tmp_path: Path) -> None:
    given = config(tmp_path, tmp_path, steps=0, time="60s", validate_every=every)
    run, costs = fitted(given, costs, 60.0, spent=3.0, tokens=1000)
    validations = 1 + -(-run.steps // run.validation_interval)
    total = 3.0 + run.steps * costs.step + validations * costs.validation + costs.evaluation
    assert run.evaluation_tokens in (0, 750), "where the whole text takes more than a quarter of the time, a part"
    assert 40 < total <= 60
    assert run.time == ""
    assert every in (0, run.validate_every)


def test_validations_take_at_most_a_quarter_unless_asked_for(tmp_path: Path) -> None:
    given = config(tmp_path, tmp_path, steps=0, time="10s", validate_every=0)
    run, _ = fitted(given, Costs(0.01, 0.5), 10.0, spent=0.0, tokens=1000)
    assert -(-run.steps // run.validation_interval) * 0.5 <= 2.5
    assert run.steps * 0.01 > 5


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
            tick(2)  # as does a save
            return super().state_dict()

    model, text = decoder(decoder_config()), Tokens.of(np.arange(500, dtype=np.uint16) % 13)
    trainer = Timed(model, optimizers(model, "adamw", 1e-3, 0.1, (0.9, 0.99)), lambda step: 1e-3)
    windows, given = Windows([text], LENGTH, seed=0), config(tmp_path, tmp_path / "run")
    tokenizer = train_tokenizer("char", ["abcdefghijklm"])
    inputs = Inputs((text,), text, 0)
    samples = iter([100, 4])  # the first of a process, which compiles kernels, is not one that is paid again
    planner = Planner(given, windows, model.device, Processes())
    costs = measured_costs(
        given, trainer, tokenizer, planner, inputs, lambda *_: tick(next(samples)), 5.0, lambda: seconds
    )
    assert (trainer.step, costs.step, costs.validation) == (21, 0.25, 7.0)
    assert list((tmp_path / "run").iterdir()) == []


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
        now += step if isinstance(event, Step) else validation  # which the caller spends on it
        steps += [event.step] if isinstance(event, Validation) else []
    assert steps == validated
