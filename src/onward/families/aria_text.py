"""Aria's text decoder: Llama with routed and shared experts; its files stack the routed experts (Li et al. 2024)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, SelfAttention
from onward.families import HF, Inexpressible, Row, linear, llama, only, require, with_defaults
from onward.families._experts import FUSED_ROWS

ARCHITECTURES = {"aria_text": "AriaTextForCausalLM"}
SOURCE = "arXiv:2410.05993"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = {"intermediate_size": 4096}


def config(hf: HF) -> DecoderConfig:
    only(hf, mlp_bias=False, hidden_act="silu")
    c = llama.config(with_defaults(hf, DEFAULTS))
    shared = c.d_ff * hf.get("moe_num_shared_experts", 2)
    return replace(c, mlp=Experts(count=hf.get("moe_num_experts", 8), top_k=hf.get("moe_topk", 2), d_shared=shared))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    mlp = require(c.mlp, Experts)
    if not mlp.d_shared:
        raise Inexpressible("Aria always has shared experts")
    return llama.keys(c) | {
        "attention_bias": require(c.attention, SelfAttention).bias,
        "moe_num_experts": mlp.count,
        "moe_topk": mlp.top_k,
        "moe_num_shared_experts": mlp.d_shared // c.d_ff,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    into, back = FUSED_ROWS
    yield from llama.names(c)
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}.mlp", f"blocks.{i}.mlp"
        yield f"{their}.router.weight", f"{our}.router.weight"
        fix = (lambda t: into(t.mT), lambda t: back(t).mT)
        yield f"{their}.experts.fc1.weight", [f"{our}.gate", f"{our}.up"], fix
        yield f"{their}.experts.fc2.weight", f"{our}.down", (lambda t: t.mT, lambda t: t.mT)
        for name in "gate", "up", "down":
            yield from linear(f"{their}.shared_experts.{name}_proj", f"{our}.shared.{name}")
