"""The scores of a run or model at tasks, which are kept in its folder. Does not import torch.

RUN/tasks.jsonl    a line per score at a task, with the step of the weights
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.base import fields
from onward.base.errors import UserError
from onward.reports.runs.metrics import read_lines
from onward.training.run.journal import Journal

if TYPE_CHECKING:
    from onward.evaluation.benchmark import TaskResult
    from onward.evaluation.tasks import Task

FILE = "tasks.jsonl"


@dataclass(frozen=True)
class TaskScore:
    """The stored score of a model at a benchmark task, with its standard error and the score of guessing."""

    step: int  # step of the evaluated weights
    task: str
    score: float
    metric: str = "acc"  # "centered" for CORE
    suite: str = "Onward"  # Onward, CORE or lm-evaluation-harness
    error: float | None = None  # standard error; None: not known
    chance: float | None = None  # score of guessing; None: not known
    examples: int = 0  # solved examples before each question
    questions: int | None = None  # number of questions; None: not known

    @property
    def shown(self) -> bool | None:
        """Whether the score exceeds guessing by more than two standard errors; None if one of these is not known."""
        if self.error is None or self.chance is None:
            return None
        return self.score > self.chance + 2 * self.error


def scores_of(tasks: Sequence[Task], results: Sequence[TaskResult], step: int) -> list[TaskScore]:
    """Scores to store, with the mean of CORE if all of its tasks are among them."""
    from onward.evaluation.tasks.core import Core, core_metric, entries

    core = {task.label: task for task in tasks if isinstance(task, Core)}
    scores = [
        TaskScore(
            step,
            one.task,
            one.score,
            suite="CORE" if one.task in core else "Onward",
            error=None if isnan(one.error) else one.error,
            chance=one.chance,
            examples=one.examples,
            questions=one.questions,
        )
        for one in results
    ]
    measured = [one for one in results if one.task in core]
    if measured and [one.task for one in measured] == [*entries(core[measured[0].task].folder)]:
        value, error = core_metric([(one.score, one.error, one.chance) for one in measured])
        total = sum(one.questions for one in measured)
        scores.append(TaskScore(step, "CORE", value, "centered", "CORE", error, 0.0, questions=total))
    return scores


def keep_scores(run: Path, rows: Iterable[TaskScore]) -> None:
    journal = Journal(run / FILE)
    for row in rows:
        journal.write(fields.plain(row))


def read_scores(run: Path, step: int) -> list[TaskScore]:
    """The newest score of each task for the weights of training step `step`; lines that are not scores are skipped."""
    scores: dict[tuple[Any, ...], TaskScore] = {}
    for row in read_lines(run / FILE):
        score = score_of(row)
        if score and score.step == step:
            key = score.suite, score.task, score.metric, score.examples
            scores.pop(key, None)
            scores[key] = score
    return list(scores.values())


def score_of(row: Mapping[str, Any]) -> TaskScore | None:
    try:
        return fields.build(TaskScore, row)
    except UserError:
        return None
