"""Random draws of next tokens: each is a pure function of the probabilities, a seed, a token index and a purpose.

A draw depends on no other row and no earlier draw (the counter-based generator SplitMix64, Steele et al. 2014).
Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onward.base.splitmix import GOLDEN, MULTIPLIERS
from onward.kernels.available import unavailable
from onward.kernels.memory import DTYPES, MIN_PARALLEL, Unreadable, address, buffer, filled


def draw(probabilities: Tensor, seeds: Tensor, index: Tensor, purpose: int) -> Tensor:
    """Draw token ids (B,) from probabilities (B, V), normalized or not, as a pure function of a seed and a token index
    per row, `seeds` and `index` (B,), and of `purpose`, which separates draws with the same seed and index.

    Each token v gets its own exponentially distributed random number e_v, and the token with the greatest p_v / e_v is
    drawn (the Gumbel-max trick). If p is rounded differently, as in another batch, the token changes only if two ratios
    nearly tie. A draw by cumulative probabilities would change near each of its V boundaries.
    """
    tokens = torch.arange(probabilities.size(1), device=probabilities.device)
    bits = scramble(counter_hash(seeds, index, purpose)[:, None] + tokens * signed(GOLDEN))
    e = shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52).log_().neg_()  # uniform numbers are strictly in (0, 1)
    return (probabilities / e).argmax(-1)


def counter_hash(seeds: Tensor, index: Tensor, purpose: int) -> Tensor:
    """Return 64 random bits as int64 for each seed and token index, int64 tensors of one shape. `purpose` separates
    draws with the same seed and index."""
    step = signed(GOLDEN)
    return scramble(scramble(scramble(seeds + step) + index * step) + signed(purpose * GOLDEN % (1 << 64)))


def scramble(x: Tensor) -> Tensor:
    """Mix the bits of int64 numbers, by the output function of SplitMix64."""
    for bits, multiplier in zip((30, 27), MULTIPLIERS):
        x = shift_right(x, bits).bitwise_xor_(x).mul_(signed(multiplier))
    return shift_right(x, 31).bitwise_xor_(x)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift bits to the right and fill with zeros; PyTorch's own shift repeats the sign bit."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def signed(x: int) -> int:
    """The signed 64-bit integer with the same bits as x, from 0 to 2 ** 64 - 1."""
    return x - (1 << 64) if x >> 63 else x


def draw_by_kernel(
    logits: Tensor, allowed: Tensor | None, factors: Sequence[float], seeds: Sequence[int], index: Sequence[int]
) -> Tensor | None:
    """Draw token ids (B,) from the softmax of logits (B, V) times an inverse temperature per row (`factors`), in one
    pass on a CPU; the tokens are those of `draw` for these seeds and token indices (`index`) and purpose 0.

    Factor 0 selects the likeliest token; `allowed` (V,) is False for tokens that are never drawn. A row whose logits
    give no distribution gets -1. Returns None if kernels are unavailable or cannot read the logits.
    """
    if logits.dtype not in DTYPES or unavailable():
        return None
    from onward.kernels.llvm.draws import draws

    logits, (rows, size) = logits.contiguous(), logits.shape
    tokens, target = buffer((rows,), torch.int64)
    try:
        operands = address(logits, logits.dtype, rows, size), address(allowed, torch.bool, size)
    except Unreadable:
        return None
    given = filled("f", factors), filled("q", seeds), filled("q", index)
    kernel = draws(DTYPES[logits.dtype], allowed is not None)
    threads = torch.get_num_threads() if rows * size >= MIN_PARALLEL else 1
    kernel(target, *operands, *(pointer for _, pointer in given), size, rows, threads)
    return tokens
