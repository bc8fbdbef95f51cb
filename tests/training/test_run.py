"""Training runs: folders that other libraries can load, and that resume as if the run had never stopped."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import Notice, Run, UserError, Validation
from onward.base.device import choose_device
from onward.checkpoint.saves.folder import saves
from onward.checkpoint.weights import read_tensors
from onward.training.run.events import Event

from support.disk import with_room_for
from support.runs import SETTINGS, TINY, assert_same_run, config, metrics


@pytest.fixture(scope="module")
def whole(story_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    list(Run.start(config(story_file, folder)).train())
    return folder


def test_run_learns_and_records_its_steps(whole: Path) -> None:
    rows = metrics(whole)
    steps, validations = [r for r in rows if "loss" in r], [r for r in rows if "validation_loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 31))
    assert [r["step"] for r in validations] == [10, 20, 30]
    assert steps[0]["loss"] > 2.5
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert steps[-1]["learning_rate"] == pytest.approx(1e-2 * 0.05, rel=1e-12)
    assert max(r["learning_rate"] for r in steps) == pytest.approx(1e-2)
    assert [p.name for p in saves(whole)] == ["step-0000020", "step-0000030"], "the last two are kept"


@pytest.mark.parametrize("at", [1, 10, 17, 29])
def test_resumed_run_equals_one_that_never_stopped(at: int, whole: Path, story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run"))
    for _ in run.train(stop=lambda: run.step == at):
        pass
    assert run.step == at
    torch.manual_seed(99)
    list(Run.resume(tmp_path / "run").train())
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize(
    ("at", "kind"),
    [(20, "Validation"), *(pytest.param(at, "Step", marks=pytest.mark.long) for at in (10, 13, 20))],
)
def test_killed_run_resumes_exactly(at: int, kind: str, whole: Path, story_file: Path, tmp_path: Path) -> None:
    program = f"""
import os, signal
from onward.training.run.run import Run
from onward.training.config import RunConfig
for event in Run.start(RunConfig(sources=({str(story_file)!r},), out={str(tmp_path / "run")!r}, **{SETTINGS})).train():
    if event.step == {at} and type(event).__name__ == {kind!r}:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    list(Run.resume(tmp_path / "run").train())
    assert_same_run(tmp_path / "run", whole)


def test_run_killed_before_its_first_save_can_be_resumed(whole: Path, story_file: Path, tmp_path: Path) -> None:
    events = Run.start(config(story_file, tmp_path / "run")).train()
    for _ in range(3):
        next(events)
    del events
    list(Run.resume(tmp_path / "run").train())
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [({"steps": 7}, 7), ({"steps": 0, "epochs": 2.0}, None), ({"steps": 0, "epochs": 0.5, "accumulation": 2}, None)],
)
def test_steps_and_epochs_fix_the_steps(changes: dict, steps: int | None, story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", **changes))
    per_step = run.config.batch_size * run.config.accumulation
    expected = steps or round(changes["epochs"] * len(run.planner.windows) / per_step)
    assert run.config.steps == expected
    assert json.loads((tmp_path / "run/run.json").read_text())["steps"] == expected


def test_time_fixes_the_steps_of_a_schedule_that_falls_from_the_start(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=0, time="5s", validate_every=0, schedule="cosine"))
    steps = run.config.steps
    assert steps >= 1
    assert run.config.time == ""
    for _ in run.train(stop=lambda: run.step == 2):
        pass
    again = Run.resume(tmp_path / "run")
    assert (again.config.steps, again.step) == (steps, 2)


def test_device_is_fixed_at_the_start_and_must_be_there_to_resume(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", device="auto")).folder
    options = json.loads((run / "run.json").read_text())
    assert options["device"] == str(choose_device("auto"))
    (run / "run.json").write_text(json.dumps(options | {"device": "cuda:99"}))
    with pytest.raises(UserError, match=r"device is 'cuda:99': .*; choose auto or cpu, in .*run\.json"):
        Run.resume(run)


def test_timing_leaves_no_trace_in_the_weights(story_file: Path, tmp_path: Path) -> None:
    timed = Run.start(config(story_file, tmp_path / "timed", steps=0, time="2s"))
    plain = Run.start(config(story_file, tmp_path / "plain"))
    for one, other in zip(timed.model.parameters(), plain.model.parameters()):
        assert torch.equal(one, other)
    assert not any(optimizer.state for optimizer in timed.trainer.optimizers)
    assert (timed.step, timed.progress.position, timed.trainer.spikes.state) == (0, 0, [])


def until(events: Iterator[Event], step: int) -> None:
    """Continue to the validation at a step, which follows the save of this step."""
    while not isinstance(event := next(events), Validation) or event.step < step:
        pass


def test_full_disk_is_reported_and_training_goes_on(whole: Path, story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run"))
    events = run.train()
    until(events, 10)
    run.saver.finish()
    with with_room_for(1_000):  # no room for a save or a line of the metrics
        found = [next(events) for _ in range(11)]
        run.saver.finish()
    found += events
    told = [event.sentence for event in found if isinstance(event, Notice)]
    assert len(told) == 1
    assert told[0].startswith("saving step 20 in")
    assert "the next save tries again" in told[0]
    assert [p.name for p in saves(tmp_path / "run")] == ["step-0000010", "step-0000030"]
    assert not list((tmp_path / "run").rglob(".*")), "nothing half-written is left"
    assert_same_run(tmp_path / "run", whole)


def test_removed_folder_is_reported_at_the_next_save(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run"))
    events = run.train()
    until(events, 10)
    run.saver.finish()
    run.folder.rename(tmp_path / "elsewhere")
    until(events, 20)
    run.saver.finish()
    told = next(event for event in events if isinstance(event, Notice))
    assert told.step <= 21
    assert told.sentence.startswith(f"saving step 20 in {run.folder} failed: the folder has been moved or removed;")
    (tmp_path / "elsewhere").rename(run.folder)
    list(events)
    assert saves(run.folder)[-1].name == "step-0000030"


def test_failed_last_save_is_an_error_and_resuming_repeats_it(whole: Path, story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run"))
    events = run.train()
    until(events, 20)
    run.saver.finish()
    with with_room_for(1_000), pytest.raises(UserError, match=r"saving step 30 in .* too large"):
        list(events)
    list(Run.resume(tmp_path / "run").train())
    assert_same_run(tmp_path / "run", whole)


def test_resuming_a_finished_run_changes_nothing(story_file: Path, tmp_path: Path) -> None:
    list(Run.start(config(story_file, tmp_path / "run", validation_tokens=32)).train())
    before = metrics(tmp_path / "run")
    list(Run.resume(tmp_path / "run").train())
    assert metrics(tmp_path / "run") == before


def test_run_is_not_started_over_another(whole: Path, story_file: Path) -> None:
    with pytest.raises(UserError, match=r"already contains a run: --resume"):
        Run.start(config(story_file, whole))
    with pytest.raises(UserError, match=r"there is no run\.json"):
        Run.resume(whole / "data")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sizes in contradiction": ({"model": {"d_model": 30, "n_heads": 4}}, "d_model 30 is not divisible"),
    "an odd rotating width": ({"model": {"d_model": 36, "n_heads": 4}}, "rotate"),
    "heads that do not group": ({"model": {"n_kv_heads": 3}}, "n_kv_heads 3"),
    "an unknown field": ({"model": {"n_layer": 3}}, "did you mean n_layers"),
    "a vocabulary too small": ({"model": {"vocab_size": 3}}, "raise it"),
    "a text shorter than one window": ({"model": {"context_length": 100_000}}, "give it more text"),
    "a missing validation text": ({"validation": "gone.txt"}, "gone.txt does not exist"),
    "a share out of range": ({"validation": "1.5"}, "validation is 1.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_run_is_one_sentence_and_leaves_no_folder(case: str, story_file: Path, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        Run.start(config(story_file, tmp_path / "runs/run", **changes))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.*"))


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 with biases and its own head": {"attention": {"bias": True, "out_bias": True}, "tied": False},
    "llama": {"attention": "self(qk_norm=none)"},
    "llama, untied": {"attention": "self(qk_norm=none)", "tied": False},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_trained_folder_loads_in_transformers_with_the_same_logits(
    shape: str, story_file: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = TINY | {"dropout": 0.0} | SHAPES[shape]
    lm = onward.train(str(story_file), tmp_path, **SETTINGS | {"steps": 8, "model": model})
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == shape.split()[0].strip(",")
    text = "The cat sat on the mat."
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path)(text, return_tensors="pt")["input_ids"]
    assert ids.tolist() == [lm.tokenizer.encode(text)]
    with torch.no_grad():
        expected, found, trained = theirs(ids).logits, onward.load(tmp_path).model(ids), lm.model(ids)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert type(theirs).__module__.split(".")[1] == "models", "the class is one of transformers' own"
    assert torch.equal(found, trained)


def test_run_trains_the_trainable_parameters_of_a_given_model(whole: Path, story_file: Path, tmp_path: Path) -> None:
    lm = onward.load(whole)
    lm.model.embed.weight.requires_grad_(False)
    given = {name: p.detach().clone() for name, p in lm.model.named_parameters()}
    changes: dict[str, Any] = {"tokenizer": str(whole), "model": {}, "preset": "tiny", "average": 0.9}
    run = Run.start(config(story_file, tmp_path / "run", **changes), model=lm.model)
    assert run.model.config == lm.model.config
    for name, p in onward.load(run.folder).model.named_parameters():
        assert torch.equal(p, given[name]), "step 0 is the given model"
    for _ in run.train(stop=lambda: run.step == 12):
        pass
    resumed: Any = Run.resume(Path(shutil.copytree(run.folder, tmp_path / "copy")))
    list(resumed.train())
    list(run.train())
    assert all(map(torch.equal, resumed.model.parameters(), run.model.parameters()))
    assert torch.equal(resumed.model.embed.weight, given["embed.weight"])
    assert not torch.equal(resumed.model.blocks[0].attn_norm.weight, given["blocks.0.attn_norm.weight"])
    assert not [name for name in read_tensors(saves(run.folder)[-1] / "state.safetensors") if "embed" in name]
