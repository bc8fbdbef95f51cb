"""The output of training from Python."""

import io
import sys
from pathlib import Path

import pytest

import onward
from onward.training.run.events import Event

from support.runs import SETTINGS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_training_from_python_shows_its_progress_on_a_terminal_only(
    story_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    for name, stream, on_event in (
        ("seen", Terminal(), None),
        ("piped", io.StringIO(), None),
        ("own", Terminal(), events.append),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        onward.train(str(story_file), tmp_path / name, on_event, **SETTINGS | {"steps": 4, "validate_every": 2})
        if name != "seen":
            assert "loss" not in stream.getvalue()
            continue
        *_, last, validation, end = (line.rpartition("\r")[2].rstrip() for line in stream.getvalue().split("\n"))
        assert last.startswith("step 4 of 4 | loss ")
        assert validation.startswith("step 4 of 4 | validation loss ")
        assert end == ""
    assert [event.step for event in events] == [1, 2, 2, 3, 4, 4]
