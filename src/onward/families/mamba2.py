"""Mamba-2: a decoder with only Mamba-2 layers, without attention and feed-forwards (Dao and Gu 2024)."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import AttentionOnly, DecoderConfig, Mamba2, NoPosition, RMSNorm
from onward.families import HF, Row, linear, only, require, sizes
from onward.families._recurrent import check_steps, mamba2_names

ARCHITECTURES = {"mamba2": "Mamba2ForCausalLM"}
SOURCE = "arXiv:2405.21060"
BASE = ""
IGNORED = ""
PRESETS: dict[str, HF] = {"mamba-codestral-7b": {}}
ANCESTORS = {"mamba-codestral-7b": "llama-7b"}
SIZES = {
    "vocab_size": ("vocab_size", 32_768),
    "d_model": ("hidden_size", 4096),
    "n_layers": ("num_hidden_layers", 64),
    "tied": ("tie_word_embeddings", False),
}
MAMBA = {
    "n_heads": ("num_heads", 128),
    "d_head": ("head_dim", 64),
    "n_groups": ("n_groups", 8),
    "d_state": ("state_size", 128),
    "d_conv": ("conv_kernel", 4),
    "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
}
LONG = 2**20  # context length in tokens; any number, because the state has a fixed size


def config(hf: HF) -> DecoderConfig:
    check_steps(hf)
    eps, part, size = hf.get("layer_norm_epsilon", 1e-5), sizes(hf, MAMBA), sizes(hf, SIZES)
    only(hf, hidden_act="silu", expand=part["n_heads"] * part["d_head"] / size["d_model"])
    return DecoderConfig(
        **size,
        n_heads=1,
        d_ff=1,
        context_length=LONG,
        position=NoPosition(),
        attention=Mamba2(**part, norm_eps=eps),
        norm=RMSNorm(eps=eps),
        block=AttentionOnly(),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    part, eps = require(c.attention, Mamba2), require(c.norm, RMSNorm).eps
    keys = {their: getattr(part, our) for our, (their, _) in MAMBA.items()} | {"num_heads": part.count(c)}
    expand = {"expand": part.count(c) * part.d_head // c.d_model, "layer_norm_epsilon": eps}
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | keys | expand


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "backbone.embeddings.weight", "embed.weight"
    yield from linear("backbone.norm_f", "norm")
    yield from linear("lm_head", "head")
    for i in range(c.n_layers):
        yield from linear(f"backbone.layers.{i}.norm", f"blocks.{i}.attn_norm")
        yield from mamba2_names(f"backbone.layers.{i}.mixer", f"blocks.{i}.attn")
