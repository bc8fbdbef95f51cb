"""Gemma 2: Gemma with norms after branches too, capped scores and logits, and alternating windows (Gemma Team 2024)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from onward.config.decoder import DecoderConfig, Sandwich, SelfAttention, at
from onward.families import HF, Row, activation, gemma, linear, llama, require, with_defaults
from onward.families._layers import layer_types, windowed_layers
from onward.families.llama import shape

ARCHITECTURES = {"gemma2": "Gemma2ForCausalLM"}
SOURCE = "arXiv:2408.00118"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "gemma-2-2b": {},
    "gemma-2-9b": shape(3584, 14_336, 42, 16, 8),
    "gemma-2-27b": shape(4608, 36_864, 46, 32, 16) | {"head_dim": 128, "query_pre_attn_scalar": 144},
}
ANCESTORS = {"gemma-2-2b": "gemma-2b", "gemma-2-": "gemma-7b"}
DEFAULTS = gemma.DEFAULTS | {
    **shape(2304, 9216, 26, 8, 4),
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def config(hf: HF) -> DecoderConfig:
    return layered(with_defaults(hf, DEFAULTS), period=2)


def layered(hf: HF, period: int, qk_norm: Literal["none", "head"] = "none") -> DecoderConfig:
    """Gemma 2 or 3. Without the key `layer_types`, the last of every `period` layers attends to all tokens, the others
    to a window."""
    c = gemma.config(hf)
    scalar, bias = hf["query_pre_attn_scalar"], hf.get("attention_bias", False)
    full = SelfAttention(
        scale=None if scalar == c.d_head else scalar**-0.5,
        attn_softcap=hf["attn_logit_softcapping"],
        qk_norm=qk_norm,
        bias=bias,
        out_bias=bias,
    )
    local = replace(full, window=hf["sliding_window"] or 0)
    windowed = windowed_layers(hf, [layer % period < period - 1 for layer in range(c.n_layers)])
    return replace(
        c,
        attention=tuple(local if is_local else full for is_local in windowed),
        block=Sandwich(),
        logit_softcap=hf["final_logit_softcapping"],
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    attention = require(at(c.attention, 0), SelfAttention)
    return llama.to_hf(c) | {
        **layer_types(c),
        "hidden_activation": activation(c.mlp),
        "query_pre_attn_scalar": c.d_head if attention.scale is None else round(attention.scale**-2),
        "attn_logit_softcapping": attention.attn_softcap,
        "final_logit_softcapping": c.logit_softcap,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    for their, our, *_ in llama.names(c):
        yield str(their).replace("post_attention_layernorm", "pre_feedforward_layernorm"), our
    for i in range(c.n_layers):
        for their, our in (
            ("post_attention_layernorm", "attn_post_norm"),
            ("post_feedforward_layernorm", "mlp_post_norm"),
        ):
            yield from linear(f"model.layers.{i}.{their}", f"blocks.{i}.{our}")
