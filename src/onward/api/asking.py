"""Examples made from documents: a question about each passage, and the passage, with its source, as the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onward.api.folders import load
from onward.api.language_model import LanguageModel
from onward.base.errors import UserError
from onward.base.files import atomic_write
from onward.data.examples import Encoder
from onward.data.passages import Passage, answer_of, example, passages, question_in, shortened
from onward.data.progress import Progress, silent
from onward.data.reading import READING, Reading
from onward.data.sources import SIZES, texts
from onward.evaluation.judging import JudgeServer, check_judge
from onward.evaluation.kept import Kept
from onward.evaluation.preferences import CONCURRENCY, KEY_ENV, SECONDS, chat_answers
from onward.text.templates import with_template

PROMPT = (
    "Write one question that a reader would ask and that the text below answers. Reply with the question alone.\n\n"
    "{place}\n\n{text}"
)
ANSWER_TOKENS, QUESTION_TOKENS = 512, 64  # maximum number of tokens in an answer, and in a question
TEMPLATE = "plain"  # template for a model without a chat template
ROW = 1024  # maximum number of tokens in an example
HELD_OUT = 10  # every tenth example is held out


@dataclass(frozen=True)
class Asked:
    """The numbers of documents, passages and examples, and of questions written by a model."""

    documents: int
    passages: int
    examples: int
    held_out: int
    written: int  # questions that a model wrote; the others are made from headings


def ask(
    sources: Sequence[str],
    out: Path,
    model: str,
    *,
    reading: Reading = READING,
    judge: str = "",
    judge_model: str = "",
    most: int = 0,
    progress: Progress = silent,
) -> Asked:
    """Write an example for each passage of the documents to out/examples.jsonl, but every tenth (of fewer than ten, the
    last) to out/held-out.jsonl. Passages that do not fit into the context of `model`, or into 1,024 tokens, are left
    out.

    The questions are written by the model `judge_model` at the address `judge` or, without an address, by `model` if it
    has a chat template. Without either, or if a reply is not a question, the question is made from the passage's
    headings. Answers are shortened to 512 tokens or, if that is less, two thirds of the context. `most` is the maximum
    number of passages, evenly spaced (0: all)."""
    if judge:
        if not judge_model:
            raise UserError(f"judge is {judge}, an address without a model: name its model with --judge-model")
        check_judge("judge", judge, PROMPT, KEY_ENV)
    documents: dict[str, str] = {}
    for piece, text in texts(sources, reading, SIZES):
        documents[piece.name] = documents.get(piece.name, "") + text + "\n" * piece.ends
    found = [*{passage.text: passage for passage in passages(documents.items())}.values()]
    if len(found) < 2:
        raise UserError(f"{sources[0]} has fewer than two passages of text: name more documents")
    if most and len(found) > most:
        found = [found[i * len(found) // most] for i in range(most)]
    lm = load(model)
    tokenizer, length = lm.text(), min(lm.model.config.context_length, ROW)
    room = min(ANSWER_TOKENS, length * 2 // 3)
    fits = lambda passage: lambda text: len(tokenizer.encode(answer_of(passage, text))) <= room
    answers = [shortened(passage.text, fits(passage)) for passage in found]
    kept = [(passage, answer) for passage, answer in zip(found, answers) if answer]
    questions = written_questions([passage for passage, _ in kept], lm, judge, judge_model, progress)
    rows = [
        example(passage, question or passage.question, answer_of(passage, answer))
        for (passage, answer), question in zip(kept, questions)
    ]
    encoder = Encoder(tokenizer if tokenizer.templates else with_template(tokenizer, TEMPLATE))
    rows = [row for row in rows if len(encoder.conversation(row["messages"]).tokens) <= length]
    if len(rows) < 2:
        raise UserError(
            f"{sources[0]} has fewer than two passages that fit into {length:,} tokens of {model}: name other "
            "documents or another base"
        )
    step = min(HELD_OUT, len(rows))
    parts = {
        "held-out": rows[step - 1 :: step],
        "examples": [row for i, row in enumerate(rows) if i % step != step - 1],
    }
    for name, part in parts.items():  # the examples are written last, as a sign that all files exist
        with atomic_write(out / f"{name}.jsonl") as new:
            new.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part), encoding="utf-8")
    count = sum(question is not None for question in questions)
    return Asked(len(documents), len(found), len(parts["examples"]), len(parts["held-out"]), count)


def written_questions(
    found: Sequence[Passage], lm: LanguageModel, judge: str, judge_model: str, progress: Progress
) -> list[str | None]:
    """The question that a model wrote for each passage; None if no model is available, or if its reply contains no
    question."""
    requests = [PROMPT.format(place=" / ".join(one.headings), text=one.text[:4000]) for one in found]
    if judge:
        server = JudgeServer(judge, judge_model, KEY_ENV, SECONDS, CONCURRENCY)
        return [question_in(reply) for reply in server.replies(requests)]
    if not lm.text().templates:
        return [None] * len(found)
    length = lm.model.config.context_length
    room = length - QUESTION_TOKENS - 64
    short = [shortened(one, lambda text: len(lm.text().encode(text)) <= room) for one in requests]
    replies = chat_answers(lm.engine(), lm.text(), short, QUESTION_TOKENS, length, Kept(), progress)
    return [question_in(reply.rpartition("</think>")[2]) for reply in replies]
