"""GPT-2 (Radford et al. 2019): GPT with the norms before the branches, one more at the end, and twice the context."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, LayerNorm, Learned, Plain, SelfAttention, at
from onward.families import ACTIVATIONS, HF, Row, activation, linear, only, require, sizes

ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "gpt-sw3": "GPT2LMHeadModel"}
SOURCE = "cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf"
BASE = "transformer."
IGNORED = r"\.attn\.(masked_)?bias$"
PRESETS: dict[str, HF] = {
    "gpt2": {},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
}
ANCESTORS = {"gpt2": "gpt", "gpt2-": "gpt2"}
SIZES = {
    "vocab_size": ("vocab_size", 50_257),
    "d_model": ("n_embd", 768),
    "n_layers": ("n_layer", 12),
    "n_heads": ("n_head", 12),
    "d_ff": ("n_inner", None),
    "context_length": ("n_positions", 1024),
    "tied": ("tie_word_embeddings", True),
    "dropout": ("resid_pdrop", 0.1),
}


def config(hf: HF) -> DecoderConfig:
    only(hf, add_cross_attention=False)
    act: Any = hf.get("activation_function", "gelu_new")
    part = SelfAttention(scale=None if hf.get("scale_attn_weights", True) else 1.0, bias=True, out_bias=True)
    c = DecoderConfig(
        **sizes(hf, SIZES),
        position=Learned(),
        attention=part,
        mlp=Plain(act=ACTIVATIONS.get(act, act), bias=True),
        norm=LayerNorm(eps=hf.get("layer_norm_epsilon", 1e-5)),
    )
    if hf.get("scale_attn_by_inverse_layer_idx", False):
        scale = part.scale or c.d_head**-0.5
        c = replace(c, attention=tuple(replace(part, scale=scale / (i + 1)) for i in range(c.n_layers)))
    return c


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        "embd_pdrop": c.dropout,
        "attn_pdrop": c.dropout,
        "layer_norm_epsilon": require(c.norm, LayerNorm).eps,
        "activation_function": activation(c.mlp),
        "scale_attn_weights": require(at(c.attention, 0), SelfAttention).scale != 1.0,
        "scale_attn_by_inverse_layer_idx": isinstance(c.attention, tuple),
    }


def names(c: DecoderConfig, tokens: str = "wte", positions: str = "wpe") -> Iterator[Row]:
    def transpose(t):  # type: ignore[no-untyped-def]  # GPT-2 stores its matrices transposed
        return t.mT if t.ndim == 2 else t

    yield f"transformer.{tokens}.weight", "embed.weight"
    yield f"transformer.{positions}.weight", "position.weight"
    yield "lm_head.weight", "head.weight"
    yield from linear("transformer.ln_f", "norm")
    for i in range(c.n_layers):
        their, our = f"transformer.h.{i}", f"blocks.{i}"
        yield from linear(f"{their}.ln_1", f"{our}.attn_norm")
        yield from linear(f"{their}.ln_2", f"{our}.mlp_norm")
        yield from linear(f"{their}.attn.c_attn", [f"{our}.attn.{n}" for n in "qkv"], (transpose, transpose))
        yield from linear(f"{their}.attn.c_proj", f"{our}.attn.out", (transpose, transpose))
        yield from linear(f"{their}.mlp.c_fc", f"{our}.mlp.up", (transpose, transpose))
        yield from linear(f"{their}.mlp.c_proj", f"{our}.mlp.down", (transpose, transpose))
