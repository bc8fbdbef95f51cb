"""Messages about unexpected arguments and options of a command line."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from shlex import join

from onward.base import fields
from onward.base.arguments import field_types
from onward.base.suggestions import SYNONYMS, has_meaning, parts, same_meaning
from onward.cli.shared.arguments import Argument
from onward.cli.shared.parser import MARK
from onward.hub.folder import is_model


def swapped(first: str, others: Sequence[str | Sequence[str]], prog: str) -> str:
    """The message for a first argument that is not a model, if one of the `others` is a model; otherwise ""."""
    words = [word for one in others for word in ([one] if isinstance(one, str) else one)]
    if model := next((word for word in words if is_model(word)), None):
        rest = [first if word == model else word for word in words]
        return f"{first!r} is not a model, but {model} is: did you mean {prog} {join([model, *rest])}?"
    return ""


def unread(cls: type, name: str, value: str | Sequence[str], readers: Sequence[str], prog: str, view: str) -> str:
    """The message for the field `name`, which was given `value` but has no effect: only `readers`, other options or
    actions of the command `prog`, use it, and the command runs the action `view`."""
    known, positional = field_types(cls), getattr(cls, "positional", ())
    if name in positional:
        word = value if isinstance(value, str) else value[0]
        return f"{word} is one argument too many: {prog} {view} takes no {name}"
    where = [fields.flag(one) if one in known and one not in positional else one for one in readers]
    if readers[0] in known:
        return f"{name} is used only with {' or '.join(where)}: give that as well, or leave it out"
    if len(where) < 4:
        listed = " and ".join(filter(None, (", ".join(where[:-1]), where[-1])))
        return f"{name} is used only by {listed}, and not by {view}: leave it out"
    return f"{name} is not used by {prog} {view}: leave it out"


def surplus(word: str, table: Sequence[Argument], prog: str) -> str:
    """The message for a word that is neither an option nor an expected argument of the command `prog`."""
    name, flags = word.split("=")[0], [argument.flag for argument in table if not argument.positional]
    if not word.startswith("-"):
        word = word.removeprefix(MARK)
        positionals = " ".join(argument.name for argument in table if argument.positional) or "options only"
        compare = f"; to compare with it: --compare {word}" if "--compare" in flags else ""
        return f"{word} is one argument too many: {prog} takes {positionals}{compare}"
    meant = meant_option(name, table)
    ways = [f"did you mean {meant}?"] if meant else []
    if not word.startswith("--") and any(argument.positional and argument.many for argument in table):
        ways.append("put -- before an argument that begins with -")
    return f"{name} is not an option of {prog}: {' Or '.join(ways) or f'see {prog} --help'}"


def meant_option(name: str, table: Sequence[Argument]) -> str:
    """The option that the unknown option `name` probably means, with its value if `name` is a value, such as
    `--model.position rotary` for `--rope`; "" if none is similar."""
    flags = [argument.flag for argument in table if not argument.positional]
    if close := same_meaning(name.lstrip("-"), flags):
        return close[0]
    last = parts(name.lstrip("-"))[-1]
    value = SYNONYMS.get(last, last)
    valued = [f"{argument.flag} {value}" for argument in table if value in argument.choices]
    # no guess for -5, or for a name with another meaning, such as --bits
    spelled = name.startswith("--") and not has_meaning(name)
    similar = get_close_matches(name, flags, 1, cutoff=0.5) if spelled else []
    return next(iter(valued or similar), "")


def with_flags(message: str, argv: Sequence[str]) -> str:
    """A message in which the field's name at the start is the option as typed in `argv`: `--top-p is 2` for `top_p is
    2`, `--model.d-model` for `d_model`, `--model.mlp: gated.x` for `mlp.gated.x`."""
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
