"""A dry run of one step: PyTorch's FakeTensorMode gives tensors shapes without memory, and every allocation is counted.
A step of a model of any size takes about a second.

Only two blocks of each kind are run; the other blocks of a kind allocate as much as the second.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onward.checkpoint.source import SizeLimit
from onward.config.decoder import DecoderConfig, Experts, at
from onward.data.windows import Batch
from onward.model.decoder import Decoder
from onward.transforms.recompute import recompute_blocks

CHUNKS = 3
LAYERED = "block", "attention", "mlp", "norm", "position"


@dataclass(frozen=True)
class Segment:
    """The change of memory in a section of a step, in bytes relative to its beginning."""

    kept: int  # bytes in use at the end minus bytes in use at the beginning
    peak: int  # largest number of bytes in use minus bytes in use at the beginning


def replay(segments: Iterable[Segment]) -> Segment:
    now = peak = 0
    for segment in segments:
        peak, now = max(peak, now + segment.peak), now + segment.kept
    return Segment(now, peak)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors in use inside the `with` block, including fake tensors, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.start = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return result

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def cut(self) -> Segment:
        """End a section of a step."""
        segment = Segment(self.now - self.start, self.peak - self.start)
        self.start = self.peak = self.now
        return segment


@dataclass(frozen=True)
class EvenSplit:
    """Stands in for the tensor of the numbers of tokens per expert, which cannot be computed from fake scores."""

    assignments: int
    experts: int

    def tolist(self) -> list[int]:
        each, rest = divmod(self.assignments, self.experts)
        return [each + (expert < rest) for expert in range(self.experts)]


class Shortened(TorchFunctionMode):
    """A context manager for dry runs: routers divide tokens evenly, and only the first chunks of a loss are
    computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.bincount:
            return EvenSplit(args[0].numel(), (kwargs or {})["minlength"])
        if func is Tensor.backward:  # recomputed forward passes need the mode, which is off while it handles a call
            with Shortened():
                ones = (torch.ones_like(args[0]),)
                return _engine_run_backward(args, ones, False, False, (), allow_unreachable=True, accumulate_grad=True)
        if func is Tensor.chunk and len(args) == 2:  # chunks of a loss's tokens: a large batch has millions
            tokens, size = args[0], -(-len(args[0]) // args[1])
            return tuple(tokens[start : start + size] for start in range(0, len(tokens), size)[:CHUNKS])
        return func(*args, **(kwargs or {}))


def kinds_of_layers(config: DecoderConfig) -> list[int]:
    """For each layer, the first layer with the same components."""
    parts = [tuple(at(getattr(config, name), layer) for name in LAYERED) for layer in range(config.n_layers)]
    return [parts.index(layer) for layer in parts]


def reduced(config: DecoderConfig, layers: list[int]) -> DecoderConfig:
    """The decoder with only these layers, and with experts that are computed one after the other."""

    def part_at(name: str, layer: int) -> Any:
        part = at(getattr(config, name), layer)
        return replace(part, backend="loop") if isinstance(part, Experts) else part

    parts: dict[str, Any] = {name: tuple(part_at(name, layer) for layer in layers) for name in LAYERED}
    final = config.final_norm or at(config.norm, config.n_layers - 1)
    return replace(config, n_layers=len(layers), final_norm=final, **parts)


def computing_in(dtype: torch.dtype | None, keep_casts: bool = True) -> AbstractContextManager[object]:
    """A context manager under which a CPU computes matrix products in `dtype` and may keep weights that were cast to
    it."""
    return torch.autocast("cpu", dtype, cache_enabled=keep_casts) if dtype else nullcontext()


@dataclass(frozen=True)
class DryStep:
    """The memory that a step uses in addition to the weights; without a loss, only `embedding` and `blocks`."""

    embedding: Segment
    blocks: list[Segment]  # the forward pass of each layer
    head: Segment = Segment(0, 0)  # last norm, logits and loss, and their backward passes
    backward: Sequence[Segment] = ()  # backward pass of each layer, from the last to the second
    end: Segment = Segment(0, 0)  # backward passes of the first layer and of the embedding

    @property
    def forward(self) -> Segment:
        return replay([self.embedding, *self.blocks])

    @property
    def loss(self) -> Segment:
        return replay([self.forward, self.head])

    @property
    def step(self) -> Segment:
        return replay([self.loss, *self.backward, self.end])


def divide_stream(model: Decoder, own: int, parts: int) -> None:
    """Pass only the first `own` tokens, one of `parts` parts, to modules outside attention and feed-forward, as in
    `parallel/stream.py`."""
    cut: Any = lambda module, *given: given[-1][:, :own].clone()
    grow: Any = lambda x: x.repeat(1, parts, 1)
    for block in model.blocks:
        for branch in (child for name, child in block.named_children() if name in ("attn", "mlp")):
            branch.register_forward_pre_hook(lambda module, given: (grow(given[0]), *given[1:]))
            branch.register_forward_hook(cut)
    model.dropout.register_forward_hook(cut)  # the last module before the blocks
    model.norm.register_forward_pre_hook(lambda module, given: (grow(given[0]),))


def dry_step(
    config: DecoderConfig,
    rows: int,
    length: int,
    *,
    loss: Callable[[Any, Batch], Any] | None = None,
    autocast: torch.dtype | None = None,
    recompute: bool = False,
    low_blocks: bool = False,
    keep_casts: bool = True,
    parts: int = 1,
    context: int = 1,
) -> DryStep:
    """Measure the memory of a forward pass or, with a `loss`, of a Trainer's step on `rows` texts of `length` tokens,
    without data or computation. Weights are in fp32 (with `low_blocks`, those of blocks in `autocast`). `parts`
    processes divide the tokens between attention and feed-forward, and `context` processes divide all tokens."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kinds = kinds_of_layers(config)
    chosen = sorted({*kinds})
    # a formula holds for one kind of block in one precision; fake tensors run the code of every part, including users'
    # parts
    fake, live = FakeTensorMode(), LiveBytes()
    cuts: list[Segment] = []
    cut: Any = lambda *_: cuts.append(live.cut())
    with fake, SizeLimit(1 << 62):
        model: Any = Decoder(reduced(config, [layer for layer in chosen for _ in range(2)]))
        for module in model.blocks.modules() if low_blocks else ():
            for name, p in module._parameters.items():
                module._parameters[name] = None if p is None else nn.Parameter(p.detach().to(autocast), p.requires_grad)
        for parameter in model.parameters():
            live.add(parameter)
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        batch = Batch(tokens, tokens.clone())
    live.cut()
    if parts > 1:
        divide_stream(model, length // context // parts, parts)
    if context > 1:
        from onward.parallel.context import DividedTokens, own_batch  # imports DTensors, which takes half a second

        with fake, live:
            batch = own_batch(batch, context, 0)
        DividedTokens(model, 0, context, lambda x: x.repeat(1, context, 1, 1))
    if recompute:
        recompute_blocks(model)
    model.blocks[0].register_forward_pre_hook(cut)
    for block in model.blocks:
        block.register_forward_hook(cut)
        if loss:
            block.register_full_backward_pre_hook(cut)
    model.hidden = lambda tokens, positions: model.hidden_of_checked(tokens, positions, None)
    with fake, live, Shortened(), computing_in(autocast, keep_casts), torch.set_grad_enabled(loss is not None):
        if loss is None:
            model.hidden(batch.tokens, None)
        else:
            model.train()
            total, _ = loss(model, batch)
    if loss:
        with fake, live, Shortened():
            total.backward()
    cut()
    # cuts: embedding; blocks forward; norm, head and loss; blocks backward, the first block with the embedding
    count = 2 * len(chosen)
    first = {kind: cuts[1 + 2 * i] for i, kind in enumerate(chosen)}  # includes the masks that layers share
    second = {kind: cuts[2 + 2 * i] for i, kind in enumerate(chosen)}
    layers = [first[kind] if kind == layer else second[kind] for layer, kind in enumerate(kinds)]
    if not loss:
        return DryStep(cuts[0], layers)
    backward = {kind: cuts[2 * count - 2 * i] for i, kind in enumerate(chosen)}
    return DryStep(cuts[0], layers, cuts[count + 1], [backward[kind] for kind in reversed(kinds[1:])], cuts[-1])
