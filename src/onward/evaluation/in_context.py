"""Measure how examples in a prompt change the probabilities of answers: in-context learning (Brown et al. 2020).

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onward.base.errors import UserError
from onward.evaluation.continuations import Pair, score_continuations
from onward.generation.search.beam import beam_search
from onward.model.decoder import Decoder, check_ids, without_dropout
from onward.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Shots:
    """A question and the solved examples that precede it in a prompt."""

    question: str
    examples: tuple[str, ...]  # solved questions; the last one comes directly before the question
    separator: str  # text between examples

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of examples to compare: 0, 1, 2, 4, 8 and so on, and all."""
        total = len(self.examples)
        powers = (1 << i for i in range(total.bit_length()))
        return (0, *(count for count in powers if count < total), *([total] if total else []))

    def text(self, count: int) -> str:
        """The last `count` examples, then the question."""
        return self.separator.join([*self.examples[len(self.examples) - count :], self.question])


@dataclass(frozen=True)
class LikelyAnswers:
    """The likeliest answers to a question, for each number of solved examples in the prompt."""

    counts: tuple[int, ...]  # numbers of examples before the question
    answers: tuple[str, ...]  # sorted by probability with all examples, highest first
    probabilities: tuple[tuple[float, ...], ...]  # probability of each answer with each number of examples


def shots_of(prompt: str, examples: Sequence[str] = (), separator: str = "") -> Shots:
    """Split a prompt into the question at its end and the solved examples before it; `examples` are inserted before
    these. `separator` divides the parts of the prompt: "" for line breaks or, without any, semicolons.

    A prompt such as `great → good; hot → warm; huge →` has two examples. Raises a UserError if the prompt has no text
    after its last separator.
    """
    separator = separator or ("; " if ";" in prompt and "\n" not in prompt.strip() else "\n")
    mark = separator.strip() or separator
    *own, question = (part.strip() for part in prompt.rstrip().split(mark))
    if not question:
        raise UserError(f"the prompt ends with its separator {mark!r}: write the beginning of a question after it")
    return Shots(question, (*examples, *filter(None, own)), separator)


def alternatives(
    model: Decoder,
    tokenizer: Tokenizer,
    shots: Shots,
    *,
    candidates: Sequence[str] = (),
    max_new_tokens: int = 1,
    top: int = 8,
) -> LikelyAnswers:
    """Return the `top` likeliest answers to a question, selected by their highest probability over the numbers of
    examples in the prompt, to show how examples change a model's answer.

    By default an answer is the next token. With `max_new_tokens` above 1, beam search finds answers of at most that
    many tokens, which end before the separator of the examples. With `candidates`, exactly these texts are the answers.
    Raises a UserError with the number of examples that fit if the context is too short.
    """
    counts = shots.counts
    prompts = [tokenizer.begin(tokenizer.encode(shots.text(count))) for count in counts]
    room = model.config.context_length - (max_new_tokens if not candidates else longest(tokenizer, candidates)) + 1
    if len(prompts[-1]) > room:
        fitting = [count for count, tokens in zip(counts, prompts) if len(tokens) <= room]
        advice = f"give at most {fitting[-1]} of them" if fitting else "shorten the question"
        raise UserError(
            f"the prompt with {counts[-1]} examples has {len(prompts[-1])} tokens, but the context has room for "
            f"{max(0, room)}: {advice}"
        )
    if not candidates and max_new_tokens == 1:
        return next_tokens(model, tokenizer, counts, prompts, top)
    answers = list(dict.fromkeys(one.strip() for one in candidates)) or beam_answers(
        model, tokenizer, prompts, shots.separator, max_new_tokens, top
    )
    begun = lambda text: tokenizer.begin(tokenizer.encode(text))
    pairs = [
        pair_after(prompt, begun(f"{shots.text(count)} {answer}"))
        for answer in answers
        for count, prompt in zip(counts, prompts)
    ]
    scored = iter(score_continuations(model, pairs))
    table = {answer: tuple(math.exp(next(scored).logprob) for _ in counts) for answer in answers}
    return ranked(counts, table, top if not candidates else len(answers))


@torch.inference_mode()
def next_tokens(
    model: Decoder, tokenizer: Tokenizer, counts: tuple[int, ...], prompts: Sequence[Sequence[int]], top: int
) -> LikelyAnswers:
    columns = []
    with without_dropout(model):
        for tokens in prompts:
            check_ids(min(tokens), max(tokens), model.config)
            logits = model.logits(model.hidden(torch.tensor([tokens], device=model.device))[:, -1:])[0, 0]
            columns.append(logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)))
    table = torch.stack(columns, 1).cpu()  # (V, prompts)
    best = table.amax(1).topk(min(top, len(table))).indices.tolist()
    return ranked(counts, {tokenizer.piece(token): tuple(table[token].tolist()) for token in best}, top)


def beam_answers(
    model: Decoder, tokenizer: Tokenizer, prompts: Sequence[list[int]], separator: str, max_new_tokens: int, top: int
) -> list[str]:
    """Return the texts of the answers that beam search finds, cut at the separator of the examples, without
    duplicates."""
    ends = [token for token in tokenizer.end_ids if token < model.config.vocab_size]
    mark = separator.strip() or separator
    answers: dict[str, None] = {}
    for prompt in prompts:
        search = {"max_new_tokens": max_new_tokens, "beams": top, "n": top, "stop_token_ids": ends}
        for one in beam_search(model, [prompt], **search)[0]:  # type: ignore[arg-type]
            text = tokenizer.decode([*prompt, *one.tokens])[len(tokenizer.decode(prompt)) :]
            answers[text.split(mark)[0].strip()] = None
    answers.pop("", None)
    return list(answers)


def pair_after(prompt: Sequence[int], full: Sequence[int]) -> Pair:
    """Split the tokens `full` of a prompt with its answer; a token across the boundary belongs to the answer."""
    count = min(len(prompt), len(full) - 1)
    return Pair(tuple(full[:count]), tuple(full[count:]))


def longest(tokenizer: Tokenizer, answers: Sequence[str]) -> int:
    """Return the number of tokens of the longest answer; each answer is encoded with a space in front."""
    return max(len(tokenizer.encode(f" {answer}", special=False)) for answer in answers)


def ranked(counts: tuple[int, ...], table: dict[str, tuple[float, ...]], top: int) -> LikelyAnswers:
    """Return the `top` answers by their highest probability over all numbers of examples, sorted by their probability
    with all examples, highest first."""
    best = sorted(table, key=lambda answer: -max(table[answer]))[:top]
    best.sort(key=lambda answer: -table[answer][-1])
    return LikelyAnswers(counts, tuple(best), tuple(table[answer] for answer in best))
