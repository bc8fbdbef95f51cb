"""Passages of documents under their headings, and examples made of them. Imports nothing heavy."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

HEADING = re.compile(r"(#{1,6})\s+(\S.*)")
NUMBER = re.compile(r"\d+(\.\d+)*\.?\s+(?=\S)")  # the number of a section, before its title
LEAST = 40  # minimum number of characters in a passage
QUESTION = re.compile(r"(?i)(how|what|why|when|where|which|who|can|does|do|is|are|should)\b.*")


@dataclass(frozen=True)
class Passage:
    """A passage of a document, and the headings above it."""

    source: str  # name of the document
    headings: tuple[str, ...]  # headings above the passage, beginning with the title
    text: str

    @property
    def place(self) -> str:
        return f"{self.source}#{self.headings[-1]}" if self.headings else self.source

    @property
    def question(self) -> str:
        """The last heading if it is a question, else a question about it; without headings, a question about the
        source."""
        if not self.headings:
            return f"What does {self.source.rpartition('/')[2]} say?"
        *above, last = self.headings
        if QUESTION.fullmatch(last):
            return last if last.endswith("?") else f"{last}?"
        return f"What is said about {last}{f' in {above[0]}' if above else ''}?"


def passages(documents: Iterable[tuple[str, str]]) -> Iterator[Passage]:
    """The passages of documents (name, text): the texts before, between and after the headings, code included. Short
    passages are left out."""
    for name, text in documents:
        headings: list[tuple[int, str]] = []
        lines: list[str] = []
        fence = ""
        for line in [*text.split("\n"), "# "]:
            heading = None if fence else HEADING.fullmatch(line.rstrip())
            if mark := re.match("`{3,}|~{3,}", line.strip()):
                fence = "" if fence == line.strip() else fence or mark[0]
            if not heading and line != "# ":
                lines.append(line)
                continue
            body = "\n".join(lines).strip()
            if len(body) >= LEAST:
                yield Passage(name, tuple(title for _, title in headings if title), body)
            lines.clear()
            if heading:
                level = len(heading[1])
                title = NUMBER.sub("", heading[2]).strip(" #*`")
                headings = [*(one for one in headings if one[0] < level), (level, title)]


def shortened(text: str, fits: Callable[[str], bool]) -> str:
    """Shorten a text to as many of its first paragraphs as fit; if none fits, to its first lines, sentences or
    words."""
    for separator in "\n\n", "\n", ". ", " ":
        parts = text.split(separator)
        low, high = 0, len(parts)
        while low < high:  # binary search for the largest number of parts that fit
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(separator.join(parts[:middle])) else (low, middle - 1)
        if low:
            cut = separator.join(parts[:low])
            return f"{cut}\n```" if cut.count("```") % 2 else cut  # close an open code block
    return ""


def example(passage: Passage, question: str, answer: str) -> dict[str, Any]:
    """A conversation of a question and its answer, with the place of the passage as `source`."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "source": passage.place}


def answer_of(passage: Passage, text: str) -> str:
    return f"{text}\n\nSource: {passage.place}"


def question_in(reply: str) -> str | None:
    """The question in a model's reply: the first line that ends with a question mark and has a plausible length; None
    if there is no such line."""
    lines = (line.strip().strip('"*').removeprefix("Question:").strip() for line in reply.split("\n"))
    return next((line for line in lines if line.endswith("?") and 10 <= len(line) <= 300), None)
