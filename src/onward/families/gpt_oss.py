"""GPT-OSS: experts with biases and a clamped gate, alternating windows, and attention sinks (OpenAI 2025)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onward.config.decoder import DecoderConfig, Experts, RMSNorm, SelfAttention, at
from onward.config.ranges import Factor
from onward.config.routing import SoftmaxRouting
from onward.families import HF, Row, linear, llama, only, require, sizes, with_defaults
from onward.families._layers import layer_types, windowed_layers
from onward.families._rope import rope

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES = {"gpt_oss": "GptOssForCausalLM"}
SOURCE = "arXiv:2508.10925"
BASE = "model."
IGNORED = r""
PRESETS: dict[str, HF] = {
    "gpt-oss-20b": {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {},
}
ANCESTORS = {"gpt-oss": "gpt3-175b"}
DEFAULTS = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
EXPERTS = {
    "count": ("num_local_experts", 128),
    "top_k": ("num_experts_per_tok", 4),
    "limit": ("swiglu_limit", 7.0),
    "alpha": ("swiglu_alpha", 1.702),
}


@dataclass(frozen=True)
class ClampedExperts(Experts, kind="clamped_experts", internal=True):
    """GPT-OSS's mixture of experts. An expert's hidden units are (u + 1) * g * sigmoid(alpha * g), with the gate
    projection g and the up projection u, both clamped."""

    limit: Factor = 7.0  # u is clamped to -limit ... limit, and g to at most limit
    alpha: Factor = 1.702  # steepness of the sigmoid

    def combine(self, act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * (self.alpha * gate).sigmoid())


def config(hf: HF) -> DecoderConfig:
    only(hf, hidden_act="silu")
    hf = with_defaults(hf, DEFAULTS)
    if hf.get("rope_parameters") is None:  # {} means no scaling
        hf = with_defaults({"rope_parameters": YARN}, hf)
    c = llama.config(hf)
    bias = hf.get("attention_bias", True)
    full = SelfAttention(sinks=True, bias=bias, out_bias=bias)
    local = replace(full, window=hf["sliding_window"] or 0)
    near = windowed_layers(hf, [layer % 2 == 0 for layer in range(c.n_layers)])
    return replace(
        c,
        attention=tuple(local if windowed else full for windowed in near),
        mlp=ClampedExperts(**sizes(hf, EXPERTS), router=SoftmaxRouting(bias=True), bias=True),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    mlp = require(c.mlp, ClampedExperts)
    return (
        {their: getattr(c, our) for our, (their, _) in llama.SIZES.items()}
        | {their: getattr(mlp, our) for our, (their, _) in EXPERTS.items()}
        | {
            **rope(c.position),
            **layer_types(c),
            "attention_bias": require(at(c.attention, 0), SelfAttention).bias,
            "rms_norm_eps": require(c.norm, RMSNorm).eps,
        }
    )


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}", f"blocks.{i}"
        yield f"{their}.self_attn.sinks", f"{our}.attn.attend.sinks"
        yield from linear(f"{their}.mlp.router", f"{our}.mlp.router")
        their, our = f"{their}.mlp.experts", f"{our}.mlp"
        yield f"{their}.gate_up_proj", [f"{our}.gate", f"{our}.up"], (lambda t: apart(t.mT), lambda t: woven(t).mT)
        yield f"{their}.gate_up_proj_bias", [f"{our}.gate_bias", f"{our}.up_bias"], (apart, woven)
        yield f"{their}.down_proj", f"{our}.down", (lambda t: t.mT, lambda t: t.mT)
        yield f"{their}.down_proj_bias", f"{our}.down_bias"


def apart(t: Tensor) -> Tensor:
    """Reorder rows that alternate between gate (even) and up projection (odd) to all gates followed by all up
    projections: (X, 2 F, ...) -> (2 X, F, ...)."""
    import torch

    return torch.cat([t[:, ::2], t[:, 1::2]])


def woven(t: Tensor) -> Tensor:
    """The inverse of `apart`."""
    import torch

    return torch.stack(t.chunk(2), 2).flatten(1, 2)
