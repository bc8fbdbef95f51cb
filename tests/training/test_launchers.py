"""The launchers of docs/scale.md, on one machine over loopback."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.runs import metrics

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def lose(machine: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and the processes that it started, which have sessions of their own."""
    children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children")
    for number in [*map(int, children.read_text().split()), machine.pid] if children.exists() else []:
        os.kill(number, signal.SIGKILL)


ELASTIC = {"--rdzv-conf": "last_call_timeout=3,keep_alive_interval=1,heartbeat_timeout=5"}  # seconds


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


@pytest.mark.long
def test_a_run_continues_on_the_remaining_machine(story_file: Path, tmp_path: Path) -> None:
    line = next(line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("machine: "))
    words, out = shlex.split(line)[2:-1], tmp_path / "run"
    port = free_port()
    for option, value in ({"--nproc-per-node": "1", "--rdzv-endpoint": f"127.0.0.1:{port}"}).items():
        words[words.index(option) + 1] = value
    at = words.index("-m")
    words[at:at] = [word for pair in ELASTIC.items() for word in pair]
    words += [str(story_file), "--tokenizer", "byte", "--preset", "tiny", "--steps", "120", "--device", "cpu"]
    words += ["--accumulation", "2", "--batch-size", "2", "--validate-every", "20", "--out", str(out)]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    machines = [subprocess.Popen(command, env=environment)]
    while socket.socket().connect_ex(("127.0.0.1", int(port))):  # the first one keeps the rendezvous
        time.sleep(0.1)
    machines.append(subprocess.Popen(command, env=environment))

    def wait_for(step: int, running: int) -> None:
        while not (out / "metrics.jsonl").exists() or metrics(out)[-1].get("step", 0) < step:
            assert [machine.poll() for machine in machines[:running]] == [None] * running
            time.sleep(0.1)

    try:
        wait_for(40, running=2)
        lose(machines[1])
        wait_for(120, running=1)  # torchrun itself then waits 5 minutes for the lost machine
    finally:
        for machine in machines:
            lose(machine)
