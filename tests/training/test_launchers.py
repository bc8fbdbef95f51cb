"""The launchers of docs/scale.md, on one machine over loopback."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onward.base.files import read_json
from onward.cli import main

from support.runs import metrics

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def lose(machine: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and the processes that it started, which have their own sessions."""
    children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children")
    for number in [*map(int, children.read_text().split()), machine.pid] if children.exists() else []:
        os.kill(number, signal.SIGKILL)


ELASTIC = {"--rdzv-conf": "last_call_timeout=3,keep_alive_interval=1,heartbeat_timeout=5"}  # seconds


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def block(containing: str) -> str:
    """The text block on the page that contains these words."""
    return next(
        text for text in re.findall(r"```text\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL) if containing in text
    )


def tools(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment with these scripts and torchrun as commands, in addition to the commands of this Python."""
    folder.mkdir()
    scripts |= {"torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"'}
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def prepared(story_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the prepared data of the page's first commands."""
    monkeypatch.chdir(tmp_path)
    assert main(["data", "prepare", str(story_file), "--tokenizer", "byte", "--out", "prepared"]) == 0
    return tmp_path


@pytest.mark.long
def test_two_launchers_train_one_run(prepared: Path) -> None:
    lines = block("runs/loopback").replace("29500", free_port())
    subprocess.run(["bash", "-ec", lines], env=tools(prepared / "bin"), timeout=300, check=True)
    result = read_json(prepared / "runs/loopback/result.json")
    assert result["tokens"] > 0
    assert max(row["step"] for row in metrics(prepared / "runs/loopback") if "step" in row) == 20


@pytest.mark.long
def test_commands_of_two_machines_train_one_run(prepared: Path) -> None:
    launched = []
    port = free_port()
    sizes = {"--nproc-per-node 8": "--nproc-per-node 1", "addr first": "addr localhost", "29500": port}
    for name in "first", "second":
        line = next(line for line in block("first:  torchrun").splitlines() if line.startswith(f"{name}: "))
        for one, other in sizes.items():
            line = line.replace(one, other)
        line = line.partition(": ")[2] + " --preset tiny --steps 3 --mesh shard=2"
        launched.append(subprocess.Popen(["bash", "-c", line], env=tools(prepared / name)))
    assert [process.wait(timeout=300) for process in launched] == [0, 0]
    assert max(row["step"] for row in metrics(prepared / "runs/two") if "step" in row) == 3


@pytest.mark.long
def test_slurm_script_starts_a_run(prepared: Path) -> None:
    script, port = block("#SBATCH"), free_port()
    sizes = {"--nnodes 8 --nproc-per-node 8": "--nnodes 1 --nproc-per-node 2", "replicate=8 shard=8": "shard=2"}
    for one, other in (sizes | {"29500": port, "--out": "--preset tiny --steps 3 --out"}).items():
        assert one in script
        script = script.replace(one, other)
    hosts = 'test "$*" = "show hostnames machine[1-8]" && echo localhost && echo machine2'
    environment = tools(prepared / "bin", scontrol=hosts, srun='exec "$@"')
    environment |= {"SLURM_JOB_NODELIST": "machine[1-8]", "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", "-e"], input=script, text=True, env=environment, timeout=300, check=True)
    assert max(row["step"] for row in metrics(prepared / "runs/large") if "step" in row) == 3


@pytest.mark.long
def test_a_run_continues_on_the_remaining_machine_and_with_another(story_file: Path, tmp_path: Path) -> None:
    lines = [line.partition(": ")[2] for line in block("machine: torchrun").splitlines()]
    [exported], [line] = ([words for words in lines if words.startswith(first)] for first in ("export ", "torchrun "))
    words, out = shlex.split(line)[1:-1], tmp_path / "run"
    port = free_port()
    for option, value in ({"--nproc-per-node": "1", "--rdzv-endpoint": f"127.0.0.1:{port}"}).items():
        words[words.index(option) + 1] = value
    at = words.index("-m")
    words[at:at] = [word for pair in ELASTIC.items() for word in pair]
    options = [str(story_file), "--tokenizer", "byte", "--preset", "tiny", "--steps", "200", "--device", "cpu"]
    options += ["--accumulation", "2", "--batch-size", "2", "--validate-every", "20", "--precision", "fp32", "--out"]
    assert main(["train", *options, str(tmp_path / "undisturbed")]) == 0
    command = [sys.executable, "-m", "torch.distributed.run", *words, *options, str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict([exported.removeprefix("export ").split("=")])
    machines = [subprocess.Popen(command, env=environment)]
    while socket.socket().connect_ex(("127.0.0.1", int(port))):  # the first launcher hosts the rendezvous
        time.sleep(0.1)
    machines.append(subprocess.Popen(command, env=environment))

    def wait_for(step: int, running: int) -> None:
        while not (out / "metrics.jsonl").exists() or metrics(out)[-1].get("step", 0) < step:
            assert [machine.poll() for machine in machines[:running]] == [None] * running
            time.sleep(0.1)

    try:
        wait_for(40, running=2)
        lose(machines[1])
        wait_for(80, running=1)
        machines.append(subprocess.Popen(command, env=environment))
        assert [machines[i].wait(timeout=300) for i in (0, 2)] == [0, 0], "both train to the end"
    finally:
        for machine in machines:
            lose(machine)
    expected = {row["step"]: row["loss"] for row in metrics(tmp_path / "undisturbed") if "loss" in row}
    losses = {row["step"]: row["loss"] for row in metrics(out) if "loss" in row}
    assert max(losses) == 200
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-3), "equal but for rounding"
