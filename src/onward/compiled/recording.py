"""Records the operations of one decoding step of a model, which `compiled/program.py` compiles.

The model runs as always, over a cache whose layers record what the model does with them. A recorded tensor keeps its
memory, so the operations can be repeated in place, on new tokens and positions.
Shapes: B rows, T tokens per row, H query heads, K key/value heads, E width of a query, F of a value, R of a tail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onward.compiled.interface import NotCompilable, StepShape
from onward.model.adapters import Selection
from onward.model.cache import CacheView, KVCache
from onward.model.calls import CallLayerCache, by_call
from onward.model.layer_cache import SCALE, CacheEntry, LayerCache, SlotIndices
from onward.model.mask import AttentionMask
from onward.model.states import StateIndices, StateLayerCache, StateSlots


@dataclass(frozen=True, eq=False)
class Write:
    """The record of a write of vectors (B, T, ...) of new tokens to the entry `name` (such as the keys) of the KV cache
    of layer number `layer`; a compiled step repeats it."""

    layer: int
    name: str
    vectors: Tensor


@dataclass(frozen=True, eq=False)
class Attention:
    """The record of attention with queries (B, T, H, E) to entries of a layer's KV cache, to be repeated by a compiled
    step; the result y is (B, T, H, F)."""

    layer: int
    names: Sequence[str]  # names of the entries with the keys, the values and any tails of the keys
    shapes: Sequence[torch.Size]  # shape of each entry at one position: (K, E - R), (K, F) and (K, R)
    q: Tensor
    y: Tensor
    window: int
    chunked: bool
    scale: float
    softcap: float | None
    sinks: Tensor | None
    slopes: Tensor | None  # in fp32


@dataclass(frozen=True, eq=False)
class Operation:
    """The record of an operation of PyTorch, with its arguments and its result, to be repeated by a compiled step."""

    function: Any
    arguments: Sequence[Any]
    options: Mapping[str, Any]
    result: Any


@dataclass(frozen=True, eq=False)
class Advance:
    """The record of a recurrent layer that advances its state `name` in the cache, to be repeated by a compiled step; y
    is its output, in fp32."""

    layer: int
    name: str
    y: Tensor


@dataclass(frozen=True, eq=False)
class Recurred(Advance):
    """The record of a recurrence over the new tokens; y is (B, G, R, T, F), in the letters of
    `model/recurrent/recurrence.py`."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor  # the decay a, not its logarithm
    beta: Tensor | None


@dataclass(frozen=True, eq=False)
class Convolved(Advance):
    """The record of a causal convolution over the new tokens; y is (B, T, X), for X channels."""

    x: Tensor  # (B, T, X)
    weight: Tensor  # (taps, X), in fp32


StepRecord = Write | Attention | Recurred | Convolved | Operation
VALUE_READS = {"_local_scalar_dense", "equal", "is_nonzero"}  # not compilable: every step would use the recorded value
HOST_READS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.__repr__, Tensor.data_ptr}


class Recorder(TorchDispatchMode):
    """A mode of PyTorch that records every operation inside the `with` block in its list `records`; `RecordedLayer` and
    `RecordedStates` add what a layer does with the cache."""

    records_steps = True  # see `kernels.recorded.is_recorded`

    def __init__(self) -> None:
        super().__init__()
        self.records: list[StepRecord] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # the default, True, imports torch's compiler, which takes a second
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        name = function.overloadpacket.__name__
        if name in VALUE_READS:
            raise NotCompilable(f"{name}, which reads a value")
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise NotCompilable(f"{name}, which draws random numbers")
        for tensor in tree_leaves((arguments, options, result)):
            if isinstance(tensor, Tensor) and tensor.layout != torch.strided:
                raise NotCompilable(f"{name} of {str(tensor.layout).removeprefix('torch.')}")
        self.records.append(Operation(function, arguments, options or {}, result))
        return result


class HostReads(TorchFunctionMode):
    """A mode of PyTorch that raises NotCompilable, while a step is recorded, for functions that read values of tensors
    into Python or NumPy without an operation of PyTorch."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        if function in HOST_READS:
            raise NotCompilable(f"{function.__name__}, which reads values")
        return function(*arguments, **(options or {}))


@dataclass(frozen=True, eq=False)
class RecordedLayer(LayerCache):
    """The KV cache of a layer while a decoding step is recorded: it records writes and attention instead of computing
    them."""

    index: int = 0
    recorder: Recorder | None = None

    def slot_indices(self, positions: Tensor) -> SlotIndices:
        return SlotIndices((positions, positions), positions)  # the kernels find the slots from the positions

    def update(self, name: str, vectors: Tensor, indices: SlotIndices) -> CacheEntry:
        assert self.recorder is not None
        if vectors.dtype != self.entries[name + SCALE if self.quantized else name].dtype:
            raise NotCompilable("a cache whose dtype differs from the model's")
        self.recorder.records.append(Write(self.index, name, vectors.contiguous()))
        return RecordedEntry(self, name, indices)


@dataclass(frozen=True, eq=False)
class RecordedEntry(CacheEntry):
    """An entry of the KV cache, such as the keys, while a decoding step is recorded: attention to it is recorded, not
    computed."""

    cache: RecordedLayer

    def read(self, dtype: torch.dtype) -> Tensor:
        raise NotCompilable("attention that reads the cache as a tensor")

    def attend(
        self,
        q: Tensor,
        v: CacheEntry,
        mask: AttentionMask,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Record the attention of q (B, T, H, E) to this entry, the keys, and to the values `v`; returns a tensor
        (B, T, H, F) of zeros in place of the result. Raises NotCompilable if the mask adds a nonlinear bias."""
        assert self.cache.recorder is not None
        if not mask.linear:
            raise NotCompilable("a nonlinear bias of the scores")
        slopes = None if mask.slopes is None else mask.slopes.float()
        names = [name for name in (self.name, v.name, self.tail) if name]
        shapes = [self.cache.entries[name].shape[2:] for name in names]
        y = q.new_zeros(*q.shape[:3], shapes[1][-1])
        options = mask.window, mask.chunked, scale, softcap, sinks, slopes
        attention = Attention(self.cache.index, names, shapes, q.contiguous(), y, *options)
        self.cache.recorder.records.append(attention)
        return y


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedStates(StateLayerCache):
    """The cache of a layer with states while a decoding step is recorded: it records the updates of the states."""

    index: int
    recorder: Recorder

    def slot_indices(self, positions: Tensor) -> StateSlots:
        first = positions[:, :1]  # the kernels find the slots from the positions
        call = StateIndices(first, first, first[:, 0] == 0, positions, positions, None)
        return StateSlots(write=(positions, positions), key_positions=positions, states=call)

    def read(self, name: str, call: StateIndices) -> Tensor:
        raise NotCompilable("a layer that reads its states as tensors")

    def recur(self, name: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None) -> Tensor:
        q, k, v, decay = (t.contiguous() for t in (q, k, v, decay.exp()))
        if any(t.dtype != torch.float32 for t in (q, k, v, decay, self.states[name])):
            raise NotCompilable("a recurrence in a dtype other than fp32")
        y = torch.zeros_like(v)
        self.recorder.records.append(
            Recurred(self.index, name, y, q, k, v, decay, None if beta is None else beta.contiguous())
        )
        return y

    def convolve(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype != self.states[name].dtype:
            raise NotCompilable("states whose dtype differs from the model's")
        y, x = torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format), x.contiguous()
        self.recorder.records.append(Convolved(self.index, name, y, x, weight.t().contiguous()))
        return y


@dataclass(frozen=True, eq=False)
class Recording:
    """The recorded operations of one decoding step, in order, and the tensors that the step reads and writes."""

    records: list[StepRecord]
    tokens: Tensor  # (B, T)
    positions: Tensor  # (B, T)
    rope_length: Tensor  # (B,)
    adapters: Tensor  # (B,): adapter number of each row, from the model's Selection
    result: Any  # a tensor, or several


@torch.inference_mode(False)  # inference mode would record composite operations undecomposed
def record_step(
    run: Callable[[Tensor, Tensor, CacheView], Tensor],
    cache: KVCache,
    shape: StepShape,
    chosen: Selection | None = None,
) -> Recording:
    """Record the operations of a decoding step: call `run(tokens, positions, view)`, which returns the result, such as
    logits, once for T new tokens in each of the first B rows of a cache. `shape` is (B, T); `chosen` is the Selection
    of the model's LoRA adapters, if it has any."""
    tokens, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    recorder, view = Recorder(), cache.view(0, shape[0])
    layers = list[LayerCache]()
    for index, layer in enumerate(view.layers):
        recorded = RecordedLayer(layer.entries, layer.window, layer.wraps, index=index, recorder=recorder)
        called = isinstance(layer.base if isinstance(layer, StateLayerCache) else layer, CallLayerCache)
        base: LayerCache = by_call([recorded])[0] if called else recorded
        if isinstance(layer, StateLayerCache):
            given = {name: getattr(layer, name) for name in ("entries", "window", "states", "rows", "leads")}
            layers.append(RecordedStates(**given, base=base, index=index, recorder=recorder))
        else:
            layers.append(base)
    rope_length, adapters = view.rope_length.clone(), torch.zeros(shape[0], dtype=torch.float32)
    with torch.no_grad(), (chosen or Selection()).read_from(adapters), HostReads(), recorder:
        result = run(tokens, positions, replace(view, layers=layers, rope_length=rope_length))
    return Recording(recorder.records, tokens, positions, rope_length, adapters, result)


@torch.inference_mode(False)
def record_function(function: Callable[[], Any]) -> Recording:
    """Record the operations of a function without arguments and without a cache, by one call."""
    recorder, unused = Recorder(), torch.zeros(1)
    with torch.no_grad(), HostReads(), recorder:
        result = function()
    return Recording(recorder.records, unused, unused, unused, unused, result)
