"""Granite MoE: Granite with experts, and in granitemoeshared also a shared expert (IBM 2024)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, Gated
from onward.families import HF, Row, granite, linear, llama, require, with_defaults
from onward.families._experts import FUSED_ROWS
from onward.families.llama import shape

ARCHITECTURES = {"granitemoe": "GraniteMoeForCausalLM", "granitemoeshared": "GraniteMoeSharedForCausalLM"}
SOURCE = "huggingface.co/ibm-granite/granite-3.0-1b-a400m-base"
BASE = "model."
IGNORED = ""
BOTH = granite.BOTH | {
    "vocab_size": 49_155,
    "rms_norm_eps": 1e-6,
    "attention_multiplier": 1 / 64,
    "logits_scaling": 6.0,
    "num_experts_per_tok": 8,
}
PRESETS: dict[str, HF] = {
    "granite-3.0-1b-a400m": BOTH | shape(1024, 512, 24, 16, 8) | {"num_local_experts": 32},
    "granite-3.0-3b-a800m": BOTH | shape(1536, 512, 32, 24, 8) | {"num_local_experts": 40},
}
ANCESTORS = {"granite-3.0-1b": "granite-3.0-2b", "granite-3.0-3b": "granite-3.0-2b"}


def config(hf: HF) -> DecoderConfig:
    c = granite.config(with_defaults({"mlp_bias": False}, hf))
    experts = Experts(
        count=hf.get("num_local_experts", 8),
        top_k=hf.get("num_experts_per_tok", 2),
        d_shared=0 if hf.get("model_type") == "granitemoe" else hf.get("shared_intermediate_size", 0),
        act=require(c.mlp, Gated).act,
    )
    return replace(c, mlp=experts)


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    mlp = require(c.mlp, Experts)
    return granite.keys(c) | {
        "num_local_experts": mlp.count,
        "num_experts_per_tok": mlp.top_k,
        "shared_intermediate_size": mlp.d_shared,
    }


def names(
    c: DecoderConfig,
    router: str = "router.layer.weight",
    gate_up: str = "input_linear.weight",
    down: str = "output_linear.weight",
) -> Iterator[Row]:
    yield from llama.names(c)
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}.block_sparse_moe", f"blocks.{i}.mlp"
        yield f"{their}.{router}", f"{our}.router.weight"
        yield f"{their}.{gate_up}", [f"{our}.gate", f"{our}.up"], FUSED_ROWS
        yield f"{their}.{down}", f"{our}.down"
        their = f"model.layers.{i}.shared_mlp"
        yield from linear(f"{their}.input_linear", [f"{our}.shared.gate", f"{our}.shared.up"])
        yield from linear(f"{their}.output_linear", f"{our}.shared.down")
