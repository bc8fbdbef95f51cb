"""onward learn: the course, chapter by chapter."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, ClassVar

from rich.text import Text

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.base.files import atomic_write, writable_ending
from onward.base.suggestions import nearest
from onward.cli.shared.options import parse
from onward.cli.shared.output import Output, console, print_json, print_next, print_table
from onward.learn.chapters import Chapter, chapters, find_chapter

if TYPE_CHECKING:
    from onward.learn.exercise import Exercise

ABOUT = """\
Read the course on decoder-only Transformers, and run and change its code. A chapter takes 10 to 20 minutes on a laptop.

examples:
  onward learn                          the chapters
  onward learn 4                        read chapter 4 in the terminal
  onward learn attention                the chapter on attention
  onward learn 4 --answers              the same, with the answers to its questions
  onward learn 4 --run                  run its code, block by block, in this folder
  onward learn 4 --web attention.html   the same as a page for a browser
  onward learn 4 --notebook 4.ipynb     the same as a notebook for Jupyter
  onward learn 9 --exercises            functions of chapter 9 to write, such as top-p
  onward learn 9 --starter mine.py      write a file with these functions, without their code
  onward learn 9 --check mine.py        check your functions in this file
  onward learn 9 --answer top_p         the answer for this function
"""


@dataclass(frozen=True)
class Options:
    """The options of `onward learn`, which shows the course on Transformers."""

    positional: ClassVar[tuple[str, ...]] = ("chapter",)
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "chapter": ("answers", "run", "web", "notebook"),
        "check": ("seconds", "json"),
    }
    chapter: tuple[str, ...] = ()  # number, words of the title, or a term that it teaches; default: list them
    answers: bool = False  # show the answers to the questions of the chapter, too
    run: bool = False  # run the chapter's code, which writes its files to this folder
    web: str = ""  # write the chapter as a self-contained web page, such as attention.html
    notebook: str = ""  # write the chapter as a notebook for Jupyter, with its outputs, such as attention.ipynb
    exercises: bool = False  # list the chapter's exercises that can be checked; without a chapter: all exercises
    starter: str = ""  # write the exercises to a new Python file, such as mine.py, without their code
    check: str = ""  # check the functions in this Python file, such as mine.py, with random inputs
    answer: str = ""  # print the answer of the exercise with this name
    seconds: Annotated[float, Range(1, 1e6)] = 60.0  # time limit of a check
    json: bool = False  # print the results of a check as JSON


WAYS = "answers", "run", "web", "notebook", "exercises", "starter", "check", "answer"


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, prog="onward learn", about=ABOUT)
    ways = [name for name in WAYS if getattr(options, name)]
    if len(ways) > 1:
        raise UserError(f"{' and '.join(f'--{name}' for name in ways)} cannot be combined: choose one")
    chapter = find_chapter(" ".join(options.chapter)) if options.chapter else None
    if ways and ways[0] in WAYS[4:]:
        return practice(options, chapter)
    if chapter is None:
        for part, own in groupby(chapters(), lambda one: one.part):
            print(f"{part}\n")
            print_table([{"chapter": one.number, "title": one.title, "about": one.about} for one in own])
            print()
        print_next("onward learn 1", "onward learn 1 --run")
    elif options.web:
        from onward.learn.web import web_page

        write("page", options.web, ".html", web_page(chapter))
    elif options.notebook:
        from onward.learn.notebook import notebook

        write("notebook", options.notebook, ".ipynb", notebook(chapter))
    elif options.run:
        run_code(chapter)
    else:
        from rich.markdown import Markdown

        from onward.learn.terminal import for_terminal

        Output(width=None if sys.stdout.isatty() else 100).print(Markdown(for_terminal(chapter, options.answers)))
    return 0


def write(kind: str, name: str, ending: str, text: str) -> None:
    writable_ending(Path(name), ending)
    with atomic_write(Path(name)) as new:
        new.write_text(text, encoding="utf-8")
    console.print(f"{kind}: {name}", markup=False, soft_wrap=True)


def run_code(chapter: Chapter) -> None:
    from rich.syntax import Syntax

    from onward.cli import main as onward
    from onward.learn.cells import cells, fails, run
    from onward.learn.terminal import pointer

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
            raise UserError(f"chapter {chapter.number} stops here, because the rest needs the command that failed")
        if cell.figure:
            print(pointer(chapter, names["_"]))
        print(flush=True)


def practice(options: Options, chapter: Chapter | None) -> int:
    """Show the exercises of one or all chapters, write them to a file, or check a file with answers; return the exit
    status."""
    from onward.learn.exercises import exercises

    found = [one for one in exercises() if chapter is None or one.chapter == chapter.number]
    if chapter and not found:
        numbers = ", ".join(map(str, dict.fromkeys(one.chapter for one in exercises())))
        raise UserError(f"chapter {chapter.number} has no exercises to check: choose a chapter of {numbers}")
    words = f"onward learn {chapter.number}" if chapter else "onward learn"
    if options.check:
        return check(options, found)
    if options.answer:
        named = {one.name: one for one in found}
        if options.answer not in named:
            raise UserError(f"there is no exercise {options.answer!r} here: {nearest(options.answer, named)}")
        print(named[options.answer].source, end="")
    elif options.starter:
        from onward.learn.exercise import HEADER

        if Path(options.starter).exists():
            raise UserError(f"{options.starter} exists: give the name of a new file")
        write("file", options.starter, ".py", "\n\n".join([HEADER, *(one.starter for one in found)]))
        print_next(f"{words} --check {quote(options.starter)}")
    elif chapter is None:
        print_table([{"chapter": one.chapter, "exercise": one.name, "about": one.about} for one in found])
    else:
        print("\n\n".join(one.shown for one in found))
        print_next(f"{words} --starter mine.py", f"{words} --check mine.py")
    return 0


COLORS = {"passed": "green", "failed": "red"}


def check(options: Options, found: Sequence["Exercise"]) -> int:
    from onward.learn.checking import check_file

    with console.status("checking"):
        verdicts = check_file(Path(options.check), found, options.seconds)
    failed = any(verdict.status == "failed" for verdict in verdicts)
    if options.json:
        print_json([asdict(verdict) for verdict in verdicts])
        return failed
    for verdict in verdicts:
        if verdict.status != "not written":
            line = Text.assemble(
                f"{verdict.exercise:<20}", (f"{verdict.status:<8}", COLORS[verdict.status]), verdict.what
            )
            Output(highlight=False).print(line, soft_wrap=True)
        for name in "call", "expected", "got", "mistake":
            if text := getattr(verdict, name):
                Output(highlight=False).print(Text(f"    {name:<10}{text}"), soft_wrap=True)
    if left := [verdict.exercise for verdict in verdicts if verdict.status == "not written"]:
        console.print(f"not written yet: {', '.join(left)}", markup=False, soft_wrap=True)
    return failed
