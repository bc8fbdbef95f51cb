"""The collectives of a training step on a mesh, with the bytes of each, as `parallel/` issues them.

An all-reduce of x bytes over n devices in a ring sends 2 (n - 1) / n x from each device; a gather or a scatter sends
half as much.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onward.checkpoint.source import SizeLimit
from onward.config.decoder import AttentionOnly, DecoderConfig, Experts, SelfAttention, at
from onward.config.mesh import Mesh, divides_tokens, divides_vocabulary
from onward.config.optimizers import MATRIX_OPTIMIZERS
from onward.config.routing import SigmoidRouting
from onward.model.decoder import Decoder
from onward.model.divided import rows_at_once
from onward.parallel.pipeline import FIRST
from onward.planning.device_memory import narrowed
from onward.planning.divided_parameters import ParameterGroup, groups, matrices_by_shape, of_stage
from onward.planning.dry import Shortened, computing_in, kinds_of_layers, reduced
from onward.planning.memory import AUTOCAST
from onward.planning.parameters import kept

SUM, GATHER, SCATTER, SEND, BROADCAST = "all-reduce", "all-gather", "reduce-scatter", "send", "broadcast"


@dataclass(frozen=True)
class Collective:
    """The communication of one kind and for one purpose in a training step, as seen from one device."""

    axis: str  # mesh axis along which the devices communicate; "": all devices; "stage": the devices of a stage
    kind: str
    purpose: str
    devices: int  # number of devices that take part
    calls: int
    bytes: int  # bytes of the whole tensors: each sum, all parts of a gather, all inputs of a scatter

    @property
    def sent(self) -> float:
        """Bytes that one device sends in all calls, by the ring algorithm."""
        if self.kind == SEND:
            return self.bytes
        return (2 if self.kind == SUM else 1) * (self.devices - 1) / self.devices * self.bytes


def collectives(
    config: DecoderConfig,
    mesh: Mesh,
    rows: int,
    length: int,
    *,
    precision: str = "bf16",
    optimizer: str = "adamw",
    recompute: bool = False,
    stage: int | None = None,
) -> list[Collective]:
    """The communication of a training step in which each device trains on a batch of `rows` windows (in a pipeline, on
    as many batches as there are stages), by default in the stage that sends most. DDP sums gradients in buckets, which
    count as one call."""
    if stage is None:
        options: dict[str, Any] = {"precision": precision, "optimizer": optimizer, "recompute": recompute}
        stages = (collectives(config, mesh, rows, length, **options, stage=i) for i in range(mesh.pipeline))
        return max(stages, key=lambda calls: sum(one.sent for one in calls))
    mesh.check_length(length)
    param_groups, part, own = groups(config, mesh, stage), of_stage(config, mesh, stage), length // mesh.context
    calls = [*of_shards(param_groups, mesh, precision)]
    if mesh.context > 1:
        calls += of_context(config, mesh, rows * length * low_width(precision), 1 + recompute)
    if mesh.tensor > 1:
        calls += of_tensor(part, param_groups, mesh, rows, own, precision, recompute, stage)
    calls = [replace(one, calls=mesh.pipeline * one.calls, bytes=mesh.pipeline * one.bytes) for one in calls]
    calls += of_replicas(param_groups, mesh)
    if mesh.pipeline > 1:
        calls += of_pipeline(config, param_groups, mesh, rows * length, stage)
    if optimizer in MATRIX_OPTIMIZERS:
        calls += of_muon(param_groups, mesh)
    calls += of_numbers(part, mesh)
    return [one for one in calls if one.devices > 1 and one.bytes]


def of_pipeline(
    config: DecoderConfig, param_groups: list[ParameterGroup], mesh: Mesh, tokens: int, stage: int
) -> Iterator[Collective]:
    # hidden states and their gradients, in fp32, for as many batches of `tokens` tokens as there are stages
    n = mesh.pipeline
    states, is_first, is_last = 4 * tokens * config.d_model, stage == 0, stage == n - 1
    make = partial(Collective, "pipeline", SEND)
    yield make("hidden states", n, n * (not is_last), n * states * (not is_last))
    yield make("gradients of hidden states", n, n * (not is_first), n * states * (not is_first))
    if config.tied and (is_first or is_last):
        yield make("the gradient of the tied weight", n, 1, 4 * param_groups[-1].pieces[0].local)
    yield Collective("pipeline", BROADCAST, "the loss", n, 1, 8)
    experts = sum(isinstance(part, Experts) for part in mlps(config))
    yield Collective("", SUM, "loads of experts", mesh.count, min(1, experts), 8 * experts)


def of_shards(param_groups: list[ParameterGroup], mesh: Mesh, precision: str) -> Iterator[Collective]:
    # blocks are gathered in the forward pass and again in the backward pass; gradients are summed in fp32
    make = partial(Collective, "shard")
    for group in param_groups:
        numbers, kind = group.count * group.total("gathered"), "blocks" if group.is_block else "embedding and head"
        times, width = (2, low_width(precision)) if group.is_block else (1, 4)
        yield make(GATHER, f"weights of {kind}", mesh.shards, times * group.count, times * width * numbers)
        sums = 4 * group.count * group.total("gathered", trained=True)
        yield make(SCATTER, f"gradients of {kind}", mesh.shards, group.count, sums)


def of_replicas(param_groups: list[ParameterGroup], mesh: Mesh) -> Iterator[Collective]:
    gradients = 4 * sum(group.count * group.total("local", trained=True) for group in param_groups)
    calls = sum(group.count for group in param_groups) if mesh.divides else 1
    yield Collective("replicate", SUM, "gradients", mesh.replicate, calls, gradients)


def of_context(config: DecoderConfig, mesh: Mesh, width: int, again: int) -> Iterator[Collective]:
    """The collectives of a context axis; `width`: bytes of one element in all tokens of a batch, `again`: forward
    passes in a step."""
    part = narrowed(config, mesh.tensor)
    entries = [math.prod(shape) for layer in kept(part) for shape in layer.entries.values()]
    make, n, total = partial(Collective, "context"), mesh.context, width * sum(entries)
    yield make(GATHER, "keys and values", n, again * len(entries), again * total)
    yield make(SCATTER, "gradients of keys and values", n, len(entries), total)
    experts = [one for one in mlps(config) if isinstance(one, Experts)]
    counts = [one.count for one in experts if not isinstance(one.router, SigmoidRouting)]
    yield make(SUM, "tokens of each expert, for the auxiliary loss", n, min(1, len(counts)), 8 * sum(counts))


def of_tensor(
    config: DecoderConfig,
    param_groups: list[ParameterGroup],
    mesh: Mesh,
    rows: int,
    length: int,
    precision: str,
    recompute: bool,
    stage: int,
) -> Iterator[Collective]:
    make, n = partial(Collective, "tensor", SUM), mesh.tensor
    layers, ends = branches_of(config, rows, length, precision, embeds=stage == 0)
    divided = divides_tokens(length, n)  # else each has all tokens: padding would change a router's statistics
    yield from of_branches(layers, ends, n, divided=divided, recompute=recompute)
    width = low_width(precision) if mesh.summed > 1 else 4
    summed = [
        (group.count, piece.size)
        for group in param_groups
        for piece in group.pieces
        if (piece.summed or (divided and piece.stream)) and piece.trained
    ]
    total = width * sum(count * size for count, size in summed)
    yield make("gradients of parameters that are not divided", n, sum(count for count, _ in summed), total)
    yield from of_norms(config, mesh, rows * length * low_width(precision), 1 + recompute)
    if divides_vocabulary(config, n):
        tokens = rows * length
        chunks = -(-tokens // rows_at_once(config.vocab_size // n))
        chunks = -(-tokens // -(-tokens // chunks))  # the number that torch.chunk returns
        if stage == 0:
            yield make("embeddings", n, 1, ends.embedded)
        if stage == mesh.pipeline - 1:
            yield make("maxima, denominators and targets of the softmax", n, 3 * chunks, 3 * 4 * tokens)
            yield make("gradients of the inputs of the head", n, chunks, ends.before_head)


def of_branches(
    layers: list[BranchSizes], ends: EndSizes, n: int, *, divided: bool, recompute: bool
) -> Iterator[Collective]:
    """Sums of the branches' outputs and of the gradients of their inputs or, if the tokens between branches are
    `divided`, gathers and scatters of as many bytes."""
    inputs, outputs = [size for one in layers for size in one.inputs], [size for one in layers for size in one.outputs]
    again = [size for one in layers for size in one.outputs[: -1 if one.ends_early else None]] if recompute else []
    make = partial(Collective, "tensor")
    kind = SCATTER if divided else SUM
    yield make(kind, "outputs of attention and feed-forward", n, len(outputs + again), sum(outputs + again))
    yield make(kind, "gradients of their inputs", n, len(inputs), sum(inputs))
    if divided:
        times = 1 + recompute
        yield make(GATHER, "inputs of attention and feed-forward", n, times * len(inputs), times * sum(inputs))
        yield make(GATHER, "gradients of their outputs", n, len(outputs), sum(outputs))
        yield make(GATHER, "hidden states, and the gradients of embeddings", n, 2, ends.first + ends.last)


def of_norms(config: DecoderConfig, mesh: Mesh, width: int, again: int) -> Iterator[Collective]:
    # norms over all heads see gathered queries and keys
    n, calls, numbers = mesh.tensor, 0, 0
    for layer in range(config.n_layers):
        part = at(config.attention, layer)
        if isinstance(part, SelfAttention) and part.qk_norm in ("width", "heads"):
            calls += 2
            heads = part.heads(config)
            numbers += heads.d_head * (heads.n_heads + max(n, heads.n_kv_heads))
    yield Collective("tensor", GATHER, "queries and keys, for their norms", n, again * calls, again * width * numbers)
    yield Collective("tensor", SUM, "gradients of queries and keys", n, calls, width * numbers)


@dataclass
class EndSizes:
    """Bytes of the embeddings, of the first block's input, of the last block's output, and of the head's input."""

    embedded: int = 0
    first: int = 0
    last: int = 0
    before_head: int = 0


@dataclass
class BranchSizes:
    """Bytes of the outputs and inputs of one block's attention and feed-forward, in their order. `ends_early`: a
    recomputation stops before the last output, which no backward pass reads."""

    outputs: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    ends_early: bool = False

    def note(self, module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        """Forward hook of attention and feed-forward."""
        self.outputs.append(output.nbytes)
        self.inputs.append(given[0].nbytes)
        self.ends_early = True

    def note_other(self, *_: object) -> None:
        """Forward hook of a block's other modules."""
        self.ends_early = False


def branches_of(
    config: DecoderConfig, rows: int, length: int, precision: str, *, embeds: bool
) -> tuple[list[BranchSizes], EndSizes]:
    """The sizes in each layer's branches, and before and after the blocks, in a dry run of two blocks of each kind.
    Unless the decoder `embeds` tokens, it receives hidden states in fp32, as a later stage does."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kinds = kinds_of_layers(config)
    chosen = [layer for layer in sorted({*kinds}) for _ in range(2)]
    noted, ends = [BranchSizes() for _ in chosen], EndSizes()

    def note_ends(block: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        ends.first, ends.last = ends.first or given[0].nbytes, output.nbytes

    with FakeTensorMode(), SizeLimit(1 << 62), Shortened(), torch.no_grad(), computing_in(AUTOCAST[precision]):
        model = Decoder(reduced(config, chosen))
        for branches, block in zip(noted, model.blocks):
            for name, child in block.named_children():
                child.register_forward_hook(branches.note if name in ("attn", "mlp") else branches.note_other)
            block.register_forward_hook(note_ends)
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        embedded, given = model.embed(tokens), tokens
        if not embeds:
            given = torch.zeros(rows, length, config.d_model)
            for name in FIRST:
                setattr(model, name, nn.Identity())
        before_head = model.embed_out(model.hidden_of_checked(given, None, None))
    layers = [noted[chosen.index(kind) + (kind != layer)] for layer, kind in enumerate(kinds)]
    return layers, replace(ends, embedded=embedded.nbytes, before_head=before_head.nbytes)


def of_muon(param_groups: list[ParameterGroup], mesh: Mesh) -> Iterator[Collective]:
    # in bf16: parts of each matrix's update, and orthogonalized matrices, each computed by one device
    parts, calls, n = Counter[str](), Counter[str](), mesh.stage
    for group in param_groups:
        for piece in group.pieces if group.is_block else ():
            if piece.trained and piece.matrix:
                parts["shard"] += group.count * piece.gathered
                calls["shard"] += group.count
                if piece.shape != piece.full_shape:
                    parts["tensor"] += group.count * piece.full_size
                    calls["tensor"] += group.count
    for axis in "shard", "tensor":
        devices = {"shard": mesh.shards, "tensor": mesh.tensor}[axis]
        yield Collective(axis, GATHER, "updates of matrices", devices, calls[axis], 2 * parts[axis])
    turns = {shape: -(-number // n) for shape, number in matrices_by_shape(param_groups).items()}
    made = sum(turn * n * math.prod(shape) for shape, turn in turns.items())
    yield Collective(stage_axis(mesh), GATHER, "orthogonalized matrices", n, sum(turns.values()), 2 * made)


def stage_axis(mesh: Mesh) -> str:
    return "stage" if mesh.pipeline > 1 else ""


def of_numbers(config: DecoderConfig, mesh: Mesh) -> Iterator[Collective]:
    calls = 3 if mesh.divides else 2
    yield Collective("", SUM, "numbers of targets, loss, norm", mesh.count, calls, 8 * (calls + 1))
    counts = [part.count for part in mlps(config) if isinstance(part, Experts)]
    yield Collective(stage_axis(mesh), SUM, "tokens of each expert", mesh.stage, len(counts), 8 * sum(counts))


def mlps(config: DecoderConfig) -> list[object]:
    layers = range(config.n_layers)
    return [at(config.mlp, layer) for layer in layers if not isinstance(at(config.block, layer), AttentionOnly)]


def low_width(precision: str) -> int:
    """Bytes of a number in matrix products."""
    return 4 if precision == "fp32" else 2
