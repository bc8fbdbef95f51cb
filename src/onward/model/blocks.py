"""Other blocks than the pre-norm block: how attention and feed-forward are added to the residual stream.

Shapes: x (B, T, D) -> (B, T, D).
"""

from torch import Tensor, nn

from onward.model.context import AttentionContext
from onward.model.layers import NewNorm, PreNormModule


class ScaledPreNormModule(PreNormModule):
    """A pre-norm block with scaled branches: x + scale * attn(norm(x)), then x + scale * mlp(norm(x))."""

    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: NewNorm, scale: float) -> None:
        super().__init__(attn, mlp, norm)
        self.scale = scale

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = x + self.attn(self.attn_norm(x), context) * self.scale
        return x + self.mlp(self.mlp_norm(x)) * self.scale


class PostNormModule(PreNormModule):
    """A post-norm block: norm(x + attn(x)), then norm(x + mlp(x))."""

    mid = "mlp", "mlp_norm"

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = self.attn_norm(x + self.attn(x, context))
        return self.mlp_norm(x + self.mlp(x))


class SandwichModule(PreNormModule):
    """A block with norms before and after its branches: x + norm(attn(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: NewNorm) -> None:
        super().__init__(attn, mlp, norm)
        self.attn_post_norm = norm()
        self.mlp_post_norm = norm()

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = x + self.attn_post_norm(self.attn(self.attn_norm(x), context))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


class BranchNormModule(SandwichModule):
    """A block with norms after its branches only: x + norm(attn(x)), then x + norm(mlp(x))."""

    mid = "mlp", ""

    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: NewNorm) -> None:
        super().__init__(attn, mlp, norm)
        del self.attn_norm, self.mlp_norm

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = x + self.attn_post_norm(self.attn(x, context))
        return x + self.mlp_post_norm(self.mlp(x))


class ParallelModule(PreNormModule):
    """A parallel block: x + attn(norm(x)) + mlp(norm(x)), with two norms."""

    mid = None

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return x + self.attn(self.attn_norm(x), context) + self.mlp(self.mlp_norm(x))


class SharedNormModule(PreNormModule):
    """A parallel block with one norm: x + attn(y) + mlp(y) where y = norm(x)."""

    mid = None

    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: NewNorm) -> None:
        super().__init__(attn, mlp, norm)
        del self.mlp_norm

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        y = self.attn_norm(x)
        return x + self.attn(y, context) + self.mlp(y)


class AttentionOnlyModule(nn.Module):
    """A block without a feed-forward: x + attn(norm(x))."""

    def __init__(self, attn: nn.Module, norm: NewNorm) -> None:
        super().__init__()
        self.attn_norm = norm()
        self.attn = attn

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return x + self.attn(self.attn_norm(x), context)
