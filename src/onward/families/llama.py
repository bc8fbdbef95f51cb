"""Llama 1, 2 and 3, and the base of families that differ from it in a few values (Touvron et al. 2023)."""

from collections.abc import Iterator
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, Gated, LayerNorm, RMSNorm, SelfAttention, at
from onward.families import ACTIVATIONS, HF, Inexpressible, Row, activation, linear, require, sizes
from onward.families._rope import a_rotary, rope, rotary

ARCHITECTURES = {"llama": "LlamaForCausalLM"}
SOURCE = "arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783"
BASE = "model."
IGNORED = ""
SIZES = {
    "vocab_size": ("vocab_size", 32_000),
    "d_model": ("hidden_size", 4096),
    "n_layers": ("num_hidden_layers", 32),
    "n_heads": ("num_attention_heads", 32),
    "n_kv_heads": ("num_key_value_heads", None),
    "d_head": ("head_dim", None),
    "d_ff": ("intermediate_size", 11_008),
    "context_length": ("max_position_embeddings", 2048),
    "tied": ("tie_word_embeddings", False),
    "dropout": ("attention_dropout", 0.0),
}


def shape(d_model: int, d_ff: int, n_layers: int, n_heads: int, n_kv_heads: int) -> dict[str, Any]:
    given = {"d_model": d_model, "d_ff": d_ff, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return {SIZES[our][0]: size for our, size in given.items()}


def stretched(factor: float) -> dict[str, Any]:
    """The keys of Llama 3.1 to 3.3: a context of 131,072 tokens, with low rotary frequencies divided by `factor`."""
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"max_position_embeddings": 131_072, "rope_scaling": scaling | {"original_max_position_embeddings": 8192}}


FINER = {"rms_norm_eps": 1e-5}
LLAMA_2 = FINER | {"max_position_embeddings": 4096}
LLAMA_3 = FINER | {"vocab_size": 128_256, "max_position_embeddings": 8192, "rope_theta": 500_000.0}
SMOL = FINER | {"vocab_size": 49_152, "max_position_embeddings": 8192, "tie_word_embeddings": True}
B8, B70 = shape(4096, 14_336, 32, 32, 8), shape(8192, 28_672, 80, 64, 8)
PRESETS: dict[str, HF] = {
    "llama-7b": {},
    "llama-13b": shape(5120, 13_824, 40, 40, 40),
    "llama-30b": shape(6656, 17_920, 60, 52, 52),
    "llama-65b": FINER | shape(8192, 22_016, 80, 64, 64),
    "llama-2-7b": LLAMA_2,
    "llama-2-13b": LLAMA_2 | shape(5120, 13_824, 40, 40, 40),
    "llama-2-70b": LLAMA_2 | B70,
    "codellama-7b": FINER | {"vocab_size": 32_016, "max_position_embeddings": 16_384, "rope_theta": 1e6},
    "tinyllama-1.1b": FINER | shape(2048, 5632, 22, 32, 4),
    "llama-3-8b": LLAMA_3 | B8,
    "llama-3-70b": LLAMA_3 | B70,
    "llama-3.1-8b": LLAMA_3 | stretched(8.0) | B8,
    "llama-3.1-70b": LLAMA_3 | stretched(8.0) | B70,
    "llama-3.1-405b": LLAMA_3 | stretched(8.0) | shape(16_384, 53_248, 126, 128, 8),
    "llama-3.2-1b": LLAMA_3 | stretched(32.0) | shape(2048, 8192, 16, 32, 8) | {"tie_word_embeddings": True},
    "llama-3.2-3b": LLAMA_3 | stretched(32.0) | shape(3072, 8192, 28, 24, 8) | {"tie_word_embeddings": True},
    "llama-3.3-70b": LLAMA_3 | stretched(8.0) | B70,
    "smollm2-135m": SMOL | shape(576, 1536, 30, 9, 3) | {"rope_theta": 100_000.0},
    "smollm2-360m": SMOL | shape(960, 2560, 32, 15, 5) | {"rope_theta": 100_000.0},
    "smollm2-1.7b": SMOL | shape(2048, 8192, 24, 32, 32) | {"rope_theta": 130_000.0},
}
ANCESTORS = {
    "llama": "palm-8b",
    "llama-2": "llama-7b",
    "codellama": "llama-2-7b",
    "tinyllama": "llama-2-7b",
    "llama-3-": "llama-2-7b",
    "llama-3.1": "llama-3-8b",
    "llama-3.2": "llama-3.1-8b",
    "llama-3.3": "llama-3.1-70b",
    "smollm2": "llama-2-7b",
}


def config(hf: HF) -> DecoderConfig:
    c = partly_rotated(hf)
    if (fraction := a_rotary(c).fraction) != 1.0:
        raise UserError(f"config.json has partial_rotary_factor {fraction}: this family rotates whole heads")
    return c


def partly_rotated(hf: HF, fraction: float = 1.0) -> DecoderConfig:
    """Return a Llama that rotates `fraction` of each head, unless config.json has partial_rotary_factor."""
    act: Any = hf.get("hidden_act", "silu")
    return DecoderConfig(
        **sizes(hf, SIZES),
        position=rotary(hf, context=hf.get("max_position_embeddings", 2048), fraction=fraction),
        attention=SelfAttention(bias=hf.get("attention_bias", False), out_bias=hf.get("attention_bias", False)),
        mlp=Gated(act=ACTIVATIONS.get(act, act), bias=hf.get("mlp_bias", False)),
        norm=RMSNorm(eps=hf.get("rms_norm_eps", 1e-6)),
    )


def keys(c: DecoderConfig) -> dict[str, Any]:
    """Return the keys that Llama shares with the families derived from it, by the parts of the first layer and the
    rotary positions of the first layer that has any."""
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        **rope(a_rotary(c)),
        "hidden_act": activation(at(c.mlp, 0)),
        "rms_norm_eps": require(at(c.norm, 0), RMSNorm, LayerNorm).eps,
    }


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    if c.d_model % c.n_heads:
        raise Inexpressible("in transformers, the width of a Llama is a multiple of n_heads, even if head_dim is given")
    attention, mlp = require(at(c.attention, 0), SelfAttention), require(at(c.mlp, 0), Gated)
    return keys(c) | {"attention_bias": attention.bias, "mlp_bias": mlp.bias}


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "model.embed_tokens.weight", "embed.weight"
    yield from linear("model.norm", "norm")
    yield from linear("lm_head", "head")
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}", f"blocks.{i}"
        yield from linear(f"{their}.input_layernorm", f"{our}.attn_norm")
        yield from linear(f"{their}.post_attention_layernorm", f"{our}.mlp_norm")
        for name in "q", "k", "v":
            yield from linear(f"{their}.self_attn.{name}_proj", f"{our}.attn.{name}")
        yield from linear(f"{their}.self_attn.o_proj", f"{our}.attn.out")
        for name in "q_norm", "k_norm":
            yield from linear(f"{their}.self_attn.{name}", f"{our}.attn.{name}")
        for name in "gate", "up", "down":
            yield from linear(f"{their}.mlp.{name}_proj", f"{our}.mlp.{name}")
