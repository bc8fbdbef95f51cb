"""Compare two models answer by answer, by the preferences of a judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from onward.base.arguments import shown
from onward.base.errors import UserError
from onward.evaluation.answers import write_answers
from onward.evaluation.judging import PAIR_PROMPT, JudgeServer, check_judge, filled
from onward.evaluation.kept import Kept
from onward.generation.engine.engine import Engine
from onward.generation.options import GenerationOptions
from onward.text.chat import chat_of
from onward.text.tokenizer import Tokenizer

KEY_ENV, SECONDS, CONCURRENCY = "OPENAI_API_KEY", 60.0, 8


@dataclass(frozen=True)
class Pair:
    """A prompt with the answers of two models."""

    prompt: str
    first: str
    second: str


def chat_answers(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    tokens: int,
    length: int,
    kept: Kept,
    progress: Callable[..., None] = lambda *_: None,
) -> list[str]:
    """Return a model's greedy answer to each prompt. A prompt is a user's message if the model has a chat template,
    else a text to be continued for a paragraph. An answer has at most `tokens` tokens, in a context of `length`
    tokens."""
    chat = chat_of(tokenizer) if tokenizer.templates else None
    encoded = [chat.encode([{"role": "user", "content": one}]) if chat else tokenizer.encode(one) for one in prompts]
    longest = max(range(len(encoded)), key=lambda i: len(encoded[i]))
    if (room := length - len(encoded[longest])) < 1:
        raise UserError(
            f"Cannot answer {shown(prompts[longest])}, because it fills the context of {length:,} tokens: shorten it"
        )
    options = GenerationOptions(
        temperature=0.0, max_new_tokens=min(tokens, room), stop=chat.stop if chat else ("\n\n",)
    )
    show = lambda done: progress("answers", done, len(prompts))
    return [one.text.strip() for (one,) in write_answers(engine, tokenizer, encoded, options, show, kept)]


def pairs(prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> list[Pair]:
    return [Pair(*row) for row in zip(prompts, first, second, strict=True)]


def preferred(made: Sequence[Pair], url: str, model: str) -> list[float]:
    """For each pair, return the judge's preference for the second answer: 1, 0, or 0.5 if the judge's choice depends on
    the order of the answers (both orders are tried) or if the answers are equal. `url` is the address of the judge."""
    if not model:
        raise UserError(f"judge is {url}, an address without a model: name its model with --judge-model")
    check_judge("judge", url, PAIR_PROMPT, KEY_ENV)
    server = JudgeServer(url, model, KEY_ENV, SECONDS, CONCURRENCY)
    differ = [one for one in made if one.first != one.second]
    orders = [(one.prompt, *order) for one in differ for order in ((one.first, one.second), (one.second, one.first))]
    texts = [filled(PAIR_PROMPT, {"prompt": prompt, "first": a, "second": b}) for prompt, a, b in orders]
    names_first = server.preferences(texts)
    found = {id(one): (1 - names_first[2 * i] + names_first[2 * i + 1]) / 2 for i, one in enumerate(differ)}
    return [found.get(id(one), 0.5) for one in made]


def win_rate(verdicts: Sequence[float]) -> dict[str, float]:
    """Return the share of comparisons that the second model wins, counting ties as a half, with its standard error, and
    the number of ties."""
    count = len(verdicts)
    error = stdev(verdicts) / math.sqrt(count) if count > 1 else math.nan
    return {"win_rate": fmean(verdicts), "standard_error": error, "ties": float(sum(v == 0.5 for v in verdicts))}
