"""Documents from files, folders, globs, .jsonl, .gz, standard input and corpora by name. Imports nothing heavy."""

import glob
import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from onward.data import corpora
from onward.errors import UserError
from onward.text.tokenizer import SURROGATE, UNKNOWN

TEXT = {".txt", ".md", ".rst", ".text", ".jsonl", ".py", ".tex", ".html", ".xml", ".csv", ".json", ".org", ""}


def documents(sources: Sequence[str], *, field: str = "text", encoding: str = "utf-8") -> Iterator[str]:
    """The documents of all sources, in order: one per text file, and one per line of a .jsonl (its `field`).

    A source is a file, a folder (its text files, recursively, in order of their names), a glob, any of them .gz, `-`
    for standard input, or the name of a corpus (`embedded`, `tinyshakespeare`). A UserError tells of one that is
    missing, empty, binary or not in the encoding.
    """
    if not sources:
        raise UserError("no text is named: give files, folders, globs, - or the name of a corpus")
    for source in sources:
        if source == "embedded":
            yield from corpora.embedded().documents
        elif source == "-":
            yield from read("standard input", sys.stdin.buffer.read(), field, encoding)
        else:
            for path in paths(source):
                yield from read(str(path), content(path), field, encoding)


def provenance(source: str) -> dict[str, str]:
    """What to keep on record of a source: its name and, of the built-in corpus, which it is."""
    if source != "embedded":
        return {"name": source}
    corpus = corpora.embedded()
    return {"name": source, "version": corpus.version, "sha256": corpus.sha256}


def paths(source: str) -> list[Path]:
    """The files that a source means."""
    path = Path(source)
    if os.path.isdir(path):
        inside = (p.relative_to(path) for p in path.rglob("*"))
        names = [p for p in inside if not any(part.startswith(".") for part in p.parts)]
        found = sorted(path / p for p in names if Path(str(p).removesuffix(".gz")).suffix.lower() in TEXT)
        found = [p for p in found if p.is_file() and p.stat().st_size]
        if not found:
            raise UserError(f"{source} holds no text files: name one that does, or the files themselves")
        return found
    if os.path.exists(path):  # unlike Path.exists, never raises
        return [path]
    if matches := sorted(Path(p) for p in glob.glob(source, recursive=True) if Path(p).is_file()):
        return matches
    if source in corpora.KNOWN:
        return [corpora.get(source)]
    raise UserError(f"{source} does not exist: name a file, a folder, a glob, - or a corpus ({corpora.NAMES})")


def content(path: Path) -> bytes:
    """The bytes of a file, unpacked if it is a .gz."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return file.read()
        return path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is cut off or not a .gz file ({error}): copy or download it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def read(name: str, data: bytes, field: str, encoding: str) -> Iterator[str]:
    """The documents in the bytes of one file."""
    if b"\0" in data and not encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32")):
        raise UserError(
            f"{name} is binary (a zero byte at offset {data.index(0)}): name text files, or give --encoding utf-16"
        )
    try:
        text = data.decode(encoding)
    except LookupError:
        raise UserError(f"--encoding {encoding} is unknown: try utf-8, latin-1 or cp1252") from None
    except UnicodeError as error:
        at = getattr(error, "start", 0)
        line = data[:at].count(b"\n") + 1
        raise UserError(
            f"{name} is not {encoding} at byte offset {at} (line {line}): give its --encoding, such as latin-1"
        ) from None
    if not text.strip():
        raise UserError(f"{name} is empty: name a file with text")
    text = text.removeprefix("\ufeff")
    if name.lower().removesuffix(".gz").endswith(".jsonl"):
        yield from (
            record(name, number, line, field) for number, line in enumerate(text.split("\n"), 1) if line.strip()
        )
    else:
        yield SURROGATE.sub(UNKNOWN, text.replace("\r\n", "\n"))


def record(name: str, number: int, line: str, field: str) -> str:
    """The text in one line of a .jsonl file."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} line {number} is not JSON ({error}): mend or remove the line") from None
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        there = ", ".join(map(ascii, value)) if isinstance(value, dict) else type(value).__name__
        raise UserError(f"{name} line {number} has no text under {field!r} (it has {there}): name it with --field")
    return SURROGATE.sub(UNKNOWN, value[field])
