"""The arguments of a command, from the fields of a dataclass: types, comments and defaults are the documentation.

Does not import torch.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from onward.base import fields
from onward.config.decoder import DecoderConfig

LONGEST = 80  # characters of the choices of an option, which are then listed apart
IMPORTS = "module with parts of your own, which is imported first"


@dataclasses.dataclass(frozen=True)
class Argument:
    """An option of a command or, if `positional`, a positional argument, made from a field of the command's dataclass;
    from it the parser, `--help` and the shell completion are made."""

    name: str  # name of the field; dots separate nested fields, as in model.position.theta
    kind: Any  # type of the field
    help: str
    group: str = "options"
    default: Any = None
    positional: bool = False
    required: bool = False
    of_part: bool = False  # whether the field belongs to the command's part; see `arguments`

    @property
    def flag(self) -> str:
        """The option as typed, such as --batch-size."""
        return fields.flag(self.name)

    @property
    def many(self) -> bool:
        """Whether several values are allowed: of a positional argument one after the other, of an option by giving the
        option several times."""
        return get_origin(self.kind) is tuple

    @property
    def choices(self) -> list[str]:
        """The names that the option allows, such as the kinds of a model part or the values of a Literal; empty if any
        value of its type is allowed."""
        if get_origin(self.kind) is Literal:
            return [str(choice) for choice in get_args(self.kind) if choice != ""]
        return [part.kind for part in fields.part_choices(self.kind)]


def arguments(cls: type) -> Iterator[Argument]:
    """Yield the options and positional arguments of a command: one for every field of the dataclass `cls` that can be
    written as text. A field whose type is a dict stands for the options of `model_arguments`; if `cls` has a class
    variable `part`, a class such as a fine-tuning method, the fields of that class are options too. Last comes
    `--import`, which every command has."""
    if part := getattr(cls, "part", None):
        for name, kind in fields.hints(part).items():
            default = getattr(part, name, None)
            yield Argument(name, kind, fields.docs(part)[name], f"options of {part.kind}", default, of_part=True)
    hints, docs = fields.hints(cls), fields.docs(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    positional = getattr(cls, "positional", ())
    for owner in filter(dataclasses.is_dataclass, cls.__mro__):
        title = (
            "options" if owner is cls or "positional" in vars(owner) else (inspect.getdoc(owner) or "").split(".")[0]
        )
        for name in inspect.get_annotations(owner):
            if name not in defaults:  # a class variable, or declared anew by a subclass
                continue
            default = defaults.pop(name)
            if name == "imports" or name in getattr(cls, "fixed", ()) or fields.only_in_python(hints[name]):
                continue
            if get_origin(hints[name]) is dict:
                yield from model_arguments()
            else:
                required = default is dataclasses.MISSING
                default = None if required else default
                yield Argument(name, hints[name], docs[name], title, default, name in positional, required)
    yield Argument("imports", tuple[str, ...], IMPORTS)


def model_arguments() -> Iterator[Argument]:
    """Yield the options that change the architecture: `--model.FIELD` for the fields of DecoderConfig, and
    `--model.PART.FIELD` for those of its parts."""
    title = "model (a part is written name or name(field=value), several that repeat over the layers (first, second))"
    hints, docs = fields.hints(DecoderConfig), fields.docs(DecoderConfig)
    for name, kind in hints.items():
        yield Argument(f"model.{name}", kind, docs[name], title)
    for name, kind in hints.items():
        owners: dict[str, list[type[fields.Part]]] = {}
        for part in fields.part_choices(kind):
            for own in fields.hints(part):
                owners.setdefault(own, []).append(part)
        for own, holders in owners.items():
            help_text = f"{', '.join(p.kind for p in holders)}: {fields.docs(holders[0]).get(own, '')}"
            yield Argument(
                f"model.{name}.{own}", fields.hints(holders[0])[own], help_text, "fields of the model's parts"
            )


def metavar(kind: Any) -> str:
    """Return the placeholder that `--help` shows for a value of the annotated type `kind`, such as N for an int."""
    if get_origin(kind) is Mapping:
        return f"{{{': '.join(map(metavar, get_args(kind)))}}}"
    words = "|".join(k.kind for k in fields.part_choices(kind)) or fields.describe(kind)
    for long, short in {"a whole number": "N", "a number": "X", " or ": "|"}.items():
        words = words.replace(long, short)
    return "TEXT" if words == "text" else words if len(words) < LONGEST else "NAME"
