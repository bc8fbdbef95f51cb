"""Parsing: the options of a command as an instance of a dataclass, and the error messages for words that do not fit."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from shlex import join
from typing import Any, TypeVar

from onward.base import fields
from onward.base.arguments import Table
from onward.base.errors import UserError
from onward.base.suggestions import SYNONYMS, has_meaning, parts, same_meaning
from onward.cli.shared.arguments import Argument, arguments
from onward.cli.shared.parser import ESCAPED, Parser, make_parser

T = TypeVar("T")
ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}  # in the texts of ESCAPED options, after a backslash


def parse(cls: type[T], argv: Sequence[str], *, prog: str, about: str) -> T:
    """Parse command-line words to an instance of the dataclass `cls`; `prog` is the name of the command, `about` the
    text of `--help`. Raises a UserError for words that do not fit."""
    return made(cls, read(cls, argv, prog=prog, about=about), prog)


def made(cls: type[T], values: Mapping[str, Any], prog: str) -> T:
    """Make an instance of the dataclass `cls` from `values`, its fields by name; `prog` is the command's name for
    messages. Raises a UserError for a field that was given but would have no effect.

    The class variable `reads` of `cls` lists fields that have an effect only in some cases, as {case: fields}. A case
    is the name of another field that must be given too (`theme` is read only with `out`), or a value of the property
    `view`, the action of the command (`layer` and `head` are read only by `attention`). All other fields always have an
    effect.
    """
    check_order(cls, values, prog)
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


def check_order(cls: type, values: Mapping[str, Any], prog: str) -> None:
    """Raise a UserError if the first positional argument of the command `prog` should be a model and is none, but
    another of its positional arguments is one, since the user probably swapped them. `values` are the arguments by
    field name."""
    from onward.hub.folder import is_model

    first, *others = getattr(cls, "positional", ("",))
    if first != "model" or first not in values or is_model(values[first]):
        return
    given = (values.get(name, []) for name in others if name != "out")
    words = [word for one in given for word in ([one] if isinstance(one, str) else one)]
    if swapped := next((word for word in words if is_model(word)), None):
        rest = [values[first] if word == swapped else word for word in words]
        raise UserError(
            f"{values[first]!r} is not a model, but {swapped} is: did you mean {prog} {join([swapped, *rest])}?"
        )


def unread(cls: type, name: str, value: str | Sequence[str], readers: Sequence[str], prog: str, view: str) -> str:
    """Return the error message for the field `name` of the command `prog`, which was given `value` but has no effect:
    only `readers`, other options or actions of the command, use it, and the command runs the action `view`."""
    known, positional = fields.hints(cls), getattr(cls, "positional", ())
    if name in positional:
        word = value if isinstance(value, str) else value[0]
        return f"{word} is one argument too many: {prog} {view} takes no {name}"
    where = [fields.flag(one) if one in known and one not in positional else one for one in readers]
    if readers[0] in known:
        return f"{name} is read only with {' or '.join(where)}: give that as well, or leave it out"
    if len(where) < 4:
        return f"{name} is read only by {' and '.join(where)}, and not by {view}: leave it out"
    return f"{name} is not read by {prog} {view}: leave it out"


def read(cls: type, argv: Sequence[str], *, prog: str, about: str) -> dict[str, Any]:
    """Parse the words of a command line; return the values that the user gave, mostly as text, by field of the
    dataclass `cls`. Fields in the class variable `positional` are positional arguments, all others options; `about` is
    the text of `--help`. Raises a UserError for words that do not fit."""
    first = Parser(prog=prog, add_help=False, allow_abbrev=False)
    first.add_argument("--import", action="append", default=[], dest="imports")
    for module in first.parse_known_args(argv)[0].imports:
        fields.import_parts(module)
    parser = make_parser(cls, prog, about, everything="--help-all" in argv)
    known, unknown = parser.parse_known_intermixed_args(argv)  # texts may stand between options
    table = [*arguments(cls)]
    if unknown:
        raise UserError(surplus(unknown[0], table, prog))
    values = vars(known)
    for argument in table:
        if isinstance(argument.kind, Table) and argument.name in values:
            given = [fields.converted(argument.kind, value, argument.name) for value in values[argument.name]]
            values[argument.name] = {key: value for one in given for key, value in one.items()}
    for name in ESCAPED & values.keys():
        values[name] = [unescaped(text) for text in values[name]]
    if "imports" not in fields.hints(cls):
        values.pop("imports", None)
    return nest(values)


def surplus(word: str, table: Sequence[Argument], prog: str) -> str:
    """Return the error message for `word`, a word of the command line that is neither an option nor an expected
    argument of the command `prog`; `table` are all arguments of the command."""
    name, flags = word.split("=")[0], [argument.flag for argument in table if not argument.positional]
    if not word.startswith("-"):
        positionals = " ".join(argument.name for argument in table if argument.positional) or "options only"
        compare = f"; to compare with it: --compare {word}" if "--compare" in flags else ""
        return f"{word} is one argument too many: {prog} takes {positionals}{compare}"
    meant = meant_option(name, table)
    ways = [f"did you mean {meant}?"] if meant else []
    if not word.startswith("--") and any(argument.positional and argument.many for argument in table):
        ways.append("put -- before an argument that begins with -")
    return f"{name} is not an option of {prog}: {' Or '.join(ways) or f'see {prog} --help'}"


def meant_option(name: str, table: Sequence[Argument]) -> str:
    """Return the option in `table`, all arguments of a command, that the user probably means by the unknown option
    `name`; "" if none is similar. If `name` is a value of an option, the option is returned with this value:
    `--model.position rotary` for `--rope`."""
    flags = [argument.flag for argument in table if not argument.positional]
    if close := same_meaning(name.lstrip("-"), flags):
        return close[0]
    last = parts(name.lstrip("-"))[-1]
    value = SYNONYMS.get(last, last)
    valued = [f"{argument.flag} {value}" for argument in table if value in argument.choices]
    spelled = name.startswith("--") and not has_meaning(
        name
    )  # no guess for -5, or for a name with another meaning, such as --bits
    similar = get_close_matches(name, flags, 1, cutoff=0.5) if spelled else []
    return next(iter(valued or similar), "")


def unescaped(text: str) -> str:
    r"""Return a text in which \n, \t and \\ stand for a line break, a tab and a backslash."""
    return re.sub(r"\\([nt\\])", lambda match: ESCAPES[match[1]], text)


def with_flags(message: str, argv: Sequence[str]) -> str:
    """Return a UserError's message in which the field's name at the start is replaced by the option as the user typed
    it in `argv`: `--top-p is 2` for `top_p is 2`, `--model.d-model` for `d_model`, `--model.mlp: gated.x` for
    `mlp.gated.x`."""
    typed = {word.partition("=")[0] for word in argv if word.startswith("--")}

    def option(match: re.Match[str]) -> str:
        path = match[1].removeprefix("model.").split(".")
        names = {flag: parts(flag) for flag in typed}
        flags = [flag for flag, own in names.items() if own[-1] == path[-1]]
        if len(flags) == 1:
            return flags[0]
        for flag, own in names.items():
            if own[:1] == ["model"] and own[1:] == path[: len(own) - 1] and len(own) > 1:
                return f"{flag}: {'.'.join(path[len(own) - 1 :])}"
        return match[0]

    name = r"([A-Za-z_][\w.]*)(?:\[\d+\])?"
    begin = re.match(rf"{name}(?: and {name})?", message)
    return re.sub(name, option, begin[0]) + message[begin.end() :] if begin else message


def nest(values: dict[str, Any]) -> dict[str, Any]:
    """Convert options by dotted name to nested dicts: `{"model.position": "rotary", "model.position.theta": "5e5"}`
    becomes `{"model": {"position": {"kind": "rotary", "theta": "5e5"}}}`. Raises a UserError for a field of a part that
    is given as several parts, one per layer."""
    result: dict[str, Any] = {}
    for name, value in sorted(values.items()):  # a part before its fields
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
