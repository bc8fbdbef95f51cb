"""Llama 4: Llama 3 with experts, chunked attention in 3 of 4 layers, and no positions in the others (Meta 2025)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onward.base.errors import UserError
from onward.config.attention_options import LogScale
from onward.config.decoder import DecoderConfig, Experts, Gated, NoPosition, RMSNorm, SelfAttention, at
from onward.config.routing import SigmoidRouting
from onward.families import HF, Row, linear, llama, require, with_defaults
from onward.families._experts import FUSED_ROWS, LLAMA
from onward.families._interleaved import neighbor_names
from onward.families._layers import FULL
from onward.families._rope import a_rotary
from onward.families.llama import shape

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURES = {"llama4_text": "Llama4ForCausalLM"}
SOURCE = "huggingface.co/meta-llama/Llama-4-Scout-17B-16E"
BASE = "model."
IGNORED = ""
RELEASED = llama.stretched(16.0) | {"max_position_embeddings": 10_485_760}
PRESETS: dict[str, HF] = {
    "llama-4-scout-109b": RELEASED,
    "llama-4-maverick-400b": {
        "num_local_experts": 128,
        "interleave_moe_layer_step": 2,
        "use_qk_norm": False,
        "max_position_embeddings": 1_048_576,
    },
}
ANCESTORS = {"llama-4": "llama-3.3-70b", "llama-4-maverick": "llama-4-scout-109b"}
CHUNKED = "chunked_attention"
DEFAULTS = shape(5120, 8192, 48, 40, 8) | {
    "vocab_size": 202_048,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
FUSED = lambda t: FUSED_ROWS[0](t.mT), lambda t: FUSED_ROWS[1](t).mT


@dataclass(frozen=True)
class InputWeightedExperts(Experts, kind="input_weighted_experts", internal=True):
    """Llama 4's mixture of experts: an expert's routing weight multiplies its input, not its output."""

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.experts import InputWeightedExpertsModule
        from onward.model.further import build_router

        return InputWeightedExpertsModule(self, config, build_router(self, config.d_model))


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(with_defaults({"intermediate_size": hf.get("intermediate_size_mlp", 16_384)}, given))
    layers, every = range(c.n_layers), hf.get("no_rope_layer_interval", 4)
    rotated = [bool(x) for x in hf.get("no_rope_layers") or [(i + 1) % every for i in layers]][: c.n_layers]
    kinds = hf.get("layer_types") or [CHUNKED if one else FULL for one in rotated]
    if not len(kinds) == len(rotated) == c.n_layers or not {*kinds} <= {CHUNKED, FULL}:
        raise UserError(f"config.json has layer_types {kinds}: Onward reads {CHUNKED} and {FULL}, one for each layer")
    step, sparse = hf.get("interleave_moe_layer_step", 1), hf.get("moe_layers")
    sparse = range(step - 1, c.n_layers, step) if sparse is None else sparse
    plain, width = require(c.mlp, Gated), given["intermediate_size"]
    routing = SigmoidRouting(renormalize=False, selection_bias=False)
    sizes = hf.get("num_local_experts", 16), hf.get("num_experts_per_tok", 1), width
    experts = InputWeightedExperts(*sizes, routing, d_shared=width, act=plain.act)
    part = require(c.attention, SelfAttention)
    turned, still = part, part
    if hf.get("use_qk_norm", True):
        eps = require(c.norm, RMSNorm).eps
        turned = replace(part, qk_norm="head", qk_norm_part=RMSNorm(eps, weight=False))
    factor = LogScale(hf.get("attn_scale", 0.1), hf.get("floor_scale", 8192), 1)
    if hf.get("attn_temperature_tuning", True):
        still = replace(part, query_scale=factor)
    chunk = hf.get("attention_chunk_size", 8192) or 0
    return replace(
        c,
        position=tuple(c.position if one else NoPosition() for one in rotated),  # type: ignore[misc]
        attention=tuple(
            replace(turned if one else still, window=chunk * (kind == CHUNKED), chunked=bool(chunk) and kind == CHUNKED)
            for one, kind in zip(rotated, kinds)
        ),
        mlp=tuple(experts if i in sparse else plain for i in layers),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    layers = range(c.n_layers)
    parts = [require(at(c.attention, i), SelfAttention) for i in layers]
    sparse = [i for i in layers if isinstance(at(c.mlp, i), Experts)]
    experts = require(at(c.mlp, sparse[0]) if sparse else Experts(router=SigmoidRouting()), Experts)
    scale = next((part.query_scale for part in parts if part.query_scale), None)
    rotated = [int(at(c.position, i) != NoPosition()) for i in layers]
    step = sparse[0] + 1 if sparse else 1
    return llama.keys(replace(c, position=a_rotary(c))) | {
        "intermediate_size": experts.width(c),
        "intermediate_size_mlp": c.d_ff,
        "attention_bias": parts[0].bias,
        "layer_types": [CHUNKED if part.window else FULL for part in parts],
        "attention_chunk_size": max(part.window for part in parts) or 8192,
        "no_rope_layers": rotated,
        "use_qk_norm": any(part.qk_norm != "none" for part in parts),
        "attn_temperature_tuning": scale is not None,
        "moe_layers": sparse,
        "interleave_moe_layer_step": step if sparse == [*range(step - 1, c.n_layers, step)] else 1,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        **({"attn_scale": scale.weight, "floor_scale": scale.original} if isinstance(scale, LogScale) else {}),
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    for row in neighbor_names(c, llama.names(c)):
        yield (str(row[0]).replace(".mlp.", ".feed_forward."), *row[1:])  # type: ignore[misc]
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}.feed_forward", f"blocks.{i}.mlp"
        yield from linear(f"{their}.router", f"{our}.router")
        for name, projection in zip(("gate", "up", "down"), LLAMA):
            yield from linear(f"{their}.shared_expert.{projection}", f"{our}.shared.{name}")
        yield f"{their}.experts.gate_up_proj", [f"{our}.gate", f"{our}.up"], FUSED
        yield f"{their}.experts.down_proj", f"{our}.down", (lambda t: t.mT, lambda t: t.mT)
