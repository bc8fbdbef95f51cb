"""The modules of Gemma 3n: blocks with several residual streams, and a feed-forward with few active units.

Shapes: B batch, T tokens, D d_model, S streams, P width of a layer's inputs.
"""

from __future__ import annotations

from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.config.decoder import DecoderConfig, Gated
from onward.families._gemma4 import LayerInputsModule
from onward.model.activations import Activation, Declarations, Input
from onward.model.blocks import SandwichModule
from onward.model.context import AttentionContext
from onward.model.layers import GatedFeedForwardModule, Linear, NewNorm


class SparseFeedForwardModule(GatedFeedForwardModule):
    """A gated feed-forward in which about the fraction `sparsity` of the gate's units are 0. The threshold is the
    `sparsity` quantile of a normal distribution with the mean and the standard deviation of the token's units; it is
    subtracted from the units above it, and the units below it become 0."""

    def __init__(self, part: Gated, sparsity: float, config: DecoderConfig) -> None:
        super().__init__(config.d_model, part.width(config), part.act, part.bias, config.dropout)
        self.deviations = NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        cutoff = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, correction=0) * self.deviations
        y: Tensor = self.dropout(self.down(self.act(F.relu(gate - cutoff)) * self.up(x)))
        return y


class FoundInputsModule(LayerInputsModule):
    """A LayerInputsModule in which an id without embeddings has the embeddings of id 0."""

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        if tokens.is_floating_point():
            return super().forward(tokens, x)
        return super().forward(tokens.where(tokens < self.embed.num_embeddings, 0), x)


def rescaled(x: Tensor, size: Tensor) -> Tensor:
    """Return x (B, T, D), scaled to the root mean square `size` (B, T, 1)."""
    return x * size / x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()


def root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True).sqrt()


class SplitModule(nn.Module):
    """Map the embeddings x (B, T, D) to S streams, (B, T, S * D): x, and projections of x, scaled to the root mean
    square of x."""

    def __init__(self, width: int, streams: int) -> None:
        super().__init__()
        self.projections = nn.ModuleList(Linear(width, width, bias=False) for _ in range(streams - 1))

    def forward(self, x: Tensor) -> Tensor:
        size = root_mean_square(x)
        return torch.cat([x, *(rescaled(project(x), size) for project in self.projections)], -1)


class MergeModule(SplitModule):
    """Map S streams, (B, T, S * D), to their mean (B, T, D). All streams except the first are first projected, and
    scaled to the root mean square of the first."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = x.chunk(len(self.projections) + 1, -1)
        size = root_mean_square(first)
        streams = [first, *(rescaled(project(y), size) for project, y in zip(self.projections, others))]
        return torch.stack(streams).mean(0)


class AltUpModule(nn.Module):
    """Alternating updates (Baykal et al. 2023, arXiv:2301.13310): a layer computes one of S streams, `active`, and
    learned combinations, which depend on the token, predict and correct all of them."""

    def __init__(self, width: int, streams: int, active: int, norm: NewNorm) -> None:
        super().__init__()
        self.active = active
        self.router = Linear(width, streams, bias=False)
        self.router_norm = norm()
        self.predict = Linear(streams, streams * streams, bias=False)
        self.correct = Linear(streams, streams, bias=False)

    def route(self, x: Tensor) -> Tensor:
        return self.router(self.router_norm(x) * x.size(-1) ** -1.0).float().tanh().type_as(x)  # type: ignore[no-any-return]

    def predicted(self, x: Tensor) -> Tensor:
        """Return the predicted streams (B, T, S, D), the input of the layer, from the streams before the layer."""
        mix = self.predict(self.route(x[..., self.active, :])).unflatten(-1, (x.size(-2), -1))
        return x + mix @ x

    def corrected(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the streams (B, T, S, D) after the layer, from the predicted streams and the layer's output y (B, T,
        D)."""
        change = (y - x[..., self.active, :])[..., None, :]
        return x + change * (self.correct(self.route(y)) + 1)[..., None]


class AltUpBlockModule(SandwichModule):
    """A sandwich block on one of S residual streams, with a parallel learned low-rank map of its input (Laurel). To all
    streams but the first, it adds a projection of the tokens' vectors for this layer, `context.inputs` (B, T, P).

    The input x and the output have the shape (B, T, S * D); in the first block, `split` computes x from the embeddings,
    and in the last block, `merge` computes the mean of the streams."""

    mid = None

    def __init__(
        self,
        branches: tuple[nn.Module, nn.Module, NewNorm],
        config: DecoderConfig,
        streams: int,
        active: int,
        rank: int,
        d_input: int,
    ) -> None:
        super().__init__(*branches)
        mlp: Any = branches[1]
        norm = branches[2]
        width, inner = config.d_model, partial(Linear, bias=False)
        self.streams, self.active, self.act = streams, active, mlp.act
        self.split: nn.Module = nn.Identity()
        self.merge: nn.Module = nn.Identity()
        self.altup = AltUpModule(width, streams, active, norm)
        self.low_rank = nn.Sequential(inner(width, rank), inner(rank, width))
        self.low_rank_norm = norm()
        self.output_scale = nn.Parameter(torch.zeros(width))
        self.input_gate, self.input_out, self.input_norm = inner(width, d_input), inner(d_input, width), norm()

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        assert context.inputs is not None
        x = self.altup.predicted(self.split(x).unflatten(-1, (self.streams, -1)))
        own = x[..., self.active, :]
        normed = self.attn_norm(own)
        attn = self.attn_post_norm(self.attn(normed, context))
        y = (own + attn + normed + self.low_rank_norm(self.low_rank(normed))) * 2**-0.5
        y = y + self.mlp_post_norm(self.mlp(self.mlp_norm(y)))
        x = self.altup.corrected(x, y)
        inputs = self.act(self.input_gate(x[..., self.active, :] * self.output_scale)) * context.inputs
        others = x[..., 1:, :] + self.input_norm(self.input_out(inputs))[..., None, :]
        merged: Tensor = self.merge(torch.cat([x[..., :1, :], others], -2).flatten(-2))
        return merged

    def activations(self) -> Declarations:
        names = {name: one for name, one in super().activations().items() if name not in ("in", "out")}
        return names | {"streams": Activation(Input("merge", heads=self.streams), ("B", "T", self.streams, "D"), 2)}
