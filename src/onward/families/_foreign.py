"""Keys of a config.json that its family does not read and another family does. Does not import torch."""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from onward.base import fields
from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, at

Read = Callable[[Mapping[str, Any]], DecoderConfig]
SIZES = {"vocab_size", "context_length", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff"}
COMMON = {"act", "eps", "theta", "dropout", "tied"}


def refuse_foreign(
    hf: Mapping[str, Any], unread: Iterable[str], config: DecoderConfig, where: str, families: Mapping[str, Read]
) -> None:
    """Raise a UserError if a key of the config.json `hf` that its family did not read has an effect in one of
    `families`, functions that read a config.json. `where` is the path of the file, `config` its decoder."""
    for key in unread:
        if other := honored_by(hf, key, config, families):
            raise UserError(
                f"{where} has {key} {hf[key]!r:.60}, which changes a model of type {other} but which "
                f"{hf['model_type']} does not read: correct model_type, or remove the key if this model was trained "
                "without it"
            )


def honored_by(hf: Mapping[str, Any], key: str, config: DecoderConfig, families: Mapping[str, Read]) -> str:
    """Return the first model_type for which this key of a config.json raises an error that names it, or changes no size
    of the decoder but a field outside of COMMON, to another value than in `config`; "" if there is none."""
    own, without = values(config), {k: v for k, v in hf.items() if k != key}
    for model_type, read in families.items():
        try:
            before, after = values(read(without)), values(read(hf))
        except UserError as error:
            if str(error).startswith(f"config.json has {key} "):  # the error names the key
                return model_type
            continue
        with suppress(UserError):  # null may mean another value than the family's default
            before = before if before != after else values(read({**hf, key: None}))
        changed, different = differing(before, after), differing(after, own)
        if (changed & different) - COMMON and not changed & SIZES:
            return model_type
    return ""


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> set[str]:
    """Return the fields with different values in two results of `values`, regardless of the layer."""
    paths = [path for path in {**first, **second} if first.get(path) != second.get(path)]
    return {re.sub(r"^\w+\.\d+\.", "", path) for path in paths}


def values(config: DecoderConfig) -> dict[str, Any]:
    """Return the values of a decoder's configuration by dotted path, with the parts of each layer."""
    table = fields.plain(config)
    for name, part in table.items():
        if isinstance(part, dict | list):
            table[name] = [fields.plain(at(getattr(config, name), layer)) for layer in range(config.n_layers)]
    return leaves(table)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict | list):
        return {path: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {name: leaf for key, inner in pairs for name, leaf in leaves(inner, f"{path}.{key}".strip(".")).items()}
