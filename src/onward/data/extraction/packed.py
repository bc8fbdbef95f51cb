"""The text of notebooks (.ipynb), of Word documents (.docx) and of books (.epub)."""

import io
import json
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterator
from urllib.parse import unquote
from xml.etree import ElementTree

from onward.base.errors import UserError
from onward.data.extraction.html import html_text
from onward.data.extraction.markdown import markdown_text

WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
MOST_UNPACKED = 1 << 28  # maximum number of bytes of an unpacked file in a document


def notebook_text(source: str, name: str) -> str:
    """The cells of a notebook, code in fences, without outputs."""
    try:
        notebook = json.loads(source)
        language = notebook.get("metadata", {}).get("kernelspec", {}).get("language", "python")
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{name} is not a notebook of version 4: convert it, or read it with --raw") from None
    texts = [f"```{language}\n{text}\n```" if kind == "code" else markdown_text(text) for kind, text in cells if text]
    return "\n\n".join(text for text in texts if text.strip())


def word_text(content: bytes, name: str) -> str:
    """The paragraphs of a Word document, titles as headings, and the rows of its tables."""
    with archive(content, name) as files:
        root = ElementTree.fromstring(member(files, "word/document.xml"))
    return "\n\n".join(filter(None, blocks(root.find(f"{WORD}body"))))


def blocks(parent: ElementTree.Element | None) -> Iterator[str]:
    for child in () if parent is None else parent:
        if child.tag == f"{WORD}p":
            yield paragraph(child)
        elif child.tag == f"{WORD}tbl":
            rows = (
                [" ".join(filter(None, blocks(cell))) for cell in row.iter(f"{WORD}tc")]
                for row in child.iter(f"{WORD}tr")
            )
            yield "\n".join(" | ".join(row) for row in rows)
        elif child.tag in (f"{WORD}sdt", f"{WORD}sdtContent"):
            yield from blocks(child)


def paragraph(element: ElementTree.Element) -> str:
    text = ""
    for part in element.iter():
        if part.tag == f"{WORD}t":
            text += part.text or ""
        elif part.tag in (f"{WORD}tab", f"{WORD}br"):
            text += "\t" if part.tag.endswith("tab") else "\n"
    style = element.find(f"{WORD}pPr/{WORD}pStyle")
    heading = re.fullmatch(r"(?i)heading ?(\d)|(title)", "" if style is None else style.get(f"{WORD}val", ""))
    if heading and text.strip():
        return f"{'#' * min(6, int(heading[1] or 1))} {text.strip()}"
    listed = element.find(f"{WORD}pPr/{WORD}numPr") is not None
    return f"- {text.strip()}" if listed and text.strip() else text.strip()


def book_text(content: bytes, name: str) -> str:
    """The chapters of a book, in order."""
    with archive(content, name) as files:
        container = ElementTree.fromstring(member(files, "META-INF/container.xml"))
        index = next(one.get("full-path", "") for one in container.iter() if one.tag.endswith("}rootfile"))
        package = ElementTree.fromstring(member(files, index))
        items = {one.get("id"): one.get("href", "") for one in package.iter() if one.tag.endswith("}item")}
        order = [items[one.get("idref")] for one in package.iter() if one.tag.endswith("}itemref")]
        paths = [posixpath.normpath(posixpath.join(posixpath.dirname(index), unquote(one))) for one in order]
        texts = [html_text(member(files, path).decode("utf-8-sig", "replace")) for path in paths]
    return "\n\n".join(filter(None, texts))


class archive:
    """Read files from the archive of the document `name`; a missing or damaged file raises a UserError."""

    def __init__(self, content: bytes, name: str) -> None:
        self.content, self.name = content, name

    def __enter__(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(io.BytesIO(self.content))
        except (zipfile.BadZipFile, OSError) as error:
            raise self.refusal(error) from None

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        known = KeyError, StopIteration, ElementTree.ParseError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError
        if isinstance(error, (*known, NotImplementedError)):
            raise self.refusal(error) from None

    def refusal(self, error: BaseException) -> UserError:
        kind = self.name.rpartition(".")[2]
        return UserError(f"{self.name} is damaged or not a .{kind} file ({error}): copy or download it again")


def member(files: zipfile.ZipFile, path: str) -> bytes:
    with files.open(path) as file:
        content = file.read(MOST_UNPACKED + 1)
    if len(content) > MOST_UNPACKED:
        raise UserError(f"{path} in a document has more than {MOST_UNPACKED:,} bytes: leave the document out")
    return content
