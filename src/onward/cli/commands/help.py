"""onward help: a term of the field, explained."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from onward.base.errors import UserError
from onward.cli.shared.options import parse
from onward.cli.shared.output import WIDEST, Output

ABOUT = """\
Explain a term in one sentence, with its chapter in the course and its name in the code. The glossary also contains
names from other libraries and papers.

examples:
  onward help nucleus
  onward help gradient checkpointing
  onward help StoppingCriteria
"""


@dataclass(frozen=True)
class Options:
    """The options of `onward help`, which explains a term or a command."""

    positional: ClassVar[tuple[str, ...]] = ("term",)
    term: tuple[str, ...]  # term to explain (one or more words)


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward help", about=ABOUT)
    from onward.cli.overview import COMMANDS
    from onward.learn.chapters import chapters
    from onward.learn.glossary import find, mentioning

    word = " ".join(options.term)
    entries = find(word)
    if not entries and word not in COMMANDS:
        from onward.learn.glossary import nearest_terms

        raise UserError(f"{word!r} is not in the glossary: {nearest_terms(word)}")
    out, titles = (
        Output(highlight=False, width=None if sys.stdout.isatty() else WIDEST),
        {chapter.number: chapter.title for chapter in chapters()},
    )
    if word in COMMANDS:
        out.print(f"onward {word}: {COMMANDS[word]}; onward {word} --help lists its options\n", markup=False)
    for entry in entries:
        out.print(entry.name, style="bold", markup=False, end="")
        out.print(f" ({', '.join(entry.also)})" if entry.also else "", markup=False)
        out.print(entry.text, markup=False)
        if entry.code:
            out.print(f"in the code: {entry.code}", markup=False)
        if entry.guide:
            out.print(f"guide: docs/{entry.guide}.md", markup=False)
        if entry.chapter in titles:
            out.print(f"chapter {entry.chapter}, {titles[entry.chapter]}: onward learn {entry.chapter}", markup=False)
        out.print()
    if others := [entry.name for entry in mentioning(word) if entry not in entries]:
        out.print(f"see also: {', '.join(others)}", markup=False)
