"""BitNet b1.58: a Llama with norms before the output projections of attention and feed-forward, and relu ** 2
(Microsoft 2025). Onward reads files with unpacked weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onward.config.decoder import DecoderConfig, Gated, SelfAttention, at
from onward.families import HF, Row, linear, llama, require, with_defaults
from onward.families.llama import shape

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURES = {"bitnet": "BitNetForCausalLM"}
SOURCE = "arXiv:2504.12285"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"bitnet-b1.58-2b": {"max_position_embeddings": 4096, "tie_word_embeddings": True}}
ANCESTORS = {"bitnet": "llama-3-8b"}
DEFAULTS = shape(2560, 6912, 30, 20, 5) | {
    "vocab_size": 128_256,
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}


@dataclass(frozen=True)
class NormedAttention(SelfAttention, kind="normed_attention", internal=True):
    """Self-attention that normalizes the outputs of all heads together before the output projection."""

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.build import layer_norms
        from onward.model.normed import NormedAttentionModule

        return NormedAttentionModule(self, config, layer_norms(config, layer))


@dataclass(frozen=True)
class NormedGated(Gated, kind="normed_gated", internal=True):
    """A gated feed-forward that normalizes its hidden units before the down projection."""

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.model.build import layer_norms
        from onward.model.normed import NormedFeedForwardModule

        return NormedFeedForwardModule(self, config, layer_norms(config, layer))


def config(hf: HF) -> DecoderConfig:
    c = llama.config(with_defaults(hf, DEFAULTS))
    bias = require(c.attention, SelfAttention).bias
    return replace(
        c, attention=NormedAttention(bias=bias, out_bias=bias), mlp=NormedGated(act=require(c.mlp, Gated).act)
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | {"attention_bias": require(at(c.attention, 0), SelfAttention).bias}


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}", f"blocks.{i}"
        yield from linear(f"{their}.self_attn.attn_sub_norm", f"{our}.attn.out_norm")
        yield from linear(f"{their}.mlp.ffn_sub_norm", f"{our}.mlp.down_norm")
