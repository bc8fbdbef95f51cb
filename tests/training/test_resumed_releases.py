"""Run folders of each release remain readable, and resume. `releases/VERSION` was written by the code of that version,
and stopped after step 2 of 4."""

import shutil
from pathlib import Path

import pytest
import torch

import onward
from onward import Run
from onward.reports.runs.record import RunRecord

RELEASES = sorted((Path(__file__).parents[1] / "checkpoint/releases").iterdir())


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_run_of_a_release_is_read_and_goes_on(release: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(release, folder)
    assert RunRecord(folder).state == "stopped"
    lm = onward.load(folder)
    assert lm.text().decode(lm.text().encode("The cat")) == "The cat"
    before = [parameter.clone() for parameter in lm.model.parameters()]
    run = Run.resume(folder)
    assert run.step == 2
    assert not [event for event in run.train() if type(event).__name__ in ("Rollback", "Notice")]
    assert run.step == 4
    after = onward.load(folder).model.parameters()
    assert not all(map(torch.equal, before, after))
