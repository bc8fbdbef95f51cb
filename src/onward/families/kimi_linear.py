"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the others, and DeepSeek-V3's
experts (Kimi Team 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import (
    DecoderConfig,
    Experts,
    GatedDeltaNet,
    LatentAttention,
    NoPosition,
    PreNorm,
    RMSNorm,
    at,
)
from onward.config.routing import SigmoidRouting
from onward.families import HF, Fix, Row, deepseek_v2, deepseek_v3, linear, renamed, require, with_defaults
from onward.families._experts import dense_or_sparse, experts, mixture_keys
from onward.families._layers import FULL
from onward.families._recurrent import LINEAR, layers, one, types, without_attention
from onward.families._rope import a_rotary

ARCHITECTURES = {"kimi_linear": "KimiLinearForCausalLM"}
SOURCE = "arXiv:2510.26692"
BASE = "model."
IGNORED = ""
ALSO = {".mlp.": ".block_sparse_moe."}  # transformers 5 saves layers without experts under this name
PRESETS: dict[str, HF] = {
    "kimi-linear-48b-a3b": {"layer_types": [FULL if i % 4 == 3 or i == 26 else LINEAR for i in range(27)]}
}
ANCESTORS = {"kimi-linear": "deepseek-v3"}
OWN = {
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}
DEFAULTS = {
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "n_routed_experts": 256,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
}
DELTA = {"n_heads": ("num_heads", 32), "d_key": ("head_dim", 128), "d_conv": ("short_conv_kernel_size", 4)}
NEW = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
FLAT: Fix = (lambda t: t.flatten(), lambda t: t[None, None, :, None])


def config(hf: HF) -> DecoderConfig:
    given, old = with_defaults(renamed(hf, OWN), deepseek_v3.DEFAULTS | DEFAULTS), hf.get("linear_attn_config") or {}
    sizes: dict[str, Any] = {our: old.get(key, hf.get(NEW[key], default)) for our, (key, default) in DELTA.items()}
    router = SigmoidRouting(
        *(given[key] for key in ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"))
    )
    c = deepseek_v2.decoder(given, router)
    delta = GatedDeltaNet(
        **sizes, decay="element", gate="sigmoid", rank=sizes["d_key"], norm_eps=require(c.norm, RMSNorm).eps
    )
    full = [i - 1 for i in old["full_attn_layers"]] if "full_attn_layers" in old else range(4, c.n_layers, 4)
    default = [FULL if i in full else LINEAR for i in range(c.n_layers)]
    parts = {FULL: require(c.attention, LatentAttention), LINEAR: delta}
    old.get("kda_layers")
    return replace(c, position=NoPosition(), attention=layers(hf, c.n_layers, default, parts))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    require(c.block, PreNorm)
    latent, delta = one(c, LatentAttention, LatentAttention()), one(c, GatedDeltaNet, GatedDeltaNet())
    keys = deepseek_v2.to_hf(replace(c, attention=latent, position=a_rotary(c)))
    others = {*OWN.values(), "topk_method", "first_k_dense_replace", "rope_parameters", "rope_theta", "rope_scaling"}
    (heads, _), (width, _) = delta.counts(c), delta.widths(c)
    own = {"n_heads": heads, "d_key": width, "d_conv": delta.d_conv}
    new = {NEW[key]: own[our] for our, (key, _) in DELTA.items()}
    mixture = mixture_keys(c, {own: deepseek for own, deepseek in OWN.items() if own != "num_local_experts"})
    del mixture["first_k_dense_replace"]
    shared = {key: value for key, value in keys.items() if key not in others}
    context = {"model_max_length": c.context_length, "layer_types": types(c)}
    return shared | mixture | new | dense_or_sparse(c) | context


def names(c: DecoderConfig) -> Iterator[Row]:
    latent = replace(c, attention=one(c, LatentAttention, LatentAttention()))
    for row in without_attention(deepseek_v2.names(latent), c):
        their = str(row[0] if isinstance(row[0], str) else row[0][0])
        if ".mlp." not in their or ("_proj" in their and ".experts." not in their and "shared" not in their):
            yield row[:2]
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}", f"blocks.{i}"
        if isinstance(at(c.attention, i), GatedDeltaNet):
            yield from delta_names(f"{their}.self_attn", f"{our}.attn")
        if isinstance(part := at(c.mlp, i), Experts):
            their, our = f"{their}.block_sparse_moe", f"{our}.mlp"
            yield from linear(f"{their}.gate", f"{our}.router")
            yield f"{their}.gate.e_score_correction_bias", f"{our}.router.routing_bias"
            yield from experts(f"{their}.experts", our, part.count, ("w1", "w3", "w2"))
            for name in "gate", "up", "down":
                yield from linear(f"{their}.shared_experts.{name}_proj", f"{our}.shared.{name}")


def delta_names(their: str, our: str) -> Iterator[Row]:
    for name in "q", "k", "v":
        yield from linear(f"{their}.{name}_proj", f"{our}.{name}")
        yield from linear(f"{their}.{name}_conv1d", f"{our}.{name}_conv")
    for name, own in {"f": "a", "g": "z"}.items():
        for letter, index in {"a": 0, "b": 1}.items():
            yield from linear(f"{their}.{name}_{letter}_proj", f"{our}.{own}.{index}")
    yield from linear(f"{their}.b_proj", f"{our}.b")
    yield f"{their}.A_log", f"{our}.a_log", FLAT
    yield f"{their}.dt_bias", f"{our}.dt_bias"
    yield from linear(f"{their}.o_norm", f"{our}.head_norm")
    yield from linear(f"{their}.o_proj", f"{our}.out")
