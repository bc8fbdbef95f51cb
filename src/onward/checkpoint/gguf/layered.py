"""Architectures of llama.cpp whose layers differ in windows, rotary positions, heads or feed-forwards. See
architectures.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from onward.base.errors import UserError
from onward.checkpoint.gguf.architecture import (
    Architecture,
    Parts,
    expert_keys,
    experts,
    layer_norm,
    rms,
    self_attention,
    window_keys,
    windowed,
)
from onward.checkpoint.gguf.dense import granite, granite_keys, plain
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.rope import FREQS, LONG, SHORT, fraction, rotary
from onward.checkpoint.gguf.sparse import SIGMOID, gate_of_output, routed, routed_keys
from onward.config.attention_options import LogScale, SoftplusGate
from onward.config.decoder import (
    DecoderConfig,
    Experts,
    Gated,
    NoPosition,
    RMSNorm,
    Rotary,
    SelfAttention,
    SharedNorm,
    at,
)
from onward.config.routing import SigmoidRouting
from onward.families import Row
from onward.families.cohere2_moe import HALVED
from onward.families.llama4_text import InputWeightedExperts

CHUNK = 8192  # positions of a chunk in Llama 4, regardless of the file's keys


def a_mixture(c: DecoderConfig) -> Experts | None:
    """The experts of the first layer that has experts."""
    parts = (at(c.mlp, layer) for layer in range(c.n_layers))
    return next((part for part in parts if isinstance(part, Experts)), None)


def own_expert_keys(c: DecoderConfig) -> dict[str, Any]:
    many = a_mixture(c)
    return expert_keys(replace(c, mlp=many)) if many else {}


def local_theta(c: DecoderConfig) -> dict[str, Any]:
    """The key for the base of the rotation in the layers with a window."""
    turns = [at(c.position, layer) for layer in range(c.n_layers) if at(c.attention, layer).window]
    return {"rope.freq_base_swa": turns[0].theta} if turns and isinstance(turns[0], Rotary) else {}


def pattern_keys(c: DecoderConfig) -> dict[str, Any]:
    """The keys of windows, for architectures where llama.cpp needs them even without a window."""
    own = {"attention.sliding_window": c.context_length, "attention.sliding_window_pattern": [False] * c.n_layers}
    return own | window_keys(c)


def mimo2(keys: Keys, sizes: Parts) -> Parts:
    layers, parts = range(sizes["n_layers"]), plain(keys, sizes)
    local, kv_heads = (
        keys.by_layer(f"attention.{key}", len(layers)) for key in ("sliding_window_pattern", "head_count_kv")
    )
    width = keys.number("attention.value_length", sizes["d_head"])
    window = keys.number("attention.sliding_window")
    part = self_attention(
        keys,
        d_value=0 if width == sizes["d_head"] else width,
        value_scale=keys.number("attention.value_scale", 1.0) or 1.0,
    )
    many = replace(experts(keys, True), router=SigmoidRouting())
    if not any(local):
        raise UserError("no layer has a window, but llama.cpp requires one in this architecture")

    def feed_forward(i: int) -> Gated | Experts:
        if not keys.has(f"blk.{i}.ffn_gate_inp.weight"):
            return Gated()
        biased = keys.has(f"blk.{i}.exp_probs_b.bias")
        return replace(many, router=SigmoidRouting(selection_bias=biased))

    turned = parts["position"]
    near = Rotary(keys.number("rope.freq_base_swa", 10_000.0), turned.fraction)
    return parts | {
        "attention": tuple(
            replace(
                part,
                window=window if local[i] else 0,
                n_kv_heads=kv_heads[i],
                sinks=keys.has(f"blk.{i}.attn_sinks.weight"),
            )
            for i in layers
        ),
        "position": tuple(near if one else turned for one in local),
        "mlp": tuple(map(feed_forward, layers)),
    }


def mimo2_keys(c: DecoderConfig) -> dict[str, Any]:
    parts = [part for i in range(c.n_layers) if isinstance(part := at(c.attention, i), SelfAttention)]
    if len(parts) < c.n_layers:
        return {}
    heads = [part.heads(c) for part in parts]
    return (
        own_expert_keys(c)
        | pattern_keys(c)
        | local_theta(c)
        | {
            "attention.head_count_kv": [one.n_kv_heads for one in heads],
            "attention.value_length": heads[0].d_value,
            "attention.value_scale": parts[0].value_scale,
        }
    )


def llama4(keys: Keys, sizes: Parts) -> Parts:
    layers, parts = range(sizes["n_layers"]), plain(keys, sizes)
    if keys.number("attention.sliding_window", CHUNK) == 0:
        raise UserError("attention.sliding_window is 0, but llama.cpp requires a window in this architecture")
    count, step = keys.number("expert_count"), keys.number("interleave_moe_layer_step")
    width = keys.number("expert_feed_forward_length")
    router = SigmoidRouting(False, selection_bias=False)
    many = InputWeightedExperts(count, keys.number("expert_used_count"), width, router, d_shared=width)
    pattern = keys.get("attention.sliding_window_pattern", 4)
    near = pattern if isinstance(pattern, list) else [i % pattern < pattern - 1 for i in layers]
    rotated = [(i + 1) % 4 > 0 for i in layers]
    eps = keys.number("attention.layer_norm_rms_epsilon")
    normed = {} if count == 128 else {"qk_norm": "head", "qk_norm_part": RMSNorm(eps, weight=False)}
    turned, still = self_attention(keys, **normed), self_attention(keys, query_scale=LogScale(0.1, CHUNK, 1))
    return parts | {
        "attention": tuple(
            replace(turned if one else still, window=CHUNK * bool(local), chunked=bool(local))
            for one, local in zip(rotated, near, strict=True)
        ),
        "position": tuple(parts["position"] if one else NoPosition() for one in rotated),
        "mlp": tuple(many if step and (i + 1) % step == 0 else Gated() for i in layers),
    }


def llama4_keys(c: DecoderConfig) -> dict[str, Any]:
    sparse = [i for i in range(c.n_layers) if isinstance(at(c.mlp, i), Experts)]
    local = [bool(at(c.attention, i).window) for i in range(c.n_layers)]
    usual = [(i + 1) % 4 > 0 for i in range(c.n_layers)]
    windows = {} if local == usual else {"attention.sliding_window_pattern": local}
    return own_expert_keys(c) | windows | {"interleave_moe_layer_step": sparse[0] + 1 if sparse else 0}


def mellum(keys: Keys, sizes: Parts) -> Parts:
    parts = plain(keys, sizes)
    layers = windowed(keys, self_attention(keys, qk_norm="head"), 4, sizes["n_layers"], 0)
    turned = parts["position"]
    plain_turned = replace(turned, scaling=None)
    return parts | {
        "attention": layers,
        "position": tuple(plain_turned if part.window else turned for part in layers),
        "mlp": experts(keys, True),
    }


def windows_and_experts(c: DecoderConfig) -> dict[str, Any]:
    return window_keys(c) | own_expert_keys(c)


@dataclass(frozen=True)
class Cohere2MoeArchitecture(Architecture):
    """llama.cpp averages the outputs of the routed experts and of the shared expert; here, the weights contain the
    factor 1/2."""

    def names(self, c: DecoderConfig) -> Iterator[Row]:
        for row in super().names(c):
            halved = str(row[0]).endswith("ffn_down_shexp.weight")
            yield (row[0], row[1], HALVED) if halved else row


def cohere2moe(keys: Keys, sizes: Parts) -> Parts:
    n = sizes["n_layers"]
    norm = rms(keys)["norm"] if "attention.layer_norm_rms_epsilon" in keys else layer_norm(keys, bias=False)["norm"]
    pattern = keys.get("attention.sliding_window_pattern", 4)
    near = pattern if isinstance(pattern, list) else [i % pattern > 0 for i in range(n)]
    window, first = keys.number("attention.sliding_window"), keys.number("leading_dense_block_count")
    rotated = [bool(local) or i < first for i, local in enumerate(near[:n])]
    mlp = tuple(averaged(part, 0.5) for part in routed(keys, n, SIGMOID))
    turned = rotary(keys, sizes)
    return {
        "norm": norm,
        "attention": tuple(self_attention(keys, window=window * bool(local)) for local in near[:n]),
        "position": tuple(turned if one else NoPosition() for one in rotated),
        "mlp": mlp,
        "block": SharedNorm(),
        "logit_scale": keys.number("logit_scale"),
    }


def averaged(part: Any, factor: float) -> Any:
    """`part` with its routing weights multiplied by `factor`, if it also has a shared expert."""
    if not getattr(part, "d_shared", 0):
        return part
    return replace(part, router=replace(part.router, scale=part.router.scale * factor))


def cohere2moe_keys(c: DecoderConfig) -> dict[str, Any]:
    doubled = replace(c, mlp=tuple(averaged(at(c.mlp, layer), 2.0) for layer in range(c.n_layers)))
    return routed_keys(doubled) | pattern_keys(c) | {"logit_scale": c.logit_scale, "rope.scaling.type": "none"}


def granite_swa(keys: Keys, sizes: Parts) -> Parts:
    if keys.number("expert_shared_feed_forward_length", 0):
        raise UserError(
            "expert_shared_feed_forward_length is not 0, which Onward does not support in this architecture"
        )
    n, parts = sizes["n_layers"], granite(keys, sizes)
    rotated = keys.by_layer("attention.rope_pattern", n) if "attention.rope_pattern" in keys else [True] * n
    layers = windowed(keys, replace(parts["attention"], sinks=True), 4, n, keys.number("attention.sliding_window"))
    position = tuple(parts["position"] if one else NoPosition() for one in rotated)
    return parts | {"attention": layers, "position": position}


def granite_swa_keys(c: DecoderConfig) -> dict[str, Any]:
    rotated = [not isinstance(at(c.position, layer), NoPosition) for layer in range(c.n_layers)]
    keys = granite_keys(c) | pattern_keys(c) | {"attention.rope_pattern": rotated}
    return {key: value for key, value in keys.items() if key != "rope.scaling.finetuned"}


def laguna(keys: Keys, sizes: Parts) -> Parts:
    n, parts = sizes["n_layers"], plain(keys, sizes)
    heads, width = keys.by_layer("attention.head_count", n), sizes["d_head"]
    window, pattern = keys.number("attention.sliding_window", 0), keys.get("attention.sliding_window_pattern", 4)
    near = pattern if isinstance(pattern, list) else [i % pattern > 0 for i in range(n)]
    local = [bool(window and one) for one in near[:n]]
    gate = keys.header.tensors.get("blk.0.attn_gate.weight")
    per_head = gate is not None and gate.shape[0] == heads[0]
    part = self_attention(keys, qk_norm="head", gate=SoftplusGate("head" if per_head else "element"))
    turned = parts["position"]
    rotated = keys.number("rope.dimension_count_swa", turned.rope_dim(width))
    small = Rotary(keys.number("rope.freq_base_swa", turned.theta), fraction(rotated, width))
    return parts | {
        "attention": tuple(replace(part, window=window * one, n_heads=count) for one, count in zip(local, heads)),
        "position": tuple(small if one else turned for one in local),
        "mlp": routed(keys, n, SIGMOID),
    }


def laguna_keys(c: DecoderConfig) -> dict[str, Any]:
    heads = [at(c.attention, layer).heads(c).n_heads for layer in range(c.n_layers)]
    turns = [at(c.position, i) for i in range(c.n_layers) if at(c.attention, i).window]
    small = {"rope.dimension_count_swa": turns[0].rope_dim(c.d_head)} if turns and isinstance(turns[0], Rotary) else {}
    return routed_keys(c) | window_keys(c) | local_theta(c) | small | {"attention.head_count": heads}


ALL = (
    Architecture(
        "mimo2",
        ("mimo_v2_flash",),
        mimo2,
        mimo2_keys,
        head="required",
        free_heads=True,
        partial=True,
        uneven=True,
        narrow=True,
    ),
    Architecture("llama4", ("llama4_text",), llama4, llama4_keys, interleaved=True, free_heads=True, factors=(FREQS,)),
    Architecture("mellum", ("mellum",), mellum, windows_and_experts, head="required", free_heads=True),
    Cohere2MoeArchitecture(
        "cohere2moe", ("cohere2_moe",), cohere2moe, cohere2moe_keys, interleaved=True, free_heads=True
    ),
    Architecture(
        "granite_swa",
        ("granite_swa", "granitemoe_swa"),
        granite_swa,
        granite_swa_keys,
        interleaved=True,
        free_heads=True,
        factors=(FREQS, LONG, SHORT),
        needs=("attn_sinks.weight",),
    ),
    Architecture(
        "laguna",
        ("laguna",),
        laguna,
        laguna_keys,
        layer=gate_of_output,
        free_heads=True,
        partial=True,
        uneven=True,
        needs=("exp_probs_b.bias", "ffn_up_shexp.weight"),
    ),
)
