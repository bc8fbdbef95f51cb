"""Decoders as the config.json of a family: the parts that `to_hf` requires, and whether `config` reads them back."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from onward.base.errors import UserError
from onward.base.fields import Part
from onward.config.decoder import DecoderConfig
from onward.families._interface import HF, Family

P = TypeVar("P", bound=Part)
Q = TypeVar("Q", bound=Part)
R = TypeVar("R", bound=Part)


class Inexpressible(UserError):
    """Raised if the config.json of a family cannot describe a decoder; another family is then tried."""


@overload
def require(part: object, kind: type[P], /) -> P: ...
@overload
def require(part: object, kind: type[P], other: type[Q], /) -> P | Q: ...
@overload
def require(part: object, kind: type[P], other: type[Q], third: type[R], /) -> P | Q | R: ...
def require(part: object, /, *kinds: type[Part]) -> Part:
    """Return `part`, a component of a decoder such as its norm, if it is an instance of one of the classes `kinds`.
    Raises Inexpressible for any other part and for a tuple of parts, one per layer."""
    if isinstance(part, kinds):
        return part
    raise Inexpressible(f"{type(part).__name__} is not {' or '.join(kind.__name__ for kind in kinds)}")


def keys_of(family: Family, config: DecoderConfig, original: HF) -> dict[str, Any] | None:
    """Return the keys of a config.json for a decoder, added to `original`; None if the family cannot express the
    decoder: its `to_hf` raises a UserError, such as Inexpressible, or its `config` reads another decoder from these
    keys. Values of `original` that describe the same decoder in another way are kept."""
    try:
        ours = family.to_hf(config)
    except UserError:
        return None
    others = {key: value for key, value in original.items() if key != "rope_scaling"}  # it would override our keys
    for hf in {**ours, **original}, {**others, **ours}:
        try:  # reading the keys back is the check, so `to_hf` needs no checks besides `require`
            if family.config(hf) == config:
                return hf
        except UserError:
            continue
    return None
