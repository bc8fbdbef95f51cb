"""DeepSeek V2 and V3 in GGUF: latent attention, and routed experts with a shared expert.

A GGUF file stores the projection from the latent as two tensors: to keys, transposed (H, L, N), and to values (H, V,
L). Shapes: H heads, L width of the latent, N elements of a key without rotary positions, V elements of a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.gguf.architecture import Architecture, Parts, rms
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.rope import rotary
from onward.checkpoint.gguf.sparse import routed, routed_keys
from onward.checkpoint.weights import StoredTensor
from onward.config.decoder import DecoderConfig, Gated, LatentAttention, Rotary, at
from onward.config.scaling import LinearScaling, YaRNScaling, yarn_magnitude
from onward.families import Row, interleaved, linear


@dataclass(frozen=True)
class LatentArchitecture(Architecture):
    """Latent attention: the projection from the latent is split into the two tensors of a file, and joined."""

    def projections(self, c: DecoderConfig, layer: int) -> Iterator[Row]:
        part = at(c.attention, layer)
        if not isinstance(part, LatentAttention):
            return
        their, our = f"blk.{layer}.attn", f"blocks.{layer}.attn"
        queries = interleaved(part.d_nope + part.d_rope, part.d_rope, part.d_nope)
        keys = interleaved(part.d_latent + part.d_rope, part.d_rope, part.d_latent)
        yield from linear(f"{their}_{'q_b' if part.d_query_latent else 'q'}", f"{our}.q", queries)
        yield from linear(f"{their}_q_a", f"{our}.q_down")
        yield from linear(f"{their}_kv_a_mqa", f"{our}.kv_down", keys)
        yield from linear(f"{their}_kv_a_norm", f"{our}.kv_norm")
        yield from linear(f"{their}_kv_b", f"{our}.kv")

    def tensors(self, c: DecoderConfig, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().tensors(c, ours):
            part = at(c.attention, 0)
            if isinstance(part, LatentAttention) and name.endswith("attn_kv_b.weight"):
                heads = tensor.unflatten(0, (part.heads(c).n_heads, -1))
                yield name.replace("kv_b", "k_b"), heads[:, : part.d_nope].mT
                yield name.replace("kv_b", "v_b"), heads[:, part.d_nope :]
            else:
                yield name, tensor

    def stored(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        result = super().stored(tensors)
        for name in tensors:
            if name.endswith("attn_k_b.weight") and (values := name.replace("k_b", "v_b")) in result:
                result[name.replace("k_b", "kv_b")] = joined(result.pop(name), result.pop(values))
        return result


def joined(keys: StoredTensor, values: StoredTensor) -> StoredTensor:
    """Join the tensors that project the latent to keys, (H, L, N), and to values, (H, V, L), to (H (N + V), L)."""
    heads, width, unrotated = keys.shape

    def rows(start: int, end: int) -> Tensor:
        return torch.cat([keys.rows(0, heads).mT, values.rows(0, heads)], 1).flatten(0, 1)[start:end]

    return StoredTensor([heads * (unrotated + values.shape[1]), width], keys.dtype, rows)


def latent_layer(c: DecoderConfig) -> dict[str, str]:
    # an empty name: Decoder has no such tensor
    return {"attn_q_norm": "", "attn_q_a_norm": "attn.q_norm"}


def deepseek2(keys: Keys, sizes: Parts) -> Parts:
    layers, rope_dim = sizes["n_layers"], keys.number("rope.dimension_count")
    lite = layers in (26, 27) or (layers == 48 and sizes["vocab_size"] == 128_256)
    part = LatentAttention(
        d_latent=keys.number("attention.kv_lora_rank"),
        d_query_latent=0 if lite else keys.number("attention.q_lora_rank"),
        d_nope=keys.number("attention.key_length_mla", keys.number("attention.key_length")) - rope_dim,
        d_rope=rope_dim,
        d_value=keys.number("attention.value_length_mla", keys.number("attention.value_length")),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
    )
    position = rotary(keys, sizes | {"d_head": rope_dim})
    sparse = layers > keys.number("leading_dense_block_count", 0)
    if sparse and not keys.has(f"blk.{layers - 1}.ffn_up_shexp.weight"):
        raise UserError("llama.cpp needs a shared expert in this architecture")
    mlp = routed(keys, layers) if sparse else Gated()
    if isinstance(scaling := position.scaling, YaRNScaling | LinearScaling):
        # the factor of YaRN's magnitude is in the rotation and, squared, in the scale of the scores
        weight = 10 * keys.number("rope.scaling.yarn_log_multiplier", 0.0)
        magnitude = keys.number("rope.scaling.attn_factor", 1.0)
        if isinstance(scaling, YaRNScaling):
            magnitude *= 1.0 if weight else yarn_magnitude(scaling.factor)
            position = replace(position, scaling=replace(scaling, attention_factor=magnitude))
        else:
            magnitude *= yarn_magnitude(scaling.factor)
        total = magnitude * yarn_magnitude(scaling.factor, weight)
        part = replace(part, scale=total**2 / math.sqrt(part.d_nope + part.d_rope))
    return rms(keys) | {"position": position, "attention": part, "mlp": mlp}


def deepseek2_keys(c: DecoderConfig) -> dict[str, Any]:
    part = at(c.attention, 0)
    if not isinstance(part, LatentAttention):
        return {}
    keys: dict[str, Any] = {
        "attention.head_count_kv": 1,  # for llama.cpp the latent is the one key and the one value of all heads
        "attention.key_length": part.d_latent + part.d_rope,
        "attention.value_length": part.d_latent,
        "attention.key_length_mla": part.d_nope + part.d_rope,
        "attention.value_length_mla": part.d_value,
        "attention.kv_lora_rank": part.d_latent,
        "attention.q_lora_rank": part.d_query_latent,
        "rope.dimension_count": part.d_rope,
    } | routed_keys(c)
    position = at(c.position, 0)
    scaling = position.scaling if isinstance(position, Rotary) else None
    if isinstance(scaling, YaRNScaling) and part.scale and (unit := yarn_magnitude(scaling.factor) - 1):
        total = math.sqrt(abs(part.scale) * math.sqrt(part.d_nope + part.d_rope))
        weight = (total / scaling.magnitude - 1) / unit
        own = scaling.magnitude / (1.0 if weight else 1 + unit)
        keys |= {"rope.scaling.yarn_log_multiplier": 0.1 * weight, "rope.scaling.attn_factor": own}
    return keys
