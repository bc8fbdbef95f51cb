"""DeepSeek-V2: Mixtral with latent attention, many small experts, and shared experts (DeepSeek-AI 2024)."""

from collections.abc import Iterator
from typing import Any

from onward.base.errors import UserError
from onward.base.fields import nearest
from onward.config.decoder import DecoderConfig, Gated, LatentAttention, RMSNorm, Rotary, at
from onward.config.routing import Routing, SoftmaxRouting
from onward.config.scaling import YaRNScaling, yarn_magnitude
from onward.families import (
    ACTIVATIONS,
    HF,
    Row,
    activation,
    interleaved,
    linear,
    llama,
    only,
    require,
    sizes,
    with_defaults,
)
from onward.families._experts import mixture, mixture_keys, mixture_names
from onward.families._rope import rope, rope_table, rotary

ARCHITECTURES = {"deepseek_v2": "DeepseekV2ForCausalLM"}
SOURCE = "arXiv:2405.04434"
BASE = "model."
IGNORED = r""
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
RELEASED = {
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163_840,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
PRESETS: dict[str, HF] = {
    "deepseek-v2-lite": {
        **RELEASED,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
    },
    "deepseek-v2": {
        **RELEASED,
        "hidden_size": 5120,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "n_routed_experts": 160,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 16.0,
    },
}
ANCESTORS = {"deepseek-v2": "mixtral-8x7b", "deepseek-v2-lite": "deepseek-v2"}
DEFAULTS = {"vocab_size": 102_400, "n_shared_experts": 2, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0}
SIZES = {our: row for our, row in llama.SIZES.items() if our not in ("n_kv_heads", "d_head")}
ATTENTION = {
    "d_latent": ("kv_lora_rank", 512),
    "d_query_latent": ("q_lora_rank", 1536),
    "d_nope": ("qk_nope_head_dim", 128),
    "d_rope": ("qk_rope_head_dim", 64),
    "d_value": ("v_head_dim", 128),
    "bias": ("attention_bias", False),
}
METHODS = "greedy", "group_limited_greedy"


def config(hf: HF) -> DecoderConfig:
    hf = with_defaults(hf, DEFAULTS | {"n_routed_experts": 64, "moe_intermediate_size": 1407})
    only(hf, scoring_func="softmax", norm_topk_prob=False, mlp_bias=False)
    method = hf.get("topk_method", METHODS[0])
    if method not in METHODS:
        raise UserError(f"config.json has topk_method {method!r}: {nearest(str(method), METHODS)}")
    groups = hf.get("n_group"), hf.get("topk_group")
    return decoder(
        hf, SoftmaxRouting(False, hf["routed_scaling_factor"], *(groups if method == METHODS[1] else (1, 1)))
    )


def decoder(hf: HF, router: Routing) -> DecoderConfig:
    """The decoder of DeepSeek V2 or V3; `hf` already has the family's defaults for missing keys."""
    only(hf, moe_layer_freq=1)
    # latent attention has no such sizes; reading the keys prevents a warning
    for key in "head_dim", "num_key_value_heads":
        hf.get(key)
    act: Any = hf.get("hidden_act", "silu")
    act = ACTIVATIONS.get(act, act)
    size = sizes(hf, SIZES)
    position: Any = rotary(hf, context=size["context_length"])
    attention = sizes(hf, ATTENTION)
    mscale_all_dim = rope_table(hf).get("mscale_all_dim")
    if position.scaling and mscale_all_dim:
        magnitude = yarn_magnitude(position.scaling.factor, mscale_all_dim)
        attention["scale"] = (attention["d_nope"] + attention["d_rope"]) ** -0.5 * magnitude**2
    return DecoderConfig(
        **size,
        d_head=size["d_model"] // size["n_heads"],
        position=position,
        attention=LatentAttention(**attention),
        mlp=mixture(hf, router, Gated(act=act), size["n_layers"]),
        norm=RMSNorm(eps=hf.get("rms_norm_eps", 1e-6)),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    attention, keys = require(c.attention, LatentAttention), mixture_keys(c)
    return (
        {their: getattr(c, our) for our, (their, _) in SIZES.items()}
        | {their: getattr(attention, our) for our, (their, _) in ATTENTION.items()}
        | keys
        | {
            **rope_keys(c),
            "num_key_value_heads": c.n_heads,
            "q_lora_rank": attention.d_query_latent or None,
            "topk_method": METHODS[keys["n_group"] > 1],
            "hidden_act": activation(at(c.mlp, 0)),
            "rms_norm_eps": require(c.norm, RMSNorm).eps,
        }
    )


def rope_keys(c: DecoderConfig) -> dict[str, Any]:
    """Return the keys for the rotary positions. YaRN's mscale and mscale_all_dim are computed from the scale of the
    scores."""
    keys, attention = rope(c.position), require(c.attention, LatentAttention)
    if attention.scale is None:
        return keys
    scaling = require(require(c.position, Rotary).scaling, YaRNScaling)
    if unit := yarn_magnitude(scaling.factor) - 1:
        magnitude = (abs(attention.scale) * (attention.d_nope + attention.d_rope) ** 0.5) ** 0.5
        weights = {"mscale_all_dim": round((magnitude - 1) / unit, 9)}
        if scaling.attention_factor is not None:
            weights["mscale"] = round((magnitude * scaling.magnitude - 1) / unit, 9)
        for name in "rope_parameters", "rope_scaling":
            keys[name] = keys[name] | weights
    return keys


def names(c: DecoderConfig) -> Iterator[Row]:
    rows = {str(row[1]): row for row in (*llama.names(c), *own_names(c))}
    yield from rows.values()


def own_names(c: DecoderConfig) -> Iterator[Row]:
    """Yield the rows that Llama's mapping lacks, and rows that replace some of Llama's."""
    part = require(c.attention, LatentAttention)
    queries = interleaved(part.d_nope + part.d_rope, part.d_rope, part.d_nope)
    keys = interleaved(part.d_latent + part.d_rope, part.d_rope, part.d_latent)
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}.self_attn", f"blocks.{i}.attn"
        yield from linear(f"{their}.{'q_b_proj' if part.d_query_latent else 'q_proj'}", f"{our}.q", queries)
        yield from linear(f"{their}.q_a_proj", f"{our}.q_down")
        yield from linear(f"{their}.q_a_layernorm", f"{our}.q_norm")
        yield from linear(f"{their}.kv_a_proj_with_mqa", f"{our}.kv_down", keys)
        yield from linear(f"{their}.kv_a_layernorm", f"{our}.kv_norm")
        yield from linear(f"{their}.kv_b_proj", f"{our}.kv")
    yield from mixture_names(c)
