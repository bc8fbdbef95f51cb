"""Families: published kinds of decoders. Each is a small file of this folder that translates in both directions.

A family file defines

- `ARCHITECTURES`: its model_type -> the class of transformers that loads it,
- `BASE`: the prefix of all tensor names but the head's, which some published files leave out,
- `ALSO` (if needed): parts of tensor names -> what some files have in their place,
- `IGNORED`: a regular expression for tensors of old files that are no weights (masks, inverse frequencies),
- `PRESETS`: published releases by name: the keys of their config.json that differ from transformers' defaults, or a
  DecoderConfig where transformers has no such class,
- `ANCESTORS`: prefix of a preset's name -> the preset from which its design is derived (the longest prefix counts),
- `config(hf) -> DecoderConfig`: the decoder that a config.json describes,
- `to_hf(config) -> dict`: the keys of a config.json that describes the decoder; `require` refuses other decoders,
- `names(config)`: pairs (their tensor name, our tensor name), each with an optional pair of inverse functions (theirs
  to ours, ours to theirs). A list of our names is a tensor that they fuse along rows, a list of theirs a stack of ours.

Nothing else in Onward depends on a family's name.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, overload

from onward.base import fields
from onward.base.arguments import OutOfRange
from onward.base.errors import UserError
from onward.base.fields import Part, nearest
from onward.config.decoder import DecoderConfig, Experts, Gated, Plain
from onward.families._keys import RecordedKeys

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Family", "Preset", "express", "families", "family", "preset", "presets", "read"]  # the public names

FIRST = ("llama", "gpt2", "mistral", "qwen3")  # tried first by `express`
HF = Mapping[str, Any]
P = TypeVar("P", bound=Part)
Q = TypeVar("Q", bound=Part)
R = TypeVar("R", bound=Part)
Fix = tuple["Callable[[Tensor], Tensor]", "Callable[[Tensor], Tensor]"]
ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}  # their names -> ours
THEIRS = {our: their for their, our in reversed(ACTIVATIONS.items())}
Row = tuple[str | list[str], str | list[str]] | tuple[str | list[str], str | list[str], Fix]


class Names(Protocol):
    """The mapping between tensor names in files of a format and parameter names in Onward's Decoder."""

    @property
    def BASE(self) -> str:
        """A prefix of tensor names that some files leave out, such as "model."; "" for none."""

    @property
    def IGNORED(self) -> str:
        """A regular expression for tensors in files that are not read, such as stored masks; "" for none."""

    def names(self, config: DecoderConfig) -> Iterator[Row]:
        """Rows of the mapping: (name in files, name in Onward), each perhaps a list of tensors that are fused or
        stacked to one, and perhaps functions that convert values to Onward's and back."""


class Family(Names, Protocol):
    """A family of published decoders, such as Llama: a module that translates between config.json and DecoderConfig."""

    ARCHITECTURES: dict[str, str]  # model_type -> class name in transformers
    PRESETS: dict[str, HF | DecoderConfig]  # config of each release, by name
    ANCESTORS: dict[str, str]  # prefix of a release's name -> the preset that it derives from

    def config(self, hf: HF) -> DecoderConfig:
        """The decoder that a config.json describes; missing keys have the defaults of transformers."""

    def to_hf(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of a config.json that describes a decoder; raises Inexpressible if it cannot."""


@cache
def modules() -> dict[str, Any]:
    """The family modules by name, in the order in which `express` tries them as formats to save a model in: the most
    widely supported first and `onward`, which can describe every decoder, last."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    order = {name: place for place, name in enumerate((*FIRST, *sorted({*names} - {*FIRST, "onward"}), "onward"))}
    return {name: importlib.import_module(f"{__name__}.{name}") for name in sorted(names, key=order.__getitem__)}


@cache
def families() -> dict[str, Family]:
    """Return the family module for each model_type, the value in config.json that names the family."""
    return {model_type: module for module in modules().values() for model_type in module.ARCHITECTURES}


@dataclass(frozen=True)
class Preset:
    """A published release of a family of decoders, such as gpt2 or llama-2-7b, with its configuration."""

    name: str
    family: str  # name of the family's file
    published: HF | DecoderConfig  # config.json without transformers' defaults, or the decoder itself
    ancestor: str  # preset that the design derives from; "" for the first one

    @property
    def config(self) -> DecoderConfig:
        if isinstance(self.published, DecoderConfig):
            return self.published
        return cast(DecoderConfig, modules()[self.family].config(self.published))


@cache
def presets() -> dict[str, Preset]:
    """Return every published release of which Onward knows the configuration, by name."""
    result = {}
    for family, module in modules().items():
        for name, published in module.PRESETS.items():
            beginnings = [beginning for beginning in module.ANCESTORS if name.startswith(beginning)]
            ancestor = module.ANCESTORS[max(beginnings, key=len)] if beginnings else ""
            result[name] = Preset(name, family, published, ancestor)
    return result


def preset(name: str, others: Iterable[str] = ()) -> Preset:
    """Return the published release `name`. Raises a UserError that suggests the nearest name among the releases and
    `others`, further names that the caller accepts."""
    if name not in presets():
        raise UserError(f"{name!r} is not a preset that Onward knows: {nearest(name, [*others, *presets()])}")
    return presets()[name]


def family(model_type: str) -> Family:
    """Return the family module for a model_type, a value in config.json. Raises a UserError that suggests the nearest
    known one."""
    if model_type not in families():
        raise UserError(
            f"model_type {model_type!r} is not a family that Onward knows (docs/families.md shows how to add one): "
            f"{nearest(model_type, families())}"
        )
    return families()[model_type]


def read(hf: HF, where: str = "config.json") -> tuple[Family, DecoderConfig]:
    """(family, decoder's configuration) of a config.json, whose path is `where`. Warns of keys that were not read,
    unless they are known to be harmless."""
    keys = RecordedKeys(hf)
    try:
        kind = family(str(keys.get("model_type")))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    try:
        config = decoder_of(kind, keys)
    except UserError as error:
        raise UserError(refusal(kind, hf, error, where)) from None
    keys.warn()
    return kind, config


def decoder_of(kind: Family, hf: HF) -> DecoderConfig:
    try:
        return fields.build(DecoderConfig, fields.plain(kind.config(hf)))
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"give it another value, or leave it out for the default of transformers ({what})") from None


def refusal(kind: Family, hf: HF, error: UserError, where: str) -> str:
    """The message for an invalid config.json, which names its keys in place of the fields of DecoderConfig."""
    message = str(error)
    if message.startswith("config.json"):  # which names the key
        return where + message.removeprefix("config.json")
    blamed = blame(kind, hf, message)
    if isinstance(error, OutOfRange):
        exact = {key: value for key, value in blamed.items() if value is error.value or value == error.value}
        if exact:
            blamed, message = exact, error.allowed
    named = " and ".join(f"{key} {value!r:.60}" for key, value in blamed.items())
    return f"{where} has {named}: {message}" if named else f"{where}: {message}"


def blame(kind: Family, hf: HF, message: str) -> dict[str, Any]:
    """The keys of a config.json that cause a UserError with this message, by dotted key: at most three.

    A key is a cause if reading succeeds without it. Keys whose removal changes the message are added if the message
    contains their value; if no removal succeeds, they alone are the causes."""
    cured, changed = dict[str, Any](), dict[str, Any]()
    for path, value, without in variants(hf):
        try:
            decoder_of(kind, without)
            cured[path] = value
        except UserError as error:
            if str(error) != message:
                changed[path] = value
    if cured:
        changed = {key: value for key, value in changed.items() if mentions(message, value)}
    causes = cured | changed
    inner = [key for key in causes if not any(other.startswith(f"{key}.") for other in causes)]
    return {key: causes[key] for key in inner[:3]}


def mentions(message: str, value: Any) -> bool:
    """Whether a message contains the `repr` of a value, not inside another number or word."""
    return re.search(rf"(?<![\w.]){re.escape(repr(value))}(?![\w.])", message) is not None


def variants(hf: HF, prefix: str = "") -> Iterator[tuple[str, Any, HF]]:
    """(dotted key, value, copy without this key) for each key of a config.json and its inner tables but model_type."""
    for key, value in hf.items():
        if key != "model_type":
            yield prefix + key, value, {k: v for k, v in hf.items() if k != key}
        if isinstance(value, Mapping):
            for path, inner, without in variants(value, f"{prefix}{key}."):
                yield path, inner, {**hf, key: without}


def only(hf: HF, **known: Any) -> None:
    """Raise a UserError if `hf`, the content of a config.json, has a key of `known` with another value than the given
    one, the only value that Onward supports."""
    for key, value in known.items():
        if hf.get(key, value) != value:
            raise UserError(f"config.json has {key} {hf[key]!r}: Onward supports only {value!r}")


class Inexpressible(UserError):
    """The config.json of a family cannot describe a decoder, so that another format is tried."""


@overload
def require(part: object, kind: type[P], /) -> P: ...
@overload
def require(part: object, kind: type[P], other: type[Q], /) -> P | Q: ...
@overload
def require(part: object, kind: type[P], other: type[Q], third: type[R], /) -> P | Q | R: ...
def require(part: object, /, *kinds: type[Part]) -> Part:
    """Return `part`, a component of a decoder such as its norm, if it is an instance of one of the classes `kinds`.
    Raises Inexpressible, which says that a family has no such decoder, for any other part and for a tuple of parts, one
    per layer."""
    if isinstance(part, kinds):
        return part
    raise Inexpressible(f"{type(part).__name__} is not {' or '.join(kind.__name__ for kind in kinds)}")


def activation(mlp: object) -> str:
    """config.json's name for the activation of a feed-forward."""
    return THEIRS[require(mlp, Plain, Gated, Experts).act]


def keys_of(family: Family, config: DecoderConfig, original: HF) -> dict[str, Any] | None:
    """The keys of a config.json for a decoder, added to `original`; None if the family cannot express it: its `to_hf`
    raises Inexpressible, or its `config` reads another decoder from these keys. Values of `original` that describe the
    same decoder in other words stay."""
    try:
        ours = family.to_hf(config)
    except Inexpressible:
        return None
    for hf in {**ours, **original}, {**original, **ours}:
        try:  # what is read back is compared, so that `to_hf` needs no checks besides `require`
            if family.config(hf) == config:
                return hf
        except UserError:
            continue
    return None


def express(config: DecoderConfig, accepts: Callable[[Family], bool] = lambda family: True) -> dict[str, Any]:
    """Return the content of a config.json for a decoder, in the format of the first family that can describe it fully
    and for which `accepts` returns True. Used to save a model."""
    for model_type, candidate in families().items():
        hf = keys_of(candidate, config, {"model_type": model_type})
        if hf is not None and accepts(candidate):
            return hf | {"architectures": [candidate.ARCHITECTURES[model_type]]}
    raise AssertionError("the family `onward` expresses every decoder")


def linear(their: str, our: str | list[str], *fix: Fix) -> Iterator[Row]:
    """Yield the rows of the name mapping for the weight and the bias of a linear layer: `their` is its name in files,
    `our` its name in Onward, or a list of names if files fuse several layers to one. `fix` is empty or one pair of
    functions that convert values to Onward's and back."""
    for leaf in ("weight", "bias"):
        ours = [f"{o}.{leaf}" for o in our] if isinstance(our, list) else f"{our}.{leaf}"
        yield (f"{their}.{leaf}", ours, fix[0]) if fix else (f"{their}.{leaf}", ours)


def interleaved(d_head: int, rope_dim: int, start: int = 0) -> Fix:
    """Return a pair of functions that reorder the rows of query and key projections: from files whose rotary positions
    pair elements 2 i and 2 i + 1 of a head (GPT-J, RoFormer) to Onward's pairs i and i + rope_dim / 2, and back.

    The `rope_dim` rotated elements of each head begin at element `start`. Weights are (H * d_head, D), biases (H *
    d_head). The attention scores stay the same.
    """
    end = start + rope_dim
    order = [*range(start), *range(start, end, 2), *range(start + 1, end, 2), *range(end, d_head)]
    back = sorted(range(d_head), key=order.__getitem__)

    def reorder(t: Tensor, rows: list[int]) -> Tensor:
        if t.is_meta:  # the shape stays, and an index on the meta device takes half a second of imports
            return t
        import torch

        return t.unflatten(0, (-1, d_head)).index_select(1, torch.tensor(rows, device=t.device)).flatten(0, 1)

    return lambda t: reorder(t, order), lambda t: reorder(t, back)


def with_defaults(hf: HF, defaults: HF) -> HF:
    return ChainMap(hf, defaults)  # type: ignore[arg-type]  # it is only read


def sizes(hf: HF, keys: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return fields of DecoderConfig by name, read from `hf`, the content of a config.json. `keys` maps each field to
    (key in config.json, default of transformers); fields whose value is None are left out."""
    values = {our: hf.get(their, default) for our, (their, default) in keys.items()}
    return {our: value for our, value in values.items() if value is not None}
