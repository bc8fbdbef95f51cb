"""A request: a prompt that an engine continues, and its answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol, runtime_checkable

from torch import Tensor

from onward.base.arguments import check, check_fields, named, types_of
from onward.generation.logprobs import TokenLogprob
from onward.generation.processors import MIN_TEMPERATURE
from onward.generation.sampling import Sampling


@runtime_checkable
class Constraint(Protocol):
    """The interface of a constraint on the text of one answer, such as a regular expression. An object holds the
    constraint's state after the tokens generated so far."""

    def allowed(self) -> Tensor:
        """Return a mask (V,) that is True for the tokens that are allowed next."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by a token; return False if the token was not allowed, or if no further token may follow."""
        ...

    def copy(self) -> Constraint:
        """Return a copy that advances independently, as for draft tokens."""
        ...


def random_seed() -> int:
    return secrets.randbits(63)


@named
@dataclass(eq=False)
class Request:
    """A prompt that an engine continues: its options, its answer so far, and its state in the engine.

    A token of `stop_token_ids` ends the answer and is not part of it; none is generated before the answer has
    `min_new_tokens` tokens. `stop` is called with each new token and returns whether the answer ends with it. With the
    same prompt and options, equal seeds give equal answers.
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
    adapter: str | None = None  # adapter name; "": the base model; None: the adapter in use at `Engine.add`
    check: Callable[[Sequence[int]], None] | None = None  # called with the tokens of a complete answer; may raise
    calls_user: bool = True  # whether `stop` or a processor is user code, which may change the model
    tokens: list[int] = field(default_factory=list)  # generated tokens, without the stop token
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one for each generated token, if num_logprobs is given
    finish_reason: str = ""  # stop (stop token, stop text or completed constraint), length, cancelled or error
    error: Exception | None = None  # why the request failed: a UserError, or an exception of a user function
    start: int = 0  # index in prompt + tokens where the context begins
    num_cached: int = 0  # number of tokens of the context whose keys and values are in the cache
    last_length: int = 0  # length of the context beyond which the row must be prefilled again
    num_shared: int = 0  # number of prompt tokens that were in the cache when the request was first admitted
    computed_by: str | None = None  # key of the model and adapter that computed the cached tokens; None: not shared
    num_draft_cached: int = 0  # number of tokens of the context whose keys and values are in the draft model's cache
    arrival: int = 0  # arrival order: number of earlier requests of the engine
    steps: int = 0  # number of steps that sampled at least one token for this request
    num_drafted: int = 0  # draft tokens that were verified
    num_accepted: int = 0  # draft tokens that were accepted

    def __post_init__(self) -> None:
        check(types_of({"stop_token_ids": Collection[int]}), vars(self))
        self.stop_token_ids = frozenset(self.stop_token_ids)
        check_fields(self)
        self.seed %= 1 << 63

    @property
    def done(self) -> bool:
        return bool(self.finish_reason)

    @property
    def remaining(self) -> int:
        """The maximum number of tokens that may still be generated."""
        return self.max_new_tokens - len(self.tokens)

    @property
    def last_token(self) -> int:
        """The last token of the answer or, before its first token, of the prompt."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def num_context_tokens(self) -> int:
        """The number of tokens in `context`."""
        return len(self.prompt) + len(self.tokens) - self.start

    @property
    def context(self) -> list[int]:
        """The tokens from which the next one is predicted, as a new list: prompt and answer or, after the oldest tokens
        have been dropped from a full context, the later ones."""
        return self.context_from(0)

    def context_from(self, index: int) -> list[int]:
        """Return the tokens of `context` from index `index` on, in time proportional to their number."""
        index += self.start - len(self.prompt)
        return self.tokens[index:] if index >= 0 else self.prompt[index:] + self.tokens


SHAPING = [field.name for field in fields(Sampling) if field.name != "temperature"]
PLAIN = [getattr(Sampling(), name) for name in SHAPING]


def is_plain(request: Request) -> bool:
    return request.constraint is None and [getattr(request.sampling, name) for name in SHAPING] == PLAIN


def inverse_temperature(temperature: float) -> float:
    """Return 1 / temperature or, below MIN_TEMPERATURE, 0, which selects the likeliest token."""
    return 0.0 if temperature < MIN_TEMPERATURE else 1 / temperature
