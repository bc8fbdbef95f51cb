"""Training that went wrong: back to the last good save, without the windows that did it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.checkpoint.training import saves
from onward.checkpoint.weights import read_tensors
from onward.errors import UserError
from onward.training.loop import Batch, Step
from onward.training.run import Event, Rollback, Run

from support.disk import with_room_for
from support.runs import assert_same_run, config, metrics

SETTINGS: dict[str, Any] = {"steps": 40, "validate_every": 10, "average": 0.9, "learning_rate": 3e-3}
Harm = Callable[[Run, Batch], Batch]


def not_a_number(run: Run, batch: Batch) -> Batch:
    with torch.no_grad():
        run.model.blocks[1].mlp.down.weight[0, 0] = float("nan")
    return batch


def spoilt_weights(run: Run, batch: Batch) -> Batch:
    """What a step far too large leaves behind."""
    with torch.no_grad():
        run.model.embed.weight.normal_(generator=torch.Generator().manual_seed(0), std=10.0)
    return batch


def harmed(run: Run, harm: Harm, harmful: set[int]) -> Run:
    """A run in which the windows with these numbers do harm."""
    read = run.batches

    def batches(numbers: list[int]) -> list[Batch]:
        found = read(numbers)
        return [harm(run, batch) if harmful & {*numbers} else batch for batch in found]

    run.batches = batches  # type: ignore[method-assign, assignment]
    return run


def until_end(run: Run) -> list[Event]:
    return list(run.train())


@pytest.mark.parametrize("harm", [not_a_number, spoilt_weights])
def test_a_run_goes_back_to_its_last_good_save_and_leaves_the_windows_out(
    harm: Harm, story_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = harmed(Run.start(config(story_file, out, **SETTINGS)), harm, {100})  # of step 26, four windows each
    (event,) = [event for event in until_end(run) if isinstance(event, Rollback)]
    assert (event.step, event.failed_step, event.skipped) == (20, 26, (100, 104))
    assert ("nan" in event.reason) == (harm is not_a_number)
    assert run.position == 41 * 4
    steps = [row["step"] for row in metrics(out) if "loss" in row]
    assert steps == list(range(1, 41)), "what was undone is not in the metrics"
    (row,) = [row for row in metrics(out) if "reason" in row]
    assert (row["failed_step"], row["skipped"]) == (26, [100, 104])
    (line,) = (out / "skipped.jsonl").read_text().splitlines()
    assert json.loads(line)["first_window"] in story_file.read_text()
    assert json.loads((saves(out)[-1] / "progress.json").read_text())["skipped"] == [[100, 104]]
    assert all(t.isfinite().all() for t in read_tensors(out / "model.safetensors").values())


@pytest.mark.parametrize("stopped_at", [22, 27, 33, 40])
def test_a_run_that_healed_resumes_exactly(stopped_at: int, story_file: Path, tmp_path: Path) -> None:
    """`stopped_at` counts the steps made, those that were undone included: before, during and after the healing."""
    whole = harmed(Run.start(config(story_file, tmp_path / "whole", **SETTINGS)), spoilt_weights, {100})
    until_end(whole)
    run = harmed(Run.start(config(story_file, tmp_path / "run", **SETTINGS)), spoilt_weights, {100})
    events, made = run.train(), 0
    while made < stopped_at:
        made += hasattr(next(events), "grad_norm")
    run.saver.finish()
    del events
    until_end(harmed(Run.resume(tmp_path / "run"), spoilt_weights, {100}))
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert (tmp_path / "run/skipped.jsonl").read_text() == (tmp_path / "whole/skipped.jsonl").read_text()


def test_three_troubles_in_a_row_end_a_run_with_an_explanation(story_file: Path, tmp_path: Path) -> None:
    run = harmed(Run.start(config(story_file, tmp_path / "run", **SETTINGS)), not_a_number, {*range(100, 140)})
    with pytest.raises(UserError, match=r"step 26 went wrong, the 3rd time in a row .* lower learning rate"):
        until_end(run)
    assert all(t.isfinite().all() for t in read_tensors(tmp_path / "run/model.safetensors").values())
    assert len((tmp_path / "run/skipped.jsonl").read_text().splitlines()) == 2


def test_troubles_with_good_saves_between_them_do_not_end_a_run(story_file: Path, tmp_path: Path) -> None:
    run = harmed(Run.start(config(story_file, tmp_path / "run", **SETTINGS)), not_a_number, {20, 60, 100, 140})
    failed = [event.failed_step for event in until_end(run) if isinstance(event, Rollback)]
    assert len(failed) == 4
    assert run.step == 40


def test_weights_that_are_not_finite_are_never_saved(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", **SETTINGS))
    failed = []
    for event in run.train():
        if isinstance(event, Step) and event.step == 20 and not failed:
            with torch.no_grad():
                run.model.embed.weight[0, 0] = float("nan")  # as if the update had done it: the gradient was finite
        failed += [(event.step, event.failed_step)] if isinstance(event, Rollback) else []
    assert failed == [(10, 21)]
    kept = [read_tensors(save / "model.safetensors") for save in saves(run.folder)]
    assert all(tensor.isfinite().all() for tensors in kept for tensor in tensors.values())


def test_weights_spoilt_by_the_last_update_are_healed_as_well(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", **SETTINGS))
    update, spoilt = run.optimizers[0].step, []

    def step(*arguments: Any) -> None:
        update(*arguments)
        if run.step == 39 and not spoilt:  # the update of step 40
            spoilt.append(True)
            with torch.no_grad():
                run.model.embed.weight[0, 0] = float("inf")

    run.optimizers[0].step = step  # type: ignore[method-assign, assignment]
    (event,) = [event for event in until_end(run) if isinstance(event, Rollback)]
    assert (event.failed_step, event.reason) == (40, "the weights are not finite")
    assert run.step == 40
    assert all(t.isfinite().all() for t in read_tensors(run.folder / "model.safetensors").values())


def test_bad_batches_with_good_ones_between_do_not_end_a_run(story_file: Path, tmp_path: Path) -> None:
    run = harmed(Run.start(config(story_file, tmp_path / "run", **SETTINGS)), not_a_number, {84, 96, 104, 112})
    failed = [event.failed_step for event in until_end(run) if isinstance(event, Rollback)]
    assert len(failed) == 4, "all of them within one interval of saves"
    assert run.step == 40
    rows = [row for row in metrics(run.folder) if "reason" in row]
    assert [row["failed_step"] for row in rows] == failed
    lines = [json.loads(line) for line in (run.folder / "skipped.jsonl").read_text().splitlines()]
    assert len({line["first_window"] for line in lines}) == 4


def test_a_disk_that_is_full_does_not_keep_a_run_from_healing(story_file: Path, tmp_path: Path) -> None:
    run = harmed(Run.start(config(story_file, tmp_path / "run", **SETTINGS)), spoilt_weights, {100})
    events = run.train()
    while run.step < 22:
        next(events)
    run.saver.finish()
    with with_room_for(1_000):
        while not isinstance(next(events), Rollback):
            pass
        next(events)
    list(events)
    assert [row["step"] for row in metrics(run.folder) if "loss" in row] == list(range(1, 41))
    assert any("reason" in row for row in metrics(run.folder))
