"""ERNIE 4.5 with experts: a softmax router with a bias for the selection, and shared experts (Baidu 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, Gated, SelfAttention, at
from onward.config.routing import SoftmaxRouting
from onward.families import HF, Row, ernie4_5, llama, only, require, with_defaults
from onward.families._experts import mixture_names
from onward.families._interleaved import neighbor_names
from onward.families.llama import shape

ARCHITECTURES = {"ernie4_5_moe": "Ernie4_5_MoeForCausalLM"}
SOURCE = "huggingface.co/baidu/ERNIE-4.5-21B-A3B-PT"
BASE = "model."
IGNORED = r"\.mtp_"  # multi-token prediction
PRESETS: dict[str, HF] = {
    "ernie-4.5-21b-a3b": {},
    "ernie-4.5-300b-a47b": shape(8192, 28_672, 54, 64, 8)
    | {
        "moe_intermediate_size": 3584,
        "moe_k": 8,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 3,
        "tie_word_embeddings": False,
    },
}
ANCESTORS = {"ernie-4.5-21b": "ernie-4.5-0.3b", "ernie-4.5-300b": "ernie-4.5-21b-a3b"}
DEFAULTS = shape(2560, 12_288, 28, 20, 4) | {
    "head_dim": None,
    "moe_intermediate_size": 1536,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}


BIAS = "moe_statics.e_score_correction_bias"  # shape (1, number of experts)


def config(hf: HF) -> DecoderConfig:
    only(hf, use_bias=False)
    given = with_defaults(hf, DEFAULTS)
    c = ernie4_5.config(given)
    width, plain, last = given["moe_intermediate_size"], require(c.mlp, Gated), given["moe_layer_end_index"]
    experts = Experts(
        count=given["moe_num_experts"],
        top_k=given["moe_k"],
        d_ff=width,
        d_shared=given["moe_num_shared_experts"] * width,
        act=plain.act,
        router=SoftmaxRouting(selection_bias=True, min_sum=given["moe_norm_min"]),
    )
    among = range(given["moe_layer_start_index"], c.n_layers if last == -1 else last + 1)
    sparse = [i in among and (i + 1) % given["moe_layer_interval"] == 0 for i in range(c.n_layers)]
    return replace(c, mlp=tuple(experts if one else plain for one in sparse))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    parts = [at(c.mlp, layer) for layer in range(c.n_layers)]
    sparse = [layer for layer, part in enumerate(parts) if isinstance(part, Experts)] or [c.n_layers]
    part = require(at(c.mlp, sparse[0]), Experts)
    width, step = part.d_ff or c.d_ff, sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return llama.keys(c) | {
        "use_bias": require(c.attention, SelfAttention).bias,
        "moe_intermediate_size": width,
        "moe_num_experts": part.count,
        "moe_k": part.top_k,
        "moe_num_shared_experts": part.d_shared // width,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": step,
        "moe_norm_min": part.router.min_sum,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from neighbor_names(c, llama.names(c))
    for their, our, *_ in mixture_names(c, routing_bias=BIAS):
        yield (their, our, (lambda t: t[0], lambda t: t[None])) if BIAS in str(their) else (their, our)
