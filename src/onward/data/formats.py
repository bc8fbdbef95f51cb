"""Read a file, possibly compressed, in pieces: a text, a .jsonl, a .parquet, or a document to extract text from."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from onward.base.errors import UserError
from onward.data.columns import value_at
from onward.data.extraction.extract import (
    BEGINNINGS,
    BINARY,
    HEAD_BYTES,
    KINDS,
    Extraction,
    declared_encoding,
    extracted,
    kind_of,
    page_source,
    without_lines,
)
from onward.data.reading import Reading
from onward.text.tokenizer import SURROGATE, UNKNOWN

if TYPE_CHECKING:
    from pyarrow import Schema

TEXT = {".txt", ".md", ".rst", ".text", ".jsonl", ".py", ".tex", ".html", ".xml", ".csv", ".json", ".org", ""}
READABLE = TEXT | KINDS.keys() | {".parquet"}  # suffixes of the files that are read in a folder
MOST_MARKUP = 1 << 28  # maximum number of bytes of a file whose text is extracted, because it is read whole
COMPRESSED = ".gz", ".bz2", ".xz", ".zst"
ARCHIVES = ".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz", ".tzst"
OTHER_DOCUMENTS = ".doc", ".odt", ".rtf", ".pptx", ".ppt", ".xlsx", ".xls", ".mobi", ".azw3", ".djvu", ".chm"
STRINGS = "string", "large_string", "string_view"  # names of pyarrow's string types
BATCH_ROWS, BATCH_BYTES = 64, 1 << 24  # maximum number of table rows, and approximate bytes, per read
# Where a text may be split, best first. Tokens never cross a break of the first kind: see Tokenizer.pieces.
BREAKS = [re.compile(p) for p in (r"(?<=\S)\r?\n(?=\S)", r"\n", r"\s")]
# How many characters before the end of a passage are searched for a break, tried in this order.
SEARCH_CHARS = 1 << 8, 1 << 12, 1 << 20


@dataclass(frozen=True)
class PieceSizes:
    """The sizes of the pieces in which sources are read."""

    piece_chars: int = 1 << 24  # approximate number of characters in a piece
    block_bytes: int = 1 << 20  # number of bytes read from a file at a time
    line_chars: int = 1 << 26  # maximum number of characters in a .jsonl line, which is read whole
    serial_bytes: int = 1 << 22  # encode smaller sources in this process, because starting workers takes longer


SIZES = PieceSizes()


@dataclass(frozen=True)
class SourcePiece:
    """Some documents of a source, or a part of a document larger than `PieceSizes.piece_chars`."""

    name: str  # the file, for messages
    text: bytes = b""  # content of a text file, or a part of it; UTF-8 bytes take less memory than str
    records: Sequence[str] = ()  # the documents of a table, instead of `text`
    size: int = 0  # size on disk in bytes
    line: int = 0  # number of the first line, in a .jsonl; otherwise 0
    begins: bool = True  # whether the first document begins in this piece
    ends: bool = True  # whether the last document ends in this piece
    kind: str = ""  # kind of markup from which `text` is extracted; see `kind_of`
    odd: bool = False  # whether it is a page of HTML with bytes that are not UTF-8
    repeated: frozenset[int] = frozenset()  # keys of the lines to leave out of the extracted text
    raw: bool = False  # whether to keep texts that are HTML pages unchanged

    def __len__(self) -> int:
        return len(self.text) + sum(map(len, self.records))

    def documents(self, field: str, found: Extraction | None = None) -> Iterator[str]:
        """Texts of the documents in the piece; in a .jsonl, the `field` of each line. Counts of the documents with
        extracted text are added to `found`."""
        found = Extraction() if found is None else found
        if self.kind:
            text, lines = without_lines(extracted(self.kind, self.text, self.name), self.repeated)
            found.add(self.kind, self.name, len(self.text), text, lines, self.odd)
            yield SURROGATE.sub(UNKNOWN, text)
        elif self.line:
            lines_of = enumerate(io.BytesIO(self.text), self.line)
            yield from (
                self.of_record(record_text(self.name, number, as_text(line.rstrip(b"\r\n")), field), found)
                for number, line in lines_of
                if line.strip()
            )
        elif self.records:
            yield from (self.of_record(text, found) for text in self.records)
        else:
            yield SURROGATE.sub(UNKNOWN, as_text(self.text).replace("\r\n", "\n"))

    def of_record(self, text: str, found: Extraction) -> str:
        """The text of a row; if the row is an HTML page, its extracted text."""
        if (
            self.raw
            or "<" not in text[:64]
            or not BEGINNINGS["html"].match(text[:HEAD_BYTES].encode("utf-8", "replace"))
        ):
            return text
        content = text.encode("utf-8", "surrogatepass")
        plain = extracted("html", content, self.name)
        found.add("html", self.name, len(content), plain, 0)
        return plain


def as_text(utf8: bytes) -> str:
    return utf8.decode("utf-8", "surrogatepass")


def split(text: str, size: int) -> Iterator[str]:
    """Passages of at most `size` characters that end at a line break or between words if possible."""
    start = 0
    while len(text) - start > size:
        end = last_break(text, start, start + size)
        yield text[start:end]
        start = end
    yield text[start:]


def last_break(text: str, start: int, end: int) -> int:
    """Index after the last break in [start, end), preferably at a line end near `end`; `end` if there is no break."""
    for pattern, reach in product(BREAKS, SEARCH_CHARS):
        if breaks := [match.end() for match in pattern.finditer(text, max(start, end - reach), end)]:
            return breaks[-1]
    return end


def suffixes(name: str) -> tuple[str, str]:
    """Lower-case suffixes of content and compression: (".txt", ".gz") for A.TXT.GZ; "" for none."""
    lower = name.lower()
    compression = next((suffix for suffix in COMPRESSED if lower.endswith(suffix)), "")
    return PurePath(lower.removesuffix(compression)).suffix, compression


def read_file(
    path: Path, name: str, reading_as: Reading, sizes: PieceSizes, repeated: frozenset[int] = frozenset()
) -> Iterator[SourcePiece]:
    """Yield the pieces of a file, whose format `name` determines; `repeated` contains the keys of the lines to leave
    out of extracted text."""
    content, _ = suffixes(name)
    if content in ARCHIVES:
        raise UserError(f"{name} is an archive: unpack it, and name its files or their folder")
    if content in OTHER_DOCUMENTS:
        raise UserError(f"{name} is a {content} document, which Onward cannot read: convert it to .docx, .pdf or text")
    with reading(name), open(path, "rb") as file:
        if content == ".parquet":
            with seekable(name, file) as table:
                yield from parquet_pieces(name, table, reading_as)
        else:
            yield from read(name, file, reading_as, sizes, repeated)


@contextmanager
def seekable(name: str, file: BinaryIO) -> Iterator[IO[bytes]]:
    """Yield `file` itself or, if it is a pipe or compressed, a temporary file with its content."""
    if file.seekable() and not suffixes(name)[1]:
        yield file
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(decompressed(name, file), copy)
        copy.seek(0)
        yield copy


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn errors of reading into UserErrors that name the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(f"{name} cannot be read: {error.strerror or error}") from None
        content, compression = suffixes(name)
        kind = compression or content or "text"
        raise UserError(
            f"{name} is truncated or not a {kind} file ({one_line(error)}): copy or download it again"
        ) from None


def decompressed(name: str, file: BinaryIO) -> BinaryIO:
    stream: Any = file
    match suffixes(name)[1]:
        case ".gz":
            stream = gzip.GzipFile(fileobj=file)
        case ".bz2":
            stream = bz2.BZ2File(file)
        case ".xz":
            stream = lzma.LZMAFile(file)  # noqa: SIM115
        case ".zst":
            stream = pyarrow(name).CompressedInputStream(file, "zstd")
    return stream


class Peeked:
    """A binary stream that has already read its first bytes, as `head`."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.head = stream, stream.read(HEAD_BYTES)

    def read(self, size: int) -> bytes:
        first, self.head = self.head[:size], self.head[size:]
        return first + self.stream.read(size - len(first))


def read(
    name: str, file: BinaryIO, reading_as: Reading, sizes: PieceSizes = SIZES, repeated: frozenset[int] = frozenset()
) -> Iterator[SourcePiece]:
    """Yield the pieces of a text or .jsonl file, decompressed according to its `name`; a file whose text is extracted
    is one piece."""
    suffix, encoding = suffixes(name)[0], reading_as.encoding
    lines, stream = suffix == ".jsonl", Peeked(decompressed(name, file))
    if kind := kind_of(suffix, stream.head, reading_as.raw):
        yield marked_up(name, kind, stream, encoding, repeated)
        return
    parts: list[bytes] = []
    size, rest, blank, line, begins, offset = 0, "", True, 1, True, 0
    for block, last in decode_blocks(name, stream, encoding, sizes.block_bytes):
        blank = blank and (not block or block.isspace())
        if last and blank:
            raise UserError(f"{name} is empty: name a file with text")
        text, size, end = rest + block, size + len(block), 0
        if size >= sizes.piece_chars and not last:
            end = text.rfind("\n") + 1 if lines else last_break(text, 0, len(text))
            end -= text.endswith("\r", 0, end)  # keep \r\n together
        if lines and not end and size > sizes.piece_chars + sizes.line_chars:
            line += sum(part.count(b"\n") for part in parts)
            raise UserError(
                f"{name} line {line} has more than {sizes.line_chars:,} characters: split its text over several lines"
            )
        text, rest = (text[:end], text[end:]) if end else (text, "")
        parts.append(text.encode("utf-8", "surrogatepass"))
        if end or last:
            content = b"".join(parts)
            before, offset = offset, file.tell() if file.seekable() else 0
            bounds = {"line": line} if lines else {"begins": begins, "ends": last}
            yield SourcePiece(name, content, size=offset - before, **bounds, raw=reading_as.raw)
            parts, size, line, begins = [], len(rest), line + content.count(b"\n"), False


def marked_up(name: str, kind: str, stream: Peeked, encoding: str, repeated: frozenset[int]) -> SourcePiece:
    """Return a file whose text is extracted, as one piece; its content is converted to UTF-8 unless it is binary."""
    content = stream.read(MOST_MARKUP + 1)
    if len(content) > MOST_MARKUP:
        raise UserError(
            f"{name} has more than {MOST_MARKUP:,} bytes, which are read whole to extract the text: split the file, or "
            "read it as it is with --raw"
        )
    size, odd = len(content), False
    if kind not in BINARY.values():
        if not content.strip(b"\xef\xbb\xbf \t\r\n"):
            raise UserError(f"{name} is empty: name a file with text")
        encoding = declared_encoding(content, encoding) if kind in ("html", "xml") else encoding
        if kind == "html" and encoding == "utf-8":
            text, odd = page_source(content)
        else:
            blocks = decode_blocks(name, io.BytesIO(content), encoding, SIZES.block_bytes)
            text = "".join(text for text, _ in blocks)
        content = text.encode("utf-8", "surrogatepass")
    return SourcePiece(name, content, size=size, kind=kind, odd=odd, repeated=repeated)


def is_blank_file(path: Path) -> bool:
    """Whether a file contains only white space; False if it cannot be read."""
    try:
        with open(path, "rb") as file:
            stream = decompressed(path.name, file)
            while block := stream.read(SIZES.block_bytes):
                text = block.decode(errors="replace").removeprefix("\ufeff")
                if text and not text.isspace():
                    return False
    except (OSError, EOFError, zlib.error, lzma.LZMAError, UserError):  # the reader reports the error later
        return False
    return True


class NotText(UserError):
    """Raised for bytes that are not text in an encoding: `what` names file and position, `advice` the remedy."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}: {advice}")
        self.what = what


def decode_blocks(name: str, stream: BinaryIO | Peeked, encoding: str, block_bytes: int) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it is the last one) for blocks of `block_bytes` bytes."""
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
            what = f"{name} is binary (a zero byte at offset {offset + block.index(0)})"
            raise NotText(what, "name text files, or give --encoding utf-16")
        left = decoder.getstate()[0]  # first bytes of a character that the previous block split
        try:
            text = decoder.decode(block, last)
        except UnicodeError as error:
            at = getattr(error, "start", 0)
            line = lines + (left + block)[:at].count(b"\n")
            what = f"{name} is not {encoding} at byte offset {offset - len(left) + at} (line {line})"
            raise NotText(what, "give its --encoding, such as latin-1") from None
        yield text.removeprefix("\ufeff") if first else text, last
        offset, lines, first = offset + len(block), lines + block.count(b"\n"), False


def record_text(name: str, number: int, line: str, field: str) -> str:
    """The text under `field`, perhaps a path such as data.text, in a line of a .jsonl; "" for null."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} line {number} is not JSON ({error}): correct or remove the line") from None
    try:
        text = value_at(value if isinstance(value, dict) else {}, field)
    except KeyError:
        keys = ", ".join(map(ascii, value)) if isinstance(value, dict) else type(value).__name__
        raise UserError(
            f"{name} line {number} has no text under {field!r} (it has {keys}): name it with --field"
        ) from None
    if not isinstance(text, str | None):
        raise UserError(
            f"{name} line {number} holds {type(text).__name__}, not text, under {field!r}: name another --field"
        )
    return SURROGATE.sub(UNKNOWN, text or "")


def pyarrow(name: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"Cannot read {name} without pyarrow: pip install 'onward[data]'") from None
    return pyarrow


def parquet_pieces(name: str, file: IO[bytes], reading_as: Reading) -> Iterator[SourcePiece]:
    arrow, field = pyarrow(name), reading_as.field
    try:
        opened = arrow.parquet.ParquetFile(file, buffer_size=1 << 20)  # without a buffer, row groups are read whole
        rows, size = opened.metadata.num_rows, os.fstat(file.fileno()).st_size
        groups = map(opened.metadata.row_group, range(opened.num_row_groups))
        row_bytes = sum(group.total_byte_size for group in groups) // max(1, rows)
        batch = min(BATCH_ROWS, max(1, BATCH_BYTES // max(1, row_bytes)))
        batches = opened.iter_batches(batch, columns=[field])
        yield from table_pieces(name, opened.schema_arrow, batches, rows, size, reading_as)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{name} cannot be read as .parquet ({one_line(error)}): copy or download it again") from None


def table_pieces(
    name: str, schema: "Schema", batches: Iterable[Any], rows: int, size: int, reading_as: Reading
) -> Iterator[SourcePiece]:
    """Yield the pieces of a table of `rows` rows and `size` bytes; a row without a text is an empty document."""
    columns, field = ", ".join(map(ascii, schema.names)), reading_as.field
    name_in_table = field if field in schema.names else field.partition(".")[0]
    kind = type_at(schema, field)
    if kind is None or schema.names.count(name_in_table) != 1:
        count = "two columns" if kind is not None else "no column"
        raise UserError(f"{name} has {count} {field!r} (it has {columns}): name one with --field")
    if str(kind.value_type if str(kind).startswith("dictionary<") else kind) not in STRINGS:
        raise UserError(f"{name} holds {kind}, not text, under {field!r} (it has {columns}): name another --field")
    if not rows:
        raise UserError(f"{name} is empty: name a table with rows")
    for batch in batches:
        values = batch[name_in_table].to_pylist()
        if texts := [value_at({name_in_table: value}, field) or "" for value in values]:
            yield SourcePiece(name, records=texts, size=size * len(texts) // rows, raw=reading_as.raw)


def type_at(schema: Any, path: str) -> Any:
    """pyarrow's type of a column or, for a path, of a field within a column; None if it does not exist."""
    names = [field.name for field in schema] if hasattr(schema, "__iter__") else []
    if path in names:
        return schema.field(names.index(path)).type
    name, _, rest = path.partition(".")
    return type_at(schema.field(names.index(name)).type, rest) if name in names and rest else None


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
