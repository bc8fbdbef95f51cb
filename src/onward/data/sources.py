"""Documents from files, folders, globs, .jsonl, .gz, .parquet, datasets, standard input and corpora by name.

Sources are read in pieces, so that none has to fit into memory. Imports nothing heavy.
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
from onward.data.progress import Progress
from onward.errors import UserError
from onward.text.tokenizer import SURROGATE, UNKNOWN

if TYPE_CHECKING:
    from datasets import Dataset
    from pyarrow import Schema

TEXT = {".txt", ".md", ".rst", ".text", ".jsonl", ".py", ".tex", ".html", ".xml", ".csv", ".json", ".org", ""}
OUTPUTS = "run.json", "inputs.json", "data.json"  # beside tokenizer.json: a folder of a run, or of prepared tokens
BATCH_ROWS = 64  # rows of a table that are read at a time
HUB = "hf://"
# Where a text may be split, best first. Tokens never cross a break of the first kind: see Tokenizer.pieces.
BREAKS = [re.compile(p) for p in (r"(?<=\S)\r?\n(?=\S)", r"\n", r"\s")]
SEARCH_CHARS = 1 << 12, 1 << 20  # characters before the end of a passage that are searched for a break, in this order


@dataclass(frozen=True)
class Sizes:
    """How much of a source is handled at a time."""

    piece_chars: int = 1 << 24  # characters of a piece, approximately
    block_bytes: int = 1 << 20  # bytes read from a file at a time
    serial_bytes: int = 1 << 22  # sources smaller than this are encoded before worker processes would have started


SIZES = Sizes()


@dataclass(frozen=True)
class Piece:
    """Some documents of a source, or a part of a document that is larger than `Sizes.piece_chars`."""

    name: str  # the file, for messages
    text: bytes = b""  # the content of a text file, or a part of it: UTF-8, which takes less memory than str
    records: Sequence[str] = ()  # the documents of a table, instead of `text`
    size: int = 0  # bytes on disk
    line: int = 0  # the number of the first line, in a .jsonl; 0 elsewhere
    begins: bool = True  # whether the first document begins in this piece
    ends: bool = True  # whether the last document ends in this piece

    def __len__(self) -> int:
        return len(self.text) + sum(map(len, self.records))

    def documents(self, field: str) -> Iterator[str]:
        """The texts of the documents; in a .jsonl, the `field` of each line."""
        if self.line:
            lines = enumerate(io.BytesIO(self.text), self.line)
            yield from (
                record_text(self.name, number, as_text(line.rstrip(b"\r\n")), field)
                for number, line in lines
                if line.strip()
            )
        elif self.records:
            yield from self.records
        else:
            yield SURROGATE.sub(UNKNOWN, as_text(self.text).replace("\r\n", "\n"))


def as_text(utf8: bytes) -> str:
    return utf8.decode("utf-8", "surrogatepass")


def documents(
    sources: Sequence[str], *, field: str = "text", encoding: str = "utf-8", sizes: Sizes = SIZES
) -> Iterator[str]:
    """The documents of all sources, in order: one per text file, and one per row of a table (its column `field`).

    A source is a file, a folder (its files, recursively, sorted by name), a glob, `-` for standard input, the name of a
    corpus (`embedded`, `tinyshakespeare`), or `hf://` followed by the arguments of `datasets.load_dataset`, such as
    `hf://user/name?name=config&split=train`. Files are text or .jsonl, both also as .gz, or .parquet.

    Raises UserError if a source is missing, empty, binary, or not in the encoding.
    """
    parts: list[str] = []
    for piece in pieces(sources, field, encoding, sizes):
        for text in piece.documents(field):
            parts.append(text)
            if piece.ends:
                yield "".join(parts)
                parts.clear()


def passages(
    sources: Sequence[str], *, field: str = "text", encoding: str = "utf-8", size: int = 1 << 16
) -> Iterator[str]:
    """All documents in passages of at most `size` characters, from which a tokenizer can be learned."""
    for piece in pieces(sources, field, encoding):
        for text in piece.documents(field):
            yield from split(text, size)


def split(text: str, size: int) -> Iterator[str]:
    """A text in passages of at most `size` characters, which end at the end of a line where possible."""
    start = 0
    while len(text) - start > size:
        end = last_break(text, start, start + size)
        yield text[start:end]
        start = end
    yield text[start:]


def last_break(text: str, start: int, end: int) -> int:
    """The index of the last break of the best kind in [start, end); `end` if there is none."""
    for pattern, reach in product(BREAKS, SEARCH_CHARS):
        if breaks := [match.end() for match in pattern.finditer(text, max(start, end - reach), end)]:
            return breaks[-1]
    return end


def download_corpora(sources: Sequence[str], progress: Progress) -> None:
    """Download the corpora that are named among the sources, so that reading them later needs no progress bar."""
    for source in sources:
        if source in corpora.DOWNLOADS and not os.path.exists(source):
            corpora.get(source, progress=progress)


def pieces(sources: Sequence[str], field: str, encoding: str, sizes: Sizes = SIZES) -> Iterator[Piece]:
    """The pieces of all sources, in order. The lines of a .jsonl are not parsed yet."""
    if not sources:
        raise UserError("no text is named: give files, folders, globs, - or the name of a corpus")
    for source in sources:
        if source == "embedded":
            yield Piece(source, records=corpora.embedded().documents)
        elif source == "-":
            yield from read("standard input", sys.stdin.buffer, encoding, sizes)
        elif source.startswith(HUB):
            data = dataset(source)
            rows = data.with_format("arrow").iter(BATCH_ROWS)
            yield from table_pieces(source, data.features.arrow_schema, rows, len(data), data.data.nbytes, field)
        else:
            for path in source_files(source):
                yield from read_file(path, field, encoding, sizes)


def provenance(source: str) -> dict[str, Any]:
    """The name of a source, its size in bytes, and a hash that changes when the source changes."""
    if source == "-":
        return {"name": source, "size": 0}
    if source == "embedded":
        corpus = corpora.embedded()
        return {"name": source, "version": corpus.version, "size": 0, "sha256": corpus.sha256}
    if source.startswith(HUB):
        data = dataset(source)
        return {"name": source, "size": data.data.nbytes, "fingerprint": data._fingerprint}
    stats = [(path, path.stat()) for path in source_files(source)]
    listing = "".join(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n" for path, stat in stats)
    digest = hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()
    return {"name": source, "files": len(stats), "size": sum(stat.st_size for _, stat in stats), "listing": digest}


def output_folders(files: Iterable[Path]) -> set[Path]:
    """The folders of runs and of prepared tokens among the parents of relative paths, without the root."""
    names: dict[Path, set[str]] = {}
    for file in files:
        if file.name in OUTPUTS or file.name == "tokenizer.json":
            names.setdefault(file.parent, set()).add(file.name)
    return {folder for folder, known in names.items() if len(known) > 1 and folder != Path()}


def source_files(source: str) -> list[Path]:
    """The files of a path, a folder, a glob, or the name of a corpus to download.

    Hidden files in a folder are skipped, and so are folders of runs and of prepared tokens inside it.
    """
    path = Path(source)
    if os.path.isdir(path):
        inside = [p.relative_to(path) for p in path.rglob("*")]
        outputs = output_folders(inside)
        hidden = lambda p: any(part.startswith(".") or part.endswith(".unfinished") for part in p.parts)
        names = [p for p in inside if not hidden(p) and outputs.isdisjoint(p.parents)]
        kinds = ((p, Path(str(p).lower().removesuffix(".gz")).suffix) for p in names)
        files = sorted(path / p for p, kind in kinds if kind in TEXT or kind == ".parquet")
        files = [p for p in files if p.is_file() and p.stat().st_size]
        if not files:
            raise UserError(f"{source} contains no text files: name a folder that does, or the files themselves")
        return files
    if os.path.exists(path):  # unlike Path.exists, it never raises
        return [path]
    if matches := sorted(Path(p) for p in glob.glob(source, recursive=True) if Path(p).is_file()):
        return matches
    if source in corpora.DOWNLOADS:
        return [corpora.get(source)]
    if "://" in source:
        raise UserError(f"{source} is an address: download the text into a file, and name that")
    raise UserError(f"{source} does not exist: name a file, a folder, a glob, - or a corpus ({corpora.NAMES})")


def read_file(path: Path, field: str, encoding: str, sizes: Sizes) -> Iterator[Piece]:
    """The pieces of one file."""
    try:
        with open(path, "rb") as file:
            if path.suffix.lower() == ".parquet":
                yield from parquet_pieces(str(path), file, field)
            else:
                yield from read(str(path), file, encoding, sizes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is truncated or not a .gz file ({error}): copy or download it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def read(name: str, file: BinaryIO, encoding: str, sizes: Sizes = SIZES) -> Iterator[Piece]:
    """The pieces of a text or a .jsonl, decompressed if the name ends in .gz."""
    stream = gzip.GzipFile(fileobj=file) if name.lower().endswith(".gz") else file
    lines = name.lower().removesuffix(".gz").endswith(".jsonl")
    parts: list[bytes] = []
    size, held, blank, line, begins, offset = 0, "", True, 1, True, 0
    for block, last in decode_blocks(name, stream, encoding, sizes.block_bytes):
        blank = blank and (not block or block.isspace())
        if last and blank:
            raise UserError(f"{name} is empty: name a file with text")
        text, size, end = held + block, size + len(block), 0
        if size >= sizes.piece_chars and not last:
            end = text.rfind("\n") + 1 if lines else last_break(text, 0, len(text))
            end -= text.endswith("\r", 0, end)  # keep \r\n together
        text, held = (text[:end], text[end:]) if end else (text, "")
        parts.append(text.encode("utf-8", "surrogatepass"))
        if end or last:
            content = b"".join(parts)
            before, offset = offset, file.tell() if file.seekable() else 0
            place = {"line": line} if lines else {"begins": begins, "ends": last}
            yield Piece(name, content, size=offset - before, **place)
            parts, size, line, begins = [], len(held), line + content.count(b"\n"), False


def decode_blocks(name: str, stream: Any, encoding: str, block_bytes: int) -> Iterator[tuple[str, bool]]:
    """The text of a stream, `block_bytes` bytes at a time; each with whether it is the last."""
    try:
        with suppress(UnicodeError):
            b" ".decode(encoding)  # raises LookupError for codecs such as base64, which the next call accepts
        decoder = codecs.getincrementaldecoder(encoding)()
    except (LookupError, ValueError):
        raise UserError(f"--encoding {encoding} is unknown: try utf-8, latin-1 or cp1252") from None
    wide = codecs.lookup(encoding).name.startswith(("utf-16", "utf-32"))
    offset, lines, last, first = 0, 1, False, True
    while not last:
        block = stream.read(block_bytes)
        last = len(block) < block_bytes
        if b"\0" in block and not wide:
            raise UserError(
                f"{name} is binary (a zero byte at offset {offset + block.index(0)}): name text files, or give "
                "--encoding utf-16"
            )
        left = decoder.getstate()[0]  # the first bytes of a character that the last block has split
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


def record_text(name: str, number: int, line: str, field: str) -> str:
    """The text of one line of a .jsonl file."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} line {number} is not JSON ({error}): correct or remove the line") from None
    if isinstance(value, dict) and field in value and not isinstance(value[field], str):
        kind = type(value[field]).__name__
        raise UserError(f"{name} line {number} holds {kind}, not text, under {field!r}: name another --field")
    if not isinstance(value, dict) or field not in value:
        keys = ", ".join(map(ascii, value)) if isinstance(value, dict) else type(value).__name__
        raise UserError(f"{name} line {number} has no text under {field!r} (it has {keys}): name it with --field")
    return SURROGATE.sub(UNKNOWN, value[field])


def parquet_pieces(name: str, file: BinaryIO, field: str) -> Iterator[Piece]:
    """The pieces of a .parquet file."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{name} is read with pyarrow, which is missing: pip install 'onward[data]'") from None
    try:
        opened = ParquetFile(file, buffer_size=1 << 20)  # without a buffer, a whole row group is read into memory
        rows, size = opened.metadata.num_rows, os.fstat(file.fileno()).st_size
        batches = opened.iter_batches(BATCH_ROWS, columns=[field])
        yield from table_pieces(name, opened.schema_arrow, batches, rows, size, field)
    except pyarrow.ArrowException as error:
        raise UserError(f"{name} cannot be read as .parquet ({one_line(error)}): copy or download it again") from None


def table_pieces(
    name: str, schema: "Schema", batches: Iterable[Any], rows: int, size: int, field: str
) -> Iterator[Piece]:
    """The pieces of a table of `rows` rows and `size` bytes. A row without a text is an empty document."""
    if field not in schema.names or str(schema.field(field).type) not in ("string", "large_string", "string_view"):
        columns = ", ".join(map(ascii, schema.names))
        raise UserError(f"{name} has no text under {field!r} (it has {columns}): name it with --field")
    if not rows:
        raise UserError(f"{name} is empty: name a table with rows")
    for batch in batches:
        if texts := [text or "" for text in batch[field].to_pylist()]:
            yield Piece(name, records=texts, size=size * len(texts) // rows)


@lru_cache(maxsize=8)
def dataset(source: str) -> "Dataset":
    """The memory-mapped dataset of `hf://NAME?split=...`; the options are those of `datasets.load_dataset`."""
    try:
        from datasets import Dataset, load_dataset
    except ImportError:
        raise UserError(f"{source} is read with datasets, which is missing: pip install 'onward[data]'") from None
    name, _, options = source.removeprefix(HUB).partition("?")
    try:
        loaded = load_dataset(name, **{"split": "train"} | dict(parse_qsl(options)))
    except Exception as error:  # the library raises many types
        raise UserError(f"{source} cannot be loaded ({one_line(error)}): name a dataset, or ?split=... of it") from None
    if not isinstance(loaded, Dataset):
        raise UserError(f"{source} is more than one table: name one with ?split=...")
    return loaded


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
