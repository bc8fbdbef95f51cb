"""The live display of a run."""

import re
from pathlib import Path

import pytest
from rich.console import Console

from onward import Run
from onward.cli.shared.display import Display
from onward.training.step.trainer import Step

from support.runs import config


def test_picture_shows_figures_bar_and_the_continued_prompt(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=4))
    console = Console(width=80)
    with Display(run) as display:
        for event in run.train():
            display.show(event)
        with console.capture() as shown:
            console.print(display.picture())
    names, values, _, top, *_, bottom, last = shown.get().splitlines()
    assert names.split() == ["step", "loss", "validation", "loss", "tokens/s", "time", "left"]
    assert values.startswith("4 of 4 ")
    assert top.startswith("╭─ the same prompt, continued ─")
    assert bottom.startswith("╰─")
    assert len(last.rstrip()) < 70, "there is room for the terminal's ^C, which would otherwise begin a new line"


def test_time_left_is_that_of_steps_not_of_what_comes_before_them(
    story_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=40))
    now = 1000.0
    monkeypatch.setattr("onward.cli.shared.display.perf_counter", lambda: now)
    display = Display(run)
    for step in 15, 11, 12, 13, 14:  # first step after a resume, then a rollback
        now += 300 if step == 15 else 2  # 300 s with compilation; later steps take 2 s
        display.show(Step(step, 3.0, 1e-3, 1.0, 100, 0.1))
    assert display.figures()["time left"] == "0:52"


def test_piped_run_without_validation_shows_its_loss(story_file: Path, tmp_path: Path, capsys) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=4, validate_every=2, validation="none"))
    with Display(run) as display:
        for event in run.train():
            display.show(event)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert [line.split(" of ")[0] for line in lines] == ["step 0", "step 2", "step 4"]
    assert all(" | loss " in line and "validation" not in line for line in lines[1:])


def test_piped_output_begins_with_the_figures_that_are_known(story_file: Path, tmp_path: Path, capsys) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=4, validate_every=2))
    with Display(run) as display:
        for event in run.train():
            display.show(event)
    first, second, third = (line for line in capsys.readouterr().err.splitlines() if line.startswith("step"))
    assert first == "step 0 of 4"
    for step, line in ((2, second), (4, third)):
        names = ["loss", "validation loss", "tokens/s", "time left"]
        assert re.fullmatch(rf"step {step} of 4" + "".join(rf" \| {name} [0-9.,:]+" for name in names), line)
