"""Extract the text of Markdown, without front matter, HTML, comments and link targets. Headings, lists, emphasis and
code stay unchanged."""

import re

FRONT = re.compile(r"\A(---|\+\+\+)[ \t]*\n.*?\n\1[ \t]*(\n|\Z)", re.S)
FENCE = re.compile(r"^\s*(?:[-*+>]\s+|\d+\.\s+)?(`{3,}|~{3,})")
COMMENT = re.compile(r"<!--.*?-->", re.S)
TAG = re.compile(
    r"</?(?:a|abbr|b|blockquote|br|caption|center|cite|code|col|colgroup|dd|del|details|div|dl|dt|em|figcaption|figure|font"
    r"|h[1-6]|hr|i|iframe|img|ins|kbd|li|mark|ol|p|picture|pre|q|s|samp|small|source|span|strong|sub|summary|sup|table"
    r"|tbody|td|tfoot|th|thead|tr|u|ul|var|video)(?:\s[^<>]*)?/?>",
    re.I,
)
IMAGE = re.compile(r"!\[([^\[\]]*)\](?:\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s+[\"'][^\"']*[\"'])?\)|\[[^\[\]]*\])")
LINK = re.compile(r"\[([^\[\]]*)\](?:\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s+[\"'][^\"']*[\"'])?\)|\[[^\[\]]*\])")
DEFINITION = re.compile(r"^ {0,3}\[(?!\^)[^\[\]]+\]:\s*\S+.*$", re.M)
SPAN = re.compile(r"(`+)(?:(?!\1|\n\n).)+?\1", re.S)  # inline code


def markdown_text(source: str) -> str:
    parts, fence, prose = list[str](), "", list[str]()
    for line in FRONT.sub("", source).splitlines(keepends=True):
        mark = FENCE.match(line)
        if fence:
            parts.append(line)
            if mark and mark[1].startswith(fence) and not line.strip().strip("`~"):
                fence = ""
        elif mark or re.match(r" {4}|\t", line):
            parts += [without_markup("".join(prose)), line]
            prose.clear()
            fence = mark[1] if mark else ""
        else:
            prose.append(line)
    return re.sub(r"\n{3,}", "\n\n", "".join([*parts, without_markup("".join(prose))])).strip()


def without_markup(text: str) -> str:
    """Remove the markup from text outside of code blocks."""
    text = DEFINITION.sub("", COMMENT.sub("", text))
    parts, start = list[str](), 0
    for span in SPAN.finditer(text):
        parts += [plain(text[start : span.start()]), span[0]]
        start = span.end()
    return "".join([*parts, plain(text[start:])])


def plain(text: str) -> str:
    # images first, because a link may contain an image
    return TAG.sub("", LINK.sub(r"\1", IMAGE.sub(r"\1", text)))
