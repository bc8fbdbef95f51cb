"""The distribution of the next token, computed from logits, and how a token is drawn from it.

Shapes: B rows, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from onward.base.arguments import checked
from onward.base.device import tensor_on
from onward.base.errors import UserError
from onward.generation import processors as p
from onward.generation.check_request import check_mask
from onward.generation.sampling import Sampling, check_vocabulary
from onward.model.decoder import described


@checked
def next_token_distribution(
    logits: Tensor,
    samplings: Sampling | Sequence[Sampling],
    history: Sequence[Sequence[int]] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Return the probabilities (B, V) of the next token, in fp32, from logits (B, V); `samplings` is one Sampling for
    all rows, or one per row.

    `history` are the tokens of each row, of which the first `prompt_lengths` are its prompt (all of them by default);
    `allowed` (V,) or (B, V) is False for tokens that must not be generated. A Sampling is applied in this order:
    logit_bias, repetition_penalty, frequency_penalty and presence_penalty, no_repeat_ngram_size, suppress_tokens,
    `allowed`, forced_tokens, processors, temperature, top_k, top_p, min_p, typical_p. Raises a UserError for arguments
    that do not fit the logits.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise UserError(f"logits are {described(logits)}: give floating-point numbers (B, V)")
    count, vocab_size = logits.shape
    rows = [samplings] * count if isinstance(samplings, Sampling) else list(samplings)
    texts = history or [()] * count
    for name, each in {"samplings": rows, "history": texts, "prompt_lengths": prompt_lengths or texts}.items():
        if len(each) != count:
            raise UserError(f"{name} has {len(each)} entries for {count} rows of logits: give one for each row")
    for sampling, text in zip(rows, texts):
        sampling.check_vocabulary(vocab_size)
        check_vocabulary("history", text, vocab_size)
    check_mask(allowed, logits.shape, logits.shape[1:])
    return process_logits(logits, rows, History(texts, prompt_lengths), allowed).softmax(-1)


class History:
    """The earlier tokens of each row of logits, from which penalties and n-gram bans are computed. `texts` are the
    tokens of each row; the first `prompt_lengths` of them (by default all) are the row's prompt."""

    def __init__(self, texts: Sequence[Sequence[int]], prompt_lengths: Sequence[int] | None = None) -> None:
        self.texts = texts
        self.prompt_lengths = [len(text) for text in texts] if prompt_lengths is None else prompt_lengths

    def num_generated(self) -> list[int]:
        """Return the number of generated tokens of each row."""
        return [len(text) - length for text, length in zip(self.texts, self.prompt_lengths)]

    def text(self, row: int) -> Sequence[int]:
        """Return all tokens of a row, prompt and answer."""
        return self.texts[row]

    def seen(self, like: Tensor) -> Tensor:
        """Return whether each token is in the prompt or answer of a row, (B, V) of bool. `like` gives V and the
        device."""
        return counts(like, self.texts) > 0

    def generated(self, like: Tensor) -> Tensor:
        """Return how often each row has generated each token, (B, V). `like` gives V, the dtype and the device."""
        return counts(like, [text[length:] for text, length in zip(self.texts, self.prompt_lengths)])

    def repeats(self, row: int, size: int) -> Iterable[int]:
        """Return the tokens that, as the next token of a row, would repeat an n-gram of `size` tokens in the row's
        text."""
        return p.repeats(self.texts[row], size)


def process_logits(
    logits: Tensor,
    rows: Sequence[Sampling],
    history: History,
    allowed: Tensor | None,
    errors: dict[int, Exception] | None = None,
) -> Tensor:
    """Apply each row's Sampling (`rows`) to the logits (B, V); the softmax of the result is the distribution of the
    next token. `allowed` (V,) or (B, V) is False for tokens that must not be generated.

    An exception of a user's logits processor is stored in `errors` under the row's index or, without `errors`, raised.
    """
    z = logits.float()

    def is_set(name: str) -> bool:  # in any row
        return any(getattr(row, name) != getattr(DEFAULT, name) for row in rows)

    def each(name: str) -> list[Any]:
        return [getattr(row, name) for row in rows]

    if is_set("logit_bias"):
        z = z.clone()
        for row, sampling in enumerate(rows):
            if sampling.logit_bias:
                tokens = tensor_on(z.device, list(sampling.logit_bias))
                z[row, tokens] += tensor_on(z.device, list(sampling.logit_bias.values()), z.dtype)
    if is_set("repetition_penalty"):
        z = p.penalize_repetition(z, each("repetition_penalty"), history.seen(z))
    if is_set("frequency_penalty") or is_set("presence_penalty"):
        z = p.penalize_counts(z, each("frequency_penalty"), each("presence_penalty"), history.generated(z))
    if is_set("no_repeat_ngram_size"):
        z = p.ban(z, [sorted(history.repeats(i, row.no_repeat_ngram_size)) for i, row in enumerate(rows)])
    if is_set("suppress_tokens"):
        z = p.ban(z, each("suppress_tokens"))
    if allowed is not None:
        z = z.masked_fill(~allowed, -math.inf)
    if is_set("forced_tokens"):
        new = history.num_generated()
        z = p.force(z, [row.forced_tokens[n] if n < len(row.forced_tokens) else None for row, n in zip(rows, new)])
    if is_set("processors"):
        z = torch.stack([processed(sampling, history, i, z[i], errors) for i, sampling in enumerate(rows)])
    z = p.apply_temperature(z, each("temperature"))
    for name, keep in KEEP.items():
        if is_set(name):
            z = keep(z, each(name))
    return z


DEFAULT = Sampling()
KEEP: dict[str, Callable[[Tensor, Sequence[Any]], Tensor]] = {
    "top_k": p.keep_top_k,
    "top_p": p.keep_top_p,
    "min_p": p.keep_min_p,
    "typical_p": p.keep_typical,
}


def processed(
    sampling: Sampling, history: History, row: int, logits: Tensor, errors: dict[int, Exception] | None
) -> Tensor:
    """Apply the user's logits processors, `sampling.processors`, to the logits (V,) of a row, and return the result. A
    UserError for a result with another shape, NaN or +inf, and any exception of a processor, is stored in errors[row]
    or, if `errors` is None, raised."""
    try:
        for i, processor in enumerate(sampling.processors):
            changed = processor(history.text(row), logits.clone())  # a processor may change its argument
            named = f"processors[{i}] ({getattr(processor, '__name__', type(processor).__name__)})"
            if not isinstance(changed, Tensor) or changed.shape != logits.shape:
                raise UserError(f"{named} returned {getattr(changed, 'shape', changed)!r}: it must return logits (V,)")
            if is_broken(changed) and not is_broken(logits):
                raise UserError(f"{named} returned NaN or infinity: it must return numbers, or -inf to ban a token")
            logits = changed.to(logits)
    except Exception as error:
        if errors is None:
            raise
        errors[row] = error
    return logits


def is_broken(logits: Tensor) -> bool:
    """Return whether logits have no softmax, because one is NaN or positive infinity."""
    return bool((logits.isnan() | logits.isposinf()).any())


def counts(like: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
    """Count how often each token occurs in each of `texts`, sequences of token ids: (B, V), with the dtype and device
    of `like` (B, V)."""
    rows = tensor_on(like.device, [row for row, text in enumerate(texts) for _ in text], torch.long)
    tokens = tensor_on(like.device, [token for text in texts for token in text], torch.long)
    return torch.zeros_like(like).index_put_((rows, tokens), like.new_ones(()), accumulate=True)
