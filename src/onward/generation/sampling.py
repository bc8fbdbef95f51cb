"""How tokens are chosen, as a value. Does not import torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onward.errors import UserError

Processor = Callable[..., Any]  # (tokens of prompt and answer, logits (V,)) -> logits (V,)


@dataclass(frozen=True)
class Sampling:
    """One request's way of choosing tokens. A UserError tells of values out of range or in contradiction.

    The names are those of the OpenAI API and of transformers; the order in which they act is that of
    `next_token_distribution`.
    """

    temperature: float = 0.8  # below 1 sharpens, above 1 flattens the distribution; 0 always takes the likeliest token
    top_k: int = 0  # keep only the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the likeliest tokens up to this share of the probability (nucleus)
    min_p: float = 0.0  # keep tokens at least this share as likely as the likeliest
    typical_p: float = 1.0  # keep the tokens of most typical surprise up to this share of the probability
    repetition_penalty: float = 1.0  # of tokens seen: positive logits are divided by it, negative ones multiplied
    frequency_penalty: float = 0.0  # taken off a token's logit for each time it was generated
    presence_penalty: float = 0.0  # taken off a token's logit once it was generated
    no_repeat_ngram_size: int = 0  # no run of so many tokens comes twice; 0: any may
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to logits, as {50256: -100}
    suppress_tokens: tuple[int, ...] = ()  # token ids that are never chosen
    forced_tokens: tuple[int, ...] = ()  # token ids that the answer begins with
    min_new_tokens: int = 0  # no end before so many new tokens
    stop_token_ids: tuple[int, ...] = ()  # token ids that end the answer, besides the model's own
    stop: tuple[str, ...] = ()  # texts that end the answer, and are no part of it
    seed: int | None = None  # the same seed gives the same text; none: a new one each time
    n: int = 1  # answers for each prompt
    logprobs: int | None = None  # tell the log-probability of each token and of so many alternatives
    regex: str = ""  # the answer matches this regular expression
    json_schema: str = ""  # the answer is JSON of this schema; from Python also a dict
    processors: tuple[Processor, ...] = ()  # own changes to the logits, called in this order

    def __post_init__(self) -> None:
        def least(low: float, *names: str) -> None:
            for name in names:
                if not low <= getattr(self, name) < math.inf:  # nan is not
                    raise UserError(f"{name} is {getattr(self, name)}: it must be at least {low}")

        least(0, "temperature", "top_k", "no_repeat_ngram_size", "min_new_tokens")
        least(1, "n")
        for name in ("top_p", "typical_p"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}: it is a share, from 0 to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise UserError(f"repetition_penalty is {self.repetition_penalty}: it must be above 0; 1 changes nothing")
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"{name} is {getattr(self, name)}: it must be a number")
        if self.logprobs is not None and self.logprobs < 0:
            raise UserError(f"logprobs is {self.logprobs}: it must be at least 0, or none")
        schema: Any = self.json_schema
        if isinstance(schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(schema))
        if self.regex and self.json_schema:
            raise UserError("regex and json_schema are both given: choose one")
        if both := set(self.forced_tokens) & set(self.suppress_tokens):
            raise UserError(f"token {min(both)} is both in forced_tokens and in suppress_tokens: choose one")
        if any(not text for text in self.stop):
            raise UserError("a stop text is empty: leave it out")
        try:
            bias = {int(token): float(value) for token, value in self.logit_bias.items()}
        except (TypeError, ValueError, AttributeError):
            raise UserError(f"logit_bias is {self.logit_bias!r}: write it as {{token id: number}}") from None
        if not all(value < math.inf for value in bias.values()):  # nan is not
            raise UserError("logit_bias holds a value that is not a number or without end: only -inf may be")
        object.__setattr__(self, "logit_bias", bias)
        one: Any = self.stop
        if isinstance(one, str):
            object.__setattr__(self, "stop", (one,))
