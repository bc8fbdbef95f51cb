"""Reports of runs that have finished, were stopped or are still running, and of models without a run."""

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

import onward
from onward.cli import main
from onward.errors import UserError
from onward.reports.write import write_reports
from onward.training.run import Run, Validation

from support.runs import config


def figures(page: Path) -> dict[str, str]:
    """The titles of the tiles at the top of a page, and the figure in each."""
    return dict(re.findall(r"<div><span>(.*?)</span><b>(.*?)</b>", page.read_text(encoding="utf-8")))


def test_page_console_and_result_show_the_same_figures(
    story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["--tokenizer", "char", "--steps", "6", "--batch-size", "2", "--device", "cpu", "--preset", "tiny"]
    assert main(["train", str(story_file), "--out", str(run), *words]) == 0
    result = json.loads((run / "result.json").read_text())
    printed = re.search(r"validation loss (.*?) \| perplexity (.*?) \| bits per byte (.*?) \|", capsys.readouterr().err)
    assert printed is not None
    shown = figures(run / "report.html")
    assert shown["validation loss"] == f"{result['loss']:.4f}" == printed[1]
    assert shown["perplexity"] == f"{result['perplexity']:,.2f}" == printed[2]
    assert shown["bits per byte"] == f"{result['bits_per_byte']:.4f}" == printed[3]


def test_stopped_run_has_a_page_with_its_last_validation(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run"))
    events = run.train(stop=lambda: run.step == 15)
    loss = [event.validation_loss for event in events if isinstance(event, Validation)][-1]
    page = write_reports(run.folder, device="cpu")
    assert "stopped at step 15 of 30" in page.read_text(encoding="utf-8")
    assert figures(page)["validation loss"] == f"{loss:.4f}"
    assert ElementTree.parse(run.folder / "loss.svg").getroot().tag.endswith("svg")


def test_model_without_a_run_has_a_page(tiny_run: Path, tmp_path: Path) -> None:
    onward.save(onward.load(tiny_run), tmp_path / "model")
    page = write_reports(tmp_path / "model", "The cat sat on the mat.", device="cpu")
    assert page == tmp_path / "model" / "report.html"
    assert not (tmp_path / "model" / "loss.svg").exists()
    text = page.read_text(encoding="utf-8")
    assert "Who reads from whom" in text
    assert "How it learned" not in text


def test_report_of_a_run_whose_prepared_tokens_are_gone(tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, run := tmp_path / "run", ignore=shutil.ignore_patterns("*.bin"))
    assert "Who reads from whom" in write_reports(run, device="cpu").read_text(encoding="utf-8")


def test_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        write_reports(tmp_path)
