"""BioGPT: GPT-2 with scaled embeddings, trained on abstracts of PubMed (Luo et al. 2022)."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import DecoderConfig, LayerNorm, Learned, Plain, SelfAttention
from onward.families import ACTIVATIONS, HF, Row, activation, linear, opt, sizes

ARCHITECTURES = {"biogpt": "BioGptForCausalLM"}
SOURCE = "arXiv:2210.10341"
BASE = "biogpt."
IGNORED = ""
PRESETS: dict[str, HF] = {"biogpt": {}}
ANCESTORS = {"biogpt": "gpt2-medium"}
SIZES = {
    "vocab_size": ("vocab_size", 42_384),
    "d_model": ("hidden_size", 1024),
    "n_layers": ("num_hidden_layers", 24),
    "n_heads": ("num_attention_heads", 16),
    "d_ff": ("intermediate_size", 4096),
    "context_length": ("max_position_embeddings", 1024),
    "tied": ("tie_word_embeddings", True),
    "dropout": ("hidden_dropout_prob", 0.1),
}


def config(hf: HF) -> DecoderConfig:
    act: Any = hf.get("hidden_act", "gelu")
    size = sizes(hf, SIZES)
    hf.get("layer_norm_eps")  # read but unused: the norms have 1e-5
    return DecoderConfig(
        **size,
        position=Learned(offset=2),
        attention=SelfAttention(bias=True, out_bias=True),
        mlp=Plain(act=ACTIVATIONS.get(act, act), bias=True),
        norm=LayerNorm(),
        embed_scale=size["d_model"] ** 0.5 if hf.get("scale_embedding", True) else 1.0,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        "attention_probs_dropout_prob": c.dropout,
        "hidden_act": activation(c.mlp),
        "scale_embedding": c.embed_scale != 1.0,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "biogpt.embed_tokens.weight", "embed.weight"
    yield "biogpt.embed_positions.weight", "position.weight"
    yield from linear("biogpt.layer_norm", "norm")
    yield "output_projection.weight", "head.weight"
    for i in range(c.n_layers):
        yield from opt.layer(f"biogpt.layers.{i}", f"blocks.{i}")
