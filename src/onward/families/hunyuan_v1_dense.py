"""Hunyuan 0.5B to 7B: Llama with queries and keys normalized after their rotation (Tencent 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, SelfAttention
from onward.families import HF, Row, llama, require, with_defaults
from onward.families.llama import shape

ARCHITECTURES = {"hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM"}
SOURCE = "huggingface.co/tencent/Hunyuan-7B-Instruct"
BASE = "model."
IGNORED = ""
RELEASED = {
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
}
SMALL = RELEASED | {"vocab_size": 120_818}
PRESETS: dict[str, HF] = {
    "hunyuan-0.5b": SMALL | shape(1024, 3584, 24, 8, 4),
    "hunyuan-1.8b": SMALL | shape(2048, 6144, 32, 16, 4),
    "hunyuan-4b": SMALL | shape(3072, 8192, 36, 32, 8),
    "hunyuan-7b": RELEASED | shape(4096, 14_336, 32, 32, 8) | {"vocab_size": 128_167},
}
ANCESTORS = {"hunyuan": "qwen3-8b"}
DEFAULTS = {"vocab_size": 290_943, "rms_norm_eps": 1e-5}


def config(hf: HF) -> DecoderConfig:
    c = llama.config(with_alpha(with_defaults(hf, DEFAULTS)))
    part = replace(require(c.attention, SelfAttention), qk_norm="head", norm_rotated=True)
    return replace(c, attention=part)


def with_alpha(hf: HF) -> HF:
    """Return `hf` with the larger theta that `alpha` of dynamic scaling implies at any length, in place of `alpha`."""
    table = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    if table.get("rope_type", table.get("type")) != "dynamic" or not table.get("alpha"):
        return hf
    width = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    theta = table.get("rope_theta", hf.get("rope_theta", 10_000.0)) * table["alpha"] ** (width / (width - 2))
    return with_defaults({"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_scaling": None}, hf)


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | {"attention_bias": require(c.attention, SelfAttention).bias}


def names(c: DecoderConfig) -> Iterator[Row]:
    for their, our, *_ in llama.names(c):
        yield str(their).replace("q_norm", "query_layernorm").replace("k_norm", "key_layernorm"), our
