"""Rebuilds the command that repeats the training of a run from its recorded options."""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from onward.base import fields
from onward.training.finetuning.config import FinetuneConfig, config_class

UNSAID = "sources", "out", "model"  # not options themselves; the fields of model are


def command(options: Mapping[str, Any]) -> list[str]:
    """Words of the command that repeats a run, with the values that Onward chose; defaults, the output folder, and
    directories of absolute paths are left out. Raises a UserError for invalid options."""
    config = fields.build(config_class(options), options)
    changed = {name: value for name, value in fields.changed_fields(config).items() if name not in UNSAID}
    words = ["onward", "train"]
    if isinstance(config, FinetuneConfig):
        words = ["onward", "finetune", public(changed.pop("base"))]
    words += map(public, config.sources)
    for name, value in [*changed.items(), *model_options(config.model)]:
        for item in value if isinstance(value, tuple) else [value]:
            words += [fields.flag(name)] if item is True else [fields.flag(name), public(fields.notation(item))]
    return words


def model_options(values: Mapping[str, Any], name: str = "model") -> Iterator[tuple[str, str]]:
    """Yield (option, value), such as ("model.n_layers", "6"), for the fields of the model that the run changed."""
    for key, value in values.items():
        if isinstance(value, Mapping) and "kind" not in value:
            yield from model_options(value, f"{name}.{key}")
        else:
            yield f"{name}.{key}", notation(value)


def notation(value: Any) -> str:
    """A JSON value in the notation of the command line, such as rotary(theta=500000)."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{name}={notation(field)}" for name, field in value.items() if name != "kind")
        return f"{value['kind']}({inner})" if inner else str(value["kind"])
    if isinstance(value, list | tuple):
        return f"({', '.join(map(notation, value))}{',' * (len(value) == 1)})"
    return fields.notation(value)


def public(text: str) -> str:
    """A text without private directories: an absolute path, whole or in quotes, becomes its last component."""
    if PurePath(text).is_absolute():
        return PurePath(text).name
    return re.sub(r"'(/[^']*)'", lambda match: repr(PurePath(match[1]).name), text)
