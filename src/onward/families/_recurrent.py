"""Layers with a state in published files, in both directions: types of layers, and names of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, Mamba2, at
from onward.config.part_types import Attention
from onward.config.recurrent_parts import Recurrent
from onward.families import HF, Fix, Inexpressible, Row, linear
from onward.families._layers import FULL

if TYPE_CHECKING:
    from torch import Tensor

LINEAR = "linear_attention"
MAMBA = "z", "x", "b", "c", "dt"  # the parts of the projection that published files fuse


def layers(hf: HF, count: int, default: Sequence[str], parts: Mapping[str, Attention]) -> tuple[Attention, ...]:
    """Return the part of each of `count` layers, by the layer's type in `layer_types` or, without this key, in
    `default`."""
    types = hf.get("layer_types") or default
    if len(types) != count or not {*types} <= {*parts}:
        raise UserError(f"config.json has layer_types {types}: Onward reads {', '.join(parts)}, one for each layer")
    return tuple(parts[kind] for kind in types)


def types(c: DecoderConfig, recurrent: str = LINEAR) -> list[str]:
    """The type of each layer: `recurrent` for layers with a state, FULL for others."""
    return [recurrent if isinstance(at(c.attention, i), Recurrent) else FULL for i in range(c.n_layers)]


def one(c: DecoderConfig, kind: type[Attention], other: Attention) -> Any:
    """Return the part that all layers whose attention has the class `kind` share; `other` if there are no such layers.
    Raises Inexpressible if their parts differ."""
    found = {part for i in range(c.n_layers) if isinstance(part := at(c.attention, i), kind)}
    if len(found) > 1:
        raise Inexpressible(f"layers have different parts of the kind {other.kind}")
    return found.pop() if found else other


def without_attention(rows: Iterable[Row], c: DecoderConfig) -> Iterator[Row]:
    """Yield the rows of a family's mapping, except those for attention in layers with a state."""
    prefixes = tuple(f"blocks.{i}.attn." for i in range(c.n_layers) if isinstance(at(c.attention, i), Recurrent))
    for row in rows:
        if not str(row[1] if isinstance(row[1], str) else row[1][0]).startswith(prefixes):
            yield row


def check_steps(hf: HF) -> None:
    """Raise a UserError if a config.json limits the step sizes of Mamba-2."""
    limit = [float(one["__float__"] if isinstance(one, dict) else one) for one in hf.get("time_step_limit") or []]
    if limit not in ([], [0.0, float("inf")]):
        raise UserError(f"config.json has time_step_limit {limit}: Onward supports only [0.0, Infinity]")


def mamba2(hf: HF, eps: float) -> Mamba2:
    """Read the Mamba-2 layers of IBM's families, from the keys of a config.json that begin with mamba_."""
    check_steps(hf)
    heads, width, count = hf["mamba_n_heads"], hf["mamba_d_head"], hf.get("mamba_expand", 2) * hf["hidden_size"]
    width = count // heads if width == "auto" else width
    if heads * width != count:
        expand = hf.get("mamba_expand", 2)
        raise UserError(
            f"config.json has mamba_n_heads {heads} and mamba_d_head {width}: their product must be {count}, "
            f"mamba_expand {expand} times hidden_size"
        )
    groups, size, taps = (hf[f"mamba_{key}"] for key in ("n_groups", "d_state", "d_conv"))
    biases = hf.get("mamba_conv_bias", True), hf.get("mamba_proj_bias", False)
    return Mamba2(heads, width, groups, size, taps, *biases, norm_eps=eps)


def mamba2_keys(c: DecoderConfig) -> dict[str, Any]:
    part = one(c, Mamba2, Mamba2())
    return {
        "mamba_n_heads": part.count(c),
        "mamba_d_head": part.d_head,
        "mamba_n_groups": part.n_groups,
        "mamba_d_state": part.d_state,
        "mamba_d_conv": part.d_conv,
        "mamba_expand": part.count(c) * part.d_head // c.d_model,
        "mamba_conv_bias": part.conv_bias,
        "mamba_proj_bias": part.bias,
    }


def mamba2_names(their: str, our: str) -> Iterator[Row]:
    yield from linear(f"{their}.in_proj", [f"{our}.{name}" for name in MAMBA])
    yield from linear(f"{their}.conv1d", [f"{our}.{name}_conv" for name in ("x", "b", "c")])
    yield f"{their}.A_log", f"{our}.a_log"
    yield f"{their}.D", f"{our}.d"
    yield f"{their}.dt_bias", f"{our}.dt_bias"
    yield f"{their}.norm.weight", f"{our}.gate.weight"
    yield from linear(f"{their}.out_proj", f"{our}.out")


def grouped(groups: int, *sizes: int) -> Fix:
    """Return functions that reorder the rows of a fused tensor. In files, each of the groups contains `sizes` rows of
    each projection; in Onward, the rows are ordered by projection."""

    def split(t: Tensor) -> Tensor:
        parts = t.unflatten(0, (groups, -1)).split(sizes, 1)
        return t if t.is_meta else stacked([part.flatten(0, 1) for part in parts])

    def join(t: Tensor) -> Tensor:
        parts = t.split([groups * size for size in sizes])
        return t if t.is_meta else stacked([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)

    return split, join


def stacked(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch

    return torch.cat([*parts], dim)
