"""Beam: Qwen 3's attention with gates and DeepSeek-V3's experts, in a residual stream whose additions are weighted by
depth (Reflection 2026)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from onward.config.attention_options import PowerScale, SigmoidGate
from onward.config.decoder import DecoderConfig, Experts, Gated, NoPosition, Rotary, Sandwich, SelfAttention, at
from onward.families import HF, Row, gemma2, llama, renamed, require, with_defaults
from onward.families._experts import dense_or_sparse, mixture_keys, mixture_names, sigmoid_mixture
from onward.families._layers import FULL, LOCAL, layer_types, windowed_parts
from onward.families._rope import rope, rotary
from onward.families._rope_by_type import UNREAD
from onward.families.llama import shape

ARCHITECTURES = {"beam": "BeamForCausalLM"}
SOURCE = "huggingface.co/reflection/Beam-1.0-501B-A23B"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = shape(5120, 20_480, 52, 48, 8) | {
    "vocab_size": 151_936,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "sliding_window": 512,
    "moe_intermediate_size": 2560,
    "n_routed_experts": 256,
    "n_shared_experts": 0,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
EXPERTS = {"num_experts": "n_routed_experts"}
ROTATED = {LOCAL: {"rope_type": "default", "rope_theta": 10_000.0}, FULL: None}


@dataclass(frozen=True)
class DepthMix(Sandwich, kind="depth_mix", internal=True):
    """A sandwich block in which addition number n (the embeddings are number 1) is x * sqrt((n - 1) / n) + y / sqrt(n),
    so that all branches have equal shares in the stream."""

    def weights(self, config: DecoderConfig, layer: int) -> tuple[tuple[float, float], tuple[float, float]]:
        attn, mlp = ((((n - 1) / n) ** 0.5, n**-0.5) for n in (2 * layer + 2, 2 * layer + 3))
        return attn, mlp


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(renamed(hf, EXPERTS), DEFAULTS)
    c = llama.config(with_defaults({**UNREAD, "mlp_bias": False}, given))
    tables = hf.get("rope_parameters") or ROTATED
    rotated = {kind: tables.get(kind) for kind in ROTATED}
    local = [(layer + 1) % 6 != 0 and layer < c.n_layers - 1 for layer in range(c.n_layers)]
    part = replace(require(c.attention, SelfAttention), qk_norm="head", gate=SigmoidGate(head_bias=True))
    parts = windowed_parts(given, part, given["sliding_window"], local)
    kinds = [LOCAL if part.window else FULL for part in parts]
    return replace(
        c,
        attention=tuple(
            part if rotated[kind] else replace(part, query_scale=PowerScale()) for part, kind in zip(parts, kinds)
        ),
        position=tuple(
            rotary({"rope_parameters": rotated[kind]}, context=c.context_length) if rotated[kind] else NoPosition()
            for kind in kinds
        ),
        mlp=sigmoid_mixture(given, Gated(act=require(c.mlp, Gated).act), c.n_layers),
        block=DepthMix(),
        logit_softcap=hf.get("final_logit_softcapping", 30.0),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    kinds = layer_types(c)
    tables = dict(ROTATED)
    for layer, kind in enumerate(kinds["layer_types"]):
        position = at(c.position, layer)
        tables[kind] = rope(position)["rope_parameters"] if isinstance(position, Rotary) else None
    mlp = (at(c.mlp, layer) for layer in range(c.n_layers))
    shared = replace(c, mlp=tuple(replace(p, d_shared=p.width(c)) if isinstance(p, Experts) else p for p in mlp))
    keys = llama.keys(replace(c, position=Rotary())) | mixture_keys(shared, EXPERTS) | dense_or_sparse(c)
    for name in "rope_theta", "n_shared_experts", "first_k_dense_replace":
        del keys[name]
    return keys | {
        "layer_types": kinds["layer_types"],
        "sliding_window": kinds.get("sliding_window") or DEFAULTS["sliding_window"],
        "rope_parameters": tables,
        "attention_bias": require(at(c.attention, 0), SelfAttention).bias,
        "final_logit_softcapping": c.logit_softcap,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from gemma2.names(c)
    yield from mixture_names(c)
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}.self_attn", f"blocks.{i}.attn"
        yield f"{their}.gate_proj.weight", f"{our}.gate.weight"
        yield f"{their}.gate_bias", f"{our}.gated.bias"
