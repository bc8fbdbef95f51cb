"""Derive the arguments of a command from a dataclass: from the types, comments and defaults of its fields.

Does not import torch.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from onward.base import fields
from onward.base.arguments import Choice, Row, Several, Table, Type, field_types, type_of
from onward.config.decoder import DecoderConfig

LONGEST = 80  # placeholders of this length or more are replaced by NAME
IMPORTS = "module to import first, which defines your own parts"


@dataclasses.dataclass(frozen=True)
class Argument:
    """An option or a positional argument of a command, for the parser, `--help` and shell completion."""

    name: str  # name of the field; dots separate nested fields, as in model.position.theta
    kind: Type
    help: str
    group: str = "options"
    default: Any = None
    positional: bool = False
    required: bool = False
    of_part: bool = False  # whether the field belongs to the command's part; see `arguments`

    @property
    def flag(self) -> str:
        return fields.flag(self.name)

    @property
    def many(self) -> bool:
        """Whether several values are allowed, in sequence or by repeating the option."""
        return isinstance(self.kind, Row | Several)

    @property
    def is_switch(self) -> bool:
        return self.kind.annotation is bool

    @property
    def choices(self) -> list[str]:
        """The allowed names, of parts or of a Literal; empty if any value of the type is allowed."""
        if isinstance(self.kind, Choice):
            return [str(choice) for choice in self.kind.values if choice != ""]
        return [part.kind for part in fields.part_choices(self.kind)]


def arguments(cls: type) -> Iterator[Argument]:
    """The options and positional arguments of a command: the fields of the dataclass `cls` that can be written as text
    and are not in its class variable `fixed`. A field of type dict yields the arguments of `model_arguments`. The
    fields of the class in the class variable `part`, such as a fine-tuning method, and `--import` are options, too."""
    if part := getattr(cls, "part", None):
        for name, kind in field_types(part).items():
            default, about = getattr(part, name, None), fields.docs(part).get(name, "")
            yield Argument(name, kind, about, f"options of {part.kind}", default, of_part=True)
    types, docs = field_types(cls), fields.docs(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    positional = getattr(cls, "positional", ())
    for owner in filter(dataclasses.is_dataclass, cls.__mro__):
        title = (
            "options" if owner is cls or "positional" in vars(owner) else (inspect.getdoc(owner) or "").split(".")[0]
        )
        for name in inspect.get_annotations(owner):
            if name not in defaults:  # a class variable, or a field that a subclass redeclares
                continue
            default = defaults.pop(name)
            if name == "imports" or name in getattr(cls, "fixed", ()) or types[name].only_in_python:
                continue
            if types[name].origin is dict:
                yield from model_arguments()
            else:
                required = default is dataclasses.MISSING
                default = None if required else default
                yield Argument(name, types[name], docs[name], title, default, name in positional, required)
    yield Argument("imports", type_of(tuple[str, ...]), IMPORTS)


def model_arguments() -> Iterator[Argument]:
    """`--model.FIELD` for the fields of DecoderConfig, and `--model.PART.FIELD` for those of its parts."""
    title = "model (write a part as name or name(field=value); parts that repeat over the layers as (first, second))"
    types, docs = field_types(DecoderConfig), fields.docs(DecoderConfig)
    for name, kind in types.items():
        yield Argument(f"model.{name}", kind, docs[name], title)
    for name, kind in types.items():
        owners: dict[str, list[type[fields.Part]]] = {}
        for part in fields.part_choices(kind):
            for own in field_types(part):
                owners.setdefault(own, []).append(part)
        for own, holders in owners.items():
            help_text = f"{', '.join(p.kind for p in holders)}: {fields.docs(holders[0]).get(own, '')}"
            yield Argument(
                f"model.{name}.{own}", field_types(holders[0])[own], help_text, "fields of the model's parts"
            )


def metavar(kind: Type) -> str:
    """Return the placeholder that `--help` shows for a value of a type, such as N for an int."""
    if isinstance(kind, Table):
        return f"{{{': '.join(map(metavar, kind.args))}}}"
    words = "|".join(part.kind for part in fields.part_choices(kind)) or fields.describe(kind)
    for long, short in {"a whole number": "N", "a number": "X", " or ": "|"}.items():
        words = words.replace(long, short)
    words = words.removeprefix("|")  # the first choice may be empty
    return "TEXT" if words == "text" else words if len(words) < LONGEST else "NAME"
