"""The pages of Look up: commands with their options, public names with their docstrings, the glossary."""

import dataclasses
import html
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from onward.base import fields
from onward.base.arguments import type_of
from onward.cli.overview import COMMANDS
from onward.cli.shared.arguments import Argument, arguments, metavar
from onward.families import families
from onward.learn.chapters import chapters
from onward.learn.glossary import glossary

EXAMPLES = "\n\nexamples:\n"
HIDDEN = re.compile(r"<(?:function )?[\w.<> ]+ at 0x\w+>|<factory>")  # defaults that no reader can type
UNQUOTED = {ord("'"): None}  # annotations are text


def command_pages() -> dict[str, str]:
    """Return a page for each command."""
    families()  # whose parts are choices of options
    return {f"commands/{name}.md": command_page(name) for name in COMMANDS}


def command_page(name: str) -> str:
    """Return the page of a command: what it does, examples, and its options."""
    module = importlib.import_module(f"onward.cli.commands.{name}")
    about, _, examples = module.ABOUT.partition(EXAMPLES)
    lines = [f"# onward {name}\n", escaped(about), "", f"```sh\n{inspect.cleandoc(examples)}\n```\n"]
    group = ""
    for argument in arguments(module.Options):
        if argument.group != group or len(lines) == 4:
            group = argument.group
            title = "arguments and options" if group == "options" else group
            lines += [f"\n## {title[0].upper()}{title[1:]}\n", "| option | default | meaning |", "| --- | --- | --- |"]
        lines.append(option_row(argument))
    return "\n".join(lines) + "\n"


def option_row(argument: Argument) -> str:
    """Return the row of an option in the table of its command."""
    word = argument.name.upper() if argument.positional else f"{argument.flag} {metavar(argument.kind)}"
    if argument.is_switch:
        word = argument.flag
    empty = argument.default is False or argument.default in (None, "", (), {})
    default = "" if empty else f"`{shown(argument.default)}`"
    cells = (f"`{word}`", "required" if argument.required else default, escaped(argument.help))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def shown(value: object) -> str:
    """Return a default as it is typed."""
    return fields.describe(type_of(value)) if isinstance(value, type) else str(value)


def name_pages(module: str) -> dict[str, str]:
    """Return a page for each public class and function of a module."""
    values = {f"{module}.{name}": getattr(importlib.import_module(module), name) for name in names_of(module)}
    kinds = {name: value for name, value in values.items() if isinstance(value, type) or inspect.isfunction(value)}
    return {f"python/{name.removeprefix('onward.')}.md": name_page(name, value) for name, value in kinds.items()}


def names_of(module: str) -> list[str]:
    """Return the public names of a module in alphabetical order."""
    return sorted(importlib.import_module(module).__all__, key=lambda name: (name.lower(), name))


def name_page(name: str, value: Any) -> str:
    """Return the page of a class or function: its call, its docstring, its fields and methods."""
    lines = [f"# {name}\n", call(name, value), docstring(value)]
    if dataclasses.is_dataclass(value) and isinstance(value, type):
        lines += ["## Fields\n", *field_table(value)]
    if isinstance(value, type):
        for method, function in public_methods(value):
            lines += [f"\n## {method}\n", call(method, function), docstring(function)]
    return "\n".join(lines)


def public_methods(value: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties with docstrings that a class or its bases in Onward define."""
    owners = [owner for owner in value.__mro__ if owner.__module__.startswith("onward.")]
    members = {name: one for owner in reversed(owners) for name, one in vars(owner).items() if not name.startswith("_")}
    for name, member in sorted(members.items()):
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and inspect.getdoc(function):
            yield name, member if isinstance(member, property) else function


def call(name: str, value: Any) -> str:
    """Return how a function or class is called, as a block of Python; of a property, its name."""
    if isinstance(value, property):
        return ""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    parameters = [str(parameter) for own, parameter in signature.parameters.items() if own != "self"]
    text = f"{name}({', '.join(parameters)})"
    if len(text) > 88:
        text = f"{name}(\n    " + ",\n    ".join(parameters) + ",\n)"
    if signature.return_annotation is not signature.empty and not isinstance(value, type):
        text += f" -> {inspect.formatannotation(signature.return_annotation)}"
    return f"```python\n{re.sub(HIDDEN, '...', text).translate(UNQUOTED)}\n```\n"


def docstring(value: Any) -> str:
    """Return a docstring as Markdown; lines of the interactive Python are a block of code."""
    text = inspect.getdoc(value) or ""
    parts = re.split(r"((?:^[ ]*>>> .*\n?(?:^[ ]*(?:\.\.\.|\S).*\n?)*)+)", text, flags=re.MULTILINE)
    return (
        "".join(f"\n```pycon\n{part.rstrip()}\n```\n" if i % 2 else escaped(part) for i, part in enumerate(parts))
        + "\n"
    )


def field_table(value: type) -> list[str]:
    """Return the fields of a dataclass with their types, defaults and comments."""
    try:
        docs = fields.docs(value)
    except (OSError, TypeError):
        docs = {}
    rows = ["| field | default | meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(value):
        if field.name.startswith("_"):
            continue
        default = "" if field.default is dataclasses.MISSING else f"`{re.sub(HIDDEN, '...', repr(field.default))}`"
        cells = (f"`{field.name}`", default, escaped(docs.get(field.name, "")))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*rows, ""]


def glossary_page() -> str:
    """Return the glossary: each term with its other names, its chapter and its name in the code."""
    titles = {one.number: (one.title, one.path.name) for one in chapters()}
    lines = ["# Glossary\n", "`onward help nucleus` shows an entry in the terminal.\n"]
    for entry in glossary():
        lines.append(f"### {entry.name}\n")
        lines.append(escaped(entry.text) + "\n")
        facts = [f"Also: {escaped(', '.join(entry.also))}."] if entry.also else []
        facts += [f"In the code: `{entry.code}`."] if entry.code else []
        if entry.chapter in titles:
            title, file = titles[entry.chapter]
            facts.append(f"Chapter {entry.chapter}: [{title}](learn/{file}).")
        facts += [f"Guide: [{entry.guide}]({entry.guide}.md)."] if entry.guide else []
        lines.append(" ".join(facts) + "\n")
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Return text in which Markdown and HTML see no markup of their own but for code in backticks."""
    parts = re.split(r"(`[^`\n]*`)", text)
    plain = lambda part: re.sub(r"([*_\[\]])", r"\\\1", html.escape(part, quote=False))
    return "".join(part if i % 2 else plain(part) for i, part in enumerate(parts))
