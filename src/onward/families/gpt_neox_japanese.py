"""GPT-NeoX Japanese: GPT-NeoX with sequential branches, and no biases except in the last attention's output (ABEJA
2022)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, LayerNorm, Plain, SelfAttention
from onward.families import ACTIVATIONS, HF, Inexpressible, Row, activation, gpt_neox, require, sizes
from onward.families._rope import rope, rotary

ARCHITECTURES = {"gpt_neox_japanese": "GPTNeoXJapaneseForCausalLM"}
SOURCE = "huggingface.co/abeja/gpt-neox-japanese-2.7b"
BASE = "gpt_neox_japanese."
IGNORED = gpt_neox.IGNORED
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
SIZES = {
    "vocab_size": ("vocab_size", 32_000),
    "d_model": ("hidden_size", 2560),
    "n_layers": ("num_hidden_layers", 32),
    "n_heads": ("num_attention_heads", 32),
    "context_length": ("max_position_embeddings", 2048),
    "tied": ("tie_word_embeddings", True),
    "dropout": ("hidden_dropout", 0.0),
}


def config(hf: HF) -> DecoderConfig:
    act: Any = hf.get("hidden_act", "gelu")
    size, part = sizes(hf, SIZES), SelfAttention()
    context, theta, fraction = size["context_length"], hf.get("rotary_emb_base", 10_000.0), hf.get("rotary_pct", 1.0)
    return DecoderConfig(
        **size,
        d_ff=int(size["d_model"] * hf.get("intermediate_multiple_size", 4)),
        position=rotary(hf, context=context, theta=theta, fraction=fraction),
        attention=(*(part,) * (size["n_layers"] - 1), replace(part, out_bias=True)),
        mlp=Plain(act=ACTIVATIONS.get(act, act)),
        norm=LayerNorm(eps=hf.get("layer_norm_eps", 1e-5)),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    if c.d_ff % c.d_model:
        raise Inexpressible("in transformers, the width of the feed-forward is a multiple of the model's width")
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        **rope(c.position),
        "attention_dropout": c.dropout,
        "hidden_act": activation(c.mlp),
        "intermediate_multiple_size": c.d_ff // c.d_model,
        "layer_norm_eps": require(c.norm, LayerNorm).eps,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    for their, *rest in gpt_neox.names(c):
        name = str(their).replace("gpt_neox.", BASE).replace("attention.dense.bias", "attention.dense_bias")
        yield name, *rest  # type: ignore[misc]
