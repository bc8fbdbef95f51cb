"""Flint: Qwen 3's experts with a sigmoid router and sinks; only layers with a window have positions (Recursive
2026)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, NoPosition, SelfAttention, at
from onward.config.part_types import each
from onward.config.routing import SigmoidRouting
from onward.families import HF, Row, llama, qwen2_moe, require, with_defaults
from onward.families._experts import mixture_names
from onward.families._layers import layer_types, windowed_parts
from onward.families._rope import a_rotary
from onward.families.llama import shape

ARCHITECTURES = {"flint": "FlintForCausalLM"}
SOURCE = "huggingface.co/RecursiveSI/flint"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = shape(2048, 6144, 49, 32, 4) | {
    "vocab_size": 150_144,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "sliding_window": 513,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 6,
    "mlp_only_layers": [0, 1],
    "norm_topk_prob": True,
}


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(with_defaults({"mlp_bias": False}, given))
    last = c.n_layers - 1
    local = [not (layer < 2 or layer % 4 == 1 or layer == last) for layer in range(c.n_layers)]
    part = replace(require(c.attention, SelfAttention), qk_norm="head", sinks=True)
    attention = windowed_parts(given, part, given["sliding_window"], local)
    router = SigmoidRouting(renormalize=given["norm_topk_prob"], selection_bias=False)
    shared = {"d_shared": hf.get("shared_expert_intermediate_size", 1024)}
    mlp = each(qwen2_moe.sparse(given, c, **shared))
    return replace(
        c,
        attention=attention,
        position=tuple(a_rotary(c) if part.window else NoPosition() for part in attention),
        mlp=tuple(replace(part, router=router) if isinstance(part, Experts) else part for part in mlp),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    part, keys = qwen2_moe.sparse_keys(c)
    rotated = replace(c, position=a_rotary(c))
    return (
        llama.keys(rotated)
        | keys
        | layer_types(c)
        | {
            "attention_bias": require(at(c.attention, 0), SelfAttention).bias,
            "shared_expert_intermediate_size": part.d_shared,
        }
    )


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    yield from mixture_names(c, shared="shared_expert")
    for i in range(c.n_layers):
        yield f"model.layers.{i}.self_attn.softmax_offset", f"blocks.{i}.attn.attend.sinks"
