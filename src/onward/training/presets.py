"""Presets of decoders to train, and changes of their fields. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, get_args

from onward import families
from onward.base import fields
from onward.base.arguments import field_types
from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, RMSNorm, SelfAttention

if TYPE_CHECKING:
    from onward.planning.descriptions import ConfigChange

MINI = {"d_model": 128, "n_layers": 3, "n_heads": 4, "context_length": 128}
PRESETS: dict[str, dict[str, Any]] = {
    "auto": MINI,
    "tiny": {"d_model": 64, "n_layers": 2, "n_heads": 4, "context_length": 128},
    "mini": MINI,
    "small": {"d_model": 384, "n_layers": 6, "n_heads": 6, "context_length": 256},
    "medium": {"d_model": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 4, "context_length": 1024},
}
PARTS = {name for name, kind in field_types(DecoderConfig).items() if fields.part_choices(kind)}
FIGURES = {"parameters", "active parameters", "key/value bytes per token", "key/value bytes, windows full", "grouping"}
SHAPE: dict[str, Any] = {"attention": SelfAttention(qk_norm="head"), "norm": RMSNorm(eps=1e-6), "tied": True}


def decoder(preset: str, vocab_size: int, changes: dict[str, Any]) -> DecoderConfig:
    """Return the decoder configuration of `preset`, either a published model or, with Qwen 3's architecture, a size in
    PRESETS, for a vocabulary of `vocab_size` tokens. `changes` are values that replace fields, by field name. Raises a
    UserError if `changes` give the model a smaller vocabulary."""
    if preset in PRESETS:
        base = DecoderConfig(vocab_size=vocab_size, **SHAPE, **PRESETS[preset])
    else:
        base = families.preset(preset).config
    config = resize(base, {"vocab_size": vocab_size} | changes)
    if config.vocab_size < vocab_size:
        raise UserError(
            f"model.vocab_size is {config.vocab_size}, fewer than the {vocab_size} tokens of the tokenizer: raise it"
        )
    return config


def resize(config: DecoderConfig, changes: dict[str, Any]) -> DecoderConfig:
    """Return a decoder configuration with some fields changed; `changes` are values or texts by field name, see
    `merge`.

    A size that equals its derived value is derived again unless it is changed too: d_head (d_model / n_heads),
    n_kv_heads (n_heads), d_embed (d_model), d_ff, embed_scale (sqrt(d_model)). If d_model changes, a d_ff with another
    value keeps its ratio to d_model, rounded to a multiple of 8.
    """
    values = merge(fields.plain(config), changes, "model")
    width = max(8, fields.convert(int, values["d_model"], "model.d_model"))
    followed = {
        "d_head": config.d_model / config.n_heads,
        "n_kv_heads": config.n_heads,
        "d_embed": config.d_model,
        "d_ff": replace(config, d_ff=0).d_ff,
    }
    follows: dict[str, Any] = {name: 0 for name, value in followed.items() if getattr(config, name) == value}
    if width != config.d_model:
        follows = {"d_ff": max(8, round(config.d_ff * width / config.d_model / 8) * 8)} | follows
        if config.embed_scale == config.d_model**0.5:
            follows["embed_scale"] = width**0.5
    return fields.build(DecoderConfig, values | {k: v for k, v in follows.items() if k not in changes}, "model")


def merge(
    base: dict[str, Any], over: dict[str, Any], where: str = "", owner: type[fields.Part] | None = None
) -> dict[str, Any]:
    """Return the fields `base` of a decoder configuration, merged with the fields `over`, which take precedence; both
    are dicts by field name. `where` is the path of these fields, for errors; `owner` is the class whose fields they
    are.

    A part, a component such as an attention or a norm, is a nested dict. A part in `over` with a `kind` replaces the
    part in `base`. If the part in `base` has the same kind or a base class of it, the new part inherits the fields that
    it does not set; from several such parts in `base` (one for each layer), it inherits the fields that have the same
    value in all of them. A part in `over` without a `kind` changes fields of the part in `base`, which must be a single
    part for all layers. Raises a UserError if `base` has several parts there, one for each layer.
    """
    result = dict(base)
    for name, value in over.items():
        path, there = f"{where}.{name}".strip("."), base.get(name)
        kinds = kinds_of(DecoderConfig if where == "model" else owner, name)
        if where == "model" and name in PARTS and value != "none":  # "none" means that there is no part
            there, value = tables(there, path), tables(value, path)
            if isinstance(value, list):
                result[name] = [inherited(there, each, path, kinds) for each in value]
                continue
        if isinstance(value, dict) and "kind" in value:
            value = inherited(there, value, path, kinds)
        elif isinstance(value, dict) and isinstance(there, list):
            raise UserError(f"{path} consists of several parts: write {', '.join(value)} inside each of them")
        elif isinstance(value, dict) and isinstance(there, dict):
            value = merge(there, value, path, kinds.get(there.get("kind", "")))
        result[name] = value
    return result


def kinds_of(owner: type | None, name: str) -> Mapping[str, type[fields.Part]]:
    """Return, by kind, the classes that the field `name` of the class `owner` can hold if it is a component of the
    decoder, such as a norm; {} for other fields."""
    kind = fields.hints(owner).get(name) if owner else None
    types = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, fields.Part)]
    return {kind: cls for one in types for kind, cls in one.kinds.items()}


def inherited(there: Any, value: Any, path: str, kinds: Mapping[str, type[fields.Part]]) -> Any:
    """Complete the dict `value` of a decoder component, such as a norm, with fields of the component that it replaces
    (`there`, a dict or a list of dicts), and return it. Fields are inherited only if the class of `value` is the class
    of `there` or a subclass; a field that the subclass redeclares keeps its default. `path` names the field in
    errors; `kinds` maps kinds to classes."""
    if not isinstance(value, dict):
        return value  # the decoder's constructor raises the error
    made = kinds.get(value["kind"])
    shared: dict[str, Any] | None = None
    for part in as_list(there):
        kind = part.get("kind") if isinstance(part, dict) else None
        if kind == value["kind"]:
            own = part
        elif made and (parent := kinds.get(str(kind))) and issubclass(made, parent):
            anew = {name for cls in made.__mro__ if not issubclass(parent, cls) for name in get_annotations(cls)}
            own = {name: field for name, field in part.items() if name not in anew | {"kind", "import"}}
        else:
            continue
        shared = own if shared is None else {name: x for name, x in shared.items() if name in own and own[name] == x}
    return merge(shared or {}, value, path, made)


def tables(value: Any, path: str) -> Any:
    """Convert a decoder component, or a list of them, to dicts of the fields that were set, with the `kind`; a
    component may be given as text or as a Python object. `path` is the name of the field, for errors."""
    if isinstance(value, str):
        return fields.parse(value, path)
    if isinstance(value, fields.Part):
        named = {name: getattr(value, name) for name in fields.hints(type(value)) if name in value.named}
        plain = {name: tables(v, path) if isinstance(v, fields.Part) else v for name, v in named.items()}
        return fields.kind_of(value) | plain
    return [tables(each, path) for each in value] if isinstance(value, list | tuple) else value


def plain_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Convert changes of a decoder, by field name, to the format in which run.json stores them: components such as
    norms become dicts of the fields that were set."""
    return {
        name: value if isinstance(value, str) else fields.plain(tables(value, f"model.{name}"))
        for name, value in changes.items()
    }


def unnamed_changes(
    preset: str, config: DecoderConfig, changes: Mapping[str, Any], sizes: Mapping[str, int] | None = None
) -> list[str]:
    """List the differences between the decoder `config` and its preset that follow from the user's `changes` (by field
    name) without being named in them, such as dependent sizes; `onward train` prints them.

    `sizes` are fields that Onward chose, which do not count as differences. Each difference is written as `norm.eps
    1e-06 -> 1e-05`; a field that the new kind of component lacks becomes `absent`.
    """
    from onward.planning.descriptions import differences

    named = {"vocab_size", *changes}
    for name, value in changes.items():
        parts = as_list(tables(value, name)) if name in PARTS and value != "none" else []
        named |= {f"{name}.{field}" for part in parts if isinstance(part, dict) for field in part}
    if any(name.endswith("bias") for name in named):
        named.add("biases")
    inside = tuple(f"{name}." for name in named if "." in name)
    return [
        in_words(change)
        for change in differences(decoder(preset, config.vocab_size, dict(sizes or {})), config)
        if change.before is not None and change.what not in named | FIGURES and not change.what.startswith(inside)
    ]


def in_words(change: ConfigChange) -> str:
    """Return a difference of two decoders as text, such as `norm.eps 1e-06 -> 1e-05`."""
    before, after = ("absent" if value is None else fields.text(value) for value in (change.before, change.after))
    return f"{change.what} {before} -> {after}"


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
