"""Hunyuan A13B: Hunyuan with experts and a shared expert (Tencent 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, Experts, Gated, at
from onward.families import HF, Row, hunyuan_v1_dense, require, with_defaults
from onward.families._experts import mixture_names
from onward.families.llama import shape

ARCHITECTURES = {"hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM"}
SOURCE = "huggingface.co/tencent/Hunyuan-A13B-Instruct"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "hunyuan-a13b": hunyuan_v1_dense.RELEASED
    | shape(4096, 3072, 32, 32, 8)
    | {"vocab_size": 128_167, "num_experts": 64, "moe_topk": 8, "max_position_embeddings": 32_768},
}
ANCESTORS = {"hunyuan-a13b": "hunyuan-7b"}


def config(hf: HF) -> DecoderConfig:
    c = hunyuan_v1_dense.config(with_defaults({"mlp_bias": False}, hf))
    top_k = of_layers(hf, "moe_topk", hf.get("num_experts_per_tok", 1), c)
    fixed = {"moe_intermediate_size": c.d_ff, "num_shared_expert": 1}
    for key, value in fixed.items():
        if {*of_layers(hf, key, value, c)} != {value}:
            raise UserError(f"config.json has {key} {hf[key]}: Onward supports only {value} in each layer")
    count = of_layers(hf, "num_experts", hf.get("num_local_experts", 1), c)
    act = require(c.mlp, Gated).act
    return replace(c, mlp=tuple(Experts(n, k, d_shared=c.d_ff, act=act) for n, k in zip(count, top_k)))


def of_layers(hf: HF, key: str, default: int, c: DecoderConfig) -> list[int]:
    """Return a number for each layer, from a key with either one number for all layers or a list."""
    value = hf.get(key, default)
    return [*value] if isinstance(value, list | tuple) else [value] * c.n_layers


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    parts = [require(at(c.mlp, layer), Experts) for layer in range(c.n_layers)]
    top_k = [part.top_k for part in parts]
    return hunyuan_v1_dense.to_hf(replace(c, mlp=Gated(act=parts[0].act))) | {
        "num_experts": parts[0].count,
        "moe_topk": top_k if len({*top_k}) > 1 else top_k[0],
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from hunyuan_v1_dense.names(c)
    yield from mixture_names(c, router="gate.wg", shared="shared_mlp")
