"""The steps of a preparation: split sources into units of work, inspect and encode each unit, and build the index."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from onward.base.errors import UserError
from onward.base.files import atomic_write, file_sha256, write_json
from onward.data.cleaning import GOPHER, Cleaning
from onward.data.duplicates import CONTINUED, KEPT, PERMUTATIONS, fingerprint, signature, write_array
from onward.data.encoding import encode, id_dtype
from onward.data.extraction.extract import Extraction
from onward.data.filters import failed_filter
from onward.data.formats import PieceSizes, SourcePiece
from onward.data.reading import Reading
from onward.data.sources import (
    Source,
    is_blank,
    no_text,
    pieces,
    provenance,
)
from onward.text.fast import Encoder, named_encoder
from onward.text.tokenizer import Tokenizer

REASONS = ["", "duplicate", "near_duplicate", *GOPHER]  # reasons for dropping a document, by verdict
VERSION = 3  # version of a prepared folder's format, including the division of sources into units
SAMPLES, SAMPLE_CHARS = 3, 200  # maximum number of dropped documents per reason in the report, and of their characters


@dataclass(frozen=True)
class WorkUnit:
    """Documents of at most about `PieceSizes.piece_chars` characters in total, or a part of a larger document."""

    number: int
    source: int
    pieces: list[SourcePiece]

    @property
    def begins(self) -> bool:
        return self.pieces[0].begins

    @property
    def ends(self) -> bool:
        return self.pieces[-1].ends

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Preparation:
    """The encoding of sources into a folder of tokens, unit by unit. Each worker process gets a copy."""

    sources: Sequence[Source]
    folder: Path  # the folder FOLDER.unfinished
    reading: Reading
    cleaning: Cleaning
    sizes: PieceSizes

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    @cached_property
    def encoder(self) -> tuple[str, Encoder]:
        return named_encoder(self.tokenizer)

    def part(self, unit: WorkUnit, suffix: str) -> Path:
        return self.folder / "parts" / f"{unit.number:05}{suffix}"

    def units(self) -> Iterator[WorkUnit]:
        """All units of work, in order; each part of a document larger than a unit is a separate unit."""
        number = 0
        for index, source in enumerate(self.sources):
            group: list[SourcePiece] = []
            size = 0
            for piece in pieces(source, self.reading, self.sizes):
                if group and (size + len(piece) > self.sizes.piece_chars or not piece.begins or not group[-1].ends):
                    yield WorkUnit(number, index, group)
                    number, group, size = number + 1, [], 0
                group.append(piece)
                size += len(piece)
            yield WorkUnit(number, index, group)
            number += 1

    def documents(self, unit: WorkUnit, found: Extraction | None = None) -> list[tuple[str, str]]:
        """Return (name of the file, text) of each document; add the counts of extracted files to `found`."""
        return [(piece.name, text) for piece in unit.pieces for text in piece.documents(self.reading.field, found)]

    def inspect(self, unit: WorkUnit) -> None:
        """Write the filter verdicts, hashes and, if near-duplicates are dropped, MinHash signatures of a unit."""
        texts = [text for _, text in self.documents(unit)]
        verdicts = np.full(len(texts), CONTINUED, np.uint8)
        if unit.begins:
            verdicts[:] = [REASONS.index(failed_filter(self.cleaning, text)) for text in texts]
        if self.cleaning.near is not None:
            signatures = np.zeros((len(texts), PERMUTATIONS), np.uint32)
            for i in np.flatnonzero(verdicts == KEPT):
                signatures[i] = signature(texts[i])
            write_array(self.part(unit, ".npy"), signatures)
        hashes = np.array([fingerprint(text) for text in texts], np.uint64)
        with atomic_write(self.part(unit, ".npz")) as new:
            np.savez(new, verdicts=verdicts, hashes=hashes)

    def encode(self, unit: WorkUnit) -> None:
        """Write the token shard of a unit, unless it has no tokens, and then the unit's record
        (NUMBER.json)."""
        start, found = perf_counter(), Extraction()
        documents = self.documents(unit, found)
        verdicts = (
            np.load(self.part(unit, ".verdicts.npy"))
            if self.cleaning.drops_documents
            else np.zeros(len(documents), int)
        )
        if len(verdicts) != len(documents):
            raise UserError(f"{unit.pieces[0].name} has changed while it was read: run the same command again")
        dropped: dict[str, dict[str, Any]] = {}
        for (name, text), verdict in zip(documents, verdicts):
            if verdict != KEPT:
                entry = dropped.setdefault(REASONS[verdict], {"documents": 0, "samples": []})
                entry["documents"] += int(unit.ends)
                if unit.begins and len(entry["samples"]) < SAMPLES:
                    entry["samples"].append({"file": name, "text": text[:SAMPLE_CHARS]})
        kept = [document for document, verdict in zip(documents, verdicts) if verdict == KEPT]
        ids, ends = self.kept_of_encoded(unit, verdicts == KEPT) or self.encoded(unit, [text for _, text in kept])
        encoded = perf_counter()
        shard: dict[str, Any] = {"file": f"{unit.number:05}.bin", "tokens": len(ids), "documents": len(ends)}
        for array, suffix, name in (ids, ".bin", "sha256"), (ends, ".ends", "ends_sha256"):
            shard[name] = hashlib.sha256(array.data).hexdigest()
            if len(ids):
                with atomic_write((self.folder / shard["file"]).with_suffix(suffix)) as new:
                    # unlike array.tofile, reports the system's error if the disk is full
                    new.write_bytes(array.data)
        record = {
            "source": unit.source,
            "begins": unit.begins,
            "blank": all(is_blank(text) for _, text in documents),
            "shard": shard,
            "bytes": sum(len(text.encode()) for _, text in kept),
            "unknown_characters": int(np.count_nonzero(ids == self.tokenizer.unknown_id)),
            "dropped": dropped,
            "extracted": asdict(found),
            "seconds": {"encoding": encoded - start, "writing": perf_counter() - encoded},
        }
        if kept:
            lengths = np.diff(ends, prepend=np.uint64(0)) if unit.ends else np.array([len(ids)])
            name, text = kept[at := int(lengths.argmax())]
            record["longest"] = {"tokens": int(lengths[at]), "file": name, "text": text[:SAMPLE_CHARS]}
        write_json(self.part(unit, ".json"), record)

    def encoded(self, unit: WorkUnit, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids, and the index after the last token of each document that ends in the unit."""
        ids, ends = encode(self.tokenizer, texts, self.encoder[1])
        if texts and not unit.ends:
            ids, ends = ids[: len(ids) - (self.tokenizer.eos_id is not None)], ends[:0]
        return ids, ends

    def kept_of_encoded(self, unit: WorkUnit, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Like `encoded`, but for a unit that was encoded before duplicates were known: read its .whole.npz file, and
        leave out the documents that are now dropped. Returns None if there is no such file."""
        path = self.part(unit, ".whole.npz")
        if not path.exists():
            return None
        with np.load(path) as encoded:
            ids, ends, kept = encoded["ids"], encoded["ends"], kept[encoded["kept"]]
        if not unit.ends:  # the unit is a part of one document
            return ids[: len(ids) * kept.all()], ends
        lengths = np.diff(ends, prepend=np.uint64(0))
        return ids[np.repeat(kept, lengths.astype(np.int64))], np.cumsum(lengths[kept], dtype=np.uint64)

    def index(self, records: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
        """The content of data.json: settings, shards of all sources and a report."""
        sources = []
        for number, name in enumerate(settings["sources"]):
            units = [record for record in records if record["source"] == number]
            shards = [record["shard"] for record in units if record["shard"]["tokens"]]
            counts = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens")}
            counts |= {key: sum(record[key] for record in units) for key in ("bytes", "unknown_characters")}
            sources.append({**settings[f"content of {name}"], **counts, "shards": shards})
        report: dict[str, Any] = {
            key: sum(source[key] for source in sources)
            for key in ("documents", "tokens", "bytes", "unknown_characters")
        }
        report["bytes_per_token"] = report["bytes"] / max(1, report["tokens"])
        report["longest"] = document = {"tokens": 0}  # a document may span several units
        dropped: dict[str, dict[str, Any]] = {}
        for record in records:
            part = record.get("longest", {"tokens": 0})
            document = part if record["begins"] else document | {"tokens": document["tokens"] + part["tokens"]}
            report["longest"] = max(report["longest"], document, key=lambda one: one["tokens"])
            for reason, entry in record["dropped"].items():
                total = dropped.setdefault(reason, {"documents": 0, "samples": []})
                total["documents"] += entry["documents"]
                total["samples"] = (total["samples"] + entry["samples"])[:SAMPLES]
        report["extracted"] = {
            name: sentence
            for number, name in enumerate(settings["sources"])
            if (sentence := extraction_of(records, number).sentence(name))
        }
        report["dropped"] = {reason: dropped[reason] for reason in REASONS if reason in dropped}
        header = {
            "version": VERSION,
            "dtype": id_dtype(self.tokenizer),
            "tokenizer": file_sha256(self.folder / "tokenizer.json"),
        }
        return header | {"sources": sources, "report": report, "settings": settings}

    def problem(self, records: list[dict[str, Any]], index: dict[str, Any]) -> str:
        """Why the tokens cannot be used, such as a source that has changed; "" if they can."""
        for number, source in enumerate(self.sources):
            if provenance(source) != index["settings"][f"content of {source}"]:
                return f"{source} has changed while it was read: run the same command again"
            if all(record["blank"] for record in records if record["source"] == number):
                return no_text(source, extraction_of(records, number))
        if not index["report"]["tokens"]:
            counts = ", ".join(f"{entry['documents']} as {name}" for name, entry in index["report"]["dropped"].items())
            return f"all documents are dropped ({counts}): choose less strict filters"
        return ""


def extraction_of(records: list[dict[str, Any]], source: int) -> Extraction:
    """The counts of text extracted from a source, according to the records of its units."""
    found = Extraction()
    for record in records:
        if record["source"] == source:
            found.join(Extraction(**record["extracted"]))
    return found
