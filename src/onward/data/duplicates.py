"""Documents that are there more than once, in whatever source: the first one is kept.

What is known of the documents of each unit of work lies in a folder: NUMBER.npz has their `verdicts` so far and their
`hashes`; NUMBER.npy has their MinHash signatures, where near duplicates are looked for. It is gone through in parts, so
that memory holds about a byte per document.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onward.errors import UserError
from onward.files import written_whole

PERMUTATIONS = 128
SHINGLE = 5  # words
DOCUMENTS = 1 << 22  # whose hashes are compared at a time
PAIRS = 1 << 14  # whose signatures are compared at a time
KEPT, DUPLICATE, NEAR, INSIDE = 0, 1, 2, 255  # verdicts; the last: goes on with the document of the unit before


def fingerprint(text: str) -> int:
    """A hash of 64 bits: that any two of a billion different documents share one has a probability of 3 %."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def signature(text: str) -> np.ndarray:
    """The MinHash (Broder 1997) of the runs of words in a text, (PERMUTATIONS,) uint32."""
    words = text.split()
    runs = {" ".join(words[i : i + SHINGLE]).encode() for i in range(max(1, len(words) - SHINGLE + 1))}
    found = library().MinHash(PERMUTATIONS)
    found.update_batch(runs)
    return np.asarray(found.hashvalues, np.uint32)


def library() -> Any:
    try:
        import datasketch
    except ImportError:
        said = "near duplicates are found with datasketch, which is missing: pip install 'onward[data]'"
        raise UserError(said) from None
    return datasketch


class Judged:
    """The documents of all units; a place is the number of a document among them."""

    def __init__(self, folder: Path, units: int) -> None:
        self.folder, self.units = folder, range(units)
        verdicts = [self.load(unit, "verdicts") for unit in self.units]
        self.borders = np.cumsum([0, *map(len, verdicts)])
        self.verdicts = np.concatenate(verdicts)
        self.whole: dict[int, int] = {}  # the hashes of documents in several units, by their places

    def load(self, unit: int, name: str) -> np.ndarray:
        with np.load(self.folder / f"{unit:05}.npz") as found:
            return np.asarray(found[name])

    def decide(self, exact: bool, near: float | None) -> None:
        """Drop duplicates among the documents kept so far, and write NUMBER.verdicts.npy for each unit."""
        inside, head, before = np.flatnonzero(self.verdicts == INSIDE).tolist(), -1, -1
        if exact:
            for place in inside:
                head, before = (head if place - 1 == before else place - 1), place
                self.whole[head] = fingerprint(f"{self.whole.get(head, self.hash(head))} {self.hash(place)}")
            for later, _ in self.repeats(self.hashes):
                self.verdicts[later] = DUPLICATE
        if near is not None:
            self.drop_near(near)
        for place in inside:
            self.verdicts[place] = self.verdicts[place - 1]
        for unit in self.units:
            with written_whole(self.folder / f"{unit:05}.verdicts.npy") as new:
                np.save(new, self.verdicts[self.borders[unit] : self.borders[unit + 1]])

    def drop_near(self, similarity: float) -> None:
        """Drop documents whose signature agrees with that of an earlier one in a share of at least `similarity`.

        Looked at are pairs that agree in a whole band, as many bands as find most of those that are so similar.
        """
        lsh = library().MinHashLSH(threshold=similarity, num_perm=PERMUTATIONS)
        for start in range(0, lsh.b * lsh.r, lsh.r):
            for later, first in self.repeats(partial(self.band, slice(start, start + lsh.r))):
                for pairs in np.array_split(np.arange(len(later)), len(later) // PAIRS + 1):
                    agree = self.signatures(later[pairs]) == self.signatures(first[pairs])
                    self.verdicts[later[pairs][agree.mean(1) >= similarity]] = NEAR

    def repeats(self, keys: Callable[[int], np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The places of kept documents that share their key with one before them, and of the first that has it.

        `keys` gives those of a unit's documents, uint64.
        """
        parts = 1 + len(self.verdicts) // DOCUMENTS
        for part in range(parts):
            places, found = [], []
            for unit, start, end in zip(self.units, self.borders, self.borders[1:]):
                own = keys(unit)
                mine = np.flatnonzero((own % parts == part) & (self.verdicts[start:end] == KEPT))
                places.append(mine + start)
                found.append(own[mine])
            place = np.concatenate(places)
            _, first, group = np.unique(np.concatenate(found), return_index=True, return_inverse=True)
            earliest = place[first[group]]
            again = earliest != place
            yield place[again], earliest[again]

    def hashes(self, unit: int) -> np.ndarray:
        found, start = self.load(unit, "hashes"), int(self.borders[unit])
        if len(found) and start in self.whole:
            found[0] = self.whole[start]
        return found

    def hash(self, place: int) -> int:
        unit = int(np.searchsorted(self.borders, place, side="right")) - 1
        return int(self.load(unit, "hashes")[place - self.borders[unit]])

    def band(self, columns: slice, unit: int) -> np.ndarray:
        """A hash of some columns of the signatures of a unit."""
        signatures = self.signature_file(unit)[:, columns].astype(np.uint64)
        keys = np.zeros(len(signatures), np.uint64)
        for column in signatures.T:
            keys = (keys ^ (keys >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + column
        return keys

    def signatures(self, places: np.ndarray) -> np.ndarray:
        """The signatures at some places, (len(places), PERMUTATIONS)."""
        found = np.empty((len(places), PERMUTATIONS), np.uint32)
        units = np.searchsorted(self.borders, places, side="right") - 1
        for unit in np.unique(units):
            rows = np.flatnonzero(units == unit)
            found[rows] = self.signature_file(unit)[places[rows] - self.borders[unit]]
        return found

    def signature_file(self, unit: int) -> np.ndarray:
        return np.load(self.folder / f"{unit:05}.npy", mmap_mode="r")  # type: ignore[no-any-return]
