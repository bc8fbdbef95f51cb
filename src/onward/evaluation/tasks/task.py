"""The type of tasks: questions with choices, or with an answer that the model writes."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from onward.base.errors import UserError
from onward.base.fields import Part, part
from onward.base.suggestions import nearest
from onward.evaluation.kept import Kept
from onward.generation.options import GenerationOptions

if TYPE_CHECKING:
    from onward.model.decoder import Decoder
    from onward.text.tokenizer import Tokenizer

WRITING = GenerationOptions(temperature=0.0, max_new_tokens=64, stop=("\n",))
COMMAS = re.compile(r",(?![^()]*\))")  # commas between tasks, not between the options of a task


class Total(NamedTuple):
    """The score of a task and its standard error, NaN for one question."""

    score: float
    error: float


def mean_of(grades: Sequence[float]) -> Total:
    error = stdev(grades) / math.sqrt(len(grades)) if len(grades) > 1 else math.nan
    return Total(fmean(grades), error)


@dataclass(frozen=True)
class Question:
    """A question of a task. With `choices` the model chooses the likeliest continuation of `context`, and `answer` is
    the index of the right one; without choices, the model writes an answer, which the task compares with `expected` or
    grades in another way."""

    context: str
    choices: tuple[str, ...] = ()  # each including its leading space, if any
    answer: int = 0
    expected: str = ""
    accepted: tuple[str, ...] = ()  # other correct answers; for a program, its tests

    @property
    def solution(self) -> str:
        """The right answer to the question as text, with the space before it."""
        return self.choices[self.answer] if self.choices else " " + self.expected.strip()

    @property
    def solved(self) -> str:
        """The question with its right answer: a few-shot example for other questions."""
        return self.context + self.solution


@dataclass(frozen=True)
class Task(Part):
    """A task of `onward evaluate`: questions about one ability, such as arithmetic, with right answers. A task is a
    frozen dataclass; its fields are its options.

    A subclass with a kind (`class Mine(Task, kind="mine")`) defines `questions`; importing its module registers the
    task: `onward evaluate MODEL --import MODULE --tasks mine`.
    """

    separator: ClassVar[str] = "\n"  # text between the examples and the question
    runs_code: ClassVar[bool] = False  # whether it runs programs that the model writes

    @classmethod
    def shorthand(cls, value: Any) -> Any:
        """Expand `value`, a task written as KIND:FILE, such as cloze:book.txt, to a dict of its kind and its first
        option; return None for any other form. Raises a UserError for an unknown kind, or a kind without options."""
        kind, colon, rest = value.partition(":") if isinstance(value, str) else (value, "", "")
        if not colon or not kind.isidentifier():
            return None
        if kind not in cls.kinds:
            raise UserError(f"{kind!r:.60} is not a known task: {nearest(kind, cls.choices())}")
        names = [field.name for field in fields(cls.kinds[kind])]
        if not names:
            raise UserError(f"the task {kind} has no options: leave out :{rest}")
        return {"kind": kind, names[0]: rest}

    @property
    def label(self) -> str:
        """The name of the task in tables of results; by default the kind with the options that were given."""
        given = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name in self.named]
        options = [Path(value).name if name == "file" else f"{name}={value}" for name, value in given]
        return f"{self.kind}({', '.join(options)})" if options else self.kind

    def parts(self) -> Sequence[Task]:
        """Return the tasks into which this task is divided, each with its own row in the table of results; by default
        only the task itself."""
        return [self]

    def questions(self, count: int) -> list[Question]:
        """Return up to `count` questions, the same ones at each call. Raises a UserError if the task has none."""
        raise NotImplementedError

    def texts(self, count: int, examples: int = 0) -> list[str]:
        """Return up to `count` questions as texts with their right answers, to search for in training data; the first
        `examples` questions, which prompts show as solved examples, are left out."""
        return [one.solved for one in self.questions(count + examples)[examples:]]

    def writing(self) -> GenerationOptions:
        """Return the options with which answers to questions without choices are generated; by default greedy decoding
        up to the end of a line or 64 tokens."""
        return WRITING

    def is_right(self, answer: str, question: Question) -> bool:
        """Return whether an answer that the model wrote is right; by default whether it equals the expected answer,
        ignoring leading and trailing whitespace."""
        return answer.strip() == question.expected.strip()

    def grades(self, answers: Sequence[Sequence[str]], questions: Sequence[Question], kept: Kept) -> list[float]:
        """Return a grade from 0 to 1 for each question, given the list of answers that the model wrote to it; by
        default 1 if the first answer is right, else 0. A task whose grades are slow to compute stores them in `kept`,
        with the results of earlier evaluations."""
        return [float(self.is_right(samples[0], question)) for samples, question in zip(answers, questions)]

    def total(self, answers: Sequence[str], questions: Sequence[Question], grades: Sequence[float]) -> Total:
        """Return the score of the whole task, given the first answer to each question and its grade; by default the
        mean of the grades."""
        return mean_of(grades)


@dataclass(frozen=True)
class TextTask(Task, kind=""):
    """A task whose questions are made from a text: a file, the validation text of a run, or a text given to the method
    `on`."""

    file: str = ""  # a text file; default: the validation text of the evaluated run
    text: str = field(default="", init=False, repr=False)

    def on(self, text: str) -> Self:
        """Return a copy of the task whose questions are made from `text`; a task with a file keeps its own text."""
        task = copy.copy(self)
        if not self.file:
            object.__setattr__(task, "text", text)
        return task

    def questions(self, count: int) -> list[Question]:
        if not self.file and not self.text:
            raise UserError(f"the task {self.kind} has no text: name a file, as in {self.kind}:book.txt")
        return self.questions_of(self.text or text_of(self.file, self.kind), count)

    def questions_of(self, text: str, count: int) -> list[Question]:
        """Return up to `count` questions about a text, the same ones at each call. Raises a UserError for a text that
        is too short."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScoredTask(Task, kind=""):
    """A task with its own few-shot examples and its own scoring (the method `score`), instead of those in
    `run_task`."""

    @property
    def chance(self) -> float:
        """The expected score of guessing, from 0 to 1."""
        return 0.0

    @property
    def shots(self) -> int:
        """The number of solved examples in front of each question."""
        return 0

    def score(
        self, model: Decoder, tokenizer: Tokenizer, count: int, kept: Kept, report: Callable[[int, int], None]
    ) -> list[bool]:
        """Return for each of up to `count` questions whether the model's answer is right. `report` is called with
        (questions done, total number of questions). Results of earlier evaluations in `kept` are used, and new results
        are added to it."""
        raise NotImplementedError


def tasks_of(text: str, name: str = "tasks") -> list[Task]:
    """Parse a list of tasks such as `cloze:book.txt, arithmetic(digits=2)`. Raises a UserError that names the nearest
    kind for an unknown one; `name` is the name of the option in messages."""
    return [one for word in COMMAS.split(text) for one in part(Task, word.strip(), name).parts()]


def with_text(tasks: Sequence[Task], text: str) -> list[Task]:
    return [task.on(text) if isinstance(task, TextTask) else task for task in tasks]


def text_of(file: str, task: str) -> str:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"the text {file!r} of the task {task} cannot be read ({reason}): name a text file") from None
    if not text.strip():
        raise UserError(f"the text {file!r} of the task {task} is empty: name another text")
    return text
