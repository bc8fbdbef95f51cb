"""Command-line options from the fields of dataclasses: their types, comments and defaults are the documentation.

Does not import torch.
"""

import argparse
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from onward import fields
from onward.errors import UserError
from onward.model.config import DecoderConfig

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are a UserError in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def parse(cls: type[T], argv: Sequence[str], *, prog: str, about: str, positional: Sequence[str] = ()) -> T:
    """An instance of the dataclass `cls` from command-line words; `about` is the text of `--help`."""
    return fields.build(cls, read(cls, argv, prog=prog, about=about, positional=positional))


def read(cls: type, argv: Sequence[str], *, prog: str, about: str, positional: Sequence[str] = ()) -> dict[str, Any]:
    """Only the values that are given on the command line, as text under the names of the fields of `cls`."""
    summary, _, examples = about.partition("\n\n")
    parser = Parser(
        prog=prog,
        description=summary,
        epilog=examples,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=30),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add_fields(parser, cls, positional)
    shapes = {None: "{}", "?": "[{}]", "*": "[{} ...]"}
    places = (shapes[a.nargs].format(a.dest) for a in parser._actions if not a.option_strings)  # type: ignore[index]
    parser.usage = " ".join([prog, *places, "[options]"])
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
        raise UserError(f"{name} is not an option of {prog}: {fields.nearest(name, flags)}")
    return nest(vars(known))


def add_fields(parser: argparse.ArgumentParser, cls: type, positional: Sequence[str]) -> None:
    """Add every field of a dataclass, those of each class that it inherits from in a group of their own; a table stands
    for all fields of DecoderConfig and of its parts."""
    hints, docs = fields.hints(cls), fields.docs(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for owner in filter(dataclasses.is_dataclass, cls.__mro__):
        title = (inspect.getdoc(owner) or "").split(".")[0]
        group = parser if owner is cls else parser.add_argument_group(title)
        for name in inspect.get_annotations(owner):
            if name not in defaults:  # a subclass declares it anew
                continue
            kind, default = hints[name], defaults.pop(name)
            if fields.only_in_python(kind):
                continue
            if get_origin(kind) is dict:
                add_model(parser)
                continue
            help_text = docs[name].replace("%", "%%")
            many = get_origin(kind) is tuple
            if name in positional:
                optional = default is not dataclasses.MISSING
                parser.add_argument(name, nargs="*" if many else "?" if optional else None, help=help_text)
            elif kind is bool:
                group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=help_text)
            else:
                shown = "" if default in (dataclasses.MISSING, "", None, ()) else f" (default: {default})"
                one, nargs = (get_args(kind)[0], "+") if many else (kind, None)
                group.add_argument(flag(name), metavar=metavar(one), nargs=nargs, help=help_text + shown)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add `--model.FIELD` for the fields of DecoderConfig and `--model.PART.FIELD` for those of its parts."""
    group = parser.add_argument_group(
        "model",
        "A part is written as name or name(field=value); several that repeat over the layers as (first, second).",
    )
    hints, docs = fields.hints(DecoderConfig), fields.docs(DecoderConfig)
    for name, kind in hints.items():
        group.add_argument(flag(f"model.{name}"), metavar=metavar(kind), help=docs[name].replace("%", "%%"))
    group = parser.add_argument_group("fields of the model's parts")
    for name, kind in hints.items():
        owners: dict[str, list[type[fields.Part]]] = {}
        for part in part_kinds(kind):
            for own in fields.hints(part):
                owners.setdefault(own, []).append(part)
        for own, parts in owners.items():
            help_text = f"{', '.join(p.kind for p in parts)}: {fields.docs(parts[0]).get(own, '')}"
            own_kind = fields.hints(parts[0])[own]
            group.add_argument(
                flag(f"model.{name}.{own}"), metavar=metavar(own_kind), help=help_text.replace("%", "%%")
            )


def part_kinds(kind: Any) -> list[type[fields.Part]]:
    """The choices of a field that holds a part, or several; none for any other field."""
    slots = [a for a in (kind, *get_args(kind)) if isinstance(a, type) and issubclass(a, fields.Part)]
    return [part for slot in slots for part in slot.kinds.values()]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def metavar(kind: Any) -> str:
    """A short name for the values of a type."""
    if get_origin(kind) is Mapping:
        return f"{{{': '.join(map(metavar, get_args(kind)))}}}"
    words = "|".join(k.kind for k in part_kinds(kind)) or fields.describe(kind)
    for long, short in {"a whole number": "N", "a number": "X", " or ": "|"}.items():
        words = words.replace(long, short)
    return "TEXT" if words == "text" else words


def nest(values: dict[str, Any]) -> dict[str, Any]:
    """`{"model.position": "rotary", "model.position.theta": "5e5"}` as nested tables."""
    result: dict[str, Any] = {}
    for name, value in sorted(values.items()):  # a part before its fields
        *path, last = name.replace("-", "_").split(".")
        table = result
        for depth, step in enumerate(path):
            inner = table.setdefault(step, {})
            if isinstance(inner, str):
                inner = table[step] = fields.parse(inner, ".".join(path[: depth + 1]))
            if not isinstance(inner, dict):
                raise UserError(f"{name} cannot be set where {step} is several parts: write it inside each of them")
            table = inner
        table[last] = value
    return result
