"""Quantization to llama.cpp's K types: groups of numbers with scales that are quantized themselves, in blocks of 256.

Scales are found by weighted least squares: several roundings of a group are tried, each with the scale (and minimum)
that fits it best, and the rounding with the least error is kept. Errors are weighted by the importance of their column,
if it is given: the mean square of the column's inputs (as in AWQ, Lin et al. 2023, section 3.1), and weighted more for
large numbers.

Shapes: N blocks, G groups in a block, W numbers in a group.
"""

from __future__ import annotations

import numpy as np

Numbers = np.ndarray  # float32 (N, 256)
Bytes = np.ndarray  # uint8 (N, bytes of a block)
STEPS = np.linspace(-1.0, 1.0, 15, dtype=np.float32)  # changes of the largest code that are tried


def weights_of(x: Numbers, columns: Numbers | None) -> Numbers:
    """The weights of squared errors: higher for large numbers, and multiplied by the importance of columns."""
    weights = np.sqrt((x * x).mean(1, keepdims=True) + x * x)
    return weights if columns is None else weights * columns


def divided(a: Numbers, b: Numbers) -> Numbers:
    """a / b, and 0 where b is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(b == 0, np.float32(0), a / b).astype(np.float32)


def half(x: Numbers) -> Numbers:
    return x.astype(np.float16).astype(np.float32)


def affine(x: Numbers, w: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """Scales and minima (N, G) of groups (N, G, W), each at least 0, such that scale * code - minimum is nearest to x
    with codes from 0 to `most`."""
    low, high = np.minimum(x.min(-1), 0), x.max(-1)
    best, scales, minima = np.full_like(low, np.inf), np.zeros_like(low), -low
    sum_w, sum_x = w.sum(-1), (w * x).sum(-1)
    for step in STEPS:
        codes = np.rint((x - low[..., None]) * divided(most + step, high - low)[..., None]).clip(0, most)
        sum_q, sum_qq, sum_xq = ((w * part).sum(-1) for part in (codes, codes * codes, x * codes))
        area = sum_w * sum_qq - sum_q * sum_q
        scale, offset = divided(sum_w * sum_xq - sum_x * sum_q, area), divided(sum_qq * sum_x - sum_q * sum_xq, area)
        above = offset > 0
        scale, offset = np.where(above, divided(sum_xq, sum_qq), scale), np.where(above, 0, offset)
        error = (w * (scale[..., None] * codes + offset[..., None] - x) ** 2).sum(-1)
        better = (error < best) & (scale > 0)
        best = np.where(better, error, best)
        scales, minima = np.where(better, scale, scales), np.where(better, -offset, minima)
    return scales, minima


def affine_blocks(x: Numbers, columns: Numbers | None, most: int) -> tuple[Numbers, Numbers, Bytes, Bytes, Bytes]:
    """The scale and minimum of each block (N, 1), rounded to fp16, and the codes of groups' scales and minima (N, 8)
    and of numbers (N, 8, 32)."""
    w = weights_of(x, columns).reshape(-1, 8, 32)
    x = x.reshape(-1, 8, 32)
    scales, minima = affine(x, w, most)
    d, m = (half(part.max(1, keepdims=True) / 63) for part in (scales, minima))
    s, o = (np.rint(divided(part, one)).clip(0, 63) for part, one in ((scales, d), (minima, m)))
    for last in (False, True):
        codes = np.rint(divided(x + (m * o)[..., None], (d * s)[..., None])).clip(0, most)
        if last:
            break
        first, second = s[..., None] * codes, np.broadcast_to(o[..., None], codes.shape)  # x is near d first - m second
        total = lambda part, w=w: (w * part).sum((1, 2))[:, None]
        aa, ab, bb, ax, bx = (total(p) for p in (first**2, first * second, second**2, first * x, second * x))
        area = aa * bb - ab * ab
        flat = area <= 1e-6 * aa * bb
        new_d = np.where(flat, divided(ax + m * ab, aa), divided(ax * bb - ab * bx, area))
        new_m = np.where(flat, m, divided(ab * ax - aa * bx, area))
        fits = (new_d > 0) & (new_m >= 0)
        d, m = half(np.where(fits, new_d, d)), half(np.where(fits, new_m, m))
    return d, m, s.astype(np.uint8), o.astype(np.uint8), codes.astype(np.uint8)


def six_bits(s: Bytes, o: Bytes) -> Bytes:
    """Scales and minima of eight groups, 6 bits each, in 12 bytes."""
    low, mid = s[:, :4] | (s[:, 4:] >> 4) << 6, o[:, :4] | (o[:, 4:] >> 4) << 6
    return np.concatenate([low, mid, (s[:, 4:] & 15) | (o[:, 4:] & 15) << 4], 1)


def fp16(x: Numbers) -> Bytes:
    return np.ascontiguousarray(x.astype(np.float16)).view(np.uint8)


def paired(codes: Bytes) -> Bytes:
    """The low four bits of groups 2 i and 2 i + 1 in the bytes of one group: (N, 128)."""
    pairs = (codes & 15).reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(codes), -1)


def to_q4_k(x: Numbers, columns: Numbers | None = None) -> Bytes:
    d, m, s, o, codes = affine_blocks(x, columns, 15)
    return np.concatenate([fp16(d), fp16(m), six_bits(s, o), paired(codes)], 1)


def to_q5_k(x: Numbers, columns: Numbers | None = None) -> Bytes:
    d, m, s, o, codes = affine_blocks(x, columns, 31)
    fifth = ((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(1).astype(np.uint8)
    return np.concatenate([fp16(d), fp16(m), six_bits(s, o), fifth, paired(codes)], 1)


def symmetric(x: Numbers, w: Numbers) -> Numbers:
    """Scales (N, G) such that scale * code is nearest to x (N, G, W) with codes from -32 to 31."""
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    best, scales = np.zeros_like(largest), np.zeros_like(largest)
    for step in STEPS:
        codes = np.rint(x * divided(np.float32(-32) + step, largest)[..., None]).clip(-32, 31)
        sum_qq, sum_xq = (w * codes * codes).sum(-1), (w * x * codes).sum(-1)
        gain = divided(sum_xq * sum_xq, sum_qq)  # the reduction of the error compared with all zeros
        better = gain > best
        best, scales = np.where(better, gain, best), np.where(better, divided(sum_xq, sum_qq), scales)
    return scales


def to_q6_k(x: Numbers, columns: Numbers | None = None) -> Bytes:
    w = weights_of(x, columns).reshape(-1, 16, 16)
    x = x.reshape(-1, 16, 16)
    scales = symmetric(x, w)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(1)[:, None], 1)
    d = half(largest / -128)
    s = np.rint(divided(scales, d)).clip(-128, 127)
    codes = (np.rint(divided(x, (d * s)[..., None])).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4).reshape(len(x), -1)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = ((codes >> 4) << shifts).sum(2).astype(np.uint8).reshape(len(x), -1)
    return np.concatenate([low, high, s.astype(np.int8).view(np.uint8), fp16(d)], 1)


def more_bits(layer: int, layers: int) -> bool:
    """Whether the value and down projections of a layer get more bits in a mixed file: true in the first and the last
    eighth of the layers, and in every third layer between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def mixed(name: str, dtype: str, layer: int, layers: int, head: bool) -> str:
    """The type of a tensor in a file of type Q4_K_M, Q5_K_M or Q6_K; `head`: whether the tensor computes the logits."""
    if dtype == "Q6_K" or head:
        return "Q6_K"
    sensitive = any(part in name for part in (".attn_v.", ".attn_qkv.", ".ffn_down"))
    return "Q6_K" if sensitive and more_bits(layer, layers) else dtype.removesuffix("_M")
