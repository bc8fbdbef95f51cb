"""The text of HTML in Markdown's notation: headings, lists, tables as rows, and code in fences.

Navigation, scripts and hidden elements are left out. If the page marks its content (`main`, `role="main"`, or an
`article` with more text than the rest), only this content is read; otherwise headers, footers and asides are left out.
Malformed pages are read, too.
"""

import re
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import NamedTuple


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


VOID = words("area base br col embed hr img input link meta param source track wbr")
INLINE = words(
    "a abbr acronym b bdi bdo big cite code data del dfn em font i ins kbd label mark math nobr output q rp rt ruby s "
    "samp small span strike strong sub sup time tt u var mi mn mo mrow msub msup"
)
NEVER = words(
    "script style template noscript svg canvas iframe object applet audio video nav menu button select datalist "
    "textarea dialog head title"
)
AROUND = words("header footer aside")  # left out unless inside the page's content
CODE = words("pre listing xmp")
CLOSED_BY_NEXT = words("p li dt dd tr td th option")
ROLES = {"navigation": "nav", "search": "nav", "banner": "header", "contentinfo": "footer", "main": "main"}
HIDDEN = re.compile(r"\b(headerlink|anchorjs-link|linenos?|line-numbers?|skip-?link|sr-only|visually-hidden)\b")
INVISIBLE = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden")
LANGUAGE = re.compile(
    r"\b(?:language|lang|highlight(?:-source)?|brush:)[-\s]?(?!default|text|none|notranslate)(\w[\w+#]*)"
)
CUT = re.compile(r"<[a-zA-Z/!][^<>]*\Z")  # a tag without its closing >
ANCHORS = " ¶#§🔗"  # characters of links from a heading to itself


class Element(NamedTuple):
    """An open element, with the properties that it inherits from its ancestors."""

    tag: str = ""
    hidden: bool = False  # whether its text is left out
    content: str = ""  # "main" or "article" if it is one or is inside one
    code: bool = False  # whether white space is kept
    depth: int = 0  # number of open lists
    ordered: bool = False  # whether the list is numbered
    language: str = ""  # language of its code


class Block(NamedTuple):
    text: str
    gap: str  # separator from the previous block
    content: str  # `Element.content` of its element


class Page(HTMLParser):
    """Collects the blocks of text of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element()]
        self.blocks: list[Block] = []
        self.parts: list[str] = []  # texts of the current block
        self.prefix, self.gap = "", "\n\n"
        self.title: list[str] = []
        self.items = [0]  # number of the last item of each open list

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            if tag == "br" and self.open[-1].code:
                self.parts.append("\n")
            elif tag in ("br", "hr"):
                self.end_block("\n" if tag == "br" else "\n\n")
            return
        if (last := self.open[-1].tag) in CLOSED_BY_NEXT and (last == tag or (last == "p" and tag not in INLINE)):
            self.handle_endtag(last)
        outer, own = self.open[-1], {name: value or "" for name, value in attrs}
        kind = ROLES.get(own.get("role", ""), tag)
        classes = own.get("class", "")
        if outer.hidden or is_hidden(kind, own) or (kind in AROUND and not outer.content):
            self.open.append(outer._replace(tag=tag, hidden=True))
            return
        if tag not in INLINE and tag not in ("td", "th"):
            self.end_block("\n" if tag in ("tr", "dd") else "\n\n")
        found = LANGUAGE.search(classes) if classes else None
        is_list = tag in ("ul", "ol")
        element = Element(
            tag,
            content=outer.content or (kind if kind in ("main", "article") else ""),
            code=outer.code or tag in CODE,
            depth=outer.depth + is_list,
            ordered=tag == "ol" if is_list else outer.ordered,
            language=found[1].lower() if found else outer.language,
        )
        if is_list:
            self.items.append(0)
        elif tag == "li":
            self.items[-1] += 1
            self.prefix = "  " * (outer.depth - 1) + (f"{self.items[-1]}. " if outer.ordered else "- ")
            self.gap = "\n" if self.items[-1] > 1 or outer.depth > 1 else "\n\n"
        elif tag in ("td", "th") and "".join(self.parts).strip():
            self.parts.append(" | ")
        elif tag == "code" and not element.code:
            self.parts.append("`")
        self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        at = next((i for i in range(len(self.open) - 1, 0, -1) if self.open[i].tag == tag), 0)
        if not at:
            return
        if not self.open[at].hidden:
            if tag not in INLINE and tag not in ("td", "th"):
                self.finish_block(tag)
            elif tag == "code" and not self.open[at].code:
                self.parts.append("`")
            for element in self.open[at:]:
                if element.tag in ("ul", "ol") and not element.hidden:
                    self.items.pop()
                    self.prefix = ""
        del self.open[at:]

    def handle_data(self, data: str) -> None:
        here = self.open[-1]
        if here.tag == "title" and here.hidden and not self.blocks:
            self.title.append(data)
        elif not here.hidden:
            self.parts.append(data)

    def finish_block(self, tag: str) -> None:
        here = self.open[-1]
        if tag in CODE:
            code = "".join(self.parts).replace("\xa0", " ").strip("\n").rstrip()
            self.parts.clear()
            if code.strip():
                fence = "```" if "```" not in code else "~~~~"
                self.add(f"{fence}{here.language}\n{code}\n{fence}")
            return
        if re.fullmatch("h[1-6]", tag):
            text = " ".join("".join(self.parts).split()).strip(ANCHORS)
            self.parts.clear()
            if text:
                self.add(f"{'#' * int(tag[1])} {text}")
            return
        self.end_block("\n" if tag in ("tr", "li", "dt") else "\n\n")

    def end_block(self, gap: str) -> None:
        """End the current block; `gap` separates it from the next block."""
        if self.open[-1].code:
            return
        text = " ".join("".join(self.parts).split())
        self.parts.clear()
        if text.strip("` |"):
            self.add(text)
            self.gap = gap
        elif gap == "\n\n" and not self.prefix:
            self.gap = gap

    def add(self, text: str) -> None:
        self.blocks.append(Block(self.prefix + text, self.gap, self.open[-1].content))
        self.prefix, self.gap = "", "\n\n"


def is_hidden(kind: str, attributes: Mapping[str, str]) -> bool:
    classes, style = attributes.get("class", ""), attributes.get("style", "")
    named = kind in NEVER or "hidden" in attributes or attributes.get("aria-hidden") == "true"
    return named or bool((classes and HIDDEN.search(classes)) or (style and INVISIBLE.search(style)))


def html_text(source: str) -> str:
    """The text of a page or of a part of one."""
    page = Page()
    page.feed(CUT.sub("", source))
    page.close()
    page.end_block("\n\n")
    size = {name: sum(len(b.text) for b in page.blocks if b.content == name) for name in ("main", "article", "")}
    kept = page.blocks
    if size["main"]:
        kept = [block for block in kept if block.content == "main"]
    elif size["article"] > size[""]:
        kept = [block for block in kept if block.content == "article"]
    title = " ".join("".join(page.title).split())
    head = f"# {title}" if title and kept and not any(block.text.startswith("#") for block in kept) else ""
    return (head + "".join(block.gap + block.text for block in kept)).strip()
