"""Apertus: Llama 3.1 with norms of queries and keys, and xIELU in a feed-forward without gate (Swiss AI 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import XIELU, DecoderConfig, SelfAttention
from onward.families import HF, Row, llama, only, require, with_defaults
from onward.families.llama import shape, stretched

ARCHITECTURES = {"apertus": "ApertusForCausalLM"}
SOURCE = "arXiv:2509.14233"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "apertus-8b": shape(4096, 21_504, 32, 32, 8),
    "apertus-70b": shape(8192, 43_008, 80, 64, 8),
}
ANCESTORS = {"apertus-8b": "llama-3.1-8b", "apertus-70b": "llama-3.1-70b"}
THETA = 12e6
DEFAULTS = {
    "vocab_size": 131_072,
    "intermediate_size": 14_336,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-5,
    "rope_theta": THETA,
}
NAMES = {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}


def config(hf: HF) -> DecoderConfig:
    only(hf, hidden_act="xielu")
    given = with_defaults({"hidden_act": "silu"}, with_defaults(hf, DEFAULTS))
    if hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
        given = with_defaults({"rope_parameters": stretched(8.0)["rope_scaling"]}, given)
    c = llama.config(given)
    return replace(c, attention=replace(require(c.attention, SelfAttention), qk_norm="head"), mlp=XIELU())


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    require(c.mlp, XIELU)
    return llama.keys(replace(c, mlp=llama.Gated())) | {
        "hidden_act": "xielu",
        "attention_bias": require(c.attention, SelfAttention).bias,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    for their, our, *_ in llama.names(c):
        path = str(their).split(".")
        yield ".".join(NAMES.get(word, word) for word in path), our
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}.mlp.act_fn", f"blocks.{i}.mlp.act"
        for name in "alpha_p", "alpha_n":
            yield f"{their}.{name}", f"{our}.{name}"
        for name in "beta", "eps":
            yield f"{their}.{name}", f"{our}.{name}", (lambda t: t.reshape(1), lambda t: t.reshape(()))
