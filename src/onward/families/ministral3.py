"""Ministral 3 and Devstral 2: Mistral whose queries are scaled by a factor that increases in steps beyond the original
context (Mistral AI 2025)."""

from dataclasses import replace
from typing import Any

from onward.base.errors import UserError
from onward.config.attention_options import LogScale, QueryScale
from onward.config.decoder import DecoderConfig, SelfAttention
from onward.families import HF, llama, mistral, require, with_defaults
from onward.families._rope import rope_table
from onward.families.llama import shape

ARCHITECTURES = {"ministral3": "Ministral3ForCausalLM"}
SOURCE = "arXiv:2601.08584"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "ministral-3-3b": shape(3072, 9216, 26, 32, 8) | {"tie_word_embeddings": True},
    "ministral-3-8b": {},
    "ministral-3-14b": shape(5120, 16_384, 40, 32, 8) | {"rope_theta": 1e9},
}
ANCESTORS = {"ministral-3": "ministral-8b", "ministral-3-14b": "ministral-3-8b"}
BETA = "llama_4_scaling_beta"
YARN = {"type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, BETA: 0.1}
DEFAULTS = shape(4096, 14_336, 34, 32, 8) | {
    "vocab_size": 131_072,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
ROPE = YARN | {"rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384}
names = llama.names


def config(hf: HF) -> DecoderConfig:
    hf = scaled(with_defaults(hf, DEFAULTS), ROPE)
    c = mistral.config(hf)
    return replace(c, attention=replace(require(c.attention, SelfAttention), query_scale=log_scale(hf)))


def scaled(hf: HF, default: HF) -> HF:
    """Return `hf` with the rotary positions `default`, unless it has its own; empty rope_parameters: no scaling."""
    given = hf.get("rope_parameters") is not None or hf.get("rope_scaling")
    return hf if given else with_defaults({"rope_parameters": default}, hf)


def log_scale(hf: HF) -> LogScale:
    """Return the factor of the queries, which config.json stores with the keys of the rotary positions."""
    table = rope_table(hf)
    if not table.get(BETA) or not table.get("original_max_position_embeddings"):
        raise UserError(f"config.json needs {BETA} and original_max_position_embeddings in rope_parameters: add them")
    return LogScale(table[BETA], table["original_max_position_embeddings"])


def with_log_scale(keys: dict[str, Any], part: QueryScale | None) -> dict[str, Any]:
    """Return the keys of a config.json for rotary positions, including the keys for the factor of the queries."""
    factor = require(part, LogScale)
    own = {BETA: factor.weight, "original_max_position_embeddings": factor.original}
    return keys | {name: keys[name] | own for name in ("rope_parameters", "rope_scaling") if name in keys}


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return with_log_scale(mistral.to_hf(c), require(c.attention, SelfAttention).query_scale)
