"""Tasks from the user's own questions: a file with choices, or with answers."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.base.errors import UserError
from onward.config.ranges import Size
from onward.evaluation import overlap
from onward.evaluation.kept import Kept
from onward.evaluation.overlap import CORPUS, METRICS, Match
from onward.evaluation.tasks.task import Question, Task, Total, text_of
from onward.generation.options import GenerationOptions
from onward.text.numbers import same_number
from onward.text.regular import compiled, matches


@dataclass(frozen=True)
class Choices(Task, kind="choices"):
    """A task from a file of rows with a question, choices, and the right choice as its text, its index from 0, or its
    letter."""

    file: str  # .jsonl, .json or .csv with question, choices (in CSV separated by |) and answer

    separator = "\n\n"

    def questions(self, count: int) -> list[Question]:
        result = []
        for where, row in rows(self.file, self.kind, ("question", "choices", "answer")):
            choices = row["choices"].split("|") if isinstance(row["choices"], str) else row["choices"]
            if not isinstance(choices, list) or len(choices) < 2:
                raise UserError(f"{where}: choices is {choices!r:.60}: give a list of two texts or more")
            texts, answer = [str(one).strip() for one in choices], row["answer"]
            letters = {chr(ord("A") + i): i for i in range(len(texts))}
            index = texts.index(str(answer).strip()) if str(answer).strip() in texts else letters.get(str(answer))
            if index is None and str(answer).isdecimal() and int(answer) < len(texts):
                index = int(answer)
            if index is None:
                raise UserError(f"{where}: the answer {answer!r:.60} is not among its choices: add it to them")
            result.append(Question(str(row["question"]).strip(), tuple(f" {one}" for one in texts), index))
        return result[:count]


@dataclass(frozen=True)
class Answers(Task, kind="answers"):
    """Rows with a question and its answer, or a list of accepted answers; the model writes an answer to each question.

    BLEU, chrF and ROUGE compare whole texts with references, as sacrebleu and rouge-score do; with other comparisons,
    an answer is either right or wrong.
    """

    file: str  # .jsonl, .json or .csv with question and answer
    match: Match = "exact"  # how answers are compared; regex: the row's answer is a regular expression
    tokens: Size = 64  # maximum number of tokens in a generated answer
    stop: str = "\n"  # text that ends a generated answer and is not part of it

    separator = "\n\n"

    def writing(self) -> GenerationOptions:
        return GenerationOptions(temperature=0.0, max_new_tokens=self.tokens, stop=(self.stop,) if self.stop else ())

    def questions(self, count: int) -> list[Question]:
        result = []
        for where, row in rows(self.file, self.kind, ("question", "answer")):
            answers = [str(one) for one in (row["answer"] if isinstance(row["answer"], list) else [row["answer"]])]
            for answer in answers if self.match == "regex" else ():
                compiled(answer, f"{where}: the answer")
            first, *others = answers
            result.append(Question(str(row["question"]).strip(), expected=first, accepted=tuple(others)))
        return result[:count]

    def is_right(self, answer: str, question: Question) -> bool:
        return any(self.matches(answer.strip(), one.strip()) for one in (question.expected, *question.accepted))

    def matches(self, answer: str, expected: str) -> bool:
        match self.match:
            case "contains":
                return expected.casefold() in answer.casefold()
            case "number":
                return same_number(answer, expected)
            case "regex":
                return matches(expected, answer)
            case _:
                return answer == expected

    def grades(self, answers: Sequence[Sequence[str]], questions: Sequence[Question], kept: Kept) -> list[float]:
        if self.match not in METRICS:
            return super().grades(answers, questions, kept)
        return overlap.grades(self.match, [samples[0].strip() for samples in answers], references(questions))

    def total(self, answers: Sequence[str], questions: Sequence[Question], grades: Sequence[float]) -> Total:
        if self.match not in CORPUS:
            return super().total(answers, questions, grades)
        texts, expected = [one.strip() for one in answers], references(questions)
        return Total(
            overlap.corpus_score(self.match, texts, expected), overlap.bootstrap_error(self.match, texts, expected)
        )


def references(questions: Sequence[Question]) -> list[list[str]]:
    return [[one.strip() for one in (question.expected, *question.accepted)] for question in questions]


def rows(file: str, task: str, needed: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location for messages, row) for the rows of a .jsonl, .json or .csv file of questions."""
    text, ending = text_of(file, task), Path(file).suffix
    try:
        if ending == ".csv":
            located = [(f"{file}, row {i}", row) for i, row in enumerate(csv.DictReader(io.StringIO(text)), 1)]
        elif ending == ".json":
            located = [(f"{file}, item {i}", row) for i, row in enumerate(json.loads(text), 1)]
        else:
            located = [*json_lines(file, text)]
    except (ValueError, TypeError, RecursionError, csv.Error) as error:
        raise error if isinstance(error, UserError) else UserError(f"{file} cannot be read: {error}") from None
    if not located:
        raise UserError(f"{file} has no rows: add a question")
    for where, row in located:
        if not isinstance(row, dict) or (lacking := [name for name in needed if row.get(name) in (None, "")]):
            lacks = f"lacks {lacking[0]}" if isinstance(row, dict) else "is not an object"
            raise UserError(f"{where} {lacks}: give {', '.join(needed)}")
        yield where, row


def json_lines(file: str, text: str) -> Iterator[tuple[str, Any]]:
    # not splitlines, because texts may contain other line breaks, such as U+2028
    for i, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{file}, line {i}", json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"{file}, line {i} is not JSON: write one object per line") from None
