"""The chapters of the course: Markdown files in docs/learn, which the wheel contains as `learn/pages`."""

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from os.path import normpath
from pathlib import Path

from onward.base.errors import UserError
from onward.learn.glossary import asked, find, nearest_terms

PAGES = Path(__file__).parent / "pages"
HEADING = re.compile(r"^# (\d+)\. (.+)$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?:(\.\./)|(?=\d))([\w./-]+\.\w+)(?:#[\w-]+)?\)")  # to a repository file
ABOUT = re.compile(r"^\*(.+)\*$", re.MULTILINE)


PARTS = {1: "A GPT from scratch", 8: "Training and scaling", 14: "Inside a model, and alignment"}  # by first chapter


@dataclass(frozen=True)
class Chapter:
    """A chapter of Onward's course on Transformers, a Markdown file: its path, number, title and text."""

    path: Path
    number: int
    title: str
    text: str  # Markdown

    @property
    def about(self) -> str:
        """The summary, the first line in italics."""
        match = ABOUT.search(self.text)
        return match[1] if match else ""

    @property
    def part(self) -> str:
        """The part of the course, such as "Part 1: A GPT from scratch"; a quiz ends each part."""
        number, title = [(i, title) for i, (first, title) in enumerate(PARTS.items(), 1) if first <= self.number][-1]
        return f"Part {number}: {title}"

    @property
    def alone(self) -> str:
        """The text for readers without the other files: links to files become paths, links to chapters become plain
        text."""
        path = lambda match: f"`{normpath(f'docs/{match[3]}')}`" if match[2] else match[1]
        return LINK.sub(path, self.text)

    def picture(self, name: str) -> str:
        """A picture next to the chapter's file as a data URL."""
        content = (self.path.parent / name).read_bytes()
        return f"data:image/svg+xml;base64,{b64encode(content).decode()}"

    @property
    def minutes(self) -> bool:
        return self.text.startswith("<!-- long -->")  # its code takes minutes to run


def read_chapter(path: Path) -> Chapter:
    """Read a chapter, such as 04-attention.md with the heading `# 4. Attention by hand`."""
    text = path.read_text(encoding="utf-8")
    heading = HEADING.search(text)
    if not heading:
        raise UserError(f"{path}: a chapter begins with a heading such as '# 4. Attention by hand'")
    return Chapter(path, int(heading[1]), heading[2], text)


@cache
def chapters() -> Sequence[Chapter]:
    """Return the chapters of the course in their order."""
    return [read_chapter(path) for path in sorted(PAGES.glob("[0-9][0-9]-*.md"))]


def find_chapter(name: str) -> Chapter:
    """The chapter with this number or with these words in its title, or else the chapter of this glossary term; `name`
    may also be a question."""
    words = (asked(name) or name).lower()
    number = name.lower().removeprefix("chapter ")
    begins = lambda title: len(words) > 2 and f" {words}" in f" {asked(title).lower()}"
    titled = [chapter for chapter in chapters() if number == str(chapter.number) or begins(chapter.title)]
    taught = [chapter for entry in find(name) for chapter in chapters() if chapter.number == entry.chapter]
    if not titled + taught:
        known = ", ".join(f"{chapter.number} ({chapter.title})" for chapter in chapters())
        near = nearest_terms(name)
        raise UserError(f"there is no chapter {number}: {near if 'did you mean' in near else f'choose {known}'}")
    return (titled + taught)[0]
