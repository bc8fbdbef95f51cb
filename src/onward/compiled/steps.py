"""The compiled decoding steps of a model: when a step is compiled, and when it may be used."""

from __future__ import annotations

import warnings
from collections import defaultdict
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from onward.compiled.devices import IMPLEMENTATIONS
from onward.compiled.fingerprint import ModelState
from onward.compiled.interface import CompiledStep, NotCompilable, Shape, TooManyRows
from onward.compiled.recording import is_plain
from onward.kernels.rules import is_watched
from onward.model.cache import KVCache
from onward.model.decoder import Decoder
from onward.tracing.listening import Uncompiled

COMPILE_AFTER = 16  # plain steps of a shape before a step is compiled


class StepPool:
    """The compiled decoding steps of a model that no runner is using. All belong to one snapshot, the state of the
    model when they were compiled."""

    def __init__(self) -> None:
        self.free: defaultdict[tuple[Shape, torch.dtype, type[KVCache]], list[CompiledStep]] = defaultdict(list)
        self.num_plain: defaultdict[Shape, int] = defaultdict(int)  # plain steps so far
        self.key: tuple[object, ...] = ()  # see `Snapshot.key`
        self.refusal = ""  # the reason why the steps of this model cannot be compiled

    def refresh(self, key: tuple[object, ...]) -> None:
        """Discard all compiled steps in the pool unless `key`, the `Snapshot.key` of the model's current state, equals
        that of the steps."""
        if key != self.key:
            self.free.clear()
            self.key, self.refusal = key, ""

    def acquire(self, model: Decoder, cache: KVCache, shape: Shape) -> CompiledStep | None:
        """Take a compiled step for the first rows of a cache out of the pool, or compile a new one; return None if the
        step cannot be compiled. `shape` is (rows, tokens per row)."""
        if free := self.free[shape, model.dtype, type(cache)]:
            return free.pop()
        if self.refusal:
            return None
        try:
            return compile_step(model, cache, shape)
        except TooManyRows:
            return None
        except NotCompilable as reason:
            self.refusal = str(reason)
            return None

    def release(self, model: Decoder, cache: KVCache, shape: Shape, step: CompiledStep) -> None:
        """Return a compiled step of `shape` (rows, tokens per row) to the pool, for the next runner of this model with
        a cache of the same class."""
        self.free[shape, model.dtype, type(cache)].append(step)


POOLS: WeakKeyDictionary[Decoder, StepPool] = WeakKeyDictionary()


def compile_step(model: Decoder, cache: KVCache, shape: Shape) -> CompiledStep:
    """Compile a decoding step for the device of the model, a CPU or CUDA; `shape` is (rows, tokens per row). Raises
    NotCompilable as `CompiledStep.compile` does, or if this machine has no compiler."""
    return IMPLEMENTATIONS[model.device.type]().compile(model, cache, shape)


class Steps:
    """The compiled decoding steps that one runner uses: one for each shape (B, T), compiled after `compile_after`
    uncompiled steps of that shape; None: never.

    They belong to the snapshot of the model at `state.follow()`, which the runner calls before each step, and are
    discarded when the model has changed. Steps stay uncompiled with hooks, edits, replaced methods, autocast, a mode of
    PyTorch that watches operations, a quantized cache, or a device without an implementation.
    """

    def __init__(
        self, model: Decoder, cache: KVCache, state: ModelState, compile_after: int | None = COMPILE_AFTER
    ) -> None:
        self.model, self.cache, self.state = model, cache, state
        self.compile_after = compile_after if is_plain(cache, model.dtype) else None
        self.pool = POOLS.setdefault(model, StepPool())
        self.used: dict[Shape, CompiledStep | None] = {}
        self.key: tuple[object, ...] = ()  # of the steps in use
        self.warned = False

    def run(self, tokens: Tensor, positions: Tensor, length: int) -> Tensor | None:
        """Compute the logits (B, T, V) for tokens (B, T) at positions (B, T), all below `length`, by a compiled step;
        None if the caller must compute an uncompiled step."""
        shape, device = (tokens.size(0), tokens.size(1)), tokens.device.type
        if shape not in self.used:
            self.pool.num_plain[shape] += 1
            few = self.compile_after is None or self.pool.num_plain[shape] <= self.compile_after
            if few or device not in IMPLEMENTATIONS:
                return None
        snapshot = self.state.current()
        if self.key is not self.state.key:
            self.used.clear()
            self.key = self.state.key
        if not snapshot.compilable or is_watched() or torch.is_autocast_enabled(device):
            if snapshot.traced and not self.warned:
                warnings.warn(
                    "decoding takes plain steps while the model is traced or edited", Uncompiled, stacklevel=2
                )
            self.warned = snapshot.traced
            return None
        if shape not in self.used:
            self.pool.refresh(self.key)
            self.used[shape] = self.pool.acquire(self.model, self.cache, shape)
        step = self.used[shape]
        if step is None:
            return None
        try:
            return step.run(tokens, positions, self.cache, length)
        except NotCompilable as reason:
            self.used[shape], self.pool.refusal = None, str(reason)
            return None

    def compile(self, rows: int, folder: Path | None) -> None:
        """Compile, before the first request, a step of one token in each of the first `rows` rows, which must be empty;
        `folder` keeps its code. Raises NotCompilable if the step cannot be compiled."""
        shape, device = (rows, 1), self.model.device.type
        if self.compile_after is None:
            raise NotCompilable("a quantized cache")
        if device not in IMPLEMENTATIONS:
            raise NotCompilable(f"the model is on {device}")
        snapshot = self.state.follow()
        if not snapshot.compilable:
            raise NotCompilable("the model has hooks, edits or replaced methods")
        if is_watched() or torch.is_autocast_enabled(device):
            raise NotCompilable("a mode of PyTorch is active")
        self.pool.refresh(self.state.key)
        step = IMPLEMENTATIONS[device]().compile_ahead(self.model, self.cache, shape, folder)
        self.pool.release(self.model, self.cache, shape, step)
        self.pool.num_plain[shape] = max(self.pool.num_plain[shape], self.compile_after)

    def release(self) -> None:
        """Return the compiled steps of this runner to the pool, for other runners; the next decoding step acquires them
        again."""
        for shape, step in self.used.items():
            if step is not None and self.key == self.pool.key:
                self.pool.release(self.model, self.cache, shape, step)
        self.used.clear()
        self.state.rest()
