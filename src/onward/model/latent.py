"""Latent attention (DeepSeek-V2, section 2.1): the cache keeps one latent per token instead of keys and values.

Shapes: B batch, T tokens in this call, S keys, D d_model, H heads; L d_latent, P d_nope, R d_rope, F d_value.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from onward.config.decoder import DecoderConfig, LatentAttention
from onward.kernels.recorded import is_recorded
from onward.model.activations import Activation, Declarations, Latents, Output, attention
from onward.model.adapters import adapted, rows_differ
from onward.model.attention import Attend
from onward.model.context import AttentionContext
from onward.model.layer_cache import CacheEntry, Keys, to_tensor
from onward.model.layers import Linear, RMSNormModule


class LatentAttentionModule(nn.Module):
    """Multi-head latent attention (DeepSeek-V2), x (B, T, D) -> (B, T, D): the cache keeps one latent vector per token
    instead of keys and values. It has two forms with the same result.

    `expanded` computes keys and values of all heads from the latents. `absorbed` multiplies the expansion into queries
    and outputs instead, so that the latents themselves serve as keys and values; it takes fewer multiplications where
    few queries attend to many latents.
    """

    def __init__(self, part: LatentAttention, config: DecoderConfig) -> None:
        super().__init__()
        self.part, self.n_heads = part, part.heads(config).n_heads
        width = part.d_nope + part.d_rope
        if part.d_query_latent:
            self.q_down: nn.Module = Linear(config.d_model, part.d_query_latent, bias=part.bias)
            self.q_norm: nn.Module = RMSNormModule(part.d_query_latent, part.norm_eps)
        else:
            self.q_down = self.q_norm = nn.Identity()
        self.q = Linear(part.d_query_latent or config.d_model, self.n_heads * width, bias=False)
        self.kv_down = Linear(config.d_model, part.d_latent + part.d_rope, bias=part.bias)
        self.kv_norm = RMSNormModule(part.d_latent, part.norm_eps)
        self.kv = Linear(part.d_latent, self.n_heads * (part.d_nope + part.d_value), bias=False)
        self.attend = Attend(width**-0.5 if part.scale is None else part.scale, config.dropout)
        self.out = Linear(self.n_heads * part.d_value, config.d_model, bias=part.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return self.dropout(self.out(self.attended(x, context).flatten(-2)))

    def attended(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Return the outputs (B, T, H, F) of the heads for x (B, T, D)."""
        return self.heads(*self.vectors(self.q_norm(self.q_down(x)), x, context), context)

    def vectors(self, q: Tensor, x: Tensor, context: AttentionContext) -> tuple[Tensor, Keys, Keys]:
        """Return the queries (B, T, H, P + R), and the latents (B, S, 1, L) and rotary keys (B, S, 1, R) to attend to;
        `q` are the latents of the queries, or x."""
        nope, rope = self.q(q).unflatten(-1, (self.n_heads, -1)).split([self.part.d_nope, self.part.d_rope], -1)
        q = torch.cat([nope, context.rotate(rope)], -1)
        latent, rope_key = self.kv_down(x).split([self.part.d_latent, self.part.d_rope], -1)
        rope_key = context.rotate(rope_key[:, :, None])
        latents, rope_keys = context.update(latent=self.kv_norm(latent)[:, :, None], rotary=rope_key)
        return q, latents, rope_keys

    def heads(self, q: Tensor, latents: Keys, rope_keys: Keys, context: AttentionContext) -> Tensor:
        """Return the outputs (B, T, H, F) of the heads, computed by `absorbed` if it is cheaper or the call is
        recorded, unless rows use different adapters; otherwise by `expanded`. The arguments are those of `expanded`."""
        absorbing = is_recorded() or self.absorbing_is_cheaper(q.size(1), context.mask.key_positions.size(1))
        form = self.absorbed if absorbing and not rows_differ(self.kv) else self.expanded
        return form(q, latents, rope_keys, context)

    def expanded(self, q: Tensor, latents: Keys, rope_keys: Keys, context: AttentionContext) -> Tensor:
        """Compute attention with queries q (B, T, H, P + R) and the keys and values expanded from latents (B, S, 1, L)
        and rotary keys (B, S, 1, R), tensors or entries of the cache; return (B, T, H, F)."""
        heads = self.kv(to_tensor(latents, q.dtype)[:, :, 0]).unflatten(-1, (self.n_heads, -1))
        nope, v = heads.split([self.part.d_nope, self.part.d_value], -1)
        k = torch.cat([nope, to_tensor(rope_keys, q.dtype).expand(-1, -1, self.n_heads, -1)], -1)
        return self.attend(q, k, v, context)

    def absorbed(self, q: Tensor, latents: Keys, rope_keys: Keys, context: AttentionContext) -> Tensor:
        """Compute the result of `expanded` from the same arguments, with the latents as keys and values of a single
        head."""
        to_k, to_v = (
            adapted(self.kv, "weight").unflatten(0, (self.n_heads, -1)).split([self.part.d_nope, self.part.d_value], 1)
        )
        nope, rope = q.split([self.part.d_nope, self.part.d_rope], -1)
        q = torch.cat([torch.einsum("bthp,hpl->bthl", nope, to_k.type_as(q)), rope], -1)
        y = self.attend(q, joined(latents, rope_keys), latents, context)
        return torch.einsum("bthl,hfl->bthf", y, to_v.type_as(y))

    def activations(self) -> Declarations:
        p, latents = self.part, Latents()
        key, value = (("B", "T", self.n_heads, width) for width in (p.d_nope + p.d_rope, p.d_value))
        vectors: Declarations = {
            name: Activation(latents, value if name == "v" else key, 2, editable=False, rotary=name.endswith("rotated"))
            for name in ("k", "v", "q_rotated", "k_rotated")
        }
        return {
            "q": Activation(Output("q", heads=self.n_heads), key, 2),
            "latent": Activation(latents, ("B", "T", p.d_latent)),
            "rotary": Activation(latents, ("B", "T", p.d_rope)),
            **vectors,
            **attention(self.n_heads, p.d_value),
        }

    def absorbing_is_cheaper(self, tokens: int, keys: int) -> bool:
        """Return whether the form `absorbed` takes fewer multiplications per head than `expanded`, for `tokens` queries
        over `keys` latents."""
        p = self.part
        projection = p.d_latent * (p.d_nope + p.d_value)  # latent to key and value, or absorbed into query and output
        pair = p.d_nope + p.d_rope + p.d_value  # per pair of a query and a key: the score and the weighted value
        return (
            tokens * projection + tokens * keys * (2 * p.d_latent + p.d_rope) < keys * projection + tokens * keys * pair
        )


def joined(keys: Keys, tails: Keys) -> Keys:
    """Join the vectors of keys (B, S, K, E) and `tails` (B, S, K, R), both tensors or both entries of one cache, to
    keys (B, S, K, E + R)."""
    if isinstance(keys, CacheEntry) and isinstance(tails, CacheEntry):
        return replace(keys, tail=tails.name)
    assert isinstance(keys, Tensor)
    assert isinstance(tails, Tensor)
    return torch.cat([keys, tails], -1)
