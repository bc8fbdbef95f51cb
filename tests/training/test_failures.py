"""Failures of several processes: one sentence with the rank and the cause, and one line from each other process."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import HashStore

from onward import Run, UserError
from onward.cli import main
from onward.config.mesh import Mesh
from onward.evaluation.kept import PACKAGES, versions
from onward.parallel import heartbeats, launch
from onward.parallel.failures import one_report
from onward.parallel.launch import Launch
from onward.parallel.processes import Processes
from onward.training.run import loop

from support.ranks import Ranks, run_ranks
from support.runs import TINY, config, metrics

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRAIN = f"{shlex.quote(sys.executable)} -m onward train"


def reports(stderr: str) -> list[str]:
    """The lines of Onward, first that of the failed rank; checks that there is no traceback except torchrun's own."""
    assert stderr.count("Traceback (most recent call last)") <= 1, stderr
    return sorted((line for line in stderr.splitlines() if line.startswith("onward: ")), key=lambda s: "ended" in s)


def kill(processes: Processes, rank: int, number: signal.Signals) -> None:
    os.kill(int(Launch.meet().store.get(f"process/{rank}").split()[0]), number)


def user_error(processes: Processes) -> None:
    raise UserError("there is no text")


def bug(processes: Processes) -> None:
    raise KeyError("name")


def killed(processes: Processes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_elsewhere(processes: Processes) -> None:
    Launch.meet().store.set(f"process/{processes.rank}", f"{os.getpid()} elsewhere")
    killed(processes)


def user_error_and_sigterm(processes: Processes) -> None:
    """Send SIGTERM to the other rank, as torchrun does to the remaining ranks a moment later."""
    kill(processes, 1 - processes.rank, signal.SIGTERM)
    user_error(processes)


def wait(processes: Processes) -> None:
    processes.wait()


def wait_in_vain(processes: Processes) -> None:
    """Wait for a signal and ignore exceptions, like code that continues after an error."""
    with suppress(Exception):
        signal.pause()


def fail(folder: Path, *tasks: Callable[[Processes], None]) -> None:
    """Run tasks[rank] in this rank, in the command's context."""
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"{rank}.json")
    with one_report(patience=0.5):
        processes = Processes.join()
        processes.wait()
        tasks[rank](processes)


ONE, OTHER = "rank 0: there is no text", "rank 1 ended because rank 0 ended"
FAILURES: dict[str, tuple[Callable, Callable, list[str]]] = {
    "a mistake": (user_error, wait, [ONE, OTHER]),
    "a mistake in rank 1": (
        wait,
        user_error,
        ["rank 0 ended because rank 1 ended", "rank 1: there is no text"],
    ),
    "a mistake, then SIGTERM": (user_error_and_sigterm, wait_in_vain, [ONE, OTHER]),
    "a bug": (bug, wait, ["'name'", OTHER]),
    "SIGKILL": (wait, killed, ["rank 1 was killed, perhaps for lack of memory"]),
    "SIGKILL on another host": (wait, killed_elsewhere, ["rank 0 has lost the connection to another rank ("]),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failure_is_one_sentence_of_a_rank_and_a_line_of_the_other(failure: str, tmp_path: Path) -> None:
    *tasks, expected = FAILURES[failure]
    outcomes = run_ranks(fail, tmp_path, *tasks)
    for rank, sentence in enumerate(expected):
        assert str(outcomes[rank]).startswith(sentence)
        assert "\n" not in str(outcomes[rank])
        recorded = json.loads((tmp_path / f"{rank}.json").read_text())
        assert recorded["message"]["message"] == str(outcomes[rank]), "torchrun shows it"
    assert all(isinstance(outcome, UserError) for outcome in outcomes[: len(expected)]) == (failure != "a bug")


def start_apart(text: Path, folder: Path, processes: Processes) -> None:
    """Start a run in a folder that only this process can see."""
    own = folder / f"machine {processes.rank}"
    own.mkdir()
    os.chdir(own)
    Run.start(config(text, Path("run"), accumulation=2))


def test_processes_without_a_common_disk_are_named(story_file: Path, tmp_path: Path) -> None:
    outcomes = run_ranks(fail, tmp_path, *[partial(start_apart, story_file, tmp_path)] * 2)
    assert str(outcomes[0]) == "rank 0 ended because rank 1 ended"
    assert str(outcomes[1]).startswith("rank 1: Cannot find run on ")
    assert str(outcomes[1]).endswith(
        "because rank 0 made it on another disk: choose a folder on a disk that all processes share"
    )


MISTAKES = {
    "a missing text": ("missing.txt --accumulation 2", "missing.txt does not exist"),
    "an existing run": ("story.txt --accumulation 2 --out made", "made already contains a run"),
    "too few batches": ("story.txt", "accumulation is 1, too few batches for 2 processes"),
    "a mesh of more": (
        "story.txt --accumulation 4 --mesh 'shard=2 tensor=2'",
        "mesh 'shard=2 tensor=2' takes 2 x 2 = 4 processes, but there are 2",
    ),
    "a full disk": ("story.txt --accumulation 2", "cannot write run/data"),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_under_torchrun_is_one_sentence_and_a_line_of_the_other_rank(
    mistake: str, story: str, tmp_path: Path
) -> None:
    (tmp_path / "story.txt").write_text(story)
    Run.start(config(tmp_path / "story.txt", tmp_path / "made"))
    words, sentence = MISTAKES[mistake]
    limit = "ulimit -f 4; " * (mistake == "a full disk")
    command = [*LAUNCH, "--no-python", "sh", "-c", f"{limit}exec {TRAIN} --out run --tokenizer char {words}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode
    first, other = reports(done.stderr)
    rank, cause = re.fullmatch(r"onward: rank (\d): (.*)", first).groups()
    assert cause.startswith(sentence)
    assert other == f"onward: rank {1 - int(rank)} ended because rank {rank} ended"
    assert done.stderr.count(cause) == 2, "torchrun shows it as the cause"
    assert not (tmp_path / "run").exists()


def at_step(run: Run, step: int) -> bool:
    return run.step == step


@pytest.mark.long
def test_ranks_with_different_runs_do_not_train(story_file: Path, tmp_path: Path) -> None:
    for rank, steps in enumerate((4, 2)):
        run = Run.start(config(story_file, tmp_path / str(rank), steps=30, validate_every=2, accumulation=2))
        list(run.train(stop=partial(at_step, run, steps)))
    command = f"cd {shlex.quote(str(tmp_path))}/$RANK; exec {TRAIN} --resume ."
    done = subprocess.run([*LAUNCH, "--no-python", "sh", "-c", command], capture_output=True, text=True)
    assert done.returncode
    assert "rank 1 differs from rank 0 in step and weights" in "".join(reports(done.stderr))
    assert metrics(tmp_path / "0")[-1]["step"] == 4


@pytest.mark.long
def test_killed_rank_is_named_by_the_other(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=100_000, validate_every=50_000, accumulation=2)).folder
    command = f"echo $$$$ > {shlex.quote(str(tmp_path))}/pid$RANK; exec {TRAIN} --resume {shlex.quote(str(run))}"
    words = [*LAUNCH, "--no-python", "sh", "-c", command]
    # torchrun turns $$$$ into the $$ of sh
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as launched:
        rows, until = run / "metrics.jsonl", time.monotonic() + 60
        while not (rows.exists() and rows.stat().st_size) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
        assert launched.stderr
        said = launched.stderr.read()
    (report,) = reports(said)
    assert report.startswith("onward: rank 1 was killed")


def test_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        words = [sys.executable, "-m", "onward", "train", "embedded", "--out", str(tmp_path / "run")]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | place | ranks)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"the processes cannot connect at 127.0.0.1:{place['MASTER_PORT']}" in done.stderr


NO_PORT = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}


@pytest.mark.parametrize("given", [{}, {"RANK": "0"}, NO_PORT])
def test_variables_with_which_processes_cannot_meet_are_one_sentence(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ({"WORLD_SIZE": "2"} | given).items():
        monkeypatch.setenv(name, value)
    assert main(["train", "story.txt"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("onward: Cannot connect to the other processes of WORLD_SIZE=2 (")
    assert said.endswith("): start them with torchrun, or unset WORLD_SIZE\n")


COMMANDS = {
    "train --seed 1": "",
    "train --seed 2": "with '2' instead of '1'",
    "train": "with nothing instead of '--seed'",
    "train --seed 1 --compile": "with '--compile' instead of nothing",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_ranks_with_different_commands_all_refuse(command: str) -> None:
    store, commands = HashStore(), ("train --seed 1", command)

    def refusal(rank: int) -> str:
        try:
            Launch(rank, 2, store).check_command(commands[rank].split())
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as pool:
        one, other = pool.map(refusal, range(2))
    assert one == other
    assert COMMANDS[command] in one
    assert bool(one) == bool(COMMANDS[command])


def join_alone(rank: int) -> None:
    """Join as one of two processes; the other one never joins."""
    launch.PATIENCE = 0.2
    if rank == int(os.environ["RANK"]):
        Processes.join()


@pytest.mark.parametrize("rank", [0, 1])
def test_process_that_does_not_answer_is_named(rank: int) -> None:
    outcome = run_ranks(join_alone, rank)[rank]
    assert isinstance(outcome, UserError)
    assert str(outcome).startswith(f"rank {1 - rank} has not answered within 0.2 seconds: look at its node")


def stopped(processes: Processes) -> None:
    """Stop this process; it is killed when both others have written their error messages."""
    folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
    others_end = f"while [ $(ls {shlex.quote(str(folder))} | wc -l) -lt 2 ]; do sleep 0.1; done"
    subprocess.Popen(["sh", "-c", f"{others_end}; kill -9 {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def fail_impatiently(folder: Path, seconds: str, *tasks: Callable[[Processes], None]) -> None:
    os.environ["ONWARD_PATIENCE"] = seconds
    fail(folder, *tasks)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_stopped_is_named_and_all_others_end(lost: int, tmp_path: Path) -> None:
    tasks = [wait, wait, wait]
    tasks[lost] = stopped
    assert run_ranks(fail_impatiently, tmp_path, "1", *tasks, count=3) == [None] * 3
    said = sorted(json.loads(path.read_text())["message"]["message"] for path in tmp_path.glob("*.json"))
    reporter, other = said
    assert reporter == f"rank {lost} has not answered for 1 seconds: look at its node; go on with --resume"
    assert re.fullmatch(rf"rank [^{lost}] ended because rank {lost} does not answer", other)


def work_alone(processes: Processes) -> None:
    with processes.first_before_others():
        time.sleep(2 * (not processes.rank))


def test_a_rank_that_works_alone_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(fail_impatiently, tmp_path, "1", work_alone, work_alone) == [None] * 2
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf"])
def test_a_patience_that_is_not_a_number_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_PATIENCE", value)
    with pytest.raises(UserError, match=f"ONWARD_PATIENCE is '{value}': give a number of seconds"):
        heartbeats.patience()


FACTS = {
    "data": "rank 1 differs from rank 0 in data; give all ranks one run folder, on a shared disk",
    "version of torch": "rank 1 differs from rank 0 in version of torch (0, 1); install the same versions",
}


def compare(fact: str) -> None:
    joined = Processes.join()
    joined.check_same({"step": 3, fact: joined.rank})


@pytest.mark.parametrize("fact", FACTS)
def test_ranks_with_different_data_or_versions_are_named(fact: str, two: Ranks) -> None:
    with pytest.raises(UserError) as error:
        two.run(compare, fact)
    assert str(error.value) == f"the ranks hold different runs: {FACTS[fact]}"


def train_with_other_packages(folder: Path) -> None:
    """Train a run; rank 1 has another version of the first package."""
    run = Run.resume(folder)
    if run.processes.rank:
        loop.versions = lambda: ["0.1", *versions()[1:]]
    list(run.train())


def test_a_run_does_not_train_with_different_versions(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", accumulation=2)).folder
    name, number = PACKAGES[0], versions()[0]
    for outcome in run_ranks(train_with_other_packages, run):
        assert str(outcome).endswith(f"in version of {name} ({number}, 0.1); install the same versions")


def test_processes_without_a_window_each_are_refused() -> None:
    Processes(count=4, mesh=Mesh(replicate=2, tensor=2)).check_windows(2)
    with pytest.raises(UserError, match="3 windows for 4 processes with windows of their own: start fewer"):
        Processes(count=4, mesh=Mesh(shard=4)).check_windows(3)


def start(folder: Path, story_file: Path) -> None:
    with one_report(patience=0.5):
        Run.start(config(story_file, folder, mesh="shard=2", accumulation=2, model=TINY | {"context_length": 4096}))


def test_a_run_without_a_window_for_each_process_leaves_no_folder(story_file: Path, tmp_path: Path) -> None:
    outcomes = run_ranks(start, tmp_path / "run", story_file)
    assert str(outcomes[0]).startswith("rank 0: the data have 1 windows for 2 processes")
    assert str(outcomes[1]) == "rank 1 ended because rank 0 ended"
    assert not (tmp_path / "run").exists()
