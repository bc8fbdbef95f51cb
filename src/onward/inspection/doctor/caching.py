"""Checks of the key/value cache: it changes no logits, holds only keys and values, and saves work.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from onward.base.errors import UserError
from onward.inspection.doctor.finding import Check, Outcome, largest, verdict
from onward.inspection.doctor.modules import attention_layers
from onward.inspection.doctor.subject import Cache, Subject
from onward.model.decoder import Decoder
from onward.planning.machine import read_bandwidth, wait
from onward.planning.parameters import cache_bytes_per_token

NO_CACHE = (
    "no cache was recognized, neither a parameter past_key_values nor a parameter cache and a method new_cache(): "
    "add --cache"
)
PIECES = {"token by token": (1,), "in chunks of 5": (5,), "in chunks of 3 and 1": (3, 1)}
ARRAY = 1 << 25  # bytes that are read to measure the memory bandwidth
STEPS = 3  # timed steps; the fastest counts
REPEATED = 3.0  # a step repeats work if it computes more than this many times the activations of a single token
EXCESS = 1.05  # largest number of bytes per token in the cache, relative to its keys and values


def in_pieces(tokens: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Split tokens (1, T) into pieces of these sizes, cycling through the sizes; yield (index of the first token,
    piece)."""
    start = turn = 0
    while start < tokens.size(1):
        size = sizes[turn % len(sizes)]
        yield start, tokens[:, start : start + size]
        start, turn = start + size, turn + 1


def cached(s: Subject) -> Outcome:
    """Check that the cache changes no logits, token by token and in chunks."""
    try:
        if s.new_cache() is None:
            return "not applicable", NO_CACHE
    except UserError as error:  # raised when a decoder with custom parts is tried
        return "failed", str(error)
    worst, where = 0.0, ""
    for name, sizes in PIECES.items():
        memory = s.new_cache()
        assert memory
        logits = torch.cat([memory.step(piece) for _, piece in in_pieces(s.tokens[:1], sizes)], 1)
        if logits.size(1) < s.tokens.size(1):
            return "not applicable", "with a cache, the model returns logits for the last token of a call only"
        differences = (logits - s.logits[:1]).abs().amax((0, 2))
        if (difference := largest(differences)) > worst:
            token = int((differences > s.allowed).float().argmax())
            module = first_different(s, sizes, token) if difference > s.allowed else ""
            worst, where = difference, f"{name}, first at token {token}" + (f", in {module}" if module else "")
    return verdict(worst <= s.allowed, f"logits with and without the cache differ by {worst:.1e}", where)


def first_different(s: Subject, sizes: Sequence[int], token: int) -> str:
    """The first module whose result for the piece with `token` differs with a cache that gets pieces of `sizes`
    tokens."""
    memory, tokens = s.new_cache(), s.tokens[:1]
    assert memory
    with s.outputs() as plain:
        s(tokens)
    for start, piece in in_pieces(tokens, sizes):
        with s.outputs() as uses:
            memory.step(piece)
        if start + piece.size(1) > token:
            break
    for (name, result, _), (other_name, cached_result, _) in zip(plain, uses):
        if name != other_name:
            return ""
        rows = result[0] if result.dim() > 2 else result
        later = cached_result[0] if cached_result.dim() > 2 else cached_result
        if rows.size(0) == tokens.size(1) and later.size(0) == piece.size(1):
            difference = largest(rows[start : start + piece.size(1)] - later)
            if difference > 1e-4 * max(1e-3, largest(rows)):
                return name
    return ""


def rolled_back(s: Subject) -> Outcome:
    """Check that logits are unchanged after other tokens were added to the cache and removed again."""
    memory = s.new_cache()
    if memory is None:
        return "not applicable", NO_CACHE
    if memory.crop is None:
        return "not applicable", "the cache has no method crop(length)"
    tokens, half, wrong = s.tokens[:1], s.tokens.size(1) // 2, s.tokens[1:, : max(1, s.tokens.size(1) // 4)]
    pieces = [memory.step(tokens[:, :half])]
    memory.step(wrong)
    try:
        memory.crop(half)
    except (NotImplementedError, ValueError) as error:
        return "not applicable", f"the cache cannot be rolled back: {error}".splitlines()[0]
    try:
        pieces += [memory.step(piece) for _, piece in in_pieces(tokens[:, half:], (1,))]
    except Exception as error:  # the steps before the crop raised nothing
        return "failed", f"after a rollback of {wrong.size(1)} tokens, the next step raises {type(error).__name__}"
    logits = torch.cat(pieces, 1)
    if logits.size(1) < tokens.size(1):
        return "not applicable", "with a cache, the model returns logits for the last token of a call only"
    difference = largest(logits - s.logits[:1])
    what = f"after a rollback of {wrong.size(1)} tokens, logits differ by {difference:.1e}"
    return verdict(difference <= s.allowed, what, f"crop({half})")


def tensors(value: Any, depth: int = 6) -> dict[int, Tensor]:
    """Tensors in a value, such as a cache of lists and objects, by address, so that shared memory counts once."""
    if isinstance(value, Tensor):
        return {value.data_ptr(): value} if value.numel() else {}
    if not depth or isinstance(value, nn.Module | str | type):
        return {}
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else None
    items = vars(value).values() if items is None and hasattr(value, "__dict__") else items or ()
    return {key: tensor for item in items for key, tensor in tensors(item, depth - 1).items()}


def held_bytes(memory: Cache) -> int:
    return sum(tensor.nbytes for tensor in tensors(memory.content()).values())


def memory_per_token(s: Subject) -> Outcome:
    """Check that the cache grows by at most EXCESS times the bytes per token that keys and values need."""
    if isinstance(s.model, Decoder):
        size = cache_bytes_per_token(s.model.config, s.dtype.itemsize)
        return "ok", f"the cache takes {size:,} bytes per token, computed from the config"
    memory = s.new_cache()
    if memory is None:
        return "not applicable", NO_CACHE
    half = s.tokens.size(1) // 2
    memory.step(s.tokens[:1, :half])
    before = held_bytes(memory)
    memory.step(s.tokens[:1, half:])
    grown = (held_bytes(memory) - before) / (s.tokens.size(1) - half)
    if not grown:
        return "noted", f"the cache does not grow with the text: it holds {before:,} bytes from the start"
    layers = attention_layers(s)
    if not layers:
        return (
            "noted",
            f"the cache takes {grown:,.0f} bytes per token; the key and value projections were not recognized",
        )
    size = sum(2 * layer.kv_heads * layer.size for layer in layers) * s.dtype.itemsize
    what = f"the cache takes {grown:,.0f} bytes per token, {grown / size:.2g} times the {size:,} of its keys and values"
    return verdict(grown <= EXCESS * size, what, "the cache entries")


@cache
def bandwidth(device: torch.device) -> float:
    return read_bandwidth(device, ARRAY)


def speed(s: Subject) -> Outcome:
    """Check that a step with the cache computes few more activations than a forward pass on a single token."""
    memory = s.new_cache()
    if memory is None:
        return "not applicable", NO_CACHE
    last = s.tokens.size(1) - 1 - STEPS
    if last < 8:
        return "not applicable", "the context is too short to distinguish a step from a forward pass on the whole text"
    memory.step(s.tokens[:1, :last])
    seconds = []
    for i in range(last, last + STEPS):
        start = perf_counter()
        memory.step(s.tokens[:1, i : i + 1])
        wait(s.device)
        seconds.append(perf_counter() - start)
    with s.outputs() as step:
        memory.step(s.tokens[:1, -1:])
    with s.outputs() as single:
        s(s.tokens[:1, :1])
    least = sum(p.nbytes for p in s.model.parameters()) / bandwidth(s.device)
    times = sum(use.result.numel() for use in step) / max(1, sum(use.result.numel() for use in single))
    what = f"a step computes {times:.2g} times as many activations as a single token, in {min(seconds) * 1e3:.2g} ms, "
    what += f"{min(seconds) / least:.3g} times the time to read the weights from memory"
    return verdict(times <= REPEATED, what, "the call with a cache processes more than the new token")


CACHING = {
    "cached": Check(
        "a cache",
        "compares logits with and without a cache, token by token and in chunks; names the first module that differs",
        "generation with the cache does not follow the trained model",
        "start the positions of new tokens after the cached tokens, and build the causal mask from positions",
        cached,
        cheap=True,
    ),
    "rolled back": Check(
        "a cache with crop(length)",
        "feeds half of a text and other tokens, crops the cache to that half, and feeds the rest token by token",
        "speculative decoding and edited prompts continue from removed text",
        "crop keys, values and the length together, in every layer",
        rolled_back,
    ),
    "cache memory": Check(
        "a cache that grows with the text",
        "compares the bytes per token in the cache with 2 · layers · key/value heads · head size · bytes of a number",
        "texts that should fit in memory do not",
        "cache keys and values before heads are repeated, and nothing else",
        memory_per_token,
    ),
    "speed": Check(
        "a cache",
        "compares the number of activations in a step with that of a single token; notes the time of a step",
        "each new token costs as much as the whole text",
        "with a cache, run only the new tokens",
        speed,
    ),
}
