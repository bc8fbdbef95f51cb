"""Latent attention in GGUF: DeepSeek V2 and V3, Mistral Small 4, MiniCPM3, Kimi Linear. See architectures.py.

Most files store the projection from the latent as two tensors: to keys, transposed (H, L, N), and to values (H, V,
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
from onward.checkpoint.gguf.recurrent import log_of
from onward.checkpoint.gguf.rope import LONG, SHORT, rotary
from onward.checkpoint.gguf.sparse import SOFTMAX, routed, routed_keys
from onward.checkpoint.names import same
from onward.checkpoint.weights import StoredTensor
from onward.config.attention_options import LogScale
from onward.config.decoder import (
    DecoderConfig,
    Experts,
    Gated,
    GatedDeltaNet,
    LatentAttention,
    NoPosition,
    PreNorm,
    Rotary,
    at,
)
from onward.config.scaling import LinearScaling, YaRNScaling, yarn_magnitude
from onward.families import Row, interleaved, linear


@dataclass(frozen=True)
class LatentArchitecture(Architecture):
    """Latent attention: with `split`, the projection from the latent is split into two tensors when a file is written,
    and joined when it is read."""

    paired: bool = True  # rotary positions pair element 2 i with 2 i + 1
    split: bool = True  # the file has two tensors for the projection from the latent

    def projections(self, c: DecoderConfig, layer: int) -> Iterator[Row]:
        part = at(c.attention, layer)
        if not isinstance(part, LatentAttention):
            return
        their, our = f"blk.{layer}.attn", f"blocks.{layer}.attn"
        queries = keys = same, same
        if self.paired:
            queries = interleaved(part.d_nope + part.d_rope, part.d_rope, part.d_nope)
            keys = interleaved(part.d_latent + part.d_rope, part.d_rope, part.d_latent)
        yield from linear(f"{their}_{'q_b' if part.d_query_latent else 'q'}", f"{our}.q", queries)
        yield from linear(f"{their}_q_a", f"{our}.q_down")
        yield from linear(f"{their}_kv_a_mqa", f"{our}.kv_down", keys)
        yield from linear(f"{their}_kv_a_norm", f"{our}.kv_norm")
        yield from linear(f"{their}_kv_b", f"{our}.kv")

    def tensors(self, c: DecoderConfig, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().tensors(c, ours):
            part = latent_of(c)
            if part and self.split and name.endswith("attn_kv_b.weight"):
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


def latent_of(c: DecoderConfig) -> LatentAttention | None:
    """The latent attention of the first layer that uses it."""
    parts = (at(c.attention, layer) for layer in range(c.n_layers))
    return next((part for part in parts if isinstance(part, LatentAttention)), None)


def joined(keys: StoredTensor, values: StoredTensor) -> StoredTensor:
    """Join the tensors that project the latent to keys, (H, L, N), and to values, (H, V, L), to (H (N + V), L)."""
    heads, width, unrotated = keys.shape

    def rows(start: int, end: int) -> Tensor:
        return torch.cat([keys.rows(0, heads).mT, values.rows(0, heads)], 1).flatten(0, 1)[start:end]

    return StoredTensor([heads * (unrotated + values.shape[1]), width], keys.dtype, rows)


def latent_layer(c: DecoderConfig) -> dict[str, str]:
    # an empty name: Decoder has no such tensor
    return {"attn_q_norm": "", "attn_q_a_norm": "attn.q_norm"}


def latent_attention(keys: Keys, queries: int, d_value: int) -> LatentAttention:
    """The latent attention that a file's keys describe, with a query latent of width `queries` and values of width
    `d_value`."""
    rope_dim = keys.number("rope.dimension_count")
    return LatentAttention(
        d_latent=keys.number("attention.kv_lora_rank"),
        d_query_latent=queries,
        d_nope=keys.number("attention.key_length_mla", keys.number("attention.key_length")) - rope_dim,
        d_rope=rope_dim,
        d_value=d_value,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
    )


def deepseek2(keys: Keys, sizes: Parts) -> Parts:
    weight = yarn_weight(keys)
    return without_indexer(keys, sizes, weight, weight or 1.0)


def mistral4(keys: Keys, sizes: Parts) -> Parts:
    return without_indexer(keys, sizes, yarn_weight(keys), 1.0)


def without_indexer(keys: Keys, sizes: Parts, weight: float, own: float) -> Parts:
    layers = sizes["n_layers"]
    lite = layers in (26, 27) or (layers == 48 and sizes["vocab_size"] == 128_256)
    d_value = keys.number("attention.value_length_mla", keys.number("attention.value_length"))
    part = latent_attention(keys, 0 if lite else keys.number("attention.q_lora_rank"), d_value)
    if temperature := keys.number("attention.temperature_scale", 0.0):
        part = replace(part, query_scale=LogScale(temperature, keys.number("attention.temperature_length")))
    return latent_parts(keys, sizes, part, weight, own)


def yarn_weight(keys: Keys) -> float:
    """The weight of YaRN's magnitude in the scores, `mscale_all_dim` of the published models."""
    return float(10 * keys.number("rope.scaling.yarn_log_multiplier", 0.0))


def latent_parts(
    keys: Keys, sizes: Parts, part: LatentAttention, weight: float, own: float, gating: int = SOFTMAX
) -> Parts:
    """The parts of a decoder with DeepSeek's feed-forwards and the attention `part`, whose scale is set here for YaRN
    and linear scaling. `weight` and `own` are the weights of YaRN's magnitude in the scores and in the rotation,
    `mscale_all_dim` and `mscale` of the published models; `gating` is the default routing."""
    layers = sizes["n_layers"]
    position = rotary(keys, sizes | {"d_head": part.d_rope})
    sparse = layers > keys.number("leading_dense_block_count", 0)
    if sparse and not keys.has(f"blk.{layers - 1}.ffn_up_shexp.weight"):
        raise UserError("llama.cpp needs a shared expert in this architecture")
    mlp = routed(keys, layers, gating) if sparse else Gated()
    if isinstance(scaling := position.scaling, YaRNScaling | LinearScaling):
        # the factor of YaRN's magnitude is in the rotation and, squared, in the scale of the scores
        magnitude = keys.number("rope.scaling.attn_factor", 1.0)
        if isinstance(scaling, YaRNScaling):
            magnitude *= yarn_magnitude(scaling.factor, own) / yarn_magnitude(scaling.factor, weight)
            position = replace(position, scaling=replace(scaling, attention_factor=magnitude))
        else:
            magnitude *= yarn_magnitude(scaling.factor)
        total = magnitude * yarn_magnitude(scaling.factor, weight)
        part = replace(part, scale=total**2 / math.sqrt(part.d_nope + part.d_rope))
    return rms(keys) | {"position": position, "attention": part, "mlp": mlp}


def deepseek2_keys(c: DecoderConfig) -> dict[str, Any]:
    keys, position = latent_keys(c), at(c.position, 0)
    scaling = position.scaling if isinstance(position, Rotary) else None
    if keys.get("rope.scaling.yarn_log_multiplier") and isinstance(scaling, YaRNScaling):
        keys["rope.scaling.attn_factor"] = scaling.magnitude  # llama.cpp has one weight for scores and rotation
    return keys


def latent_keys(c: DecoderConfig) -> dict[str, Any]:
    part = at(c.attention, 0)
    if not isinstance(part, LatentAttention):
        return {}
    scale = part.query_scale
    keys: dict[str, Any] = {
        "attention.head_count_kv": 1,  # llama.cpp uses the latent as the key and value of a single head
        "attention.key_length": part.d_latent + part.d_rope,
        "attention.value_length": part.d_latent,
        "attention.key_length_mla": part.d_nope + part.d_rope,
        "attention.value_length_mla": part.d_value,
        "attention.kv_lora_rank": part.d_latent,
        "attention.q_lora_rank": part.d_query_latent,
        "rope.dimension_count": part.d_rope,
    } | routed_keys(c)
    if isinstance(scale, LogScale):
        keys |= {"attention.temperature_scale": scale.weight, "attention.temperature_length": scale.original}
    position = at(c.position, 0)
    scaling = position.scaling if isinstance(position, Rotary) else None
    if isinstance(scaling, YaRNScaling) and part.scale and (unit := yarn_magnitude(scaling.factor) - 1):
        total = math.sqrt(abs(part.scale) * math.sqrt(part.d_nope + part.d_rope))
        weight = (total / scaling.magnitude - 1) / unit
        own = total / (1 + unit)
        keys |= {"rope.scaling.yarn_log_multiplier": 0.1 * weight, "rope.scaling.attn_factor": own}
    return keys


def minicpm3(keys: Keys, sizes: Parts) -> Parts:
    width, layers = sizes["d_model"], sizes["n_layers"]
    d_value = keys.number("attention.value_length", width // max(1, sizes["n_heads"]))
    part = latent_attention(keys, keys.number("attention.q_lora_rank"), d_value)
    return rms(keys) | {
        "position": rotary(keys, sizes | {"d_head": part.d_rope}),
        "attention": part,
        "mlp": Gated(),
        "block": PreNorm(1.4 / math.sqrt(layers)),
        "embed_scale": 12.0,
        "logit_scale": 256 / width,
    }


def minicpm3_keys(c: DecoderConfig) -> dict[str, Any]:
    part = latent_of(c)
    if part is None:
        return {}
    return {
        "attention.key_length": part.d_nope + part.d_rope,
        "attention.value_length": part.d_value,
        "attention.kv_lora_rank": part.d_latent,
        "attention.q_lora_rank": part.d_query_latent,
        "rope.dimension_count": part.d_rope,
    }


@dataclass(frozen=True)
class KimiLinearArchitecture(LatentArchitecture):
    """Layers of Kimi Delta Attention, and of latent attention without positions."""

    def projections(self, c: DecoderConfig, layer: int) -> Iterator[Row]:
        their, our = f"blk.{layer}", f"blocks.{layer}.attn"
        if not isinstance(at(c.attention, layer), GatedDeltaNet):
            yield from super().projections(c, layer)
            return
        for name in "qkv":
            yield from linear(f"{their}.attn_{name}", f"{our}.{name}")
            yield f"{their}.ssm_conv1d_{name}.weight", f"{our}.{name}_conv.weight"
        for name, own in {"f_a": "a.0", "f_b": "a.1", "g_a": "z.0", "g_b": "z.1", "beta": "b"}.items():
            yield from linear(f"{their}.ssm_{name}", f"{our}.{own}")
        yield f"{their}.ssm_a", f"{our}.a_log", (lambda t: t[:, 0], lambda t: t[:, None])
        yield f"{their}.ssm_dt.bias", f"{our}.dt_bias"
        yield f"{their}.ssm_norm.weight", f"{our}.head_norm.weight"

    def tensors(self, c: DecoderConfig, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().tensors(c, ours):
            yield name, -tensor.float().exp() if name.endswith(".ssm_a") else tensor

    def stored(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        parts = {name: without_first(own) for name, own in super().stored(tensors).items()}
        return {name: log_of(own) if name.endswith(".ssm_a") else own for name, own in parts.items()}


def without_first(own: StoredTensor) -> StoredTensor:
    """Drop the axes of size 1 before a tensor's last three axes, or before its last two if the last one has size 1:
    files of the reference converter have four axes."""
    shape = own.shape[-2 if own.shape[-1:] == [1] else -3 :]
    if len(own.shape) < 4 or math.prod(own.shape) != math.prod(shape):
        return own
    whole = lambda: own.rows(0, own.shape[0]).reshape(shape)
    return StoredTensor(shape, own.dtype, lambda start, end: whole()[start:end])


def kimi_linear(keys: Keys, sizes: Parts) -> Parts:
    layers, width = sizes["n_layers"], keys.number("kda.head_dim")
    eps = keys.number("attention.layer_norm_rms_epsilon")
    delta = GatedDeltaNet(
        n_heads=sizes["n_heads"],
        d_key=width,
        d_conv=keys.number("ssm.conv_kernel"),
        decay="element",
        gate="sigmoid",
        rank=width,
        norm_eps=eps,
    )
    if keys.number("attention.q_lora_rank", 0):
        raise UserError("attention.q_lora_rank is not 0, but llama.cpp requires 0 in this architecture")
    latent = latent_attention(keys, 0, keys.number("attention.value_length_mla"))
    heads = keys.by_layer("attention.head_count_kv", layers)
    mlp = tuple(
        replace(part, router=replace(part.router, renormalize=True)) if isinstance(part, Experts) else part
        for part in routed(keys, layers)
    )
    parts = {"attention": tuple(latent if one else delta for one in heads), "mlp": mlp}
    return rms(keys) | parts | {"position": NoPosition()}


def kimi_linear_keys(c: DecoderConfig) -> dict[str, Any]:
    parts = [at(c.attention, layer) for layer in range(c.n_layers)]
    delta, latent = next((part for part in parts if isinstance(part, GatedDeltaNet)), GatedDeltaNet()), latent_of(c)
    if latent is None:
        return {}
    one = deepseek2_keys(replace(c, attention=latent)) | {"kda.head_dim": delta.widths(c)[0]}
    kinds = {"attention.head_count_kv": [int(isinstance(part, LatentAttention)) for part in parts]}
    return (
        {key: value for key, value in one.items() if key != "attention.q_lora_rank"}
        | kinds
        | {"ssm.conv_kernel": delta.d_conv}
    )


ALL = (
    LatentArchitecture(
        "deepseek2",
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "youtu"),
        deepseek2,
        deepseek2_keys,
        layer=latent_layer,
    ),
    LatentArchitecture("mistral4", ("mistral4",), mistral4, latent_keys, layer=latent_layer),
    LatentArchitecture(
        "minicpm3",
        ("minicpm3",),
        minicpm3,
        minicpm3_keys,
        layer=latent_layer,
        paired=False,
        split=False,
        factors=(LONG, SHORT),
    ),
    KimiLinearArchitecture(
        "kimi-linear",
        ("kimi_linear",),
        kimi_linear,
        kimi_linear_keys,
        layer=latent_layer,
        paired=False,
        head="required",
        needs=("exp_probs_b.bias",),
    ),
)
