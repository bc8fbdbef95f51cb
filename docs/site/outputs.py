"""Run the code of pages and write its outputs and pictures into them: python -m docs.site.outputs docs/learn/04-*.md"""

import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from onward.cli import main as onward
from onward.learn.cells import cells, output, rewritten

PICTURE = re.compile(r"!\[[^\]]*\]\(([\w-]+\.\w+)\)")


def update(page: Path) -> None:
    """Write the outputs of a page's code into it, and the pictures that its commands make beside it."""
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {}
    page, back = page.absolute(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            page.write_text(rewritten(text, [output(cell, names, onward) for cell in cells(text)]), encoding="utf-8")
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
