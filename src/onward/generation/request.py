"""A request: a prompt that is being continued, and what came of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
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


def random_seed() -> int:
    return secrets.randbits(63)


@dataclass(eq=False)
class Request:
    """A prompt that an engine continues: its options, its answer so far, and its place in the engine.

    A token of `stop_token_ids` ends the answer and is not part of it; none is generated before `min_new_tokens`.
    `stop` is called with each new token and returns whether the answer ends with it. Equal seeds give equal answers.
    """

    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    stop: Callable[[int], bool] | None = None
    constraint: Constraint | None = None
    min_new_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = field(default_factory=random_seed)
    num_logprobs: int | None = None  # alternatives per token in `logprobs`; None: no logprobs
    tokens: list[int] = field(default_factory=list)  # generated tokens, without the stop token
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of each generated token, if num_logprobs is given
    finish_reason: str = ""  # stop (an end token, a stop text, a full constraint), length, cancelled or error
    error: Exception | None = None  # why it failed; a UserError, or what a function of the user raised
    start: int = 0  # where in prompt and tokens the context begins
    num_cached: int = 0  # how many tokens of the context the cache holds
    num_draft_cached: int = 0  # and how many the draft's cache
    arrival: int = 0  # arrival order
    steps: int = 0  # how many times a token or more was chosen
    num_drafted: int = 0  # drafted tokens that were looked at
    num_accepted: int = 0  # and those that were taken

    def __post_init__(self) -> None:
        self.seed %= 1 << 63
        self.stop_token_ids = frozenset(self.stop_token_ids)

    @property
    def done(self) -> bool:
        return bool(self.finish_reason)

    @property
    def remaining(self) -> int:
        """How many tokens may still come."""
        return self.max_new_tokens - len(self.tokens)

    @property
    def last_token(self) -> int:
        """The last token of prompt and answer."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def num_context_tokens(self) -> int:
        """The length of `context`."""
        return len(self.prompt) + len(self.tokens) - self.start

    @property
    def context(self) -> list[int]:
        """The tokens that the next one follows from, as a new list."""
        return self.context_from(0)

    def context_from(self, index: int) -> list[int]:
        """The tokens of the context from this index on; as cheap as they are few."""
        index += self.start - len(self.prompt)
        return self.tokens[index:] if index >= 0 else self.prompt[index:] + self.tokens


def check(request: Request, config: DecoderConfig, length: int, slide: bool | None) -> None:
    """Refuse what cannot be continued within `length` tokens; `slide` is None where that is no choice."""
    wanted = len(request.prompt) + request.max_new_tokens
    if not request.prompt:
        raise UserError("the prompt is empty and there is no beginning token: give it at least one token")
    check_ids(min(request.prompt), max(request.prompt), config)
    sampling = request.sampling
    token_ids: dict[str, Iterable[int]] = {
        "suppress_tokens": sampling.suppress_tokens,
        "forced_tokens": sampling.forced_tokens,
        "logit_bias": sampling.logit_bias,
        "stop_token_ids": request.stop_token_ids,
    }
    for name, tokens in token_ids.items():
        for token in tokens:
            if not 0 <= token < config.vocab_size:
                raise UserError(f"{name} has token id {token}, and the vocabulary has {config.vocab_size}")
    if request.max_new_tokens < 0:
        raise UserError(f"max_new_tokens is {request.max_new_tokens}: it must be at least 0")
    if request.min_new_tokens > request.max_new_tokens:
        raise UserError(
            f"min_new_tokens is {request.min_new_tokens}, more than max_new_tokens, {request.max_new_tokens}"
        )
    if wanted > length and not slide:
        raise UserError(
            f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones are more than the model's "
            f"context of {length}: shorten them"
            + ("" if slide is None else ", or let the context slide (slide=True, --context-overflow slide)")
        )
