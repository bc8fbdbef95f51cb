"""Read documents from files, folders, globs, datasets, standard input, pipes and corpora by name.

Sources are read in pieces, so a source may be larger than memory. Imports nothing heavy.
"""

import glob
import hashlib
import os
import shutil
import stat
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from onward.base.errors import UserError
from onward.base.files import atomic_write, file_sha256
from onward.data import corpora
from onward.data.extraction.extract import HEAD_BYTES, Extraction, kind_of, repeated_lines
from onward.data.formats import (
    READABLE,
    SIZES,
    PieceSizes,
    SourcePiece,
    decompressed,
    is_blank_file,
    one_line,
    read,
    read_file,
    reading,
    split,
    suffixes,
    table_pieces,
)
from onward.data.progress import Progress, silent
from onward.data.reading import READING, Reading

if TYPE_CHECKING:
    from datasets import Dataset

# a folder with two of these files is a run or contains tokens
OUTPUTS = {"run.json", "inputs.json", "data.json", "tokenizer.json"}
BATCH_ROWS = 64  # number of rows of a dataset per read
COPY_BYTES = 1 << 20  # number of bytes of a stream per read
HUB = "hf://"
# minimum and maximum number of files of a source that are searched for repeated lines
LEAST_FILES, MOST_COMPARED = 3, 1000


@dataclass(frozen=True)
class StoredStream:
    """A stream, which can be read only once, and the file in which it is stored."""

    source: str
    path: Path
    sha256: str

    def __str__(self) -> str:
        return self.source


Source = str | StoredStream


def documents(
    sources: Sequence[Source],
    *,
    field: str = "text",
    encoding: str = "utf-8",
    raw: bool = False,
    repeated_lines: float = READING.repeated_lines,
    sizes: PieceSizes = SIZES,
) -> Iterator[str]:
    """Yield the documents of all sources, in order: one per text file or stream, and one per row of a table (its column
    `field`).

    A source is a file, a folder (its files of known formats, recursively, sorted by name, without hidden ones), a glob,
    `-` for standard input, a named pipe, the name of a corpus (see `onward data list`), or `hf://` followed by the
    arguments of `datasets.load_dataset`, such as `hf://user/name?name=config&split=train`. Files are text, .jsonl or
    .parquet, each also as .gz, .bz2, .xz or .zst, in upper or lower case.

    The text of HTML, XML, Markdown, PDF, Word documents, books (.epub) and notebooks is extracted; with `raw`, text
    formats among these are read unchanged. A line that occurs in at least the share `repeated_lines` of such files of a
    source, and in at least three, is left out, unless it is code or a heading. A warning reports how much was left out.

    Raises a UserError if a source is missing, empty, binary, an archive, or not in the encoding, and if all documents
    of a source are empty.
    """
    parts: list[str] = []
    for piece, text in texts(sources, Reading(field, encoding, raw, repeated_lines), sizes):
        parts.append(text)
        if piece.ends:
            yield "".join(parts)
            parts.clear()


def passages(sources: Sequence[Source], reading_as: Reading = READING, size: int = 1 << 16) -> Iterator[str]:
    """Yield all documents of `sources` in passages of at most `size` characters, to train a tokenizer on."""
    for _, text in texts(sources, reading_as, SIZES):
        yield from split(text, size)


def texts(sources: Sequence[Source], reading_as: Reading, sizes: PieceSizes) -> Iterator[tuple[SourcePiece, str]]:
    """Yield (piece, text) for each document, or part of a large document; raise a UserError if all documents of a
    source are empty."""
    check_sources(sources, reading_as)
    for source in sources:
        blank, found = True, Extraction()
        for piece in pieces(source, reading_as, sizes):
            for text in piece.documents(reading_as.field, found):
                blank = blank and is_blank(text)
                yield piece, text
        if blank:
            raise UserError(no_text(source, found))
        say_extracted(source, found)


def check_sources(sources: Sequence[Source], reading_as: Reading) -> None:
    """Raise a UserError if no source is named, or if `reading_as` names a field and no source can have fields."""
    if not sources:
        raise UserError("no text is named: give files, folders, globs, - or the name of a corpus")
    if reading_as.field != READING.field and all(map(is_plain_text, sources)):
        raise UserError(
            f"field is {reading_as.field!r}, but {sources[0]} has no fields: name a .jsonl or .parquet file, or leave "
            "out field"
        )


def is_plain_text(source: Source) -> bool:
    if not isinstance(source, str) or not os.path.isfile(source):
        return source in corpora.BUILT_IN
    return not has_records(source)


def has_records(name: str) -> bool:
    return suffixes(name)[0] in (".jsonl", ".parquet")


def is_blank(text: str) -> bool:
    return not text or text.isspace()


def no_text(source: Source, found: Extraction) -> str:
    scanned = " (the pages of a scanned .pdf are images, which need OCR first)" if "pdf" in found.kinds else ""
    return f"{stream_name(source)} has no text, because all its documents are empty{scanned}: name another source"


class ExtractedText(UserWarning):
    """Reports the formats from which text was extracted, and the number of lines left out."""


def say_extracted(source: Source, found: Extraction) -> None:
    if sentence := found.sentence(stream_name(source)):
        warnings.warn(sentence, ExtractedText, stacklevel=1)


def download_corpora(sources: Sequence[Source], progress: Progress) -> None:
    for source in sources:
        if isinstance(source, str) and source in corpora.DOWNLOADS and not os.path.exists(source):
            corpora.get(source, progress=progress)


def pieces(source: Source, reading_as: Reading, sizes: PieceSizes = SIZES) -> Iterator[SourcePiece]:
    """Yield the pieces of a source, in order."""
    if isinstance(source, StoredStream):
        yield from read_file(source.path, stream_name(source), reading_as, sizes)
    elif source in corpora.BUILT_IN:
        yield SourcePiece(source, records=corpora.BUILT_IN[source].collect().documents)
    elif source == "-":
        with reading(name := stream_name(source)):
            yield from read(name, sys.stdin.buffer, reading_as, sizes)
    elif source.startswith(HUB):
        data = dataset(source)
        rows = data.with_format("arrow").iter(BATCH_ROWS)
        yield from table_pieces(source, data.features.arrow_schema, rows, len(data), data.data.nbytes, reading_as)
    else:
        files = source_files(source)
        repeated = frozenset[int]()
        if reading_as.repeated_lines and len(files) >= LEAST_FILES:
            listing = tuple((path, stat.st_size, stat.st_mtime_ns) for path in files for stat in [path.stat()])
            repeated = repeated_in(listing, reading_as)
        for path in files:
            yield from read_file(path, str(path), reading_as, sizes, repeated)


@lru_cache(maxsize=8)
def repeated_in(listing: tuple[tuple[Path, int, int], ...], reading_as: Reading) -> frozenset[int]:
    """The keys of lines that repeat over the files whose text is extracted; at most 1,000 of these files, evenly
    spaced, are read. The sizes and times in `listing` are part of the cache key."""
    files = [path for path, *_ in listing if is_markup(path, reading_as.raw)]
    sample = (
        [files[i * len(files) // MOST_COMPARED] for i in range(MOST_COMPARED)] if len(files) > MOST_COMPARED else files
    )
    pieces = (piece for path in sample for piece in read_file(path, str(path), reading_as, SIZES))
    texts = (text for piece in pieces for text in piece.documents(reading_as.field))
    return repeated_lines(texts, reading_as.repeated_lines) if len(files) >= LEAST_FILES else frozenset()


def is_markup(path: Path, raw: bool) -> bool:
    suffix, compression = suffixes(path.name)
    if is_pipe(str(path)) or suffix == ".parquet":
        return False
    with reading(str(path)), open(path, "rb") as file:
        head = decompressed(path.name, file).read(HEAD_BYTES) if compression else file.read(HEAD_BYTES)
    return bool(kind_of(suffix, head, raw))


def is_stream(source: Source) -> bool:
    return isinstance(source, StoredStream) or source == "-" or is_pipe(source)


def is_pipe(source: str) -> bool:
    """Whether a source is a named pipe, such as `mkfifo` and `<(...)` make. Never raises."""
    try:
        return stat.S_ISFIFO(os.stat(source).st_mode)
    except (OSError, ValueError):
        return False


def stream_name(source: Source) -> str:
    return "standard input" if str(source) == "-" else str(source)


@contextmanager
def stored_streams(sources: Sequence[Source], folder: Path, progress: Progress = silent) -> Iterator[list[Source]]:
    """Yield the sources, with each stream stored as a file in the new folder `folder`, which is removed at the end."""
    try:
        yield [
            store(source, folder / str(number), progress) if isinstance(source, str) and is_stream(source) else source
            for number, source in enumerate(sources)
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def store(source: str, path: Path, progress: Progress, most: int | None = None) -> StoredStream:
    """Copy a stream of at most `most` bytes (by default half of the free space) to `path`."""
    name, done = stream_name(source), 0
    with atomic_write(path) as new, open(new, "wb") as file:
        # leave space for the tokens; some streams are endless
        most = shutil.disk_usage(new.parent).free // 2 if most is None else most
        for block in blocks(source):
            if not block.strip(b"\0"):  # not text in any encoding; /dev/zero is endless
                raise UserError(f"{name} is binary ({len(block):,} zero bytes at offset {done:,}): give it a text")
            done += len(block)
            if done > most:
                raise UserError(
                    f"Cannot store {name} while it is read, because it is longer than {most:,} bytes, half of the "
                    f"free space of {path.parent.parent}: shorten the stream (head -c), or free some space"
                )
            file.write(block)
            progress(f"reading {name}", done, 0)
    return StoredStream(source, path, file_sha256(path))


def blocks(source: str) -> Iterator[bytes]:
    with reading(stream_name(source)):
        if source == "-":
            yield from iter(lambda: sys.stdin.buffer.read(COPY_BYTES), b"")
        else:
            with open(source, "rb") as file:
                yield from iter(lambda: file.read(COPY_BYTES), b"")


def provenance(source: Source) -> dict[str, Any]:
    """Name and size in bytes of a source, for data.json, with a checksum of its content, the fingerprint of a dataset,
    or a hash of the names, sizes and times of files."""
    if isinstance(source, StoredStream):
        return {"name": source.source, "size": source.path.stat().st_size, "sha256": source.sha256}
    if source in corpora.BUILT_IN:
        corpus = corpora.BUILT_IN[source].collect()
        return {"name": source, "version": corpus.version, "size": 0, "sha256": corpus.sha256}
    if source.startswith(HUB):
        data = dataset(source)
        return {"name": source, "size": data.data.nbytes, "fingerprint": data._fingerprint}
    with reading(source):
        stats = [(path, path.stat()) for path in source_files(source)]
    listing = "".join(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n" for path, stat in stats)
    digest = hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()
    return {"name": source, "files": len(stats), "size": sum(stat.st_size for _, stat in stats), "listing": digest}


def source_files(source: str) -> list[Path]:
    """The files of a source: a file, a folder, a glob, or a corpus, which is downloaded if it is missing."""
    path = Path(source)
    if os.path.isdir(path):
        files, _ = folder_files(path)
        if not files:
            raise UserError(f"{source} contains no text files: name a folder that does, or the files themselves")
        return files
    if os.path.isfile(path) or is_pipe(source):
        return [path]
    if os.path.exists(path):  # unlike Path.exists, never raises an exception
        raise UserError(f"{source} is neither a file nor a pipe: name one, or - for standard input")
    if matches := sorted(Path(p) for p in glob.glob(source, recursive=True) if Path(p).is_file()):
        return matches
    if source in corpora.DOWNLOADS:
        return [corpora.get(source)]
    if "://" in source:
        raise UserError(f"{source} is an address: download the text into a file, and name that")
    raise UserError(f"{source} does not exist: name a file, a folder, a glob, - or a corpus ({corpora.NAMES})")


def folder_files(folder: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    """Return the readable files of a folder, recursively and sorted, and the skipped files by reason."""
    files: list[Path] = []
    skipped: dict[str, list[Path]] = defaultdict(list)
    with reading(str(folder)):
        for parent, folders, names in os.walk(folder, onerror=raise_error):
            here, inside = Path(parent), set(folders)
            folders.clear()
            if here != folder and len(OUTPUTS.intersection(names)) > 1:
                skipped["folders of runs or tokens"].append(here)
                continue
            for path in (here / name for name in [*inside, *names]):
                if reason := skip_reason(path):
                    skipped[reason].append(path)
                elif path.name in inside:
                    folders.append(path.name)
                else:
                    files.append(path)
    return sorted(files), skipped


def raise_error(error: OSError) -> None:
    # os.walk ignores errors by default
    raise error


def skip_reason(path: Path) -> str:
    if path.name.startswith("."):
        return "hidden"
    if path.name.endswith(".unfinished"):
        return "folders of runs or tokens"
    if path.is_dir():
        return "links to folders" if path.is_symlink() else ""
    if not path.is_file():
        return "neither files nor folders"
    kind, compression = suffixes(path.name)
    if kind not in READABLE:
        return kind + compression
    return "empty" if is_blank_file(path) else ""


@lru_cache(maxsize=8)
def dataset(source: str) -> "Dataset":
    """Load the dataset `hf://NAME?split=...`, memory-mapped; options are those of `datasets.load_dataset`, with
    `split=train` as the default."""
    try:
        from datasets import Dataset, load_dataset
    except ImportError:
        raise UserError(f"Cannot read {source} without datasets: pip install 'onward[data]'") from None
    name, _, options = source.removeprefix(HUB).partition("?")
    try:
        loaded = load_dataset(name, **{"split": "train"} | dict(parse_qsl(options)))
    except Exception as error:  # the library raises many types
        raise UserError(f"{source} cannot be loaded ({one_line(error)}): name a dataset, or ?split=... of it") from None
    if not isinstance(loaded, Dataset):
        raise UserError(f"{source} is more than one table: name one with ?split=...")
    return loaded
