"""Token ids on disk, as `onward data prepare` writes them and training reads them.

DIR/
  data.json               the index: sources, their shards with checksums, and a report
  tokenizer.json          the tokenizer of the token ids
  00000.bin, ...          token ids, uint16 or uint32; each document is followed by the end token, if there is one
  00000.ends, ...         uint64: for each document that ends in the shard, the index after its last token
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np

from onward.base import fields
from onward.base.arguments import Range, checked, explained, shown
from onward.base.errors import UserError
from onward.base.files import file_sha256, read_json

T = TypeVar("T")
INDEX = "data.json"
MOST = 2**62  # maximum of any count


@dataclass(frozen=True)
class Span:
    """The tokens [first, last) of a shard."""

    ids: Callable[[], np.ndarray]  # the token ids of the shard
    ends: Callable[[], np.ndarray]  # the index after each document's last token, ascending
    first: int
    last: int
    opens: bool = False  # whether a document begins at `first` even if no document ends before it


class Tokens:
    """The token ids of one or more sources as one sequence over their shards, which are memory-mapped on first use.

    `tokens[a:b]` returns the ids in their dtype on disk.
    """

    @checked
    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = [span for span in spans if span.last > span.first]
        self.offsets = np.cumsum([0, *(span.last - span.first for span in self.spans)])

    @classmethod
    @checked
    def of(cls, ids: np.ndarray, ends: np.ndarray | None = None) -> "Tokens":
        """Make Tokens from ids (N,) in memory. `ends`: the index after each document's last token, ascending (default:
        one document). Raises a UserError for ids that are negative or no integers, and for other ends."""
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or (ids.dtype.kind == "i" and (ids < 0).any()):
            raise UserError(f"ids are {ids.dtype} {ids.shape}: give token ids (N,), integers from 0")
        ends = np.array([len(ids)]) if ends is None else ends
        integers = ends.ndim == 1 and (ends.dtype.kind in "iu" or not ends.size)
        if not integers or (np.diff(ends.astype(np.int64), prepend=0, append=len(ids)) < 0).any():
            raise UserError(f"ends are {shown(ends)}: give ascending integers (N,) from 0 to {len(ids)}")
        ends_of_documents = ends.astype(np.uint64)
        return cls([Span(lambda: ids, lambda: ends_of_documents, 0, len(ids), opens=True)])

    @classmethod
    @checked
    def join(cls, parts: Iterable["Tokens"]) -> "Tokens":
        """Concatenate the tokens of several sources into one sequence."""
        return cls([replace(span, opens=span.opens or i == 0) for t in parts for i, span in enumerate(t.spans)])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, step = where.indices(len(self))
        parts = [span.ids()[span.first : span.last] for span, _ in self.spans_in(start, stop)]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.uint16)]))[::step]

    @explained
    def part(self, start: int, stop: int) -> "Tokens":
        """Return the tokens with the indices [start, stop) as Tokens of the same shards; nothing is read from disk."""
        return Tokens([span for span, _ in self.spans_in(*slice(start, stop).indices(len(self))[:2])])

    @explained
    def starts(self, start: int, stop: int) -> np.ndarray:
        """Return the indices in [start, stop), relative to `start`, at which a document begins: int64, ascending."""
        start, stop, _ = slice(start, stop).indices(len(self))
        before, parts = max(start - 1, 0), [np.empty(0, np.int64)]  # a document begins after each end
        for span, at in self.spans_in(before, stop):
            ends = span.ends()
            low, high = np.searchsorted(ends, np.array([span.first, span.last], np.uint64))
            high += int(high < len(ends) and ends[high] == span.last)
            parts += [ends[low:high].astype(np.int64) - span.first + at, np.array([at] if span.opens else [], np.int64)]
        starts = np.unique(np.concatenate(parts)) + before - start
        return starts[(starts >= 0) & (starts < stop - start)]

    def spans_in(self, start: int, stop: int) -> Iterator[tuple[Span, int]]:
        """Yield (part of a shard, offset from `start`) for each shard with tokens in [start, stop)."""
        if stop > start:
            i, j = np.searchsorted(self.offsets, [start, stop - 1], side="right") - 1
            for span, offset in zip(self.spans[i : j + 1], self.offsets[i : j + 1].tolist()):
                a, b = max(start - offset, 0), min(stop - offset, span.last - span.first)
                clipped = replace(span, first=span.first + a, last=span.first + b, opens=span.opens and a == 0)
                yield clipped, offset + a - start


@dataclass(frozen=True)
class Shard:
    file: str  # file of the token ids
    tokens: Annotated[int, Range(0, MOST)]  # number of token ids
    documents: Annotated[int, Range(0, MOST)]  # number of documents that end in the shard
    sha256: str  # checksum of the token ids
    ends_sha256: str  # checksum of the ends of the documents


@dataclass(frozen=True)
class SourceRecord:
    name: str  # name of the source, as given
    documents: Annotated[int, Range(0, MOST)]  # number of documents
    tokens: Annotated[int, Range(0, MOST)]  # number of tokens
    bytes: Annotated[int, Range(0, MOST)]  # number of bytes of the text
    unknown_characters: Annotated[int, Range(0, MOST)]  # number of characters that the tokenizer does not know
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Sample:
    file: str = ""
    text: str = ""


@dataclass(frozen=True)
class Longest(Sample):
    tokens: Annotated[int, Range(0, MOST)] = 0


@dataclass(frozen=True)
class Dropped:
    documents: Annotated[int, Range(0, MOST)]
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Report:
    documents: Annotated[int, Range(0, MOST)]
    tokens: Annotated[int, Range(0, MOST)]
    bytes: Annotated[int, Range(0, MOST)]
    unknown_characters: Annotated[int, Range(0, MOST)]
    bytes_per_token: Annotated[float, Range(0, MOST)]
    longest: Longest
    dropped: dict[str, Any]  # a `Dropped` for each reason
    extracted: dict[str, str] = field(default_factory=dict)  # the extracted markup formats, as a sentence, by source


@dataclass(frozen=True)
class Index:
    dtype: Literal["uint16", "uint32"]  # dtype of the token ids
    sources: tuple[Mapping[str, Any], ...]  # the `SourceRecord` and provenance of each source
    report: Report
    settings: Mapping[str, Any]  # options of the preparation


@dataclass(frozen=True)
class TokenData:
    """An opened folder of prepared tokens."""

    sources: tuple[Tokens, ...]
    records: tuple[SourceRecord, ...]  # records of the sources
    index: Index
    folder: Path


def is_prepared(folder: str | Path) -> bool:
    """Return whether a folder contains prepared tokens. Never raises."""
    return all(os.path.isfile(os.path.join(folder, name)) for name in (INDEX, "tokenizer.json"))


def load_tokens(folder: Path, verify: Literal["size", "sha256"] = "size") -> TokenData:
    """Open the tokens that `prepare` wrote, memory-mapped.

    Raises a UserError if a shard has changed since: `verify` compares sizes or, with "sha256", also checksums, for
    which all files are read.
    """
    if not is_prepared(folder):
        raise UserError(
            f"{folder} contains no prepared tokens: make them with onward data prepare, or name another folder"
        )
    path = folder / INDEX
    index = known_fields(Index, read_json(path), str(path))
    for reason, entry in index.report.dropped.items():
        index.report.dropped[reason] = fields.convert(Dropped, entry, f"{path}.report.dropped.{reason}")
    records = tuple(known_fields(SourceRecord, one, f"{path}.sources[{i}]") for i, one in enumerate(index.sources))
    sources = tuple(Tokens(list(spans(folder, one.shards, np.dtype(index.dtype), verify))) for one in records)
    return TokenData(sources, records, index, folder)


def known_fields(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    return fields.build(cls, {name: values[name] for name in fields.hints(cls) if name in values}, where)


def spans(folder: Path, shards: Sequence[Shard], dtype: np.dtype[Any], verify: str) -> Iterator[Span]:
    for number, shard in enumerate(shards):
        ids = folder / Path(shard.file).name
        ends = ids.with_suffix(".ends")
        sizes = {ids: shard.tokens * dtype.itemsize, ends: shard.documents * 8}
        for (path, size), digest in zip(sizes.items(), (shard.sha256, shard.ends_sha256)):
            if (
                not path.is_file()
                or path.stat().st_size != size
                or (verify == "sha256" and file_sha256(path) != digest)
            ):
                raise UserError(f"{path} is missing or has changed since it was written: prepare the tokens again")
        read = partial(memory_map, ids.absolute(), dtype, shard.sha256)
        read_ends = partial(memory_map, ends.absolute(), np.dtype(np.uint64), shard.ends_sha256)
        yield Span(read, read_ends, 0, shard.tokens, opens=number == 0)


@lru_cache(maxsize=4096)  # operating systems allow tens of thousands of mapped files per process
def memory_map(path: Path, dtype: np.dtype[Any], sha256: str) -> np.ndarray:
    # the checksum is part of the cache's key, since a file can be replaced
    try:
        return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
    except OSError as error:
        raise UserError(f"{path} can no longer be read ({error.strerror}): put it back and resume") from None
