"""The sampling options, which turn logits into the distribution of the next token. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Annotated, Any

from onward.base.arguments import Range, check_fields, field_types, named
from onward.base.errors import UserError
from onward.config.ranges import Share, SizeOrZero

SMALLEST, LARGEST = 1e-15, 1e15  # limits of penalties and biases, whose products fit in fp32
PositiveShare = Annotated[float, Range(SMALLEST, 1)]  # greater than 0, at most 1
Penalty = Annotated[float, Range(SMALLEST, LARGEST)]
Bias = Annotated[float, Range(-LARGEST, LARGEST)]
Processor = Callable[..., Any]  # (tokens of prompt and answer, logits (V,)) -> logits (V,)


@named
@dataclass(frozen=True)
class Sampling:
    """Sampling: how logits become the distribution of the next token.

    Most names are those of the OpenAI API and of transformers; `next_token_distribution` lists the order in which
    options apply. Raises a UserError for values that have a wrong type, are out of range or contradict each other.
    """

    temperature: Annotated[float, Range(0, 1e30)] = 0.8  # below 1 sharpens, above 1 flattens; 0: the most likely token
    top_k: SizeOrZero = 0  # keep only the k most likely tokens; 0: all
    top_p: PositiveShare = 1.0  # keep the most likely tokens that reach this total probability (nucleus sampling)
    min_p: Share = 0.0  # keep the tokens with at least this fraction of the most likely token's probability
    typical_p: PositiveShare = 1.0  # keep the most typical tokens that reach this total probability
    repetition_penalty: Penalty = 1.0  # factor that divides positive and multiplies negative logits of earlier tokens
    frequency_penalty: Bias = 0.0  # amount subtracted from a token's logit for each time it was generated
    presence_penalty: Bias = 0.0  # amount subtracted from the logit of a token that was generated at least once
    no_repeat_ngram_size: SizeOrZero = 0  # no sequence of this many tokens occurs twice; 0: no limit
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of token ids: {50256: -100}
    suppress_tokens: tuple[SizeOrZero, ...] = ()  # token ids that are never generated
    forced_tokens: tuple[SizeOrZero, ...] = ()  # token ids with which every answer begins
    processors: tuple[Processor, ...] = ()  # functions that change the logits, called in this order

    def __post_init__(self) -> None:
        for name in [name for name, value in vars(self).items() if callable(value) or isinstance(value, str)]:
            kind, value = field_types(type(self))[name], getattr(self, name)
            if kind.origin is tuple and (callable(value) or str in kind.args[0].classes):
                object.__setattr__(self, name, (value,))
        try:
            bias = {token_id(token): float(value) for token, value in self.logit_bias.items()}
        except (TypeError, ValueError, AttributeError, OverflowError):
            raise UserError("logit_bias is not a mapping of token ids to numbers: write it as {50256: -100}") from None
        if not all(abs(value) <= LARGEST or value == -math.inf for value in bias.values()):  # false for NaN
            raise UserError(
                f"logit_bias holds NaN or a number beyond {LARGEST}: use a smaller number, or -inf to ban a token"
            )
        object.__setattr__(self, "logit_bias", bias)
        check_fields(self)
        if both := set(self.forced_tokens) & set(self.suppress_tokens):
            raise UserError(f"forced_tokens and suppress_tokens both have the token id {min(both)}: choose one")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise a UserError if an option holds a token id outside a vocabulary of `vocab_size` tokens."""
        for name in "suppress_tokens", "forced_tokens", "logit_bias":
            check_vocabulary(name, getattr(self, name), vocab_size)


def check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise a UserError for the first of `token_ids` outside a vocabulary of `vocab_size` tokens; the message begins
    with `name`, the option that holds them."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise UserError(
                f"{name} has token id {token}, which is outside the vocabulary of {vocab_size} tokens: choose another"
            )


def token_id(value: Any) -> int:
    """Convert an integer, or a text such as "50256", to a token id. Raises a TypeError or ValueError for other
    values."""
    return int(value) if isinstance(value, str) else index(value)
