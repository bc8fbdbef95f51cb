"""Extract the text of files that are not plain text, and find lines that repeat over their documents."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from onward.data.extraction.html import html_text
from onward.data.extraction.markdown import markdown_text
from onward.data.extraction.packed import book_text, notebook_text, word_text
from onward.data.extraction.pdf import pdf_text
from onward.data.extraction.xml import xml_text

MARKUP = {".html": "html", ".htm": "html", ".xhtml": "html", ".xml": "xml", ".md": "markdown", ".markdown": "markdown"}
MARKUP |= {".ipynb": "notebook"}  # text files, unlike BINARY
BINARY = {".pdf": "pdf", ".docx": "docx", ".epub": "epub"}
KINDS = MARKUP | BINARY
PLAIN = "", ".txt", ".text"  # suffixes of files that may nevertheless be HTML or PDF
BEGINNINGS = {  # first bytes of files whose name does not determine the format
    "html": re.compile(
        rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype html|html)[\s>]", re.I | re.S
    ),
    "pdf": re.compile(rb"%PDF-"),
}
CHARSET = re.compile(rb"""<meta[^>]*?charset\s*=\s*["']?\s*([\w-]+)""", re.I)
DECLARED = re.compile(rb"""\s*<\?xml[^>]*?encoding\s*=\s*["']([\w-]+)""")
MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8"}
LATIN = frozenset(("iso-8859-1", "iso8859-1", "latin-1", "latin1", "ascii", "us-ascii", "windows-1252"))
HEAD_BYTES = 4096  # number of first bytes of a file that may declare its format and encoding
LEAST = 3  # minimum number of documents with a repeated line
LONGEST = 300  # maximum number of characters in a repeated line


def kind_of(suffix: str, head: bytes, raw: bool) -> str:
    """The kind of a file by its suffix or, if the suffix does not determine it, its first bytes; "" for text, which is
    read unchanged."""
    if kind := (BINARY if raw else KINDS).get(suffix):
        return kind
    found = (name for name, begin in BEGINNINGS.items() if suffix in PLAIN and begin.match(head))
    return next((kind for kind in found if not raw or kind == "pdf"), "")


def declared_encoding(content: bytes, default: str) -> str:
    """The encoding that a page declares, by a byte order mark, a `meta` element or an XML declaration; else `default`.
    Of these, only a byte order mark takes precedence over a `default` other than UTF-8."""
    head = content[:HEAD_BYTES]
    if mark := next((name for mark, name in MARKS.items() if head.startswith(mark)), ""):
        return mark
    found = DECLARED.match(head) or CHARSET.search(head)
    name = found[1].decode().lower() if found else ""
    if name.startswith(("utf-16", "utf-32")):  # wrong: the declaration could not have been read
        return "utf-8"
    return "cp1252" if name in LATIN and default == "utf-8" else name if name and default == "utf-8" else default


def page_source(content: bytes) -> tuple[str, bool]:
    """The source of a page of HTML that declares UTF-8 or nothing, and whether some of its bytes are not UTF-8. Such
    bytes become U+FFFD if most other non-ASCII characters are UTF-8; otherwise the page is decoded as windows-1252, as
    in browsers."""
    try:
        return content.decode("utf-8-sig"), False
    except UnicodeDecodeError:
        text = content.decode("utf-8-sig", "replace")
        odd, beyond = text.count("\ufffd"), sum(character > "\x7f" for character in text)
        return (text if beyond > 2 * odd else content.decode("cp1252", "replace")), True


def extracted(kind: str, content: bytes, name: str) -> str:
    """The text of a file of a kind, whose `content` is UTF-8 unless the kind is binary; `name` is for messages."""
    match kind:
        case "pdf":
            return pdf_text(content, name)
        case "docx":
            return word_text(content, name)
        case "epub":
            return book_text(content, name)
    source = content.decode("utf-8", "surrogatepass").replace("\r\n", "\n")
    match kind:
        case "xml":
            return xml_text(source, name)
        case "markdown":
            return markdown_text(source)
        case "notebook":
            return notebook_text(source, name)
    return html_text(source)


def prose_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield (line, whether it may be left out if it repeats): False for blank and long lines, code, code fences and
    headings."""
    fence = ""
    for line in text.split("\n"):
        mark = re.match("`{3,}|~{3,}", line.strip())
        if fence:
            yield line, False
            fence = "" if line.strip() == fence else fence
        elif mark:
            fence = mark[0]
            yield line, False
        else:
            yield line, bool(line.strip()) and not line.startswith("#") and len(line) <= LONGEST


def line_key(line: str) -> int:
    # unlike `hash`, equal in all processes
    return int.from_bytes(blake2b(line.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest())


def repeated_lines(texts: Iterable[str], share: float) -> frozenset[int]:
    """The keys of lines in at least this share of the texts, and in at least three."""
    counts: Counter[int] = Counter()
    number = 0
    for text in texts:
        counts.update({line_key(line) for line, free in prose_lines(text) if free})
        number += 1
    return frozenset(key for key, count in counts.items() if count >= max(LEAST, share * number))


def without_lines(text: str, repeated: frozenset[int]) -> tuple[str, int]:
    """Return the text without repeated lines, and the number of lines left out."""
    if not repeated:
        return text, 0
    lines = [*prose_lines(text)]
    kept = [line for line, free in lines if not free or line_key(line) not in repeated]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip(), len(lines) - len(kept)


@dataclass
class Extraction:
    """Counts of the items extracted from a source, for a sentence about it."""

    kinds: dict[str, list[int]] = field(default_factory=dict)  # by kind: counts of documents, bytes, and bytes of text
    lines: int = 0  # number of repeated lines that were left out
    empty: list[str] = field(default_factory=list)  # files without text
    odd: list[str] = field(default_factory=list)  # HTML pages that are not UTF-8 and declare no encoding

    def add(self, kind: str, name: str, size: int, text: str, lines: int, odd: bool = False) -> None:
        counts = self.kinds.setdefault(kind, [0, 0, 0])
        for i, number in enumerate((1, size, len(text.encode("utf-8", "surrogatepass")))):
            counts[i] += number
        self.lines += lines
        self.odd += [name] * odd
        if not text.strip():
            self.empty.append(name)

    def join(self, other: "Extraction") -> None:
        for kind, numbers in other.kinds.items():
            counts = self.kinds.setdefault(kind, [0, 0, 0])
            counts[:] = [a + b for a, b in zip(counts, numbers)]
        self.lines += other.lines
        self.empty += other.empty
        self.odd += other.odd

    def sentence(self, source: str) -> str:
        """The items extracted and left out, as a sentence; "" if all was plain text."""
        changed = {
            kind: counts for kind, counts in self.kinds.items() if counts[2] < 0.995 * counts[1] or kind != "markdown"
        }
        parts = [in_words(kind, *counts) for kind, counts in changed.items()]
        if changed.keys() - {*BINARY.values()}:
            parts[-1] += "; --raw keeps the markup"
        if self.lines:
            parts.append(f"without {self.lines:,} lines that repeat over documents (--repeated-lines 0 keeps them)")
        if self.empty:
            files = "file has" if len(self.empty) == 1 else "files have"
            scanned = "; a .pdf of scanned pages needs OCR first" * any(n.lower().endswith(".pdf") for n in self.empty)
            parts.append(f"{len(self.empty):,} {files} no text: {', '.join(self.empty[:3])}{scanned}")
        if self.odd:
            pages = "page is" if len(self.odd) == 1 else "pages are"
            files = ", ".join(self.odd[:3])
            parts.append(f"{len(self.odd):,} {pages} not UTF-8, and decoded as browsers do: {files}")
        return f"{source}: {'; '.join(parts)}" if parts else ""


def in_words(kind: str, documents: int, size: int, text: int) -> str:
    name = {"html": "HTML", "xml": "XML", "markdown": "Markdown", "pdf": "PDF"}.get(kind, kind)
    files = f"{documents:,} {name} document{'s' * (documents != 1)}"
    if kind in BINARY.values():
        return f"text of {files} ({size_in_words(text)})"
    return f"text of {files} ({max(0.0, 1 - text / max(1, size)):.0%} of {size_in_words(size)} is markup)"


def size_in_words(size: int) -> str:
    return f"{size:,} bytes" if size < 1e5 else f"{size / 1e6:,.1f} MB"
