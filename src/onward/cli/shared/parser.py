"""The parser of a command and its `--help`. Does not import torch."""

import argparse
import re
import sys
from functools import partial
from typing import Any, NoReturn

from onward.base import fields
from onward.base.arguments import Table
from onward.base.errors import UserError
from onward.cli.shared.arguments import Argument, arguments, metavar

ESCAPED = {"stop"}
MARK = "\0"  # precedes each argument after --, because argparse with intermixed options ignores a first --


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises a UserError with one sentence where argparse would print its usage and exit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf$|nan$)")  # argparse's own pattern does not match -1e-3

    def error(self, message: str) -> NoReturn:
        # argparse: "argument --out: expected one argument" and "the following arguments are required: text"
        if (match := re.fullmatch(r"argument (--\S+): expected (?:one|at least one) argument", message)) and (
            example := re.search(rf"^  {self.prog} .*{match[1]} \S+", self.epilog or "", re.MULTILINE)
        ):
            message = f"Cannot use {match[1]} without a value: for example, write{re.sub(' +', ' ', example[0])}"
        raise UserError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stdout).write(message)  # argparse would ignore errors of the output


def make_parser(cls: type, prog: str, about: str, everything: bool) -> Parser:
    """Make the parser of the command `prog` from the fields of the dataclass `cls`. Its `--help` begins with the text
    `about` and lists the options in the class variable `common`, in this order, and those of the command's part; then
    all others if `everything` or if there are no common options."""
    summary, _, examples = about.partition("\n\n")
    table = list(arguments(cls))
    common = getattr(cls, "common", ())
    hidden = 0 if everything or not common else sum(not (a.positional or a.of_part or a.name in common) for a in table)
    parser = Parser(
        prog=prog,
        description=summary,
        epilog=f"{prog} --help-all lists {hidden} more options.\n\n{examples}" if hidden else examples,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=30),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    shown = "show all options and exit" if common else argparse.SUPPRESS  # without common options, --help lists all
    parser.add_argument("--help-all", action="help", help=shown)
    groups: dict[str, Any] = {"options": parser}
    if common:
        groups["common options"] = parser.add_argument_group("common options")
        parser._action_groups.insert(1, parser._action_groups.pop())  # before "options"
    for argument in sorted(table, key=lambda a: common.index(a.name) if a.name in common else len(common)):
        title = "common options" if argument.name in common and not argument.of_part else argument.group
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        always = argument.positional or argument.of_part or argument.name in common
        add(groups[title], argument, shown=always or not hidden)
    shapes = {None: "{}", "?": "[{}]", "*": "[{} ...]"}
    positionals = (shapes[a.nargs].format(a.dest) for a in parser._actions if not a.option_strings)  # type: ignore[index]
    parser.usage = " ".join([prog, *positionals, "[options]"])
    return parser


def add(group: Any, argument: Argument, shown: bool) -> None:
    many, text = argument.many, argument.help
    if argument.positional:
        nargs = "*" if many else None if argument.required else "?"
        optional = {} if argument.required else {"default": argparse.SUPPRESS}  # otherwise argparse requires a value
        word = lambda typed: typed.removeprefix(MARK)
        group.add_argument(argument.name, nargs=nargs, type=word, help=escaped(text), **optional)
        return
    if argument.name in ESCAPED:
        text += r"; \n, \t and \\ stand for a line break, a tab and a backslash"
    if argument.default not in ("", None, ()) and not argument.is_switch:
        text += f" (default: {fields.notation(argument.default)})"
    if many:
        text += " (one value; may be given several times)"
    help_text = escaped(text) if shown else argparse.SUPPRESS
    if argument.is_switch:
        group.add_argument(argument.flag, dest=argument.name, action=argparse.BooleanOptionalAction, help=help_text)
    else:
        one = argument.kind.args[0] if many else argument.kind
        action = "append" if many or isinstance(one, Table) else "store"
        name = metavar(one)
        group.add_argument(argument.flag, dest=argument.name, metavar=name, action=action, help=help_text)


def escaped(text: str) -> str:
    return text.replace("%", "%%")
