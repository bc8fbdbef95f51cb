"""The modules of Gemma 4: a block with a stored factor, embeddings of tokens in each layer, and experts, parallel to a
dense feed-forward, that read the residual stream.

Shapes: B batch, T tokens, D d_model, L layers, P width of a layer's inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, Experts
from onward.config.routing import Routing
from onward.model.activations import Child, Declarations
from onward.model.blocks import SandwichModule
from onward.model.context import AttentionContext
from onward.model.experts import ExpertsModule, SoftmaxRoutingModule
from onward.model.layers import GatedFeedForwardModule, Linear, NewNorm
from onward.model.norms import WeightlessRMSNormModule


class Gemma4BlockModule(SandwichModule):
    """A sandwich block whose output is multiplied by a stored number, which training does not change."""

    mid = None

    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: NewNorm) -> None:
        super().__init__(attn, mlp, norm)
        self.factor = nn.Parameter(torch.ones(1), requires_grad=False)
        if isinstance(mlp, StreamExpertsModule):
            self.mlp_norm = nn.Identity()  # the branches of StreamExpertsModule have their own norms

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return super().forward(x, context) * self.factor


class InputBlockModule(Gemma4BlockModule):
    """A Gemma4BlockModule that also adds norm(out(act(gate(x)) * inputs)), where `inputs` (B, T, P) are the tokens'
    vectors for this layer (see LayerInputsModule)."""

    def __init__(self, attn: nn.Module, mlp: Any, norm: NewNorm, width: int, config: DecoderConfig) -> None:
        super().__init__(attn, mlp, norm)
        self.input_gate = Linear(config.d_model, width, bias=False)
        self.input_out = Linear(width, config.d_model, bias=False)
        self.input_norm = norm()
        self.act = mlp.act

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = SandwichModule.forward(self, x, context)
        assert context.inputs is not None
        inputs = self.act(self.input_gate(x)) * context.inputs
        return (x + self.input_norm(self.input_out(inputs))) * self.factor


class LayerInputsModule(nn.Module):
    """Map ids (B, T) and embeddings x (B, T, D) to the vectors of each token for each layer, (L, B, T, P): an embedding
    of the id plus a normalized projection of x."""

    def __init__(self, vocab_size: int, width: int, norm: NewNorm, config: DecoderConfig) -> None:
        super().__init__()
        self.width, self.scale, self.projection_scale = width, width**0.5, config.d_model**-0.5
        self.embed = nn.Embedding(vocab_size, config.n_layers * width)
        self.project = Linear(config.d_model, config.n_layers * width, bias=False)
        self.norm = norm(width)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        if tokens.is_floating_point():
            raise UserError("Cannot take vectors in place of token ids, because each layer embeds the ids: give ids")
        projected = self.norm((self.project(x) * self.projection_scale).unflatten(-1, (-1, self.width)))
        embedded = self.embed(tokens).unflatten(-1, (-1, self.width))
        embedded = embedded * embedded.new_full((), self.scale)
        return ((projected + embedded) * 2.0**-0.5).movedim(-2, 0)


class StreamRoutingModule(SoftmaxRoutingModule):
    """A softmax router of the residual stream: its input is normalized and multiplied by learned numbers, and each
    expert's routing weights are multiplied by a learned number."""

    def __init__(self, part: Routing, width: int, experts: int, top_k: int, eps: float) -> None:
        super().__init__(part, width, experts, top_k)
        self.norm = WeightlessRMSNormModule(width, eps)
        self.scale = nn.Parameter(torch.ones(width))
        self.expert_scale = nn.Parameter(torch.ones(experts))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = super().forward(self.norm(tokens) * self.scale * self.scale.numel() ** -0.5)
        return weights * self.expert_scale[experts].to(weights.dtype), experts


class StreamExpertsModule(ExpertsModule):
    """Experts and a dense feed-forward, `shared`, that read the residual stream x (B, T, D) through norms of their own;
    the normalized outputs of both are added."""

    shared: GatedFeedForwardModule

    def __init__(self, part: Experts, config: DecoderConfig, router: nn.Module, norm: NewNorm) -> None:
        super().__init__(part, config, router)
        self.shared_norm, self.shared_post_norm, self.routed_norm, self.routed_post_norm = (norm() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        dense = self.shared_post_norm(self.shared(self.shared_norm(tokens)))
        return self.dropout((dense + self.routed_post_norm(self.mix(tokens))).view_as(x))

    def mix(self, tokens: Tensor) -> Tensor:
        return self.mix_chosen(self.routed_norm(tokens), *self.router(tokens))

    def activations(self) -> Declarations:
        return {"shared": Child("shared", flat=True)}
