"""Answers that a model writes to prompts; each is stored as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from onward.evaluation.kept import Kept, whole
from onward.generation.engine.engine import Engine
from onward.generation.options import GenerationOptions
from onward.generation.prompts import submit
from onward.text.tokenizer import Tokenizer


class GeneratedAnswer(NamedTuple):
    """An answer that a model wrote, as text and as token ids."""

    text: str
    tokens: list[int]  # without the stop token, but including the tokens of a stop text


def kept_answer(value: Any) -> GeneratedAnswer | None:
    """Return the answer in a stored JSON value; None if the value is not an answer."""
    match value:
        case [str(), [*tokens]] if all(isinstance(token, int) for token in tokens):
            return GeneratedAnswer(*value)
    return None


def write_answers(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    progress: Callable[[int], None] = lambda done: None,
    kept: Kept | None = None,
) -> list[list[GeneratedAnswer]]:
    """Generate `options.n` answers to each prompt; answer i of all answers has the seed options.seed + i, if a seed is
    set.

    Answers in `kept` are not generated again, and new answers are added one by one; the processes `kept.replicas`
    divide the answers. If answers fail, raises the first error after all other answers are done."""
    kept = kept or Kept()
    seeds = [None if options.seed is None else options.seed + i for i in range(len(prompts) * options.n)]
    alone = [replace(options, n=1, seed=seed) for seed in seeds]
    requests = [("answer", tuple(prompts[i // options.n]), repr(one)) for i, one in enumerate(alone)]
    results = [kept_answer(kept.get(*request)) for request in requests]
    missing = [i for i, result in enumerate(results) if result is None]

    def write() -> None:
        waiting = {}
        for i in kept.replicas.share(missing):
            [(one, answer)] = submit(engine, tokenizer, [prompts[i // options.n]], alone[i]).items()
            waiting[one] = i, answer
        failed: list[Exception] = []
        report = lambda: progress(max(0, len(results) - len(waiting) * kept.replicas.count))
        report()
        while waiting:
            for one in [one for one in waiting if one.finish_reason]:
                i, answer = waiting.pop(one)
                if one.error:
                    failed.append(one.error)
                    continue
                generated = results[i] = GeneratedAnswer(answer.finish(), one.tokens)
                kept.add([(requests[i], [*generated])])
                report()
            if engine.busy:
                engine.step()
        if failed:
            raise failed[0]

    kept.divide(f"{len(missing):,} answers", write)
    done = whole([one or kept_answer(kept.get(*request)) for one, request in zip(results, requests)])
    return [done[i : i + options.n] for i in range(0, len(done), options.n)]
