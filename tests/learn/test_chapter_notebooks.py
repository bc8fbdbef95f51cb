"""Chapters as notebooks: each notebook has the code, outputs and pictures of its page, and can be executed."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from onward.learn.cells import cells, difference
from onward.learn.chapters import Chapter, chapters
from onward.learn.notebook import notebook

EXECUTED = (4,)  # chapters executed by `make test`
PICTURES = re.compile(r"^!\[.+\]\((.+)\)$", re.MULTILINE)


def book_of(chapter: Chapter) -> Any:
    """The notebook of a chapter, after validation."""
    nbformat = pytest.importorskip("nbformat", reason="needs the package nbformat")
    book = nbformat.reads(notebook(chapter), as_version=4)
    nbformat.validate(book)
    return book


def code_of(book: Any) -> tuple[list[Any], list[Any]]:
    """The cells with the code blocks of the page, and the cells with its pictures."""
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    shows = [cell for cell in code if 'SVG("' in cell.source]
    return [cell for cell in code if cell not in shows], shows


def printed(cell: Any) -> str:
    """The standard output of a cell."""
    return "".join(one.text for one in cell.outputs if one.output_type == "stream" and one.name == "stdout")


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.path.stem)
def test_notebook_has_code_outputs_and_pictures_of_its_page(chapter: Chapter) -> None:
    book = book_of(chapter)
    blocks, shows = code_of(book)
    page = cells(chapter.text)
    assert [cell.source.removeprefix("%%sh\n") + "\n" for cell in blocks] == [cell.code for cell in page]
    assert [printed(cell) for cell in blocks] == [cell.output or "" for cell in page]
    assert [re.search(r'"(.+)"', cell.source)[1] for cell in shows] == PICTURES.findall(chapter.text)
    assert all("data:image/svg+xml;base64," in cell.outputs[0].data["text/html"] for cell in shows)


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.path.stem)
def test_prose_of_a_notebook_needs_no_other_cell_or_file(chapter: Chapter) -> None:
    prose = [cell.source for cell in book_of(chapter).cells if cell.cell_type == "markdown"]
    assert all(text.count("<details>") == text.count("</details>") for text in prose)
    assert not re.search(r"\]\((?!http)|<!--", "".join(prose))
    assert "".join(prose).count("Answer") >= chapter.text.count("<summary>Answer")
    assert all(prose)


RUNS = [pytest.param(c, id=c.path.stem, marks=() if c.number in EXECUTED else (pytest.mark.long,)) for c in chapters()]


@pytest.mark.parametrize("chapter", RUNS)
def test_notebook_prints_what_its_page_shows(chapter: Chapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient", reason="needs the package nbclient").NotebookClient
    pytest.importorskip("ipykernel", reason="needs the package ipykernel")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = book_of(chapter)
    client(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    blocks, shows = code_of(book)
    differences = [difference(cell, printed(made)) for cell, made in zip(cells(chapter.text), blocks, strict=True)]
    assert not [*filter(None, differences)]
    assert all("image/svg+xml" in cell.outputs[0].data for cell in shows)
