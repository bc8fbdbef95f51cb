"""Command with experts: the mean of the routed and the shared experts' outputs, after some dense layers (Cohere 2026).

Onward adds the two outputs. For their mean, the router's scale is 0.5, and the last projection of the shared
feed-forward is halved on loading, which is exact."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, Gated, LayerNorm, NoPosition, RMSNorm, SelfAttention, at
from onward.config.routing import SigmoidRouting, SoftmaxRouting
from onward.families import HF, Row, cohere, llama, require, with_defaults
from onward.families._experts import KINDS, dense_or_sparse, mixture_names
from onward.families._interleaved import neighbor_names
from onward.families._layers import layer_types, windowed_parts
from onward.families._rope import a_rotary

ARCHITECTURES = {"cohere2_moe": "Cohere2MoeForCausalLM"}
SOURCE = "huggingface.co/CohereLabs/command-a-plus-05-2026"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
ROUTERS = {"softmax": SoftmaxRouting(), "sigmoid": SigmoidRouting(selection_bias=False)}
HALVES = {"average": 0.5, "sum": 1.0}
HALVED = (lambda t: t * 0.5), (lambda t: t * 2.0)


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(
        {"rms_norm_eps": 1.0, "rope_scaling": None}, with_defaults(hf, {"head_dim": 128, "rope_theta": 10_000.0})
    )
    c = cohere.config(given)  # Command-R has another key for the norm, and reads rope_scaling
    layers, first = range(c.n_layers), hf.get("first_k_dense_replace", 0)
    kinds = hf.get("mlp_layer_types") or [KINDS[layer >= first] for layer in layers]
    prefix, pattern = hf.get("prefix_dense_sliding_window_pattern", 1), hf.get("sliding_window_pattern", 4)
    local = [(i + 1) % prefix != 0 if i < first else (i - first + 1) % pattern != 0 for i in layers]
    attention = windowed_parts(hf, require(c.attention, SelfAttention), hf.get("sliding_window", 4096), local)
    shared, eps = hf.get("num_shared_experts", 0), hf.get("rms_norm_eps")
    router, renormalize = ROUTERS[hf.get("expert_selection_fn", "softmax")], hf.get("norm_topk_prob", True)
    share = HALVES[hf.get("shared_expert_combination_strategy", "average")]
    dense = replace(require(c.mlp, Gated), d_ff=hf.get("prefix_dense_intermediate_size") or 0)
    experts = Experts(
        count=hf.get("num_experts", 8),
        top_k=hf.get("num_experts_per_tok", 2),
        d_shared=shared * c.d_ff,
        act=dense.act,
        router=replace(
            router,
            scale=share if shared else 1.0,
            renormalize=renormalize or isinstance(router, SoftmaxRouting),
        ),
    )
    rotated = [bool(a.window) or (kind == "dense" and prefix == 1) for a, kind in zip(attention, kinds)]
    return replace(
        c,
        attention=attention,
        position=tuple(a_rotary(c) if one else NoPosition() for one in rotated),
        mlp=tuple(dense if kind == "dense" else experts for kind in kinds),
        norm=c.norm if eps is None else RMSNorm(eps=eps),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    parts = [at(c.mlp, layer) for layer in range(c.n_layers)]
    experts = require(next((part for part in parts if isinstance(part, Experts)), None), Experts)
    plain = [i for i, part in enumerate(parts) if part != experts]
    keys = cohere.to_hf(replace(c, position=a_rotary(c), attention=at(c.attention, 0), norm=LayerNorm(bias=False)))
    keys.pop("rope_scaling", None)
    norm = require(c.norm, LayerNorm, RMSNorm)
    own, other = "rms_norm_eps", "layer_norm_eps"
    keys |= {own: norm.eps} if isinstance(norm, RMSNorm) else {own: None, other: norm.eps}
    if any(isinstance(at(c.position, i), NoPosition) for i in plain):
        keys["prefix_dense_sliding_window_pattern"] = 2
    return (
        keys
        | dense_or_sparse(c)
        | layer_types(c)
        | {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.top_k,
            "num_shared_experts": experts.d_shared // c.d_ff,
            "shared_expert_combination_strategy": "sum" if experts.router.scale == 1.0 else "average",
            "expert_selection_fn": "sigmoid" if isinstance(experts.router, SigmoidRouting) else "softmax",
            "norm_topk_prob": experts.router.renormalize,
            "prefix_dense_intermediate_size": parts[plain[0]].width(c) if plain else None,
        }
    )


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from neighbor_names(c, llama.names(c))
    halved = any(
        isinstance(part, Experts) and part.router.scale == 0.5 for part in (at(c.mlp, i) for i in range(c.n_layers))
    )
    for their, our, *_ in mixture_names(c):
        yield (their, our, HALVED) if halved and str(our).endswith("shared.down.weight") else (their, our)
