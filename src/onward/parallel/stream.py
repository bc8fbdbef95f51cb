"""The residual stream of a decoder that a tensor axis divides: between the branches each process has a part of the
tokens, so that norms and sums are computed once and their activations are divided (Korthikanti et al. 2022, Reducing
Activation Recomputation, section 4.2.2).

A branch (the attention or the feed-forward of a block) receives all tokens and returns those of this process. If the
processes do not divide the tokens of a call, each has all of them.

Shapes: B batch, T tokens, D d_model, n processes.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import DeviceMesh

from onward.config.mesh import divides_tokens
from onward.model.context import AttentionContext
from onward.model.decoder import Decoder
from onward.parallel.functions import Copy, Gather, Join, Own, Scatter, Sum


class Stream:
    """The residual stream of a model whose layers are divided among the processes of a mesh with one axis. It changes
    the blocks in place. `divided` says whether each process has only a part of the tokens, in the block that runs."""

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        self.mesh, self.group, self.divided = mesh, mesh.get_group(), False
        for block in model.blocks:
            block.forward = partial(self.run, block.forward)  # type: ignore[method-assign]
        model.blocks[0].register_forward_pre_hook(self.begin)
        model.blocks[-1].register_forward_hook(self.end)

    def begin(self, block: nn.Module, inputs: tuple[Tensor, AttentionContext]) -> tuple[Tensor, AttentionContext]:
        """Keep this process's tokens (B, T / n, D) of the inputs of the first block, if n divides T; a forward
        pre-hook."""
        x, context = inputs
        return (Own.apply(x, self.mesh) if divides_tokens(x.size(1), self.mesh.size()) else x), context

    def run(self, forward: Any, x: Tensor, context: AttentionContext) -> Tensor:
        """Run the `forward` of a block, also when its activations are recomputed."""
        self.divided = is_part(x, context)
        return forward(x, context)  # type: ignore[no-any-return]

    def end(self, block: nn.Module, inputs: tuple[Tensor, AttentionContext], y: Tensor) -> Tensor:
        """Return all tokens (B, T, D) of the output of the last block; a forward hook."""
        return Join.apply(y, 1, self.mesh) if is_part(*inputs) else y  # type: ignore[no-any-return]

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of a branch, with all tokens."""
        return Gather.apply(x, self.mesh) if self.divided else Copy.apply(x, self.group)  # type: ignore[no-any-return]

    def leave(self, y: Tensor) -> Tensor:
        """Return the output of a branch, summed over the processes, for the tokens of the stream."""
        return Scatter.apply(y, self.mesh) if self.divided else Sum.apply(y, self.group)  # type: ignore[no-any-return]

    def weight(self, parameter: Tensor) -> Tensor:
        """Return a parameter of the stream, such as a norm's weight, whose gradient is a part of a sum if each process
        has a part of the tokens."""
        return Copy.apply(parameter, self.group) if self.divided else parameter  # type: ignore[no-any-return]


def is_part(x: Tensor, context: AttentionContext) -> bool:
    """Return whether x (B, T / n, D) has only a part of the tokens of a call."""
    return x.size(1) < context.mask.query_positions.size(1)
