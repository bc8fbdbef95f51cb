"""Tasks at each validation: their scores are recorded and drawn, and training is the same as without them."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import onward
from onward import Run, UserError
from onward.checkpoint.weights import read_tensors
from onward.evaluation.tasks import tasks_of
from onward.reports.runs.charts import charts
from onward.reports.runs.metrics import read_metrics

from support.runs import assert_same_run, config, metrics

TASKS = "cloze(before=6, after=2), copying, mapping(shots=2)"
LABELS = "cloze(before=6, after=2)", "copying", "mapping, 2 examples"
ASKED = {"evaluate_tasks": TASKS, "task_limit": 12}


@pytest.fixture(scope="module")
def asked(story_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with tasks that was never stopped."""
    folder = tmp_path_factory.mktemp("asked") / "run"
    list(Run.start(config(story_file, folder, **ASKED)).train())
    return folder


def test_tasks_change_no_bit_of_training(asked: Path, story_file: Path, tmp_path: Path) -> None:
    list(Run.start(config(story_file, tmp_path / "plain")).train())
    for name in "model.safetensors", "checkpoints/step-0000030/state.safetensors":
        one, other = (read_tensors(folder / name) for folder in (asked, tmp_path / "plain"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name
    without = [{k: v for k, v in row.items() if not k.startswith("task/")} for row in metrics(asked)]
    assert without == metrics(tmp_path / "plain")


def test_a_resumed_run_with_tasks_equals_one_that_never_stopped(asked: Path, story_file: Path, tmp_path: Path) -> None:
    run = Run.start(config(story_file, tmp_path / "run", **ASKED))
    for _ in run.train(stop=lambda: run.step == 17):
        pass
    list(Run.resume(tmp_path / "run").train())
    assert_same_run(tmp_path / "run", asked)


def test_scores_are_those_of_the_saved_model(asked: Path) -> None:
    rows = [row for row in metrics(asked) if "validation_loss" in row]
    assert [[*filter(lambda key: key.startswith("task/"), row)] for row in rows] == [[f"task/{x}" for x in LABELS]] * 3
    found = onward.load(asked).evaluate_tasks(tasks_of(TASKS.partition(", copying")[2].lstrip(", ")), limit=12)
    assert [rows[-1][f"task/{one.task}"] for one in found] == [one.score for one in found]


def test_the_page_draws_a_line_for_each_task(asked: Path) -> None:
    page = charts(read_metrics(asked))
    assert "tasks" in page
    assert all(label in page for label in LABELS)


@dataclass(frozen=True)
class Case:
    changes: dict[str, object]
    message: str


CASES = {
    "an unknown task": Case({"evaluate_tasks": "copyin"}, "did you mean copying"),
    "no such file": Case({"evaluate_tasks": "cloze:absent.txt"}, "absent.txt"),
    "a text that is too short": Case({"evaluate_tasks": "cloze(before=4000)"}, "name a longer text"),
    "written answers": Case({"evaluate_tasks": "answers:{answers}"}, "has no choices"),
    "no validation": Case({"evaluate_tasks": "copying", "validation": "none"}, "there is no validation text"),
    "a limit of nothing": Case({"task_limit": 5}, "without tasks"),
}


@pytest.mark.parametrize("name", CASES)
def test_tasks_that_cannot_be_asked_are_one_sentence(name: str, story_file: Path, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"question": "2 + 2 =", "answer": "4"}\n')
    changes = {
        key: value.format(answers=tmp_path / "answers.jsonl") if isinstance(value, str) else value
        for key, value in CASES[name].changes.items()
    }
    with pytest.raises(UserError, match=CASES[name].message):
        Run.start(config(story_file, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()
