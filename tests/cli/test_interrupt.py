"""Ctrl-C: the state is saved, the command to go on is printed, and it works."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

MAIN = [sys.executable, "-c", "import sys; from onward.cli import main; sys.exit(main())"]


def test_ctrl_c_saves_says_how_to_go_on_and_that_works(story_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "my run"
    words = "--tokenizer char --steps 400 --batch-size 2 --precision fp32 --validate-every 10000 --model.d-model 16"
    words += " --model.n-layers 1 --model.n-heads 2 --model.context-length 16"
    with subprocess.Popen(
        [*MAIN, "train", str(story_file), "--out", str(run), *words.split()], stderr=subprocess.PIPE, text=True
    ) as process:
        metrics = run / "metrics.jsonl"
        until = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < until:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait() == 130
    assert "Traceback" not in said
    command = said.splitlines()[-1].partition("To go on: onward ")[2]
    assert command.startswith("train --resume")
    (save,) = (run / "checkpoints").iterdir()
    at = json.loads((save / "progress.json").read_text())["step"]
    assert 1 <= at < 400
    again = subprocess.run([*MAIN, *shlex.split(command)], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines() if "learning_rate" in line]
    assert steps == list(range(1, 401))
    assert (run / "result.json").exists()


def test_ctrl_c_elsewhere_exits_with_130_without_a_traceback(tiny_run: Path) -> None:
    words = ["generate", str(tiny_run), "The", "--max-new-tokens", "1000000", "--context-overflow", "slide"]
    with subprocess.Popen([*MAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        assert process.returncode == 130
    assert "Traceback" not in said
