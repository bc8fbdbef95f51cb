"""SantaCoder and StarCoder, models of code: GPT-2 with multi-query attention (Allal et al. 2023; Li et al. 2023)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig
from onward.families import HF, Row, gpt2, linear, only, with_defaults
from onward.families.bloom import fused_by_group

ARCHITECTURES = {"gpt_bigcode": "GPTBigCodeForCausalLM"}
SOURCE = "arXiv:2301.03988, arXiv:2305.06161"
BASE = "transformer."
IGNORED = r"\.attn\.(masked_)?bias$"
CODE = {"vocab_size": 49_152, "n_positions": 8192}
PRESETS: dict[str, HF] = {
    "santacoder": {"vocab_size": 49_280, "n_positions": 2048, "n_embd": 2048, "n_layer": 24, "n_head": 16},
    "starcoderbase-1b": CODE | {"n_embd": 2048, "n_layer": 24, "n_head": 16},
    "starcoderbase-3b": CODE | {"n_embd": 2816, "n_layer": 36, "n_head": 22},
    "starcoderbase-7b": CODE | {"n_embd": 4096, "n_layer": 42, "n_head": 32},
    "starcoder": CODE | {"n_embd": 6144, "n_layer": 40, "n_head": 48},
}
ANCESTORS = {"santacoder": "gpt2", "starcoder": "santacoder"}
DEFAULTS = {"activation_function": "gelu_pytorch_tanh"}


def config(hf: HF) -> DecoderConfig:
    only(hf, scale_attn_by_inverse_layer_idx=False)
    c = gpt2.config(with_defaults(hf, DEFAULTS))
    hf.get("num_key_value_heads")  # equivalent to multi_query; reading it prevents a warning
    return replace(c, n_kv_heads=1 if hf.get("multi_query", True) else c.n_heads)


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return gpt2.to_hf(c) | {"multi_query": c.n_kv_heads == 1}


def names(c: DecoderConfig) -> Iterator[Row]:
    fused = [fused_by_group(c)] * (c.n_kv_heads > 1)  # the rows are grouped by head: query, key and value of each
    for their, our, *_ in gpt2.names(c):
        if not str(their).endswith((".c_attn.weight", ".c_attn.bias")):
            yield their, our
    for i in range(c.n_layers):
        yield from linear(f"transformer.h.{i}.attn.c_attn", [f"blocks.{i}.attn.{n}" for n in "qkv"], *fused)
