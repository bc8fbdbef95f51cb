"""Gemma: Llama with wide heads, GeGLU, norms with weights around 1, and scaled embeddings (Gemma Team 2024)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, RMSNorm, SelfAttention
from onward.families import ACTIVATIONS, HF, llama, only, require, with_defaults
from onward.families.llama import shape

ARCHITECTURES = {"gemma": "GemmaForCausalLM"}
SOURCE = "arXiv:2403.08295"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "gemma-2b": shape(2048, 16_384, 18, 8, 1),
    "gemma-7b": {},
}
ANCESTORS = {"gemma": "llama-7b"}
DEFAULTS = shape(3072, 24_576, 28, 16, 16) | {
    "vocab_size": 256_000,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    only(hf, use_bidirectional_attention=hf.get("use_bidirectional_attention") and False)  # None means False
    keys = with_defaults(hf, DEFAULTS)
    # hidden_act of the first releases names gelu, but they compute its tanh form
    first = keys["hidden_act"]
    act: Any = hf.get("hidden_activation") or ("gelu_pytorch_tanh" if first == "gelu" else first)
    c = llama.config(keys)
    return replace(
        c,
        mlp=Gated(act=ACTIVATIONS.get(act, act)),
        norm=RMSNorm(eps=hf.get("rms_norm_eps", 1e-6), offset=1.0),
        embed_scale=c.d_model**0.5,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | {"attention_bias": require(c.attention, SelfAttention).bias}
