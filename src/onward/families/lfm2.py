"""LFM2: short convolutions in most layers, attention with q/k norms in the others (Liquid AI 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, RMSNorm, SelfAttention, ShortConvolution, at
from onward.families import HF, Row, linear, llama, only, require, with_defaults
from onward.families._layers import FULL
from onward.families._recurrent import layers, one, types
from onward.families.llama import shape

ARCHITECTURES = {"lfm2": "Lfm2ForCausalLM"}
SOURCE = "arXiv:2511.23404"
BASE = "model."
IGNORED = ""
RELEASED = {"layer_types": [FULL if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)]}
PRESETS: dict[str, HF] = {
    "lfm2-350m": RELEASED | shape(1024, 6656, 16, 16, 8),
    "lfm2-700m": RELEASED | shape(1536, 10_240, 16, 24, 8),
    "lfm2-1.2b": RELEASED | shape(2048, 12_288, 16, 32, 8),
}
ANCESTORS = {"lfm2": "llama-3.2-1b"}
ROUNDING = "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"
DEFAULTS = shape(2560, 12_288, 32, 32, 8) | {
    "vocab_size": 65_536,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
}
LAYER = {
    "operator_norm": "attn_norm",
    "ffn_norm": "mlp_norm",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.q_layernorm": "attn.q_norm",
    "self_attn.k_layernorm": "attn.k_norm",
    "feed_forward.w1": "mlp.gate",
    "feed_forward.w3": "mlp.up",
    "feed_forward.w2": "mlp.down",
}


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c, rounds, factor, multiple = decoder(hf, given), *(given[key] for key in ROUNDING)
    width = int(2 * c.d_ff / 3) if rounds else c.d_ff
    if rounds and factor is not None:
        width = -(-int(factor * width) // multiple) * multiple
    return replace(c, d_ff=width)


def decoder(hf: HF, given: HF) -> DecoderConfig:
    old = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    given = with_defaults({new: hf[key] for key, new in old.items() if key in hf}, given)
    given = with_defaults({"rms_norm_eps": given["norm_eps"]}, given)
    width = given["hidden_size"]
    only(hf, block_dim=width, conv_dim=width, conv_dim_out=width, block_norm_eps=given["norm_eps"])
    only(hf, num_heads=given["num_attention_heads"], block_use_swiglu=True, use_pos_enc=True)
    c, full = llama.config(given), hf.get("full_attn_idxs")
    default = [FULL if full is None or i in full else "conv" for i in range(c.n_layers)]
    parts = {FULL: SelfAttention(qk_norm="head"), "conv": convolution(hf)}
    return replace(c, attention=layers(hf, c.n_layers, default, parts), mlp=Gated())


def convolution(hf: HF) -> ShortConvolution:
    return ShortConvolution(hf.get("conv_L_cache", 3), hf.get("conv_bias", False))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return keys(c) | {ROUNDING[0]: False}


def keys(c: DecoderConfig) -> dict[str, Any]:
    conv, shared = one(c, ShortConvolution, ShortConvolution()), llama.keys(c)
    return {key: value for key, value in shared.items() if key != "rms_norm_eps"} | {
        "norm_eps": require(at(c.norm, 0), RMSNorm).eps,
        "layer_types": types(c, "conv"),
        "conv_L_cache": conv.d_conv,
        "conv_bias": conv.bias,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "model.embed_tokens.weight", "embed.weight"
    yield from linear("model.embedding_norm", "norm")
    yield from linear("lm_head", "head")
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}", f"blocks.{i}"
        for name, own in LAYER.items():
            yield from linear(f"{their}.{name}", f"{our}.{own}")
        mixer = "conv" if isinstance(at(c.attention, i), ShortConvolution) else "self_attn"
        yield from linear(f"{their}.conv.in_proj", [f"{our}.attn.{name}" for name in ("b", "c", "x")])
        yield from linear(f"{their}.conv.conv", f"{our}.attn.conv")
        yield from linear(f"{their}.{mixer}.out_proj", f"{our}.attn.out")
