"""OLMo Hybrid: Gated DeltaNet in three of four layers, with norms before the branches, and OLMo 3's attention without
windows in the others, with norms after the branches (Ai2 2026)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from onward.config.decoder import (
    BranchNorm,
    DecoderConfig,
    GatedDeltaNet,
    NoPosition,
    PreNorm,
    SelfAttention,
    at,
)
from onward.families import HF, Row, linear, llama, olmo2, require, with_defaults
from onward.families._layers import FULL
from onward.families._recurrent import LINEAR, layers, one, types, without_attention
from onward.families._rope import a_rotary
from onward.families.llama import shape

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES = {"olmo_hybrid": "OlmoHybridForCausalLM"}
SOURCE = "arXiv:2604.03444"
BASE = "model."
ALSO = {  # norms of recurrent layers: our table's names -> names in some files
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = shape(3840, 11_008, 32, 30, 30) | {
    "vocab_size": 100_352,
    "num_key_value_heads": None,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-6,
}
DELTA = "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
NORM_EPS = 1e-5  # epsilon of the norms of heads
INITIAL = "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"


def config(hf: HF) -> DecoderConfig:
    for key in INITIAL:
        hf.get(key)  # initialization of weights
    given = with_defaults(hf, DEFAULTS)
    unrotated = (hf.get("rope_parameters") or hf).get("rope_theta", 0) is None
    c = olmo2.config(with_defaults({"rope_parameters": None, "rope_theta": 1e4}, given) if unrotated else given)
    heads, value_heads = (hf.get(key) or c.n_heads for key in DELTA[:2])
    width = hf.get(DELTA[2]) or int(0.75 * c.d_model / heads)
    taps, negative = hf.get("linear_conv_kernel_dim", 4), hf.get("linear_allow_neg_eigval", True)
    sizes = heads, value_heads, width, hf.get(DELTA[3]) or 2 * width, taps
    delta = GatedDeltaNet(*sizes, negative=negative, norm_eps=NORM_EPS)
    default = [FULL if i % 4 == 3 else LINEAR for i in range(c.n_layers)]
    if FULL not in default:
        default[-1] = FULL
    parts = layers(hf, c.n_layers, default, {FULL: require(c.attention, SelfAttention), LINEAR: delta})
    block = tuple(PreNorm() if part is delta else BranchNorm() for part in parts)
    return replace(c, attention=parts, block=block, position=NoPosition() if unrotated else c.position)


def published(c: DecoderConfig, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored tensors, with each layer's q, k and v convolutions cut at their own sizes; transformers saves
    them in three equal parts."""
    result = dict(stored)
    for i in range(c.n_layers):
        if not isinstance(part := at(c.attention, i), GatedDeltaNet):
            continue
        (keys, values), (key, value) = part.counts(c), part.widths(c)
        names = [f"model.layers.{i}.linear_attn.{name}_conv1d.weight" for name in "qkv"]
        tensors = [stored[name] for name in names if name in stored]
        sizes = [keys * key, keys * key, values * value]
        if len(tensors) == len(names) and [one.shape[0] for one in tensors] != sizes:
            result |= dict(zip(names, recut(tensors, sizes)))
    return result


def recut(tensors: Sequence[Any], sizes: Sequence[int]) -> Iterator[Any]:
    """Divide the concatenated rows of `tensors` into stored tensors with `sizes` rows each."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]

    def rows(first: int, start: int, end: int) -> Tensor:
        import torch

        joined = torch.cat([one.rows(0, one.shape[0]) for one in tensors])
        return joined[first + start : first + end]

    for size, end in zip(sizes, ends):
        one = tensors[0]
        yield replace(one, shape=[size, *one.shape[1:]], rows=partial(rows, end - size), mapped=None, quantized=None)


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    attention, delta = one(c, SelfAttention, SelfAttention()), one(c, GatedDeltaNet, GatedDeltaNet())
    keys = llama.keys(replace(c, position=a_rotary(c)))
    if isinstance(at(c.position, 0), NoPosition):
        keys |= {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_theta": None}
    own = dict(zip(DELTA, (*delta.counts(c), *delta.widths(c))))
    own |= {"linear_conv_kernel_dim": delta.d_conv, "linear_allow_neg_eigval": delta.negative}
    return keys | own | {"layer_types": types(c), "attention_bias": attention.bias}


def names(c: DecoderConfig) -> Iterator[Row]:
    for their, our, *_ in without_attention(llama.names(c), c):
        if "layernorm" not in str(their):
            yield their, our
    for i, kind in enumerate(types(c)):
        layer, block = f"model.layers.{i}", f"blocks.{i}"
        if kind == FULL:
            yield from linear(f"{layer}.feedforward_layer_norm", f"{block}.attn_post_norm")
            yield from linear(f"{layer}.post_feedforward_layernorm", f"{block}.mlp_post_norm")
            continue
        yield from linear(f"{layer}.attention_layer_norm", f"{block}.attn_norm")
        yield from linear(f"{layer}.feedforward_layer_norm", f"{block}.mlp_norm")
        layer, block = f"{layer}.linear_attn", f"{block}.attn"
        for name in "q", "k", "v":
            yield f"{layer}.{name}_conv1d.weight", f"{block}.{name}_conv.weight"
        for their, our in zip("qkvabgo", ("q", "k", "v", "a", "b", "z", "out")):
            yield from linear(f"{layer}.{their}_proj", f"{block}.{our}")
        yield f"{layer}.A_log", f"{block}.a_log"
        yield f"{layer}.dt_bias", f"{block}.dt_bias"
        yield from linear(f"{layer}.o_norm", f"{block}.head_norm")
