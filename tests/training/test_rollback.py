"""A failed step: the run goes back to its newest save, and skips the windows of that step."""

import json
import math
import threading
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onward import Batch, Decoder, Notice, Rollback, Run, Step, UserError
from onward.checkpoint.saves.folder import saves
from onward.checkpoint.weights import read_tensors
from onward.training import CrossEntropy
from onward.training.run.events import Event

from support.disk import with_room_for
from support.grids import first
from support.runs import assert_same_run, config, metrics

SETTINGS: dict[str, Any] = {"steps": 40, "validate_every": 10, "average": 0.9, "learning_rate": 3e-3}


class Harm:
    """A loss that corrupts the weights before it is computed on batches that begin with `first_windows`."""

    def __init__(self, spoil: Callable[[Any], object], first_windows: Container[int]) -> None:
        self.spoil, self.first_windows = spoil, first_windows
        self.seen: list[int] = []  # first window of each batch, which is the dropout seed if the run's seed is 0

    def __call__(self, model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
        self.seen.append(batch.seed)
        if batch.seed in self.first_windows:
            with torch.no_grad():
                self.spoil(model)
        return CrossEntropy()(model, batch)


def not_a_number(model: Any) -> None:
    model.blocks[1].mlp.down.weight[0, 0] = float("nan")


def spoilt_weights(model: Any) -> None:
    """Weights as after a step that was far too large."""
    model.embed.weight.normal_(generator=torch.Generator().manual_seed(0), std=10.0)


def until_end(run: Run) -> list[Event]:
    return list(run.train())


@pytest.mark.parametrize("harm", [not_a_number, spoilt_weights])
def test_run_goes_back_to_its_newest_save_and_skips_the_windows(
    harm: Callable[[Any], object], story_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    # first window of step 26; each step has four windows
    run = Run.start(config(story_file, out, **SETTINGS), loss=Harm(harm, {100}))
    (event,) = [event for event in until_end(run) if isinstance(event, Rollback)]
    assert (event.step, event.failed_step, event.skipped) == (20, 26, (100, 104))
    assert ("nan" in event.reason) == (harm is not_a_number)
    assert run.progress.position == 41 * 4
    steps = [row["step"] for row in metrics(out) if "loss" in row]
    assert steps == list(range(1, 41)), "undone steps are not in the metrics"
    (row,) = [row for row in metrics(out) if "reason" in row]
    assert (row["failed_step"], row["skipped"]) == (26, [100, 104])
    (line,) = (out / "skipped.jsonl").read_text().splitlines()
    assert json.loads(line)["first_window"] in story_file.read_text()
    assert json.loads((saves(out)[-1] / "progress.json").read_text())["skipped"] == [[100, 104]]
    assert all(t.isfinite().all() for t in read_tensors(out / "model.safetensors").values())


def test_a_run_that_goes_back_has_the_routing_biases_of_its_save(story_file: Path, tmp_path: Path) -> None:
    experts = {"kind": "experts", "count": 4, "top_k": 2, "d_ff": 8, "router": {"kind": "sigmoid"}, "backend": "loop"}
    model = {"d_model": 16, "n_layers": 2, "n_heads": 2, "context_length": 16, "mlp": experts}
    settings = {"model": model, "steps": 4, "validate_every": 2, "average": 0.9}
    harm = Harm(lambda model: model.embed.weight.fill_(math.nan), {12})  # in step 4
    run = Run.start(config(story_file, tmp_path / "run", **settings), loss=harm)
    biases = {}
    for event in run.train():
        now = {name: p.clone() for name, p in run.model.named_parameters() if "routing_bias" in name}
        if isinstance(event, Rollback):
            break
        biases[event.step] = now
    assert event.step == 2
    assert all(torch.equal(now[name], bias) for name, bias in biases[2].items())
    assert not all(torch.equal(biases[3][name], bias) for name, bias in biases[2].items())


@pytest.mark.long
@pytest.mark.parametrize("stopped_at", first(2, [27, 40, 22, 33]))
def test_run_that_rolled_back_resumes_exactly(stopped_at: int, story_file: Path, tmp_path: Path) -> None:
    """The run is stopped before, during and after the rollback; `stopped_at` counts all steps, including undone
    ones."""
    whole = Run.start(config(story_file, tmp_path / "whole", **SETTINGS), loss=Harm(spoilt_weights, {100}))
    until_end(whole)
    run = Run.start(config(story_file, tmp_path / "run", **SETTINGS), loss=Harm(spoilt_weights, {100}))
    events, made = run.train(), 0
    while made < stopped_at:
        made += hasattr(next(events), "grad_norm")
    run.saver.finish()
    del events
    until_end(Run.resume(tmp_path / "run", loss=Harm(spoilt_weights, {100})))
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert (tmp_path / "run/skipped.jsonl").read_text() == (tmp_path / "whole/skipped.jsonl").read_text()


def test_three_failures_in_a_row_end_a_run_with_an_explanation(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", **SETTINGS), loss=Harm(not_a_number, {*range(100, 140)}))
    with pytest.raises(UserError, match=r"step 26 failed, the 3rd failure in a row .* lower learning rate"):
        until_end(run)
    assert all(t.isfinite().all() for t in read_tensors(tmp_path / "run/model.safetensors").values())
    assert len((tmp_path / "run/skipped.jsonl").read_text().splitlines()) == 2


@pytest.mark.long
def test_failures_with_good_saves_between_them_do_not_end_a_run(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", **SETTINGS), loss=Harm(not_a_number, {20, 60, 100, 140}))
    failed = [event.failed_step for event in until_end(run) if isinstance(event, Rollback)]
    assert len(failed) == 4
    assert run.step == 40


def test_weights_that_are_not_finite_are_never_saved(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", **SETTINGS))
    failed = []
    for event in run.train():
        if isinstance(event, Step) and event.step == 20 and not failed:
            with torch.no_grad():
                # as if the update had produced it, since the gradient was finite
                run.model.embed.weight[0, 0] = float("nan")
        failed += [(event.step, event.failed_step)] if isinstance(event, Rollback) else []
    assert failed == [(10, 21)]
    kept = [read_tensors(save / "model.safetensors") for save in saves(run.folder)]
    assert all(tensor.isfinite().all() for tensors in kept for tensor in tensors.values())


def test_weights_spoilt_by_the_last_update_are_rolled_back(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", **SETTINGS))
    (optimizer,) = run.trainer.optimizers
    update, spoilt = optimizer.step, []

    def step(*arguments: Any) -> None:
        update(*arguments)
        if run.step == 39 and not spoilt:  # after the update of step 40
            spoilt.append(True)
            with torch.no_grad():
                run.model.embed.weight[0, 0] = float("inf")

    optimizer.step = step  # type: ignore[method-assign, assignment]
    (event,) = [event for event in until_end(run) if isinstance(event, Rollback)]
    assert (event.failed_step, event.reason) == (40, "the weights are not finite")
    assert run.step == 40
    assert all(t.isfinite().all() for t in read_tensors(run.folder / "model.safetensors").values())


def grow(model: Any) -> None:
    """Make weights finite but so large that every loss is a spike."""
    model.embed.weight.mul_(1e6)


def spoil_after_update(run: Run, loss: Harm, window: int) -> Run:
    """Change the run so that the update in the step with window `window` makes weights huge."""
    (optimizer,) = run.trainer.optimizers

    def spoil(*_: object) -> None:
        if loss.seen[-1] == window:
            with torch.no_grad():
                grow(run.model)

    optimizer.register_step_post_hook(spoil)
    return run


@pytest.mark.parametrize("resumed", [False, True])
def test_run_goes_back_one_save_further_where_the_newest_is_spoilt(
    resumed: bool, story_file: Path, tmp_path: Path
) -> None:
    loss = Harm(grow, ())
    run = spoil_after_update(Run.start(config(story_file, tmp_path / "run", **SETTINGS), loss=loss), loss, 76)
    if resumed:
        list(run.train(stop=lambda: run.step == 20))
        run = spoil_after_update(Run.resume(run.folder, loss=loss), loss, 76)
    events = until_end(run)
    rollbacks = [(event.step, event.failed_step, event.skipped) for event in events if isinstance(event, Rollback)]
    assert rollbacks == [(20, 21, (80, 84)), (10, 21, (40, 88))]
    (told,) = [event.sentence for event in events if isinstance(event, Notice)]
    assert "step-0000020 is damaged (every step from it failed): it is kept as damaged-step-0000020" in told
    assert (run.step, run.progress.position) == (40, 88 + 30 * 4)
    assert [row["step"] for row in metrics(run.folder) if "loss" in row] == list(range(1, 41))
    assert metrics(run.folder)[-1]["validation_loss"] < 3


def test_save_is_not_blamed_for_two_failures_some_steps_after_it(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", **SETTINGS), loss=Harm(not_a_number, {100, 104}))
    rollbacks = [(event.step, event.skipped) for event in until_end(run) if isinstance(event, Rollback)]
    assert rollbacks == [(20, (100, 104)), (20, (104, 108))]


def test_bad_batches_with_good_ones_between_do_not_end_a_run(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", **SETTINGS), loss=Harm(not_a_number, {84, 96, 104, 112}))
    failed = [event.failed_step for event in until_end(run) if isinstance(event, Rollback)]
    assert len(failed) == 4, "all of them within one interval of saves"
    assert run.step == 40
    rows = [row for row in metrics(run.folder) if "reason" in row]
    assert [row["failed_step"] for row in rows] == failed
    lines = [json.loads(line) for line in (run.folder / "skipped.jsonl").read_text().splitlines()]
    assert len({line["first_window"] for line in lines}) == 4


def test_full_disk_does_not_prevent_a_rollback(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", **SETTINGS), loss=Harm(spoilt_weights, {100}))
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


def test_batches_prepared_before_a_rollback_are_discarded(story_file: Path, tmp_path: Path) -> None:
    loss = Harm(spoilt_weights, {100, 108})  # windows of steps 26 and 27, which are prepared ahead together
    run = Run.start(config(story_file, tmp_path / "run", **SETTINGS), loss=loss)
    failed = [event.failed_step for event in until_end(run) if isinstance(event, Rollback)]
    assert failed == [26, 27]
    # back to the save of step 20, whose next window is 80; then to the save of step 26, made because the run recovered
    # there
    assert loss.seen == [*range(0, 104, 4), *range(80, 100, 4), *range(104, 112, 4), *range(112, 168, 4)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
