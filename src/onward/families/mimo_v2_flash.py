"""MiMo-V2-Flash: GLM 4.5's experts, windows with sinks and more key/value heads, and narrow values (Xiaomi 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, Rotary, SelfAttention, at
from onward.families import HF, Row, llama, require, with_defaults
from onward.families._experts import dense_or_sparse, mixture_keys, mixture_names, sigmoid_mixture
from onward.families._layers import FULL, LOCAL, windowed_layers
from onward.families._rope import rope, rotary, without_rope
from onward.families.llama import shape

ARCHITECTURES = {"mimo_v2_flash": "MiMoV2FlashForCausalLM"}
SOURCE = "arXiv:2601.02780"
BASE = "model."
IGNORED = r"^model\.mtp\."
PRESETS: dict[str, HF] = {"mimo-v2-flash-309b": {}}
ANCESTORS = {"mimo-v2-flash": "glm-4.5"}
DEFAULTS = shape(4096, 16_384, 48, 64, 4) | {
    "vocab_size": 152_576,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "head_dim": 192,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 0,
}
WHOLE: HF = {"rope_parameters": {}, "rope_scaling": None, "partial_rotary_factor": 1.0}
ROPE = {kind: {"rope_theta": theta, "partial_rotary_factor": 0.334} for kind, theta in ((FULL, 5e6), (LOCAL, 1e4))}


def turned(table: HF, context: int) -> Rotary:
    plain = table.get("rope_type", "default") == "default"  # for scaled positions, transformers has the default 1.0
    return rotary({"rope_parameters": table}, context=context, fraction=0.334 if plain else 1.0)


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(with_defaults(WHOLE, given))
    n, kv_heads = c.n_layers, c.n_kv_heads
    full = SelfAttention(
        bias=hf.get("attention_bias", False),
        d_value=hf.get("v_head_dim", 128),
        value_scale=hf.get("attention_value_scale", 0.707) or 1.0,
    )
    window = hf["sliding_window_size"] + 1 if hf.get("sliding_window_size") else hf.get("sliding_window", 129)
    local = replace(full, window=window, sinks=True, n_kv_heads=2 * kv_heads)
    near = windowed_layers(hf, [i > 0 and (i + 1) % 6 > 0 for i in range(n)])
    tables = hf.get("rope_parameters") or ROPE
    of = {kind: turned(tables.get(kind) or {}, c.context_length) for kind in (FULL, LOCAL)}
    sparse = with_defaults(given, {"first_k_dense_replace": 1})
    scale = {"routed_scaling_factor": hf.get("routed_scaling_factor") or 1.0}
    return replace(
        c,
        attention=tuple(local if one else full for one in near),
        position=tuple(of[LOCAL if one else FULL] for one in near),
        mlp=sigmoid_mixture(with_defaults(scale, sparse), require(c.mlp, Gated), n),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    parts = [require(at(c.attention, i), SelfAttention) for i in range(c.n_layers)]
    kinds = [LOCAL if part.window else FULL for part in parts]
    turns = {kind: require(at(c.position, i), Rotary) for i, kind in enumerate(kinds)}
    of = {k: {"partial_rotary_factor": turn.fraction} | rope(turn)["rope_parameters"] for k, turn in turns.items()}
    return (
        without_rope(llama.keys(c))
        | mixture_keys(c, shared=False)
        | dense_or_sparse(c)
        | {
            "layer_types": kinds,
            "sliding_window": max(part.window for part in parts) or 129,
            "rope_parameters": {kind: of.get(kind, {"rope_type": "default", "rope_theta": 1e4}) for kind in ROPE},
            "attention_bias": parts[0].bias,
            "v_head_dim": parts[0].heads(c).d_value,
            "attention_value_scale": parts[0].value_scale,
        }
    )


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    yield from mixture_names(c)
    for i in range(c.n_layers):
        yield f"model.layers.{i}.self_attn.attention_sink_bias", f"blocks.{i}.attn.attend.sinks"
