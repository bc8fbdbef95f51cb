"""Falcon (Almazrouei et al. 2023): PaLM's parallel block with GELU, in 40B and 180B with grouped heads and two norms.

The RW models (Penedo et al. 2023), trained before, are sequential, with biases and ALiBi.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onward.config.decoder import DecoderConfig, LayerNorm, Parallel, Plain, PreNorm, Rotary, SelfAttention, SharedNorm
from onward.config.part_types import Block, Position
from onward.families import ACTIVATIONS, HF, Row, activation, bloom, require, sizes
from onward.families._rope import rope, rotary

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ARCHITECTURES = {"falcon": "FalconForCausalLM"}
SOURCE = "arXiv:2311.16867"
BASE = "transformer."
IGNORED = ""
GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 8}
PRESETS: dict[str, HF] = {
    "falcon-7b": {},
    "falcon-40b": GROUPED | {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128},
    "falcon-180b": GROUPED | {"hidden_size": 14_848, "num_hidden_layers": 80, "num_attention_heads": 232},
    "falcon-rw-1b": {
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "multi_query": False,
        "parallel_attn": False,
        "alibi": True,
        "bias": True,
    },
}
ANCESTORS = {"falcon": "palm-8b", "falcon-40b": "falcon-7b", "falcon-180b": "falcon-40b", "falcon-rw": "bloom-1b7"}
SIZES = {
    "vocab_size": ("vocab_size", 65_024),
    "d_model": ("hidden_size", 4544),
    "n_layers": ("num_hidden_layers", 32),
    "n_heads": ("num_attention_heads", 71),
    "d_ff": ("ffn_hidden_size", None),
    "context_length": ("max_position_embeddings", 2048),
    "tied": ("tie_word_embeddings", True),
    "dropout": ("hidden_dropout", 0.0),
}


@dataclass(frozen=True)
class FalconAlibi(Position, kind="falcon_alibi", internal=True):
    """ALiBi as in the training of the Falcon RW models: slopes, positions and their products are rounded to bf16, and
    scaled like the scores. A rounded product depends on the position of the key, not on the distance alone."""

    def slopes(self, config: DecoderConfig, device: torch.device) -> Tensor:
        from onward.model.alibi import alibi_slopes

        return alibi_slopes(config.n_heads).to(device).bfloat16()

    def score_bias(self, config: DecoderConfig, slope: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (slope * key.bfloat16()).to(query) * config.d_head**-0.5


def config(hf: HF) -> DecoderConfig:
    act: Any = hf.get("activation", "gelu")
    bias = hf.get("bias", False)
    groups, one_norm = hf.get("num_kv_heads") or 0, hf.get("num_ln_in_parallel_attn") == 1
    single, parallel = hf.get("multi_query", True), hf.get("parallel_attn", True)
    block: Block
    if hf.get("new_decoder_architecture", False):  # multi_query and parallel_attn have no effect
        block, n_kv_heads = SharedNorm() if one_norm else Parallel(), groups
    else:
        block, n_kv_heads = SharedNorm() if parallel else PreNorm(), 1 if single else 0
    rope_position = replace(rotary(hf, context=hf.get("max_position_embeddings", 2048)), fraction=1.0)
    return DecoderConfig(
        **sizes(hf, SIZES),
        n_kv_heads=n_kv_heads,
        position=FalconAlibi() if hf.get("alibi", False) else rope_position,
        attention=SelfAttention(bias=bias, out_bias=bias),
        mlp=Plain(act=ACTIVATIONS.get(act, act), bias=bias),
        norm=LayerNorm(eps=hf.get("layer_norm_epsilon", 1e-5)),
        block=block,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        **(rope(c.position) if isinstance(c.position, Rotary) else {}),
        "alibi": c.position == FalconAlibi(),
        "new_decoder_architecture": c.block == Parallel() or c.n_kv_heads not in (1, c.n_heads),
        "num_ln_in_parallel_attn": 2 if c.block == Parallel() else 1,
        "parallel_attn": c.block != PreNorm(),
        "multi_query": c.n_kv_heads == 1,
        "num_kv_heads": c.n_kv_heads,
        "attention_dropout": c.dropout,
        "bias": require(c.attention, SelfAttention).bias,
        "activation": activation(c.mlp),
        "layer_norm_epsilon": require(c.norm, LayerNorm).eps,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    return bloom.names(c, "ln_attn", "ln_mlp") if c.block == Parallel() else bloom.names(c)
