"""Phi-3.5-MoE: Mixtral with LayerNorms, biases, and a router trained by SparseMixer (Microsoft 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, Experts, LayerNorm, RMSNorm, Rotary, SelfAttention
from onward.config.ranges import Positive
from onward.config.routing import Routing
from onward.families import HF, mixtral, only, require, with_defaults
from onward.families._rope import rope_table
from onward.families.llama import shape

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURES = {"phimoe": "PhimoeForCausalLM"}
SOURCE = "arXiv:2404.14219, huggingface.co/microsoft/Phi-3.5-MoE-instruct"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "phi-3.5-moe": {"attention_bias": True, "lm_head_bias": True, "rope_theta": 10_000.0},
}
ANCESTORS = {"phi-3.5-moe": "mixtral-8x7b"}
names = mixtral.names
KINDS = "yarn", "longrope", "default"  # kinds of rotary positions; "default" ignores the magnitude
DEFAULTS = shape(4096, 6400, 32, 32, 8) | {
    "vocab_size": 32_064,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 16,
    "sliding_window": None,
}


@dataclass(frozen=True)
class SparseMixer(Routing, kind="sparse_mixer", internal=True):
    """The router of SparseMixer-v2 at inference: two experts, each weighted by a softmax over the logits near its
    own."""

    eps: Positive = 0.01  # logits farther than 2 eps (relative) from the expert's own are left out

    def build(self, width: int, experts: int, top_k: int) -> nn.Module:
        from onward.families._phimoe import SparseMixerModule

        return SparseMixerModule(self, width, experts, top_k, self.eps)


def config(hf: HF) -> DecoderConfig:
    only(hf, num_experts_per_tok=2)
    given = with_defaults(hf, DEFAULTS)
    c = mixtral.config(with_defaults(scaled(given), given))
    bias = hf.get("attention_bias", False)
    router = SparseMixer(eps=hf.get("router_jitter_noise", 0.01))
    return replace(
        c,
        attention=replace(require(c.attention, SelfAttention), bias=bias, out_bias=bias),
        mlp=replace(require(c.mlp, Experts), router=router),
        norm=LayerNorm(eps=given["rms_norm_eps"]),
        head_bias=hf.get("lm_head_bias", False),
    )


def scaled(hf: HF) -> dict[str, Any]:
    """Return the rope_parameters of config.json; this family has its own keys for the magnitude."""
    keys = {"original_max_position_embeddings": hf.get("original_max_position_embeddings")} | rope_table(hf)
    magnitude, long = keys.pop("short_mscale", None), keys.pop("long_mscale", None)
    if magnitude != long:
        raise UserError(f"config.json has short_mscale {magnitude} and long_mscale {long}: Onward needs equal values")
    if magnitude not in (None, 1.0) and (kind := keys.get("rope_type", keys.get("type"))) not in KINDS:
        raise UserError(
            f"config.json has short_mscale {magnitude} and rope_type {kind!r}: Onward needs yarn or longrope"
        )
    magnitudes = {} if magnitude is None else {"attention_factor": magnitude}
    return {"rope_parameters": keys | magnitudes, "rope_scaling": None}


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    hf, mlp = mixtral.to_hf(replace(c, norm=RMSNorm(eps=require(c.norm, LayerNorm).eps))), require(c.mlp, Experts)
    if scaling := require(c.position, Rotary).scaling:  # transformers requires these keys for any kind
        keys = {"original_max_position_embeddings": c.context_length, **hf["rope_parameters"]}
        keys |= dict.fromkeys(("short_mscale", "long_mscale"), scaling.magnitude)
        hf["rope_parameters"] = hf["rope_scaling"] = {k: v for k, v in keys.items() if k != "attention_factor"}
    return hf | {
        "attention_bias": require(c.attention, SelfAttention).bias,
        "lm_head_bias": c.head_bias,
        "router_jitter_noise": require(mlp.router, SparseMixer).eps,
    }
