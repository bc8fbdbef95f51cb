"""Extract the text of XML: a line for each element with its own text, titles as headings, and code in fences."""

import re
from html.entities import html5
from xml.parsers import expat

from onward.base.errors import UserError
from onward.data.extraction.html import html_text

CODE = frozenset(["programlisting", "screen", "literallayout", "pre", "listing", "codeblock", "sourcecode"])
TITLES = frozenset(("title", "head", "heading"))
OF_XML = frozenset(("amp", "lt", "gt", "quot", "apos"))
MARKUP = re.compile(r"</[a-zA-Z]\w*>")  # HTML inside a text, as in feeds
PAGE = re.compile(r"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*(<!doctype html[^>]*>\s*)?<html[\s>]", re.I | re.S)


class Document:
    """Collects the lines of a document. An element within a text, such as emphasis, does not end the line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.parts: list[str] = []  # texts of the current line
        self.open: list[tuple[str, bool]] = []  # (name of a title or of code, whether its start tag ended a line)
        self.code = 0  # number of open code elements

    def start(self, name: str, attributes: dict[str, str]) -> None:
        short = name.rpartition(":")[2].lower()
        inline = bool("".join(self.parts).strip()) or bool(self.code)
        if not inline or short in CODE:
            self.end_line()
        is_code = short in CODE or attributes.get("xml:space") == "preserve"
        self.code += is_code
        self.open.append((short if is_code or short in TITLES else "", not inline or is_code))

    def end(self, name: str) -> None:
        kind, begins = self.open[-1]
        is_code = kind in CODE or (kind and kind not in TITLES)
        if begins or kind:
            self.end_line(kind if kind in TITLES else "", bool(is_code))
        self.code -= bool(is_code)
        self.open.pop()

    def end_line(self, kind: str = "", is_code: bool = False) -> None:
        text = "".join(self.parts)
        self.parts.clear()
        if not text.strip():
            return
        if is_code or self.code:
            text = "```\n" + text.strip("\n").rstrip() + "\n```"
        elif MARKUP.search(text):
            text = html_text(text)
        else:
            text = " ".join(text.split())
        self.lines.append(f"{'#' * max(1, min(6, len(self.open) - 1))} {text}" if kind else text)


def xml_text(source: str, name: str) -> str:
    """The text of the document `name`. Raises a UserError if it is not well-formed."""
    if PAGE.match(source):
        return html_text(source)
    source = re.sub(r"^\s*<\?xml[^>]*\?>", "", source)  # the declared encoding does not apply to a str
    document, parser = Document(), expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = document.start, document.end
    parser.CharacterDataHandler = document.parts.append
    parser.buffer_text = True
    try:
        parser.Parse(re.sub(r"&(\w+);", named, source), True)
    except expat.ExpatError as error:
        raise UserError(
            f"{name} is not well-formed XML ({error}): correct it, or read it as it is with --raw"
        ) from None
    return "\n\n".join(document.lines)


def named(match: re.Match[str]) -> str:
    """The character of an HTML entity that XML does not define."""
    return match[0] if match[1] in OF_XML else html5.get(f"{match[1]};", match[0])
