"""The parameters that one process of a mesh holds, gathers and reduces; see `parallel/`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress

from torch import nn

from onward.config.decoder import DecoderConfig
from onward.config.mesh import Mesh, layers_of_stage
from onward.model.decoder import Decoder
from onward.parallel.parallelize import shard_dim
from onward.parallel.pipeline import holds
from onward.parallel.tensor import Rule, rules_of, rules_of_vocabulary
from onward.planning.dry import reduced
from onward.planning.parameters import modules


@dataclass(frozen=True)
class Piece:
    """A parameter as the mesh divides it: each process of the tensor axis has a part, and FSDP shards the part."""

    full_shape: tuple[int, ...]  # shape of the parameter
    shape: tuple[int, ...]  # shape of one process's part in tensor parallelism, over all its shards
    shards: int
    trained: bool
    matrix: bool  # whether Muon trains the parameter, if it is in a block
    summed: bool = False  # whether each process of the tensor axis computes a part of the gradient
    stream: bool = False  # the same as `summed`, if the tensor axis divides the tokens, as for a block's norm

    @property
    def full_size(self) -> int:
        return math.prod(self.full_shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def local(self) -> int:
        """The number of elements in the first shard, the largest."""
        dim = shard_dim(self.shape, self.shards)
        return self.size // max(1, self.shape[dim]) * -(-self.shape[dim] // self.shards)

    @property
    def gathered(self) -> int:
        return self.local * self.shards


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters that FSDP gathers together: those of one block, or those outside of blocks."""

    pieces: tuple[Piece, ...]
    count: int  # number of blocks of this kind; 1 outside of blocks
    is_block: bool

    def total(self, attribute: str, trained: bool = False) -> int:
        """Sum an attribute of Piece over the (trained) parameters of one module."""
        return sum(getattr(piece, attribute) for piece in self.pieces if piece.trained or not trained)

    @property
    def matrices(self) -> int:
        """The number of elements, per device, of the matrices in one block that are trained with Muon."""
        return sum(piece.local for piece in self.pieces if self.is_block and piece.trained and piece.matrix)


def of_stage(config: DecoderConfig, mesh: Mesh, stage: int) -> DecoderConfig:
    if mesh.pipeline == 1:
        return config
    return reduced(config, [*layers_of_stage(config.n_layers, mesh.pipeline, stage)])


def groups(config: DecoderConfig, mesh: Mesh, stage: int = 0) -> list[ParameterGroup]:
    """Parameters of a pipeline stage: one group per kind of block, then embedding, final norm and head."""
    *blocks, (rest, _) = modules(of_stage(config, mesh, stage))
    # a tied weight is on the first and the last stage, which exchange its gradient
    held = [holds(name, config, stage, mesh.pipeline) for name, _ in rest.named_parameters()]
    return [
        *(ParameterGroup(tuple(pieces_of(block, mesh)), count, True) for block, count in blocks),
        ParameterGroup(tuple(compress(pieces_of(rest, mesh), held)), 1, False),
    ]


def pieces_of(module: nn.Module, mesh: Mesh) -> Iterator[Piece]:
    """Pieces of a block, or of a decoder without blocks; raises a UserError if the tensor axis cannot divide it."""
    rules: dict[int, Rule | None] = {}
    for kind in ("attn", "mlp") if mesh.tensor > 1 else ():
        if branch := module._modules.get(kind):
            branch_rules = rules_of(kind, branch, mesh.tensor)
            rules |= {id(owner._parameters[name]): rule for (owner, name), rule in branch_rules.items()}
    if mesh.tensor > 1 and isinstance(module, Decoder):
        vocabulary_rules = rules_of_vocabulary(module, mesh.tensor)
        rules |= {id(owner._parameters[name]): rule for (owner, name), rule in vocabulary_rules.items()}
    for name, parameter in module.named_parameters():
        full_shape, shape, rule = tuple(parameter.shape), list(parameter.shape), rules.get(id(parameter))
        if rule and rule.split is not None:
            shape[rule.split] //= mesh.tensor
        matrix = parameter.ndim >= 2 and not name.endswith("bias")
        summed = rule is not None and rule.split is None
        stream = mesh.tensor > 1 and rule is None and not isinstance(module, Decoder)
        yield Piece(full_shape, tuple(shape), mesh.shards, parameter.requires_grad, matrix, summed, stream)


def matrices_by_shape(param_groups: list[ParameterGroup]) -> Counter[tuple[int, ...]]:
    """Count the matrices that Muon trains by shape, (O, I) or (X, O, I); a transposed shape counts as the same."""
    alike = Counter[tuple[int, ...]]()
    for group in param_groups:
        for piece in group.pieces if group.is_block else ():
            if piece.trained and piece.matrix:
                *stack, a, b = piece.full_shape
                alike[(*stack, *sorted((a, b)))] += group.count
    return alike
