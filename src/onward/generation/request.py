"""A request: a prompt that is being continued, and what came of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from onward.errors import UserError
from onward.generation.sampling import Sampling
from onward.model.config import DecoderConfig
from onward.model.decoder import check_ids


class Constraint(Protocol):
    """What an answer must look like, token by token."""

    def allowed(self) -> Tensor:
        """Which tokens may come next, (V,)."""
        ...

    def accept(self, token: int) -> bool:
        """Go on by a token; False where it must not come, or where nothing may follow it."""
        ...

    def copy(self) -> Constraint:
        """The same state, to look ahead from."""
        ...


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model found a token, by itself: before temperature, penalties and bans."""

    token: int
    logprob: float
    alternatives: list[tuple[int, float]]  # the likeliest tokens and their log-probabilities


@dataclass(eq=False)
class Request:
    """A prompt that is being continued, at most by `max_new_tokens`.

    `stop` is told each new token and says whether the answer ends there; the token stays in `tokens`.
    """

    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    stop: Callable[[int], bool] | None = None
    constraint: Constraint | None = None
    tokens: list[int] = field(default_factory=list)  # what has been generated
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of each of them, where sampling.logprobs is given
    finish_reason: str = ""  # why it ended: stop (an end token, a stop text, a full constraint), length or cancelled
    start: int = 0  # where in prompt and tokens the context begins
    num_cached: int = 0  # how many tokens of the context the cache holds
    num_draft_cached: int = 0  # and how many the draft's cache
    arrival: int = 0  # arrival order
    shares_prompt_with: Request | None = None  # a request with the same prompt, whose reading is shared
    steps: int = 0  # how many times a token or more was chosen
    num_drafted: int = 0  # drafted tokens that were looked at
    num_accepted: int = 0  # and those that were taken

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        self.seed = secrets.randbits(63) if seed is None else seed % (1 << 63)

    @property
    def done(self) -> bool:
        return bool(self.finish_reason)

    @property
    def remaining(self) -> int:
        """How many tokens may still come."""
        return self.max_new_tokens - len(self.tokens)

    @property
    def context(self) -> list[int]:
        """The tokens that the next one follows from."""
        return (self.prompt + self.tokens)[self.start :]


def check(request: Request, config: DecoderConfig, length: int, slide: bool | None) -> None:
    """Refuse what cannot be continued within `length` tokens; `slide` is None where that is no choice."""
    wanted = len(request.prompt) + request.max_new_tokens
    if not request.prompt:
        raise UserError("the prompt is empty and there is no beginning token: give it at least one token")
    check_ids(min(request.prompt), max(request.prompt), config)
    sampling = request.sampling
    for name in "suppress_tokens", "forced_tokens", "stop_token_ids", "logit_bias":
        for token in getattr(sampling, name):
            if not 0 <= token < config.vocab_size:
                raise UserError(f"{name} has token id {token}, and the vocabulary has {config.vocab_size}")
    if request.max_new_tokens < 0:
        raise UserError(f"max_new_tokens is {request.max_new_tokens}: it must be at least 0")
    if sampling.min_new_tokens > request.max_new_tokens:
        raise UserError(
            f"min_new_tokens is {sampling.min_new_tokens}, more than max_new_tokens, {request.max_new_tokens}"
        )
    if wanted > length and not slide:
        raise UserError(
            f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones are more than the model's "
            f"context of {length}: shorten them"
            + ("" if slide is None else ", or let the context slide (slide=True, --context-overflow slide)")
        )
