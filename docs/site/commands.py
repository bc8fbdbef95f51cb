"""The pages of commands, and a page for each group of options that several commands share."""

import importlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType

from docs.site.help_text import help_page
from docs.site.markup import Definition, definitions, escaped, prose, slug
from onward.base import fields
from onward.base.arguments import type_of
from onward.cli.commands.finetune import summary_of
from onward.cli.overview import COMMANDS
from onward.cli.shared.arguments import Argument, arguments, metavar
from onward.families import families
from onward.training.methods import Method

OWN = ("options", "Arguments")  # titles of groups that belong to one command each


def command_pages() -> dict[str, str]:
    """Return a page for each command."""
    return {f"commands/{name}.md": command_page(name) for name in COMMANDS}


def option_pages() -> dict[str, str]:
    """Return a page for each group of options that several commands share."""
    pages = {}
    for title, rows in shared_groups().items():
        name, about = heading(title)
        users = [one for one in COMMANDS if {*rows} & {*option_groups(one).get(title, ())}]
        links = ", ".join(f"[onward {one}](../commands/{one}.md)" for one in users)
        text = f"{prose(about)}\n\nOptions of {links}."
        pages[option_page(title)] = "\n".join([f"# {name}\n", text.strip(), "", definitions(rows)])
    return pages


def option_page(title: str) -> str:
    """Return the path of the page of a shared group of options."""
    return f"options/{slug(heading(title)[0])}.md"


def heading(title: str) -> tuple[str, str]:
    """Split the title of a group into a heading and a sentence; the sentence is "" if the title has none."""
    for start, end in (": ", ""), (" (", ")"):
        name, found, rest = title.partition(start)
        if found:
            rest = rest.removesuffix(end)
            return f"{name[0].upper()}{name[1:]}", f"{rest[0].upper()}{rest[1:]}."
    return f"{title[0].upper()}{title[1:]}", ""


def command_page(name: str) -> str:
    """Return the page of a command: its help with its examples, its options and, for finetune, the methods."""
    lines = [f"# onward {name}\n", help_page(module_of(name).ABOUT), ""]
    for title, rows in option_groups(name).items():
        elsewhere = [row for row in rows if row in shared_groups().get(title, ())]
        own = [row for row in rows if row not in elsewhere]
        called, about = heading(title)
        lines += [f"## {called}\n"]
        if elsewhere:
            page = f"../{option_page(title)}"
            flags = " ".join(f"[`{row.anchor}`]({page}#{row.anchor})" for row in elsewhere)
            lines += [f"Other commands have these options too. [{called}]({page}) explains them.\n"]
            lines += [f"{flags}\n{{ .flags }}\n"]
        elif about:
            lines.append(f"{prose(about)}\n")
        if own:
            lines.append(definitions(own))
    return "\n".join([*lines, methods() if name == "finetune" else ""])


def methods() -> str:
    """Return the section on the methods of fine-tuning: the description, the formula of the loss, and the options of
    each method."""
    lines = ["## Methods\n", "Each `--method` has options of its own.\n"]
    for kind, method in Method.choices().items():
        own = type("Options", (module_of("finetune").Options,), {"part": method})
        lines += [f"### {kind}\n", f"{escaped(summary_of(method))}.\n"]
        lines += [f"```text\n{method.formula}\n```\n"] if method.formula else []
        rows = [replace(option(one), anchor=f"{kind}.{one.flag}") for one in arguments(own) if one.of_part]
        lines += [definitions(rows)] if rows else []
    return "\n".join(lines)


@cache
def shared_groups() -> Mapping[str, Sequence[Definition]]:
    """Return the options that more than one command has in a group, by the title of the group."""
    users: dict[str, dict[Definition, int]] = {}
    for name in COMMANDS:
        for title, rows in option_groups(name).items():
            counts = users.setdefault(title, defaultdict(int))
            for row in rows:
                counts[row] += 1
    shared = {title: [row for row, count in counts.items() if count > 1] for title, counts in users.items()}
    return {title: rows for title, rows in shared.items() if rows and title not in OWN}


@cache
def option_groups(name: str) -> Mapping[str, Sequence[Definition]]:
    """Return the arguments and options of a command by the title of their group."""
    families()  # import the families, whose parts are choices of options
    groups = defaultdict[str, list[Definition]](list, Arguments=[])  # arguments come first
    for argument in arguments(module_of(name).Options):
        if not argument.of_part:
            groups["Arguments" if argument.positional else argument.group].append(option(argument))
    return {title: rows for title, rows in groups.items() if rows}


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"onward.cli.commands.{name}")


def option(argument: Argument) -> Definition:
    """Return an option as a definition."""
    word = argument.name.upper() if argument.positional else argument.flag
    value = "" if argument.positional or argument.is_switch else f" {metavar(argument.kind)}"
    return Definition(word, word + value, argument.help, tuple(notes(argument)))


def notes(argument: Argument) -> Iterable[str]:
    """Yield notes on an option: whether it is required, its default, whether it may be repeated, and its choices if its
    placeholder does not list them."""
    if argument.required:
        yield "required"
    elif argument.is_switch and argument.default:
        yield f"on; `--no-{argument.flag[2:]}` turns it off"
    elif argument.default is not False and argument.default not in (None, "", (), {}):
        yield f"default: `{shown(argument.default)}`"
    if argument.many:
        yield "may be given several times"
    if argument.choices and metavar(argument.kind) == "NAME":
        yield f"one of {', '.join(f'`{choice}`' for choice in argument.choices)}"


def shown(value: object) -> str:
    """Return a default value as a user would type it."""
    return fields.describe(type_of(value)) if isinstance(value, type) else str(value)
