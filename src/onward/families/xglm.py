"""XGLM: GPT-3 in many languages, with fixed positions and scaled embeddings (Lin et al. 2021)."""

from collections.abc import Iterator
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, LayerNorm, Plain, SelfAttention, Sinusoidal
from onward.families import ACTIVATIONS, HF, Row, activation, linear, only, opt, sizes

ARCHITECTURES = {"xglm": "XGLMForCausalLM"}
SOURCE = "arXiv:2112.10668"
BASE = "model."
OFFSET = 2  # position of the first token
IGNORED = r"embed_positions\.weights?$"
PRESETS: dict[str, HF] = {
    f"xglm-{name}": {"d_model": width, "ffn_dim": 4 * width, "num_layers": layers, "attention_heads": heads}
    for name, width, layers, heads in (
        ("564m", 1024, 24, 16),
        ("1.7b", 2048, 24, 16),
        ("2.9b", 2048, 48, 16),
        ("7.5b", 4096, 32, 32),
    )
}
ANCESTORS = {"xglm": "gpt3-350m"}
SIZES = {
    "vocab_size": ("vocab_size", 256_008),
    "d_model": ("d_model", 1024),
    "n_layers": ("num_layers", 24),
    "n_heads": ("attention_heads", 16),
    "d_ff": ("ffn_dim", 4096),
    "context_length": ("max_position_embeddings", 2048),
    "tied": ("tie_word_embeddings", True),
    "dropout": ("dropout", 0.1),
}


def config(hf: HF) -> DecoderConfig:
    only(hf, add_cross_attention=False)
    if (hf.get("pad_token_id") or 0) >= OFFSET:  # in transformers, the vector of this position is zero
        raise UserError(f"pad_token_id is {hf['pad_token_id']}, which Onward supports only below {OFFSET} for XGLM")
    act: Any = hf.get("activation_function", "gelu")
    size = sizes(hf, SIZES)
    half = size["d_model"] // 2
    return DecoderConfig(
        **size,
        # the last of XGLM's D / 2 wavelengths is 2 pi 10,000; in Onward, the next one would be 2 pi theta
        position=Sinusoidal(theta=10_000.0 ** (half / (half - 1)), offset=OFFSET, order="halves"),
        attention=SelfAttention(bias=True, out_bias=True),
        mlp=Plain(act=ACTIVATIONS.get(act, act), bias=True),
        norm=LayerNorm(),
        embed_scale=size["d_model"] ** 0.5 if hf.get("scale_embedding", True) else 1.0,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        "attention_dropout": c.dropout,
        "activation_function": activation(c.mlp),
        "scale_embedding": c.embed_scale != 1.0,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "model.embed_tokens.weight", "embed.weight"
    yield from linear("model.layer_norm", "norm")
    yield "lm_head.weight", "head.weight"
    for i in range(c.n_layers):
        yield from opt.layer(f"model.layers.{i}", f"blocks.{i}")
