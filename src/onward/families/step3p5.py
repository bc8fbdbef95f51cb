"""Step 3.5 and the text of Step 3.7: gates per head, more heads in layers with windows, and DeepSeek-V3's experts,
whose units are clamped in the last layers (StepFun 2026)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onward.base.errors import UserError
from onward.config.attention_options import SigmoidGate
from onward.config.decoder import DecoderConfig, Experts, Gated, RMSNorm, SelfAttention, at
from onward.config.ranges import NotNegative
from onward.config.routing import SigmoidRouting
from onward.families import HF, Row, linear, llama, only, renamed, require, with_defaults
from onward.families._experts import KINDS, dense_or_sparse
from onward.families._layers import FULL, LOCAL, layer_types, windowed_layers
from onward.families._rope import a_rotary, without_rope
from onward.families._rope_by_type import UNREAD, rope_by_type, rotary_by_type
from onward.families.llama import shape

if TYPE_CHECKING:
    from torch import Tensor, nn

ARCHITECTURES = {"step3p5": "Step3p5ForCausalLM"}
SOURCE = "arXiv:2602.10604"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = shape(4096, 11_264, 45, 64, 8) | {
    "vocab_size": 128_815,
    "head_dim": 128,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_router_scaling_factor": 1.0,
}
KEYS = {  # keys in published files -> keys in transformers
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
LIMITS = "swiglu_limits", "swiglu_limits_shared"
BY_LAYER = "layer_types", "mlp_layer_types", *LIMITS, "rope_theta", "partial_rotary_factors"
ALWAYS: dict[str, Any] = {  # values in all released models
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "zero_centered": True,
    "sink": False,
    "moe_router_activation": "sigmoid",
}


def clamped(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor, limit: float) -> Tensor:
    most = limit or math.inf
    return act(gate).clamp(max=most) * up.clamp(-most, most)


@dataclass(frozen=True)
class LimitedGated(Gated, kind="limited", internal=True):
    """A feed-forward down(min(act(gate(x)), limit) * clamp(up(x), -limit, limit))."""

    limit: NotNegative = 0.0  # limit of the hidden units; 0: none

    def combine(self, act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        return clamped(act, gate, up, self.limit)


@dataclass(frozen=True)
class LimitedExperts(Experts, kind="limited_experts", internal=True):
    """Mixture of experts whose hidden units are clamped; the shared feed-forward has a separate limit."""

    limit: NotNegative = 0.0  # limit of the experts' hidden units; 0: none
    shared_limit: NotNegative = 0.0  # limit of the shared feed-forward's hidden units; 0: none

    def combine(self, act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        return clamped(act, gate, up, self.limit)

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.experts import ExpertsModule
        from onward.model.feedforward import CombiningFeedForwardModule
        from onward.model.further import build_router

        module = ExpertsModule(self, config, build_router(self, config.d_model))
        if self.shared_limit:
            shared = LimitedGated(act=self.act, limit=self.shared_limit)
            module.shared = CombiningFeedForwardModule(shared, config.d_model, self.d_shared, 0.0)
        return module


def config(hf: HF) -> DecoderConfig:
    only(hf, gating=True, use_bidirectional_attention=False, mlp_bias=False, hidden_act="silu", **ALWAYS)
    given = with_defaults(renamed(hf, KEYS), DEFAULTS)
    given = with_defaults(without_further_layers(given), given)
    c = llama.config(with_defaults({**UNREAD, "mlp_bias": False}, given))
    local = windowed_layers(given, [False] * c.n_layers)
    heads, scalar = heads_by_layer(hf, c, local), hf.get("query_pre_attn_scalar")
    part = replace(
        require(c.attention, SelfAttention),
        qk_norm="head",
        gate=SigmoidGate(per="head"),
        scale=None if scalar in (None, c.d_head) else scalar**-0.5,
    )
    of = rotary_by_type(given, rope_by_layer(given, local), context=c.context_length)
    return replace(
        c,
        attention=tuple(
            replace(part, n_heads=count, window=(given.get("sliding_window") or 0) * is_local)
            for count, is_local in zip(heads, local)
        ),
        position=tuple(of[LOCAL if is_local else FULL] for is_local in local),
        mlp=feed_forwards(given, c),
        norm=RMSNorm(eps=given["rms_norm_eps"], offset=1.0),
    )


def without_further_layers(hf: HF) -> dict[str, Any]:
    """Return the lists with an entry for each layer, without the entries of layers for multi-token prediction."""
    n = hf["num_hidden_layers"]
    lists = {key: value for key in BY_LAYER if isinstance(value := hf.get(key), list)}
    return {key: value[:n] for key, value in lists.items() if len(value) == n + hf.get("num_nextn_predict_layers", 0)}


def heads_by_layer(hf: HF, c: DecoderConfig, local: list[bool]) -> list[int]:
    """The number of query heads of each layer."""
    other: HF = hf.get("attention_other_setting") or {}
    sizes = {"num_attention_groups": c.n_kv_heads, "head_dim": c.d_head}
    if odd := [key for key, size in sizes.items() if other.get(key, size) != size]:
        raise UserError(
            f"config.json has attention_other_setting.{odd[0]} {other[odd[0]]}: Onward reads only num_attention_heads"
        )
    windowed = hf.get("num_sliding_attention_heads") or other.get("num_attention_heads", c.n_heads)
    tables = hf.get("per_layer_config")
    if tables is None:
        return [windowed if is_local else c.n_heads for is_local in local]
    if odd := sorted({key for table in tables.values() for key in table} - {"num_attention_heads"}):
        raise UserError(f"config.json has per_layer_config with {odd[0]}: Onward reads only num_attention_heads")
    own = {int(layer): table["num_attention_heads"] for layer, table in tables.items()}
    return [own.get(layer, c.n_heads) for layer in range(c.n_layers)]


def rope_by_layer(hf: HF, local: list[bool]) -> dict[str, HF]:
    """Return the keys for the rotary positions of each type of layer, from the published values of the first layer of
    this type."""
    thetas, fractions = hf.get("rope_theta", 10_000.0), hf.get("partial_rotary_factors")
    keys = dict[str, HF]()
    for kind in LOCAL, FULL:
        first = next((i for i, is_local in enumerate(local) if is_local == (kind == LOCAL)), 0)
        keys[kind] = {
            "rope_theta": thetas[first] if isinstance(thetas, list) else thetas,
            "partial_rotary_factor": fractions[first] if fractions else 1.0,
            "rope_scaling": hf.get("rope_scaling") if kind == FULL else None,
        }
    return keys


def feed_forwards(hf: HF, c: DecoderConfig) -> tuple[Gated | Experts, ...]:
    chosen = hf.get("moe_layers_enum")
    chosen = range(3, c.n_layers) if chosen is None else chosen.split(",") if isinstance(chosen, str) else chosen
    sparse = {int(layer) for layer in chosen if str(layer).strip()}
    kinds = hf.get("mlp_layer_types") or [KINDS[layer in sparse] for layer in range(c.n_layers)]
    limits, shared = ([limit or 0.0 for limit in hf.get(key) or [0.0] * c.n_layers] for key in LIMITS)
    if not len(kinds) == len(limits) == len(shared) == c.n_layers or not {*kinds} <= {*KINDS}:
        raise UserError(
            f"config.json has mlp_layer_types {kinds}, swiglu_limits {limits} and swiglu_limits_shared {shared}: "
            f"Onward reads one of {KINDS} and two numbers for each layer"
        )
    own: dict[str, Any] = {
        "count": hf["n_routed_experts"],
        "top_k": hf["num_experts_per_tok"],
        "d_ff": hf["moe_intermediate_size"],
        "d_shared": hf["share_expert_dim"],
        "router": SigmoidRouting(scale=hf["moe_router_scaling_factor"]),
    }
    parts = list[Gated | Experts]()
    for kind, limit, other in zip(kinds, limits, shared):
        if kind == KINDS[0]:
            parts.append(LimitedGated(limit=other) if other else Gated())
        else:
            parts.append(LimitedExperts(**own, limit=limit, shared_limit=other) if limit or other else Experts(**own))
    return tuple(parts)


def limits_of(part: Gated | Experts) -> tuple[float, float]:
    """Return the limit of the experts' hidden units, and that of the shared or dense feed-forward; 0 for none."""
    match part:
        case LimitedExperts():
            return part.limit, part.shared_limit
        case LimitedGated():
            return 0.0, part.limit
    return 0.0, 0.0


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    parts = [require(at(c.attention, i), SelfAttention) for i in range(c.n_layers)]
    mlps = [require(at(c.mlp, i), Gated, Experts) for i in range(c.n_layers)]
    experts = next((mlp for mlp in mlps if isinstance(mlp, Experts)), Experts(d_shared=1))
    kinds = layer_types(c)
    windowed = [part.heads(c).n_heads for part in parts if part.window]
    missing = dict.fromkeys((LOCAL, FULL), a_rotary(c))
    return (
        without_rope(llama.keys(c))
        | dense_or_sparse(c)
        | kinds
        | {
            "rope_parameters": rope_by_type(c, kinds["layer_types"], missing)["rope_parameters"],
            "num_sliding_attention_heads": max(windowed, default=c.n_heads),
            "per_layer_config": {str(i): {"num_attention_heads": p.heads(c).n_heads} for i, p in enumerate(parts)},
            "attention_bias": parts[0].bias,
            "query_pre_attn_scalar": c.d_head if parts[0].scale is None else round(parts[0].scale ** -2, 9),
            "n_routed_experts": experts.count,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.width(c),
            "share_expert_dim": experts.d_shared,
            "moe_router_scaling_factor": experts.router.scale,
        }
        | {key: [*values] for key, values in zip(LIMITS, zip(*map(limits_of, mlps)))}
    )


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}", f"blocks.{i}"
        yield f"{their}.self_attn.g_proj.weight", f"{our}.attn.gate.weight"
        if isinstance(at(c.mlp, i), Experts):
            yield f"{their}.moe.gate.weight", f"{our}.mlp.router.weight"
            yield f"{their}.moe.router_bias", f"{our}.mlp.router.routing_bias"
            for name in "gate", "up", "down":
                yield f"{their}.moe.{name}_proj.weight", f"{our}.mlp.{name}"
                yield from linear(f"{their}.share_expert.{name}_proj", f"{our}.mlp.shared.{name}")
