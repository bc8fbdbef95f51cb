"""Imports descend: a folder imports only folders before it in the order of the data, and modules form no circles."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
ORDER = [  # as in docs/ARCHITECTURE.md; each folder may import those before it
    *("errors", "suggestions", "arguments", "fields", "files", "limits", "timing", "splitmix", "device", "hub_cache"),
    *("hub", "notebook", "config", "kernels", "model", "transforms", "tracing", "compiled", "families", "text", "data"),
    *("checkpoint", "generation", "evaluation", "planning", "training", "inspection", "reports", "language_model"),
    *("folders", "serving", "cli"),
]
PARTS = {  # a configuration knows its parts, a part the module that it builds, and a module its part
    "onward.config.decoder",
    "onward.config.parts",
    "onward.config.routing",
}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(node: ast.AST) -> Iterator[str]:
    """The names of modules, and of what is taken from them, that a file imports, wherever in it, but for types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from imports(child)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted((SOURCE / "onward").rglob("*.py"))}
GRAPH = {name: {m for m in imports(tree_of(path)) if m in FILES and m != name} for name, path in FILES.items()}


def rank(module: str) -> int:
    """The place of a module's folder in the order; the package itself and its command come last."""
    folder = module.split(".")[1] if "." in module else ""
    return ORDER.index(folder) if folder in ORDER else len(ORDER)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that import each other, directly or through others."""

    def reached(start: str) -> set[str]:
        found, left = set[str](), [start]
        while left:
            new = graph[left.pop()] - found
            found |= new
            left += new
        return found

    reach = {name: reached(name) for name in graph}
    found = {frozenset(m for m in reach[name] if name in reach[m]) for name in graph if name in reach[name]}
    return [set(circle) for circle in sorted(found, key=sorted)]


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("onward", "onward.__main__")])
def test_a_module_imports_only_folders_before_its_own(name: str) -> None:
    upward = {module for module in GRAPH[name] - {"onward"} if rank(module) > rank(name)}
    assert not upward


def test_every_folder_has_a_place_in_the_order() -> None:
    folders = {path.stem for path in (SOURCE / "onward").iterdir() if path.suffix in ("", ".py")}
    assert folders - {"__init__", "__main__", "__pycache__"} <= {*ORDER}


def test_only_parts_and_their_modules_form_a_circle() -> None:
    graph = {name: {m for m in GRAPH[name] if not (name in PARTS and m in GRAPH)} for name in GRAPH}
    assert circles(graph) == []


def test_a_circle_through_a_third_module_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
