"""Reports of runs that have finished, were stopped or are still running, and of models without a run."""

import json
import os
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import onward
from onward import Run, Tokens, UserError, Validation
from onward.cli import main
from onward.reports.runs.write import write_reports
from onward.training.inputs.texts import spread

from support.runs import config, metrics


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
    assert write_reports(run.folder, device="cpu").state == "stopped"
    page = run.folder / "report.html"
    assert "stopped at step 15 of 30" in page.read_text(encoding="utf-8")
    path = run.folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"imports": ["my.parts"]}))
    write_reports(run.folder, device="cpu")
    assert f"To go on: onward train --resume {run.folder} --import my.parts" in page.read_text(encoding="utf-8")
    assert figures(page)["validation loss"] == f"{loss:.4f}"
    assert ElementTree.parse(run.folder / "loss.svg").getroot().tag.endswith("svg")


def test_running_run_has_a_page(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=4))
    events = run.train()
    next(events)
    assert write_reports(run.folder, device="cpu").state == "running"
    assert "shows it at step 1 of 4" in (run.folder / "report.html").read_text(encoding="utf-8")
    list(events)


def test_model_without_a_run_has_a_page(tiny_run: Path, tmp_path: Path) -> None:
    onward.save(onward.load(tiny_run), tmp_path / "model")
    assert write_reports(tmp_path / "model", "The cat sat on the mat.", device="cpu").state == "no run"
    assert not (tmp_path / "model" / "loss.svg").exists()
    text = (tmp_path / "model" / "report.html").read_text(encoding="utf-8")
    assert 'id="attention"' in text
    assert 'class="curve"' not in text


def test_report_of_a_run_whose_prepared_tokens_are_gone(tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, run := tmp_path / "run", ignore=shutil.ignore_patterns("*.bin"))
    write_reports(run, device="cpu")
    assert 'id="attention"' in (run / "report.html").read_text(encoding="utf-8")


def test_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        write_reports(tmp_path)


def test_report_command_writes_the_page_and_prints_the_figures(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "pages" / "tiny.html"
    words = ["report", str(tiny_run), "--out", str(page), "--text", "The old king sat.", "--compare", str(tiny_run)]
    assert main(words) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"report: {page}\n")
    assert "king" in page.read_text(encoding="utf-8")
    assert list(page.parent.iterdir()) == [page]
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    result = json.loads((tiny_run / "result.json").read_text())
    assert (shown["validation_loss"], shown["bits_per_byte"]) == (result["loss"], result["bits_per_byte"])
    assert (shown["state"], shown["step"], shown["steps"], shown["report"]) == ("finished", 60, 60, str(page))
    assert shown["parameters"] == sum(p.numel() for p in onward.load(tiny_run).model.parameters())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("report nope", "there is no folder nope"),
        ("report {run} --compare nope", "nope, which has no steps on record"),
        ("report {run} --out {run}", "is a folder"),
        ("runs nope", "there is no folder nope"),
    ],
)
def test_mistakes_end_in_one_sentence(
    words: str, expected: str, tiny_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.format(run=tiny_run).split()) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1


def test_runs_command_lists_runs_sorted_with_their_figures(
    tiny_run: Path,
    story_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert capsys.readouterr().err.startswith("There are no runs in runs: ")
    run = Run.start(config(story_file, tmp_path / "runs/deep/stopped", steps=4, validate_every=1))
    events = run.train(stop=lambda: run.step == 2)
    next(events)
    shutil.copytree(tiny_run, "runs/tiny")
    os.utime("runs/tiny/result.json", (2e9, 2e9))
    listed = lambda *words: json.loads(printed(capsys, "runs", *words, "--json"))
    assert [one["name"] for one in listed()] == ["runs/tiny", "runs/deep/stopped"]
    assert [one["state"] for one in listed()] == ["finished", "running"]
    list(events)
    assert [one["name"] for one in listed("--sort", "name")] == ["runs/deep/stopped", "runs/tiny"]
    assert [one["name"] for one in listed("--sort", "bits-per-byte")] == ["runs/tiny", "runs/deep/stopped"]
    (stopped,) = listed("runs/deep")
    last = [row for row in metrics(run.folder) if "validation_loss" in row][-1]
    assert (stopped["validation_loss"], stopped["bits_per_byte"]) == (last["validation_loss"], last["bits_per_byte"])
    assert (stopped["state"], stopped["step"], stopped["steps"]) == ("stopped", 2, 4)
    table = printed(capsys, "runs").splitlines()
    assert table[0].split() == ["run", "state", "step", "size", "loss", "bits/byte", "time", "written"]
    assert [row.split()[:3] for row in table[1:]] == [
        ["runs/tiny", "finished", "60/60"],
        ["runs/deep/stopped", "stopped", "2/4"],
    ]


def test_validation_during_a_run_counts_bytes_as_the_final_evaluation_does(tiny_run: Path) -> None:
    result = json.loads((tiny_run / "result.json").read_text())
    (last,) = [row for row in metrics(tiny_run) if row["step"] == result["step"] and "validation_loss" in row]
    assert last["tokens"] == result["tokens"]
    assert last["bits_per_byte"] == pytest.approx(result["bits_per_byte"], rel=1e-5)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("count", "about"), [(0, 5000), (16, 16), (999, 999), (5000, 5000), (9999, 5000)])
def test_part_of_the_validation_text_is_spread_over_all_of_it(count: int, about: int) -> None:
    part = spread(Tokens.of(np.arange(5000)), count or 5000, context_length=8)[:]
    assert about * 0.9 <= len(part) <= about * 1.1
    assert part[0] == 0
    assert len(part) < 100 or part[-1] > 4800
    assert (np.diff(part) > 0).all()
