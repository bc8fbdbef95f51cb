"""Latent attention to tokens that an indexer chooses (DeepSeek Sparse Attention, DeepSeek-AI 2025).

Shapes: B batch, T tokens in this call, S keys, D d_model, Q d_query_latent, H heads and E d_head of the indexer, C
top_k.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from onward.config.attention_options import Indexer
from onward.config.decoder import DecoderConfig, LatentAttention
from onward.config.latent_parts import index_source
from onward.kernels.recorded import is_recorded
from onward.model.chosen import ChosenMask
from onward.model.context import AttentionContext
from onward.model.extended import GatedLatentAttentionModule
from onward.model.layer_cache import to_tensor
from onward.model.layers import Linear
from onward.model.norms import LayerNormModule

SCORES = 1 << 26  # approximate maximum number of scores of single heads in memory at once
NORM_EPS = 1e-6


class IndexerModule(nn.Module):
    """Chooses the tokens that each token attends to. Its weights have no gradient."""

    def __init__(self, part: Indexer, d_model: int, d_query_latent: int) -> None:
        super().__init__()
        self.part = part
        self.q = Linear(d_query_latent, part.n_heads * part.d_head, bias=False)
        self.k = Linear(d_model, part.d_head, bias=False)
        self.k_norm = LayerNormModule(part.d_head, NORM_EPS)
        self.weights = Linear(d_model, part.n_heads, bias=False)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, q: Tensor, x: Tensor, context: AttentionContext) -> Tensor | None:
        """Return the indices (B, T, C) of the chosen keys for tokens with the query latents q (B, T, Q) and the vectors
        x (B, T, D); None if there are at most top_k keys, which are all chosen, unless the call is recorded. The
        indices may include keys that the mask hides."""
        key = context.rotate(self.k_norm(self.k(x))[:, :, None])
        (keys,) = context.update(index=key)
        # an exported program must accept any length
        if context.mask.key_positions.size(1) <= self.part.top_k and not is_recorded():
            return None
        exact = torch.promote_types(x.dtype, torch.float32)
        q = context.rotate(self.q(q).unflatten(-1, (self.part.n_heads, -1))).to(exact) * self.part.d_head**-0.5
        weights = self.weights(x).to(exact) * self.part.n_heads**-0.5
        k = to_tensor(keys, x.dtype)[:, :, 0].to(exact).mT  # (B, E, S)
        heads = max(1, SCORES // (len(x) * q.size(1) * k.size(-1)))
        parts = zip(q.split(heads, 2), weights.split(heads, 2))
        scores = sum((w[:, :, None] @ (q @ k[:, None]).relu())[:, :, 0] for q, w in parts)
        scores = scores.masked_fill(~context.mask.visible(), -torch.inf)
        return scores.topk(self.part.top_k, dim=-1).indices


class IndexedLatentAttentionModule(GatedLatentAttentionModule):
    """Latent attention to the tokens that the indexer of this or of an earlier layer chose; heads' outputs may be
    gated."""

    def __init__(self, part: LatentAttention, config: DecoderConfig, layer: int) -> None:
        super().__init__(part, config)
        self.layer, self.source, option = layer, index_source(config, layer), part.indexer
        self.indexer = (
            IndexerModule(option, config.d_model, part.d_query_latent) if isinstance(option, Indexer) else None
        )

    def attended(self, x: Tensor, context: AttentionContext) -> Tensor:
        latents = self.q_norm(self.q_down(x))
        q, keys, rope_keys = self.vectors(latents, x, context)
        if self.indexer is not None:
            indices = self.indexer(latents, x, context)
            chosen = context.mask if indices is None else ChosenMask.of(context.mask, indices)
            context.shared.of_layer[self.layer] = chosen
        mask = context.shared.of_layer[self.source]
        if isinstance(mask, ChosenMask) and x.size(1) == 1:
            (keys, rope_keys), mask = mask.gathered(x.dtype, keys, rope_keys)
        return self.heads(q, keys, rope_keys, replace(context, mask=mask))
