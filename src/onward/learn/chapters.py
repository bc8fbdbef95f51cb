"""The chapters of the course: Markdown files in docs/learn, which travel in the wheel as `learn/pages`."""

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from os.path import normpath
from pathlib import Path

from onward.base.errors import UserError

PAGES = Path(__file__).parent / "pages"
HEADING = re.compile(r"^# (\d+)\. (.+)$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?:(\.\./)|(?=\d))([\w./-]+\.\w+)(?:#[\w-]+)?\)")  # to a file of the repository
ABOUT = re.compile(r"^\*(.+)\*$", re.MULTILINE)


@dataclass(frozen=True)
class Chapter:
    """A chapter of Onward's course on Transformers, a Markdown file: its path, number, title and text."""

    path: Path
    number: int
    title: str
    text: str  # Markdown

    @property
    def about(self) -> str:
        """The summary of the chapter, its first line in italics; "" if there is none."""
        match = ABOUT.search(self.text)
        return match[1] if match else ""

    @property
    def alone(self) -> str:
        """The Markdown of the chapter for a reader who has no other files: a link to a file of the repository becomes
        the file's path, and a link to a chapter plain text."""
        path = lambda match: f"`{normpath(f'docs/{match[3]}')}`" if match[2] else match[1]
        return LINK.sub(path, self.text)

    def picture(self, name: str) -> str:
        """Return the SVG file `name`, a picture next to the chapter's file, as a data URL that contains the picture."""
        content = (self.path.parent / name).read_bytes()
        return f"data:image/svg+xml;base64,{b64encode(content).decode()}"

    @property
    def minutes(self) -> bool:
        """Whether the chapter's code takes minutes to run: the page begins with `<!-- long -->`."""
        return self.text.startswith("<!-- long -->")


def read_chapter(path: Path) -> Chapter:
    """Read a chapter of the course from its Markdown file, such as 04-attention.md with the heading `# 4. Attention by
    hand`. Raises a UserError for a heading of another form."""
    text = path.read_text(encoding="utf-8")
    heading = HEADING.search(text)
    if not heading:
        raise UserError(f"{path}: a chapter begins with a heading such as '# 4. Attention by hand'")
    return Chapter(path, int(heading[1]), heading[2], text)


@cache
def chapters() -> Sequence[Chapter]:
    """Return the chapters of the course in their order."""
    return [read_chapter(path) for path in sorted(PAGES.glob("[0-9][0-9]-*.md"))]


def find_chapter(number: int) -> Chapter:
    """Return the chapter of the course with this number. Raises a UserError if there is none."""
    matching = [chapter for chapter in chapters() if chapter.number == number]
    if not matching:
        raise UserError(f"there is no chapter {number}: choose {', '.join(str(c.number) for c in chapters())}")
    return matching[0]
