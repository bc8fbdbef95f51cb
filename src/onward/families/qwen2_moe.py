"""Qwen MoE: Qwen 2 with many small experts, and a shared expert with a gate per token (Qwen Team 2024)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, Gated, SelfAttention, at
from onward.config.part_types import FeedForward
from onward.config.routing import SoftmaxRouting
from onward.families import HF, Row, linear, llama, qwen2, require, with_defaults
from onward.families._experts import experts
from onward.families.llama import shape

ARCHITECTURES = {"qwen2_moe": "Qwen2MoeForCausalLM"}
SOURCE = "huggingface.co/Qwen/Qwen1.5-MoE-A2.7B, arXiv:2407.10671"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "qwen1.5-moe-a2.7b": {"max_position_embeddings": 8192, "rope_theta": 1e6},
    "qwen2-57b-a14b": qwen2.LONG
    | shape(3584, 18_944, 28, 28, 4)
    | {
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20_480,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
}
ANCESTORS = {"qwen1.5-moe": "qwen2-7b", "qwen2-57b": "qwen1.5-moe-a2.7b"}
DEFAULTS = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c = qwen2.config(given)
    part = SelfAttention(bias=hf.get("qkv_bias", True))
    early = lambda layer: layer % 2 == 0 and layer < hf.get("max_window_layers", 28)
    shared = {"d_shared": hf.get("shared_expert_intermediate_size", 5632), "shared_gate": True}
    return replace(c, attention=qwen2.spread(hf, part, c.n_layers, early), mlp=sparse(given, c, **shared))


def sparse(hf: HF, c: DecoderConfig, **shared: Any) -> FeedForward | tuple[FeedForward, ...]:
    """Return the feed-forward of each layer: experts or, in the layers that config.json excludes, a dense
    feed-forward."""
    width, dense_mlp = hf["moe_intermediate_size"], require(c.mlp, Gated)
    experts = Experts(
        count=hf["num_experts"],
        top_k=hf["num_experts_per_tok"],
        d_ff=0 if width == c.d_ff else width,
        router=SoftmaxRouting(renormalize=hf.get("norm_topk_prob", False)),
        act=dense_mlp.act,
        **shared,
    )
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    return tuple(experts if i not in dense and (i + 1) % step == 0 else dense_mlp for i in range(c.n_layers))


def sparse_keys(c: DecoderConfig) -> tuple[Experts, dict[str, Any]]:
    """Return the mixture of experts and its keys in config.json."""
    parts = [at(c.mlp, layer) for layer in range(c.n_layers)]
    part = require(next((part for part in parts if isinstance(part, Experts)), None), Experts)
    return part, {
        "num_experts": part.count,
        "num_experts_per_tok": part.top_k,
        "moe_intermediate_size": part.d_ff or c.d_ff,
        "norm_topk_prob": part.router.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, one in enumerate(parts) if one != part],
    }


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    part, keys = sparse_keys(c)
    bias = require(at(c.attention, 0), SelfAttention).bias
    return qwen2.to_hf(c) | keys | {"qkv_bias": bias, "shared_expert_intermediate_size": part.d_shared}


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    for i in range(c.n_layers):
        their, our, part = f"model.layers.{i}.mlp", f"blocks.{i}.mlp", at(c.mlp, i)
        if isinstance(part, Experts):
            yield f"{their}.gate.weight", f"{our}.router.weight"
            yield from experts(f"{their}.experts", our, part.count)
            for name in "gate", "up", "down":
                yield from linear(f"{their}.shared_expert.{name}_proj", f"{our}.shared.{name}")
            yield f"{their}.shared_expert_gate.weight", f"{our}.shared.share.weight"
