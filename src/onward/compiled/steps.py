"""Compiled decoding steps of models: when a step is compiled, and what it may be used for.

On a CPU it is a Program of kernels of our own (`compiled/program.py`), on CUDA a GraphStep (`graphs.py`). Either
has memory of its own, so one runner at a time uses it; a runner that is done gives it back.
Shapes: B rows, T tokens of each, which are more than one where proposals are verified, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from onward.compiled.fingerprint import Look, ModelState
from onward.compiled.graphs import GraphStep, decoding_step, fused_step
from onward.compiled.recording import NotCompilable, is_plain, record_step
from onward.kernels.available import unavailable
from onward.kernels.rules import is_watched
from onward.model.cache import KVCache
from onward.model.decoder import Decoder
from onward.tracing.names import Uncompiled

COMPILED = ("cpu", "cuda")  # types of devices on which steps are compiled
COMPILE_AFTER = 16  # steps of the same shape, after which a step is compiled
Shape = tuple[int, int]  # (B, T)


class CompiledStep(Protocol):
    """A decoding step for the first rows of a cache."""

    def run(self, tokens: Tensor, positions: Tensor, cache: KVCache, length: int) -> Tensor:
        """The logits (B, T, V) for tokens (B, T) at positions (B, T), all below `length`; the next run overwrites
        them."""
        ...


class Programs:
    """The compiled steps of a model that no runner uses now. All belong to one fingerprint."""

    def __init__(self) -> None:
        self.free: defaultdict[tuple[Shape, torch.dtype, type[KVCache]], list[CompiledStep]] = defaultdict(list)
        self.steps: defaultdict[Shape, int] = defaultdict(int)  # plain steps so far
        self.key: tuple[object, ...] = ()  # see `Look.key`
        self.refusal = ""  # why the steps of this model cannot be compiled

    def refresh(self, key: tuple[object, ...]) -> None:
        """Forget all programs of another fingerprint."""
        if key != self.key:
            self.free.clear()
            self.key, self.refusal = key, ""

    def take(self, model: Decoder, cache: KVCache, shape: Shape) -> CompiledStep | None:
        """A step for the first rows of a cache; None where the step cannot be compiled."""
        if free := self.free[shape, model.dtype, type(cache)]:
            return free.pop()
        if self.refusal:
            return None
        try:
            return compile_step(model, cache, shape)
        except NotCompilable as reason:
            if "rows" not in str(reason):
                self.refusal = str(reason)
            return None

    def give_back(self, model: Decoder, cache: KVCache, shape: Shape, program: CompiledStep) -> None:
        """Keep a step for the next runner."""
        self.free[shape, model.dtype, type(cache)].append(program)


OF_MODELS: WeakKeyDictionary[Decoder, Programs] = WeakKeyDictionary()


def compile_step(model: Decoder, cache: KVCache, shape: Shape, folder: Path | None = None) -> CompiledStep:
    """A compiled decoding step. A `folder` keeps its machine code. Raises NotCompilable."""
    if model.device.type == "cuda":
        return GraphStep(model, shape)
    if reason := unavailable():
        raise NotCompilable(f"no compiler: {reason}")
    from onward.compiled.program import Program

    recording = record_step(partial(decoding_step, model), cache, shape)
    return Program(recording, cache, Look(model).tensors, folder)


class Steps:
    """The compiled steps that a runner uses: one for each shape of which `compile_after` steps were decoded.

    They belong to the fingerprint of the model at `state.follow()`, which the runner calls before each step, and are
    discarded where it has become another. Hooks, edits, replaced methods, autocast, a mode of PyTorch that watches
    operations, a quantized cache, and a device other than a CPU or CUDA keep the plain path.
    """

    def __init__(
        self, model: Decoder, cache: KVCache, state: ModelState, compile_after: int | None = COMPILE_AFTER
    ) -> None:
        self.model, self.cache, self.state = model, cache, state
        self.compile_after = compile_after if is_plain(cache, model.dtype) else None
        self.programs = OF_MODELS.setdefault(model, Programs())
        self.used: dict[Shape, CompiledStep | None] = {}
        self.key: tuple[object, ...] = ()  # of the programs in use
        self.warned = False

    def run(self, tokens: Tensor, positions: Tensor, length: int) -> Tensor | None:
        """The logits (B, T, V) after tokens (B, T) at positions (B, T), all below `length`, or None where the step is
        not compiled."""
        shape, device = (tokens.size(0), tokens.size(1)), tokens.device.type
        if shape not in self.used:
            self.programs.steps[shape] += 1
            few = self.compile_after is None or self.programs.steps[shape] <= self.compile_after
            if few or device not in COMPILED:
                return None
        look = self.state.look or self.state.follow()
        if self.key is not self.state.key:
            self.used.clear()
            self.key = self.state.key
        if not look.compilable or is_watched() or torch.is_autocast_enabled(device):
            if look.traced and not self.warned:
                warnings.warn(
                    "decoding takes plain steps while the model is traced or edited", Uncompiled, stacklevel=2
                )
            self.warned = look.traced
            return None
        if shape not in self.used:
            self.programs.refresh(self.key)
            self.used[shape] = self.programs.take(self.model, self.cache, shape)
        program = self.used[shape]
        if program is None:
            return None
        try:
            return program.run(tokens, positions, self.cache, length)
        except NotCompilable as reason:
            self.used[shape], self.programs.refusal = None, str(reason)
            return None

    def compile(self, rows: int, folder: Path | None) -> None:
        """Compile steps of one token in this many rows, which are empty, now rather than after some plain ones. Raises
        NotCompilable."""
        shape, device = (rows, 1), self.model.device.type
        if self.compile_after is None:
            raise NotCompilable("a quantized cache")
        if device not in COMPILED:
            raise NotCompilable(f"the model is on {device}")
        look = self.state.follow()
        if not look.compilable:
            raise NotCompilable("the model has hooks, edits or replaced methods")
        if is_watched() or torch.is_autocast_enabled(device):
            raise NotCompilable("a mode of PyTorch is active")
        self.programs.refresh(self.state.key)
        make = fused_step if device == "cuda" else compile_step
        self.programs.give_back(self.model, self.cache, shape, make(self.model, self.cache, shape, folder))
        self.programs.steps[shape] = max(self.programs.steps[shape], self.compile_after)

    def release(self) -> None:
        """Give the programs back; the next step takes them again."""
        for shape, program in self.used.items():
            if program is not None and self.key == self.programs.key:
                self.programs.give_back(self.model, self.cache, shape, program)
        self.used.clear()
        self.state.rest()
