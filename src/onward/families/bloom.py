"""BLOOM (Le Scao et al. 2022): GPT-3 with ALiBi for positions, no windows, and a norm after the embedding."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import Alibi, DecoderConfig, LayerNorm, Plain, SelfAttention
from onward.families import HF, Fix, Row, linear, only, renamed, require, sizes

ARCHITECTURES = {"bloom": "BloomForCausalLM"}
SOURCE = "arXiv:2211.05100"
BASE = "transformer."
IGNORED = ""
ALIASES = {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
PRESETS: dict[str, HF] = {
    name: {"n_embed": width, "n_layer": layers, "num_attention_heads": heads}
    for name, width, layers, heads in (
        ("bloom-560m", 1024, 24, 16),
        ("bloom-1b1", 1536, 24, 16),
        ("bloom-1b7", 2048, 24, 16),
        ("bloom-3b", 2560, 30, 32),
        ("bloom-7b1", 4096, 30, 32),
        ("bloom", 14_336, 70, 112),
    )
}
ANCESTORS = {"bloom": "gpt3-175b"}
SIZES = {
    "vocab_size": ("vocab_size", 250_880),
    "d_model": ("hidden_size", 64),
    "n_layers": ("n_layer", 2),
    "n_heads": ("n_head", 8),
    "context_length": ("seq_length", 2048),
    "tied": ("tie_word_embeddings", True),
    "dropout": ("hidden_dropout", 0.0),
}


def config(hf: HF) -> DecoderConfig:
    only(hf, apply_residual_connection_post_layernorm=False)
    norm = LayerNorm(eps=hf.get("layer_norm_epsilon", 1e-5))
    return DecoderConfig(
        **sizes(renamed(hf, ALIASES), SIZES),
        position=Alibi(),
        attention=SelfAttention(bias=True, out_bias=True),
        mlp=Plain(act="gelu_tanh", bias=True),
        norm=norm,
        embed_norm=norm,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        "attention_dropout": c.dropout,
        "layer_norm_epsilon": require(c.norm, LayerNorm).eps,
    }


def names(
    c: DecoderConfig, attn_norm: str = "input_layernorm", mlp_norm: str = "post_attention_layernorm"
) -> Iterator[Row]:
    yield "transformer.word_embeddings.weight", "embed.weight"
    yield from linear("transformer.word_embeddings_layernorm", "embed_norm")
    yield from linear("transformer.ln_f", "norm")
    yield "lm_head.weight", "head.weight"
    for i in range(c.n_layers):
        their, our = f"transformer.h.{i}", f"blocks.{i}"
        yield from linear(f"{their}.{attn_norm}", f"{our}.attn_norm")
        yield from linear(f"{their}.{mlp_norm}", f"{our}.mlp_norm")
        fused = f"{their}.self_attention.query_key_value"
        yield from linear(fused, [f"{our}.attn.{n}" for n in "qkv"], fused_by_group(c))
        yield from linear(f"{their}.self_attention.dense", f"{our}.attn.out")
        yield from linear(f"{their}.mlp.dense_h_to_4h", f"{our}.mlp.up")
        yield from linear(f"{their}.mlp.dense_4h_to_h", f"{our}.mlp.down")


def fused_by_group(c: DecoderConfig) -> Fix:
    """Return functions that reorder a fused projection from the file's order (for each key/value head: its queries, its
    key, its value) to Onward's (all queries, all keys, all values), and back."""
    group = c.n_heads // c.n_kv_heads + 2
    heads = range(group * c.n_kv_heads)
    order = sorted(heads, key=lambda head: max(head % group - group + 3, 0))  # by kind: 0 query, 1 key, 2 value
    back = sorted(heads, key=order.__getitem__)
    reorder = lambda t, rows: t.unflatten(0, (-1, c.d_head))[rows].flatten(0, 1)
    return lambda t: reorder(t, order), lambda t: reorder(t, back)
