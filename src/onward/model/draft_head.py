"""A draft head: a small recurrent network that drafts the tokens after the next one from a decoder's hidden state.

The state begins as the decoder's hidden state, and each draft token updates it; the decoder's own head turns the state
into logits. The draft head is a sequential head on one hidden state (Ankner et al. 2024, Hydra; Zhang et al. 2024,
recurrent drafting): it has no KV cache and needs no prefill.
Shapes: N rows, T tokens, D d_model of the decoder, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onward.kernels.operations import gate
from onward.model.decoder import Decoder
from onward.model.layers import Linear, RMSNormModule

EPS = 1e-5


class DraftHead(nn.Module):
    """The draft head of a decoder of width `d_model`, with `d_ff` hidden units."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.d_model, self.d_ff = d_model, d_ff
        self.state_norm, self.token_norm = RMSNormModule(d_model, EPS), RMSNormModule(d_model, EPS)
        self.mix = Linear(2 * d_model, d_model, bias=False)
        self.gate = Linear(2 * d_model, d_ff, bias=False)
        self.up = Linear(2 * d_model, d_ff, bias=False)
        self.down = Linear(d_ff, d_model, bias=False)
        self.norm = RMSNormModule(d_model, EPS)

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Return the state (..., D) after a token, from the state before it and the token's embedding (..., D)."""
        x = torch.cat([self.state_norm(state), self.token_norm(embedded)], -1)
        return self.mix(x) + self.down(gate(self.gate(x), self.up(x), "silu"))

    @torch.no_grad()
    def initialize(self, model: Decoder) -> None:
        """Initialize the weights so that `forward` returns approximately the normalized state; the head's norm copies
        the weight of the decoder's norm if the shapes are equal."""
        for layer in self.gate, self.up:
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.normal_(self.mix.weight, std=0.02)
        self.mix.weight[:, : self.d_model] += torch.eye(self.d_model, device=self.mix.weight.device)
        nn.init.zeros_(self.down.weight)
        weight = getattr(model.norm, "weight", None)
        if isinstance(weight, Tensor) and weight.shape == self.norm.weight.shape:
            self.norm.weight.copy_(weight + getattr(model.norm, "offset", 0.0))


def embedded(model: Decoder, tokens: Tensor) -> Tensor:
    """Return the embeddings (..., D) of token ids, as they enter the first block of a decoder without added
    positions."""
    return model.embed_norm(model.embed_scale(model.embed_in(model.embed(tokens))))  # type: ignore[no-any-return]
