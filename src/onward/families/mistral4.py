"""Mistral Small 4: DeepSeek-V3 with softmax routing and Ministral 3's scaling of queries (Mistral AI 2026)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, LatentAttention
from onward.config.routing import SoftmaxRouting
from onward.families import HF, Row, deepseek_v2, deepseek_v3, only, require, with_defaults
from onward.families._experts import FUSED_ROWS, ROUTER
from onward.families._rope import rope_table
from onward.families.llama import shape
from onward.families.ministral3 import YARN, log_scale, scaled, with_log_scale

ARCHITECTURES = {"mistral4": "Mistral4ForCausalLM"}
SOURCE = "huggingface.co/mistralai/Mistral-Small-4-119B-2603"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"mistral-small-4-119b": {}}
ANCESTORS = {"mistral-small-4": "deepseek-v3"}
DEFAULTS = shape(4096, 12_288, 36, 32, 32) | {
    "vocab_size": 131_072,
    "max_position_embeddings": 1_048_576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
}
ROPE = YARN | {"rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
FRACTION = "partial_rotary_factor"  # fraction of the whole head; Onward's fraction refers to the rotated part, and is 1


def config(hf: HF) -> DecoderConfig:
    hf = scaled(with_defaults(hf, DEFAULTS), ROPE)
    table, part = rope_table(hf), hf.get("qk_rope_head_dim", 64)
    head = hf["qk_nope_head_dim"] + part
    only(hf, head_dim=hf.get("head_dim") and head)  # transformers' fraction refers to head_dim
    given = table.pop(FRACTION, hf.get(FRACTION, part / head))
    if int(head * given) != part:
        raise UserError(f"config.json has {FRACTION} {given}: Onward supports only qk_rope_head_dim / {head}")
    whole = with_defaults({"rope_parameters": table, "rope_scaling": None, FRACTION: 1.0}, hf)
    renormalize, scale, groups, kept = (hf[key] for key in ROUTER)
    c = deepseek_v2.decoder(whole, SoftmaxRouting(renormalize, scale, groups, kept, group_top_k=2))
    latent = replace(require(c.attention, LatentAttention), query_scale=log_scale(hf))
    return deepseek_v3.paired(hf, replace(c, attention=latent))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    part = require(c.attention, LatentAttention)
    keys = {key: value for key, value in deepseek_v3.to_hf(c).items() if key != "topk_method"}
    fraction = {FRACTION: part.d_rope / (part.d_nope + part.d_rope)}
    tables = {name: keys[name] | fraction for name in ("rope_parameters", "rope_scaling") if name in keys}
    return with_log_scale(keys | tables | fraction, part.query_scale)


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from (row for row in deepseek_v3.names(c) if not isinstance(row[0], list))  # these files stack the experts
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}.mlp.experts", f"blocks.{i}.mlp"
        yield f"{their}.gate_up_proj", [f"{our}.gate", f"{our}.up"], FUSED_ROWS
        yield f"{their}.down_proj", f"{our}.down"
