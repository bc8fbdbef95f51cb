"""Run tasks: measure a model's score, such as the share of questions that it answers correctly, with its standard
error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from onward.base.errors import UserError
from onward.data.progress import Progress, silent
from onward.evaluation.answers import write_answers
from onward.evaluation.chatting import ChatPrompts
from onward.evaluation.continuations import Pair, pair_of, score_continuations
from onward.evaluation.kept import Kept
from onward.evaluation.tasks.task import Question, ScoredTask, Task, mean_of
from onward.generation.engine.engine import Engine
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer

MakeEngine = Callable[[int], Engine]  # makes an engine for this many answers
Report = Callable[[int, int], None]  # called with the number of finished parts and the total number


@dataclass(frozen=True)
class TaskResult:
    """The result of a model on a task of an evaluation: its score, such as the share of right answers, with the
    standard error."""

    task: str
    score: float  # mean grade of the questions, such as the share of correct answers; or BLEU or chrF of all answers
    error: float  # standard error of the score; NaN for one question
    by_length: float | None  # share of correct answers, with log-probabilities divided by byte counts; None: no choices
    chance: float  # expected score of random guessing
    examples: int  # number of solved examples before each question
    right: tuple[float, ...]  # grade of each question, from 0 (wrong) to 1 (correct)

    @property
    def questions(self) -> int:
        """The number of questions that were asked."""
        return len(self.right)


@dataclass(frozen=True)
class Asking:
    """Convert the questions of a task to prompts."""

    tokenizer: Tokenizer
    shots: Sequence[Question]  # solved examples before each question
    separator: str  # text between examples
    chat: ChatPrompts | None  # prompts in the chat template; None: plain text

    def text(self, question: Question) -> str:
        if self.chat:
            solved = [text for shot in self.shots for text in (shot.context, shot.solution.strip())]
            return self.chat.text([*solved, question.context])
        return "".join(shot.solved + self.separator for shot in self.shots) + question.context

    def pairs(self, question: Question) -> list[Pair]:
        """The pairs of the prompt and each choice."""
        text, choices = self.text(question), question.choices
        if self.chat:
            return [pair_of(self.tokenizer, text, choice.lstrip(), self.chat.encode) for choice in choices]
        return [pair_of(self.tokenizer, text, choice) for choice in choices]

    def tokens(self, question: Question) -> list[int]:
        return (self.chat or self.tokenizer).encode(self.text(question))

    def check(self, question: Question, size: Callable[[Asking], int], length: int) -> None:
        """Raise a UserError, with the number of examples that fit, if a question with its examples does not fit into
        `length` tokens; `size` returns the number of tokens of the question's prompt."""
        if not self.shots or size(self) <= length:
            return
        fitting = [k for k in range(len(self.shots)) if size(replace(self, shots=self.shots[:k])) <= length]
        advice = f"{fitting[-1]} fit" if fitting else "it is too long even without examples"
        raise UserError(
            f"Cannot ask a question with its {len(self.shots)} examples, because they take {size(self)} tokens in "
            f"total and the context has room for {length}: use fewer examples ({advice})"
        )


def run_task(
    task: Task,
    model: Decoder,
    tokenizer: Tokenizer,
    engine: MakeEngine,
    *,
    examples: int = 0,
    limit: int = 200,
    chat: bool = False,
    kept: Kept | None = None,
    progress: Progress = silent,
) -> TaskResult:
    """Evaluate a model on up to `limit` questions of a task, each after the same `examples` solved questions. `engine`
    makes an engine for a given number of written answers. Results in `kept` are used, and new results are added to it;
    the processes `kept.replicas` divide the questions, and the first of them grades written answers."""
    kept = kept or Kept()
    report = lambda done, total: progress(task.label, done, total)
    if isinstance(task, ScoredTask):
        if examples or chat:
            option = f"examples={examples}" if examples else "chat"
            raise UserError(f"Cannot use {option} with the task {task.label}, which has its own prompts: leave it out")
        right = [float(one) for one in task.score(model, tokenizer, limit, kept, report)]
        return TaskResult(task.label, *mean_of(right), None, task.chance, task.shots, tuple(right))
    given = task.questions(limit + examples)
    shots, questions = given[:examples], given[examples:]
    if not questions:
        raise UserError(
            f"the task {task.label} has {len(given)} questions, but uses {examples} as examples: use fewer examples"
        )
    asking = Asking(tokenizer, shots, task.separator, ChatPrompts(tokenizer) if chat else None)
    if questions[0].choices:
        right, by_length = chosen(questions, asking, model, kept, report)
        total = mean_of(right)
    else:
        answers = answers_of(task, questions, asking, model, engine, kept, report)
        right = kept.replicas.first(f"grades of {task.label}", lambda: task.grades(answers, questions, kept))
        total, by_length = task.total([one[0] for one in answers], questions, right), None
    chance = fmean(1 / len(question.choices) if question.choices else 0.0 for question in questions)
    examples += getattr(task, "shots", None) or 0  # a task may have solved examples of its own in each question
    return TaskResult(task.label, *total, by_length, chance, examples, tuple(right))


def chosen(
    questions: Sequence[Question], asking: Asking, model: Decoder, kept: Kept, report: Report
) -> tuple[list[float], float]:
    """Score the choices of each question. Return 1 for each question whose likeliest choice is right, else 0; and the
    share of right questions if log-probabilities are divided by the number of bytes of the choice."""
    by_question = [asking.pairs(one) for one in questions]
    longest = max(range(len(questions)), key=lambda i: most_tokens(by_question[i]))
    asking.check(
        questions[longest], lambda asked: most_tokens(asked.pairs(questions[longest])), model.config.context_length
    )
    pairs = [pair for some in by_question for pair in some]
    scored = iter(score_continuations(model, pairs, lambda done: report(done, len(pairs)), kept))
    right, by_length = list[float](), []
    for question in questions:
        values = [next(scored).logprob for _ in question.choices]
        shares = [value / max(1, len(choice.strip().encode())) for value, choice in zip(values, question.choices)]
        right.append(float(values.index(max(values)) == question.answer))
        by_length.append(shares.index(max(shares)) == question.answer)
    return right, fmean(by_length)


def most_tokens(pairs: Sequence[Pair]) -> int:
    """Return the number of tokens that the model reads to score the longest pair: all except the last."""
    return max(len(pair.context) + len(pair.continuation) - 1 for pair in pairs)


def answers_of(
    task: Task,
    questions: Sequence[Question],
    asking: Asking,
    model: Decoder,
    engine: MakeEngine,
    kept: Kept,
    report: Report,
) -> list[list[str]]:
    """The texts that the model writes to each question. A prompt without examples that leaves no room for the longest
    answer loses its first tokens."""
    options, length = task.writing(), model.config.context_length
    most = min(options.max_new_tokens or length, length - 1)
    prompts = [asking.tokens(one) for one in questions]
    longest = max(range(len(questions)), key=lambda i: len(prompts[i]))
    asking.check(questions[longest], lambda asked: len(asked.tokens(questions[longest])), length - most)
    stop = asking.chat.stop if asking.chat else options.stop
    options, count = replace(options, max_new_tokens=most, stop=stop), len(prompts) * options.n
    answers = write_answers(
        engine(count),
        asking.tokenizer,
        [tokens[-(length - most) :] for tokens in prompts],
        options,
        lambda done: report(done, count),
        kept,
    )
    return [[one.text for one in some] for some in answers]
