"""Qwen3-Next: Gated DeltaNet in three of four layers, gated attention in the others, and many experts (Qwen Team
2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.attention_options import SigmoidGate
from onward.config.decoder import DecoderConfig, Gated, GatedDeltaNet, RMSNorm, SelfAttention, at
from onward.families import HF, Row, linear, llama, qwen2_moe, require, with_defaults
from onward.families._layers import FULL
from onward.families._prediction import APART
from onward.families._recurrent import LINEAR, grouped, layers, one, types, without_attention
from onward.families._rope import a_rotary
from onward.families.llama import shape

ARCHITECTURES = {"qwen3_next": "Qwen3NextForCausalLM"}
SOURCE = "huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct"
BASE = "model."
IGNORED = r"^mtp\."
PREDICTION = APART
LONG = {"max_position_embeddings": 262_144, "rope_theta": 1e7}
PRESETS: dict[str, HF] = {"qwen3-next-80b-a3b": LONG, "qwen3-coder-next": LONG | {"rope_theta": 5e6}}
ANCESTORS = {"qwen3-next": "qwen3-235b-a22b", "qwen3-coder-next": "qwen3-next-80b-a3b"}
DEFAULTS = shape(2048, 5632, 48, 16, 2) | {
    "vocab_size": 151_936,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}
DELTA = {
    "n_heads": ("linear_num_key_heads", 16),
    "n_value_heads": ("linear_num_value_heads", 32),
    "d_key": ("linear_key_head_dim", 128),
    "d_value": ("linear_value_head_dim", 128),
    "d_conv": ("linear_conv_kernel_dim", 4),
}


def config(hf: HF) -> DecoderConfig:
    given = with_defaults({"num_experts": hf.get("num_local_experts", hf.get("num_experts", 512))}, hf)
    given = with_defaults(given, DEFAULTS)
    c = decoder(given)
    shared = {"d_shared": hf.get("shared_expert_intermediate_size", 512), "shared_gate": True}
    return replace(c, mlp=qwen2_moe.sparse(given, c, **shared))


def decoder(given: HF) -> DecoderConfig:
    """The decoder without experts; `given` has the family's defaults."""
    c = llama.partly_rotated(given, fraction=0.25)
    eps, attention = require(c.norm, RMSNorm).eps, require(c.attention, SelfAttention)
    delta = GatedDeltaNet(**{our: given.get(key, default) for our, (key, default) in DELTA.items()}, norm_eps=eps)
    attention = replace(attention, qk_norm="head", gate=SigmoidGate(bias=attention.bias))
    step = given.get("full_attention_interval", 4)
    default = [LINEAR if (i + 1) % step else FULL for i in range(c.n_layers)]
    parts = layers(given, c.n_layers, default, {FULL: attention, LINEAR: delta})
    return replace(c, attention=parts, norm=RMSNorm(eps, offset=1.0), mlp=Gated(act=require(c.mlp, Gated).act))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    part, keys = qwen2_moe.sparse_keys(c)
    count = {"num_local_experts": keys["num_experts"], "shared_expert_intermediate_size": part.d_shared}
    return decoder_keys(c) | keys | count


def decoder_keys(c: DecoderConfig) -> dict[str, Any]:
    delta = one(c, GatedDeltaNet, GatedDeltaNet())
    sizes = dict(zip(DELTA, (*delta.counts(c), *delta.widths(c), delta.d_conv)))
    return (
        llama.keys(replace(c, position=a_rotary(c)))
        | {key: sizes[our] for our, (key, _) in DELTA.items()}
        | {
            "layer_types": types(c),
            "attention_bias": one(c, SelfAttention, SelfAttention()).bias,
            "partial_rotary_factor": a_rotary(c).fraction,
        }
    )


def names(c: DecoderConfig) -> Iterator[Row]:
    delta = one(c, GatedDeltaNet, GatedDeltaNet())
    (keys, values), (key, value) = delta.counts(c), delta.widths(c)
    shared = values // keys
    yield from mixed_names(c, qwen2_moe.names(c))
    for i, kind in enumerate(types(c)):
        if kind == FULL:
            continue
        their, our = f"model.layers.{i}.linear_attn", f"blocks.{i}.attn"
        parts = [f"{our}.{name}.weight" for name in ("q", "k", "v", "z")]
        yield f"{their}.in_proj_qkvz.weight", parts, grouped(keys, key, key, shared * value, shared * value)
        yield f"{their}.in_proj_ba.weight", [f"{our}.b.weight", f"{our}.a.weight"], grouped(keys, shared, shared)


def mixed_names(c: DecoderConfig, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield `rows`, which belong to a family without these layers, and the rows for gated attention and for Gated
    DeltaNet without its projections."""
    for row in without_attention(rows, c):
        if ".q_proj." not in str(row[0]):
            yield row
    for i in range(c.n_layers):
        their, our, part = f"model.layers.{i}", f"blocks.{i}.attn", at(c.attention, i)
        if not isinstance(part, GatedDeltaNet):
            width = part.heads(c).d_head
            order = grouped(part.heads(c).n_heads, width, width)
            yield from linear(f"{their}.self_attn.q_proj", [f"{our}.q", f"{our}.gate"], order)
            continue
        their = f"{their}.linear_attn"
        yield f"{their}.conv1d.weight", [f"{our}.{name}_conv.weight" for name in ("q", "k", "v")]
        yield f"{their}.A_log", f"{our}.a_log"
        yield f"{their}.dt_bias", f"{our}.dt_bias"
        yield f"{their}.norm.weight", f"{our}.head_norm.weight"
        yield from linear(f"{their}.out_proj", f"{our}.out")
