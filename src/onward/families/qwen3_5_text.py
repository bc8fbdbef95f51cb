"""Qwen 3.5: the layers of Qwen3-Next with separate projections, dense or with experts (Qwen Team 2026)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, at
from onward.families import HF, Row, linear, llama, only, qwen2_moe, qwen3_next, require, with_defaults
from onward.families._layers import FULL
from onward.families._prediction import APART
from onward.families._recurrent import types
from onward.families.llama import shape

ARCHITECTURES = {"qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}
SOURCE = "huggingface.co/Qwen/Qwen3.5-27B, huggingface.co/Qwen/Qwen3.5-35B-A3B"
BASE = "model."
IGNORED = r"^mtp\."
PREDICTION = APART
LONG = {"max_position_embeddings": 262_144, "rope_theta": 1e7}
PRESETS: dict[str, HF] = {
    "qwen3.5-9b": LONG,
    "qwen3.5-27b": LONG | shape(5120, 17_408, 64, 24, 4) | {"linear_num_value_heads": 48},
    "qwen3.5-35b-a3b": LONG | {"model_type": "qwen3_5_moe_text"},
}
ANCESTORS = {"qwen3.5": "qwen3-next-80b-a3b"}
DENSE = qwen3_next.DEFAULTS | shape(4096, 12_288, 32, 16, 4) | {"vocab_size": 248_320}
SPARSE = DENSE | shape(2048, 512, 40, 16, 2) | {"num_experts": 256, "num_experts_per_tok": 8}


def config(hf: HF) -> DecoderConfig:
    only(hf, attn_output_gate=True)
    if hf.get("model_type") != "qwen3_5_moe_text":
        return qwen3_next.decoder(with_defaults(hf, DENSE))
    given = with_defaults(hf, SPARSE)
    given = with_defaults({"num_experts": hf.get("num_local_experts", given["num_experts"])}, given)
    given = with_defaults({"norm_topk_prob": True, "intermediate_size": given["moe_intermediate_size"]}, given)
    c = qwen3_next.decoder(given)
    shared = {"d_shared": hf.get("shared_expert_intermediate_size", 512), "shared_gate": True}
    return replace(c, mlp=qwen2_moe.sparse(given, c, **shared))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    keys = qwen3_next.decoder_keys(c)
    if isinstance(at(c.mlp, 0), Gated):
        require(c.mlp, Gated)
        return keys
    part, sparse = qwen2_moe.sparse_keys(c)
    del keys["intermediate_size"]
    named = ("num_experts_per_tok", "moe_intermediate_size")
    shared = {"num_experts": part.count, "shared_expert_intermediate_size": part.d_shared}
    return keys | {key: sparse[key] for key in named} | shared


def names(c: DecoderConfig) -> Iterator[Row]:
    dense = isinstance(at(c.mlp, 0), Gated)
    yield from qwen3_next.mixed_names(c, llama.names(c) if dense else qwen2_moe.names(c))
    for i, kind in enumerate(types(c)):
        if kind == FULL:
            continue
        their, our = f"model.layers.{i}.linear_attn", f"blocks.{i}.attn"
        yield f"{their}.in_proj_qkv.weight", [f"{our}.{name}.weight" for name in ("q", "k", "v")]
        for name in "z", "b", "a":
            yield from linear(f"{their}.in_proj_{name}", f"{our}.{name}")
