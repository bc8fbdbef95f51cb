"""The compiled decoding steps of a model: when a step is compiled, and when it may be used."""

from __future__ import annotations

import warnings
from collections import defaultdict
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from onward.compiled.devices import IMPLEMENTATIONS
from onward.compiled.interface import CompiledStep, NotCompilable, Step, StepShape, TooManyRows, decoding_step
from onward.compiled.model_state import ModelState
from onward.kernels.operations import is_watched
from onward.model.cache import KVCache
from onward.model.decoder import Decoder
from onward.model.layer_cache import SCALE, LayerCache
from onward.model.paged import PagedLayerCache
from onward.tracing.listening import Uncompiled, is_traced

MAX_STEPS = 128  # maximum number of compiled steps in a runner or in a pool; each step allocates its own memory
Kind = tuple[StepShape, tuple[str, ...], Step]  # the shape of a step, the LoRA adapters of its rows, and its function
CacheLayout = tuple[torch.dtype, type[KVCache], bool]  # dtype and class of a cache, and whether it is quantized


def layout(model: Decoder, cache: KVCache) -> CacheLayout:
    """Return the layout of a cache for a model: a compiled step fits every cache of the same layout."""
    return model.dtype, type(cache), next((layer.quantized for layer in cache.layers if layer.entries), False)


class StepPool:
    """The compiled decoding steps of a model that no runner is using. All belong to one snapshot, the state of the
    model when they were compiled."""

    def __init__(self) -> None:
        self.free: defaultdict[tuple[Kind, *CacheLayout], list[CompiledStep]] = defaultdict(list)
        self.key: tuple[object, ...] = ()  # `Snapshot.key` of the steps
        self.refusals: dict[tuple[object, ...], str] = {}  # why no step can be compiled, by kind with or without shape

    def refresh(self, key: tuple[object, ...]) -> None:
        """Discard all compiled steps in the pool unless `key`, the `Snapshot.key` of the model's current state, equals
        that of the steps."""
        if key != self.key:
            self.free.clear()
            self.refusals.clear()
            self.key = key

    def acquire(self, model: Decoder, cache: KVCache, kind: Kind) -> CompiledStep | None:
        """Take a compiled step for the first rows of a cache out of the pool, or compile a new one, with the adapters
        that the model uses now; return None if the step cannot be compiled."""
        shape, _, step = kind
        if free := self.free[kind, *layout(model, cache)]:
            return free.pop()
        if kind in self.refusals or kind[1:] in self.refusals:
            return None
        try:
            return compile_step(model, cache, shape, step)
        except NotCompilable as reason:
            self.refusals[kind if isinstance(reason, TooManyRows) else kind[1:]] = str(reason)
            return None

    def release(self, model: Decoder, cache: KVCache, kind: Kind, step: CompiledStep) -> None:
        """Return a compiled step of a `kind` to the pool, for the next runner of this model with a cache of the same
        layout. While the pool has more than MAX_STEPS steps, it discards all steps of its oldest kind."""
        self.free[kind, *layout(model, cache)].append(step)
        while sum(map(len, self.free.values())) > MAX_STEPS:
            del self.free[next(iter(self.free))]


POOLS: WeakKeyDictionary[Decoder, StepPool] = WeakKeyDictionary()


def compile_step(model: Decoder, cache: KVCache, shape: StepShape, step: Step = decoding_step) -> CompiledStep:
    """Compile a decoding step for the device of the model, a CPU or CUDA; `shape` is (rows, tokens per row). Raises
    NotCompilable as `CompiledStep.compile` does, or if this machine has no compiler."""
    return IMPLEMENTATIONS[model.device.type]().compile(model, cache, shape, step)


def unsupported(model: Decoder, cache: KVCache) -> str:
    """Return why the device or the cache prevents compiled steps of this model; "" if they do not."""
    if model.device.type not in IMPLEMENTATIONS:
        return f"the model is on {model.device.type}"
    return "" if is_readable(cache, model.dtype) else "compiled steps cannot read a cache of this kind or dtype"


def is_readable(cache: KVCache, dtype: torch.dtype) -> bool:
    """Return whether compiled steps can read a cache: its layers are contiguous or paged, and all entries have this
    dtype or are quantized with scales in this dtype."""
    known = all(type(layer) in (LayerCache, PagedLayerCache) for layer in cache.layers)
    tensors = [
        tensor
        for layer in cache.layers
        for name, tensor in layer.entries.items()
        if name.endswith(SCALE) or not layer.quantized
    ]
    return known and all(tensor.dtype == dtype for tensor in tensors)


class CompiledSteps:
    """The compiled steps that one runner uses: one for each shape (B, T), set of LoRA adapters that its rows use, and
    compiled function.

    They are valid for the snapshot of the model that `state.follow()` returns, and are discarded when the
    model has changed. Steps stay uncompiled if the model has edits, replaced methods, or hooks other than those of LoRA
    adapters, and under autocast or a mode of PyTorch that watches operations.
    """

    def __init__(self, model: Decoder, cache: KVCache, state: ModelState) -> None:
        self.model, self.cache, self.state = model, cache, state
        self.unsupported = unsupported(model, cache)  # why no step can be compiled
        self.pool = POOLS.setdefault(model, StepPool())
        self.used: dict[Kind, CompiledStep | None] = {}  # from least to most recently used
        self.key: tuple[object, ...] = ()  # `Snapshot.key` of the steps in use
        self.warned = False

    def run(self, step: Step, tokens: Tensor, positions: Tensor, length: int, first: int = 0) -> Tensor | None:
        """Compute the result of the function `step`, such as logits (B, T, V), for tokens (B, T) at positions (B, T),
        all below `length`, in the rows from row `first` on, by a compiled step; None if the caller must compute an
        uncompiled step."""
        if self.unsupported:
            return None
        snapshot = self.state.follow()
        kind = (tokens.size(0), tokens.size(1)), snapshot.selection.current.in_use, step
        if self.key is not self.state.key:
            self.used.clear()
            self.key = self.state.key
        if not snapshot.compilable or is_watched() or torch.is_autocast_enabled(tokens.device.type):
            traced = is_traced(self.model)
            if traced and not self.warned:
                warnings.warn(
                    "decoding steps are not compiled while the model is traced or edited", Uncompiled, stacklevel=2
                )
            self.warned = traced
            return None
        if kind in self.used:
            compiled = self.used.pop(kind)
        else:
            self.pool.refresh(self.key)
            compiled = self.pool.acquire(self.model, self.cache, kind)
            if len(self.used) >= MAX_STEPS:
                del self.used[next(iter(self.used))]
        self.used[kind] = compiled
        if compiled is None:
            return None
        try:
            return compiled.run(tokens, positions, self.cache, length, first)
        except NotCompilable as reason:
            self.used[kind], self.pool.refusals[kind[1:]] = None, str(reason)
            return None

    def compile(self, step: Step, shape: StepShape, folder: Path | None) -> None:
        """Compile `step` for a shape (B, T) before the first request, while the first B rows are empty, with the LoRA
        adapter that the model uses now; `folder` keeps its code. Raises NotCompilable if the step cannot be compiled.
        """
        if self.unsupported:
            raise NotCompilable(self.unsupported)
        device = self.model.device.type
        snapshot = self.state.follow()
        if not snapshot.compilable:
            raise NotCompilable("the model has hooks, edits or replaced methods")
        if is_watched() or torch.is_autocast_enabled(device):
            raise NotCompilable("a mode of PyTorch is active")
        self.pool.refresh(self.state.key)
        kind = shape, snapshot.selection.current.in_use, step
        compiled = IMPLEMENTATIONS[device]().compile_ahead(self.model, self.cache, shape, step, folder)
        self.pool.release(self.model, self.cache, kind, compiled)

    def release(self) -> None:
        """Return the compiled steps of this runner to the pool, for other runners; the next decoding step acquires them
        again."""
        for kind, step in self.used.items():
            if step is not None and self.key == self.pool.key:
                self.pool.release(self.model, self.cache, kind, step)
        self.used.clear()
