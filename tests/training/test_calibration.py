"""A run of a given time: validations, samples and saves are part of it."""

from pathlib import Path

import pytest

from onward.training import calibration
from onward.training.calibration import Costs, fitted
from onward.training.run import Run

from support.runs import config


@pytest.mark.parametrize("every", [0, 1, 5, 100])
@pytest.mark.parametrize(
    "costs",
    [Costs(0.01), Costs(0.01, 0.01), Costs(0.01, 0.5, 2.0), Costs(0.5, 0.1), Costs(0.2, 2.0, 5.0), Costs(1e-4, 1e-3)],
)
def test_steps_validations_and_evaluation_fit_into_the_time(costs: Costs, every: int, tmp_path: Path) -> None:
    given = config(tmp_path, tmp_path, steps=0, time="60s", validate_every=every)
    run = fitted(given, costs, 60.0, spent=3.0)
    validations = 1 + -(-run.steps // run.validation_interval)
    total = 3.0 + run.steps * costs.step + validations * costs.validation + costs.evaluation
    assert 40 < total <= 60
    assert run.time == ""
    assert every in (0, run.validate_every)


def test_validations_take_at_most_a_quarter_unless_asked_for(tmp_path: Path) -> None:
    run = fitted(config(tmp_path, tmp_path, steps=0, time="10s", validate_every=0), Costs(0.01, 0.5), 10.0, spent=0.0)
    assert -(-run.steps // run.validation_interval) * 0.5 <= 2.5
    assert run.steps * 0.01 > 5


def test_a_validation_is_timed_with_its_sample_and_its_save(
    story_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, found = [0.0], []

    def tick(seconds: float) -> None:
        clock[0] += seconds

    def step(trainer: calibration.Trainer, plans: object) -> object:
        for _ in range(20):
            tick(0.25)
            yield

    monkeypatch.setattr(calibration, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(calibration.Trainer, "train", step)
    validate, save, fit = calibration.validate, calibration.save_once, calibration.fitted
    monkeypatch.setattr(calibration, "validate", lambda *args: (tick(1), validate(*args))[1])
    monkeypatch.setattr(calibration, "save_once", lambda *args: (tick(2), save(*args)))
    monkeypatch.setattr(calibration, "fitted", lambda *args: (found.append(args[1]), fit(*args))[1])
    run = Run.start(config(story_file, tmp_path / "run", steps=0, time="100s"), sample=lambda *_: tick(4))
    assert (found[0].step, found[0].validation) == (0.25, 7.0)
    assert not list(run.folder.glob(".trial*"))
