"""OLMo 2: Llama with norms only after the branches, and norms over the full queries and keys, not per head (OLMo et al.
2024)."""

from dataclasses import replace
from typing import Any

from onward.config.decoder import BranchNorm, DecoderConfig, Gated, SelfAttention
from onward.families import HF, gemma2, llama, require, with_defaults
from onward.families.llama import shape

ARCHITECTURES = {"olmo2": "Olmo2ForCausalLM"}
SOURCE = "arXiv:2501.00656"
BASE = "model."
IGNORED = ""
OLMO_2 = {"vocab_size": 100_352, "max_position_embeddings": 4096, "rope_theta": 500_000.0, "rms_norm_eps": 1e-6}
PRESETS: dict[str, HF] = {
    "olmo-2-1b": OLMO_2 | shape(2048, 8192, 16, 16, 16),
    "olmo-2-7b": OLMO_2,
    "olmo-2-13b": OLMO_2 | shape(5120, 13_824, 40, 40, 40),
    "olmo-2-32b": OLMO_2 | shape(5120, 27_648, 64, 40, 8),
}
ANCESTORS = {"olmo-2": "llama-2-7b"}
DEFAULTS = {"vocab_size": 50_304, "rms_norm_eps": 1e-5}
names = gemma2.names  # norms after the branches have the same names


def config(hf: HF) -> DecoderConfig:
    c = llama.config(with_defaults(hf, DEFAULTS))
    attention = replace(require(c.attention, SelfAttention), qk_norm="width")
    return replace(c, attention=attention, mlp=Gated(act=require(c.mlp, Gated).act), block=BranchNorm())


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | {"attention_bias": require(c.attention, SelfAttention).bias}
