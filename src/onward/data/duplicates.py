"""Find duplicates among the documents of all sources; the first of equal documents is kept.

A folder holds a set of files for each unit of work: NUMBER.npz with the `verdicts` (kept, or the reason for dropping)
and `hashes` of its documents, and NUMBER.npy with their MinHash signatures if near duplicates are dropped. The files
are read in parts, so that memory holds about one byte per document.
"""

import hashlib
import io
from collections.abc import Callable, Iterator
from functools import cache, partial
from math import ceil, comb
from pathlib import Path
from typing import Any

import numpy as np

from onward.base.errors import UserError
from onward.base.files import atomic_write
from onward.base.splitmix import GOLDEN

PERMUTATIONS = 128
SHINGLE_WORDS = 5
RECALL = 0.95  # fraction of the pairs exactly at the similarity threshold that the bands must find
HASHES_AT_ONCE = 1 << 22  # number of documents whose hashes are in memory together
PAIRS_AT_ONCE = 1 << 14  # approximate number of pairs of signatures compared at a time
KEPT, DUPLICATE, NEAR, CONTINUED = 0, 1, 2, 255  # verdicts; CONTINUED: continues the previous unit's document


def fingerprint(text: str) -> int:
    """64-bit hash; among a billion different documents, the probability of a collision is 3 %."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def signature(text: str) -> np.ndarray:
    """MinHash signature (Broder 1997) of the word 5-grams, (PERMUTATIONS,) uint32; the fraction of equal elements of
    two signatures estimates the similarity of their texts."""
    words = text.split()
    starts = range(max(1, len(words) - SHINGLE_WORDS + 1))
    minhash = datasketch().MinHash(PERMUTATIONS)
    minhash.update_batch({" ".join(words[i : i + SHINGLE_WORDS]).encode() for i in starts})
    return np.asarray(minhash.hashvalues, np.uint32)


def band_match_probability(agreeing: int, width: int) -> float:
    """Probability that two signatures with `agreeing` equal columns, at random places, are equal in a whole band of
    `width` columns."""
    bands = min(PERMUTATIONS // width, agreeing // width)
    terms = (
        (-1) ** n * comb(PERMUTATIONS // width, n) * comb(PERMUTATIONS - n * width, agreeing - n * width)
        for n in range(1, bands + 1)
    )
    return -sum(terms) / comb(PERMUTATIONS, agreeing)


@cache
def band_width(similarity: float) -> int:
    """Width of the widest bands that find at least the fraction RECALL of the pairs with this similarity. Wider bands
    mean fewer comparisons."""
    least = ceil(similarity * PERMUTATIONS)  # minimum number of equal columns of near duplicates
    return max(width for width in range(1, PERMUTATIONS + 1) if band_match_probability(least, width) >= RECALL)


def datasketch() -> Any:
    try:
        import datasketch
    except ImportError:
        raise UserError("Cannot find near duplicates without datasketch: pip install 'onward[data]'") from None
    return datasketch


def write_array(path: Path, array: np.ndarray) -> None:
    # given a path, np.save does not report the system's error if the disk is full
    np.save(content := io.BytesIO(), array)
    with atomic_write(path) as new:
        new.write_bytes(content.getbuffer())


class Verdicts:
    """The verdicts on the N documents of all units, (N,), in order; an index is a document's position in this array."""

    def __init__(self, folder: Path, units: int) -> None:
        self.folder, self.units = folder, range(units)
        verdicts = [self.load(unit, "verdicts") for unit in self.units]
        self.offsets = np.cumsum([0, *map(len, verdicts)])  # the index of each unit's first document, and N
        self.verdicts = np.concatenate(verdicts)
        self.joined: dict[int, int] = {}  # index -> hash, for documents that span several units

    def load(self, unit: int, name: str) -> np.ndarray:
        with np.load(self.folder / f"{unit:05}.npz") as arrays:
            return np.asarray(arrays[name])

    def drop_duplicates(self, exact: bool, near: float | None) -> None:
        """Mark duplicates among the documents that passed the filters: with `exact`, documents that equal an earlier
        one; with `near`, documents of at least this similarity to an earlier one. Write NUMBER.verdicts.npy for each
        unit."""
        continued, head, before = np.flatnonzero(self.verdicts == CONTINUED).tolist(), -1, -1
        if exact:
            for index in continued:
                head, before = (head if index - 1 == before else index - 1), index
                self.joined[head] = fingerprint(f"{self.joined.get(head, self.hash(head))} {self.hash(index)}")
            for later, _ in self.repeats(self.hashes):
                self.verdicts[later] = DUPLICATE
        if near is not None:
            self.drop_near(near)
        for index in continued:
            self.verdicts[index] = self.verdicts[index - 1]
        for unit in self.units:
            verdicts = self.verdicts[self.offsets[unit] : self.offsets[unit + 1]]
            write_array(self.folder / f"{unit:05}.verdicts.npy", verdicts)

    def drop_near(self, similarity: float) -> None:
        """Mark near duplicates. Each document is compared only with the first one that agrees with it in all columns of
        a band (locality-sensitive hashing)."""
        width = band_width(similarity)
        for start in range(0, PERMUTATIONS - width + 1, width):
            for later, first in self.repeats(partial(self.band, slice(start, start + width))):
                for pairs in np.array_split(np.arange(len(later)), len(later) // PAIRS_AT_ONCE + 1):
                    agree = self.signatures(later[pairs]) == self.signatures(first[pairs])
                    self.verdicts[later[pairs][agree.mean(1) >= similarity]] = NEAR

    def repeats(self, keys: Callable[[int], np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (indices of kept documents whose key occurred before, indices of the first documents with the same
        keys). `keys` maps a unit to the keys of its documents, (documents,) uint64."""
        parts = 1 + len(self.verdicts) // HASHES_AT_ONCE
        for part in range(parts):
            indices, values = [], []
            for unit, start, end in zip(self.units, self.offsets, self.offsets[1:]):
                unit_keys = keys(unit)
                kept = np.flatnonzero((unit_keys % parts == part) & (self.verdicts[start:end] == KEPT))
                indices.append(kept + start)
                values.append(unit_keys[kept])
            index = np.concatenate(indices)
            _, first, group = np.unique(np.concatenate(values), return_index=True, return_inverse=True)
            earliest = index[first[group]]
            repeated = earliest != index
            yield index[repeated], earliest[repeated]

    def hashes(self, unit: int) -> np.ndarray:
        """Hashes of a unit's documents; a document that continues in later units has the hash of its whole text."""
        hashes, start = self.load(unit, "hashes"), int(self.offsets[unit])
        if len(hashes) and start in self.joined:
            hashes[0] = self.joined[start]
        return hashes

    def hash(self, index: int) -> int:
        unit = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return int(self.load(unit, "hashes")[index - self.offsets[unit]])

    def band(self, columns: slice, unit: int) -> np.ndarray:
        """Hash of the given columns of each document's signature, (documents of the unit,) uint64."""
        signatures = self.signature_file(unit)[:, columns].astype(np.uint64)
        keys = np.zeros(len(signatures), np.uint64)
        for column in signatures.T:
            keys = (keys ^ (keys >> np.uint64(29))) * np.uint64(GOLDEN) + column
        return keys

    def signatures(self, indices: np.ndarray) -> np.ndarray:
        """MinHash signatures, (len(indices), PERMUTATIONS) uint32."""
        signatures = np.empty((len(indices), PERMUTATIONS), np.uint32)
        units = np.searchsorted(self.offsets, indices, side="right") - 1
        for unit in np.unique(units):
            rows = np.flatnonzero(units == unit)
            signatures[rows] = self.signature_file(unit)[indices[rows] - self.offsets[unit]]
        return signatures

    def signature_file(self, unit: int) -> np.ndarray:
        return np.load(self.folder / f"{unit:05}.npy", mmap_mode="r")  # type: ignore[no-any-return]
