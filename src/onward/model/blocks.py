"""Blocks other than the plain pre-norm block: how attention and feed-forward are added to the residual stream.

Shapes: x (B, T, D) -> (B, T, D).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onward.config import decoder as parts
from onward.config.decoder import DecoderConfig
from onward.model import activations
from onward.model.activations import Declarations
from onward.model.context import AttentionContext
from onward.model.layers import NewNorm, PreNormModule

Weights = tuple[tuple[float, float], tuple[float, float]]  # (stream, branch) for each of a block's two additions
EQUAL: Weights = ((1.0, 1.0), (1.0, 1.0))


@dataclass(frozen=True)
class ScaledAddition:
    """x + scale * y, where y is the output of a branch; the product is rounded before the addition."""

    scale: float

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y * self.scale


@dataclass(frozen=True)
class WeightedAddition(ScaledAddition):
    """stream * x + scale * y, where y is the output of a branch."""

    stream: float

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return x * self.stream + y * self.scale


def addition(stream: float, branch: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function (x, y) -> stream * x + branch * y of the residual stream x and a branch's output y."""
    if stream != 1.0:
        return WeightedAddition(branch, stream)
    return ScaledAddition(branch) if branch != 1.0 else torch.add


class WeightedPreNormModule(PreNormModule):
    """A pre-norm block whose additions have weights: stream * x + branch * attn(norm(x)), then the same with mlp. Base
    class of the other blocks with two branches."""

    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: NewNorm, weights: Weights = EQUAL) -> None:
        super().__init__(attn, mlp, norm)
        self.weights = weights
        self.attn_add, self.mlp_add = (addition(*pair) for pair in weights)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = self.attn_add(x, self.attn(self.attn_norm(x), context))
        return self.mlp_add(x, self.mlp(self.mlp_norm(x)))

    def activations(self) -> Declarations:
        return activations.block(self, self.mid, kept=self.weights[1][0])


class PostNormModule(WeightedPreNormModule):
    """A post-norm block: norm(x + attn(x)), then norm(x + mlp(x))."""

    mid = "mlp", "mlp_norm"

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = self.attn_norm(self.attn_add(x, self.attn(x, context)))
        return self.mlp_norm(self.mlp_add(x, self.mlp(x)))


class SandwichModule(WeightedPreNormModule):
    """A block with norms before and after its branches: x + norm(attn(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: NewNorm, weights: Weights = EQUAL) -> None:
        super().__init__(attn, mlp, norm, weights)
        self.attn_post_norm = norm()
        self.mlp_post_norm = norm()

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = self.attn_add(x, self.attn_post_norm(self.attn(self.attn_norm(x), context)))
        return self.mlp_add(x, self.mlp_post_norm(self.mlp(self.mlp_norm(x))))


class BranchNormModule(SandwichModule):
    """A block with norms after its branches only: x + norm(attn(x)), then x + norm(mlp(x))."""

    mid = "mlp", ""

    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: NewNorm, weights: Weights = EQUAL) -> None:
        super().__init__(attn, mlp, norm, weights)
        del self.attn_norm, self.mlp_norm

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = self.attn_add(x, self.attn_post_norm(self.attn(x, context)))
        return self.mlp_add(x, self.mlp_post_norm(self.mlp(x)))


class ParallelModule(WeightedPreNormModule):
    """A parallel block: x + attn(norm(x)) + mlp(norm(x)), with two norms."""

    mid = None

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return self.mlp_add(self.attn_add(x, self.attn(self.attn_norm(x), context)), self.mlp(self.mlp_norm(x)))


class SharedNormModule(WeightedPreNormModule):
    """A parallel block with one norm: x + attn(y) + mlp(y) where y = norm(x)."""

    mid = None

    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: NewNorm, weights: Weights = EQUAL) -> None:
        super().__init__(attn, mlp, norm, weights)
        del self.mlp_norm

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        y = self.attn_norm(x)
        return self.mlp_add(self.attn_add(x, self.attn(y, context)), self.mlp(y))


class AttentionOnlyModule(nn.Module):
    """A block without a feed-forward: x + attn(norm(x))."""

    def __init__(self, attn: nn.Module, norm: NewNorm, weights: Weights = EQUAL) -> None:
        super().__init__()
        self.attn_norm = norm()
        self.attn = attn
        self.weights, self.attn_add = weights, addition(*weights[0])

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return self.attn_add(x, self.attn(self.attn_norm(x), context))


class FeedForwardOnlyModule(nn.Module):
    """A block without attention: x + mlp(norm(x))."""

    def __init__(self, mlp: nn.Module, norm: NewNorm, weights: Weights = EQUAL) -> None:
        super().__init__()
        self.mlp_norm = norm()
        self.mlp = mlp
        self.weights, self.mlp_add = weights, addition(*weights[1])

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return self.mlp_add(x, self.mlp(self.mlp_norm(x)))


MODULES: dict[type[parts.ScaledBlock], type[WeightedPreNormModule]] = {
    parts.PreNorm: WeightedPreNormModule,
    parts.PostNorm: PostNormModule,
    parts.Sandwich: SandwichModule,
    parts.BranchNorm: BranchNormModule,
    parts.Parallel: ParallelModule,
    parts.SharedNorm: SharedNormModule,
}


def module_of(part: parts.ScaledBlock) -> type[WeightedPreNormModule] | None:
    """Return the module class of a block with two branches; None for a part without such a class."""
    return next((MODULES[kind] for kind in type(part).__mro__ if kind in MODULES), None)


def weights_of(part: parts.ScaledBlock, config: DecoderConfig, layer: int) -> Weights:
    """Return the weights of a block's additions in a layer: those of `part.weights`, or 1 and `residual_scale`."""
    if part.weights is not None:
        return part.weights(config, layer)  # type: ignore[no-any-return]
    return ((1.0, part.residual_scale),) * 2
