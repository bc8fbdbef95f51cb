"""onward learn: the course, chapter by chapter."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from onward.base.errors import UserError
from onward.base.files import atomic_write
from onward.cli.shared.options import parse
from onward.cli.shared.output import Output, console, print_next, print_table
from onward.learn.chapters import Chapter, chapters, find_chapter

ABOUT = """\
Read the course on decoder-only Transformers, and run and change its code. A chapter takes 10 to 20 minutes on a laptop.

examples:
  onward learn                          the chapters
  onward learn 4                        read chapter 4 in the terminal
  onward learn attention                the chapter on attention
  onward learn 4 --run                  run its code, block by block, in this folder
  onward learn 4 --web attention.html   the same as a page for a browser
  onward learn 4 --notebook 4.ipynb     the same as a notebook for Jupyter
"""


@dataclass(frozen=True)
class Options:
    """The options of `onward learn`, which shows the course on Transformers."""

    positional: ClassVar[tuple[str, ...]] = ("chapter",)
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {"chapter": ("run", "web", "notebook")}
    chapter: str = ""  # number of a chapter, words of its title, or a term that it teaches; default: list the chapters
    run: bool = False  # run the chapter's code, which writes its files to this folder
    web: str = ""  # write the chapter as a self-contained web page, such as attention.html
    notebook: str = ""  # write the chapter as a notebook for Jupyter, with its outputs, such as attention.ipynb


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward learn", about=ABOUT)
    if not options.chapter:
        print_table([{"chapter": one.number, "title": one.title, "about": one.about} for one in chapters()])
        print_next("onward learn 1", "onward learn 1 --run")
        return
    chapter = find_chapter(options.chapter)
    ways = [name for name in ("run", "web", "notebook") if getattr(options, name)]
    if len(ways) > 1:
        raise UserError(f"{' and '.join(f'--{name}' for name in ways)} are given together: choose one")
    if options.web:
        from onward.learn.web import web_page

        write("page", options.web, web_page(chapter))
    elif options.notebook:
        from onward.learn.notebook import notebook

        write("notebook", options.notebook, notebook(chapter))
    elif options.run:
        run_code(chapter)
    else:
        from rich.markdown import Markdown

        from onward.learn.terminal import for_terminal

        Output(width=None if sys.stdout.isatty() else 100).print(Markdown(for_terminal(chapter.alone)))


def write(kind: str, name: str, text: str) -> None:
    with atomic_write(Path(name)) as new:
        new.write_text(text, encoding="utf-8")
    console.print(f"{kind}: {name}", markup=False, soft_wrap=True)


def run_code(chapter: Chapter) -> None:
    from rich.syntax import Syntax

    from onward.cli import main as onward
    from onward.learn.cells import cells, fails, run

    names: dict[str, object] = {}
    for cell in cells(chapter.text):
        code = cell.code.rstrip()
        if sys.stdout.isatty():
            language = "bash" if cell.kind == "sh" else cell.kind
            Output().print(Syntax(code, language, background_color="default", word_wrap=True))
        else:
            print(code)
        print(flush=True)
        if fails(cell, run(cell, names, onward)):
            raise UserError(f"chapter {chapter.number} stops here, since the rest needs the command that was refused")
        print(flush=True)
