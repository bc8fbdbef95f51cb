"""Command-line options from the fields of dataclasses: their types, comments and defaults are the documentation.

Does not import torch.
"""

import argparse
import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from shlex import join
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from onward import fields
from onward.config.decoder import DecoderConfig
from onward.errors import UserError
from onward.suggestions import SYNONYMS, has_meaning, parts, same_meaning

T = TypeVar("T")
IMPORTS = "import this module first, which defines parts of your own"
ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}  # in the texts of ESCAPED options, after a backslash
ESCAPED = {"stop"}
COMMON_OF_RUNS = (
    *("preset", "tokenizer", "validation", "batch_size", "learning_rate", "optimizer", "schedule", "device"),
    *("precision", "seed", "json", "model.d_model", "model.n_layers", "model.n_heads", "model.context_length"),
)
COMMON = {  # the options that `--help` shows, first and in this order; of the other commands it shows all
    "onward train": (
        *("out", "time", "steps", "epochs", "resume", "preset", "config", "tokenizer", "validation"),
        *("batch_size", "learning_rate", "optimizer", "schedule", "device", "precision", "seed"),
        *("model.d_model", "model.n_layers", "model.n_heads", "model.context_length", "model.dropout"),
        *("model.position", "model.attention", "model.mlp"),
    ),
    "onward compare": ("variant", "time", "tokens", "flops", "steps", "seeds", "out", "config", *COMMON_OF_RUNS),
    "onward sweep": ("sweep", "time", "tokens", "flops", "steps", "seeds", "out", "config", *COMMON_OF_RUNS),
    "onward scaling run": (
        *("budget", "grid_flops", "check", "out", "config", "mup", *COMMON_OF_RUNS),
        *("evaluation_tokens", "validation_tokens"),
    ),
    "onward finetune": (
        *("method", "out", "time", "steps", "epochs", "resume", "show", "config", "template", "length", "too_long"),
        *("validation", "batch_size", "learning_rate", "lora", "dora", "quantize", "beta", "teacher"),
        *("reward", "samples", "completion_length", "kl", "device", "precision", "seed"),
    ),
    "onward generate": (
        *("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop", "seed", "n"),
        *("prompts", "beams", "draft", "regex", "json_schema", "logprobs", "device", "json"),
    ),
    "onward chat": ("system", "max_new_tokens", "temperature", "top_k", "top_p", "stop", "seed", "device", "json"),
    "onward data": ("out", "tokenizer", "field", "gopher", "near", "min_words", "workers", "json"),
}


@dataclasses.dataclass(frozen=True)
class Argument:
    """An option or, where `positional`, an argument of a command."""

    name: str  # of the field, with dots where it is a field of a field: model.position.theta
    kind: Any  # its type
    help: str
    group: str = "options"
    default: Any = None
    positional: bool = False
    required: bool = False

    @property
    def flag(self) -> str:
        return fields.flag(self.name)

    @property
    def many(self) -> bool:
        """Whether it takes several values: one after another where positional, else one for each time it is given."""
        return get_origin(self.kind) is tuple

    @property
    def choices(self) -> list[str]:
        """The words that it takes, if there are few."""
        if get_origin(self.kind) is Literal:
            return [str(choice) for choice in get_args(self.kind) if choice != ""]
        return [part.kind for part in fields.part_choices(self.kind)]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are a UserError in one sentence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf$|nan$)")  # argparse's own knows no -1e-3

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stdout).write(message)  # argparse ignores errors of the output


def parse(cls: type[T], argv: Sequence[str], *, prog: str, about: str) -> T:
    """An instance of the dataclass `cls` from command-line words; `about` is the text of `--help`."""
    return made(cls, read(cls, argv, prog=prog, about=about), prog)


def made(cls: type[T], values: Mapping[str, Any], prog: str) -> T:
    """An instance of the dataclass `cls` from the values that are given. A UserError for one that nothing reads.

    The class variable `reads` names the fields that are read in some cases only, by the case: another field that is
    given (out: theme), or the `view` of the instance (attention: layer, head). All other fields are always read.
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
    """A UserError where the first argument, a model, is none, and another argument is: they were swapped."""
    first, *others = getattr(cls, "positional", ("",))
    if first != "model" or first not in values or is_model(values[first]):
        return
    given = (values.get(name, []) for name in others if name != "out")
    words = [word for one in given for word in ([one] if isinstance(one, str) else one)]
    if swapped := next((word for word in words if is_model(word)), None):
        rest = [values[first] if word == swapped else word for word in words]
        raise UserError(
            f"{values[first]!r} is no model, and {swapped} is one: did you mean {prog} {join([swapped, *rest])}?"
        )


def is_model(path: str) -> bool:
    """Whether there is a model's folder or GGUF file at a path."""
    return os.path.isfile(os.path.join(path, "config.json")) or (path.endswith(".gguf") and os.path.isfile(path))


def unread(cls: type, name: str, value: str | Sequence[str], readers: Sequence[str], prog: str, view: str) -> str:
    """What is wrong with a value that only other cases read."""
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
    """Only the values that are given on the command line, as text under the names of the fields of `cls`.

    The fields named by the class variable `positional` are arguments, all others options.
    """
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
        if get_origin(argument.kind) is Mapping and argument.name in values:
            given = [fields.convert(argument.kind, value, argument.name) for value in values[argument.name]]
            values[argument.name] = {key: value for one in given for key, value in one.items()}
    for name in ESCAPED & values.keys():
        values[name] = [unescaped(text) for text in values[name]]
    if "imports" not in fields.hints(cls):
        values.pop("imports", None)
    return nest(values)


def surplus(word: str, table: Sequence[Argument], prog: str) -> str:
    """What is wrong with a word that is neither an option nor an argument that the command takes."""
    name, flags = word.split("=")[0], [argument.flag for argument in table if not argument.positional]
    if not word.startswith("-"):
        places = " ".join(argument.name for argument in table if argument.positional) or "options only"
        compare = f"; to compare with it: --compare {word}" if "--compare" in flags else ""
        return f"{word} is one argument too many: {prog} takes {places}{compare}"
    meant = meant_option(name, table)
    ways = [f"did you mean {meant}?"] if meant else []
    if not word.startswith("--") and any(argument.positional and argument.many for argument in table):
        ways.append("put -- before an argument that begins with -")
    return f"{name} is not an option of {prog}: {' Or '.join(ways) or f'see {prog} --help'}"


def meant_option(name: str, table: Sequence[Argument]) -> str:
    """The option that an unknown one stands for, with its value where the name is that of a value (--rope for
    --model.position rotary); "" if there is none like it."""
    flags = [argument.flag for argument in table if not argument.positional]
    if close := same_meaning(name.lstrip("-"), flags):
        return close[0]
    last = parts(name.lstrip("-"))[-1]
    value = SYNONYMS.get(last, last)
    valued = [f"{argument.flag} {value}" for argument in table if value in argument.choices]
    spelled = name.startswith("--") and not has_meaning(name)  # -5 is like no option, and --bits not like --beams
    similar = get_close_matches(name, flags, 1, cutoff=0.5) if spelled else []
    return next(iter(valued or similar), "")


def make_parser(cls: type, prog: str, about: str, everything: bool) -> Parser:
    """The parser of a command; its `--help` lists `everything` or the common options."""
    summary, _, examples = about.partition("\n\n")
    table = list(arguments(cls))
    common = COMMON.get(prog, ())
    hidden = 0 if everything or not common else sum(not a.positional and a.name not in common for a in table)
    parser = Parser(
        prog=prog,
        description=summary,
        epilog=f"{prog} --help-all lists {hidden} more options.\n\n{examples}" if hidden else examples,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=30),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, Any] = {"options": parser}
    if common:
        groups["common options"] = parser.add_argument_group("common options")
        parser._action_groups.insert(1, parser._action_groups.pop())  # before "options"
        parser.add_argument("--help-all", action="help", help="show all options and exit")
    for argument in sorted(table, key=lambda a: common.index(a.name) if a.name in common else len(common)):
        title = "common options" if argument.name in common else argument.group
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        add(groups[title], argument, shown=not hidden or argument.positional or argument.name in common)
    shapes = {None: "{}", "?": "[{}]", "*": "[{} ...]"}
    places = (shapes[a.nargs].format(a.dest) for a in parser._actions if not a.option_strings)  # type: ignore[index]
    parser.usage = " ".join([prog, *places, "[options]"])
    return parser


def add(group: Any, argument: Argument, shown: bool) -> None:
    """Add an argument to a parser or a group of it."""
    many, text = argument.many, argument.help
    if argument.positional:
        nargs = "*" if many else None if argument.required else "?"
        optional = {} if argument.required else {"default": argparse.SUPPRESS}  # else argparse requires one
        group.add_argument(argument.name, nargs=nargs, help=escaped(text), **optional)
        return
    if argument.name in ESCAPED:
        text += r"; \n, \t and \\ stand for a line break, a tab and a backslash"
    if argument.default not in ("", None, ()) and argument.kind is not bool:
        text += f" (default: {argument.default})"
    if many:
        text += " (one value; may be given several times)"
    help_text = escaped(text) if shown else argparse.SUPPRESS
    if argument.kind is bool:
        group.add_argument(argument.flag, dest=argument.name, action=argparse.BooleanOptionalAction, help=help_text)
    else:
        one = get_args(argument.kind)[0] if many else argument.kind
        action = "append" if many or get_origin(one) is Mapping else "store"
        name = metavar(one)
        group.add_argument(argument.flag, dest=argument.name, metavar=name, action=action, help=help_text)


def arguments(cls: type) -> Iterator[Argument]:
    """Every field of a dataclass that text can set, in the order of its classes; a table stands for all fields of
    DecoderConfig and of its parts. Last comes `--import`, which every command has."""
    hints, docs = fields.hints(cls), fields.docs(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    positional = getattr(cls, "positional", ())
    for owner in filter(dataclasses.is_dataclass, cls.__mro__):
        title = "options" if owner is cls else (inspect.getdoc(owner) or "").split(".")[0]
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
    """`--model.FIELD` for the fields of DecoderConfig, and `--model.PART.FIELD` for those of its parts."""
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
    """A short name for the values of a type."""
    if get_origin(kind) is Mapping:
        return f"{{{': '.join(map(metavar, get_args(kind)))}}}"
    words = "|".join(k.kind for k in fields.part_choices(kind)) or fields.describe(kind)
    for long, short in {"a whole number": "N", "a number": "X", " or ": "|"}.items():
        words = words.replace(long, short)
    return "TEXT" if words == "text" else words


def escaped(text: str) -> str:
    """Text as argparse reads it in `help`."""
    return text.replace("%", "%%")


def unescaped(text: str) -> str:
    r"""A text in which \n, \t and \\ stand for a line break, a tab and a backslash."""
    return re.sub(r"\\([nt\\])", lambda found: ESCAPES[found[1]], text)


def with_flags(message: str, argv: Sequence[str]) -> str:
    """The message of a UserError with the option that was typed in place of the name of its field, where it begins with
    one: `--top-p is 2` for `top_p is 2`, `--model.d-model` for `d_model`, `--model.mlp: gated.x` for `mlp.gated.x`."""
    typed = {word.partition("=")[0] for word in argv if word.startswith("--")}

    def option(found: re.Match[str]) -> str:
        path = found[1].removeprefix("model.").split(".")
        names = {flag: parts(flag) for flag in typed}
        flags = [flag for flag, own in names.items() if own[-1] == path[-1]]
        if len(flags) == 1:
            return flags[0]
        for flag, own in names.items():
            if own[:1] == ["model"] and own[1:] == path[: len(own) - 1] and len(own) > 1:
                return f"{flag}: {'.'.join(path[len(own) - 1 :])}"
        return found[0]

    name = r"([A-Za-z_][\w.]*)(?:\[\d+\])?"
    begin = re.match(rf"{name}(?: and {name})?", message)
    return re.sub(name, option, begin[0]) + message[begin.end() :] if begin else message


def nest(values: dict[str, Any]) -> dict[str, Any]:
    """`{"model.position": "rotary", "model.position.theta": "5e5"}` as nested tables."""
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
