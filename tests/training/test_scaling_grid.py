"""A grid of small runs: its sizes, its error messages, and a law fitted to runs on this machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from onward import RunConfig
from onward.cli import main
from onward.training.studies.scaling_grid import BUDGETS, LEAST_STEPS, RATIO, SIZES, Sizes, grid, larger, least_budget

CONFIG = RunConfig(preset="tiny", model={"n_layers": 1, "context_length": 16}, steps=1)
FAST = "--model.n-layers 1 --model.context-length 16 --precision fp32 --device cpu --evaluation-tokens 500"
FAST += " --validation-tokens 64 --tokenizer char"


@pytest.mark.parametrize("largest", [1e10, 1e13, 1e17])
def test_grid_has_three_sizes_for_each_budget_and_shares_them(largest: float) -> None:
    sizes = Sizes(CONFIG, 257)
    cells = grid(sizes, largest)
    assert len(cells) == BUDGETS * SIZES
    assert len({cell.width for cell in cells}) == BUDGETS + SIZES - 1
    for k in range(BUDGETS):
        budget = largest / RATIO ** (BUDGETS - 1 - k)
        assert [cell.flops for cell in cells[3 * k : 3 * k + 3]] == pytest.approx([budget] * 3, rel=0.04)
    assert cells[0].flops < cells[-1].flops / 20, "the cheapest runs come first"
    assert all(sizes.parameters(cell.width) == cell.parameters for cell in cells)
    large = larger(sizes, 10 * largest, 1e30, cells)
    assert large.flops == pytest.approx(10 * largest, rel=0.04)
    assert large.parameters < 11 * max(cell.parameters for cell in cells), "about ten times the largest measured size"


def test_smallest_grid_has_no_run_of_few_steps() -> None:
    sizes = Sizes(CONFIG, 257)
    least = least_budget(sizes)
    assert min(cell.steps for cell in grid(sizes, least)) >= LEAST_STEPS
    assert not grid(sizes, 0.9 * least)


def test_larger_runs_have_larger_batches_and_the_learning_rate_of_their_root() -> None:
    small, large = (Sizes(CONFIG, 257).cell(64, flops).variant(CONFIG).config for flops in (1e10, 1e14))
    assert large.batch_size > small.batch_size
    rates = [config.learning_rate / config.batch_size**0.5 for config in (small, large)]  # type: ignore[operator]
    assert rates[0] == pytest.approx(rates[1])
    assert small.mup == large.mup == 64


@pytest.mark.long  # docs/planning.md runs the same command
def test_command_trains_the_grid_fits_it_and_does_not_repeat_it(
    story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = Sizes(CONFIG, 30)  # about the vocabulary size of the story
    least = sum(cell.flops for cell in grid(sizes, least_budget(sizes)))
    words = ["scaling", "run", str(story_file), "--grid-flops", f"{1.2 * least:.3g}", "--out", str(tmp_path / "law")]
    assert main([*words, *FAST.split()]) == 0
    said = capsys.readouterr()
    assert "12 of 12" in said.err
    assert "L(N, D) = E + A / N^alpha" in said.err
    assert "the loss depends more on the first steps" in said.err
    assert (tmp_path / "law/law.svg").read_text().startswith("<svg")
    done = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert len(done) == BUDGETS * SIZES
    assert main([*words, *FAST.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == BUDGETS * SIZES
    assert found["forecast"]["low"] <= found["forecast"]["loss"] <= found["forecast"]["high"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == done
    assert main([*words[:4], "1e14", *words[5:], *FAST.split()]) == 2
    assert "contains a grid with grid_flops" in capsys.readouterr().err


WRONG = {
    "": "no text to train on",
    "{} ": "give either --budget, such as 10m, or --grid-flops",
    "{} --budget 10m --grid-flops 1e12": "give either --budget",
    "{} --budget 10mb": "--budget is '10mb': write a number with s, m or h",
    "{} --budget 0.1s": "--budget is 0.1s, too short for the smallest grid, which takes about",
    "{} --grid-flops 1e3": "--grid-flops is 1e+03, less than the",
    "{} --grid-flops much": "--grid-flops is 'much': write a positive number",
    "{} --grid-flops 1e12 --optimizer torch.optim:NAdam": "(optimizer is torch.optim:NAdam)",
    "{} --grid-flops 1e12 --validation none": "without a validation text",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be_planned_is_one_sentence(
    text: str, story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["scaling", "run", *text.format(story_file).split(), *FAST.split()]) == 2
    assert WRONG[text] in capsys.readouterr().err.replace("\n", " ")
    assert not [*tmp_path.rglob("seed-*")]


@pytest.mark.long
def test_check_trains_the_run_that_was_forecast(
    story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["scaling", "run", str(story_file), "--budget", "60s", "--check", "--json", "--out", str(tmp_path / "law")]
    assert main([*words, *FAST.split()]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["check"]["loss"] > 0
    assert found["check"]["error"] == pytest.approx(found["check"]["loss"] - found["forecast"]["loss"])
