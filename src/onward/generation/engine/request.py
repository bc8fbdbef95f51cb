"""A request: a prompt that an engine continues, and its answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from onward.arguments import check, check_fields, named
from onward.config.decoder import DecoderConfig
from onward.errors import UserError
from onward.generation.sampling import Sampling, check_vocabulary
from onward.model.decoder import check_ids


@runtime_checkable
class Constraint(Protocol):
    """The state of a constraint on the text of an answer, such as a regular expression."""

    def allowed(self) -> Tensor:
        """A mask (V,) that is True for the tokens that are allowed next."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by a token; False if the token was not allowed, or if no token may follow it."""
        ...

    def copy(self) -> Constraint:
        """A copy, which can be advanced by drafted tokens."""
        ...


@dataclass(frozen=True)
class TokenLogprob:
    """The model's log-probability of a token, before temperature, penalties and bans, in nats."""

    token: int
    logprob: float
    alternatives: list[tuple[int, float]]  # the likeliest tokens and their log-probabilities


def random_seed() -> int:
    """The seed of a request without one."""
    return secrets.randbits(63)


@named
@dataclass(eq=False)
class Request:
    """A prompt that an engine continues: its options, its answer so far, and its state in the engine.

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
    adapter: str | None = None  # of the model, "" for the base alone; none: the one in use when it is added
    tokens: list[int] = field(default_factory=list)  # generated tokens, without the stop token
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of each generated token, if num_logprobs is given
    finish_reason: str = ""  # stop (a stop token, a stop text, a constraint that is met), length, cancelled or error
    error: Exception | None = None  # of a request that failed: a UserError, or the exception of a user's function
    start: int = 0  # index in prompt + tokens where the context begins
    num_cached: int = 0  # tokens of the context that the cache holds
    computed_by: str | None = None  # the model and adapter that computed these tokens; none: not one alone
    num_draft_cached: int = 0  # tokens of the context that the draft's cache holds
    arrival: int = 0  # number of requests that the engine received before it
    steps: int = 0  # steps that sampled a token or more
    num_drafted: int = 0  # drafted tokens that were verified
    num_accepted: int = 0  # drafted tokens that were accepted

    def __post_init__(self) -> None:
        check({"stop_token_ids": Collection[int]}, vars(self))
        self.stop_token_ids = frozenset(self.stop_token_ids)
        check_fields(self)
        self.seed %= 1 << 63

    @property
    def done(self) -> bool:
        """Whether the answer has ended."""
        return bool(self.finish_reason)

    @property
    def remaining(self) -> int:
        """The most tokens that may still be generated."""
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
        """The tokens from which the next one is predicted, as a new list."""
        return self.context_from(0)

    def context_from(self, index: int) -> list[int]:
        """The tokens of the context from this index on; its cost is in proportion to their number."""
        index += self.start - len(self.prompt)
        return self.tokens[index:] if index >= 0 else self.prompt[index:] + self.tokens


def check_request(request: Request, config: DecoderConfig, length: int, slide: bool | None) -> None:
    """Raise a UserError for a request that cannot be continued within `length` tokens.

    `slide`: whether the context slides; None where sliding is not supported.
    """
    if not request.prompt:
        raise UserError("the prompt is empty and there is no beginning-of-text token: give it at least one token")
    check_ids(min(request.prompt), max(request.prompt), config)
    request.sampling.check_vocabulary(config.vocab_size)
    check_vocabulary("stop_token_ids", request.stop_token_ids, config.vocab_size)
    if request.max_new_tokens < 0:
        raise UserError(f"max_new_tokens is {request.max_new_tokens}: it must be at least 0")
    if request.min_new_tokens > request.max_new_tokens:
        raise UserError(
            f"min_new_tokens is {request.min_new_tokens}, more than max_new_tokens, {request.max_new_tokens}"
        )
    size, hint = len(request.prompt), ", or let the context slide (slide=True, --context-overflow slide)"
    if size + request.max_new_tokens > length and not slide:
        raise UserError(
            (
                f"the prompt has {size} tokens, more than the model's context of {length}: shorten it"
                if size > length
                else f"{size} prompt tokens and {request.max_new_tokens} new ones are more than the model's context of "
                f"{length}: shorten them"
            )
            + ("" if slide is None else hint)
        )
