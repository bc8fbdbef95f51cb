"""OPT (Zhang et al. 2022): open models of GPT-3's sizes, with ReLU and learned positions that start at row 2."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import DecoderConfig, LayerNorm, Learned, NoNorm, Plain, PostNorm, PreNorm, SelfAttention
from onward.families import ACTIVATIONS, HF, Row, activation, linear, require, sizes

ARCHITECTURES = {"opt": "OPTForCausalLM"}
SOURCE = "arXiv:2205.01068"
BASE = "model."
IGNORED = ""
SIZES = {
    "vocab_size": ("vocab_size", 50_272),
    "d_model": ("hidden_size", 768),
    "n_layers": ("num_hidden_layers", 12),
    "n_heads": ("num_attention_heads", 12),
    "d_ff": ("ffn_dim", 3072),
    "context_length": ("max_position_embeddings", 2048),
    "d_embed": ("word_embed_proj_dim", None),
    "tied": ("tie_word_embeddings", True),
    "dropout": ("dropout", 0.1),
}


def size(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * width}


PRESETS: dict[str, HF] = {
    "opt-125m": {},
    "opt-350m": size(1024, 24, 16) | {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    "opt-1.3b": size(2048, 24, 32),
    "opt-2.7b": size(2560, 32, 32),
    "opt-6.7b": size(4096, 32, 32),
    "opt-13b": size(5120, 40, 40),
    "opt-30b": size(7168, 48, 56),
    "opt-66b": size(9216, 64, 72),
}
ANCESTORS = {"opt": "gpt3-175b", "opt-350m": "opt-125m"}


def config(hf: HF) -> DecoderConfig:
    act: Any = hf.get("activation_function", "relu")
    bias, before = hf.get("enable_bias", True), hf.get("do_layer_norm_before", True)
    return DecoderConfig(
        **sizes(hf, SIZES),
        position=Learned(offset=2),
        attention=SelfAttention(bias=bias, out_bias=bias),
        mlp=Plain(act=ACTIVATIONS.get(act, act), bias=bias),
        norm=LayerNorm() if hf.get("layer_norm_elementwise_affine", True) else LayerNorm(weight=False, bias=False),
        block=PreNorm() if before else PostNorm(),
        final_norm=NoNorm() if hf.get("_remove_final_layer_norm", False) or not before else None,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        "attention_dropout": c.dropout,
        "activation_function": activation(c.mlp),
        "enable_bias": require(c.attention, SelfAttention).bias,
        "layer_norm_elementwise_affine": c.norm == LayerNorm(),
        "do_layer_norm_before": c.block == PreNorm(),
        "_remove_final_layer_norm": c.final_norm == NoNorm(),
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "model.decoder.embed_tokens.weight", "embed.weight"
    yield "model.decoder.embed_positions.weight", "position.weight"
    yield "model.decoder.project_in.weight", "embed_in.weight"
    yield "model.decoder.project_out.weight", "embed_out.weight"
    yield from linear("model.decoder.final_layer_norm", "norm")
    yield "lm_head.weight", "head.weight"
    for i in range(c.n_layers):
        yield from layer(f"model.decoder.layers.{i}", f"blocks.{i}")


def layer(their: str, our: str) -> Iterator[Row]:
    yield from linear(f"{their}.self_attn_layer_norm", f"{our}.attn_norm")
    yield from linear(f"{their}.final_layer_norm", f"{our}.mlp_norm")
    for name in "q", "k", "v", "out":
        yield from linear(f"{their}.self_attn.{name}_proj", f"{our}.attn.{name}")
    yield from linear(f"{their}.fc1", f"{our}.mlp.up")
    yield from linear(f"{their}.fc2", f"{our}.mlp.down")
