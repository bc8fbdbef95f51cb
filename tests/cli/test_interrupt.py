"""Ctrl-C and other signals: the state is saved, and the command to continue is printed and works."""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from onward import Run
from onward.cli import main
from onward.cli.shared.signals import Requests
from onward.cli.shared.training import train

from support.forked import Forked
from support.runs import config

SMALL = "--tokenizer char --steps 400 --batch-size 2 --precision fp32 --validate-every 10000 --model.d-model 16"
SMALL += " --model.n-layers 1 --model.n-heads 2 --model.context-length 16"


@contextmanager
def training(story_file: Path, run: Path) -> Iterator[Forked]:
    """A process whose run has completed its first steps."""
    process = Forked(main, ["train", str(story_file), "--out", str(run), *SMALL.split()])
    try:
        metrics = run / "metrics.jsonl"
        until = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < until:
            time.sleep(0.005)
        yield process
    finally:
        process.kill()


OTHERS = (signal.SIGHUP, 129), (signal.SIGTERM, 143)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), *(pytest.param(*kind, marks=pytest.mark.long) for kind in OTHERS)],
)
def test_sigusr1_saves_and_other_signals_save_and_print_the_command_that_resumes(
    number: signal.Signals, status: int, story_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "my run"
    with training(story_file, run) as process:
        process.send_signal(signal.SIGUSR1)
        saved = lambda: {save.name for save in (run / "checkpoints").glob("step-*")} - {"step-0000000"}
        while not (early := saved()) and process.poll() is None:
            time.sleep(0.005)
        assert early, "SIGUSR1 saves"
        assert process.poll() is None
        process.send_signal(number)
        said = process.stderr.read()
        assert process.wait() == status
    assert "Traceback" not in said
    assert {"report.html", "loss.svg"} <= {path.name for path in run.iterdir()}
    assert f"report: {run / 'report.html'}\n" in said
    command = said.splitlines()[-1].partition("To go on: onward ")[2]
    assert command.startswith("train --resume")
    at = max(json.loads((save / "progress.json").read_text())["step"] for save in (run / "checkpoints").iterdir())
    assert 1 <= at < 400
    assert main(shlex.split(command)) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "learning_rate" in line]
    assert steps == list(range(1, 401))
    assert (run / "result.json").exists()


def test_ctrl_c_before_the_first_step_leaves_a_report_and_the_command_that_resumes(
    story_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.start(config(story_file, tmp_path / "run"))
    interrupted = lambda *a, **k: signal.raise_signal(signal.SIGINT) or ()
    monkeypatch.setattr("onward.training.run.checks.start_checks", interrupted)
    assert train(run) == 130
    said = capsys.readouterr().err
    assert "Stopped and saved at step 0.\n" in said
    assert said.endswith(f"To go on: onward train --resume {run.folder}\n")
    assert (run.folder / "report.html").exists()


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_asks_to_stop_before_it_stops_at_once(interrupts: int) -> None:
    """Under torchrun, one Ctrl-C is two signals: torchrun also forwards the signal that the terminal sends to each
    process."""
    said: list[object] = []
    requests = Requests(said.append, interrupts)
    for _ in range(interrupts):
        requests.note(signal.SIGINT, None)
    assert requests.stop()
    assert len(said) == 1
    with pytest.raises(KeyboardInterrupt):
        requests.note(signal.SIGINT, None)


def test_ctrl_c_elsewhere_exits_with_130_without_a_traceback(tiny_run: Path) -> None:
    words = ["generate", str(tiny_run), "The", "--max-new-tokens", "1000000", "--context-overflow", "slide"]
    fresh = [sys.executable, "-c", "import sys; from onward.cli import main; sys.exit(main())"]
    with subprocess.Popen([*fresh, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        assert process.returncode == 130
    assert "Traceback" not in said
