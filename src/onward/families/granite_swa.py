"""Granite with attention sinks, windows in three of four layers, and layers without positions, dense or with experts
(IBM 2026)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, NoPosition, Rotary, SelfAttention, at
from onward.families import HF, Row, granite, granitemoe, require, with_defaults
from onward.families._layers import layer_types, windowed_parts
from onward.families._rope import a_rotary
from onward.families.llama import shape

ARCHITECTURES = {"granite_swa": "GraniteSWAForCausalLM", "granitemoe_swa": "GraniteMoeSWAForCausalLM"}
SOURCE = "huggingface.co/ibm-granite/granite-swash-2b, huggingface.co/ibm-granite/granite-swash-3b-a600m"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DENSE = shape(2560, 8192, 24, 20, 4) | {
    "vocab_size": 100_352,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def config(hf: HF) -> DecoderConfig:
    sparse = hf.get("model_type") == "granitemoe_swa"
    c = granitemoe.config(hf) if sparse else granite.config(with_defaults(hf, DENSE))
    part = replace(require(c.attention, SelfAttention), sinks=True)
    local = [layer % 4 > 0 for layer in range(c.n_layers)]
    rotary = a_rotary(c)
    thetas = hf.get("layer_rope_theta") or [rotary.theta] * c.n_layers
    return replace(
        c,
        attention=windowed_parts(hf, part, hf.get("sliding_window", 128), local),
        position=tuple(
            replace(rotary, theta=thetas[layer]) if thetas[layer] else NoPosition() for layer in range(c.n_layers)
        ),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    family = granitemoe if isinstance(c.mlp, Experts) else granite
    positions = [at(c.position, layer) for layer in range(c.n_layers)]
    thetas = [position.theta if isinstance(position, Rotary) else 0 for position in positions]
    layers = layer_types(c)
    return family.to_hf(c) | layers | {"layer_rope_theta": thetas}


def names(c: DecoderConfig) -> Iterator[Row]:
    if isinstance(c.mlp, Experts):
        yield from granitemoe.names(c, "router.weight", "experts.gate_up_proj", "experts.down_proj")
    else:
        yield from granite.names(c)
    for i in range(c.n_layers):
        yield f"model.layers.{i}.self_attn.sinks", f"blocks.{i}.attn.attend.sinks"
