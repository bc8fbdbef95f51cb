"""Architectures of llama.cpp with a mixture of experts. See architectures.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onward.base.errors import UserError
from onward.checkpoint.gguf.architecture import (
    Architecture,
    Parts,
    expert_keys,
    experts,
    layer_norm,
    same_width,
    self_attention,
    window_keys,
    windowed,
)
from onward.checkpoint.gguf.dense import (
    ernie4_5,
    granite,
    granite_keys,
    hunyuan,
    late_norm,
    olmo_keys,
    only_windowed,
    plain,
    qwen3,
    same_epsilon,
)
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.rope import FREQS, LONG, SHORT, rotary
from onward.config.attention_options import SigmoidGate
from onward.config.decoder import DecoderConfig, Experts, Gated, LayerNorm, NoPosition, Sandwich, SelfAttention, at
from onward.config.routing import Routing, SigmoidRouting, SoftmaxRouting
from onward.families.gpt_oss import ClampedExperts
from onward.families.phimoe import SparseMixer

SOFTMAX, SIGMOID = 1, 2  # expert_gating_func


def qwen2moe(keys: Keys, sizes: Parts) -> Parts:
    shared = keys.number("expert_shared_feed_forward_length", 0)
    return plain(keys, sizes) | {"mlp": experts(keys, False, d_shared=shared, shared_gate=True)}


def qwen3moe(keys: Keys, sizes: Parts) -> Parts:
    return qwen3(keys, sizes) | {"mlp": experts(keys, True)}


def gpt_oss(keys: Keys, sizes: Parts) -> Parts:
    mixture = experts(keys, True)
    router = SoftmaxRouting(scale=mixture.router.scale, bias=True)
    mlp = ClampedExperts(mixture.count, mixture.top_k, mixture.d_ff, router, bias=True)
    part = SelfAttention(bias=True, out_bias=True, sinks=True)
    layers = windowed(keys, part, 2, sizes["n_layers"], keys.number("attention.sliding_window"))
    return plain(keys, sizes) | {"attention": layers, "mlp": mlp}


def gpt_oss_keys(c: DecoderConfig) -> dict[str, Any]:
    return window_keys(c) | expert_keys(c)


def routed(keys: Keys, layers: int, gating: int = SOFTMAX) -> tuple[Gated | Experts, ...]:
    """The feed-forward of each layer: dense in the first layers, then experts; `gating` is the default."""
    dense = min(layers, keys.number("leading_dense_block_count", 0))
    return (Gated(),) * dense + (mixture(keys, dense, gating),) * (layers - dense)


def mixture(keys: Keys, layer: int, gating: int) -> Experts:
    """The experts of a layer, as in DeepSeek. The file names the routing; `gating` is the default."""
    width, groups = keys.number("expert_feed_forward_length"), keys.number("expert_group_count", 1) or 1
    shared = keys.number("expert_shared_feed_forward_length", keys.number("expert_shared_count", 0) * width)
    part = experts(keys, bool(keys.get("expert_weights_norm")), d_shared=shared)
    scale = keys.number("expert_weights_scale", 1.0) or 1.0
    kind = keys.number("expert_gating_func", gating) or gating
    router: Routing
    biased = any(keys.has(f"blk.{layer}.exp_probs_b{leaf}") for leaf in ("", ".bias"))
    if kind == SIGMOID:
        used = keys.number("expert_group_used_count", 1) or 1
        router = SigmoidRouting(part.router.renormalize, scale, groups, used, selection_bias=biased)
    elif kind != SOFTMAX or groups > 1:
        raise UserError(f"expert_gating_func is {kind} with {groups} groups of experts, which Onward does not support")
    else:
        router = SoftmaxRouting(part.router.renormalize, scale, selection_bias=biased)
    return replace(part, router=router)


def routed_keys(c: DecoderConfig) -> dict[str, Any]:
    many = at(c.mlp, c.n_layers - 1)
    if not isinstance(many, Experts):
        dense = {"expert_feed_forward_length": c.d_ff, "expert_shared_count": 0}  # required in some architectures
        return dense | {"leading_dense_block_count": c.n_layers}
    sigmoid, width = isinstance(many.router, SigmoidRouting), many.width(c)
    keys = expert_keys(replace(c, mlp=many)) | {
        "leading_dense_block_count": sum(not isinstance(at(c.mlp, layer), Experts) for layer in range(c.n_layers)),
        "expert_shared_count": many.d_shared // width,
        "expert_weights_scale": many.router.scale,
        "expert_weights_norm": many.router.renormalize,
        "expert_gating_func": SIGMOID if sigmoid else SOFTMAX,
    }
    if sigmoid and many.router.n_groups > 1:
        groups = {"expert_group_count": many.router.n_groups}
        keys |= groups | {"expert_group_used_count": many.router.top_k_groups}
    return keys


def with_norm(keys: Keys, sizes: Parts) -> Parts:
    """DeepSeek's routed experts after attention with a norm for queries and keys."""
    mlp = routed(keys, sizes["n_layers"], SIGMOID)
    return plain(keys, sizes) | {"attention": self_attention(keys, qk_norm="head"), "mlp": mlp}


def glm4moe(keys: Keys, sizes: Parts) -> Parts:
    norm = "head" if keys.has("blk.0.attn_q_norm.weight") else "none"
    return with_norm(keys, sizes) | {"attention": self_attention(keys, qk_norm=norm)}


def dots1(keys: Keys, sizes: Parts) -> Parts:
    return with_norm(keys, sizes) | as_many_values(sizes)


def as_many_values(sizes: Parts) -> Parts:
    if sizes["n_kv_heads"] != sizes["n_heads"]:
        raise UserError("llama.cpp requires as many key/value heads as query heads in this architecture")
    return {}


def afmoe(keys: Keys, sizes: Parts) -> Parts:
    layers, parts = sizes["n_layers"], with_norm(keys, sizes)
    part = replace(parts["attention"], gate=SigmoidGate())
    window = keys.number("attention.sliding_window", 0)
    rotated = [bool((layer + 1) % 4) for layer in range(layers)]  # regardless of the pattern of windows
    return parts | {
        "attention": windowed(keys, part, 4, layers, window) if window else part,
        "position": tuple(parts["position"] if one else NoPosition() for one in rotated),
        "block": Sandwich(),
        "embed_scale": sizes["d_model"] ** 0.5,
    }


def gate_of_output(c: DecoderConfig) -> dict[str, str]:
    return {"attn_gate": "attn.gate"}


def exaone_moe(keys: Keys, sizes: Parts) -> Parts:
    return with_norm(keys, sizes) | only_windowed(keys, sizes, 4, None, qk_norm="head")


def windowed_experts(c: DecoderConfig) -> dict[str, Any]:
    return routed_keys(c) | window_keys(c)


def minimax_m2(keys: Keys, sizes: Parts) -> Parts:
    part = experts(keys, True)
    router = SigmoidRouting() if keys.number("expert_gating_func") == SIGMOID else SoftmaxRouting(selection_bias=True)
    mlp = Experts(part.count, part.top_k, router=router)
    return plain(keys, sizes) | {"attention": self_attention(keys, qk_norm="width"), "mlp": mlp}


def minimax_m2_keys(c: DecoderConfig) -> dict[str, Any]:
    part = at(c.mlp, 0)
    sigmoid = isinstance(part, Experts) and isinstance(part.router, SigmoidRouting)
    return same_width(c) | {"expert_gating_func": SIGMOID if sigmoid else SOFTMAX}


def olmoe(keys: Keys, sizes: Parts) -> Parts:
    part = experts(keys, False)
    mlp = Experts(part.count, part.top_k, router=SoftmaxRouting(renormalize=False))
    parts = plain(keys, sizes) | {"attention": self_attention(keys, qk_norm="width"), "mlp": mlp}
    return parts | as_many_values(sizes)


def granitemoe(keys: Keys, sizes: Parts) -> Parts:
    part = experts(keys, True, d_shared=keys.number("expert_shared_feed_forward_length", 0))
    mlp = Experts(part.count, part.top_k, d_shared=part.d_shared)
    return granite(keys, sizes) | {"mlp": mlp}


def ernie4_5_moe(keys: Keys, sizes: Parts) -> Parts:
    dense, layers = keys.number("leading_dense_block_count", 0), sizes["n_layers"]
    if keys.number("interleave_moe_layer_step") != 1:
        raise UserError("interleave_moe_layer_step is not 1, but llama.cpp loads the dense layers only with 1")
    biased = keys.has(f"blk.{dense}.exp_probs_b.bias")
    part = experts(keys, True, d_shared=keys.number("expert_shared_feed_forward_length", 0))
    part = replace(part, router=SoftmaxRouting(selection_bias=biased))
    return ernie4_5(keys, sizes) | {"mlp": (Gated(),) * dense + (part,) * (layers - dense)}


def ernie4_5_moe_keys(c: DecoderConfig) -> dict[str, Any]:
    keys = routed_keys(c)
    ours = ("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length")
    kept = {key: value for key, value in keys.items() if key in (*ours, "leading_dense_block_count")}
    return kept | {"interleave_moe_layer_step": 1}


def hunyuan_moe(keys: Keys, sizes: Parts) -> Parts:
    """Experts of width d_ff; without a key for its width, the shared expert is equally wide."""
    shared = keys.number("expert_shared_feed_forward_length", 0) or sizes["d_ff"]
    mlp = Experts(keys.number("expert_count"), keys.number("expert_used_count"), d_shared=shared)
    return hunyuan(keys, sizes) | {"mlp": mlp}


def hunyuan_moe_keys(c: DecoderConfig) -> dict[str, Any]:
    return same_width(c) | {"expert_shared_count": 1}


def dbrx(keys: Keys, sizes: Parts) -> Parts:
    return layer_norm(keys, bias=False) | {
        "position": rotary(keys, sizes),
        "attention": SelfAttention(clip=keys.number("attention.clamp_kqv") or None),
        "mlp": Experts(keys.number("expert_count"), keys.number("expert_used_count")),
    }


def dbrx_keys(c: DecoderConfig) -> dict[str, Any]:
    return {"attention.clamp_kqv": 0.0} | olmo_keys(c) | same_width(c)


def dbrx_layer(c: DecoderConfig) -> dict[str, str]:
    return {"attn_output_norm": "mlp_norm", "ffn_norm": ""}


def phimoe(keys: Keys, sizes: Parts) -> Parts:
    """The parts of the published model; llama.cpp instead computes an RMSNorm with a bias, and a softmax of the chosen
    experts' logits."""
    out_bias = keys.has("blk.0.attn_output.bias")
    return plain(keys, sizes) | {
        "norm": LayerNorm(keys.number("attention.layer_norm_rms_epsilon")),
        "attention": self_attention(keys, out_bias=out_bias),
        "mlp": Experts(keys.number("expert_count"), keys.number("expert_used_count"), router=SparseMixer()),
        "head_bias": keys.has("output.bias"),
    }


def phimoe_keys(c: DecoderConfig) -> dict[str, Any]:
    return same_width(c) | same_epsilon(c)


ALL = (
    Architecture("qwen2moe", ("qwen2_moe",), qwen2moe, expert_keys, head="required"),
    Architecture("qwen3moe", ("qwen3_moe",), qwen3moe, expert_keys, free_heads=True),
    Architecture("gpt-oss", ("gpt_oss",), gpt_oss, gpt_oss_keys, head="required", free_heads=True, layer=late_norm),
    Architecture(
        "glm4moe",
        ("glm4_moe", "solar_open"),
        glm4moe,
        routed_keys,
        free_heads=True,
        partial=True,
        layer=late_norm,
        needs=("exp_probs_b.bias", "ffn_up_shexp.weight"),
    ),
    Architecture(
        "dots1", ("dots1",), dots1, routed_keys, head="required", free_heads=True, needs=("ffn_up_shexp.weight",)
    ),
    Architecture(
        "exaone-moe",
        ("exaone_moe",),
        exaone_moe,
        windowed_experts,
        head="required",
        free_heads=True,
        factors=(FREQS,),
        needs=("ffn_up_shexp.weight",),
    ),
    Architecture(
        "afmoe", ("afmoe",), afmoe, windowed_experts, free_heads=True, layer=gate_of_output, needs=("exp_probs_b.bias",)
    ),
    Architecture(
        "hy_v3",
        ("hy_v3",),
        with_norm,
        routed_keys,
        free_heads=True,
        routing_bias="exp_probs_b",
        needs=("ffn_up_shexp.weight",),  # without this tensor, llama.cpp adds the input instead
    ),
    Architecture(
        "minimax-m2", ("minimax_m2",), minimax_m2, minimax_m2_keys, head="required", free_heads=True, partial=True
    ),
    Architecture("olmoe", ("olmoe",), olmoe, same_width, head="required"),
    Architecture(
        "granitemoe",
        ("granitemoe", "granitemoeshared"),
        granitemoe,
        granite_keys,
        interleaved=True,
        free_heads=True,
        factors=(FREQS, LONG, SHORT),
    ),
    Architecture("ernie4_5-moe", ("ernie4_5_moe",), ernie4_5_moe, ernie4_5_moe_keys, interleaved=True, free_heads=True),
    Architecture("hunyuan-moe", ("hunyuan_v1_moe",), hunyuan_moe, hunyuan_moe_keys, free_heads=True),
    Architecture("dbrx", ("dbrx",), dbrx, dbrx_keys, layer=dbrx_layer, fused=True, head="required"),
    Architecture(
        "phimoe",
        ("phimoe",),
        phimoe,
        phimoe_keys,
        head="required",
        factors=(LONG, SHORT),
        differences=("norm (layer_norm here, rms_norm there)", "mlp.router (sparse_mixer here, softmax there)"),
    ),
)
