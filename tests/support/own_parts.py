"""Parts from outside the package, as a researcher may write them: looped depth, a token shift and a running mean."""

from dataclasses import dataclass

import torch
from torch import Tensor

import onward
from onward.model import AttentionContext, PreNormModule, build_branches, previous, scan


class Twice(PreNormModule):
    """Looped depth: each layer is applied twice."""

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return super().forward(super().forward(x, context), context)


class Shifted(PreNormModule):
    """A token shift before each branch, over different distances."""

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        y = self.attn_norm(x)
        x = x + self.attn(0.7 * y + 0.3 * previous(y, context), context)
        y = self.mlp_norm(x)
        return x + self.mlp(y - 0.5 * previous(y, context, 3))


class Means(PreNormModule):
    """Adds the mean of the tokens so far, computed by a scan, to the input of attention."""

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        y = self.attn_norm(x)
        vectors = torch.cat([y, y.new_ones(*y.shape[:2], 1)], -1)

        def step(sums: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
            sums = sums + vector
            return sums, sums[:, :-1] / sums[:, -1:]

        means = scan(context, step, vectors.new_zeros(len(x), vectors.size(-1)), vectors)
        x = x + self.attn(y + means, context)
        return x + self.mlp(self.mlp_norm(x))


class Own(onward.Block, kind=""):
    """A block whose module is the class attribute `module`."""

    module: type[PreNormModule]

    def build(self, config: onward.DecoderConfig, layer: int) -> PreNormModule:
        return self.module(*build_branches(config, layer))


@dataclass(frozen=True)
class TwiceBlock(Own, kind="twice"):
    module = Twice


@dataclass(frozen=True)
class ShiftedBlock(Own, kind="shifted"):
    module = Shifted


@dataclass(frozen=True)
class MeansBlock(Own, kind="means"):
    module = Means
