"""Checks of requests, caches and token masks against the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig
from onward.generation.request import Request
from onward.generation.sampling import check_vocabulary
from onward.model.cache import KVCache
from onward.model.decoder import check_ids, described


class PromptError(UserError):
    """Raised if a prompt cannot be continued by a model: it is empty, has a token that the model lacks, or is too long.
    `index` is the prompt's index among the prompts of the call, if there are several."""

    index: int | None = None


class ContextOverflow(PromptError):
    """Raised if a prompt, with the tokens of its answer, does not fit into the context."""


def check_request(request: Request, config: DecoderConfig, length: int, slide: bool | None) -> None:
    """Raise a UserError if a request cannot be answered by a model with `config` within a context of `length` tokens; a
    PromptError if the prompt is the reason.

    `slide`: whether the oldest tokens are dropped when the context is full; None: they are kept, and the message does
    not suggest dropping them.
    """
    if not request.prompt:
        raise PromptError(
            "the prompt is empty, and the tokenizer has no beginning-of-text token: give at least one token"
        )
    try:
        check_ids(min(request.prompt), max(request.prompt), config)
    except UserError as error:
        raise PromptError(str(error)) from None
    request.sampling.check_vocabulary(config.vocab_size)
    check_vocabulary("stop_token_ids", request.stop_token_ids, config.vocab_size)
    if request.max_new_tokens < 0:
        raise UserError(f"max_new_tokens is {request.max_new_tokens}: it must be at least 0")
    if request.min_new_tokens > request.max_new_tokens:
        raise UserError(
            f"min_new_tokens is {request.min_new_tokens}: it must be at most max_new_tokens, {request.max_new_tokens}"
        )
    size, new = len(request.prompt), request.max_new_tokens
    if size + new > length and not slide:
        fit = f"{size} prompt tokens and {new} new ones (max_new_tokens)" if size <= length else f"{size} prompt tokens"
        change = "shorten the prompt" + (", or lower max_new_tokens" if size < length else "")
        hint = "" if slide is None else ", or let the context slide (slide=True, --context-overflow slide)"
        raise ContextOverflow(
            f"Cannot fit {fit}, because this model's maximum context length is {length} tokens: {change}{hint}"
        )


def check_cache(cache: KVCache, config: DecoderConfig, rows: int, num_draft_tokens: int) -> None:
    """Raise a UserError if an engine for a model with `config` cannot answer `rows` requests at a time with this cache,
    or cannot verify `num_draft_tokens` draft tokens of each."""
    if not 1 <= rows <= cache.rows:
        raise UserError(f"rows is {rows}: it must be at least 1, and at most the rows of the cache")
    if len(cache.layers) != config.n_layers:
        raise UserError("the cache belongs to another model: make one from this model's config")
    if num_draft_tokens and cache.chunk <= num_draft_tokens:
        raise UserError(
            f"Cannot verify {num_draft_tokens} draft tokens, because a call adds at most {cache.chunk} tokens to this "
            f"cache: make one with a chunk of {num_draft_tokens + 1}"
        )
    if cache.states and cache.keep < num_draft_tokens:
        raise UserError(
            f"Cannot verify {num_draft_tokens} draft tokens, because the states of this cache can be rolled back by "
            f"{cache.keep} tokens: make one with keep={num_draft_tokens}"
        )


def check_mask(allowed: Tensor | None, *shapes: Sequence[int]) -> None:
    """Raise a UserError unless `allowed`, the mask of the tokens that may be generated, is None or a bool tensor with
    one of `shapes`."""
    if allowed is not None and not (allowed.dtype == torch.bool and allowed.shape in shapes):
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise UserError(f"allowed is {described(allowed)}: give bool {wanted}")
