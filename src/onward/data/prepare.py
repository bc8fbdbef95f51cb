"""Encode texts into token shards on disk, in units of work that are distributed over processes.

Each unit becomes one shard, so the result does not depend on the number of processes. The work happens in
FOLDER.unfinished, whose subfolder `parts` holds the results of each unit; an interrupted preparation continues from
them. If documents can be dropped, there are two passes: the first inspects all documents, the second encodes.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from onward.base.errors import UserError
from onward.base.files import flush, read_json, remove_leftovers, write_json
from onward.base.workers import run_tasks
from onward.data.cleaning import Cleaning
from onward.data.duplicates import Verdicts
from onward.data.formats import SIZES, PieceSizes
from onward.data.preparation import VERSION, Preparation, WorkUnit
from onward.data.progress import Measured, Progress, silent
from onward.data.reading import READING, Reading
from onward.data.sources import (
    ExtractedText,
    Source,
    check_sources,
    download_corpora,
    is_stream,
    passages,
    provenance,
    stored_streams,
)
from onward.data.tokens import INDEX, TokenData, is_prepared, load_tokens
from onward.text.tokenizer import Tokenizer
from onward.text.training import train_tokenizer

EXACT = Cleaning()  # drops only exact duplicates


@dataclass(frozen=True)
class MachinePart:
    """The units that one of several machines prepares: every `of`-th unit, beginning with unit `number - 1`."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> "MachinePart":
        """Parse "3/16", the third of 16 parts."""
        match = re.fullmatch("([0-9]{1,5})/([0-9]{1,5})", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"part is {text!r}: give its number, from 1, and the number of parts, such as 3/16")
        return cls(int(match[1]), int(match[2]))

    def has(self, unit: int) -> bool:
        return unit % self.of == self.number - 1


ALL_UNITS = MachinePart()


def prepare(
    sources: Sequence[Source],
    tokenizer: Tokenizer | str,
    folder: Path,
    *,
    reading: Reading = READING,
    cleaning: Cleaning = EXACT,
    workers: int = 0,
    progress: Progress = silent,
    measured: Measured | None = None,
    sizes: PieceSizes = SIZES,
) -> TokenData:
    """Encode texts into a folder of token shards, and return them memory-mapped.

    For `sources` and `reading` see `documents`. A `tokenizer` given as text (see `train_tokenizer`) is learned from the
    sources. `workers` is the number of processes (0: one per core); the result does not depend on it. Each process
    holds a few pieces of `sizes.piece_chars` characters in memory; rows of tables, lines of .jsonl files and files
    whose text is extracted are not split. Filters see only the first piece of a document in several pieces. `progress`
    is called with the description of the running task, the bytes done, and the bytes in total; `measured` is filled at
    the end, unless the preparation was resumed.

    The folder appears when all shards are complete. An interrupted preparation continues if the same arguments are
    given again, and a complete folder is returned unchanged, unless one of its sources was a stream. Raises UserError
    if a source cannot be read, or if the folder was prepared from other sources or settings.
    """
    if workers < 0:
        raise UserError(f"workers is {workers}: give a number of processes, or 0 for one per core")
    check_sources(sources, reading)
    download_corpora(sources, progress)
    folder = Path(folder)
    work = folder.parent / f"{folder.name}.unfinished"
    settings = settings_of(sources, tokenizer, reading, cleaning)
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
                preparation = Preparation(files, work, reading, cleaning, sizes)
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


def settings_of(
    sources: Sequence[Source], tokenizer: Tokenizer | str, reading: Reading, cleaning: Cleaning
) -> dict[str, Any]:
    """The settings that an existing folder must have been prepared with."""
    return {
        "version": VERSION,
        "sources": list(map(str, sources)),
        "tokenizer": tokenizer if isinstance(tokenizer, str) else digest(tokenizer),
        **asdict(reading),
        **asdict(cleaning),
    }


def with_content(settings: dict[str, Any], sources: Sequence[Source]) -> dict[str, Any]:
    return json.loads(json.dumps(settings | {f"content of {source}": provenance(source) for source in sources}))


def open_work_folder(work: Path, settings: dict[str, Any]) -> None:
    """Create FOLDER.unfinished; if it exists, check its settings and remove half-written files."""
    plan = work / "parts" / "plan.json"
    if plan.exists():
        check_settings(read_json(plan), settings, work)
        remove_all_leftovers(work)
    else:
        write_json(plan, settings)


def remove_all_leftovers(work: Path) -> None:
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
    """Encode the remaining units, write data.json and fill `measured`."""
    folder, resumed, times = preparation.folder, any((preparation.folder / "parts").glob("[0-9]*")), [perf_counter()]
    process = partial(process_units, preparation, workers, progress)
    if not (folder / "tokenizer_config.json").exists():  # the last file that Tokenizer.save writes
        if isinstance(tokenizer, str):
            progress("learning the tokenizer", 0, 0)
            # from all texts, including the validation text
            texts = passages(preparation.sources, preparation.reading)
            with warnings.catch_warnings():  # the index contains these warnings, which are shown at the end
                warnings.simplefilter("ignore", ExtractedText)
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
    for sentence in index["report"]["extracted"].values():
        warnings.warn(sentence, ExtractedText, stacklevel=1)
    if not resumed:
        learning, inspecting, rest = np.diff(times).tolist()
        own = {task: sum(record["seconds"][task] for record in records) for task in ("encoding", "writing")}
        # elapsed time, divided in proportion to the processes' times
        tasks = {task: rest * seconds / sum(own.values()) for task, seconds in own.items()}
        measured.seconds = {"learning the vocabulary": learning, "inspecting": inspecting, **tasks}
        measured.bytes, measured.encoder = index["report"]["bytes"], preparation.encoder[0]


def process_units(
    preparation: Preparation,
    workers: int,
    progress: Progress,
    task: str,
    work: Callable[[WorkUnit], None],
    suffix: str,
    part: MachinePart = ALL_UNITS,
) -> int:
    """Call `work` on each unit of `part` without a result (parts/NUMBER + `suffix`), in `workers` processes (0: one per
    core) or, if the sources are small, in one. Returns the total number of units, including those of other parts."""
    total = sum(provenance(source)["size"] for source in preparation.sources)
    done, count = 0, 0

    def advance(unit: WorkUnit) -> None:
        nonlocal done
        done += unit.size
        progress(task, done, total)

    def pending() -> Iterator[WorkUnit]:
        nonlocal count
        for unit in preparation.units():
            count = unit.number + 1
            if preparation.part(unit, suffix).exists() or not part.has(unit.number):
                advance(unit)
            else:
                yield unit

    try:
        run_tasks(work, pending(), workers if total > preparation.sizes.serial_bytes else 1, advance)
    except BaseException:  # the other workers were killed, possibly while writing
        remove_all_leftovers(preparation.folder)
        raise
    return count


def check_settings(earlier: Mapping[str, Any], settings: Mapping[str, Any], folder: Path) -> None:
    differ = [name for name in {**earlier, **settings} if earlier.get(name) != settings.get(name)]
    if differ:
        raise UserError(
            f"{folder} was prepared from other sources or settings ({', '.join(differ)} differ): use the original "
            "sources and settings, or remove the folder to start over"
        )


def digest(tokenizer: Tokenizer) -> str:
    return hashlib.sha256((tokenizer.inner.to_str() + str(tokenizer.names)).encode()).hexdigest()
