"""A good save remains if the saving process is killed, the disk is full or the newest save is damaged."""

import hashlib
import json
import multiprocessing
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onward import Decoder, UserError
from onward.base.files import read_json
from onward.checkpoint.load import load_model
from onward.checkpoint.saves.folder import saves
from onward.checkpoint.saves.newest import newest_state
from onward.checkpoint.saves.saver import Saver

from support.decoders import DECODERS
from support.disk import with_room_for
from support.saves import CPU, state_of


def save(saver: Saver, step: int) -> None:
    """Save a state in which every number equals the step."""
    model = Decoder(DECODERS["gpt2"])
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(step)
            optimizer.state[p]["momentum_buffer"] = p.clone()
    shown = {name: p.detach().clone() for name, p in model.named_parameters()} if step % 2 else None
    saver.save(model, state_of(model, [optimizer], {"step": step}, shown), {})


def saved(run: Path, steps: int = 2, keep: int = 9) -> Path:
    """A run folder with some saves; the last one is the best."""
    run.mkdir(exist_ok=True)
    saver = Saver(run, keep)
    for step in range(1, steps + 1):
        save(saver, step)
    saver.best(steps, -steps)
    saver.finish()
    assert saver.pop_failure() is None
    return run


def assert_loads(run: Path, step: int) -> list[str]:
    """Check that the newest undamaged save is that of the step, is complete, and is the model of the run folder; return
    the messages."""
    state = newest_state(run, CPU)
    assert state.progress["step"] == step
    kept = {name: t for name, t in state.tensors.items() if not name.startswith("number/")}
    assert "optimizer/momentum_buffer/embed.weight" in kept
    assert ("average/embed.weight" in kept) == step % 2
    for tensor in (*kept.values(), *state.model.parameters(), *load_model(run)[0].parameters()):
        assert (tensor == step).all()
    return state.messages


@settings(max_examples=8)
@given(keep=st.integers(1, 3), best=st.lists(st.booleans(), min_size=1, max_size=5))
def test_the_last_and_the_best_are_kept_and_never_more(keep: int, best: list[bool], tmp_path_factory: Any) -> None:
    run, steps, top = tmp_path_factory.mktemp("run"), [], []
    for step, is_best in zip(range(8, 99), best):
        saver = Saver(run, keep)  # a new Saver, as in another process
        save(saver, step)
        steps.append(step)
        if is_best:
            saver.best(step, -step)
            top = [step]
        saver.best(1000, -1000)  # a step that was never saved
        saver.finish()
        assert [p.name for p in saves(run)] == [f"step-{n:07}" for n in sorted({*steps[-keep:], *top})]
        assert saver.pop_failure() is None
    assert_loads(run, steps[-1])


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


FILES = ["config.json", "model.safetensors", "state.safetensors", "progress.json", "checksums.json"]
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped": flipped,
    "cut off": lambda data: data[:-10],
    "empty": lambda data: b"",
    "missing": lambda data: None,
    "other JSON": lambda data: b'{"step": 9}',
    "a list": lambda data: b"[]",
    "no text": lambda data: b"\xff\xfe{",
}


def harm(path: Path, damage: Callable[[bytes], bytes | None]) -> None:
    data = damage(path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with saves of the steps 1 and 2; tests must not change it."""
    return saved(tmp_path_factory.mktemp("two") / "run")


@pytest.fixture
def run(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "run"))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_damaged_save_is_moved_aside_and_the_one_before_is_loaded(file: str, damage: str, run: Path) -> None:
    harm(saves(run)[-1] / file, DAMAGES[damage])
    (sentence,) = assert_loads(run, 1)
    assert "step-0000002 is damaged (" in sentence
    assert "resumes from step-0000001" in sentence
    assert "\n" not in sentence
    assert (run / "checkpoints/damaged-step-0000002").is_dir()
    assert assert_loads(run, 1) == [], "the message appears once"
    saver = Saver(run, 2)
    save(saver, 2)
    saver.finish()
    assert assert_loads(run, 2) == []


@settings(max_examples=30)
@given(file=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_no_byte_can_change_unnoticed(file: str, where: float, change: int, two: Path, tmp_path_factory: Any) -> None:
    run = Path(shutil.copytree(two, tmp_path_factory.mktemp("flipped") / "run"))

    def damage(data: bytes) -> bytes:
        at = int(where * len(data))
        return data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]

    harm(saves(run)[-1] / file, damage)
    state = newest_state(run, CPU)
    if not (file == "checksums.json" and state.progress["step"] == 2):  # unless one space character replaced another
        assert len(state.messages) == 1
    assert_loads(run, state.progress["step"])


def test_run_without_a_good_save_is_one_sentence_and_unchanged(run: Path) -> None:
    for save in saves(run):
        harm(save / "state.safetensors", flipped)
    with pytest.raises(UserError, match=r"has no save to resume from \(step-0000002: state.safetensors") as error:
        newest_state(run, CPU)
    assert "\n" not in str(error.value)
    assert len(saves(run)) == 2
    with pytest.raises(UserError, match="has no save to resume from: start another"):
        newest_state(run / "nowhere", CPU)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("room", [0, 500, 16_000, 20_000])
def test_full_disk_changes_no_save_and_the_next_save_tries_again(room: int, run: Path) -> None:
    saver, before = Saver(run, 9), everything(run)
    with with_room_for(room):
        for task in (lambda: save(saver, 3)), *((lambda: saver.best(1, -99),) if room < 5 else ()):
            task()
            saver.finish()
            failure = saver.pop_failure()
            assert isinstance(failure, UserError)
            assert "File too large; earlier saves are kept" in str(failure)
            assert "\n" not in str(failure)
            assert saver.pop_failure() is None, "the message appears once"
            assert everything(run) == before
    assert not list(run.rglob(".*"))
    save(saver, 3)
    saver.finish()
    assert saver.pop_failure() is None
    assert_loads(run, 3)


def test_removed_run_folder_is_reported_and_not_made_again(run: Path) -> None:
    saver = Saver(run, 1)
    run.rename(run.with_name("elsewhere"))
    save(saver, 3)
    saver.best(3, -3)
    saver.finish()
    assert str(saver.pop_failure()) == f"saving step 3 in {run} failed: the folder has been moved or removed"
    assert not run.exists()
    run.with_name("elsewhere").rename(run)
    save(saver, 4)
    saver.finish()
    assert_loads(run, 4)


def save_on(run: Path, started: Any) -> None:
    """Save in an endless loop, starting at the step after the newest save."""
    torch.set_num_threads(1)
    step, saver = newest_state(run, CPU).progress["step"], Saver(run, 2)
    while True:
        step += 1
        save(saver, step)
        if step % 3 == 0:
            saver.best(step, -step)
        if not started.is_set():
            saver.finish()  # the first save takes longest
            started.set()


def kills(run: Path, count: int) -> Iterator[int]:
    """Save in processes that are killed at random moments; yield the number of temporary files that each left
    behind."""
    context, moments = multiprocessing.get_context("forkserver"), random.Random(0)
    context.set_forkserver_preload(["onward.checkpoint.saves.saver", "torch._dynamo", "hypothesis", "pytest"])
    for _ in range(count):
        started = context.Event()
        process = context.Process(target=save_on, args=(run, started))
        process.start()
        assert started.wait(60)
        time.sleep(moments.uniform(0, 0.5))
        process.kill()
        process.join()
        yield len(list(run.rglob(".*")))


@pytest.mark.parametrize("count", [4, pytest.param(40, marks=pytest.mark.long)])
def test_killed_writer_leaves_a_complete_save(count: int, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", 1)
    last, amid = 1, 0
    for pieces in kills(run, count):
        amid += pieces > 0
        values = {p.unique().item() for p in load_model(run)[0].parameters()}
        newest = int(saves(run)[-1].name.removeprefix("step-"))
        assert values in ({newest}, {newest - 1}), "the run folder has the weights of one save"
        assert newest >= last
        assert assert_loads(run, newest) == []
        assert read_json(run / "checkpoints/best.json")["step"] <= newest
        again = Saver(run, 2)
        save(again, newest)  # the files of this step exist and are not written again
        again.finish()
        assert not list(run.rglob(".*"))
        last = newest
    print(f"{amid} of {count} writers were killed while a file was half-written; {last} saves were made")
    assert amid >= count // 10
    assert last > count


def test_checksums_are_those_that_sha256sum_prints(two: Path) -> None:
    for name, digest in json.loads((saves(two)[-1] / "checksums.json").read_text()).items():
        assert hashlib.sha256((saves(two)[-1] / name).read_bytes()).hexdigest() == digest
