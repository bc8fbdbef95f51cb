"""Beam search by a decoder with its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onward.api.text_model import TextModel
from onward.base.errors import UserError
from onward.generation.answer import Answer
from onward.generation.keywords import BeamKeywords
from onward.generation.options import FORMS, GenerationOptions, split
from onward.generation.prompts import Prompt, default_new_tokens, prompt_tokens, prompts_of
from onward.generation.results import SearchResult
from onward.generation.search.beam import beam_search
from onward.text.tokenizer import Tokenizer

UNCHANGED = GenerationOptions(temperature=1.0)  # the model's own probabilities


def searched(lm: TextModel, prompt: str | Sequence[Prompt], keywords: Mapping[str, object]) -> list[list[SearchResult]]:
    """The results of `LanguageModel.beam_search`."""
    options, own = split(keywords, BeamKeywords, UNCHANGED)
    for name in "stop", "include_stop", "stop_when", "logprobs", "adapter", *FORMS:
        if getattr(options, name) != getattr(GenerationOptions, name):
            raise UserError(f"Cannot use {name} in a search: leave it out")
    prompts = [prompt_tokens(lm.text(), one) for one in prompts_of(prompt)]
    room = lm.config.context_length - max(map(len, prompts), default=0)
    shared: dict[str, Any] = {
        "sampling": options,
        "max_new_tokens": default_new_tokens(room) if options.max_new_tokens is None else options.max_new_tokens,
        "min_new_tokens": options.min_new_tokens,
        "stop_token_ids": [*lm.stop_token_ids, *options.stop_token_ids],
        "allowed": lm.mask(),
    }

    def result(before: list[int], tokens: list[int], finished: bool, *scores: float) -> SearchResult:
        return SearchResult(continued(lm.text(), before, tokens), tokens, "stop" if finished else "length", *scores)

    return [
        [result(tokens, h.tokens, h.finished, h.score, h.logprob) for h in hypotheses]
        for tokens, hypotheses in zip(prompts, beam_search(lm.model, prompts, n=options.n, **shared, **own))
    ]


def continued(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """Decode `tokens`, the tokens of an answer, to text; `before` are the tokens of its prompt, which may affect the
    first characters of the text."""
    answer = Answer(tokenizer, before)
    for token in tokens:
        answer.push(token)
    return answer.finish()
