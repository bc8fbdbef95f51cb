"""MPT (MosaicML 2023): BLOOM without biases and without the norm after the embedding."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import Alibi, DecoderConfig, LayerNorm, Plain, SelfAttention
from onward.families import HF, Row, only, require, sizes

ARCHITECTURES = {"mpt": "MptForCausalLM"}
SOURCE = "huggingface.co/mosaicml/mpt-7b"
BASE = "transformer."
IGNORED = ""
SEVEN = {"vocab_size": 50_432, "d_model": 4096, "n_layers": 32, "n_heads": 32}
PRESETS: dict[str, HF] = {
    "mpt-7b": SEVEN,
    "mpt-7b-storywriter": SEVEN | {"max_seq_len": 65_536, "attn_config": {"alibi_bias_max": 16, "clip_qkv": 6.0}},
    "mpt-30b": SEVEN | {"d_model": 7168, "n_layers": 48, "n_heads": 64, "max_seq_len": 8192},
}
ANCESTORS = {"mpt": "bloom-7b1", "mpt-7b-": "mpt-7b", "mpt-30b": "mpt-7b"}
SIZES = {
    "vocab_size": ("vocab_size", 50_368),
    "d_model": ("d_model", 2048),
    "n_layers": ("n_layers", 24),
    "n_heads": ("n_heads", 16),
    "context_length": ("max_seq_len", 2048),
    "tied": ("tie_word_embeddings", True),
    "dropout": ("resid_pdrop", 0.0),
}


def config(hf: HF) -> DecoderConfig:
    attn = hf.get("attn_config") or {}
    # transformers ignores these keys and those in the next line
    only(hf, no_bias=True, expansion_ratio=4, logit_scale=None, norm_type="low_precision_layernorm")
    only(attn, alibi=True, attn_type="multihead_attention", qk_ln=False, prefix_lm=False)
    return DecoderConfig(
        **sizes(hf, SIZES),
        position=Alibi(steepness=attn.get("alibi_bias_max", 8)),
        attention=SelfAttention(clip=attn.get("clip_qkv"), scale=attn.get("softmax_scale")),
        mlp=Plain(act="gelu"),
        norm=LayerNorm(eps=hf.get("layer_norm_epsilon", 1e-5), bias=False),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    """The result has no alibi_bias_max, because transformers ignores this key and would compute a different ALiBi. A
    decoder with a non-default steepness is therefore not saved in this format."""
    attention = require(c.attention, SelfAttention)
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        "emb_pdrop": c.dropout,
        "layer_norm_epsilon": require(c.norm, LayerNorm).eps,
        "attn_config": {"clip_qkv": attention.clip, "softmax_scale": attention.scale},
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "transformer.wte.weight", "embed.weight"
    yield "transformer.norm_f.weight", "norm.weight"
    yield "lm_head.weight", "head.weight"
    for i in range(c.n_layers):
        their, our = f"transformer.blocks.{i}", f"blocks.{i}"
        yield f"{their}.norm_1.weight", f"{our}.attn_norm.weight"
        yield f"{their}.norm_2.weight", f"{our}.mlp_norm.weight"
        yield f"{their}.attn.Wqkv.weight", [f"{our}.attn.{n}.weight" for n in "qkv"]
        yield f"{their}.attn.out_proj.weight", f"{our}.attn.out.weight"
        yield f"{their}.ffn.up_proj.weight", f"{our}.mlp.up.weight"
        yield f"{their}.ffn.down_proj.weight", f"{our}.mlp.down.weight"
