"""The two launchers of docs/scale.md, on one machine over loopback."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.runs import metrics

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@pytest.mark.long
def test_two_launchers_train_one_run(story_file: Path, tmp_path: Path) -> None:
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(("first: ", "second: "))]
    port, out = free_port(), tmp_path / "run"
    values = {"--nproc-per-node": "1", "--master-addr": "127.0.0.1", "--master-port": port, "--out": str(out)}
    launched = []
    for line in lines:
        words = shlex.split(line)[2:]
        for option, value in values.items():
            words[words.index(option) + 1] = value
        words[words.index("prepared")] = str(story_file)
        options = ["--tokenizer", "byte", "--preset", "tiny", "--steps", "3", "--device", "cpu", "--mesh", "shard=2"]
        command = [sys.executable, "-m", "torch.distributed.run", *words, *options]
        launched.append(subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}))
    assert [process.wait(timeout=300) for process in launched] == [0, 0]
    assert max(row["step"] for row in metrics(out) if "step" in row) == 3
