"""Llama 1, 2 and 3, and the base of those who differ from it in a few values (Touvron et al. 2023)."""

from collections.abc import Iterator
from typing import Any

from onward.families import ACTIVATIONS, HF, THEIRS, Row, linear, sizes
from onward.families._rope import rope, rotary
from onward.model.config import DecoderConfig, Gated, RMSNorm, SelfAttention

ARCHITECTURES = {"llama": "LlamaForCausalLM"}
BASE = "model."
IGNORED = r"rotary_emb\.inv_freq$"
PRESETS: dict[str, HF] = {
    "llama-7b": {},
    "llama-2-7b": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "llama-2-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
}
ANCESTORS = {"llama": "gpt2", "llama-2": "llama-7b"}
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


def config(hf: HF) -> DecoderConfig:
    act: Any = hf.get("hidden_act", "silu")
    return DecoderConfig(
        **sizes(hf, SIZES),
        position=rotary(hf, context=hf.get("max_position_embeddings", 2048)),
        attention=SelfAttention(bias=hf.get("attention_bias", False), out_bias=hf.get("attention_bias", False)),
        mlp=Gated(act=ACTIVATIONS.get(act, act), bias=hf.get("mlp_bias", False)),
        norm=RMSNorm(eps=hf.get("rms_norm_eps", 1e-6)),
    )


def to_hf(c: Any) -> dict[str, Any]:
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        **rope(c.position),
        "attention_bias": c.attention.bias,
        "mlp_bias": c.mlp.bias,
        "hidden_act": THEIRS[c.mlp.act],
        "rms_norm_eps": c.norm.eps,
    }


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
