"""Compute log-probabilities, perplexity and bits per byte of texts, for a model with its tokenizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath

import numpy as np

from onward.base.alone import ALONE, Alone
from onward.base.errors import UserError
from onward.base.files import check_text
from onward.data.sources import documents
from onward.data.tokens import Tokens
from onward.evaluation.score import Evaluation, evaluate, logprobs
from onward.model.decoder import Decoder
from onward.text.tokenizer import SURROGATE, UNKNOWN, Tokenizer

DECODED_AT_ONCE = 1 << 20  # number of tokens whose bytes are counted at a time


@dataclass(frozen=True)
class Score:
    """The tokens of a text, their log-probabilities and the sum of these log-probabilities."""

    tokens: list[int]
    pieces: list[str]  # each token as readable text
    logprobs: list[float | None]  # of each token given the preceding tokens, in nats; None without preceding tokens
    total: float  # exact sum: the log-probability of the text


def score_text(model: Decoder, tokenizer: Tokenizer, text: str) -> Score:
    """Log-probabilities of a text that fits into the context. The first token has a log-probability only if the
    tokenizer puts a beginning-of-text token before it; see `Tokenizer.begin`."""
    if not isinstance(text, str):
        raise UserError(f"text is {text!r}: score takes one text")
    tokens = tokenizer.encode(text)
    context, length = tokenizer.begin(tokens), model.config.context_length
    if len(context) > length:
        raise UserError(
            f"the text has {len(context)} tokens, more than the context of {length}: shorten it, or use evaluate, "
            "whose window slides"
        )
    values: list[float | None] = [None] * (len(tokens) - len(context) + 1) if tokens else []
    if len(context) > 1:
        values += logprobs(model, np.array([context]))[0].tolist()
    pieces = [tokenizer.piece(token) for token in tokens]
    return Score(tokens, pieces, values, math.fsum(p for p in values if p is not None))


def documents_of(given: str | PathLike[str] | Sequence[str | PathLike[str]]) -> list[str]:
    """Read texts and paths as documents; a path is a file or folder of documents, as for training data."""
    result: list[str] = []
    for item in [given] if isinstance(given, str | PathLike) else given:
        if isinstance(item, str):
            check_text(item, "text", "give Path({!r})")
        result += [item] if isinstance(item, str) else documents([fspath(item)])
    return result


def evaluate_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[str],
    stride: int = 0,
    replicas: Alone = ALONE,
) -> Evaluation:
    """Figures over documents, each after a beginning-of-text token if the tokenizer has one. Bytes are counted in the
    documents, even if the tokenizer does not know a character."""
    for text in documents:
        if not isinstance(text, str):
            raise UserError(f"a document is {text!r}: evaluate takes a text, a list of texts or token ids")
    encoded = [tokenizer.begin(tokenizer.encode(text, special=False)) for text in documents]
    tokens = [token for document in encoded for token in document]
    n_bytes = sum(len(SURROGATE.sub(UNKNOWN, text).encode()) for text in documents)
    return evaluate(model, np.array(tokens, np.int64), n_bytes - tokenizer.byte_count(tokens[:1]), stride, replicas)


def evaluate_tokens(
    model: Decoder,
    tokenizer: Tokenizer,
    tokens: np.ndarray | Tokens,
    stride: int = 0,
    n_bytes: int | None = None,
    replicas: Alone = ALONE,
) -> Evaluation:
    """Figures over token ids (T,) of any length. `n_bytes` is the number of bytes of their text, by default counted
    from the tokens; an unknown character counts as the three bytes of U+FFFD."""
    if isinstance(tokens, np.ndarray) and (tokens.ndim != 1 or tokens.dtype.kind not in "iu"):
        raise UserError(f"tokens are {tokens.dtype} {tokens.shape}: evaluate takes integers (T,)")
    if n_bytes is None:
        parts = (tokens[i : i + DECODED_AT_ONCE].tolist() for i in range(1, len(tokens), DECODED_AT_ONCE))
        n_bytes = sum(map(tokenizer.byte_count, parts))
    else:
        n_bytes -= tokenizer.byte_count(tokens[:1].tolist())  # the first token is not predicted
    return evaluate(model, tokens, n_bytes, stride, replicas)
