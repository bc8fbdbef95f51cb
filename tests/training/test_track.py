"""TensorBoard and Weights & Biases in addition to metrics.jsonl."""

import json
import math
import os
import struct
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from onward import UserError
from onward.training.run.track import Trackers, check_trackers

from support.grids import first

CONFIG = {"steps": 40, "model": {"n_layers": 2}, "sources": ("play.txt",)}
Row = dict[str, Any]


def rows(first: int, last: int) -> list[Row]:
    """Rows of a run: steps, health and validations."""
    found: list[Row] = []
    for step in range(first, last + 1):
        found.append({"step": step, "loss": 3 - step / 100, "grad_norm": 1.5, "tokens": 64, "expert_load/0": 1 + step})
        if step % 10 == 0:
            found.append({"step": step, "validation_loss": 3.1 - step / 100, "attention_entropy/1": 2.0})
    return found


def curves(given: list[Row]) -> dict[str, dict[int, float]]:
    """The numbers in rows, by name and step."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in given:
        for key, value in row.items():
            if isinstance(value, int | float) and key not in ("step", "failed_step"):
                found[key][row["step"]] = value
    return found


def from_tensorboard(run: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def assert_same(found: Mapping[str, Mapping[int, float]], wanted: Mapping[str, Mapping[int, float]]) -> None:
    assert set(found) == set(wanted)
    for name in wanted:
        assert found[name] == pytest.approx(wanted[name], rel=1e-6), name


def write(run: Path, *given: Row, names: tuple[str, ...] = ("tensorboard",)) -> None:
    trackers = Trackers(names, run, CONFIG)
    for row in given:
        trackers.write(row)
    trackers.close()


@pytest.fixture
def tensorboard() -> None:
    pytest.importorskip("tensorboard")


@pytest.mark.usefixtures("tensorboard")
class TestTensorBoard:
    def test_tensorboard_has_each_row_as_soon_as_it_is_written(self, tmp_path: Path) -> None:
        trackers = Trackers(["tensorboard"], tmp_path, CONFIG)
        for row in rows(1, 30):
            trackers.write(row)
        assert_same(from_tensorboard(tmp_path), curves(rows(1, 30)))
        trackers.close()
        assert_same(from_tensorboard(tmp_path), curves(rows(1, 30)))

    @pytest.mark.parametrize("again", [20, 25])
    def test_resumed_run_voids_the_rows_after_its_save(self, tmp_path: Path, again: int) -> None:
        late = [row | {"lost": 1.0} for row in rows(again + 1, 33)]
        write(tmp_path, *rows(1, again), *late)
        validation = [row for row in rows(again, again) if "loss" not in row]
        write(tmp_path, *validation, *rows(again + 1, 40))
        found = from_tensorboard(tmp_path)
        assert not found.pop("lost", None)
        assert_same(found, curves(rows(1, 40)))

    def test_rollback_voids_later_steps_and_records_its_reason(self, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        trouble = {"step": 20, "failed_step": 27, "reason": "the loss is nan", "skipped": [216, 224]}
        write(tmp_path, *rows(1, 26), trouble, *rows(21, 23))
        assert_same(from_tensorboard(tmp_path), curves(rows(1, 23)))
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        (told,) = events.Tensors("rollback/text_summary")
        assert told.tensor_proto.string_val == [b"step 27: the loss is nan"]

    def test_a_loss_that_is_no_number_is_written_as_such(self, tmp_path: Path) -> None:
        write(tmp_path, {"step": 1, "loss": math.nan}, {"step": 2, "loss": math.inf})
        found = from_tensorboard(tmp_path)["loss"]
        assert math.isnan(found[1])
        assert found[2] == math.inf

    def test_unwritable_folder_warns_once_and_training_goes_on(self, tmp_path: Path) -> None:
        (tmp_path / "tensorboard").write_text("in the way")
        with pytest.warns(UserWarning, match="tensorboard failed, and training continues without it") as told:
            write(tmp_path, *rows(1, 5))
        assert len(told) == 1


OFFLINE = """
import json, os, socket, sys, builtins
from pathlib import Path
real = socket.socket.connect
def connect(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
        raise AssertionError(f"asked for the network: {address}")
    return real(self, address)
socket.socket.connect = connect
from onward.training.run.track import Trackers, check_trackers
run = Path(sys.argv[1])
trackers = Trackers(["wandb"], run, {"steps": 3, "sources": ("a.txt",)})
for line in sys.argv[2:]:
    trackers.write(json.loads(line))
trackers.close()
"""


def offline(run: Path, *lines: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a process with no WANDB variables except those in `environment`, and with an open standard input, so that it
    could ask for a key."""
    home = run / "home"
    home.mkdir(exist_ok=True)
    variables = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"HOME": str(home)} | environment
    waiting, _ = os.pipe()
    command = [sys.executable, "-W", "error::UserWarning", "-c", OFFLINE, str(run), *lines]
    return subprocess.run(command, env=variables, stdin=waiting, capture_output=True, text=True, timeout=120)


def from_wandb(folder: Path) -> list[Row]:
    """The rows in the file of an offline run: blocks of 32 KiB with pieces of records, as in LevelDB's logs."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("*.wandb")
    data, place, whole, found = path.read_bytes(), 7, b"", []
    while place < len(data):
        if (left := 32_768 - place % 32_768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a complete record, or the last piece of a record
            record, whole = vars(wandb_internal_pb2)["Record"].FromString(whole), b""
            items = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            found.append({key: value for key, value in items.items() if not key.startswith("_")})
    return [row for row in found if row]


NOBODY = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}


@pytest.mark.long
@pytest.mark.parametrize("environment", first(1, [{"WANDB_MODE": "online"}, {}, NOBODY]), ids=str)
def test_wandb_works_offline_without_a_key_and_keeps_its_id(tmp_path: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("wandb")
    first = offline(
        tmp_path,
        '{"step": 1, "loss": 3.0}',
        '{"step": 1, "validation_loss": 3.1, "dead_units/0": 0.25}',
        '{"step": 0, "failed_step": 2, "reason": "the loss is nan", "skipped": [8, 16]}',
        **environment,
    )
    assert (first.returncode, first.stdout) == (0, ""), first.stderr
    second = offline(tmp_path, '{"step": 2, "loss": 2.5}', **environment)
    assert second.returncode == 0, second.stderr
    folders = sorted(tmp_path.glob("wandb/offline-run-*"), key=lambda path: path.stat().st_mtime_ns)
    assert len(folders) == 2
    assert {path.name.split("-")[-1] for path in folders} == {(tmp_path / "wandb/id").read_text()}
    assert from_wandb(folders[0]) == [
        {"step": 1, "loss": 3.0},
        {"step": 1, "validation_loss": 3.1, "dead_units/0": 0.25},
        {"step": 0, "rollback": "the loss is nan"},
    ]
    assert from_wandb(folders[1]) == [{"step": 2, "loss": 2.5}]


class Failing:
    """A tracker that fails after one row."""

    seen = 0

    def write(self, row: Mapping[str, Any]) -> None:
        self.seen += 1
        if self.seen > 1:
            raise ConnectionError("no route to host")

    def close(self) -> None:
        raise AssertionError("not asked again")


def test_failing_tracker_warns_once_and_the_others_go_on(tmp_path: Path, tensorboard: None) -> None:
    trackers = Trackers(["tensorboard"], tmp_path, CONFIG)
    trackers.open = {"failing": Failing()} | trackers.open
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for row in rows(1, 30):
            trackers.write(row)
        trackers.close()
    sentences = [str(w.message) for w in told if w.category is UserWarning]
    assert sentences == ["failing failed, and training continues without it: no route to host"]
    assert_same(from_tensorboard(tmp_path), curves(rows(1, 30)))


def test_missing_library_of_a_tracker_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"wandb needs its library: pip install 'onward\[track\]'"):
        check_trackers(["wandb"])


def test_without_trackers_nothing_is_written(tmp_path: Path) -> None:
    write(tmp_path, *rows(1, 3), names=())
    assert list(tmp_path.iterdir()) == []
