"""Columns of tables, or keys within columns, under Onward's names. Imports nothing heavy."""

from collections.abc import Mapping
from typing import Any

from onward.base.errors import UserError


def renaming(columns: str) -> dict[str, str]:
    """Parse "prompt=question,completion=answer" to {Onward's field: column of the data}."""
    pairs = [pair.partition("=") for pair in columns.split(",") if pair.strip()]
    for name, equal, theirs in pairs:
        if not (name.strip() and theirs.strip()):
            wrong = f"{name}{equal}{theirs}".strip()
            raise UserError(
                f"columns has {wrong!r}: write Onward's name and the data's, prompt=question,completion=answer"
            )
    names = [name.strip() for name, _, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"columns names two columns for {twice[0]}: name one")
    return {name.strip(): theirs.strip() for name, _, theirs in pairs}


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """Return the value of a column, or of a key within a column by a path such as data.text. Raises KeyError if it is
    missing."""
    if path in values:
        return values[path]
    name, _, rest = path.partition(".")
    inner = values[name]
    if inner is not None and not isinstance(inner, Mapping):
        raise KeyError(path)
    return None if inner is None else value_at(inner, rest)


def without(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The row without the value that `value_at` returns for `path`."""
    name, _, rest = path.partition(".")
    if path in values or not isinstance(values.get(name), Mapping):
        return {key: value for key, value in values.items() if key != path}
    return {**values, name: without(values[name], rest)}
