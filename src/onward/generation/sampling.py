"""The options that shape the distribution of the next token, as a value. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, TypedDict, get_args, get_origin

from onward import fields
from onward.arguments import named, shown
from onward.errors import UserError

SMALLEST, LARGEST = 1e-15, 1e15  # of penalties and biases: fp32 holds all of their products
Processor = Callable[..., Any]  # (tokens of prompt and answer, logits (V,)) -> logits (V,)


@named
@dataclass(frozen=True)
class Sampling:
    """Sampling: how logits become the distribution of the next token.

    The names are those of the OpenAI API and of transformers; `next_token_distribution` lists the order in which they
    are applied. Values of a wrong type, out of range or in contradiction are a UserError.
    """

    temperature: float = 0.8  # below 1 sharpens, above 1 flattens the distribution; 0 always takes the likeliest token
    top_k: int = 0  # keep only the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the likeliest tokens up to this total probability (nucleus sampling)
    min_p: float = 0.0  # keep the tokens with at least this fraction of the likeliest token's probability
    typical_p: float = 1.0  # keep the tokens of most typical surprise up to this total probability
    repetition_penalty: float = 1.0  # of tokens seen: positive logits are divided by it, negative ones multiplied
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each time it was generated
    presence_penalty: float = 0.0  # subtracted from a token's logit if it was generated at all
    no_repeat_ngram_size: int = 0  # no sequence of this many tokens occurs twice; 0: any may
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of token ids, as {50256: -100}
    suppress_tokens: tuple[int, ...] = ()  # token ids that are never generated
    forced_tokens: tuple[int, ...] = ()  # token ids with which the answer begins
    processors: tuple[Processor, ...] = ()  # functions that change the logits, called in this order

    def __post_init__(self) -> None:
        self.convert()
        self.at_least(0, "temperature", "top_k", "no_repeat_ngram_size")
        for name in ("top_p", "typical_p"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}: it must be from 0 to 1")
        if not SMALLEST <= self.repetition_penalty <= LARGEST:
            limits = f"from {SMALLEST} to {LARGEST}; 1 changes nothing"
            raise UserError(f"repetition_penalty is {self.repetition_penalty}: it must be {limits}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not abs(getattr(self, name)) <= LARGEST:  # nan is not
                raise UserError(f"{name} is {getattr(self, name)}: it must be a number from {-LARGEST} to {LARGEST}")
        if both := set(self.forced_tokens) & set(self.suppress_tokens):
            raise UserError(f"token {min(both)} is both in forced_tokens and in suppress_tokens: choose one")
        try:
            bias = {token_id(token): float(value) for token, value in self.logit_bias.items()}
        except (TypeError, ValueError, AttributeError, OverflowError):
            raise UserError("logit_bias is no table of numbers by token ids: write it as {50256: -100}") from None
        if not all(abs(value) <= LARGEST or value == -math.inf for value in bias.values()):  # nan is not
            raise UserError(f"logit_bias holds NaN or a number beyond {LARGEST}: use less, or -inf to ban a token")
        object.__setattr__(self, "logit_bias", bias)

    def convert(self) -> None:
        """Give each field the type that it declares: a list becomes a tuple, one text or function a tuple of one. A
        UserError names the field where this is impossible, or where a number is given as text."""
        for name, kind in fields.hints(type(self)).items():
            value, inner = getattr(self, name), {kind, *get_args(kind)}
            if getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
                value = value.item()
            if get_origin(kind) is tuple and (callable(value) or (isinstance(value, str) and str in inner)):
                value = (value,)
            if isinstance(value, str) and inner & {int, float}:
                raise UserError(f"{name} is {shown(value)}: it takes {fields.describe(kind)}")
            if fields.only_in_python(kind):
                self.check_callable(name, value)
            object.__setattr__(self, name, fields.convert(kind, value, name))

    def check_vocabulary(self, vocab_size: int) -> None:
        """A UserError for a token id that a vocabulary of this size does not have."""
        for name in "suppress_tokens", "forced_tokens", "logit_bias":
            check_vocabulary(name, getattr(self, name), vocab_size)

    @staticmethod
    def check_callable(name: str, value: Any) -> None:
        """A UserError unless a value is a function, several functions or None."""
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and not callable(one):
                raise UserError(f"{name} is {shown(value)}: it takes functions")

    def at_least(self, low: int, *names: str) -> None:
        """A UserError for the first of these fields that is below `low`, infinite or NaN."""
        for name in names:
            if not low <= getattr(self, name) < math.inf:  # nan is not
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least {low}")


def check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """A UserError for the first token id that a vocabulary of this size does not have."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise UserError(f"{name} has token id {token}, and the vocabulary has {vocab_size}")


def token_id(value: Any) -> int:
    """An integer, or the text of one, as a token id; a TypeError or ValueError for a fraction."""
    return int(value) if isinstance(value, str) else index(value)


class SamplingKeywords(TypedDict, total=False):
    """The fields of Sampling as keyword arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    no_repeat_ngram_size: int
    logit_bias: Mapping[int, float]
    suppress_tokens: Sequence[int]
    forced_tokens: Sequence[int]
    processors: Processor | Sequence[Processor]
