"""Compiled decoding steps of models: when a step is compiled, and what it may be used for.

On a CPU it is a Program of kernels of our own (`model/kernels/program.py`), on CUDA a GraphStep (`graphs.py`). Either
has memory of its own, so one runner at a time uses it; a runner that is done gives it back.
Shapes: B rows, T tokens of each, which are more than one where proposals are verified, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onward.generation.graphs import GraphStep, decoding_step, fused_step
from onward.model.cache import KVCache
from onward.model.decoder import Decoder
from onward.model.kernels.available import unavailable
from onward.model.recording import NotCompilable, is_plain, record_step
from onward.tracing.names import Uncompiled, is_traced

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
    """The compiled steps of a model that no runner uses now."""

    def __init__(self) -> None:
        self.free: defaultdict[tuple[Shape, torch.dtype, type[KVCache]], list[CompiledStep]] = defaultdict(list)
        self.steps: defaultdict[Shape, int] = defaultdict(int)  # plain steps so far
        self.fingerprint: tuple[object, ...] = ()
        self.refusal = ""  # why the steps of this model cannot be compiled

    def refresh(self, model: Decoder) -> None:
        """Forget all programs where the modules or the memory of the weights have changed."""
        fingerprint = tuple(fingerprint_of(model))
        if fingerprint != self.fingerprint:
            self.free.clear()
            self.fingerprint, self.refusal = fingerprint, ""

    def take(self, model: Decoder, cache: KVCache, shape: Shape, dtype: torch.dtype) -> CompiledStep | None:
        """A step for the first rows of a cache; None where the step cannot be compiled."""
        if free := self.free[shape, dtype, type(cache)]:
            return free.pop()
        if self.refusal:
            return None
        try:
            return compile_step(model, cache, shape)
        except NotCompilable as reason:
            if "rows" not in str(reason):
                self.refusal = str(reason)
            return None


OF_MODELS: WeakKeyDictionary[Decoder, Programs] = WeakKeyDictionary()


def fingerprint_of(model: nn.Module) -> Iterator[object]:
    """What a compiled step depends on: the modules, and the memory and dtype of the weights."""
    for module in model.modules():
        yield id(module)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor.data_ptr(), tensor.dtype


def compile_step(model: Decoder, cache: KVCache, shape: Shape, folder: Path | None = None) -> CompiledStep:
    """A compiled decoding step. A `folder` keeps its machine code. Raises NotCompilable."""
    if model.device.type == "cuda":
        return GraphStep(model, shape)
    if reason := unavailable():
        raise NotCompilable(f"no compiler: {reason}")
    from onward.model.kernels.program import Program

    recording = record_step(partial(decoding_step, model), cache, shape)
    return Program(recording, cache, [*model.parameters(), *model.buffers()], folder)


class Steps:
    """The compiled steps that a runner uses: one for each shape of which `compile_after` steps were decoded.

    A hook on a module, a mode of PyTorch that watches operations, a quantized cache, and a device other than a CPU or
    CUDA keep the plain path.
    """

    def __init__(self, model: Decoder, cache: KVCache, compile_after: int | None = COMPILE_AFTER) -> None:
        self.model, self.cache = model, cache
        self.compile_after = compile_after if is_plain(cache, model.dtype) else None
        self.programs = OF_MODELS.setdefault(model, Programs())
        self.used: dict[Shape, CompiledStep | None] = {}
        self.hooks: list[object] = []
        self.any_hook, self.last_hook = False, -1

    def run(self, tokens: Tensor, positions: Tensor, length: int) -> Tensor | None:
        """The logits (B, T, V) after tokens (B, T) at positions (B, T), all below `length`, or None where the step is
        not compiled."""
        shape, device = (tokens.size(0), tokens.size(1)), tokens.device.type
        if shape not in self.used:
            self.programs.steps[shape] += 1
            few = self.compile_after is None or self.programs.steps[shape] <= self.compile_after
            if few or device not in COMPILED:
                return None
            if not self.used:
                self.programs.refresh(self.model)
                modules = list(self.model.modules())
                self.hooks = [h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)]
                self.last_hook = -1
            if self.hooked():
                return None
            self.used[shape] = self.programs.take(self.model, self.cache, shape, self.model.dtype)
        program = self.used[shape]
        if program is None or self.hooked() or torch._C._len_torch_dispatch_stack():
            return None
        try:
            return program.run(tokens, positions, self.cache, length)
        except NotCompilable as reason:
            self.used[shape], self.programs.refusal = None, str(reason)
            return None

    def compile(self, rows: int, folder: Path | None) -> None:
        """Compile steps of one token in this many rows, which are empty, now rather than after some plain ones. Raises
        NotCompilable."""
        shape = rows, 1
        if self.compile_after is None:
            raise NotCompilable("a quantized cache")
        if self.model.device.type not in COMPILED:
            raise NotCompilable(f"the model is on {self.model.device.type}")
        self.programs.refresh(self.model)
        make = fused_step if self.model.device.type == "cuda" else compile_step
        program = make(self.model, self.cache, shape, folder)
        self.programs.free[shape, self.model.dtype, type(self.cache)].append(program)
        self.programs.steps[shape] = max(self.programs.steps[shape], self.compile_after)

    def hooked(self) -> bool:
        """Whether a module has a hook. They are looked at only after another was registered anywhere: a look at all
        modules takes 0.1 ms where the weights have replaced them in the processor's cache."""
        if self.any_hook or self.last_hook != RemovableHandle.next_id:
            if not self.any_hook and is_traced(self.model):
                warnings.warn(
                    "decoding takes plain steps while the model is traced or edited", Uncompiled, stacklevel=2
                )
            self.any_hook, self.last_hook = any(self.hooks), RemovableHandle.next_id
        return self.any_hook

    def release(self) -> None:
        """Give the programs back; the next step takes them again."""
        for shape, program in self.used.items():
            if program is not None:
                self.programs.free[shape, self.model.dtype, type(self.cache)].append(program)
        self.used.clear()
