"""The memory of one device when a mesh of devices trains a decoder. See `config/mesh.py` for the axes of a mesh,
`parallel/` for training, and `traffic.py` for communication."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from onward.config.decoder import Attention, DecoderConfig, SelfAttention, at
from onward.config.mesh import Mesh, divided_heads, divides_tokens, divides_vocabulary
from onward.config.optimizers import MATRIX_OPTIMIZERS
from onward.data.windows import Batch
from onward.generation.cache.manager import CHUNK
from onward.planning.divided_parameters import ParameterGroup, groups, matrices_by_shape, of_stage
from onward.planning.dry import DryStep, Segment, dry_step
from onward.planning.memory import (
    AUTOCAST,
    HOLES,
    ORTHOGONAL,
    TrainingMemory,
    cache_bytes,
    optimizer_bytes,
    training_memory,
    weight_bytes,
)
from onward.planning.parameters import kinds, modules, parameters, size
from onward.planning.stages import of_later_batch, of_one_batch

LOOKUP = 9  # bytes per token that a divided embedding keeps: its row index, and whether another process has the row


def narrowed(config: DecoderConfig, tensor: int) -> DecoderConfig:
    """The decoder with the heads, units and vocabulary rows of one of `tensor` processes, so that its activations have
    the sizes of that process. Each process has at least one key/value head, if need be a copy."""
    vocab_size = config.vocab_size // tensor if divides_vocabulary(config, tensor) else config.vocab_size
    return replace(divided_heads(config, tensor), vocab_size=vocab_size)


def device_memory(
    config: DecoderConfig,
    mesh: Mesh,
    rows: int,
    length: int,
    loss: Callable[[Any, Batch], Any],
    *,
    precision: str = "bf16",
    optimizer: str = "adamw",
    recompute: bool = False,
    holes: float = HOLES,
    stage: int | None = None,
) -> TrainingMemory:
    """Memory of training on a device of a mesh, by default the one that needs the most; a step has as many batches of
    `rows` windows as there are stages. The other arguments are those of `training_memory`. Raises a UserError for a
    decoder that the mesh cannot divide."""
    options: dict[str, Any] = {"precision": precision, "optimizer": optimizer, "recompute": recompute, "holes": holes}
    if mesh.count == 1:
        return training_memory(config, rows, length, loss, **options)
    mesh.check_decoder(config)
    mesh.check_length(length)
    if stage is None:
        stages = (device_memory(config, mesh, rows, length, loss, **options, stage=i) for i in range(mesh.pipeline))
        return max(stages, key=lambda memory: memory.peak)
    param_groups, part = groups(config, mesh, stage), narrowed(of_stage(config, mesh, stage), mesh.tensor)
    sharded, own = mesh.divides and mesh.summed > 1, length // mesh.context
    local, trained = (sum(group.count * group.total("local", only) for group in param_groups) for only in (False, True))
    matrices = sum(group.count * group.matrices for group in param_groups)
    low = sharded and precision == "bf16"
    width = 2 if low else 4
    dry = dry_step(
        part,
        rows,
        length,
        loss=loss,
        autocast=AUTOCAST[precision],
        recompute=recompute,
        low_blocks=low,
        keep_casts=mesh.tensor == 1,
        parts=mesh.tensor if divides_tokens(own, mesh.tensor) else 1,
        context=mesh.context,
    )
    if part.vocab_size < config.vocab_size:
        looked_up = LOOKUP * rows * own
        dry = replace(dry, embedding=Segment(dry.embedding.kept + looked_up, dry.embedding.peak + looked_up))
    if mesh.tensor > 1 and not recompute:
        dry = with_norms(dry, config, mesh.tensor, rows * own)
    if mesh.pipeline > 1:
        dry = of_one_batch(dry, part, mesh, stage, 4 * rows * length * config.d_model)
    activations, gathered = dry.forward.kept, 0
    if sharded:
        dry = with_gathers(dry, part, param_groups, width)
        gathered = (
            dry.forward.kept - activations + 2 * max(width * group.total("gathered") for group in param_groups[:-1])
        )
    if not mesh.divides:
        dry = with_buckets(dry, part)
    transient = dry.step.peak
    if mesh.pipeline > 1:
        states = 4 * rows * length * config.d_model
        received, sent = (mesh.pipeline * states * neighbor for neighbor in (stage > 0, stage < mesh.pipeline - 1))
        # after the forward pass of a recomputed batch, only the inputs of its blocks are kept, without cast weights
        held = states * (part.n_layers - (stage > 0)) if recompute else activations
        others = mesh.pipeline - stage - 1  # batches whose backward pass comes later
        transient += others * held
        later = of_later_batch(dry, part, mesh, stage, param_groups if sharded else []).step.peak
        transient = max(transient, 4 * trained + (others - (stage == 0)) * held + later)
        transient += 2 * received + sent
        activations += others * held + received + sent
    if optimizer in MATRIX_OPTIMIZERS:
        transient = max(transient, 4 * trained + 2 * matrices + orthogonalizing(param_groups, mesh.stage))
    state = 8 * trained - (4 * matrices if optimizer in MATRIX_OPTIMIZERS else 0)
    if ":" in optimizer:
        state = optimizer_bytes(config, optimizer) * trained // parameters(config)
    return TrainingMemory(
        4 * local, 4 * trained, state, activations, dry.loss.peak, transient, int(holes * transient), gathered
    )


def with_engine(memory: TrainingMemory, config: DecoderConfig, mesh: Mesh, rows: int, length: int) -> TrainingMemory:
    """Add the engine that samples `rows` completions of `length` tokens in each process."""
    # unsharded, since gathers while decoding would need the same number of forward passes in all processes
    weights = weight_bytes(config) if mesh.shard > 1 else 0
    chunk = min(CHUNK, config.context_length)
    cache = cache_bytes(config, rows, min(length, config.context_length), torch.float32, chunk=chunk)
    return replace(memory, engine=weights, cache=cache)


def with_norms(dry: DryStep, config: DecoderConfig, tensor: int, tokens: int) -> DryStep:
    """Add the queries and keys that norms over all heads gather and keep until the backward pass of their layer."""

    def of_layer(part: Attention) -> int:
        if not isinstance(part, SelfAttention) or part.qk_norm not in ("width", "heads"):
            return 0
        n_heads, n_kv_heads, d_head, _ = part.heads(config)
        heads = n_heads + n_kv_heads - n_heads // tensor - max(1, n_kv_heads // tensor)
        return tokens * heads * (8 * d_head + 4 * (part.qk_norm == "heads"))  # one statistic per head

    kept = [of_layer(at(config.attention, layer)) for layer in range(config.n_layers)]
    return replace(
        dry,
        blocks=[Segment(s.kept + more, s.peak + more) for s, more in zip(dry.blocks, kept)],
        backward=[Segment(s.kept - more, s.peak) for s, more in zip(dry.backward, reversed(kept[1:]))],
        end=Segment(dry.end.kept - kept[0], dry.end.peak),
    )


def orthogonalizing(param_groups: list[ParameterGroup], count: int) -> int:
    """Peak bytes while Muon orthogonalizes one shape: a process's own matrices, and a result of each process."""
    return max(
        ORTHOGONAL * -(-number // count) * math.prod(shape) + 2 * count * math.prod(shape)
        for shape, number in matrices_by_shape(param_groups).items()
    )


def with_buckets(dry: DryStep, config: DecoderConfig) -> DryStep:
    """Add the gradients that DDP allocates in buckets (joined tensors) at the beginning of the step."""
    made, total, order = (
        [4 * size(module) for module, _ in modules(config)],
        4 * parameters(config),
        kind_of_layers(config),
    )
    return replace(
        dry,
        embedding=Segment(dry.embedding.kept + total, dry.embedding.peak + total),
        backward=[Segment(s.kept - made[kind], s.peak) for s, kind in zip(dry.backward, reversed(order[1:]))],
        end=Segment(dry.end.kept - made[order[0]] - made[-1], dry.end.peak),
    )


def kind_of_layers(config: DecoderConfig) -> list[int]:
    """For each layer, the index of its block in `modules(config)`."""
    numbers = {layer: i for i, layers in enumerate(kinds(config)) for layer in layers}
    return [numbers[layer] for layer in range(config.n_layers)]


def with_gathers(dry: DryStep, part: DecoderConfig, param_groups: list[ParameterGroup], width: int) -> DryStep:
    """Add the weights that shards gather, and the gradients to reduce. Embedding, final norm and head are gathered in
    fp32 for the entire step, blocks two at a time (`width` bytes per element)."""
    *blocks, rest = param_groups
    order = kind_of_layers(part)
    weights = [width * group.total("gathered") for group in blocks]
    sums, shards = ([4 * group.total(name, trained=True) for group in param_groups] for name in ("gathered", "local"))
    made = [width * size(block) for block, _ in modules(part)[:-1]]
    gathered_rest = 4 * rest.total("gathered")

    def forward(segment: Segment, kind: int) -> Segment:
        return Segment(segment.kept, segment.peak + 2 * weights[kind])

    def backward(segment: Segment, kind: int) -> Segment:
        kept = segment.kept - made[kind] + shards[kind]
        return Segment(kept, max(segment.peak + 2 * weights[kind], kept + made[kind]) + sums[kind])

    end = backward(dry.end, order[0])
    last = end.kept - 4 * size(modules(part)[-1][0]) + shards[-1] - gathered_rest
    return DryStep(
        Segment(dry.embedding.kept + gathered_rest, dry.embedding.peak + 2 * gathered_rest),
        [*map(forward, dry.blocks, order)],
        Segment(dry.head.kept, dry.head.peak + weights[order[-1]]),
        [*map(backward, dry.backward, reversed(order[1:]))],
        Segment(last, max(end.peak, end.kept - gathered_rest + sums[-1] + shards[-1])),
    )
