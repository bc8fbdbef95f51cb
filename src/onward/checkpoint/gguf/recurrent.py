"""Architectures of llama.cpp with recurrent layers. See architectures.py.

A file stores -exp(`a_log`), and convolutions as (C, K), without their axis of size 1. In Qwen 3.5, it orders value
heads by their index in the group of a key head. Shapes: C channels, K tokens of a convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from onward.base.errors import UserError
from onward.checkpoint.gguf.architecture import Architecture, Parts, expert_keys, experts, rms, self_attention
from onward.checkpoint.gguf.dense import late_norm, plain
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.sparse import routed, routed_keys
from onward.checkpoint.names import joined, same
from onward.checkpoint.packed import Change
from onward.checkpoint.weights import StoredTensor
from onward.config.attention_options import SigmoidGate
from onward.config.decoder import (
    AttentionAndMamba2,
    DecoderConfig,
    FeedForwardOnly,
    GatedDeltaNet,
    Mamba2,
    Rotary,
    SelfAttention,
    ShortConvolution,
    at,
)
from onward.config.recurrent_parts import Recurrent
from onward.families import Fix, Row, linear
from onward.families._recurrent import MAMBA, grouped

FLAT: Fix = (lambda t: t[:, None], lambda t: t[:, 0])  # of a convolution's weight


@dataclass(frozen=True)
class RecurrentArchitecture(Architecture):
    """Recurrent layers and attention layers."""

    final: str = "output_norm"  # the tensor of the final norm
    tiled: bool = False  # value heads are ordered by their index in the group of a key head
    fused_b_a: bool = False  # strengths and decays are one tensor, ordered by key heads

    def names(self, c: DecoderConfig) -> Iterator[Row]:
        yield from linear(self.final, "norm")
        for row in super().names(c):
            name = str(row[0])
            layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
            other = name.startswith(f"blk.{layer}.attn_output.") and isinstance(at(c.attention, layer), Recurrent)
            if not other and not name.startswith("output_norm."):
                yield row

    def projections(self, c: DecoderConfig, layer: int) -> Iterator[Row]:
        their, our, part = f"blk.{layer}", f"blocks.{layer}", at(c.attention, layer)
        if isinstance(at(c.block, layer), FeedForwardOnly):
            yield from linear(f"{their}.attn_norm", f"{our}.mlp_norm")
        match part:
            case GatedDeltaNet():
                yield from self.delta(c, part, their, f"{our}.attn")
            case Mamba2():
                yield from mamba(part, their, f"{our}.attn")
            case AttentionAndMamba2():
                for name in "qkv":
                    yield from linear(f"{their}.attn_{name}", f"{our}.attn.attention.{name}")
                yield from mamba(part.mamba, their, f"{our}.attn.mamba")
            case ShortConvolution():
                yield from linear(f"{their}.shortconv.in_proj", [f"{our}.attn.{name}" for name in ("b", "c", "x")])
                yield f"{their}.shortconv.conv.weight", f"{our}.attn.conv.weight", FLAT
                yield from linear(f"{their}.shortconv.out_proj", f"{our}.attn.out")
            case SelfAttention(gate=SigmoidGate(per="element")):
                heads = part.heads(c)
                order = grouped(heads.n_heads, heads.d_head, heads.d_head)
                yield from linear(f"{their}.attn_q", [f"{our}.attn.q", f"{our}.attn.gate"], order)
                for name in "k", "v":
                    yield from linear(f"{their}.attn_{name}", f"{our}.attn.{name}")
            case _:
                yield from replace(self, fused=False).attention(c, layer)

    def attention(self, c: DecoderConfig, layer: int) -> Iterator[Row]:
        yield from Architecture.projections(self, c, layer)

    def delta(self, c: DecoderConfig, part: GatedDeltaNet, their: str, our: str) -> Iterator[Row]:
        (keys, values), (key, value) = part.counts(c), part.widths(c)
        heads, rows = (tiles(keys, values, width) if self.tiled else (same, same) for width in (1, value))
        behind = trailing(2 * keys * key, *rows)
        yield f"{their}.attn_qkv.weight", [f"{our}.{name}.weight" for name in "qkv"], behind
        yield f"{their}.attn_gate.weight", f"{our}.z.weight", rows
        yield (
            f"{their}.ssm_conv1d.weight",
            [f"{our}.{name}_conv.weight" for name in "qkv"],
            (lambda t: behind[0](t)[:, None], lambda t: behind[1](t[:, 0])),
        )
        if self.fused_b_a:
            both = [f"{our}.b.weight", f"{our}.a.weight"]
            yield f"{their}.ssm_ba.weight", both, grouped(keys, values // keys, values // keys)
        else:
            yield f"{their}.ssm_beta.weight", f"{our}.b.weight", heads
            yield f"{their}.ssm_alpha.weight", f"{our}.a.weight", heads
        yield f"{their}.ssm_a", f"{our}.a_log", heads
        yield f"{their}.ssm_dt.bias", f"{our}.dt_bias", heads
        yield f"{their}.ssm_norm.weight", f"{our}.head_norm.weight"
        yield f"{their}.ssm_out.weight", f"{our}.out.weight", (lambda t: rows[0](t.mT).mT, lambda t: rows[1](t.mT).mT)

    def tensors(self, c: DecoderConfig, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().tensors(c, ours):
            yield name, -tensor.float().exp() if name.endswith(".ssm_a") else tensor

    def stored(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        parts = super().stored(tensors)
        return {name: log_of(own) if name.endswith(".ssm_a") else own for name, own in parts.items()}


def log_of(own: StoredTensor) -> StoredTensor:
    """log(-x) of a tensor x, computed in fp32."""
    return StoredTensor(own.shape, own.dtype, lambda start, end: (-own.rows(start, end).float()).log())


def tiles(keys: int, values: int, width: int) -> Fix:
    """Reorder rows of value heads, `width` rows each: the file orders value heads by their index in the group of a key
    head."""
    shared = values // keys
    if shared == 1:
        return same, same
    swap = lambda t, *sizes: t.unflatten(0, (*sizes, width)).transpose(0, 1).flatten(0, 2)
    return lambda t: swap(t, shared, keys), lambda t: swap(t, keys, shared)


def trailing(rows: int, into: Change, back: Change) -> Fix:
    """Return a pair of changes that leave the first `rows` rows of a tensor as they are."""
    behind = lambda change: lambda t: joined([t[:rows], change(t[rows:])])
    return (same, same) if into is same else (behind(into), behind(back))


def mamba(part: Mamba2, their: str, our: str) -> Iterator[Row]:
    column: Fix = (lambda t: t[:, 0], lambda t: t[:, None])
    groups: Fix = (lambda t: t.flatten(), lambda t: t.unflatten(0, (part.n_groups, -1)))
    convs = [f"{our}.{name}_conv" for name in ("x", "b", "c")]
    yield from linear(f"{their}.ssm_in", [f"{our}.{name}" for name in MAMBA])
    yield f"{their}.ssm_conv1d.weight", [f"{name}.weight" for name in convs], FLAT
    yield f"{their}.ssm_conv1d.bias", [f"{name}.bias" for name in convs]
    yield f"{their}.ssm_a", f"{our}.a_log", column
    yield f"{their}.ssm_d", f"{our}.d", column
    yield f"{their}.ssm_dt.bias", f"{our}.dt_bias"
    yield f"{their}.ssm_norm.weight", f"{our}.gate.weight", groups
    yield from linear(f"{their}.ssm_out", f"{our}.out")


def attention_keys(c: DecoderConfig) -> dict[str, Any]:
    """The number of key/value heads of each layer: 0 in recurrent layers."""
    parts = [at(c.attention, layer) for layer in range(c.n_layers)]
    return {
        "attention.head_count_kv": [
            part.heads(c).n_kv_heads if isinstance(part, SelfAttention) else 0 for part in parts
        ]
    }


def lfm2(keys: Keys, sizes: Parts) -> Parts:
    conv, part = ShortConvolution(keys.number("shortconv.l_cache")), self_attention(keys, qk_norm="head")
    if keys.number("attention.sliding_window", 0):
        part = replace(part, window=keys.number("attention.sliding_window"))
    heads = keys.by_layer("attention.head_count_kv", sizes["n_layers"])
    return plain(keys, sizes) | {"attention": tuple(part if one else conv for one in heads)}


def lfm2moe(keys: Keys, sizes: Parts) -> Parts:
    layers = sizes["n_layers"]
    return lfm2(keys, sizes) | {"mlp": tuple(renormalized(part) for part in routed(keys, layers))}


def renormalized(part: Any) -> Any:
    """Experts whose routing weights are divided by their sum and not scaled, although the file has no key for this."""
    router = getattr(part, "router", None)
    return replace(part, router=replace(router, renormalize=True, scale=1.0)) if router else part


def lfm2_keys(c: DecoderConfig) -> dict[str, Any]:
    convs = [part for layer in range(c.n_layers) if isinstance(part := at(c.attention, layer), ShortConvolution)]
    windows = [getattr(at(c.attention, layer), "window", 0) for layer in range(c.n_layers)]
    keys = attention_keys(c) | {"shortconv.l_cache": convs[0].d_conv if convs else 3}
    return keys | ({"attention.sliding_window": max(windows)} if any(windows) else {})


def lfm2moe_keys(c: DecoderConfig) -> dict[str, Any]:
    return lfm2_keys(c) | routed_keys(c)


def delta(keys: Keys, sizes: Parts) -> Parts:
    """The parts of Qwen3-Next, with dense feed-forwards."""
    eps, width = keys.number("attention.layer_norm_rms_epsilon"), keys.number("ssm.state_size")
    layer = GatedDeltaNet(
        n_heads=keys.number("ssm.group_count"),
        n_value_heads=keys.number("ssm.time_step_rank"),
        d_key=width,
        d_value=width,
        d_conv=keys.number("ssm.conv_kernel"),
        norm_eps=eps,
    )
    if keys.number("ssm.inner_size") != layer.n_value_heads * width:
        raise UserError("ssm.inner_size is not ssm.time_step_rank times ssm.state_size: get the file again")
    part = self_attention(keys, qk_norm="head")
    part = replace(part, gate=SigmoidGate(bias=part.bias))
    count, step = sizes["n_layers"], keys.number("full_attention_interval", 4)
    usual = [bool((i + 1) % step) for i in range(count)]
    recurrent = keys.by_layer("attention.recurrent_layers", count) if "attention.recurrent_layers" in keys else usual
    layers = tuple(layer if one else part for one in recurrent)
    return plain(keys, sizes) | rms(keys, offset=1.0) | {"attention": layers}


def delta_experts(keys: Keys, sizes: Parts) -> Parts:
    shared = keys.number("expert_shared_feed_forward_length", 0) or sizes["d_ff"]
    return delta(keys, sizes) | {"mlp": experts(keys, True, d_shared=shared, shared_gate=True)}


def delta_keys(c: DecoderConfig) -> dict[str, Any]:
    parts = [at(c.attention, layer) for layer in range(c.n_layers)]
    own = next((part for part in parts if isinstance(part, GatedDeltaNet)), GatedDeltaNet())
    (keys, values), (_, value) = own.counts(c), own.widths(c)
    return {
        "ssm.conv_kernel": own.d_conv,
        "ssm.state_size": value,
        "ssm.group_count": keys,
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * value,
        "full_attention_interval": 4,
        "attention.recurrent_layers": [isinstance(part, GatedDeltaNet) for part in parts],
    } | expert_keys(c)


def with_sections(c: DecoderConfig) -> dict[str, Any]:
    """The keys of `delta_keys`, and the number of pairs that are rotated by time, by height and by width in images; in
    text, the three positions are equal."""
    position = next((p for layer in range(c.n_layers) if isinstance(p := at(c.position, layer), Rotary)), None)
    pairs = position.rope_dim(c.d_head) // 2 if position else 0
    return delta_keys(c) | {"rope.dimension_sections": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]}


ALL = (
    RecurrentArchitecture("lfm2", ("lfm2",), lfm2, lfm2_keys, final="token_embd_norm"),
    RecurrentArchitecture(
        "lfm2moe", ("lfm2_moe",), lfm2moe, lfm2moe_keys, final="token_embd_norm", needs=("exp_probs_b.bias",)
    ),
    RecurrentArchitecture(
        "qwen3next",
        ("qwen3_next",),
        delta_experts,
        delta_keys,
        free_heads=True,
        partial=True,
        shift=1.0,
        layer=late_norm,
        fused_b_a=True,
    ),
    RecurrentArchitecture(
        "qwen35",
        ("qwen3_5_text",),
        delta,
        with_sections,
        free_heads=True,
        partial=True,
        shift=1.0,
        layer=late_norm,
        tiled=True,
    ),
    RecurrentArchitecture(
        "qwen35moe",
        ("qwen3_5_moe_text",),
        delta_experts,
        with_sections,
        free_heads=True,
        partial=True,
        shift=1.0,
        layer=late_norm,
        tiled=True,
    ),
)
