"""GPT, the first (Radford et al. 2018): a decoder-only Transformer, post-norm, with learned positions and GELU."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import DecoderConfig, LayerNorm, Learned, NoNorm, Plain, PostNorm, SelfAttention
from onward.families import HF, Row, gpt2, require, sizes

ARCHITECTURES = {"openai-gpt": "OpenAIGPTLMHeadModel"}
SOURCE = "cdn.openai.com/research-covers/language-unsupervised/language_understanding_paper.pdf"
BASE = gpt2.BASE
IGNORED = gpt2.IGNORED + r"|position_ids$"
PRESETS: dict[str, HF] = {"gpt": {}}
ANCESTORS: dict[str, str] = {}
SIZES = {our: key for our, key in gpt2.SIZES.items() if our != "d_ff"} | {
    "vocab_size": ("vocab_size", 40_478),
    "context_length": ("n_positions", 512),
}
ACTS = {"gelu": "gelu_tanh", "swish": "silu"}  # in this family, gelu is the tanh approximation


def config(hf: HF) -> DecoderConfig:
    act: Any = hf.get("afn", "gelu")
    return DecoderConfig(
        **sizes(hf, SIZES),
        position=Learned(),
        attention=SelfAttention(bias=True, out_bias=True),
        mlp=Plain(act=ACTS.get(act, act), bias=True),
        norm=LayerNorm(eps=hf.get("layer_norm_epsilon", 1e-5)),
        block=PostNorm(),
        final_norm=NoNorm(),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    act = require(c.mlp, Plain).act
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        "embd_pdrop": c.dropout,
        "attn_pdrop": c.dropout,
        "layer_norm_epsilon": require(c.norm, LayerNorm).eps,
        "afn": "gelu" if act == "gelu_tanh" else act,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    return gpt2.names(c, "tokens_embed", "positions_embed")
