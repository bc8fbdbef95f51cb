"""Runs tasks: the share of questions that a model answers right, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from onward.data.progress import Progress, silent
from onward.errors import UserError
from onward.evaluation.continuations import pair_of, score_continuations
from onward.evaluation.tasks.task import Question, ScoredTask, Task
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer

Generate = Callable[[Sequence[str]], Sequence[str]]  # writes an answer to each prompt, up to the end of a line


@dataclass(frozen=True)
class TaskResult:
    """The result of a model on a task: its score, the share of right answers, with the standard error."""

    task: str
    score: float  # the share of right answers
    error: float  # standard error of the score; NaN for one question
    by_length: float | None  # the share if log-probabilities are divided by the bytes of their choice; None: no choices
    chance: float  # the score of guessing
    examples: int  # in front of each question
    right: tuple[bool, ...]  # of each question

    @property
    def questions(self) -> int:
        """The number of questions."""
        return len(self.right)


def run_task(
    task: Task,
    model: Decoder,
    tokenizer: Tokenizer,
    generate: Generate,
    *,
    examples: int = 0,
    limit: int = 200,
    progress: Progress = silent,
) -> TaskResult:
    """Ask up to `limit` questions of a task, each after the same `examples` solved ones. `generate` writes the answers
    of questions without choices; it is called once. `progress` is called with the task, the number of choices or
    questions done, and of all. Raises a UserError if a task has too few questions."""
    report = lambda done, total: progress(task.label, done, total)
    if isinstance(task, ScoredTask):
        if examples:
            raise UserError(f"examples is {examples}, and the task {task.label} has its own: leave it out")
        right = task.score(model, tokenizer, limit, report)
        return TaskResult(task.label, fmean(right), standard_error(right), None, task.chance, task.shots, tuple(right))
    given = task.questions(limit + examples)
    shots, questions = given[:examples], given[examples:]
    if not questions:
        raise UserError(f"the task {task.label} has {len(given)} questions, and {examples} are examples: use fewer")
    before = "".join(shot.solved + task.separator for shot in shots)
    if questions[0].choices:
        right, by_length = chosen(questions, before, model, tokenizer, report)
    else:
        report(0, len(questions))
        texts = generate([before + question.context for question in questions])
        right, by_length = [task.is_right(text, question) for text, question in zip(texts, questions)], None
    chance = fmean(1 / len(question.choices) if question.choices else 0.0 for question in questions)
    return TaskResult(task.label, fmean(right), standard_error(right), by_length, chance, examples, tuple(right))


def standard_error(right: Sequence[bool]) -> float:
    """Return the standard error of the share of right answers; NaN for one question."""
    return stdev(right) / math.sqrt(len(right)) if len(right) > 1 else math.nan


def chosen(
    questions: Sequence[Question],
    before: str,
    model: Decoder,
    tokenizer: Tokenizer,
    report: Callable[[int, int], None],
) -> tuple[list[bool], float]:
    """Return whether the likeliest choice of each question is right, and the share that is right if log-probabilities
    are divided by the bytes of the choice. `before` are the solved examples in front of each question; `report` is
    called with the number of choices done, and of all."""
    pairs = [pair_of(tokenizer, before + one.context, choice) for one in questions for choice in one.choices]
    scored = iter(score_continuations(model, pairs, lambda done: report(done, len(pairs))))
    right, by_length = [], []
    for question in questions:
        values = [next(scored).logprob for _ in question.choices]
        shares = [value / max(1, len(choice.strip().encode())) for value, choice in zip(values, question.choices)]
        right.append(values.index(max(values)) == question.answer)
        by_length.append(shares.index(max(shares)) == question.answer)
    return right, fmean(by_length)
