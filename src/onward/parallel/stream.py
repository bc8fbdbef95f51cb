"""The residual stream of a decoder on a tensor axis. Between the branches, each process has a part of the tokens, so
that norms and sums are computed once and their activations are divided (Korthikanti et al. 2022, Reducing Activation
Recomputation, section 4.2.2).

A branch (the attention or the feed-forward of a block) receives all tokens and returns the tokens of this process. If
the processes do not divide the tokens of a call, each process has all tokens.

Shapes: B batch, T tokens, D d_model, n processes.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.utils.hooks import RemovableHandle

from onward.config.mesh import divides_tokens
from onward.model.attachments import attach
from onward.model.context import AttentionContext
from onward.model.decoder import Decoder
from onward.parallel.functions import Copy, Gather, Join, Own, Scatter, Sum


class Stream:
    """The residual stream of a decoder whose layers are divided over the n processes of a mesh with one axis. Between
    the branches (attention and feed-forward), each process has only T / n of the T tokens (sequence parallelism).
    `divided` says whether the tokens are divided in the current block."""

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        self.mesh, self.group, self.divided = mesh, mesh.get_group(), False
        self.attachment = attach(model, "tensor", divided_layers(mesh.size()))
        for block in model.blocks:
            self.attachment.wrap(block, "forward", partial(self.run, block))
        changed: Any = model
        changed.stream, self.hooks = self, list[RemovableHandle]()
        self.between(model.blocks[0], model.blocks[-1])

    def between(self, first: nn.Module, last: nn.Module) -> None:
        """Divide the tokens in the blocks from `first` to `last`, such as those of a pipeline stage, and in no
        others."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = [self.attachment.before(first, self.begin), self.attachment.after(last, self.end)]

    def begin(self, block: nn.Module, inputs: tuple[Tensor, AttentionContext]) -> tuple[Tensor, AttentionContext]:
        x, context = inputs
        return (Own.apply(x, self.mesh) if divides_tokens(x.size(1), self.mesh.size()) else x), context

    def run(self, block: nn.Module, plain: Any, x: Tensor, context: AttentionContext) -> Tensor:
        """Compute a block with `divided` set, also when activations are recomputed."""
        self.divided = is_part(x, context)
        try:
            return plain(x, context)  # type: ignore[no-any-return]
        finally:  # checkpointing may end a recomputation before the hooks that restore parameters run
            for module in block.modules():
                for name in module._parameters:
                    module.__dict__.pop(name, None)

    def end(self, block: nn.Module, inputs: tuple[Tensor, AttentionContext], y: Tensor) -> Tensor:
        return Join.apply(y, 1, self.mesh) if is_part(*inputs) else y  # type: ignore[no-any-return]

    def enter(self, x: Tensor) -> Tensor:
        return Gather.apply(x, self.mesh) if self.divided else Copy.apply(x, self.group)  # type: ignore[no-any-return]

    def leave(self, y: Tensor) -> Tensor:
        """The sum of a branch's output over the processes, for the tokens that this process keeps between branches."""
        return Scatter.apply(y, self.mesh) if self.divided else Sum.apply(y, self.group)  # type: ignore[no-any-return]

    def weight(self, parameter: Tensor) -> Tensor:
        """A parameter used between branches, such as a norm's weight: if tokens are divided, the backward pass sums its
        gradient."""
        return Copy.apply(parameter, self.group) if self.divided else parameter  # type: ignore[no-any-return]


def divided_layers(count: int) -> str:
    return f"{count} processes divide the heads and units of each layer"


def is_part(x: Tensor, context: AttentionContext) -> bool:
    return x.size(1) < context.num_tokens
