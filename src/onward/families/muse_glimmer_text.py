"""Muse Glimmer's text decoder: Gemma 2 with gated attention, embeddings, queries and keys normalized without weights;
only layers with a window have positions (Meta 2026)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onward.base.errors import UserError
from onward.config.attention_options import SigmoidGate
from onward.config.decoder import DecoderConfig, Gated, NoPosition, RMSNorm, Rotary, Sandwich, SelfAttention, at
from onward.config.ranges import Epsilon
from onward.families import HF, Row, activation, gemma2, linear, llama, require, with_defaults
from onward.families._layers import layer_types, windowed_parts
from onward.families.llama import shape

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURES = {"muse_glimmer_text": "MuseGlimmerForCausalLM"}
SOURCE = "huggingface.co/meta-models/Muse-Glimmer-30B"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = shape(6656, 19_968, 52, 32, 2) | {
    "vocab_size": 202_048,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "sliding_window": 2048,
    "hidden_activation": "silu",
    "qk_scale_factor": 3.87,
    "output_multiplier": 256**0.5 / 6656**0.5,
    "final_logit_softcapping": 20.0,
}


@dataclass(frozen=True)
class MuseBlock(Sandwich, kind="muse", internal=True):
    """A sandwich block in which the norms of the branches' outputs have a separate epsilon."""

    post_eps: Epsilon = 1e-8  # epsilon of the norms after attention and feed-forward

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.blocks import SandwichModule
        from onward.model.build import build_branches, build_norm

        module = SandwichModule(*build_branches(config, layer))
        post = replace(require(at(config.norm, layer), RMSNorm), eps=self.post_eps)
        module.attn_post_norm, module.mlp_post_norm = (build_norm(post, config, layer) for _ in range(2))
        return module


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(with_defaults({"hidden_act": given["hidden_activation"], "mlp_bias": False}, given))
    rotary, plain = require(c.position, Rotary), RMSNorm(given["rms_norm_eps"])
    last = c.n_layers - 1
    thetas = hf.get("layer_rope_theta") or [rotary.theta * ((last - i) % 4 != 0) for i in range(c.n_layers)]
    if len(thetas) != c.n_layers or not {*thetas} <= {0, rotary.theta}:
        raise UserError(f"config.json has layer_rope_theta {thetas}: Onward reads 0 or rope_theta for each layer")
    weightless = replace(plain, weight=False)
    part = replace(
        require(c.attention, SelfAttention),
        scale=given["qk_scale_factor"] * c.d_head**-0.5,
        qk_norm="head",
        qk_norm_part=weightless,
        gate=SigmoidGate(),
    )
    return replace(
        c,
        attention=windowed_parts(hf, part, given["sliding_window"], [(last - i) % 4 != 0 for i in range(c.n_layers)]),
        position=tuple(rotary if theta else NoPosition() for theta in thetas),
        norm=replace(plain, offset=1.0),
        block=MuseBlock(post_eps=given["post_norm_eps"]),
        final_norm=plain,
        embed_norm=weightless,
        logit_scale=given["output_multiplier"],
        logit_softcap=given["final_logit_softcapping"],
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    part, mlp = require(at(c.attention, 0), SelfAttention), require(c.mlp, Gated)
    turned = [isinstance(at(c.position, i), Rotary) for i in range(c.n_layers)]
    keys = llama.keys(c)
    del keys["hidden_act"]
    return (
        keys
        | {"sliding_window": DEFAULTS["sliding_window"]}
        | layer_types(c)
        | {
            "hidden_activation": activation(mlp),
            "attention_bias": part.bias,
            "post_norm_eps": require(c.block, MuseBlock).post_eps,
            "qk_scale_factor": round((part.scale or 0) * c.d_head**0.5, 13),
            "layer_rope_theta": [keys["rope_parameters"]["rope_theta"] * turns for turns in turned],
            "output_multiplier": c.logit_scale,
            "final_logit_softcapping": c.logit_softcap,
        }
    )


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from gemma2.names(c)
    for i in range(c.n_layers):
        yield from linear(f"model.layers.{i}.self_attn.gate_proj", f"blocks.{i}.attn.gate")
