"""The text of HTML, XML, Markdown, PDF and other documents, and the parts that are left out."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pypdf
import pytest

from onward import UserError
from onward.data import documents
from onward.data.prepare import prepare
from onward.data.reading import Reading
from onward.data.sources import ExtractedText

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
PAGE = """<!DOCTYPE html><html><head><title>Site</title><script>var x = "</p>";</script></head><body>
<nav><ul><li>Home<li>News</ul></nav>{before}<h1>Run<a class="headerlink" href="#">¶</a> <button>Copy</button></h1>
<p>Call <code>run()</code> &amp; <b>wait</b>.<p>Then:
<ol><li>one<li><p>two</p><ul><li>nested</ul><li>three</ol>
<div class="highlight-python"><pre><span>def</span> f(x):
    return x &lt; 1
</pre></div><table><tr><th>A<th>B<tr><td>1<td>2</table>{after}<footer>Imprint</footer>"""
TEXT = """# Run

Call `run()` & wait.

Then:

1. one
2. two
  - nested
3. three

```python
def f(x):
    return x < 1
```

A | B
1 | 2"""
BOOK = """<?xml version="1.0" encoding="utf-8"?><book><title>Birds</title><chapter><title>Owls</title><para>They
<em>see</em>&nbsp;well.</para><programlisting>a &lt; b
  c</programlisting><note>&lt;p&gt;Old &lt;b&gt;news&lt;/b&gt;&lt;/p&gt;</note></chapter></book>"""
NOTES = """---
title: x
---
# Owls
<!-- draft -->
See [the page](http://a.b/c_(d)) and ![an owl](i.png), `<b>` and List<T>.<br/>

```html
<p>kept</p>
```

[ref]: http://a.b
"""
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["# A\n", "b"]},
        {"cell_type": "code", "source": "c", "outputs": ["d"]},
    ]
}
WORD = f"""<w:document {W}><w:body><w:p><w:pPr><w:pStyle w:val="Heading2"/></w:pPr><w:r><w:t>Owls</w:t></w:r></w:p><w:p>
<w:r><w:t>They </w:t></w:r><w:r><w:t>see.</w:t></w:r></w:p><w:tbl><w:tr><w:tc><w:p><w:r><w:t>a</w:t></w:r></w:p></w:tc>
<w:tc><w:p><w:r><w:t>b</w:t></w:r></w:p></w:tc></w:tr></w:tbl></w:body></w:document>"""
DOCX = {"word/document.xml": WORD}
EPUB = {
    "META-INF/container.xml": '<c xmlns="u"><rootfiles><rootfile full-path="O/c.opf"/></rootfiles></c>',
    "O/c.opf": '<p xmlns="u"><manifest><item id="b" href="b.xhtml"/><item id="a" href="a.xhtml"/></manifest>'
    '<spine><itemref idref="a"/><itemref idref="b"/></spine></p>',
    "O/a.xhtml": "<html><body><h1>One</h1></body></html>",
    "O/b.xhtml": "<html><body><p>Two</p></body></html>",
}


def zipped(path: Path, files: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def content(text: str, encoding: str = "utf-8") -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text.encode(encoding))


CASES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a page": ("a.html", content(PAGE.format(before="", after="")), TEXT),
    "the content that a page marks": (
        "a.htm",
        content(PAGE.format(before='<div class="x">Menu</div><div role="main">', after="</div><p>Ads</p>")),
        TEXT,
    ),
    "a page that is cut in a tag": ("a.html", content("<html><body><p>One <b>two</b><div cla"), "One two"),
    "a page without body, in a file without suffix": ("page", content("\ufeff<!doctype html><p>One"), "One"),
    "a title in place of a heading": ("a.xhtml", content("<html><title>T</title><p>One</html>"), "# T\n\nOne"),
    "the encoding of a page": ("a.html", content('<meta charset="ISO-8859-1"><p>Größe', "latin-1"), "Größe"),
    "a byte order mark": ("a.html", content("<p>Größe", "utf-16"), "Größe"),
    "XML": ("a.xml", content(BOOK), "# Birds\n\n## Owls\n\nThey see well.\n\n```\na < b\n  c\n```\n\nOld news"),
    "XML in another encoding": ("a.xml", content('<?xml version="1.0" encoding="latin-1"?><a>ö</a>', "latin-1"), "ö"),
    "Markdown": (
        "a.md",
        content(NOTES),
        "# Owls\n\nSee the page and an owl, `<b>` and List<T>.\n\n```html\n<p>kept</p>\n```",
    ),
    "a notebook": ("a.ipynb", content(json.dumps(NOTEBOOK)), "# A\nb\n\n```python\nc\n```"),
    "a Word document": (
        "a.docx",
        lambda path: zipped(path, DOCX),
        "## Owls\n\nThey see.\n\na | b",
    ),
    "a book, in its order": ("a.epub", lambda path: zipped(path, EPUB), "# One\n\nTwo"),
    "a row with a page": ("a.jsonl", content('{"text": "<html><p>One</html>"}'), "One"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::onward.data.sources.ExtractedText")
def test_text_is_extracted_from(case: str, tmp_path: Path) -> None:
    name, write, text = CASES[case]
    write(tmp_path / name)
    assert list(documents([str(tmp_path / name)])) == [text]


def pdf(path: Path, *pages: str) -> None:
    """Write a PDF file with a line of text for each line of a page; an empty page has no text."""
    writer = pypdf.PdfWriter()
    font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    name = pypdf.generic.NameObject
    fonts = pypdf.generic.DictionaryObject({name(key): name(value) for key, value in font.items()})
    for text in pages:
        page = writer.add_blank_page(300, 300)
        stream = pypdf.generic.DecodedStreamObject()
        lines = "".join(f"({line}) Tj 0 -14 Td " for line in text.split("\n")) if text else ""
        stream.set_data(f"BT /F1 12 Tf 20 250 Td {lines}ET".encode())
        own = pypdf.generic.DictionaryObject({name("/F1"): writer._add_object(fonts)})
        page[name("/Resources")] = pypdf.generic.DictionaryObject({name("/Font"): own})
        page[name("/Contents")] = writer._add_object(stream)
    writer.write(path)


def test_pdf_is_read_without_running_titles_and_page_numbers(tmp_path: Path) -> None:
    pdf(tmp_path / "a.pdf", *(f"Annual report\nFact {name} of it\n{i}" for i, name in enumerate("abcd", 1)))
    with pytest.warns(ExtractedText, match="text of 1 PDF document"):
        (text,) = documents([str(tmp_path / "a.pdf")])
    assert text == "\n\n".join(f"Fact {name} of it" for name in "abcd")


def test_scanned_pdf_is_named(tmp_path: Path) -> None:
    pdf(tmp_path / "scan.pdf", "", "")
    with pytest.raises(UserError, match=r"scan\.pdf has no text, .* scanned"):
        list(documents([str(tmp_path / "scan.pdf")]))
    (tmp_path / "a.txt").write_text("text")
    with pytest.warns(ExtractedText, match=r"1 file has no text: .*scan\.pdf; a \.pdf of scanned pages needs OCR"):
        assert list(documents([str(tmp_path)])) == ["text", ""]


REFUSED: dict[str, tuple[str, bytes, str]] = {
    "a damaged .pdf": ("a.pdf", b"%PDF-1.4 no", "is damaged or not a .pdf file"),
    "a damaged .docx": ("a.docx", b"PK no", "is damaged or not a .docx file"),
    "broken XML": ("a.xml", b"<a><b></a>", r"is not well-formed XML \(mismatched tag: line 1, column 8\)"),
    "a file that is not a notebook": ("a.ipynb", b"{}", "is not a notebook"),
    "an older format": ("a.doc", b"\xd0\xcf", "is a .doc document, which Onward cannot read: convert it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_documents_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, data, message = REFUSED[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"{name} {message}"):
        list(documents([str(tmp_path / name)]))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Four pages with the same menu and imprint, neither marked by an HTML element."""
    (tmp_path / "site/deep").mkdir(parents=True)
    for i in range(4):
        lines = f"<div>Home | News</div><h2>Parameters</h2><p>Fact {i}<pre>same()</pre><div>Imprint</div>"
        (tmp_path / "site" / ("deep" if i else ".") / f"{i}.html").write_text(f"<html><body>{lines}</body></html>")
    return tmp_path / "site"


def text_of(number: int) -> str:
    return f"## Parameters\n\nFact {number}\n\n```\nsame()\n```"


@pytest.mark.parametrize(
    ("content", "read"),
    [
        (b"<p>caf\xe9 \x93au lait\x94</p>", "caf\xe9 \u201cau lait\u201d"),
        (b"<p>a \x81 b</p>", "a \ufffd b"),
        ("<p>caf\xe9 \xe0 la cr\xe8me ".encode() + b"\xe9</p>", "caf\xe9 \xe0 la cr\xe8me \ufffd"),
        (b'<meta charset="utf-8"><p>caf\xe9</p>', "caf\xe9"),
    ],
)
def test_pages_of_no_encoding_are_read_as_in_browsers(content: bytes, read: str, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_bytes(content)
    with pytest.warns(ExtractedText, match=r"1 page is not UTF-8, and decoded as browsers do: \S*a\.html"):
        assert [text.strip() for text in documents([str(tmp_path)])] == [read]


def test_lines_repeated_over_documents_are_left_out_but_for_code_and_headings(site: Path) -> None:
    with pytest.warns(ExtractedText, match=r"% of \d+ bytes is markup.*without 8 lines that repeat"):
        assert list(documents([str(site)])) == [text_of(i) for i in range(4)]
    whole = [f"Home | News\n\n{text_of(i)}\n\nImprint" for i in range(4)]
    with pytest.warns(ExtractedText):
        assert list(documents([str(site)], repeated_lines=0)) == whole
    assert "".join(documents([str(site)], raw=True)).count("<div>") == 8


def test_prepared_tokens_are_of_the_extracted_text(site: Path, tmp_path: Path) -> None:
    with pytest.warns(ExtractedText, match="text of 4 HTML documents"):
        data = prepare([str(site)], "byte", tmp_path / "out")
    assert data.index.report.bytes == sum(len(text_of(i)) for i in range(4))
    with pytest.raises(UserError, match=r"other sources or settings \(raw differ\)"):
        prepare([str(site)], "byte", tmp_path / "out", reading=Reading(raw=True))
