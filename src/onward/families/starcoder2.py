"""StarCoder 2: GPT-2 with rotary positions, grouped heads and windows, for code (Lozhkov et al. 2024)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, LayerNorm, Plain, SelfAttention
from onward.families import HF, Row, llama, only, require, with_defaults
from onward.families.llama import shape

ARCHITECTURES = {"starcoder2": "Starcoder2ForCausalLM"}
SOURCE = "arXiv:2402.19173"
BASE = "model."
IGNORED = ""
DROPOUT = dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), 0.1)
COMMON = DROPOUT | {"max_position_embeddings": 16_384, "sliding_window": 4096}
PRESETS: dict[str, HF] = {
    "starcoder2-3b": COMMON | {"rope_theta": 999_999.4420358813},
    "starcoder2-7b": COMMON | shape(4608, 18_432, 32, 36, 4) | {"rope_theta": 1e6},
    "starcoder2-15b": COMMON | shape(6144, 24_576, 40, 48, 4) | {"rope_theta": 100_000.0, "tie_word_embeddings": False},
}
ANCESTORS = {"starcoder2": "gpt2"}
DEFAULTS = shape(3072, 12_288, 30, 24, 2) | {
    "vocab_size": 49_152,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}


def config(hf: HF) -> DecoderConfig:
    only(hf, norm_type="layer_norm", mlp_type="default", scale_attn_weights=True)
    c = llama.config(with_defaults(hf, DEFAULTS))
    bias = hf.get("use_bias", True)
    return replace(
        c,
        attention=SelfAttention(window=hf.get("sliding_window") or 0, bias=bias, out_bias=bias),
        mlp=Plain(act=require(c.mlp, Gated).act, bias=bias),
        norm=LayerNorm(eps=hf.get("norm_epsilon", 1e-5)),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | {
        "sliding_window": require(c.attention, SelfAttention).window or None,
        "residual_dropout": c.dropout,
        "embedding_dropout": c.dropout,
        "use_bias": require(c.mlp, Plain).bias,
        "norm_epsilon": require(c.norm, LayerNorm).eps,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    for their, our, *_ in llama.names(c):
        yield str(their).replace("mlp.up_proj", "mlp.c_fc").replace("mlp.down_proj", "mlp.c_proj"), our
