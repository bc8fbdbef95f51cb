"""The modules of an EAGLE-3 draft (Li et al. 2025, arXiv:2503.01840, section 3): a decoder that continues a model's
hidden states, which `checkpoint/eagle.py` assembles.

Its first block reads the embedding of a token and the hidden state of the token before, side by side. Before the first
draft token, this hidden state is computed from the inputs of some of the model's blocks, its features.
Shapes: B rows, T tokens of each, D d_model of the draft, F width of all features, V vocabulary of the model, U tokens
that the draft can propose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onward.config.decoder import DecoderConfig
from onward.model.attention import SelfAttentionModule
from onward.model.build import build_branches, layer_norms
from onward.model.context import AttentionContext
from onward.model.decoder import Decoder
from onward.model.layers import Linear, PreNormModule


class SideBySide(nn.Module):
    """Joins embeddings and hidden states, both (B, T, D), to the inputs (B, T, 2 D) of the first block."""

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([embedded, hidden], -1)


class FirstBlock(PreNormModule):
    """The first block of an EAGLE-3 draft, from (B, T, 2 D) to (B, T, D): its attention reads the embedding and the
    hidden state, each normalized, and its residual stream starts as the hidden state, normalized if
    `norm_before_residual`."""

    def __init__(self, config: DecoderConfig, norm_before_residual: bool) -> None:
        attn, mlp, norm = build_branches(config, 0)
        assert isinstance(attn, SelfAttentionModule)
        for name in "q", "k", "v":
            layer = getattr(attn, name)
            setattr(attn, name, Linear(2 * layer.in_features, layer.out_features, bias=layer.bias is not None))
        super().__init__(attn, mlp, norm)
        self.hidden_norm = norm()
        self.norm_before_residual = norm_before_residual

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        embedded, hidden = x.chunk(2, -1)
        normalized = self.hidden_norm(hidden)
        start = normalized if self.norm_before_residual else hidden
        x = start + self.attn(torch.cat([self.attn_norm(embedded), normalized], -1), context)
        return x + self.mlp(self.mlp_norm(x))


class ShortHead(Linear):
    """A head, (..., D) to logits (..., V), with weights for U tokens only, whose ids are `tokens` (U,); the other
    logits are the least finite number, since the kernels that draw tokens reject infinite logits."""

    tokens: Tensor

    def __init__(self, d_model: int, num_tokens: int, vocab_size: int) -> None:
        super().__init__(d_model, num_tokens, bias=False)
        self.vocab_size = vocab_size
        self.register_buffer("tokens", torch.arange(num_tokens), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        least = torch.finfo(y.dtype).min
        return y.new_full((*y.shape[:-1], self.vocab_size), least).index_copy_(-1, self.tokens, y)


class Features(nn.Module):
    """Computes hidden states (..., D) from features (..., F): the inputs of the blocks `layers` of a model of width
    `d_model`, side by side; the number of its blocks stands for the input of its final norm. With `norm_before_fc`, all
    features are normalized together, with `fc_norm`, those of each block."""

    def __init__(
        self, config: DecoderConfig, d_model: int, layers: Sequence[int], norm_before_fc: bool, fc_norm: bool
    ) -> None:
        super().__init__()
        new, width = layer_norms(config, 0), len(layers) * d_model
        self.layers, self.d_model = tuple(layers), d_model
        self.norm = new(width) if norm_before_fc else nn.Identity()
        self.norms = nn.ModuleList(new(d_model) if fc_norm else nn.Identity() for _ in layers)
        self.fc = Linear(width, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.norm(x).split(self.d_model, -1)
        return self.fc(torch.cat([norm(part) for norm, part in zip(self.norms, parts)], -1))


class EagleDecoder(Decoder):
    """The decoder of an EAGLE-3 draft, whose first hidden states come from its `features`, and whose head has weights
    for `num_tokens` tokens. Its hidden states are those before the final norm, unless `norm_output`; the other
    arguments are those of `Features` and `FirstBlock`."""

    def __init__(
        self,
        config: DecoderConfig,
        d_model: int,
        layers: Sequence[int],
        num_tokens: int,
        *,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
    ) -> None:
        super().__init__(config)
        self.features = Features(config, d_model, layers, norm_before_fc, fc_norm)
        self.blocks[0] = FirstBlock(config, norm_before_residual)
        self.head = ShortHead(config.d_model, num_tokens, config.vocab_size)
        if not norm_output:
            self.embed_out, self.norm = self.norm, nn.Identity()  # type: ignore[assignment]
