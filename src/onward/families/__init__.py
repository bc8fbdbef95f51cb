"""Families: published kinds of decoders. Each is a module that translates between their files and Onward's decoder.

A family file defines

- `ARCHITECTURES`: its model_type -> the class of transformers that loads it,
- `SOURCE` (optional): the papers or pages that describe it,
- `PREDICTION` (optional): the names of its layer for multi-token prediction in published files,
- `BASE`: the prefix of all tensor names except the head's, which some published files leave out,
- `ALSO` (optional): parts of tensor names -> their replacements in some files,
- `published(config, stored)` (optional): the stored tensors, divided as `names` expects,
- `IGNORED`: a regular expression for tensors of old files that are not weights (masks, inverse frequencies),
- `PRESETS`: published releases by name, as the keys of their config.json that differ from transformers' defaults, or
  as a DecoderConfig if transformers has no such class,
- `ANCESTORS`: prefix of a preset's name -> the preset from which its design is derived (the longest prefix applies),
- `config(hf) -> DecoderConfig`: the decoder that a config.json describes,
- `to_hf(config) -> dict`: the keys of a config.json that describes the decoder; `require` refuses other decoders,
- `names(config)`: pairs (their tensor name, our tensor name), each with an optional pair of inverse functions (theirs
  to ours, ours to theirs). If ours is a list, their tensor fuses our tensors along the rows; if theirs is a list, our
  tensor stacks theirs.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from onward.base import fields
from onward.base.errors import UserError
from onward.base.fields import nearest
from onward.config.decoder import DecoderConfig, Experts, Gated, Plain
from onward.families._foreign import refuse_foreign
from onward.families._interface import HF, Family, Fix, Names, Row  # noqa: F401  # which family files import from here
from onward.families._interleaved import interleaved  # noqa: F401
from onward.families._keys import RecordedKeys
from onward.families._refusals import refusal
from onward.families._saving import Inexpressible, keys_of, require  # noqa: F401

if TYPE_CHECKING:
    from onward.families._wrappers import TextPart

__all__ = ["Family", "Preset", "express", "families", "family", "preset", "presets", "read"]  # the public names

# families that `express` tries first
FIRST = (
    "llama",
    "gpt2",
    "mistral",
    "ministral",
    "qwen3",
    "qwen2",
    "mixtral",
    "qwen3_moe",
    "phi3",
    "gptj",
    "opt",
    "deepseek_v2",
    "deepseek_v3",
    "smollm3",
)
ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}  # names in config.json -> Onward's names
THEIRS = {our: their for their, our in reversed(ACTIVATIONS.items())}


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
    """Return a published release; for an unknown name, raises a UserError that suggests one or one of `others`."""
    if name not in presets():
        from onward.families._unread import unknown

        raise UserError(unknown(name, {one.name: one.family for one in presets().values()}, others))
    return presets()[name]


def of_its_name(model_type: str) -> Family | None:
    """Return the family whose file is named after the model_type, which takes one import instead of all; None if there
    is no such file."""
    name = model_type.replace("-", "_")
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or importlib.util.find_spec(f"{__name__}.{name}") is None:
        return None
    module: Any = importlib.import_module(f"{__name__}.{name}")
    return module if model_type in module.ARCHITECTURES else None


def family(model_type: str) -> Family:
    """Return the family module for a model_type in config.json; a UserError gives the reason if there is none."""
    if (module := of_its_name(model_type)) is not None:
        return module
    if model_type not in families():
        from onward.families._unread import UNREAD

        if reason := UNREAD.get(model_type):
            raise UserError(
                f"Cannot read model_type {model_type!r}, because {reason}: docs/models-of-transformers.md lists the "
                "models that Onward reads"
            )
        raise UserError(
            f"model_type {model_type!r} is not a family that Onward knows (docs/families.md shows how to add one): "
            f"{nearest(model_type, families())}"
        )
    return families()[model_type]


def text_part(hf: HF) -> TextPart | None:
    """Return the text decoder in the config.json of a model that also takes images or audio; None for others."""
    model_type = str(hf.get("model_type"))
    if of_its_name(model_type) is not None or model_type in families():
        return None
    from onward.families._wrappers import text_part

    return text_part(hf)


def read(hf: HF, where: str = "config.json") -> tuple[Family, DecoderConfig]:
    """Return the family and the decoder's configuration of a config.json, whose path is `where`; for a model that also
    takes images or audio, those of its text decoder. Raises a UserError for an unread key that would change the decoder
    in another family; warns of other unread keys unless they are known to be harmless."""
    hf = part.keys if (part := text_part(hf)) else hf
    keys = RecordedKeys(hf)
    try:
        kind = family(str(keys.get("model_type")))
    except UserError as error:
        raise UserError(f"{where}: {error if hf.get('model_type') else 'model_type is missing: add it'}") from None
    try:
        config = decoder_of(kind, keys)
    except UserError as error:
        raise UserError(refusal(partial(decoder_of, kind), hf, error, where)) from None
    if unread := keys.unread():
        refuse_foreign(hf, unread, config, where, {name: partial(decoder_of, one) for name, one in families().items()})
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


def only(hf: HF, **known: Any) -> None:
    """Raise a UserError if `hf`, the content of a config.json, has a key of `known` whose value differs from the given
    one, the only value that Onward supports."""
    for key, value in known.items():
        if hf.get(key, value) != value:
            raise UserError(f"config.json has {key} {hf[key]!r}: Onward supports only {value!r}")


def activation(mlp: object) -> str:
    """Return the name in config.json for the activation of a feed-forward."""
    return THEIRS[require(mlp, Plain, Gated, Experts).act]


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
    `our` its name in Onward, or a list of names if files fuse several layers into one. `fix` is empty or one pair of
    functions that convert values to Onward's and back."""
    for leaf in ("weight", "bias"):
        ours = [f"{o}.{leaf}" for o in our] if isinstance(our, list) else f"{our}.{leaf}"
        yield (f"{their}.{leaf}", ours, fix[0]) if fix else (f"{their}.{leaf}", ours)


def with_defaults(hf: HF, defaults: HF) -> HF:
    return ChainMap(hf, defaults)  # type: ignore[arg-type]  # it is only read


def renamed(hf: HF, names: Mapping[str, str]) -> HF:
    """Return `hf` with additional names for some keys, given by `names` as {name in `hf`: additional name}."""
    return with_defaults({other: hf[name] for name, other in names.items() if name in hf}, hf)


def sizes(hf: HF, keys: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return fields of DecoderConfig by name, read from `hf`, the content of a config.json. `keys` maps each field to
    (key in config.json, default of transformers); fields whose value is None are left out."""
    values = {our: hf.get(their, default) for our, (their, default) in keys.items()}
    return {our: value for our, value in values.items() if value is not None}
