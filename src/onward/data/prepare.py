"""From texts to tokens on disk, in units of work of which each is done once, by whatever process.

While FOLDER is made it is called FOLDER.unfinished, and in its `parts` lies what is known of each unit, so that a
preparation that was stopped goes on from there. A unit becomes a shard: who did what makes no difference. Where
documents may be left out, all are looked at before the first is encoded.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from onward.data.cleaning import GOPHER, Cleaning
from onward.data.corpora import sha256
from onward.data.duplicates import INSIDE, KEPT, PERMUTATIONS, Judged, fingerprint, signature
from onward.data.filters import fault
from onward.data.sources import PIECE, Piece, passages, pieces, provenance
from onward.data.tokens import INDEX, TokenData, encode, is_prepared, load_tokens
from onward.data.workers import spread
from onward.errors import UserError
from onward.files import flush, read_json, remove_leftovers, write_json, written_whole
from onward.text.fast import Encoder, encoder
from onward.text.tokenizer import Tokenizer, train_tokenizer

REASONS = ["", "duplicate", "near_duplicate", *GOPHER]  # why a document is left out, by its verdict
USUAL = Cleaning()
VERSION = 1  # of the format, and of the way in which sources are cut into units
SMALL = 1 << 22  # bytes that are encoded sooner than other processes have started
SAMPLES, SHOWN = 3, 200  # documents in the report for each reason, characters of each


@dataclass(frozen=True)
class Unit:
    """Documents of about PIECE characters together, or a part of a larger one."""

    number: int
    source: int
    pieces: list[Piece]

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
    """What is to be done, and where. Worker processes get a copy of it."""

    sources: Sequence[str]
    folder: Path
    field: str
    encoding: str
    cleaning: Cleaning

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    @cached_property
    def encoder(self) -> Encoder:
        return encoder(self.tokenizer)

    def part(self, unit: Unit, suffix: str) -> Path:
        return self.folder / "parts" / f"{unit.number:05}{suffix}"

    def units(self) -> Iterator[Unit]:
        """All units, in order. A part of a document is a unit of its own."""
        number = 0
        for index, source in enumerate(self.sources):
            held: list[Piece] = []
            size = 0
            for piece in pieces([source], self.field, self.encoding):
                if held and (size + len(piece) > PIECE or not piece.begins or not held[-1].ends):
                    yield Unit(number, index, held)
                    number, held, size = number + 1, [], 0
                held.append(piece)
                size += len(piece)
            yield Unit(number, index, held)
            number += 1

    def documents(self, unit: Unit) -> list[tuple[str, str]]:
        """The documents of a unit, each behind the name of its file."""
        return [(piece.name, text) for piece in unit.pieces for text in piece.documents(self.field)]

    def judge(self, unit: Unit) -> None:
        """Write down what must be known of each document before any is left out; see `data.duplicates`."""
        texts = [text for _, text in self.documents(unit)]
        verdicts = np.full(len(texts), INSIDE, np.uint8)
        if unit.begins:
            verdicts[:] = [REASONS.index(fault(self.cleaning, text)) for text in texts]
        if self.cleaning.near is not None:
            signatures = np.zeros((len(texts), PERMUTATIONS), np.uint32)
            for i in np.flatnonzero(verdicts == KEPT):
                signatures[i] = signature(texts[i])
            with written_whole(self.part(unit, ".npy")) as new:
                np.save(new, signatures)
        hashes = np.array([fingerprint(text) for text in texts], np.uint64)
        with written_whole(self.part(unit, ".npz")) as new:
            np.savez(new, verdicts=verdicts, hashes=hashes)

    def encode(self, unit: Unit) -> None:
        """Write the shard of a unit, if any of it is kept, and then what there is to say about it."""
        documents = self.documents(unit)
        verdicts = np.load(self.part(unit, ".verdicts.npy")) if self.cleaning.judges else np.zeros(len(documents), int)
        if len(verdicts) != len(documents):
            raise UserError(f"{unit.pieces[0].name} has changed while it was read: begin again with what it is now")
        dropped: dict[str, dict[str, Any]] = {}
        for (name, text), verdict in zip(documents, verdicts):
            if verdict != KEPT:
                entry = dropped.setdefault(REASONS[verdict], {"documents": 0, "samples": []})
                entry["documents"] += int(unit.ends)
                if unit.begins and len(entry["samples"]) < SAMPLES:
                    entry["samples"].append({"file": name, "text": text[:SHOWN]})
        kept = [document for document, verdict in zip(documents, verdicts) if verdict == KEPT]
        ids, ends = encode(self.tokenizer, (text for _, text in kept), self.encoder)
        if kept and not unit.ends:
            ids, ends = ids[: len(ids) - (self.tokenizer.eos_id is not None)], ends[:0]
        shard: dict[str, Any] = {"file": f"{unit.number:05}.bin", "tokens": len(ids), "documents": len(ends)}
        for array, suffix, name in (ids, ".bin", "sha256"), (ends, ".ends", "ends_sha256"):
            shard[name] = hashlib.sha256(array.data).hexdigest()
            if len(ids):
                with written_whole((self.folder / shard["file"]).with_suffix(suffix)) as new:
                    array.tofile(new)
        said = {
            "source": unit.source,
            "begins": unit.begins,
            "shard": shard,
            "bytes": sum(len(text.encode()) for _, text in kept),
            "unknown_characters": int(np.count_nonzero(ids == self.tokenizer.unknown_id)),
            "dropped": dropped,
        }
        if kept:
            lengths = np.diff(ends, prepend=np.uint64(0)) if unit.ends else np.array([len(ids)])
            name, text = kept[at := int(lengths.argmax())]
            said["longest"] = {"tokens": int(lengths[at]), "file": name, "text": text[:SHOWN]}
        write_json(self.part(unit, ".json"), said)

    def index(self, units: int, made: dict[str, Any]) -> dict[str, Any]:
        """The index of what was made of all units, with a report."""
        known = [read_json(self.folder / "parts" / f"{unit:05}.json") for unit in range(units)]
        sources = []
        for number, name in enumerate(made["sources"]):
            own = [said for said in known if said["source"] == number]
            shards = [said["shard"] for said in own if said["shard"]["tokens"]]
            counts = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens")}
            counts |= {key: sum(said[key] for said in own) for key in ("bytes", "unknown_characters")}
            sources.append({**made[f"content of {name}"], **counts, "shards": shards})
        report: dict[str, Any] = {
            key: sum(source[key] for source in sources)
            for key in ("documents", "tokens", "bytes", "unknown_characters")
        }
        report["bytes_per_token"] = report["bytes"] / max(1, report["tokens"])
        report["longest"] = long = {"tokens": 0}
        dropped: dict[str, dict[str, Any]] = {}
        for said in known:
            here = said.get("longest", {"tokens": 0})
            long = here if said["begins"] else long | {"tokens": long["tokens"] + here["tokens"]}
            report["longest"] = max(report["longest"], long, key=lambda one: one["tokens"])
            for reason, entry in said["dropped"].items():
                whole = dropped.setdefault(reason, {"documents": 0, "samples": []})
                whole["documents"] += entry["documents"]
                whole["samples"] = (whole["samples"] + entry["samples"])[:SAMPLES]
        report["dropped"] = {reason: dropped[reason] for reason in REASONS if reason in dropped}
        dtype = "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"
        kind = {"version": VERSION, "dtype": dtype, "tokenizer": sha256(self.folder / "tokenizer.json")}
        return kind | {"sources": sources, "report": report, "made": made}


def prepare(
    sources: Sequence[str],
    tokenizer: Tokenizer | str,
    folder: Path,
    *,
    field: str = "text",
    encoding: str = "utf-8",
    cleaning: Cleaning = USUAL,
    workers: int = 0,
    progress: bool = True,
) -> TokenData:
    """Encode texts into a folder of shards, which is there in the end whole or not at all.

    For `sources`, `field` and `encoding` see `documents`; `tokenizer` may be what `train_tokenizer` takes, to be
    learned from the sources; 0 `workers` are one process per core. The result does not depend on their number. Memory
    holds a few pieces of 16 MB for each, however large a file is; a record of a table or a .jsonl is held whole, and a
    document in several pieces is judged by its first.

    What was interrupted goes on, and what is complete is left as it is. A UserError tells what differs if the sources
    or settings are others then, and what is wrong with a source.
    """
    if workers < 0:
        raise UserError(f"workers is {workers}: it is a number of processes, or 0 for one per core")
    folder = Path(folder)
    work = folder.parent / f"{folder.name}.unfinished"
    parts, spec = work / "parts", tokenizer if isinstance(tokenizer, str) else digest(tokenizer)
    made = {"version": VERSION, "sources": list(sources), "tokenizer": spec, "field": field, "encoding": encoding}
    made |= asdict(cleaning) | {f"content of {source}": provenance(source) for source in sources}
    made = json.loads(json.dumps(made))
    if is_prepared(folder) and "-" not in sources:
        compare(read_json(folder / INDEX).get("made", {}), made, folder)
    else:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is there already: choose another folder, or remove it")
        files = [str(parts / "stdin.txt") if source == "-" else source for source in sources]
        job = Preparation(files, work, field, encoding, cleaning)
        begin(work, made)
        try:
            run(job, tokenizer, made, workers, progress)
        except UserError:
            if not any(parts.glob("[0-9]*")):  # nothing that it would be worth going on from
                shutil.rmtree(work, ignore_errors=True)
            raise
        os.replace(work, folder)
        flush(folder.parent)
    shutil.rmtree(folder / "parts", ignore_errors=True)
    return load_tokens(folder)


def begin(work: Path, made: dict[str, Any]) -> None:
    """Make the folder to work in, or make sure that it is for the same and take away what was half-written."""
    plan = work / "parts" / "plan.json"
    if plan.exists():
        compare(read_json(plan), made, work)
        remove_leftovers(work)
        remove_leftovers(plan.parent)
    else:
        write_json(plan, made)
    if "-" in made["sources"] and not (stored := plan.with_name("stdin.txt")).exists():
        with written_whole(stored) as new, open(new, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)


def run(job: Preparation, tokenizer: Tokenizer | str, made: dict[str, Any], workers: int, progress: bool) -> None:
    """Do all the work that is left, and write the index."""
    console = Console(stderr=True)
    total = sum(provenance(source)["size"] for source in job.sources)
    workers = workers if total > SMALL else 1
    with Progress(console=console, transient=True, disable=not (progress and console.is_terminal)) as bars:

        def each(what: str, work: Callable[[Unit], None], suffix: str) -> int:
            """Do one kind of work on the units that lack its part; returns the number of all units."""
            bar, count = bars.add_task(what, total=total or None), 0
            advance = lambda unit: bars.advance(bar, unit.size)

            def left() -> Iterator[Unit]:
                nonlocal count
                for unit in job.units():
                    count = unit.number + 1
                    if job.part(unit, suffix).exists():
                        advance(unit)
                    else:
                        yield unit

            spread(work, left(), workers, advance)
            return count

        if not (job.folder / "tokenizer_config.json").exists():  # the last of its files
            learning = bars.add_task("learning the tokenizer", total=None)
            if isinstance(tokenizer, str):
                texts = passages(job.sources, field=job.field, encoding=job.encoding)
                tokenizer = train_tokenizer(tokenizer, texts)
            tokenizer.save(job.folder)
            bars.remove_task(learning)
        if job.cleaning.judges and not (judged := job.folder / "parts" / "judged.json").exists():
            units = each("looking at all documents", job.judge, ".npz")
            Judged(job.folder / "parts", units).decide(job.cleaning.exact, job.cleaning.near)
            write_json(judged, {"units": units})
        index = job.index(each("encoding", job.encode, ".json"), made)
    trouble = ""
    if not index["report"]["tokens"]:
        left_out = ", ".join(f"{entry['documents']} as {name}" for name, entry in index["report"]["dropped"].items())
        trouble = f"no document is left ({left_out}): choose milder filters"
    if any(provenance(name) != made[f"content of {name}"] for name in made["sources"]):
        trouble = "the sources have changed while they were read: begin again"
    if trouble:
        shutil.rmtree(job.folder)
        raise UserError(trouble)
    write_json(job.folder / INDEX, index)


def compare(known: dict[str, Any], made: dict[str, Any], folder: Path) -> None:
    """A UserError if a folder was made, or begun, from something else."""
    differ = [name for name in known | made if known.get(name) != made.get(name)]
    if differ:
        raise UserError(
            f"{folder} was made from something else ({', '.join(differ)} differ): give what was given then, or remove "
            "it to begin anew"
        )


def digest(tokenizer: Tokenizer) -> str:
    return hashlib.sha256((tokenizer.inner.to_str() + str(tokenizer.names)).encode()).hexdigest()
