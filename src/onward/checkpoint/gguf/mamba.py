"""Architectures of llama.cpp with Mamba-2. See architectures.py.

In a file of Falcon-H1, the model's factors are multiplied into the weights and are not stored separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.gguf.architecture import Parts, expert_keys, self_attention
from onward.checkpoint.gguf.dense import granite, granite_keys, plain
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.recurrent import RecurrentArchitecture, attention_keys
from onward.checkpoint.gguf.rope import FREQS
from onward.config.decoder import (
    AttentionAndMamba2,
    AttentionOnly,
    DecoderConfig,
    Experts,
    FeedForwardOnly,
    Gated,
    Mamba2,
    NoAttention,
    NoPosition,
    Plain,
    RMSNorm,
    at,
)
from onward.config.routing import SigmoidRouting
from onward.families import Row
from onward.families.falcon_h1 import ScaledGated


def mamba_layer(keys: Keys, eps: float) -> Mamba2:
    heads, names = keys.number("ssm.time_step_rank"), [*keys.header.tensors]
    return Mamba2(
        n_heads=heads,
        d_head=keys.number("ssm.inner_size") // heads,
        n_groups=keys.number("ssm.group_count"),
        d_state=keys.number("ssm.state_size"),
        d_conv=keys.number("ssm.conv_kernel"),
        conv_bias=any(name.endswith("ssm_conv1d.bias") for name in names),
        norm="after_gate" if any(name.endswith("ssm_norm.weight") for name in names) else "none",
        norm_eps=eps,
    )


def mamba_of(c: DecoderConfig) -> Mamba2:
    """The first Mamba-2 layer of a decoder; Mamba2() if there is none."""
    parts = [at(c.attention, layer) for layer in range(c.n_layers)]
    inner = [part.mamba if isinstance(part, AttentionAndMamba2) else part for part in parts]
    return next((part for part in inner if isinstance(part, Mamba2)), Mamba2())


def state_keys(c: DecoderConfig) -> dict[str, Any]:
    own = mamba_of(c)
    return {
        "ssm.conv_kernel": own.d_conv,
        "ssm.state_size": own.d_state,
        "ssm.group_count": own.n_groups,
        "ssm.time_step_rank": own.count(c),
        "ssm.inner_size": own.count(c) * own.d_head,
    }


def mamba_keys(c: DecoderConfig) -> dict[str, Any]:
    return attention_keys(c) | state_keys(c)


def granitehybrid(keys: Keys, sizes: Parts) -> Parts:
    if keys.number("ssm.inner_size") != 2 * sizes["d_model"]:
        raise UserError("ssm.inner_size is not twice embedding_length, which llama.cpp requires in this architecture")
    parts, layer = granite(keys, sizes), mamba_layer(keys, keys.number("attention.layer_norm_rms_epsilon"))
    heads = keys.by_layer("attention.head_count_kv", sizes["n_layers"])
    shared = keys.number("expert_shared_feed_forward_length", 0)
    mlp = {"mlp": replace(parts["mlp"], d_shared=shared)} if keys.number("expert_count", 0) else {}
    return parts | mlp | {"attention": tuple(parts["attention"] if one else layer for one in heads)}


def granitehybrid_keys(c: DecoderConfig) -> dict[str, Any]:
    return granite_keys(c) | mamba_keys(c)


def mamba2(keys: Keys, sizes: Parts) -> Parts:
    eps = keys.number("attention.layer_norm_rms_epsilon")
    return {
        "n_heads": 1,
        "n_kv_heads": 1,
        "d_ff": 1,
        "norm": RMSNorm(eps),
        "position": NoPosition(),
        "attention": mamba_layer(keys, eps),
        "block": AttentionOnly(),
    }


def mamba2_keys(c: DecoderConfig) -> dict[str, Any]:
    none = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    return state_keys(c) | dict.fromkeys(none, 0)


def nemotron_h(keys: Keys, sizes: Parts) -> Parts:
    eps = keys.number("attention.layer_norm_rms_epsilon", keys.number("attention.layer_norm_epsilon"))
    heads, widths = (
        keys.by_layer(key, sizes["n_layers"]) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    part, layer = self_attention(keys), mamba_layer(keys, eps)
    mixers = [part if one else NoAttention() if width else layer for one, width in zip(heads, widths)]
    biased = any(name.endswith("ffn_up.bias") for name in keys.header.tensors)
    return {
        "norm": RMSNorm(eps),
        "position": NoPosition(),
        "attention": tuple(mixers),
        "mlp": Plain("relu2", biased),
        "block": tuple(FeedForwardOnly() if isinstance(one, NoAttention) else AttentionOnly() for one in mixers),
    }


def nemotron_h_keys(c: DecoderConfig) -> dict[str, Any]:
    alone = [isinstance(at(c.block, layer), FeedForwardOnly) for layer in range(c.n_layers)]
    eps = {"attention.layer_norm_epsilon": getattr(at(c.norm, 0), "eps", 0.0)}
    return mamba_keys(c) | eps | {"feed_forward_length": [c.d_ff * one for one in alone]}


def nemotron_h_moe(keys: Keys, sizes: Parts) -> Parts:
    parts, names = nemotron_h(keys, sizes), [*keys.header.tensors]
    if not any(name.endswith("ffn_up_shexp.weight") for name in names):
        raise UserError("llama.cpp needs a shared expert in this architecture")
    many = Experts(
        keys.number("expert_count"),
        keys.number("expert_used_count"),
        keys.number("expert_feed_forward_length"),
        SigmoidRouting(
            bool(keys.get("expert_weights_norm")),
            keys.number("expert_weights_scale", 1.0) or 1.0,
            keys.number("expert_group_count", 1) or 1,
            keys.number("expert_group_used_count", 1) or 1,
        ),
        keys.number("expert_shared_feed_forward_length"),
        act="relu2",
        gated=False,
        d_latent=keys.number("moe_latent_size", 0),
    )
    alone = [isinstance(block, FeedForwardOnly) for block in parts["block"]]
    return parts | {"mlp": tuple(many if one else parts["mlp"] for one in alone)}


def nemotron_h_moe_keys(c: DecoderConfig) -> dict[str, Any]:
    parts = [at(c.mlp, layer) for layer in range(c.n_layers)]
    many = next((part for part in parts if isinstance(part, Experts)), None)
    if many is None:
        return nemotron_h_keys(c)
    width, router = many.width(c), many.router
    return (
        nemotron_h_keys(c)
        | expert_keys(replace(c, mlp=many))
        | {
            "feed_forward_length": [width * isinstance(at(c.block, i), FeedForwardOnly) for i in range(c.n_layers)],
            "expert_shared_count": 1,
            "expert_weights_norm": router.renormalize,
            "expert_weights_scale": router.scale,
            "expert_group_count": router.n_groups,
            "expert_group_used_count": router.top_k_groups,
        }
        | ({"moe_latent_size": many.d_latent} if many.d_latent else {})
    )


def one_norm(c: DecoderConfig) -> dict[str, str]:
    return {"ffn_norm": "", "ffn_latent_down": "mlp.latent_in", "ffn_latent_up": "mlp.latent_out"}


@dataclass(frozen=True)
class FalconH1Architecture(RecurrentArchitecture):
    """Attention and Mamba-2 side by side, with factors that the file's weights contain."""

    def names(self, c: DecoderConfig) -> Iterator[Row]:
        yield from super().names(c)
        for i in range(c.n_layers):
            yield f"blk.{i}.ffn_norm", f"blocks.{i}.mlp_norm.weight"  # the file's name has no ending .weight

    def folded(self, c: DecoderConfig) -> DecoderConfig:
        part, mlp = at(c.attention, 0), at(c.mlp, 0)
        if not isinstance(part, AttentionAndMamba2) or not isinstance(mlp, Gated):
            return c
        attention, mamba = replace(part.attention, scale=None, value_scale=1.0), replace(part.mamba, scales=())
        own = Gated(mlp.act, mlp.bias, mlp.d_ff)
        both = AttentionAndMamba2(attention, mamba)
        return replace(c, attention=both, mlp=own, embed_scale=1.0, logit_scale=1.0)

    def tensors(self, c: DecoderConfig, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        factors = factors_of(c)
        for name, tensor in super().tensors(c, ours):
            factor = factors.get(name.removesuffix(".weight").split(".")[-1], 1.0)
            if isinstance(factor, list):
                rows = zip(tensor.float().split(projected(c)), factor)
                yield name, torch.cat([part * own for part, own in rows]).to(tensor.dtype)
            else:
                yield name, tensor if factor == 1.0 else (tensor.float() * factor).to(tensor.dtype)


def projected(c: DecoderConfig) -> list[int]:
    """The number of rows of each part of a layer's first projection: gate, input, b, c and step."""
    own = mamba_of(c)
    inner, shared = own.count(c) * own.d_head, own.n_groups * own.d_state
    return [inner, inner, shared, shared, own.count(c)]


def factors_of(c: DecoderConfig) -> dict[str, float | list[float]]:
    """The factors by which the tensors of the file are multiplied, by tensor name: one factor, or one for each part of
    the rows."""
    part, mlp = at(c.attention, 0), at(c.mlp, 0)
    factors: dict[str, float | list[float]] = {"token_embd": c.embed_scale, "output": c.logit_scale}
    if isinstance(mlp, ScaledGated):
        factors |= {"ffn_gate": mlp.gate_scale, "ffn_down": mlp.scale}
    if isinstance(part, AttentionAndMamba2):
        own = part.attention
        factors |= {"attn_k": (own.scale or c.d_head**-0.5) * c.d_head**0.5, "attn_v": own.value_scale}
        factors["ssm_out"] = part.mamba_scale
        if part.mamba.scales:
            factors["ssm_in"] = [*part.mamba.scales]
    return factors


def falcon_h1(keys: Keys, sizes: Parts) -> Parts:
    mamba = mamba_layer(keys, keys.number("attention.layer_norm_rms_epsilon"))
    return plain(keys, sizes) | {"attention": AttentionAndMamba2(self_attention(keys), mamba)}


def inner_attention(c: DecoderConfig) -> dict[str, str]:
    return {"attn_output": "attn.attention.out", "ffn_norm": ""}


ALL = (
    RecurrentArchitecture(
        "granitehybrid",
        ("granitemoehybrid", "bamba"),
        granitehybrid,
        granitehybrid_keys,
        interleaved=True,
        free_heads=True,
        factors=(FREQS,),
    ),
    RecurrentArchitecture("mamba2", ("mamba2",), mamba2, mamba2_keys),
    RecurrentArchitecture("nemotron_h", ("nemotron_h",), nemotron_h, nemotron_h_keys, free_heads=True, layer=one_norm),
    RecurrentArchitecture(
        "nemotron_h_moe", ("nemotron_h",), nemotron_h_moe, nemotron_h_moe_keys, free_heads=True, layer=one_norm
    ),
    FalconH1Architecture(
        "falcon-h1",
        ("falcon_h1",),
        falcon_h1,
        state_keys,
        layer=inner_attention,
        head="required",
        free_heads=True,
    ),
)
