"""The memory of a pipeline stage in a training step, from a dry step of a decoder with the stage's layers."""

from dataclasses import replace

from onward.config.decoder import DecoderConfig
from onward.config.mesh import Mesh
from onward.parallel.pipeline import holds
from onward.planning.divided_parameters import ParameterGroup
from onward.planning.dry import DryStep, Segment
from onward.planning.parameters import kinds, modules, size


def of_one_batch(dry: DryStep, part: DecoderConfig, mesh: Mesh, stage: int, states: int) -> DryStep:
    """The memory of a stage's first batch: only the first stage embeds, others receive `states` bytes of hidden states;
    only the last has logits and a loss."""
    (rest, _), embedding, head = modules(part)[-1], outside(part, 0), outside(part, 1)
    more = embedding * (stage == 0) - (4 * size(rest) - head)  # gradients; the head allocates a tied weight's
    dry = replace(dry, end=Segment(dry.end.kept + more, dry.end.peak + more))
    if stage:
        dry = replace(dry, embedding=Segment(dry.embedding.kept - states, dry.embedding.peak - states))
    return dry if stage == mesh.pipeline - 1 else replace(dry, head=Segment(0, 0))


def of_later_batch(dry: DryStep, part: DecoderConfig, mesh: Mesh, stage: int, shards: list[ParameterGroup]) -> DryStep:
    """The memory of a later batch, which adds its gradients to those of the first and frees them. `shards`: parameters
    that FSDP divides, whose gradients outside of blocks are reduced at the end of the step."""
    if shards:
        *blocks, rest = [4 * group.total("local", trained=True) for group in shards]
        head, others = 0, rest
    else:
        blocks = [4 * size(block) for block, _ in modules(part)[:-1]]
        head, others = outside(part, 1) * (stage == mesh.pipeline - 1), outside(part, 0) * (stage == 0)
    made = {layer: bytes_made for layers, bytes_made in zip(kinds(part), blocks) for layer in layers}
    return replace(
        dry,
        head=freed(dry.head, head),
        backward=[freed(segment, made[layer]) for segment, layer in zip(dry.backward, reversed(range(part.n_layers)))],
        end=freed(dry.end, made[0] + others),
    )


def outside(part: DecoderConfig, stage: int) -> int:
    """Bytes of the gradients outside of blocks in the first (0) or last (1) stage."""
    rest, _ = modules(part)[-1]
    named = rest.named_parameters()
    return 4 * sum(p.numel() for name, p in named if p.requires_grad and holds(name, part, stage, 2))


def freed(segment: Segment, size: int) -> Segment:
    return Segment(segment.kept - size, segment.peak)
