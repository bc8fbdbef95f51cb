"""CTRL: GPT-2 with fixed positions, steered by control codes at the beginning of a text (Keskar et al. 2019)."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import DecoderConfig, LayerNorm, Plain, SelfAttention, Sinusoidal
from onward.families import HF, Row, linear, require, sizes

ARCHITECTURES = {"ctrl": "CTRLLMHeadModel"}
SOURCE = "arXiv:1909.05858"
BASE = "transformer."
IGNORED = r"pos_encoding$"
PRESETS: dict[str, HF] = {"ctrl": {}}
ANCESTORS = {"ctrl": "gpt2-xl"}
SIZES = {
    "vocab_size": ("vocab_size", 246_534),
    "d_model": ("n_embd", 1280),
    "n_layers": ("n_layer", 48),
    "n_heads": ("n_head", 16),
    "d_ff": ("dff", 8192),
    "context_length": ("n_positions", 256),
    "tied": ("tie_word_embeddings", True),
    "dropout": ("resid_pdrop", 0.1),
}
LAYER = {
    "layernorm1": "attn_norm",
    "layernorm2": "mlp_norm",
    "multi_head_attention.Wq": "attn.q",
    "multi_head_attention.Wk": "attn.k",
    "multi_head_attention.Wv": "attn.v",
    "multi_head_attention.dense": "attn.out",
    "ffn.0": "mlp.up",
    "ffn.2": "mlp.down",
}


def config(hf: HF) -> DecoderConfig:
    size = sizes(hf, SIZES)
    return DecoderConfig(
        **size,
        position=Sinusoidal(order="halves"),
        attention=SelfAttention(bias=True, out_bias=True),
        mlp=Plain(act="relu", bias=True),
        norm=LayerNorm(eps=1e-6),
        final_norm=LayerNorm(eps=hf.get("layer_norm_epsilon", 1e-6)),
        embed_scale=size["d_model"] ** 0.5,
        head_bias=True,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        "embd_pdrop": c.dropout,
        "layer_norm_epsilon": require(c.final_norm or c.norm, LayerNorm).eps,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "transformer.w.weight", "embed.weight"
    yield from linear("transformer.layernorm", "norm")
    yield from linear("lm_head", "head")
    for i in range(c.n_layers):
        for their, our in LAYER.items():
            yield from linear(f"transformer.h.{i}.{their}", f"blocks.{i}.{our}")
