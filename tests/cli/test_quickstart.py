"""onward quickstart: from nothing to a trained model, its samples and its report."""

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import onward
from onward.cli import main

from support.ranks import run_ranks


def test_quickstart_ends_with_figures_samples_a_report_and_four_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", "--time", "1s"]) == 0
    said = capsys.readouterr().err
    for name in (
        "validation loss",
        "perplexity",
        "bits per byte",
        "Raise an exception if",
        "runs/quickstart/report.html",
    ):
        assert name in said
    following = said.partition("Next:")[2]
    assert [following.count(f"onward {name} ") for name in ("generate", "verify", "evaluate", "train")] == [1, 1, 1, 1]
    result = json.loads(Path("runs/quickstart/result.json").read_text())
    assert result["perplexity"] > 1
    page = Path("runs/quickstart/report.html").read_text()
    assert json.loads(Path("runs/quickstart/data/data.json").read_text())["sources"][0]["sha256"][:12] in page
    assert onward.load("runs/quickstart").generate("Return", 3, seed=0)
    assert main(["quickstart", "--out", "."]) == 2, "what is not a quickstart is never replaced"


@pytest.mark.long
def test_quickstart_with_an_assistant_answers_after_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", "--time", "2s", "--assistant", "--json"]) == 0
    out, said = capsys.readouterr()
    assert said.count("What does str.split do? (in the training data)") == 3
    assert said.count("(held out)") == 3
    stages = json.loads(out)
    assert [stage["stage"] for stage in stages] == ["pre-training", "sft", "dpo"]
    assert stages[1]["loss_of_answers"] < stages[0]["loss_of_answers"]
    assert isinstance(onward.load("runs/quickstart-dpo").chat("What does len do?", 5), str)
    assert main(["quickstart", "--time", "1s", "--assistant", "--out", "runs/quickstart-dpo"]) == 2


def quickstart(folder: Path) -> tuple[int, str, str]:
    """Run a short quickstart with an assistant in this process; return its exit status, standard output and standard
    error."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main(["quickstart", "--time", "2s", "--assistant", "--json", "--out", str(folder)])
    return status, out.getvalue(), err.getvalue()


@pytest.mark.long
def test_quickstart_in_two_processes_prints_once(tmp_path: Path) -> None:
    (status, out, said), (other, nothing, silence) = run_ranks(quickstart, tmp_path / "quick")
    assert status == other == 0, said + silence
    assert [stage["stage"] for stage in json.loads(out)] == ["pre-training", "sft", "dpo"]
    assert said.count("mesh replicate=2") == 3
    assert said.count("What does str.split do? (in the training data)") == 3
    assert nothing == silence == ""
    for name in ("quick", "quick-sft", "quick-dpo"):
        assert json.loads((tmp_path / name / "run.json").read_text())["accumulation"] == 2
