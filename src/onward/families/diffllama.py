"""DiffLlama: Llama whose heads subtract the attention weights of a second head, to cancel noise (Ye et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from onward.config.decoder import DecoderConfig, DifferentialAttention, Gated, RMSNorm, SelfAttention
from onward.families import HF, Fix, Row, llama, only, require, with_defaults
from onward.families.llama import shape

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES = {"diffllama": "DiffLlamaForCausalLM"}
SOURCE = "arXiv:2410.05258"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = shape(2048, 8192, 16, 32, 32) | {"rms_norm_eps": 1e-5, "mlp_bias": False}


def config(hf: HF) -> DecoderConfig:
    only(hf, attention_dropout=0.0)
    hf.get("lambda_std_dev")  # standard deviation of the initial values
    heads = hf.get("num_attention_heads", DEFAULTS["num_attention_heads"])
    same = {"num_key_value_heads": heads} if hf.get("num_key_value_heads") is None else {}
    c = llama.config(with_defaults(same, with_defaults(hf, DEFAULTS)))
    bias, norm = require(c.attention, SelfAttention).bias, require(c.norm, RMSNorm)
    part = DifferentialAttention(bias=bias, out_bias=bias, head_norm=replace(norm, weight=False))
    return replace(c, attention=part)


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    require(c.mlp, Gated)
    return llama.keys(c) | {"attention_bias": require(c.attention, DifferentialAttention).bias}


def names(c: DecoderConfig) -> Iterator[Row]:
    sizes = require(c.attention, DifferentialAttention).heads(c)
    keys = pairs(sizes.n_kv_heads, sizes.d_head)
    of = {"q": pairs(sizes.n_heads, sizes.d_head), "k": keys, "v": keys}
    for their, our, *_ in llama.names(c):
        projection = str(our).partition(".attn.")[2].partition(".")[0]
        yield (their, our, of[projection]) if projection in of else (their, our)
    for i in range(c.n_layers):
        for name in "q1", "k1", "q2", "k2":
            yield f"model.layers.{i}.self_attn.lambda_{name}", f"blocks.{i}.attn.lambda_{name}"


def pairs(count: int, width: int) -> Fix:
    """Return functions that reorder rows from all first heads followed by all second heads to pairs of heads, and
    back."""

    def reorder(t: Tensor, first: int, second: int) -> Tensor:
        return t.unflatten(0, (first, second, width)).transpose(0, 1).flatten(0, 2)

    return lambda t: reorder(t, 2, count), lambda t: reorder(t, count, 2)
