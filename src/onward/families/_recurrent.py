"""Layers with a state in published files, in both directions: types of layers, and names of tensors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, Mamba2, at
from onward.config.part_types import Attention
from onward.config.recurrent_parts import Recurrent
from onward.families import HF, Inexpressible, Row, linear, only
from onward.families._layers import FULL

LINEAR = "linear_attention"
MAMBA = "z", "x", "b", "c", "dt"  # the parts of the projection that published files fuse


def layers(hf: HF, count: int, default: Sequence[str], parts: Mapping[str, Attention]) -> tuple[Attention, ...]:
    """The part of each of `count` layers, by its type in `layer_types` or, without this key, in `default`."""
    types = hf.get("layer_types") or default
    if len(types) != count or not {*types} <= {*parts}:
        raise UserError(f"config.json has layer_types {types}: Onward reads {', '.join(parts)}, one for each layer")
    return tuple(parts[kind] for kind in types)


def types(c: DecoderConfig, recurrent: str = LINEAR) -> list[str]:
    """The type of each layer: `recurrent` for those with a state."""
    return [recurrent if isinstance(at(c.attention, i), Recurrent) else FULL for i in range(c.n_layers)]


def one(c: DecoderConfig, kind: type[Attention], other: Attention) -> Any:
    """The part of all layers whose attention is of a class; `other` if there is none. Raises Inexpressible if they
    differ."""
    found = {part for i in range(c.n_layers) if isinstance(part := at(c.attention, i), kind)}
    if len(found) > 1:
        raise Inexpressible(f"layers have different parts of the kind {other.kind}")
    return found.pop() if found else other


def without_attention(rows: Iterable[Row], c: DecoderConfig) -> Iterator[Row]:
    """The rows of a family without layers with a state, but those of attention in these layers."""
    prefixes = tuple(f"blocks.{i}.attn." for i in range(c.n_layers) if isinstance(at(c.attention, i), Recurrent))
    for row in rows:
        if not str(row[1] if isinstance(row[1], str) else row[1][0]).startswith(prefixes):
            yield row


def mamba2(hf: HF, heads: str, prefix: str = "mamba_", **others: Any) -> Mamba2:
    """The Mamba-2 layers of a config.json, whose keys begin with `prefix`, but `heads`, the number of heads."""
    only(hf, time_step_limit=hf.get("time_step_limit") if unlimited(hf) else [0.0, float("inf")])
    named = {"d_head": "d_head", "n_groups": "n_groups", "d_state": "d_state", "d_conv": "d_conv"}
    return Mamba2(n_heads=hf[heads], **{our: hf[prefix + their] for our, their in named.items()}, **others)


def unlimited(hf: HF) -> bool:
    return hf.get("time_step_limit") is None or [*map(float, hf["time_step_limit"])] == [0.0, float("inf")]


def mamba2_names(their: str, our: str) -> Iterator[Row]:
    yield from linear(f"{their}.in_proj", [f"{our}.{name}" for name in MAMBA])
    yield from linear(f"{their}.conv1d", [f"{our}.{name}_conv" for name in ("x", "b", "c")])
    yield f"{their}.A_log", f"{our}.a_log"
    yield f"{their}.D", f"{our}.d"
    yield f"{their}.dt_bias", f"{our}.dt_bias"
    yield f"{their}.norm.weight", f"{our}.gate.weight"
    yield from linear(f"{their}.out_proj", f"{our}.out")
