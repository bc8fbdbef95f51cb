"""Attention weights and next-token probabilities of a decoder.

Shapes: L layers, H heads, T tokens.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from onward.inspection.inputs import attention_weights_of, logits
from onward.model.decoder import Decoder
from onward.tracing.trace import trace


def attention_maps(model: Decoder, tokens: Sequence[int]) -> list[Tensor]:
    """Return the attention weights (H, T, T) of each layer for one sequence of token ids, without dropout.

    Row q, column k is the weight with which token q attends to token k. Rows sum to 1 (to less with sinks); weights
    above the diagonal, of later tokens, are exactly 0. A layer without attention weights, such as a recurrent one, has
    no heads.
    """
    names = attention_weights_of(model)
    with trace(model, "embed", *(name for name in names if name)) as t:
        logits(model, tokens)
    none = torch.zeros(0, len(tokens), len(tokens), device=model.device)
    return [t[name][0] if name else none for name in names]


def head_scores(maps: Sequence[Tensor]) -> Tensor:
    """Score, from 0 to 1, how selective each row of attention weights is; `maps` has the weights (H, T, T) of each
    layer. Returns the scores (L, H, T), where H is the greatest number of heads of a layer; layers with fewer heads are
    padded with 0.

    The score of the row of token t is m * 4 h (1 - h): m is the weight on the tokens 1 to t - 2, and h the entropy of
    the row over its maximum, ln(t + 1). It is 0 for a row that attends only to the first token, to token t itself and
    the one before, to a single token, or equally to all tokens; it is high for a row that selects a few of the earlier
    tokens.
    """
    weights = pad_sequence([layer.float() for layer in maps], True)  # (L, H, T, T)
    earlier = weights.tril(-2)[..., 1:].sum(-1)
    positions = torch.arange(weights.size(-1), device=weights.device)
    entropy = torch.special.entr(weights).sum(-1) / (positions + 1).log().clamp(min=math.log(2))
    return earlier * 4 * entropy * (1 - entropy).clamp(min=0)


def most_selective(maps: Sequence[Tensor]) -> int:
    """The layer with the greatest mean of `head_scores`, which plots show by default."""
    return int(head_scores(maps).mean((1, 2)).argmax())


def next_tokens(model: Decoder, tokens: Sequence[int], top: int = 10) -> list[list[tuple[int, float]]]:
    """The `top` likeliest next tokens after each position, as (id, probability)."""
    probabilities = logits(model, tokens).softmax(-1, dtype=torch.float32).topk(min(top, model.config.vocab_size))
    return [list(zip(ids, p)) for ids, p in zip(probabilities.indices.tolist(), probabilities.values.tolist())]
