"""The public API: names and signatures change only on purpose."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from difflib import unified_diff
from pathlib import Path

import pytest

import onward
from docs.site import public

ROOT = Path(__file__).parents[1]
WRITE = "python -m docs.site.public"
TWICE = {"Completion"}  # names with two meanings each
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *(path for folder in ("docs", "docs/learn") for path in (ROOT / folder).glob("*.md")),
    *(ROOT / "examples").glob("*.py"),
]
INNER = {"families.md": 'ARCHITECTURES = {"lucid"'}  # a file in the folder families/, which is itself internal


def test_public_signatures_change_only_with_an_entry_in_the_changelog() -> None:
    changes = [
        *unified_diff(public.SIGNATURES.read_text("utf-8").splitlines(), [*public.signatures()], lineterm="", n=0)
    ]
    lines = "\n".join(line for line in changes if not line.startswith(("---", "+++", "@@")))
    assert not changes, f"public names changed:\n{lines}\nIf so intended: {WRITE}, and an entry in CHANGELOG.md"


def test_the_page_of_public_names_is_up_to_date() -> None:
    assert public.PAGE.read_text("utf-8").partition(public.MARK)[2] == f"\n{public.tables()}", WRITE


def test_each_public_name_has_one_home_and_a_description() -> None:
    names = [*public.public_names()]
    homes = Counter(name for _, name, _ in names)
    assert {name for name, count in homes.items() if count > 1} == TWICE
    assert not [(module, name) for module, name, value in names if not public.about(name, value)]
    assert not [(module, name) for module, name, _ in names if importlib.util.find_spec(f"{module}.{name}")]


def test_public_modules_are_those_of_the_page_and_import_no_torch() -> None:
    lazy = [
        path.parent for path in (ROOT / "src/onward").glob("**/__init__.py") if "lazily(" in path.read_text("utf-8")
    ]
    modules = {".".join(folder.relative_to(ROOT / "src").parts) for folder in lazy}
    assert modules == {*public.MODULES} - {"onward.families"}
    program = f"import sys, {', '.join(public.MODULES)}; print('torch' in sys.modules, dir(onward.tracing))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == f"False {sorted(importlib.import_module('onward.tracing').__all__)}\n"
    with pytest.raises(AttributeError, match="module 'onward' has no attribute 'nonsense'"):
        onward.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_the_changelog_replaces_inner_modules_by_public_names() -> None:
    named = re.findall(r"`from (onward[\w.]*) import ([\w, ]+)`", (ROOT / "CHANGELOG.md").read_text("utf-8"))
    names = {f"{module}.{name}" for module, taken in named for name in taken.split(", ")}
    assert "onward.training.CrossEntropy" in names
    assert names <= {f"{module}.{name}" for module, name, _ in public.public_names()}


@pytest.fixture(scope="module")
def names() -> set[str]:
    """All public names, with their modules."""
    return {f"{module}.{name}" for module, name, _ in public.public_names()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_imports_public_names_alone(page: Path, names: set[str]) -> None:
    text = page.read_text("utf-8")
    codes = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if page.suffix == ".md" else [text]
    taken = {
        f"{node.module}.{alias.name}"
        for code in codes
        if not any(page.name == name and start in code for name, start in INNER.items())
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "onward"
        for alias in node.names
    }
    assert taken <= names
