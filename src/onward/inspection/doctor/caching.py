"""Checks of the key/value cache: it changes no logits, holds only keys and values, and saves work.

Shapes: B rows, T tokens, S tokens in one call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from onward.inspection.doctor.finding import Check, Outcome, largest, verdict
from onward.inspection.doctor.parts import attention_layers
from onward.inspection.doctor.subject import Cache, Subject
from onward.model.decoder import Decoder
from onward.planning.machine import read_bandwidth, wait
from onward.planning.parameters import cache_bytes_per_token

NO_CACHE = "no known cache: a parameter past_key_values, or cache with a method new_cache(), or --cache"
PIECES = {"token by token": (1,), "in chunks of 5": (5,), "in chunks of 3 and 1": (3, 1)}
ARRAY = 1 << 25  # bytes that are read to measure the memory
STEPS = 3  # of which the fastest counts
REPEATED = 3.0  # a step repeats work if it makes this many times the numbers of a single token
EXCESS = 1.05  # the most bytes of a token in the cache, relative to its keys and values


def in_pieces(tokens: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield the tokens (1, T) in pieces of these sizes, in turn, each with the index of its first token."""
    start = turn = 0
    while start < tokens.size(1):
        size = sizes[turn % len(sizes)]
        yield start, tokens[:, start : start + size]
        start, turn = start + size, turn + 1


def cached(s: Subject) -> Outcome:
    """Check that the logits with the cache, token by token and in chunks, equal those without."""
    if s.new_cache() is None:
        return "not applicable", NO_CACHE
    worst, where = 0.0, ""
    for name, sizes in PIECES.items():
        memory = s.new_cache()
        assert memory
        logits = torch.cat([memory.step(piece) for _, piece in in_pieces(s.tokens[:1], sizes)], 1)
        if logits.size(1) < s.tokens.size(1):
            return "not applicable", "with a cache the model returns only the last logits of a call"
        differences = (logits - s.logits[:1]).abs().amax((0, 2))
        if (difference := largest(differences)) > worst:
            token = int((differences > s.allowed).float().argmax())
            module = first_different(s, sizes, token) if difference > s.allowed else ""
            worst, where = difference, f"{name}, first at token {token}" + (f", in {module}" if module else "")
    return verdict(worst <= s.allowed, f"logits with the cache and without differ by {worst:.1e}", where)


def first_different(s: Subject, sizes: Sequence[int], token: int) -> str:
    """Return the name of the first module whose result for a token differs with the cache, fed in pieces of these
    sizes; "" if none does."""
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
    """Check that logits are unchanged after other tokens were added to the cache and cropped."""
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
        return "not applicable", f"the cache refuses to be rolled back: {error}".splitlines()[0]
    try:
        pieces += [memory.step(piece) for _, piece in in_pieces(tokens[:, half:], (1,))]
    except Exception as error:  # the same steps before the crop raised nothing
        return "failed", f"the step after {wrong.size(1)} other tokens were undone raises {type(error).__name__}"
    logits = torch.cat(pieces, 1)
    if logits.size(1) < tokens.size(1):
        return "not applicable", "with a cache the model returns only the last logits of a call"
    difference = largest(logits - s.logits[:1])
    what = f"after {wrong.size(1)} other tokens were undone, logits differ by {difference:.1e}"
    return verdict(difference <= s.allowed, what, f"crop({half})")


def tensors(value: Any, depth: int = 6) -> dict[int, Tensor]:
    """Collect the tensors in a value, such as a cache of lists and objects nested up to `depth` times, by the address
    of their memory."""
    if isinstance(value, Tensor):
        return {value.data_ptr(): value} if value.numel() else {}
    if not depth or isinstance(value, nn.Module | str | type):
        return {}
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else None
    items = vars(value).values() if items is None and hasattr(value, "__dict__") else items or ()
    return {key: tensor for item in items for key, tensor in tensors(item, depth - 1).items()}


def held_bytes(memory: Cache) -> int:
    """Return the number of bytes of all tensors in a cache."""
    return sum(tensor.nbytes for tensor in tensors(memory.content()).values())


def memory_per_token(s: Subject) -> Outcome:
    """Check that the cache grows by no more bytes per token than keys and values need."""
    if isinstance(s.model, Decoder):
        size = cache_bytes_per_token(s.model.config, s.dtype.itemsize)
        return "ok", f"a token takes {size:,} bytes in the cache, by the formula that allocates it"
    memory = s.new_cache()
    if memory is None:
        return "not applicable", NO_CACHE
    half = s.tokens.size(1) // 2
    memory.step(s.tokens[:1, :half])
    before = held_bytes(memory)
    memory.step(s.tokens[:1, half:])
    grown = (held_bytes(memory) - before) / (s.tokens.size(1) - half)
    if not grown:
        return "noted", f"the cache does not grow with the text: {before:,} bytes are held from the beginning"
    layers = attention_layers(s)
    if not layers:
        return "noted", f"a token takes {grown:,.0f} bytes in the cache; no projections of keys and values are known"
    size = sum(2 * layer.kv_heads * layer.size for layer in layers) * s.dtype.itemsize
    what = f"a token takes {grown:,.0f} bytes in the cache, and its keys and values {size:,}"
    return verdict(grown <= EXCESS * size, f"{what}, {grown / size:.2g} times", "the entries of the cache")


@cache
def bandwidth(device: torch.device) -> float:
    """Measure how many bytes per second the device reads from memory; measured once per device."""
    return read_bandwidth(device, ARRAY)


def speed(s: Subject) -> Outcome:
    """Check that a step with the cache computes about as much as a forward of a single token."""
    memory = s.new_cache()
    if memory is None:
        return "not applicable", NO_CACHE
    last = s.tokens.size(1) - 1 - STEPS
    if last < 8:
        return "not applicable", "the context is too short to tell a step from the whole text"
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
    what = f"a step makes {times:.2g} times the numbers of a single token, in {min(seconds) * 1e3:.2g} ms: "
    what += f"{min(seconds) / least:.3g} times as long as the memory needs for the weights"
    return verdict(times <= REPEATED, what, "the call with a cache reads more than the new token")


CACHING = {
    "cached": Check(
        "a cache",
        "logits with it token by token and in chunks, against one call without; the first module that differs is named",
        "generation with the cache is another model than the one that was trained",
        "give new tokens the positions after those in the cache, and mask query i against key j by position",
        cached,
        cheap=True,
    ),
    "rolled back": Check(
        "a cache with crop(length)",
        "half of a text, other tokens, crop to the half, and the rest token by token",
        "speculation and edited prompts continue from text that was removed",
        "cut keys, values and the length at once, in every layer",
        rolled_back,
    ),
    "cache memory": Check(
        "a cache that grows with the text",
        "the bytes in the cache per token, against 2 · layers · key/value heads · size of a head",
        "texts that would fit in memory do not",
        "store keys and values before heads are repeated, and nothing else",
        memory_per_token,
    ),
    "speed": Check(
        "a cache",
        "the numbers that modules make in a step, against those for a single token; its time is noted",
        "each token costs as much as the whole text",
        "with a cache, run the new tokens alone",
        speed,
    ),
}
