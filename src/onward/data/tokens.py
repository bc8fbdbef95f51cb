"""Tokens on disk: what `onward data prepare` makes, and runs are trained on and validated with.

DIR/
  data.json               the index: sources, their shards with checksums, and a report
  tokenizer.json          what made the tokens of the text
  00000.bin, ...          token ids, uint16 or uint32; behind each document the end token, if the tokenizer has one
  00000.ends, ...         uint64: for each document that ends in the shard, the index behind its last token
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from onward.data.corpora import sha256
from onward.data.sources import cut
from onward.errors import UserError
from onward.files import read_json
from onward.text.fast import Encoder, encoder
from onward.text.tokenizer import Tokenizer

INDEX = "data.json"
PASSAGE = 1 << 18  # characters encoded at a time


@dataclass(frozen=True)
class Span:
    """The tokens of a shard from `first` to `last`, not included; `opens`: a document begins there in any case."""

    ids: Callable[[], np.ndarray]
    ends: Callable[[], np.ndarray]
    first: int
    last: int
    opens: bool = False


class Tokens:
    """Token ids of one source or several, as one sequence over their shards, which are mapped when they are read.

    `tokens[a:b]` are ids in the type they have on disk.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = [span for span in spans if span.last > span.first]
        self.borders = np.cumsum([0, *(span.last - span.first for span in self.spans)])

    @classmethod
    def of(cls, ids: np.ndarray, ends: np.ndarray | None = None) -> "Tokens":
        """Tokens in memory; `ends` are the indices behind each document's last token (default: one document)."""
        known = np.array([len(ids)] if ends is None else ends, np.uint64)
        return cls([Span(lambda: ids, lambda: known, 0, len(ids), opens=True)])

    @classmethod
    def join(cls, several: Iterable["Tokens"]) -> "Tokens":
        """The tokens of several sources, one behind the other."""
        return cls([replace(span, opens=span.opens or i == 0) for t in several for i, span in enumerate(t.spans)])

    def __len__(self) -> int:
        return int(self.borders[-1])

    def __getitem__(self, places: slice) -> np.ndarray:
        start, stop, step = places.indices(len(self))
        found = [span.ids()[span.first : span.last] for span, _ in self.between(start, stop)]
        return (found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0, np.uint16)]))[::step]

    def part(self, start: int, stop: int) -> "Tokens":
        """The tokens from `start` to `stop`, not included: a view, which reads nothing."""
        return Tokens([span for span, _ in self.between(*slice(start, stop).indices(len(self))[:2])])

    def starts(self, start: int, stop: int) -> np.ndarray:
        """The places in [start, stop), relative to `start`, where a document begins: int64, ascending."""
        start, stop, _ = slice(start, stop).indices(len(self))
        before, found = max(start - 1, 0), [np.empty(0, np.int64)]  # a document that ends there lets one begin
        for span, at in self.between(before, stop):
            ends = span.ends()
            low, high = np.searchsorted(ends, np.array([span.first, span.last], np.uint64))
            high += int(high < len(ends) and ends[high] == span.last)
            found += [ends[low:high].astype(np.int64) - span.first + at, np.array([at] if span.opens else [], np.int64)]
        places = np.unique(np.concatenate(found)) + before - start
        return places[(places >= 0) & (places < stop - start)]

    def between(self, start: int, stop: int) -> Iterator[tuple[Span, int]]:
        """The spans that make up [start, stop), cut to it, and where each begins in it."""
        if stop > start:
            i, j = np.searchsorted(self.borders, [start, stop - 1], side="right") - 1
            for span, border in zip(self.spans[i : j + 1], self.borders[i : j + 1].tolist()):
                a, b = max(start - border, 0), min(stop - border, span.last - span.first)
                cut = replace(span, first=span.first + a, last=span.first + b, opens=span.opens and a == 0)
                yield cut, border + a - start


@dataclass(frozen=True)
class TokenData:
    """A prepared folder: the tokens of each source, and the index."""

    sources: tuple[Tokens, ...]
    info: dict[str, Any]
    folder: Path


def encode(
    tokenizer: Tokenizer, documents: Iterable[str], using: Encoder | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of documents, uint16 or uint32, each followed by the end token, and the indices behind those, uint64.

    A document longer than PASSAGE is cut at the end of a line, which changes no id where `Tokenizer.pieces` is exact.
    """
    using = using or encoder(tokenizer)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    end = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype)
    ids, ends, count = [end[:0]], [], 0
    for group in groups(documents):
        found = []
        for passage, (_, last) in zip(using([text for text, _ in group]), group):
            found += [passage.astype(dtype), end] if last else [passage.astype(dtype)]
            count += len(passage) + len(end) * last
            ends += [count] * last
        ids.append(np.concatenate(found))
    return np.concatenate(ids), np.array(ends, np.uint64)


def groups(documents: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Passages of about PASSAGE characters together, each with whether it is the last of its document."""
    group: list[tuple[str, bool]] = []
    size = 0
    for text in documents:
        *before, last = cut(text, PASSAGE)
        for passage in (*((part, False) for part in before), (last, True)):
            group.append(passage)
            size += len(passage[0])
            if size >= PASSAGE:
                yield group
                group, size = [], 0
    if group:
        yield group


def is_prepared(folder: str | Path) -> bool:
    """Whether a folder holds prepared tokens."""
    return all(os.path.isfile(os.path.join(folder, name)) for name in (INDEX, "tokenizer.json"))  # never raises


def load_tokens(folder: Path, verify: Literal["size", "sha256"] = "size") -> TokenData:
    """The tokens that `prepare` wrote; a UserError if a shard has changed since, by its size or its checksum."""
    if not is_prepared(folder):
        raise UserError(
            f"{folder} holds no prepared tokens: make them with onward data prepare, or name another folder"
        )
    info = read_json(folder / INDEX)
    try:
        dtype, known = np.dtype({"uint16": np.uint16, "uint32": np.uint32}[info["dtype"]]), info["sources"]
        sources = tuple(Tokens(list(spans(folder, source["shards"], dtype, verify))) for source in known)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / INDEX} is not an index of tokens ({error!r}): prepare them again") from None
    return TokenData(sources, info, folder)


def spans(folder: Path, shards: Sequence[dict[str, Any]], dtype: np.dtype[Any], verify: str) -> Iterator[Span]:
    """The shards of one source, checked."""
    for number, shard in enumerate(shards):
        ids = folder / Path(shard["file"]).name
        ends = ids.with_suffix(".ends")
        sizes = {ids: shard["tokens"] * dtype.itemsize, ends: shard["documents"] * 8}
        for (path, size), digest in zip(sizes.items(), (shard["sha256"], shard["ends_sha256"])):
            if not path.is_file() or path.stat().st_size != size or (verify == "sha256" and sha256(path) != digest):
                raise UserError(f"{path} is missing or has changed since it was written: prepare the tokens again")
        read = partial(mapped, ids.absolute(), dtype, shard["sha256"])
        read_ends = partial(mapped, ends.absolute(), np.dtype(np.uint64), shard["ends_sha256"])
        yield Span(read, read_ends, 0, shard["tokens"], opens=number == 0)


@lru_cache(maxsize=4096)  # a system maps some tens of thousands of files at most
def mapped(path: Path, dtype: np.dtype[Any], sha256: str) -> np.ndarray:
    """A file as an array; the checksum tells it from one that had the name before."""
    try:
        return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
    except OSError as error:
        raise UserError(f"{path} cannot be read any more ({error.strerror}): put it back and go on") from None
