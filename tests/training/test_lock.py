"""One process at a time trains in a run folder."""

from pathlib import Path
from typing import Any

import pytest

from onward.errors import UserError
from onward.training.lock import is_running
from onward.training.run import Run

from support.runs import config


def test_run_folder_is_locked_only_while_a_process_trains_in_it(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=4, validate_every=2))
    assert not is_running(run.folder)
    events = run.train(stop=lambda: run.step == 2)
    next(events)
    assert is_running(run.folder)
    with pytest.raises(UserError, match="another process trains in"):
        Run.resume(run.folder)
    list(events)
    assert not is_running(run.folder)
    assert list(Run.resume(run.folder).train())


def test_second_process_cannot_train_in_a_locked_folder(story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", steps=4))
    other = Run.resume(run.folder)
    events: Any = run.train()
    next(events)
    with pytest.raises(UserError, match="another process trains in"):
        next(other.train())
    events.close()
    assert not is_running(tmp_path)
