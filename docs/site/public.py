"""The public names: the tables of docs/public.md, and the signatures that tests/test_public_signatures.py checks.

    python -m docs.site.public

updates both after a change of the public names.
"""

import importlib
import inspect
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from docs.site.markup import escaped
from docs.site.reference import HIDDEN, names_of

ROOT = Path(__file__).parents[2]
PAGE, SIGNATURES = ROOT / "docs/public.md", ROOT / "tests/support/public_signatures.txt"
MODULES = {  # modules in the order of the page, with the guide to each
    "onward": "ARCHITECTURE.md",
    "onward.model": "../CONTRIBUTING.md",
    "onward.transforms": "finetuning.md",
    "onward.training": "training.md",
    "onward.generation": "generation.md",
    "onward.tracing": "inside.md",
    "onward.inspection": "inside.md",
    "onward.data": "data.md",
    "onward.text": "finetuning.md",
    "onward.evaluation": "evaluation.md",
    "onward.planning": "planning.md",
    "onward.families": "families.md",
    "onward.reports": "pictures.md",
    "onward.measuring": "planning.md",
    "onward.serving": "serving.md",
    "onward.learn": "learn/03-decoder-only.md",
}
VALUES = {  # public names without a docstring
    "IDEAS": "The pictures of `onward draw`, as functions by name.",
    "IGNORE_INDEX": "The target of a token that is not predicted, -100.",
    "LAWS": "The published scaling laws.",
    "REFIT": "The 2024 re-fit of Chinchilla's scaling law, a `LossLaw`.",
    "Positive": "The type of a field that must be positive, from 1e-6 to 1e6.",
    "zero": "The change for `edit` that replaces an activation by zeros.",
}
MARK = "<!-- names, written by python -m docs.site.public -->\n"


def public_names() -> Iterator[tuple[str, str, Any]]:
    """Yield (module, name, value) for each public name."""
    for module in MODULES:
        for name in names_of(module):
            yield module, name, getattr(importlib.import_module(module), name)


def about(name: str, value: Any) -> str:
    """Return the first sentence of the docstring of a public name."""
    return first_sentence(VALUES.get(name) or inspect.getdoc(value) or "")


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, on one line, as Markdown for a cell of a table."""
    sentence = re.split(r"(?<=[.])\s+(?=[A-Z`])", " ".join(text.split("\n\n")[0].split()))[0]
    return escaped(sentence).replace("&gt;", ">").replace("|", r"\|")


def tables() -> str:
    """Return the names of each module as a table in Markdown."""
    rows: dict[str, list[str]] = {module: [] for module in MODULES}
    for module, name, value in public_names():
        rows[module].append(f"| `{name}` | {about(name, value)} |")
    sections = []
    for module, guide in MODULES.items():
        title = f"{first_sentence(inspect.getdoc(importlib.import_module(module)) or '')} [Guide]({guide})."
        sections.append(
            "\n".join([f"## {module}\n", f"{title}\n", "| name | meaning |", "| --- | --- |", *rows[module], ""])
        )
    return "\n".join(sections)


def with_links(text: str, pages: Collection[str]) -> str:
    """Return the page of the public names, with a link from each name to its own page if it has one."""
    module, lines = "", []
    for line in text.split("\n"):
        module = line.removeprefix("## ") if line.startswith("## ") else module
        if row := re.match(r"\| `(\w+)` ", line):
            page = f"python/{module}.{row[1]}.md".replace("/onward.", "/", 1)
            line = line.replace(f"`{row[1]}`", f"[`{row[1]}`]({page})", 1) if page in pages else line
        lines.append(line)
    return "\n".join(lines)


def signatures() -> Iterator[str]:
    """Yield a line for each public name, and for each public method of a public class: its name and its signature. A
    method is public if it has a docstring. It is listed under the public class that defines it."""
    public = {value for *_, value in public_names() if isinstance(value, type)}
    for module, name, value in public_names():
        yield f"{module}.{name}{signature(value)}"
        if isinstance(value, type):
            inherited = {owner for base in value.__mro__[1:] if base in public for owner in base.__mro__}
            for method, function in methods([owner for owner in value.__mro__ if owner not in inherited]):
                yield f"{module}.{name}.{method}{signature(function)}"


def methods(owners: list[type]) -> Iterator[tuple[str, Any]]:
    """Yield (name, function) for the methods and properties with a docstring that are defined in `owners`, except for
    classes from other libraries."""
    ours = [vars(owner) for owner in reversed(owners) if owner.__module__.startswith("onward.")]
    for name, member in sorted({name: one for members in ours for name, one in members.items()}.items()):
        function = getattr(member, "fget", getattr(member, "__func__", member))
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield name, function


class Spelled:
    """A type annotation whose `repr` is its source."""

    def __new__(cls, annotation: Any) -> Any:
        return super().__new__(cls) if isinstance(annotation, str) else annotation

    def __init__(self, annotation: str) -> None:
        self.annotation = annotation

    def __repr__(self) -> str:
        return self.annotation


def signature(value: Any) -> str:
    """Return the signature of a function or a class, without the modules of types, which may change, or "" if it has
    none; for any other value, return its type."""
    if not callable(value):
        return f": {type(value).__name__}"
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):  # an alias of a type, or a class of another library
        return ""
    types = [parameter.replace(annotation=Spelled(parameter.annotation)) for parameter in found.parameters.values()]
    text = str(found.replace(parameters=types, return_annotation=Spelled(found.return_annotation)))
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", re.sub(HIDDEN, "...", text))


def main() -> None:
    """Write the tables and the signatures."""
    PAGE.write_text(PAGE.read_text("utf-8").split(MARK)[0] + MARK + "\n" + tables(), encoding="utf-8")
    SIGNATURES.write_text("".join(f"{line}\n" for line in signatures()), encoding="utf-8")


if __name__ == "__main__":
    main()
