"""Measures the speed of generation: tokens per second of a model, and the limits of the machine.

A decoding step reads the weights that its tokens use, and the keys and values of each row: the number of these bytes
divided by the memory bandwidth is a lower bound for its time. Prefill is limited by arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onward.config.decoder import DecoderConfig
from onward.generation.engine.engine import Engine
from onward.generation.request import Request
from onward.generation.sampling import Sampling
from onward.kernels.operations import linear
from onward.model.decoder import Decoder
from onward.planning.flops import attention_flops, causal_attention_flops, weight_flops
from onward.planning.machine import best_seconds
from onward.planning.memory import DTYPES
from onward.planning.parameters import cache_bytes_per_token, idle, parameters
from onward.transforms.quantize import quantize_model, quantize_weight

Precision = Literal["float32", "bfloat16", "int8", "int4"]
GREEDY = Sampling(temperature=0)
ROUNDS = 5  # largest number of runs of a measurement, over which the median is taken
LEAST = 4  # smallest number of measured decoding steps
SHORTEST = 4  # smallest context that can be measured: two tokens of a prompt and two new ones
LARGEST = 30_000_000  # for plans, the speed of decoders with more parameters is estimated
ROWS, PROMPT, NEW = 8, 8, 64  # number of rows, prompt tokens and new tokens in a calibration
MOST = 1 << 26  # maximum number of weights of the calibration layer; too large for most CPU caches


@dataclass(frozen=True)
class Generation:
    """One timed generation: the new token ids for each prompt, and the time of each token in seconds from the start."""

    tokens: list[list[int]]
    seconds: list[list[float]]

    @property
    def first(self) -> float:
        """Seconds until every prompt has its first new token (prefill)."""
        return max(times[0] for times in self.seconds)

    @property
    def total(self) -> float:
        return max(times[-1] for times in self.seconds)

    @property
    def decode_speed(self) -> float:
        """Tokens per second, from the time when every row has its first token to the time when the first row
        finishes."""
        end = min(times[-1] for times in self.seconds)
        return sum(self.first < time <= end for times in self.seconds for time in times) / (end - self.first)


def serve(engine: Engine, requests: Sequence[Request], limit: float = float("inf")) -> Generation:
    """Run requests at the same time; after `limit` seconds they are canceled, but not before each has four tokens after
    its first."""
    start, times = perf_counter(), {request: list[float]() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.busy:
        for request, _ in engine.advance():
            times[request].append(perf_counter() - start)
        if perf_counter() - start > limit and all(len(seconds) > LEAST for seconds in times.values()):
            for left in requests:
                engine.cancel(left)
    if failed := [request.error for request in requests if request.error]:
        raise failed[0]
    return Generation([request.tokens for request in requests], list(times.values()))


def weights(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]  # buffers hold quantized weights


def read_bytes(model: nn.Module, embed: nn.Module) -> int:
    """Bytes of weights that a step reads if it uses all experts; the embedding counts only if it is also the head,
    since a token reads one row of it."""
    tables = {id(p) for p in embed.parameters()}
    shared = sum(id(p) in tables for _, p in model.named_parameters(remove_duplicate=False)) > len(tables)
    return sum(tensor.nbytes for tensor in weights(model) if shared or id(tensor) not in tables)


@dataclass(frozen=True)
class MachineLimits:
    """Measured limits of the machine: bytes and operations per second."""

    bandwidth: float
    flops: Mapping[torch.dtype, float]


@dataclass(frozen=True)
class Speed:
    """The measured speed of a model in one precision and batch size."""

    precision: Precision
    batch: int
    prefill: float  # prompt tokens per second, up to the first new token
    decode: float  # new tokens per second of all rows
    bytes_per_token: float  # minimum number of bytes read to decode one token
    bandwidth_share: float  # bytes read per second while decoding, as a share of the bandwidth
    flops_share: float  # operations per second in prefill, as a share of the peak of the dtype
    intensity: float  # operations per byte in a decoding step
    plain: str = ""  # why steps are not compiled; "": steps are compiled


def measure(
    model: Decoder, precision: Precision, batch: int, *, prompt: int, new: int, seconds: float, limits: MachineLimits
) -> Speed:
    """Measure the Speed of greedy generation for `batch` random prompts: medians of up to five runs after a warm-up, in
    about `seconds` in total."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(config.vocab_size, (batch, prompt), generator=generator).tolist()
    engine = Engine(model, rows=batch, compile_after=0)
    run = lambda most, limit: serve(engine, [Request(list(tokens), GREEDY, most) for tokens in prompts], limit)
    start = perf_counter()
    run(min(new, LEAST + 2), seconds)
    runs: list[Generation] = []
    while not runs or (len(runs) < ROUNDS and perf_counter() - start < seconds):
        runs.append(run(new, seconds / 2))
    decode, prefill = (median(values) for values in zip(*((r.decode_speed, batch * prompt / r.first) for r in runs)))
    length = prompt + median(len(r.tokens[0]) for r in runs) / 2
    read = read_bytes(model, model.embed) - idle(model) * model.dtype.itemsize
    read += batch * int(length * cache_bytes_per_token(config, model.dtype.itemsize, length))
    return Speed(
        precision,
        batch,
        prefill,
        decode,
        read / batch,
        decode / batch * read / limits.bandwidth,
        prefill * (weight_flops(config) + causal_attention_flops(config, prompt)) / limits.flops[model.dtype],
        batch * (weight_flops(config) + attention_flops(config, length, decoding=True)) / read,
        engine.compile(batch),
    )


def step_seconds(config: DecoderConfig, precision: str, rows: int, device: torch.device) -> float:
    """Seconds of a decoding step after short prompts. A large decoder is not run: its time is estimated as the time of
    its linear layers, plus the overhead per layer and row, measured on a tiny decoder."""
    if parameters(config) <= LARGEST:
        return rows / trial(config, precision, rows, device)
    tiny = DecoderConfig(vocab_size=256, d_model=64, n_layers=4, n_heads=4, context_length=128)
    single, multiple = 1 / trial(tiny, "float32", 1, device), ROWS / trial(tiny, "float32", ROWS, device)
    overhead = single / tiny.n_layers * config.n_layers + (multiple - single) / (ROWS - 1) * (rows - 1)
    return linear_seconds(config, precision, rows, device) + overhead


def trial(config: DecoderConfig, precision: str, rows: int, device: torch.device) -> float:
    """Tokens per second of all rows, with random weights in a dtype, "int8" or "int4"."""
    dtype = DTYPES.get(precision, torch.bfloat16)
    config = replace(config, context_length=max(config.context_length, SHORTEST))
    model = Decoder(config).eval().to(device, dtype)
    if precision not in DTYPES:
        quantize_model(model, precision)
    new = min(NEW, config.context_length // 2)
    keys: dict[str, Any] = {"prompt": min(PROMPT, config.context_length // 2), "new": new, "seconds": 0.3}
    return measure(model, "float32", rows, limits=MachineLimits(1.0, {dtype: 1.0}), **keys).decode


@torch.inference_mode()
def linear_seconds(config: DecoderConfig, precision: str, rows: int, device: torch.device) -> float:
    """Seconds of all linear layers in a step, estimated from one layer with the same number of weights, but at most 67
    million."""
    weights, inputs = weight_flops(config) / 2, -(-config.d_model // 32) * 32
    outputs = min(int(weights), MOST) // inputs // 32 * 32
    dtype = DTYPES.get(precision, torch.bfloat16)
    few, x = torch.randn(32, inputs, dtype=dtype, device=device), torch.randn(rows, inputs, dtype=dtype, device=device)
    parts = (few,) if precision in DTYPES else quantize_weight(few, precision)  # type: ignore[arg-type]
    stacked = [part.repeat(outputs // 32, *[1] * (part.dim() - 1)) for part in parts]
    multiply = linear if precision in DTYPES else torch.ops.onward.quantized_linear
    run = partial(multiply, x, *stacked, *[None] * (precision not in DTYPES))
    return best_seconds(run, device) * weights / (outputs * inputs)
