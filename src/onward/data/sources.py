"""Documents from files, folders, globs, .jsonl, .gz, .parquet, datasets, standard input and corpora by name.

Read piece by piece, so that no source has to fit into memory. Imports nothing heavy.
"""

import codecs
import glob
import gzip
import hashlib
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qsl

from onward.data import corpora
from onward.errors import UserError
from onward.text.tokenizer import SURROGATE, UNKNOWN

if TYPE_CHECKING:
    from datasets import Dataset
    from pyarrow import Schema

TEXT = {".txt", ".md", ".rst", ".text", ".jsonl", ".py", ".tex", ".html", ".xml", ".csv", ".json", ".org", ""}
OUTPUTS = "run.json", "inputs.json", "data.json"  # beside tokenizer.json: a folder of a run, or of prepared tokens
PIECE = 1 << 24  # characters, about, that are handled together
BLOCK = 1 << 20  # bytes read from a file at a time
ROWS = 64  # read from a table at a time
HUB = "hf://"
CUTS = [re.compile(p) for p in (r"(?<=\S)\r?\n(?=\S)", r"\n", r"\s")]  # at the first, tokens end: see Tokenizer.pieces
REACH = 1 << 12, 1 << 20  # characters before the end of a passage in which a place to cut is looked for, one by one


@dataclass(frozen=True)
class Piece:
    """Some documents of a source, or a part of one that is larger than PIECE."""

    name: str  # of the file, for messages
    text: bytes = b""  # of a file or a part of it, UTF-8, which takes less room than str
    records: Sequence[str] = ()  # instead of it: documents of a table
    size: int = 0  # bytes on the disk that it stands for
    line: int = 0  # of a .jsonl: the number of its first line
    begins: bool = True  # whether the first document begins here
    ends: bool = True  # whether the last document ends here

    def __len__(self) -> int:
        return len(self.text) + sum(map(len, self.records))

    def documents(self, field: str) -> Iterator[str]:
        """The documents, those of a .jsonl from the `field` of each line."""
        if self.line:
            lines = enumerate(io.BytesIO(self.text), self.line)
            yield from (
                record(self.name, number, as_text(line.rstrip(b"\r\n")), field)
                for number, line in lines
                if line.strip()
            )
        elif self.records:
            yield from self.records
        else:
            yield SURROGATE.sub(UNKNOWN, as_text(self.text).replace("\r\n", "\n"))


def as_text(utf8: bytes) -> str:
    return utf8.decode("utf-8", "surrogatepass")


def documents(sources: Sequence[str], *, field: str = "text", encoding: str = "utf-8") -> Iterator[str]:
    """The documents of all sources, in order: one per text file, and one per record of tables (its `field`).

    A source is a file, a folder (its files, recursively, in order of their names), a glob, `-` for standard input, the
    name of a corpus (`embedded`, `tinyshakespeare`), or `hf://` and what `datasets.load_dataset` takes, such as
    `hf://user/name?name=config&split=train`. Files are text, .jsonl, either of them .gz, or .parquet. A UserError tells
    of one that is missing, empty, binary or not in the encoding.
    """
    parts: list[str] = []
    for piece in pieces(sources, field, encoding):
        for text in piece.documents(field):
            parts.append(text)
            if piece.ends:
                yield "".join(parts)
                parts.clear()


def passages(
    sources: Sequence[str], *, field: str = "text", encoding: str = "utf-8", size: int = 1 << 16
) -> Iterator[str]:
    """All texts in passages of at most `size` characters, to learn a tokenizer from: no document stands whole."""
    for piece in pieces(sources, field, encoding):
        for text in piece.documents(field):
            yield from cut(text, size)


def cut(text: str, size: int) -> Iterator[str]:
    """A text in passages of at most `size` characters that end, where that can be, with a line."""
    start = 0
    while len(text) - start > size:
        end = last_cut(text, start, start + size)
        yield text[start:end]
        start = end
    yield text[start:]


def last_cut(text: str, start: int, end: int) -> int:
    """The best place to cut before `end`, which is the last of its kind."""
    for pattern, reach in product(CUTS, REACH):
        if places := [match.end() for match in pattern.finditer(text, max(start, end - reach), end)]:
            return places[-1]
    return end


def pieces(sources: Sequence[str], field: str, encoding: str) -> Iterator[Piece]:
    """The pieces of all sources, in order, their records not looked into yet."""
    if not sources:
        raise UserError("no text is named: give files, folders, globs, - or the name of a corpus")
    for source in sources:
        if source == "embedded":
            yield Piece(source, records=corpora.embedded().documents)
        elif source == "-":
            yield from read("standard input", sys.stdin.buffer, encoding)
        elif source.startswith(HUB):
            data = dataset(source)
            rows = data.with_format("arrow").iter(ROWS)
            yield from table(source, data.features.arrow_schema, rows, len(data), data.data.nbytes, field)
        else:
            for path in paths(source):
                yield from read_file(path, field, encoding)


def provenance(source: str) -> dict[str, Any]:
    """What to keep on record of a source: its name, its size in bytes, and a hash that changes when it does."""
    if source == "-":
        return {"name": source, "size": 0}
    if source == "embedded":
        corpus = corpora.embedded()
        return {"name": source, "version": corpus.version, "size": 0, "sha256": corpus.sha256}
    if source.startswith(HUB):
        data = dataset(source)
        return {"name": source, "size": data.data.nbytes, "fingerprint": data._fingerprint}
    found = [(path, path.stat()) for path in paths(source)]
    listing = "".join(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n" for path, stat in found)
    digest = hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()
    return {"name": source, "files": len(found), "size": sum(stat.st_size for _, stat in found), "listing": digest}


def output_folders(files: Iterable[Path]) -> set[Path]:
    """The folders of runs and of prepared tokens among the parents of files, as relative paths, the root left out."""
    found: dict[Path, set[str]] = {}
    for file in files:
        if file.name in OUTPUTS or file.name == "tokenizer.json":
            found.setdefault(file.parent, set()).add(file.name)
    return {folder for folder, names in found.items() if len(names) > 1 and folder != Path()}


def paths(source: str) -> list[Path]:
    """The files of a source; of a folder without those in folders of runs and of prepared tokens below it."""
    path = Path(source)
    if os.path.isdir(path):
        inside = [p.relative_to(path) for p in path.rglob("*")]
        outputs = output_folders(inside)
        hidden = lambda p: any(part.startswith(".") or part.endswith(".unfinished") for part in p.parts)
        names = [p for p in inside if not hidden(p) and outputs.isdisjoint(p.parents)]
        kinds = ((p, Path(str(p).removesuffix(".gz")).suffix.lower()) for p in names)
        found = sorted(path / p for p, kind in kinds if kind in TEXT or kind == ".parquet")
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


def read_file(path: Path, field: str, encoding: str) -> Iterator[Piece]:
    """The pieces of one file."""
    try:
        with open(path, "rb") as file:
            if path.suffix == ".parquet":
                yield from parquet(str(path), file, field)
            else:
                yield from read(str(path), file, encoding)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is cut off or not a .gz file ({error}): copy or download it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def read(name: str, file: BinaryIO, encoding: str) -> Iterator[Piece]:
    """The pieces of a text or a .jsonl, unpacked if the name ends in .gz."""
    stream = gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file
    lines = name.lower().removesuffix(".gz").endswith(".jsonl")
    parts: list[bytes] = []
    size, held, blank, line, begins, place = 0, "", True, 1, True, 0
    for block, last in decoded(name, stream, encoding):
        blank = blank and (not block or block.isspace())
        if last and blank:
            raise UserError(f"{name} is empty: name a file with text")
        found, size, end = held + block, size + len(block), 0
        if size >= PIECE and not last:
            end = found.rfind("\n") + 1 if lines else last_cut(found, 0, len(found))
            end -= found.endswith("\r", 0, end)  # a line break is not cut
        found, held = (found[:end], found[end:]) if end else (found, "")
        parts.append(found.encode("utf-8", "surrogatepass"))
        if end or last:
            whole = b"".join(parts)
            before, place = place, file.tell() if file.seekable() else 0
            rest = {"line": line} if lines else {"begins": begins, "ends": last}
            yield Piece(name, whole, size=place - before, **rest)
            parts, size, line, begins = [], len(held), line + whole.count(b"\n"), False


def decoded(name: str, stream: Any, encoding: str) -> Iterator[tuple[str, bool]]:
    """The text of a stream, BLOCK bytes at a time, and whether it is the last of it."""
    try:
        with suppress(UnicodeError):
            b" ".decode(encoding)  # what does not make text of bytes is a LookupError here, but not below
        decoder = codecs.getincrementaldecoder(encoding)()
    except (LookupError, ValueError):
        raise UserError(f"--encoding {encoding} is unknown: try utf-8, latin-1 or cp1252") from None
    wide = encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32"))
    offset, lines, last, first = 0, 1, False, True
    while not last:
        block = stream.read(BLOCK)
        last = len(block) < BLOCK
        if b"\0" in block and not wide:
            raise UserError(
                f"{name} is binary (a zero byte at offset {offset + block.index(0)}): name text files, or give "
                "--encoding utf-16"
            )
        left = decoder.getstate()[0]  # bytes of a character that was not complete
        try:
            text = decoder.decode(block, last)
        except UnicodeError as error:
            at = getattr(error, "start", 0)
            line = lines + (left + block)[:at].count(b"\n")
            raise UserError(
                f"{name} is not {encoding} at byte offset {offset - len(left) + at} (line {line}): give its "
                "--encoding, such as latin-1"
            ) from None
        yield text.removeprefix("\ufeff") if first else text, last
        offset, lines, first = offset + len(block), lines + block.count(b"\n"), False


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


def parquet(name: str, file: BinaryIO, field: str) -> Iterator[Piece]:
    """The pieces of a .parquet file."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{name} is read with pyarrow, which is missing: pip install 'onward[data]'") from None
    try:
        opened = ParquetFile(file, buffer_size=1 << 20)  # so that a group of rows need not stand in memory whole
        rows, size = opened.metadata.num_rows, os.fstat(file.fileno()).st_size
        batches = opened.iter_batches(ROWS, columns=[field])
        yield from table(name, opened.schema_arrow, batches, rows, size, field)
    except pyarrow.ArrowException as error:
        raise UserError(f"{name} cannot be read as .parquet ({one_line(error)}): copy or download it again") from None


def table(name: str, schema: "Schema", batches: Iterable[Any], rows: int, size: int, field: str) -> Iterator[Piece]:
    """The pieces of a table of `rows` and `size`; what is missing in a row is an empty text."""
    if field not in schema.names or str(schema.field(field).type) not in ("string", "large_string", "string_view"):
        there = ", ".join(map(ascii, schema.names))
        raise UserError(f"{name} has no text under {field!r} (it has {there}): name it with --field")
    if not rows:
        raise UserError(f"{name} is empty: name a table with rows")
    for batch in batches:
        if texts := [text or "" for text in batch[field].to_pylist()]:
            yield Piece(name, records=texts, size=size * len(texts) // rows)


@lru_cache(maxsize=8)
def dataset(source: str) -> "Dataset":
    """What `hf://NAME?split=...` stands for, on disk and mapped; the options are those of `datasets.load_dataset`."""
    try:
        from datasets import Dataset, load_dataset
    except ImportError:
        raise UserError(f"{source} is read with datasets, which is missing: pip install 'onward[data]'") from None
    name, _, options = source.removeprefix(HUB).partition("?")
    try:
        found = load_dataset(name, **{"split": "train"} | dict(parse_qsl(options)))
    except Exception as error:  # of many kinds
        raise UserError(f"{source} cannot be loaded ({one_line(error)}): name a dataset, or ?split=... of it") from None
    if not isinstance(found, Dataset):
        raise UserError(f"{source} is not one table: name one ?split=...")
    return found


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
