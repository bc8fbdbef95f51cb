"""onward learn: the course, chapter by chapter."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from onward.cli.shared.options import parse
from onward.cli.shared.output import Output, console, print_next, print_table
from onward.errors import UserError
from onward.files import atomic_write

ABOUT = """\
Read the course on decoder-only Transformers, run its code, change it: a chapter takes 10 to 20 minutes on a laptop.

examples:
  onward learn                          the chapters
  onward learn 4                        read chapter 4 in the terminal
  onward learn 4 --run                  run its code, block by block, in this folder
  onward learn 4 --web attention.html   the same as a page for a browser
"""


@dataclass(frozen=True)
class Options:
    """The options of `onward learn`."""

    positional: ClassVar[tuple[str, ...]] = ("chapter",)
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {"chapter": ("run", "web")}
    chapter: int | None = None  # the number of a chapter; none: list the chapters
    run: bool = False  # run the chapter's code; its files go into this folder
    web: str = ""  # write the chapter as a self-contained page, such as attention.html


def main(argv: Sequence[str]) -> None:
    """Run `onward learn`: list the chapters of the course; or print one, run its code, or write it as a page."""
    options = parse(Options, argv, prog="onward learn", about=ABOUT)
    from onward.learn.chapters import chapters, find_chapter

    if options.chapter is None:
        print_table([{"chapter": one.number, "title": one.title, "about": one.about} for one in chapters()])
        print_next("onward learn 1", "onward learn 1 --run")
        return
    chapter = find_chapter(options.chapter)
    if options.run and options.web:
        raise UserError("--run and --web are both given: choose one")
    if options.web:
        from onward.learn.web import web_page

        with atomic_write(Path(options.web)) as new:
            new.write_text(web_page(chapter), encoding="utf-8")
        console.print(f"page: {options.web}", markup=False, soft_wrap=True)
    elif options.run:
        run_code(chapter.text)
    else:
        from rich.markdown import Markdown

        from onward.learn.terminal import for_terminal

        Output(width=None if sys.stdout.isatty() else 100).print(Markdown(for_terminal(chapter.text)))


def run_code(text: str) -> None:
    """Print and run each block of code of a page."""
    from rich.syntax import Syntax

    from onward.cli import main as onward
    from onward.learn.cells import cells, run

    names: dict[str, object] = {}
    for cell in cells(text):
        code = cell.code.rstrip()
        if sys.stdout.isatty():
            language = "bash" if cell.kind == "sh" else cell.kind
            Output().print(Syntax(code, language, background_color="default", word_wrap=True))
        else:
            print(code)
        print(flush=True)
        run(cell, names, onward)
        print(flush=True)
