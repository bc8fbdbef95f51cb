"""The results that generation returns."""

from __future__ import annotations

from dataclasses import dataclass

from onward.generation.logprobs import TokenLogprob


@dataclass(frozen=True)
class Completion:
    """An answer to a prompt, as text and tokens, with the reason why it ended and its counts of decoding steps and
    draft tokens."""

    text: str
    tokens: list[int]  # without the stop token, but with the tokens of a stop text
    finish_reason: str  # stop (stop token, stop text or completed constraint), length, cancelled or error
    seed: int  # seed that reproduces this answer with the same prompt and options
    logprobs: list[TokenLogprob]  # one for each token; empty unless `logprobs` is given
    steps: int  # decoding steps: forward passes that produced at least one token
    num_drafted: int  # tokens that a draft proposed and the model verified (speculative decoding)
    num_accepted: int  # draft tokens that were accepted
    error: Exception | None  # the exception, if the answer failed


@dataclass(frozen=True)
class SearchResult:
    """A continuation of a prompt that beam search returns, as text and tokens, with its score."""

    text: str
    tokens: list[int]  # without the stop token
    finish_reason: str  # stop (a stop token) or length
    score: float  # log-probability normalized by length; greater is better
    logprob: float  # sum of the tokens' log-probabilities, in nats
