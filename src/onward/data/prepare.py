"""Encode texts into token shards on disk, in units of work that are distributed over processes.

Each unit becomes one shard, so the result does not depend on the number of processes. The work happens in
FOLDER.unfinished, whose subfolder `parts` holds the results of each unit; an interrupted preparation continues from
them. If documents can be dropped, there are two passes: the first inspects all documents, the second encodes.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from onward.data.cleaning import GOPHER, Cleaning
from onward.data.duplicates import CONTINUED, KEPT, PERMUTATIONS, Verdicts, fingerprint, signature, write_array
from onward.data.filters import failed_filter
from onward.data.formats import SIZES, Piece, Sizes
from onward.data.progress import Measured, Progress, silent
from onward.data.sources import (
    Source,
    check_named,
    download_corpora,
    is_blank,
    is_stream,
    no_text,
    passages,
    pieces,
    provenance,
    stored_streams,
)
from onward.data.tokens import INDEX, TokenData, encode, is_prepared, load_tokens
from onward.data.workers import run_tasks
from onward.errors import UserError
from onward.files import file_sha256, flush, read_json, remove_leftovers, write_json, written_whole
from onward.text.fast import Encoder, named_encoder
from onward.text.tokenizer import Tokenizer, train_tokenizer

REASONS = ["", "duplicate", "near_duplicate", *GOPHER]  # why a document is dropped, by its verdict
EXACT = Cleaning()  # drops exact duplicates
VERSION = 3  # of the format of a prepared folder, and of how sources are divided into units
SAMPLES, SAMPLE_CHARS = 3, 200  # dropped documents shown in the report per reason, and characters of each


@dataclass(frozen=True)
class Unit:
    """Documents of about `Sizes.piece_chars` characters in total, or a part of a larger document."""

    number: int
    source: int
    pieces: list[Piece]

    @property
    def begins(self) -> bool:
        """Whether the unit starts with the start of a document."""
        return self.pieces[0].begins

    @property
    def ends(self) -> bool:
        """Whether the unit ends with the end of a document."""
        return self.pieces[-1].ends

    @property
    def size(self) -> int:
        """The size of all pieces, in the unit of `Piece.size`."""
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Preparation:
    """The work on one folder. Each worker process gets a copy."""

    sources: Sequence[Source]
    folder: Path  # FOLDER.unfinished
    field: str
    encoding: str
    cleaning: Cleaning
    sizes: Sizes

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, from the prepared folder."""
        return Tokenizer.load(self.folder)

    @cached_property
    def encoder(self) -> tuple[str, Encoder]:
        """The name of the encoding library and its encoder."""
        return named_encoder(self.tokenizer)

    def part(self, unit: Unit, suffix: str) -> Path:
        """The path of a file that a worker writes for a unit."""
        return self.folder / "parts" / f"{unit.number:05}{suffix}"

    def units(self) -> Iterator[Unit]:
        """All units, in order. A part of a split document is a unit by itself."""
        number = 0
        for index, source in enumerate(self.sources):
            group: list[Piece] = []
            size = 0
            for piece in pieces(source, self.field, self.encoding, self.sizes):
                if group and (size + len(piece) > self.sizes.piece_chars or not piece.begins or not group[-1].ends):
                    yield Unit(number, index, group)
                    number, group, size = number + 1, [], 0
                group.append(piece)
                size += len(piece)
            yield Unit(number, index, group)
            number += 1

    def documents(self, unit: Unit) -> list[tuple[str, str]]:
        """The documents of a unit: (name of the file, text)."""
        return [(piece.name, text) for piece in unit.pieces for text in piece.documents(self.field)]

    def inspect(self, unit: Unit) -> None:
        """Write the filter verdicts, hashes and MinHash signatures of a unit's documents; see `data.duplicates`."""
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
        with written_whole(self.part(unit, ".npz")) as new:
            np.savez(new, verdicts=verdicts, hashes=hashes)

    def encode(self, unit: Unit) -> None:
        """Write the shard of a unit, unless all of it is dropped, and then its record (NUMBER.json)."""
        start = perf_counter()
        documents = self.documents(unit)
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
        ids, ends = encode(self.tokenizer, (text for _, text in kept), self.encoder[1])
        if kept and not unit.ends:
            ids, ends = ids[: len(ids) - (self.tokenizer.eos_id is not None)], ends[:0]
        encoded = perf_counter()
        shard: dict[str, Any] = {"file": f"{unit.number:05}.bin", "tokens": len(ids), "documents": len(ends)}
        for array, suffix, name in (ids, ".bin", "sha256"), (ends, ".ends", "ends_sha256"):
            shard[name] = hashlib.sha256(array.data).hexdigest()
            if len(ids):
                with written_whole((self.folder / shard["file"]).with_suffix(suffix)) as new:
                    new.write_bytes(array.data)  # unlike array.tofile, it gives the system's reason on a full disk
        record = {
            "source": unit.source,
            "begins": unit.begins,
            "blank": all(is_blank(text) for _, text in documents),
            "shard": shard,
            "bytes": sum(len(text.encode()) for _, text in kept),
            "unknown_characters": int(np.count_nonzero(ids == self.tokenizer.unknown_id)),
            "dropped": dropped,
            "seconds": {"encoding": encoded - start, "writing": perf_counter() - encoded},
        }
        if kept:
            lengths = np.diff(ends, prepend=np.uint64(0)) if unit.ends else np.array([len(ids)])
            name, text = kept[at := int(lengths.argmax())]
            record["longest"] = {"tokens": int(lengths[at]), "file": name, "text": text[:SAMPLE_CHARS]}
        write_json(self.part(unit, ".json"), record)

    def index(self, records: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
        """The content of data.json, from the records of all units: their shards, and a report."""
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
        report["longest"] = document = {"tokens": 0}  # a document may continue over several units
        dropped: dict[str, dict[str, Any]] = {}
        for record in records:
            part = record.get("longest", {"tokens": 0})
            document = part if record["begins"] else document | {"tokens": document["tokens"] + part["tokens"]}
            report["longest"] = max(report["longest"], document, key=lambda one: one["tokens"])
            for reason, entry in record["dropped"].items():
                total = dropped.setdefault(reason, {"documents": 0, "samples": []})
                total["documents"] += entry["documents"]
                total["samples"] = (total["samples"] + entry["samples"])[:SAMPLES]
        report["dropped"] = {reason: dropped[reason] for reason in REASONS if reason in dropped}
        dtype = "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"
        header = {"version": VERSION, "dtype": dtype, "tokenizer": file_sha256(self.folder / "tokenizer.json")}
        return header | {"sources": sources, "report": report, "settings": settings}

    def problem(self, records: list[dict[str, Any]], index: dict[str, Any]) -> str:
        """Why the tokens cannot be used; "" if they can."""
        for number, source in enumerate(self.sources):
            if provenance(source) != index["settings"][f"content of {source}"]:
                return f"{source} has changed while it was read: run the same command again"
            if all(record["blank"] for record in records if record["source"] == number):
                return no_text(source)
        if not index["report"]["tokens"]:
            counts = ", ".join(f"{entry['documents']} as {name}" for name, entry in index["report"]["dropped"].items())
            return f"all documents are dropped ({counts}): choose less strict filters"
        return ""


def prepare(
    sources: Sequence[Source],
    tokenizer: Tokenizer | str,
    folder: Path,
    *,
    field: str = "text",
    encoding: str = "utf-8",
    cleaning: Cleaning = EXACT,
    workers: int = 0,
    progress: Progress = silent,
    measured: Measured | None = None,
    sizes: Sizes = SIZES,
) -> TokenData:
    """Encode texts into a folder of token shards, and return them memory-mapped.

    For `sources`, `field` and `encoding` see `documents`. A `tokenizer` given as text (see `train_tokenizer`) is
    learned from the sources. `workers` is the number of processes (0: one per core); the result does not depend on it.
    Each process holds a few pieces of `sizes.piece_chars` characters in memory; only a row of a table or a line of a
    .jsonl is never split. A document in several pieces is filtered by its first piece. `progress` is called with the
    description of the running task, the bytes done, and the bytes in all; `measured` is filled at the end.

    The folder appears when all shards are complete. An interrupted preparation continues if the same arguments are
    given again, and a complete one is returned as it is, unless it has read a stream. Raises UserError if a source
    cannot be read, or if the folder was prepared from other sources or settings.
    """
    if workers < 0:
        raise UserError(f"workers is {workers}: it is a number of processes, or 0 for one per core")
    check_named(sources)
    download_corpora(sources, progress)
    folder = Path(folder)
    work = folder.parent / f"{folder.name}.unfinished"
    settings = {
        "version": VERSION,
        "sources": list(map(str, sources)),
        "tokenizer": tokenizer if isinstance(tokenizer, str) else digest(tokenizer),
        "field": field,
        "encoding": encoding,
        **asdict(cleaning),
    }
    if is_prepared(folder) and not any(map(is_stream, sources)):
        check_settings(load_tokens(folder).index.settings, with_content(settings, sources), folder)
    else:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists already: choose another folder, or remove it")
        parts = work / "parts"
        try:
            with stored_streams(sources, parts / "streams", progress) as files:
                settings = with_content(settings, files)
                open_work_folder(work, settings)
                preparation = Preparation(files, work, field, encoding, cleaning, sizes)
                try:
                    run(preparation, tokenizer, settings, workers, progress, measured or Measured())
                except UserError:
                    if not any(parts.glob("[0-9]*")):  # no unit is done: nothing to continue from
                        shutil.rmtree(work, ignore_errors=True)
                    raise
        finally:
            if not (parts / "plan.json").exists():
                shutil.rmtree(work, ignore_errors=True)
        os.replace(work, folder)
        flush(folder.parent)
    shutil.rmtree(folder / "parts", ignore_errors=True)
    return load_tokens(folder)


def with_content(settings: dict[str, Any], sources: Sequence[Source]) -> dict[str, Any]:
    """The settings of a preparation with the provenance of its sources, as they are in JSON."""
    return json.loads(json.dumps(settings | {f"content of {source}": provenance(source) for source in sources}))


def open_work_folder(work: Path, settings: dict[str, Any]) -> None:
    """Create FOLDER.unfinished, or check that it has the same settings and remove half-written files."""
    plan = work / "parts" / "plan.json"
    if plan.exists():
        check_settings(read_json(plan), settings, work)
        remove_all_leftovers(work)
    else:
        write_json(plan, settings)


def remove_all_leftovers(work: Path) -> None:
    """Remove the partial files of killed processes from a preparation."""
    for folder in work, work / "parts":
        remove_leftovers(folder)


def run(
    preparation: Preparation,
    tokenizer: Tokenizer | str,
    settings: dict[str, Any],
    workers: int,
    progress: Progress,
    measured: Measured,
) -> None:
    """Do the work that is left in FOLDER.unfinished, and write the index last."""
    folder, resumed, times = preparation.folder, any((preparation.folder / "parts").glob("[0-9]*")), [perf_counter()]
    total = sum(provenance(source)["size"] for source in preparation.sources)
    workers = workers if total > preparation.sizes.serial_bytes else 1

    def process(task: str, work: Callable[[Unit], None], suffix: str) -> int:
        """Call `work` on each unit without a file of this suffix; returns the number of all units."""
        done, count = 0, 0

        def advance(unit: Unit) -> None:
            nonlocal done
            done += unit.size
            progress(task, done, total)

        def pending() -> Iterator[Unit]:
            nonlocal count
            for unit in preparation.units():
                count = unit.number + 1
                if preparation.part(unit, suffix).exists():
                    advance(unit)
                else:
                    yield unit

        try:
            run_tasks(work, pending(), workers, advance)
        except BaseException:  # the other workers were killed, perhaps while they wrote
            remove_all_leftovers(folder)
            raise
        return count

    if not (folder / "tokenizer_config.json").exists():  # the last file that Tokenizer.save writes
        if isinstance(tokenizer, str):
            progress("learning the tokenizer", 0, 0)
            texts = passages(preparation.sources, field=preparation.field, encoding=preparation.encoding)
            tokenizer = train_tokenizer(tokenizer, texts)
        tokenizer.save(folder)
    times.append(perf_counter())
    if preparation.cleaning.drops_documents and not (decided := folder / "parts" / "decided.json").exists():
        units = process("inspecting", preparation.inspect, ".npz")
        Verdicts(folder / "parts", units).drop_duplicates(preparation.cleaning.exact, preparation.cleaning.near)
        write_json(decided, {"units": units})
    times.append(perf_counter())
    units = process("encoding", preparation.encode, ".json")
    times.append(perf_counter())
    records = [read_json(folder / "parts" / f"{unit:05}.json") for unit in range(units)]
    index = preparation.index(records, settings)
    if problem := preparation.problem(records, index):
        shutil.rmtree(folder)
        raise UserError(problem)
    write_json(folder / INDEX, index)
    if not resumed:
        learning, inspecting, rest = np.diff(times).tolist()
        own = {task: sum(record["seconds"][task] for record in records) for task in ("encoding", "writing")}
        tasks = {task: rest * seconds / sum(own.values()) for task, seconds in own.items()}  # of all processes
        measured.seconds = {"learning the vocabulary": learning, "inspecting": inspecting, **tasks}
        measured.bytes, measured.encoder = index["report"]["bytes"], preparation.encoder[0]


def check_settings(earlier: Mapping[str, Any], settings: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError if a folder was prepared from other sources or settings."""
    differ = [name for name in {**earlier, **settings} if earlier.get(name) != settings.get(name)]
    if differ:
        raise UserError(
            f"{folder} was prepared from other sources or settings ({', '.join(differ)} differ): give the same again, "
            "or remove the folder to start over"
        )


def digest(tokenizer: Tokenizer) -> str:
    """The SHA-256 of a tokenizer and the names of its control tokens, in hexadecimal."""
    return hashlib.sha256((tokenizer.inner.to_str() + str(tokenizer.names)).encode()).hexdigest()
