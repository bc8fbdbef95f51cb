"""The pages of public names with their docstrings, and of the glossary."""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from docs.site.markup import Definition, definitions, escaped
from onward.base import fields
from onward.learn.chapters import chapters
from onward.learn.glossary import glossary

HIDDEN = re.compile(r"<(?:function )?[\w.<> ]+ at 0x\w+>|<factory>")  # defaults whose repr is not valid Python
MODULE = re.compile(r"\bonward\.(?:\w+\.)+(?=\w)")  # modules of types, which may change
UNQUOTED = {ord("'"): None}  # string annotations have quotes


def name_pages(module: str) -> dict[str, str]:
    """Return a page for each public class and function of a module."""
    values = {f"{module}.{name}": getattr(importlib.import_module(module), name) for name in names_of(module)}
    kinds = {name: value for name, value in values.items() if isinstance(value, type) or inspect.isfunction(value)}
    return {f"python/{name.removeprefix('onward.')}.md": name_page(name, value) for name, value in kinds.items()}


def names_of(module: str) -> list[str]:
    """Return the public names of a module in alphabetical order."""
    return sorted(importlib.import_module(module).__all__, key=lambda name: (name.lower(), name))


def name_page(name: str, value: Any) -> str:
    """Return the page of a class or function: its signature, docstring, fields and methods."""
    lines = [f"# {name}\n", call(name, value), docstring(value)]
    if dataclasses.is_dataclass(value) and isinstance(value, type):
        lines += ["## Fields\n", field_list(name, value)]
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
    """Return the signature of a function or class as a Python code block; "" for a property or if there is no
    signature."""
    if isinstance(value, property):
        return ""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    parameters = [MODULE.sub("", str(one)) for own, one in signature.parameters.items() if own != "self"]
    text = f"{name}({', '.join(parameters)})"
    if len(text) > 88:
        text = f"{name}(\n    " + ",\n    ".join(parameters) + ",\n)"
    if signature.return_annotation is not signature.empty and not isinstance(value, type):
        text += f" -> {MODULE.sub('', inspect.formatannotation(signature.return_annotation))}"
    return f"```python\n{re.sub(HIDDEN, '...', text).translate(UNQUOTED)}\n```\n"


def docstring(value: Any) -> str:
    """Return a docstring as Markdown, with interactive Python sessions as code blocks."""
    text = inspect.getdoc(value) or ""
    parts = re.split(r"((?:^[ ]*>>> .*\n?(?:^[ ]*(?:\.\.\.|\S).*\n?)*)+)", text, flags=re.MULTILINE)
    return (
        "".join(f"\n```pycon\n{part.rstrip()}\n```\n" if i % 2 else escaped(part) for i, part in enumerate(parts))
        + "\n"
    )


def field_list(name: str, value: type) -> str:
    """Return the fields of a dataclass with their defaults and comments."""
    try:
        docs = fields.docs(value)
    except (OSError, TypeError):
        docs = {}
    rows = []
    for field in dataclasses.fields(value):
        if not field.name.startswith("_"):
            default = re.sub(HIDDEN, "...", repr(field.default))
            notes = () if field.default is dataclasses.MISSING else (f"default: `{default}`",)
            rows.append(Definition(f"{name}.{field.name}", field.name, docs.get(field.name, ""), notes))
    return definitions(rows)


def glossary_page() -> str:
    """Return the glossary: each term with its other names, its name in the code, its chapter and its guide."""
    titles = {one.number: (one.title, one.path.name) for one in chapters()}
    lines = ["# Glossary\n", "`onward help nucleus` shows an entry in the terminal.\n"]
    for entry in glossary():
        lines.append(f"## {entry.name}\n")
        lines.append(escaped(entry.text) + "\n")
        facts = [f"Also: {escaped(', '.join(entry.also))}."] if entry.also else []
        facts += [f"In the code: `{entry.code}`."] if entry.code else []
        if entry.chapter in titles:
            title, file = titles[entry.chapter]
            facts.append(f"Chapter {entry.chapter}: [{title}](learn/{file}).")
        facts += [f"Guide: [{entry.guide}]({entry.guide}.md)."] if entry.guide else []
        lines.append(" ".join(facts) + "\n")
    return "\n".join(lines)
