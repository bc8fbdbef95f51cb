"""Runs on a mesh: equal to one process, resumable on any other mesh, and exactly resumable on the same mesh."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from onward import Batch, Decoder, Experts, FinetuneConfig, LanguageModel, Run, RunConfig, Tokenizer, UserError, save
from onward.checkpoint.saves.folder import damage, saves
from onward.checkpoint.weights import read_tensors
from onward.parallel.processes import Processes
from onward.training import CrossEntropy
from onward.training.run.checks import Check, start_checks
from onward.training.run.together import planned
from onward.training.step.loss import LossFunction

from support.finetuning import base_model, pairs, sums, write_rows
from support.grids import first
from support.ranks import Ranks
from support.runs import TINY, metrics

SETTINGS: dict[str, Any] = {"tokenizer": "char", "steps": 8, "batch_size": 2, "accumulation": 4, "precision": "fp32"}
SETTINGS |= {"device": "cpu", "validate_every": 2, "learning_rate": 1e-2, "average": 0.9, "experts": "loop"}
MODEL = TINY | {"dropout": 0.0, "mlp": Experts(count=4, top_k=2, d_ff=16), "tied": True}


def train(
    out: Path, settings: dict[str, Any], until: int = 8, mesh: str = "", loss: LossFunction | None = None
) -> list[str]:
    """Train a run in fp64 up to a step; starts the run if it does not exist yet. Returns the names of its events."""
    # rank 0 decides, before the run is started
    if Processes.join().agreed(lambda: "begun" * (out / "run.json").exists()):
        run = Run.resume(out, mesh=mesh, loss=loss)
    else:
        config = RunConfig(**settings, out=str(out), mesh=mesh)
        torch.manual_seed(0)
        vocabulary = Tokenizer.load(Path(config.tokenizer)).vocab_size
        run = Run.start(config, model=Decoder(config.decoder(vocabulary)).double(), loss=loss)
    return [type(event).__name__ for event in run.train(lambda: run.step >= until)]


@pytest.fixture(scope="module")
def settings(story_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a run, with an existing tokenizer and prepared texts."""
    folder = tmp_path_factory.mktemp("first")
    first = Run.start(RunConfig(**SETTINGS, sources=(str(story_file),), model=MODEL, out=str(folder / "run")))
    return SETTINGS | {"sources": [str(story_file)], "model": MODEL, "tokenizer": str(first.folder)}


@pytest.fixture(scope="module")
def alone(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    train(out, settings)
    return out


def assert_equal_but_for_rounding(one: Path, other: Path) -> None:
    """Assert that two runs in fp64 have the same log and the same averaged weights, up to rounding."""
    for a, b in zip(metrics(one), metrics(other), strict=True):
        shared = a.keys() & b.keys()  # layers of a sharded model are not measured
        figures = {k: b[k] for k in shared}
        assert {k: a[k] for k in shared} == (figures if "reason" in a else pytest.approx(figures, rel=1e-8, abs=1e-9))
    first, second = (read_tensors(run / "model.safetensors") for run in (one, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == torch.float64
        assert (tensor - second[name]).abs().max() <= 1e-9 * tensor.abs().max().clamp(min=1), name


@pytest.mark.long
def test_saves_move_between_meshes(settings: dict[str, Any], alone: Path, two: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    two.run(train, run, settings, 2, "shard=2")
    two.run(train, run, settings, 4, "tensor=2")
    train(run, settings, 5, "replicate=1")
    two.run(train, run, settings, 6, "context=2")
    two.run(train, run, settings, 7, "pipeline=2")
    two.run(train, run, settings, 8, "replicate=2")
    assert_equal_but_for_rounding(alone, run)
    assert not any(map(damage, saves(run)))


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", ["shard=4", "replicate=2 shard=2", "shard=2 tensor=2", "tensor=4", "pipeline=2 shard=2"]
)
def test_saves_move_to_four_processes(
    mesh: str, settings: dict[str, Any], alone: Path, two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    run, changed = tmp_path / "run", settings | {"model": MODEL | {"n_kv_heads": 1}}
    train(tmp_path / "alone", changed)
    train(run, changed, 2, "replicate=1")
    two.run(train, run, changed, 4, "shard=2")
    four.run(train, run, changed, 6, mesh)
    train(run, changed, 8, "replicate=1")
    assert_equal_but_for_rounding(tmp_path / "alone", run)


def train_during_a_save(out: Path, settings: dict[str, Any]) -> list[list[str]]:
    """Train a run on shards while the save of step 2 waits for step 3; return the existing saves at step 3 and at the
    end."""
    run, may_write, seen = Run.start(RunConfig(**settings, out=str(out), mesh="shard=2")), threading.Event(), []

    def stop() -> bool:
        if run.step == 3 and not may_write.is_set():
            seen.append([folder.name for folder in saves(out)])
            run.processes.wait()  # both processes have listed the saves
            may_write.set()
        return run.step == 5

    run.saver.thread.submit(may_write.wait)
    for _ in run.train(stop):
        pass
    return [*seen, [folder.name for folder in saves(out)]]


@pytest.mark.long
def test_training_continues_while_all_processes_write(settings: dict[str, Any], two: Ranks, tmp_path: Path) -> None:
    options = settings | {"keep": 9}
    for before, after in two.run(train_during_a_save, tmp_path / "run", options):
        assert before == ["step-0000000"]
        assert {"step-0000002", "step-0000004"} < {*after}
    assert not any(map(damage, saves(tmp_path / "run")))


@pytest.mark.long
@pytest.mark.parametrize("mesh", first(1, ["shard=2", "context=2", "tensor=2", "pipeline=2"]))
def test_the_same_mesh_resumes_bit_for_bit(mesh: str, settings: dict[str, Any], two: Ranks, tmp_path: Path) -> None:
    options = settings | {"optimizer": "muon", "average": 0.0}
    two.run(train, tmp_path / "whole", options, 8, mesh)
    for until in 3, 8:
        two.run(train, tmp_path / "parts", options, until, mesh)
    for name in "model.safetensors", "state.safetensors":
        one, other = (saves(tmp_path / run)[-1] / name for run in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes()


def begin(out: Path, settings: dict[str, Any], mesh: str) -> None:
    """Start a run, and make one step."""
    run = Run.start(RunConfig(**settings, out=str(out), mesh=mesh))
    list(run.train(lambda: run.step >= 1))


BEGINNINGS: dict[str, dict[str, Any]] = {
    "new weights": {"model": MODEL},
    "new weights by muP": {"mup": 16, "model": MODEL | {"tied": False}},
    "a base": {"base": "gpt2"},
}


@pytest.mark.long
@pytest.mark.parametrize("beginning", first(2, BEGINNINGS))
def test_processes_begin_together_as_one_does(
    beginning: str, settings: dict[str, Any], story_file: Path, two: Ranks, tmp_path: Path
) -> None:
    """The first save of two processes has the same model files as that of one process, byte for byte, and equal tensors
    in its training state."""
    options = {k: v for k, v in settings.items() if k != "model"} | BEGINNINGS[beginning]
    if "base" in options:
        sizes = {"d_model": 32, "n_layers": 2, "n_heads": 4, "context_length": 32}
        model = RunConfig(preset="gpt2", model=sizes)
        torch.manual_seed(0)
        options["base"] = str(tmp_path / "base")
        tokenizer = Tokenizer.load(Path(options.pop("tokenizer")))
        save(LanguageModel(Decoder(model.decoder(tokenizer.vocab_size)), tokenizer), tmp_path / "base")
    begin(tmp_path / "one", options, "replicate=1")
    for mesh in "shard=2", "pipeline=2":
        two.run(begin, tmp_path / mesh, options, mesh)
        one, other = (saves(tmp_path / run)[0] for run in ("one", mesh))
        for name in "model.safetensors", "config.json":
            assert (one / name).read_bytes() == (other / name).read_bytes()
        state, other_state = (read_tensors(save / "state.safetensors") for save in (one, other))
        assert state.keys() == other_state.keys()
        assert all(torch.equal(tensor, other_state[name]) for name, tensor in state.items())


def start(out: Path, settings: dict[str, Any], mesh: str) -> list[Check]:
    """The checks at the start of a run with new weights."""
    run = Run.start(RunConfig(**settings, out=str(out), mesh=mesh))
    texts = run.inputs.train, run.inputs.validation
    return [*start_checks(run.model, run.planner.first_batch(), *texts, fresh=True)]


STARTED = "shard=2 tensor=2", "pipeline=2 shard=2", "replicate=2 tensor=2", "context=2 tensor=2", "replicate=2 shard=2"


@pytest.mark.long
@pytest.mark.parametrize("mesh", first(1, STARTED))
def test_processes_check_the_start_as_one_does(
    mesh: str, settings: dict[str, Any], four: Ranks, tmp_path: Path
) -> None:
    _, _, loss, *_ = start(tmp_path / "one", settings, "replicate=1")
    of_ranks = four.run(start, tmp_path / "four", settings, mesh)
    assert all(check.ok for checks in of_ranks for check in checks[:3])
    assert of_ranks[0][2].sentence == loss.sentence, "the first loss is that of the same windows"


def harmful_once(model: Decoder, batch: Batch) -> Any:
    """The cross-entropy, except for the batch that begins with window 36 (in step 5), for which it is NaN."""
    loss, *reported = CrossEntropy()(model, batch)
    return loss * (float("nan") if batch.seed == 36 else 1), *(one * (loss / loss).detach() for one in reported)


@pytest.mark.long
@pytest.mark.parametrize("mesh", first(1, ["pipeline=2", "shard=2", "tensor=2"]))
def test_processes_of_a_mesh_roll_back_together(
    mesh: str, settings: dict[str, Any], two: Ranks, tmp_path: Path
) -> None:
    train(tmp_path / "one", settings, loss=harmful_once)
    events = two.run(train, tmp_path / mesh, settings, 8, mesh, harmful_once)
    assert [names.count("Rollback") for names in events] == [1, 1]
    assert_equal_but_for_rounding(tmp_path / "one", tmp_path / mesh)


def finetune(out: Path, base: Path, rows: Path, mesh: str, method: str, lora: int, until: int) -> None:
    """Train on pairs or conversations up to a step; starts the run if it does not exist yet."""
    options = {"steps": 4, "batch_size": 2, "accumulation": 2, "validate_every": 2, "precision": "fp32"}
    options |= {"method": method, "device": "cpu", "mesh": mesh, "template": "plain"} | ({"lora": lora} if lora else {})
    if Processes.join().agreed(lambda: "begun" * out.exists()):
        run = Run.resume(out, mesh=mesh)
    else:
        run = Run.start(FinetuneConfig.of(base=str(base), sources=(str(rows),), out=str(out), **options))
    list(run.train(lambda: run.step >= until))


TUNED: list[tuple[str, int, tuple[str, ...]]] = [  # method, rank of adapters, sequence of meshes
    ("dpo", 2, ("shard=2",)),
    ("sft", 0, ("tensor=2", "shard=2")),
    ("dpo", 2, ("tensor=2", "shard=2")),
    *((method, lora, (mesh,)) for method in ("sft", "dpo") for lora in (0, 2) for mesh in ("shard=2", "tensor=2")),
]


@pytest.mark.parametrize("tuned", first(2, TUNED))
def test_fine_tuning_on_a_mesh_is_that_of_one_process(
    tuned: tuple[str, int, tuple[str, ...]], two: Ranks, tmp_path: Path
) -> None:
    method, lora, meshes = tuned
    data = {"sft": sums, "dpo": pairs}[method]()
    base, rows = base_model(tmp_path / "base", dropout=0.0), write_rows(tmp_path / "rows.jsonl", data)
    finetune(tmp_path / "one", base, rows, "replicate=1", method, lora, 4)
    for until, mesh in zip((4,) if len(meshes) == 1 else (2, 4), meshes, strict=True):
        two.run(finetune, tmp_path / "two", base, rows, mesh, method, lora, until)
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    one, other = (read_tensors(tmp_path / run / name) for run in ("one", "two"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a product": ({"mesh": "shard=2 tensor=2"}, "takes 2 x 2 = 4 processes, but there are 2"),
    "heads": ({"mesh": "tensor=2", "model": {"n_heads": 3, "d_head": 8}}, "2 does not divide n_heads 3"),
    "batches": ({"mesh": "shard=2", "accumulation": 3}, "accumulation is 3.*give --accumulation 4"),
    "fp16": ({"mesh": "shard=2", "precision": "fp16"}, "Cannot use precision fp16 with a divided model"),
    "stages": ({"mesh": "pipeline=2", "accumulation": 1}, "accumulation is 1.*2 stages.*give --accumulation 2"),
    "a length": (
        {"mesh": "context=2", "model": {"context_length": 30}},
        "4 does not divide their 30 tokens.*length of 32",
    ),
    "compile": ({"mesh": "context=2", "compile": True}, "Cannot compile over a context axis"),
    "blocks": ({"mesh": "pipeline=2", "model": {"n_layers": 1}}, "more stages than the decoder has blocks.*at most 1"),
    "a time": ({"mesh": "shard=2", "steps": 0, "time": "5m", "preset": "mini"}, "Cannot use time with a divided model"),
    "tasks": ({"mesh": "shard=2", "evaluate_tasks": "cloze"}, "Cannot use evaluate_tasks with a divided model"),
}


@pytest.mark.parametrize(("options", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_mesh_that_a_run_cannot_use_is_refused(options: dict[str, Any], sentence: str) -> None:
    config = RunConfig(**{"steps": 4, "accumulation": 2} | options)
    with pytest.raises(UserError, match=sentence):
        planned(config, config.decoder(100), Processes(count=2))


@pytest.mark.parametrize(
    ("mesh", "axis"), [("pipeline=2", "the stages of a pipeline"), ("context=2", "a context axis")]
)
def test_fine_tuning_divides_neither_blocks_nor_tokens(mesh: str, axis: str) -> None:
    config = FinetuneConfig.of(base="x", sources=("y",), method="sft", steps=4, accumulation=2, mesh=mesh)
    with pytest.raises(UserError, match=f"Cannot fine-tune over {axis}"):
        planned(config, config.decoder(100), Processes(count=2))


def test_methods_that_sample_have_no_tensor_axis() -> None:
    config = FinetuneConfig.of(base="x", sources=("y",), method="grpo", reward="exact", steps=4, mesh="tensor=2")
    with pytest.raises(UserError, match="Cannot sample for grpo over a tensor axis"):
        planned(config, config.decoder(100), Processes(count=2))
