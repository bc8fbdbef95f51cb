"""The text of PDF files, without lines that repeat at the top or bottom of pages."""

import io
import logging
import re
from collections import Counter

from onward.base.errors import UserError

EDGE = 2  # number of lines at the top and bottom of a page that may be running titles or page numbers
LEAST = 3  # minimum number of pages with a running line


def pdf_text(content: bytes, name: str) -> str:
    """The text of the file `name`; "" if its pages are only images. Raises a UserError if the file is damaged or needs
    a password."""
    try:
        import pypdf
    except ImportError:
        raise UserError(f"Cannot read {name} without pypdf: pip install 'onward[data]'") from None
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # pypdf logs every repair of a damaged file
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UserError(f"{name} is encrypted: name a copy without a password")
        pages = [page.extract_text() for page in reader.pages]
    except UserError:
        raise
    except Exception as error:  # damaged files raise errors of many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{name} is damaged or not a .pdf file ({reason:.200}): copy or download it again") from None
    text = "\n\n".join(filter(None, without_running_lines(pages)))
    return re.sub(r"(?<=[a-z])-\n(?=[a-z])", "", text)


def without_running_lines(pages: list[str]) -> list[str]:
    """The pages without running titles and page numbers: lines at the edges that are equal on many pages except for
    digits."""
    split = [[line.rstrip() for line in page.strip().splitlines()] for page in pages]
    edges = Counter(key for lines in split for key in {shape(line) for line in [*lines[:EDGE], *lines[-EDGE:]]})
    running = {key for key, count in edges.items() if count >= max(LEAST, 0.3 * len(pages))}
    kept = []
    for lines in split:
        first = next((i for i, line in enumerate(lines[:EDGE]) if shape(line) not in running), min(EDGE, len(lines)))
        lines = lines[first:]
        last = next((i for i, line in enumerate(lines[-EDGE:][::-1]) if shape(line) not in running), EDGE)
        kept.append("\n".join(lines[: len(lines) - last] if last else lines))
    return kept


def shape(line: str) -> str:
    return re.sub(r"\d+", "0", " ".join(line.split()))
