"""The memory that a decoder needs for generation and for training, in bytes, and the largest sizes that fit.

Weights and caches follow from shapes, activations from a dry run of a step (`dry.py`). On a CPU the allocator of the C
library leaves holes (unused gaps) between tensors: the peak of a process is larger than the sum of its tensors. `holes`
is the difference, as a fraction of activations, gradients and temporary tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onward.config.decoder import DecoderConfig
from onward.config.optimizers import MATRIX_OPTIMIZERS
from onward.data.windows import Batch
from onward.generation.cache.manager import CHUNK
from onward.kernels.quantized import GROUP
from onward.planning.dry import dry_step
from onward.planning.optimizers import state_of
from onward.planning.parameters import kept, modules, parameters, state_bytes
from onward.transforms.quantize import choose_layers

HOLES = 0.28  # fragmentation of activations, gradients and temporary tensors on a CPU (measured: 0.14 to 0.41)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
ORTHOGONAL = 12  # bytes per element of the matrices that Muon orthogonalizes together: all of one shape


def weight_bytes(config: DecoderConfig, dtype: torch.dtype = torch.float32, quantize: str | None = None) -> int:
    """Compute the bytes of a decoder's weights in `dtype`; `quantize` is "int8" or "int4" for quantized weights, as in
    `quantize_model`, None for unquantized ones."""
    total = 0
    for module, count in modules(config):
        numbers = sum(parameter.numel() for parameter in module.parameters()) * dtype.itemsize
        for name, kind in choose_layers(module, quantize)[0].items() if quantize else ():
            layer: Any = module.get_submodule(name)
            outputs, inputs = layer.weight.shape
            numbers += outputs * (inputs + 4) if kind == "int8" else outputs * (inputs // 2 + inputs // GROUP * 2)
            if not (config.tied and name == "head"):  # the tied weight remains in the embedding
                numbers -= outputs * inputs * dtype.itemsize
        total += count * numbers
    return total


def cache_bytes(
    config: DecoderConfig,
    rows: int,
    length: int,
    dtype: torch.dtype,
    *,
    quantized: bool = False,
    chunk: int = 0,
    keep: int = 0,
) -> int:
    """Compute the bytes of a KVCache for `rows` rows of `length` tokens, with prompts read in chunks of `chunk` tokens.
    Layers with a window keep about as many tokens as the window, latent attention keeps one latent per token, a
    `quantized` cache keeps int8 with one scale per vector, and recurrent layers keep the states of `keep` + 1
    positions."""
    total = (keep + 1) * state_bytes(config, dtype.itemsize)
    for layer in kept(config):
        slots = chunk + (min(layer.window, length) if layer.window else length)
        for shape in layer.entries.values():
            vectors = math.prod(shape[:-1])
            total += slots * vectors * (shape[-1] + dtype.itemsize if quantized else shape[-1] * dtype.itemsize)
    return rows * total


@dataclass(frozen=True)
class GenerationMemory:
    """The memory of generation, in bytes. `activations` are those of reading one chunk of the prompt."""

    weights: int
    cache: int
    activations: int
    chunk: int  # prompt tokens prefilled at a time

    @property
    def peak(self) -> int:
        return self.weights + self.cache + self.activations


@dataclass(frozen=True)
class TrainingMemory:
    """The memory of training, in bytes: the peak is below the sum, as activations are freed during the backward
    pass."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # activations that the forward pass keeps for the backward pass
    at_loss: int  # activations and temporary tensors, until the backward pass of the blocks begins
    transient: int  # peak of gradients, activations and temporary tensors
    holes: int
    gathered: int = 0  # part of `transient`: weights that shards gather while they compute
    engine: int = 0  # full weights of an engine that samples during training, in addition to shards
    cache: int = 0  # the engine's cache, before the forward pass of a step

    @property
    def peak(self) -> int:
        return self.weights + self.optimizer + self.engine + max(self.transient + self.holes, self.cache)


def generation_memory(
    config: DecoderConfig,
    rows: int,
    length: int,
    dtype: torch.dtype,
    *,
    quantize: str | None = None,
    quantized_cache: bool = False,
    holes: float = HOLES,
) -> GenerationMemory:
    """Memory of generating `rows` texts of `length` tokens, prompts included, as an Engine allocates it; `holes` is the
    memory lost to fragmentation, as a share of the activations."""
    chunk = min(CHUNK, length)
    cache = cache_bytes(config, rows, length, dtype, quantized=quantized_cache, chunk=chunk)
    activations = dry_step(config, 1, chunk).forward.peak * dtype.itemsize / 4
    return GenerationMemory(weight_bytes(config, dtype, quantize), cache, int((1 + holes) * activations), chunk)


def hidden_matrices(config: DecoderConfig) -> Counter[tuple[int, ...]]:
    """Elements of the matrices that Muon trains, by shape (smaller, larger)."""
    elements: Counter[tuple[int, ...]] = Counter()
    for count, p in hidden_parameters(config):
        elements[tuple(sorted(p.shape[-2:]))] += count * p.numel()
    return elements


def hidden_parameters(config: DecoderConfig) -> Iterator[tuple[int, nn.Parameter]]:
    *blocks, _ = modules(config)
    for block, count in blocks:
        for name, p in block.named_parameters():
            if p.requires_grad and p.ndim >= 2 and not name.endswith("bias"):
                yield count, p


def optimizer_bytes(config: DecoderConfig, optimizer: str) -> int:
    """Bytes of the state: two fp32 moments per parameter; with Muon, one moment for the matrices inside the blocks, and
    with NorMuon also a number per row; for "module:Class", the state that one step creates."""
    if ":" in optimizer:
        each = [(count, p) for module, count in modules(config) for p in module.parameters() if p.requires_grad]
        return sum(count * state_of(optimizer, tuple(parameter.shape)) for count, parameter in each)
    if optimizer not in MATRIX_OPTIMIZERS:
        return 8 * parameters(config)
    rows = sum(count * p.shape[:-1].numel() for count, p in hidden_parameters(config)) * (optimizer == "normuon")
    return 8 * parameters(config) - 4 * hidden_matrices(config).total() + 4 * rows


def training_memory(
    config: DecoderConfig,
    rows: int,
    length: int,
    loss: Callable[[Any, Batch], Any],
    *,
    precision: str = "fp32",
    optimizer: str = "adamw",
    recompute: bool = False,
    holes: float = HOLES,
) -> TrainingMemory:
    """Compute the memory of training on batches of `rows` windows of `length` tokens, as a Trainer allocates it; `loss`
    is the function of model and batch that it minimizes, `precision` such as "fp32" or "bf16", `optimizer` "adamw",
    "muon", "normuon" or "module:Class". With `recompute`, only the inputs of blocks are kept for the backward pass;
    `holes` is the memory lost to fragmentation, as a share of activations, gradients and temporary tensors."""
    dry = dry_step(config, rows, length, loss=loss, autocast=AUTOCAST[precision], recompute=recompute)
    gradients, transient = 4 * parameters(config), dry.step.peak
    if optimizer in MATRIX_OPTIMIZERS:
        matrices = hidden_matrices(config)
        transient = max(transient, gradients + 2 * matrices.total() + ORTHOGONAL * max(matrices.values(), default=0))
    weights = weight_bytes(config)
    state = optimizer_bytes(config, optimizer)
    return TrainingMemory(weights, gradients, state, dry.forward.kept, dry.loss.peak, transient, int(holes * transient))


def most(needed: Callable[[int], float], memory: float, limit: int, *, start: int = 1, unused: float = 0.0) -> int:
    """The greatest number from `start` to `limit`, such as a batch size, whose memory fits; 0 if none does. `needed`
    must be non-decreasing. It may take a second: the search interpolates, which needs few calls if it is nearly linear,
    bisects at every fourth step, and ends early if at most `unused` bytes are left."""
    low, high = start, limit
    below, above = needed(low), needed(high)
    if below > memory or above <= memory:
        return 0 if below > memory else limit
    for step in range(limit):
        if high - low == 1 or memory - below <= unused:
            break
        share = (memory - below) / (above - below) if step % 4 < 3 else 0.5
        middle = min(max(low + int((high - low) * share), low + 1), high - 1)
        if (between := needed(middle)) <= memory:
            low, below = middle, between
        else:
            high, above = middle, between
    return low
