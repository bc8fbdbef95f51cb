"""Run the code in pages and write its outputs, pictures and interactive figures into them: python -m docs.site.outputs
docs/learn/04-*.md"""

import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from onward.cli import main as onward
from onward.learn.cells import cells, output, rewritten
from onward.learn.interactive.figure import InteractiveFigure

PICTURE = re.compile(r"!\[[^\]]*\]\(([\w-]+\.\w+)\)")


def update(page: Path) -> None:
    """Write the outputs of a page's code into the page, and its pictures and interactive figures into the page's
    folder."""
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {}
    page, back = page.absolute(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            outputs = []
            for cell in cells(text):
                outputs.append(output(cell, names, onward))
                if cell.figure:
                    figure = names["_"]
                    assert isinstance(figure, InteractiveFigure)
                    figure.write(page.parent / cell.figure)
            page.write_text(rewritten(text, outputs), encoding="utf-8")
        finally:
            os.chdir(back)
        for name in PICTURE.findall(text):
            if (made := Path(folder, name)).exists():
                shutil.copy(made, page.parent)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        started = time.perf_counter()
        update(Path(argument))
        print(f"{argument}: {time.perf_counter() - started:.0f} s")
