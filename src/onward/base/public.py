"""Public names of a module, imported when they are first used.

A public module, such as `onward.training`, imports its names for type checkers and editors only, so that importing it,
or a module in its folder, imports nothing else. `lazily` reads these imports as text when a name is first used.
"""

import importlib
import sys
from collections.abc import Callable
from functools import cache


def lazily(module: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a public module, whose `__all__` lists the public names."""

    def get(name: str) -> object:
        if name not in sys.modules[module].__all__:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes(module)[name]), name)

    return get, lambda: sorted(sys.modules[module].__all__)


@cache
def homes(module: str) -> dict[str, str]:
    """Return the inner module that defines each public name of a public module, by the name."""
    import ast
    from pathlib import Path

    return {
        alias.name: node.module
        for node in ast.walk(ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
