"""Imports are layered: a folder imports only folders before it in ORDER, and modules have no import cycles.

Imports inside functions and imports for types also count. The names of a public module, such as `onward.training`, do
not count: they are imported when a program uses them, and Onward's own modules do not use them.
"""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
ORDER = [  # as in docs/ARCHITECTURE.md; each folder may import the folders before it
    *("base", "config", "kernels", "model", "transforms", "parallel", "tracing", "compiled"),
    *("families", "hub", "text", "data", "checkpoint", "generation", "evaluation", "planning", "training"),
    "inspection",
    *("reports", "api", "harness", "measuring", "learn", "serving"),
    "cli",
]
LAZY = {  # modules of config, kernels and model with imports inside functions
    "onward.kernels.available": "the self-test, which compiles kernels",
    "onward.kernels.causal": "the compiler, when the first kernel is needed",
    "onward.kernels.chosen": "the compiler",
    "onward.kernels.cross_entropy": "the compiler",
    "onward.kernels.draws": "the compiler",
    "onward.kernels.operations": "the compiler",
    "onward.kernels.requirements": "torch, so that --help answers at once",
    "onward.model.flex": "FlexAttention, which few calls need",
}
DISPATCHES = {  # modules that import others by a name that is not in their source
    "onward.base.public": "the public names, each at its first use",
    "onward.cli": "the command that the command line names",
    "onward.families": "each family of the folder",
    "onward.evaluation.tasks": "each task of the folder",
    "onward.training.methods": "each method of the folder",
    "onward.learn.exercises": "each exercise of the folder",
    "onward.base.fields": "the user's module that --import names",
    "onward.inspection.doctor.target": "the user's model",
}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def without_names(tree: ast.Module) -> ast.Module:
    """A public module without the names in its statement `if TYPE_CHECKING: NAMES else: ... lazily(__name__)`."""
    nodes = (node.orelse if isinstance(node, ast.If) else [node] for node in tree.body)
    return ast.Module([node for several in nodes for node in several], [])


def imports(node: ast.AST) -> Iterator[str]:
    """The modules that a file or a function imports at any place, and the names imported from them."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)


def imports_in_functions(path: Path) -> set[str]:
    """The modules that the functions of a file import, except llvmlite, which is optional."""
    functions = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {module for function in functions for module in imports(function) if module.split(".")[0] != "llvmlite"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def named_imports(path: Path) -> list[str]:
    """The names of modules, as code, in calls that import by name, except constant names of other packages."""
    calls = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call) and node.args)
    named = (call for call in calls if ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__"))
    names = [call.args[0] for call in named]
    constant = lambda name: isinstance(name, ast.Constant) and str(name.value).split(".")[0] != "onward"
    return [ast.unparse(name) for name in names if not constant(name)]


FILES = {name_of(path): path for path in sorted((SOURCE / "onward").rglob("*.py"))}
TREES = {name: tree_of(path) for name, path in FILES.items()}
PUBLIC = {name for name, path in FILES.items() if "lazily(__name__)" in path.read_text(encoding="utf-8")}
IMPORTS = {name: set(imports(without_names(tree) if name in PUBLIC else tree)) for name, tree in TREES.items()}
GRAPH = {  # `import onward` alone imports no name of it
    name: {module for module in modules if module in FILES and module not in (name, "onward")}
    for name, modules in IMPORTS.items()
}


def test_modules_are_imported_by_name_only_by_the_listed_dispatches() -> None:
    found = {name: calls for name, path in FILES.items() if (calls := named_imports(path))}
    assert found.keys() == DISPATCHES.keys()
    assert not {name for name, calls in found.items() if any("onward" in call for call in calls)}


def test_import_by_name_is_found(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import_module('onward.model')\n__import__(name)\nimportlib.import_module('numpy')\n")
    assert named_imports(program) == ["'onward.model'", "name"]


def rank(module: str) -> int:
    """The index of a module's folder in ORDER; the package itself and its command come last."""
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


@pytest.mark.parametrize("name", [name for name in FILES if name != "onward.__main__"])
def test_a_module_imports_only_folders_before_its_own(name: str) -> None:
    upward = {module for module in GRAPH[name] if rank(module) > rank(name)}
    assert not upward


def test_no_module_imports_the_names_of_a_public_one() -> None:
    names = {f"{module}.{name}" for module in PUBLIC for name in import_module(module).__all__}
    assert {"onward.load", "onward.training.CrossEntropy"} <= names
    assert {name: used for name, modules in IMPORTS.items() if (used := names & modules)} == {}


COMMANDS = "onward.cli.commands."


def commands_of(modules: set[str]) -> set[str]:
    """The commands that a set of modules belongs to; a command with several files is a folder."""
    return {module.removeprefix(COMMANDS).split(".")[0] for module in modules if module.startswith(COMMANDS)}


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("onward.cli.")])
def test_a_command_is_imported_by_no_other_file(name: str) -> None:
    assert commands_of(GRAPH[name]) <= commands_of({name})


def test_every_folder_has_a_place_in_the_order() -> None:
    folders = {path.stem for path in (SOURCE / "onward").iterdir() if path.suffix in ("", ".py")}
    assert folders - {"__init__", "__main__", "__pycache__"} <= {*ORDER}


def test_modules_form_no_circle() -> None:
    assert circles(GRAPH) == []


def test_a_circle_through_a_third_module_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_config_never_imports_torch() -> None:
    config = {name: modules for name, modules in IMPORTS.items() if name.startswith("onward.config")}
    assert len(config) > 4
    assert not {name for name, modules in config.items() if any(m.split(".")[0] == "torch" for m in modules)}


@pytest.mark.parametrize("folder", ["config", "kernels", "model"])
def test_functions_of_the_lowest_folders_import_nothing(folder: str) -> None:
    lazy = {name for name, path in FILES.items() if rank(name) == ORDER.index(folder) and imports_in_functions(path)}
    assert lazy <= {*LAZY}


def test_rooms_of_a_folder_form_no_circle() -> None:
    rooms = {name: name.rpartition(".")[0] if name.count(".") > 2 else name for name in FILES}
    graph = {room: set[str]() for room in rooms.values()}
    for name, modules in GRAPH.items():
        graph[rooms[name]] |= {rooms[module] for module in modules} - {rooms[name]}
    assert circles(graph) == []
