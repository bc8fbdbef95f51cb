"""A chapter as a Jupyter notebook, with the outputs and pictures of its page."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from onward.learn.cells import Cell, pieces
from onward.learn.chapters import HEADING, Chapter
from onward.learn.interactive.figure import InteractiveFigure, read_figure

PICTURE = re.compile(r"^!\[.+\]\(([\w-]+\.svg)\)$", re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->\n*")
FOLD, END = "<details><summary>Answer</summary>", "</details>"
HIDDEN = {"jupyter": {"source_hidden": True, "outputs_hidden": True}, "collapsed": True}
ABOUT = (
    "*Chapter {} of `onward learn` as a notebook. Open it where `onward` is installed; its files go into its folder.*"
)


def notebook(chapter: Chapter) -> str:
    """Return a chapter of the course as the text of a Jupyter notebook (.ipynb) with outputs. A shell block becomes a
    cell with `%%sh`, a picture the output of a cell that displays the picture's file; answers to exercises are
    collapsed."""
    cells = [{"id": f"cell-{i}", **cell} for i, cell in enumerate(notebook_cells(chapter))]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}, "title": chapter.title}
    # as JSON, since jupytext reads no outputs, pictures or folded answers from Markdown
    document = {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def notebook_cells(chapter: Chapter) -> Iterator[dict[str, Any]]:
    text = HEADING.sub(lambda heading: f"{heading[0]}\n\n{ABOUT.format(heading[1])}", chapter.alone, count=1)
    folded = False  # whether the text is inside an answer
    for piece in pieces(text):
        if isinstance(piece, Cell):
            figures = [read_figure(chapter.path.parent / piece.figure)] if piece.figure else []
            yield block_cell(piece, figures, HIDDEN if folded else {})
            continue
        for i, part in enumerate(PICTURE.split(COMMENT.sub("", piece))):  # prose and file names of pictures alternate
            if i % 2:
                yield picture_cell(part, chapter.picture(part))
            elif prose := part.strip():
                if folded:
                    prose = prose.removeprefix(END).lstrip() if prose.startswith(END) else f"{FOLD}\n\n{prose}"
                folded = prose.count(FOLD) > prose.count(END)
                if folded:  # code follows, in a separate cell
                    opened = prose.removesuffix(FOLD)
                    prose = f"{prose}\n\n{END}" if opened == prose else f"{opened}**Answer**"
                yield {"cell_type": "markdown", "metadata": {}, "source": prose}


def block_cell(cell: Cell, figures: Sequence[InteractiveFigure], metadata: dict[str, Any]) -> dict[str, Any]:
    source = f"%%sh\n{cell.code}" if cell.kind == "sh" else cell.code
    outputs = [{"output_type": "stream", "name": "stdout", "text": cell.output}] if cell.output else []
    outputs += [result({"text/html": one._repr_html_(), "text/plain": repr(one)}) for one in figures]
    return code_cell(source, outputs, metadata)


def picture_cell(name: str, address: str) -> dict[str, Any]:
    # HTML, since Jupyter shows an SVG only after the cell has run
    data = {"text/html": f'<img src="{address}">', "text/plain": f"<{name}>"}
    return code_cell(f'from IPython.display import SVG\n\nSVG("{name}")', [result(data)], {})


def result(data: dict[str, str]) -> dict[str, Any]:
    """The value of a cell as an output, by media type."""
    return {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}


def code_cell(source: str, outputs: list[dict[str, Any]], metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": metadata,
        "source": source.rstrip(),
        "outputs": outputs,
    }
