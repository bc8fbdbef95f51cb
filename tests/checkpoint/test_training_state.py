"""A save gives everything back to the bit; whatever happens to a writer, its disk or its files, a good save is left."""

import hashlib
import json
import multiprocessing
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from onward.checkpoint.load import load_model
from onward.checkpoint.saves.folder import saves
from onward.checkpoint.saves.newest import newest_state
from onward.checkpoint.saves.saver import Saver
from onward.checkpoint.saves.state import TrainerState, restore, training_tensors
from onward.checkpoint.weights import read_tensors
from onward.config.decoder import DecoderConfig, Experts
from onward.errors import UserError
from onward.files import read_json
from onward.model.decoder import Decoder
from onward.transforms.compiling import compile_blocks

from support.decoders import DECODERS, decoder, token_ids
from support.disk import with_room_for

CPU = torch.device("cpu")
CONFIGS = DECODERS | {"mixtral": DecoderConfig(13, 16, 2, 4, context_length=12, mlp=Experts(backend="loop"))}


class Counting(torch.optim.Optimizer):
    """Of the kind some libraries have: it keeps whole numbers beside tensors, and adapts a number of its groups."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1, "d": 0.3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = 0.9 * state.get("mean", 0) + p.grad.float()
                p.sub_(group["lr"] * group["d"] / state["count"] * state["mean"])
            group["d"] /= 3


def made(model: Decoder) -> list[torch.optim.Optimizer]:
    """One optimizer for matrices and stacks, another for the rest; one matrix is not trained at all."""
    model.blocks[0].attn.q.weight.requires_grad = False
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        torch.optim.AdamW([p for p in trained if p.ndim < 2] + [model.embed.weight], lr=0.01, fused=True),
        Counting([p for p in trained if p.ndim >= 2 and p is not model.embed.weight]),
    ]


def train(model: Decoder, optimizers: list[torch.optim.Optimizer]) -> None:
    tokens = token_ids(model.config)
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)  # experts nobody visited
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def state_of(
    model: Decoder,
    optimizers: list[torch.optim.Optimizer],
    progress: dict[str, Any],
    average: dict[str, Tensor] | None = None,
) -> TrainerState:
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    return TrainerState(training_tensors(model, optimizers, average), progress | {"frozen": frozen})


def trainable(model: Decoder) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def assert_equal(one: Any, other: Any) -> None:
    one, other = dict(one), dict(other)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("averaged", [False, True], ids=["plain", "averaged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_saved_state_is_loaded_and_continued_bit_for_bit(
    config: DecoderConfig, dtype: torch.dtype, averaged: bool, tmp_path: Path
) -> None:
    model = decoder(config, dtype)
    optimizers = made(model)
    train(model, optimizers)
    average = {name: p.float() + 0.123 for name, p in trainable(model).items()} if averaged else {}
    progress = {"step": 7, "skipped": [[3, 4]], "losses": [0.1, 1e-30]}
    saver = Saver(tmp_path, 1)
    saved = state_of(model, optimizers, progress, average)
    saver.save(model, saved, {"eos_token_id": 3})
    saver.finish()
    assert saver.pop_failure() is None

    state = newest_state(tmp_path, CPU)
    assert_equal(state.model.named_parameters(), model.named_parameters())
    assert (state.model.head.weight is state.model.embed.weight) == config.tied
    shown = {name.removeprefix("average/"): t for name, t in state.tensors.items() if name.startswith("average/")}
    assert_equal(shown, average)
    assert_equal(state.tensors, saved.tensors)
    assert (state.progress, state.messages) == (saved.progress, [])
    assert not [name for name in read_tensors(saves(tmp_path)[0] / "state.safetensors") if "0.attn.q.weight" in name]
    assert read_json(tmp_path / "config.json")["eos_token_id"] == 3
    used = {name: average.get(name, p) for name, p in model.named_parameters()}
    for name, p in load_model(tmp_path)[0].named_parameters():
        assert torch.equal(p, used[name].to(p.dtype))

    again = made(state.model)
    restore(state.tensors, state.model, again)
    for _ in range(2):
        train(model, optimizers)
        train(state.model, again)
    assert_equal(state.model.named_parameters(), model.named_parameters())


def test_gpt2_is_saved_under_its_own_names_and_turned(tmp_path: Path) -> None:
    saver = Saver(tmp_path, 1)
    model = decoder(CONFIGS["gpt2"])
    saver.save(model, state_of(model, [], {"step": 1}), {})
    saver.finish()
    assert read_json(tmp_path / "config.json")["model_type"] == "gpt2"


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "compiled"])
def test_a_model_and_its_optimizers_are_rolled_back_where_they_stand(compiled: bool, tmp_path: Path) -> None:
    model = decoder(CONFIGS["gpt2"])
    tokens, optimizers = token_ids(model.config), made(model)
    if compiled:
        compile_blocks(model, backend="eager")
    train(model, optimizers)
    parameters, average = list(model.parameters()), {name: p + 1 for name, p in trainable(model).items()}
    before = model(tokens)
    saver = Saver(tmp_path, 1)
    saver.save(model, state_of(model, optimizers, {"step": 1}, average), {})
    train(model, optimizers)
    once = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizers)
    parameters[0].grad = torch.full_like(parameters[0], float("nan"))
    saver.finish()

    state = newest_state(tmp_path, CPU)
    restore(state.tensors, model, optimizers)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model(tokens), before)
    assert_equal({name: state.tensors[f"average/{name}"] for name in average}, average)
    train(model, optimizers)
    assert_equal(model.named_parameters(), once)


def test_optimizer_that_keeps_neither_tensors_nor_numbers_is_refused() -> None:
    model = decoder(CONFIGS["llama"])
    optimizers = made(model)
    optimizers[0].state[model.embed.weight]["history"] = []
    with pytest.raises(UserError, match="AdamW keeps a list as history"):
        state_of(model, optimizers, {"step": 1})


def save(saver: Saver, step: int) -> None:
    """A save in which every number is the step's."""
    model = Decoder(CONFIGS["gpt2"])
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(step)
            optimizer.state[p]["momentum_buffer"] = p.clone()
    shown = {name: p.detach().clone() for name, p in model.named_parameters()} if step % 2 else None
    saver.save(model, state_of(model, [optimizer], {"step": step}, shown), {})


def saved(run: Path, steps: int = 2, keep: int = 9) -> Path:
    """A run folder with some saves, the last of them the best."""
    run.mkdir(exist_ok=True)
    saver = Saver(run, keep)
    for step in range(1, steps + 1):
        save(saver, step)
    saver.best(steps, -steps)
    saver.finish()
    assert saver.pop_failure() is None
    return run


def assert_loads(run: Path, step: int) -> list[str]:
    """The newest good save is that of a step, whole, and the run folder shows it; returns what was told."""
    state = newest_state(run, CPU)
    assert state.progress["step"] == step
    kept = {name: t for name, t in state.tensors.items() if not name.startswith("number/")}
    assert "optimizer/momentum_buffer/embed.weight" in kept
    assert ("average/embed.weight" in kept) == step % 2
    for tensor in (*kept.values(), *state.model.parameters(), *load_model(run)[0].parameters()):
        assert (tensor == step).all()
    return state.messages


def test_save_has_the_state_at_the_time_of_its_call(tmp_path: Path) -> None:
    model = decoder(CONFIGS["llama"])
    optimizers, saver, gate = made(model), Saver(tmp_path, 1), threading.Event()
    train(model, optimizers)
    mean = optimizers[0].state[model.embed.weight]["exp_avg"]
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}, mean.clone()
    progress: dict[str, Any] = {"step": 1, "n": [1]}
    shown, hf = {"norm.weight": torch.ones(16)}, {"eos_token_id": [5]}
    saver.thread.submit(gate.wait)
    saver.save(model, state_of(model, optimizers, progress, shown), hf)
    assert not saves(tmp_path), "it comes back before anything is written"
    with torch.no_grad():
        for tensor in (*model.parameters(), mean, shown["norm.weight"]):
            tensor.fill_(7)
    progress["n"].append(2)
    hf["eos_token_id"].append(6)
    gate.set()
    saver.finish()
    state = newest_state(tmp_path, CPU)
    assert_equal(state.model.named_parameters(), wanted[0])
    assert torch.equal(state.tensors["optimizer/exp_avg/embed.weight"], wanted[1])
    assert (state.tensors["average/norm.weight"] == 1).all()
    assert (state.progress["n"], read_json(tmp_path / "config.json")["eos_token_id"]) == ([1], [5])


@settings(max_examples=8)
@given(keep=st.integers(1, 3), best=st.lists(st.booleans(), min_size=1, max_size=5))
def test_the_last_and_the_best_are_kept_and_never_more(keep: int, best: list[bool], tmp_path_factory: Any) -> None:
    run, steps, top = tmp_path_factory.mktemp("run"), [], []
    for step, is_best in zip(range(8, 99), best):
        saver = Saver(run, keep)  # another process, it may be
        save(saver, step)
        steps.append(step)
        if is_best:
            saver.best(step, -step)
            top = [step]
        saver.best(1000, -1000)  # was never saved
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
    """A run with saves of the steps 1 and 2; not to be changed."""
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
    assert assert_loads(run, 1) == [], "it is said once"
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
    if not (file == "checksums.json" and state.progress["step"] == 2):  # white space for white space
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
            assert "File too large; the saves before are kept" in str(failure)
            assert "\n" not in str(failure)
            assert saver.pop_failure() is None, "it is told once"
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
    """Save without end, from the step after the newest on."""
    torch.set_num_threads(1)
    step, saver = newest_state(run, CPU).progress["step"], Saver(run, 2)
    while True:
        step += 1
        save(saver, step)
        if step % 3 == 0:
            saver.best(step, -step)
        if not started.is_set():
            saver.finish()  # the first takes longest
            started.set()


def kills(run: Path, count: int) -> Iterator[int]:
    """Saves by processes that are killed at random moments; yields how many pieces each has left lying about."""
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
        save(again, newest)  # which is there, and written no more
        again.finish()
        assert not list(run.rglob(".*"))
        last = newest
    print(f"{amid} of {count} were killed while something was half-written, {last} saves were made")
    assert amid >= count // 10
    assert last > count


def test_checksums_are_those_that_sha256sum_prints(two: Path) -> None:
    for name, digest in json.loads((saves(two)[-1] / "checksums.json").read_text()).items():
        assert hashlib.sha256((saves(two)[-1] / name).read_bytes()).hexdigest() == digest
