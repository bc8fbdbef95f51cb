"""Parsing: the options of a command as an instance of a dataclass."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from onward.base import fields
from onward.base.arguments import Table, field_types
from onward.base.errors import UserError
from onward.cli.shared.arguments import arguments
from onward.cli.shared.mistakes import surplus, swapped, unread
from onward.cli.shared.output import given_imports
from onward.cli.shared.parser import ESCAPED, MARK, Parser, make_parser

T = TypeVar("T")
ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}  # escapes in the texts of ESCAPED options, without the backslash


def parse(cls: type[T], argv: Sequence[str], *, prog: str, about: str) -> T:
    """Parse the command-line arguments `argv` into an instance of the dataclass `cls`; `prog` is the name of the
    command, `about` the text of `--help`."""
    return made(cls, read(cls, argv, prog=prog, about=about), prog)


def made(cls: type[T], values: Mapping[str, Any], prog: str) -> T:
    """Make an instance of the dataclass `cls` from `values`, its fields by name. Raises a UserError for a given field
    that would have no effect.

    The class variable `reads` of `cls` lists fields that have an effect only in some cases, as {case: fields}. A case
    is the name of another field that must differ from its default (`theme` is used only with `out`), or a value of the
    property `view`, the action of the command (`layer` and `head` are used only by `attention`). All other fields
    always have an effect.
    """
    from onward.hub.folder import is_model

    if getattr(cls, "positional", ())[:1] == ("model",) and "model" in values and not is_model(values["model"]):
        others = [values[name] for name in getattr(cls, "positional")[1:] if name != "out" and name in values]  # noqa: B009
        if message := swapped(values["model"], others, prog):
            raise UserError(message)
    options, reads = fields.build(cls, values), getattr(cls, "reads", {})
    given = [name for name, value in values.items() if value or (value is False and getattr(cls, name, None))]
    if reads:
        view = getattr(options, "view", "")
        cases = {view, *(name for name in given if getattr(options, name) != getattr(cls, name, None))}
        for name in given:
            readers = [case for case, own in reads.items() if name in own]
            if readers and not cases & {*readers}:
                raise UserError(unread(cls, name, values[name], readers, prog, view))
    return options


def read(cls: type, argv: Sequence[str], *, prog: str, about: str) -> dict[str, Any]:
    """Parse the words of a command line; return the values that the user gave, mostly as text, by field of the
    dataclass `cls`. Fields in the class variable `positional` are positional arguments, all others options."""
    first = Parser(prog=prog, add_help=False, allow_abbrev=False)
    first.add_argument("--import", action="append", default=[], dest="imports")
    given_imports[:] = first.parse_known_args(argv)[0].imports
    for module in given_imports:
        fields.import_parts(module)
    parser = make_parser(cls, prog, about, everything="--help-all" in argv)
    end = argv.index("--") if "--" in argv else len(argv)
    words = [*argv[:end], *(MARK + word for word in argv[end + 1 :])]
    known, unknown = parser.parse_known_intermixed_args(words)  # texts may appear between options
    table = [*arguments(cls)]
    if unknown:
        raise UserError(surplus(unknown[0], table, prog))
    values = vars(known)
    for argument in table:
        if isinstance(argument.kind, Table) and argument.name in values:
            given = [fields.converted(argument.kind, value, argument.name) for value in values[argument.name]]
            values[argument.name] = {key: value for one in given for key, value in one.items()}
    for name in ESCAPED & values.keys():
        values[name] = [re.sub(r"\\([nt\\])", lambda match: ESCAPES[match[1]], text) for text in values[name]]
    if "imports" not in field_types(cls):
        values.pop("imports", None)
    return nest(values)


def nest(values: dict[str, Any]) -> dict[str, Any]:
    """Convert options by dotted name to nested dicts: `{"model.position": "rotary", "model.position.theta": "5e5"}`
    becomes `{"model": {"position": {"kind": "rotary", "theta": "5e5"}}}`."""
    result: dict[str, Any] = {}
    for name, value in sorted(values.items()):  # sorted, so that a part precedes its fields
        *path, last = name.split(".")
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
