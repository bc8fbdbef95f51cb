"""Build questions and answers from Python's own documentation: "What does str.split do?", and the first sentence of
its docstring. Imports nothing heavy."""

import ast
import builtins
import inspect
import json
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from onward.base.files import atomic_write
from onward.data.corpora import parsed_modules

LENGTHS = range(12, 100)  # allowed numbers of characters in an answer
SENTENCE = re.compile(r"[A-Z].*?[\w)'\"]\.(?= +[A-Z]|$)")
NAME = re.compile(r"[A-Za-z][\w.]*")


def question(name: str) -> str:
    return f"What does {name} do?"


@cache
def answers() -> dict[str, str]:
    """Return the first sentence of the documentation of Python's functions and methods, by their names, in alphabetical
    order; a small data set of answers for fine-tuning."""
    documentation = dict(documented())
    return {name: documentation[name] for name in sorted(documentation)}


def documented() -> Iterator[tuple[str, str]]:
    """Yield (name, first sentence of the documentation) of each public function, those of the standard library
    first."""
    for module, tree in parsed_modules(Path(sysconfig.get_path("stdlib"))):
        yield from functions(tree, module)
    for owner in (value for value in vars(builtins).values() if isinstance(value, type)):
        for name, method in vars(owner).items():
            yield from described(f"{owner.__name__}.{name}", inspect.getdoc(method))
    for name, function in vars(builtins).items():
        if callable(function) and not isinstance(function, type):
            yield from described(name, inspect.getdoc(function))


def functions(node: ast.AST, owner: str) -> Iterator[tuple[str, str]]:
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.ClassDef):
            yield from functions(child, child.name)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from described(f"{owner}.{child.name}", ast.get_docstring(child))


def described(name: str, text: str | None) -> Iterator[tuple[str, str]]:
    """Yield (name, first sentence of `text`) if the name is public and the sentence is complete, of moderate length and
    ASCII; otherwise, yield nothing."""
    paragraph = inspect.cleandoc(text or "").partition("\n\n")[0]
    sentence = SENTENCE.match(" ".join(paragraph.split()))
    if NAME.fullmatch(name) and "._" not in name and sentence and len(sentence[0]) in LENGTHS and sentence[0].isascii():
        yield name, sentence[0]


def conversations(known: Mapping[str, str]) -> list[dict[str, Any]]:
    """Make a conversation of one question and one answer for each function in `known`, {name of a function: answer}, as
    records that `onward finetune` reads."""
    return [{"messages": [*asked(name), assistant_message(answer)]} for name, answer in known.items()]


def preferences(known: Mapping[str, str]) -> list[dict[str, Any]]:
    """Make preference records for `onward finetune` from `known`, {name of a function: answer}: the function's own
    answer is chosen, and another function's answer is rejected."""
    others = [*known.values()]
    others = others[len(others) // 2 :] + others[: len(others) // 2]
    return [
        {"prompt": asked(name), "chosen": [assistant_message(answer)], "rejected": [assistant_message(other)]}
        for (name, answer), other in zip(known.items(), others)
        if answer != other
    ]


def asked(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question(name)}]


def assistant_message(answer: str) -> dict[str, str]:
    return {"role": "assistant", "content": answer}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with atomic_write(path) as new:
        new.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
