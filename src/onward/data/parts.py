"""Prepare texts on several machines: each encodes a part of the units into a folder OUT.part-3-of-16, and the parts
are joined to the folder that one machine would have written.

A machine cannot know which of its documents are duplicates of another machine's documents. Each part therefore contains
all documents that pass the filters, with their hashes and signatures; joining the parts finds duplicates and removes
their tokens.
"""

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onward.base import fields
from onward.base.errors import UserError
from onward.base.files import atomic_write, file_sha256, flush, read_json, write_json
from onward.base.workers import available_cores
from onward.data.cleaning import Cleaning
from onward.data.duplicates import CONTINUED, KEPT, Verdicts, write_array
from onward.data.encoding import id_dtype
from onward.data.formats import SIZES, PieceSizes
from onward.data.preparation import Preparation, WorkUnit
from onward.data.prepare import (
    EXACT,
    MachinePart,
    check_settings,
    open_work_folder,
    process_units,
    run,
    settings_of,
    with_content,
)
from onward.data.progress import Measured, Progress, silent
from onward.data.reading import READING, Reading
from onward.data.sources import Source, check_sources, download_corpora, is_stream
from onward.data.tokens import TokenData, load_tokens
from onward.text.tokenizer import Tokenizer
from onward.text.training import train_tokenizer

PART = "part.json"  # written last
TOKENIZER = "tokenizer*.json"  # the files of a tokenizer


def part_folder(folder: Path, part: MachinePart) -> Path:
    return folder.with_name(f"{folder.name}.part-{part.number}-of-{part.of}")


def prepare_part(
    sources: Sequence[Source],
    tokenizer: Tokenizer | str,
    folder: Path,
    part: MachinePart,
    *,
    reading: Reading = READING,
    cleaning: Cleaning = EXACT,
    workers: int = 0,
    progress: Progress = silent,
    sizes: PieceSizes = SIZES,
) -> Path:
    """Encode one machine's share of a preparation, and return its folder. The arguments are those of `prepare`;
    `folder` is the folder to which the parts will be joined. An interrupted part continues if the same arguments are
    given again."""
    check_sources(sources, reading)
    if streams := [source for source in sources if is_stream(source)]:
        raise UserError(
            f"Cannot prepare parts of {streams[0]}, because a stream can be read only once: prepare it on one machine"
        )
    if isinstance(tokenizer, str) and (tokenizer == "char" or tokenizer.startswith("bpe:")):
        raise UserError(
            f"Cannot learn the tokenizer {tokenizer!r} from one part of the texts: train it with onward tokenizer "
            "train, and give its folder"
        )
    download_corpora(sources, progress)
    target = part_folder(folder, part)
    work = target.with_name(f"{target.name}.unfinished")
    settings = with_content(settings_of(sources, tokenizer, reading, cleaning), sources)
    if (target / PART).exists():
        check_settings(read_json(target / PART)["settings"], settings, target)
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already: choose another folder, or remove it")
    open_work_folder(work, settings)
    if not (work / "tokenizer_config.json").exists():
        (train_tokenizer(tokenizer, []) if isinstance(tokenizer, str) else tokenizer).save(work)
    preparation = Preparation(sources, work, reading, cleaning, sizes)
    process = partial(process_units, preparation, workers or available_cores(), progress, part=part)
    if cleaning.drops_documents:
        process("inspecting", partial(inspect, preparation), ".verdicts.npy")
    units = process("encoding", preparation.encode, ".json")
    facts = {"settings": settings, "units": units, "sizes": asdict(sizes)}
    facts["tokenizer"] = file_sha256(work / "tokenizer.json")
    write_json(work / PART, facts)
    os.replace(work, target)
    flush(target.parent)
    return target


def inspect(preparation: Preparation, unit: WorkUnit) -> None:
    preparation.inspect(unit)
    with np.load(preparation.part(unit, ".npz")) as arrays:
        verdicts = arrays["verdicts"]
    write_array(preparation.part(unit, ".verdicts.npy"), np.where(verdicts == CONTINUED, KEPT, verdicts))


def join_parts(folder: Path, *, workers: int = 0, progress: Progress = silent) -> TokenData:
    """Check the parts of a preparation and join them to `folder`, with the same content as after preparation on one
    machine. The sources are read again to find the units of work, but not encoded."""
    parts, facts = parts_of(folder)
    settings, units = facts["settings"], facts["units"]
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already: choose another folder, or remove it")
    sources = settings["sources"]
    work = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(work, ignore_errors=True)
    open_work_folder(work, settings)
    for path in parts[0].glob(TOKENIZER):
        shutil.copyfile(path, work / path.name)
    cleaning = fields.build(Cleaning, {name: settings[name] for name in asdict(EXACT)})
    reading = fields.build(Reading, {name: settings[name] for name in asdict(READING)})
    preparation = Preparation(sources, work, reading, cleaning, PieceSizes(**facts["sizes"]))
    for number in range(units):
        progress("checking", number, units)
        collect(parts[number % len(parts)], work, number)
    if cleaning.drops_documents:
        before = [np.load(work / "parts" / f"{number:05}.verdicts.npy") for number in range(units)]
        Verdicts(work / "parts", units).drop_duplicates(cleaning.exact, cleaning.near)
        for number, verdicts in enumerate(before):
            if not np.array_equal(verdicts, np.load(work / "parts" / f"{number:05}.verdicts.npy")):
                reopen(work, number, verdicts == KEPT, np.dtype(id_dtype(preparation.tokenizer)))
        write_json(work / "parts" / "decided.json", {"units": units})
    run(preparation, preparation.tokenizer, settings, workers, progress, Measured())
    os.replace(work, folder)
    flush(folder.parent)
    shutil.rmtree(folder / "parts")
    return load_tokens(folder)


def parts_of(folder: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the folders of all parts, in order, and the content of the first part's part.json."""
    pattern = re.compile(re.escape(folder.name) + r"\.part-(\d{1,5})-of-(\d{1,5})")
    names = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
    numbers = {(int(match[1]), int(match[2])) for match in map(pattern.fullmatch, names) if match}
    if not numbers:
        raise UserError(
            f"{folder} has no parts to join: prepare them with onward data prepare --part 1/2 --out {folder}"
        )
    if len(counts := sorted({of for _, of in numbers})) > 1:
        raise UserError(
            f"Cannot join {folder}, because its parts come from preparations on {' and '.join(map(str, counts))} "
            "machines: remove the wrong parts"
        )
    paths = [part_folder(folder, MachinePart(number, counts[0])) for number in range(1, counts[0] + 1)]
    if missing := [path.name for path in paths if not (path / PART).exists()]:
        raise UserError(
            f"Cannot join {folder}, because of missing or incomplete parts ({', '.join(missing[:5])} of {counts[0]} "
            "parts): prepare them first"
        )
    first, *others = [read_json(path / PART) for path in paths]
    for path, other in zip(paths[1:], others):
        check_settings(first["settings"], other["settings"], path)
        if any(first[fact] != other[fact] for fact in ("units", "sizes", "tokenizer")):
            raise UserError(
                f"Cannot join {path} to {paths[0].name}, because their tokenizers or texts differ: prepare it again"
            )
    return paths, first


def collect(part: Path, work: Path, number: int) -> None:
    """Link or copy the files of a unit of work from `part` to `work`, and check the checksums of its shard."""
    record = read_json(part / "parts" / f"{number:05}.json")
    shard = record["shard"]
    files = [(f"parts/{path.name}", "") for path in (part / "parts").glob(f"{number:05}.*")]
    if shard["tokens"]:
        files += [(f"{number:05}.bin", shard["sha256"]), (f"{number:05}.ends", shard["ends_sha256"])]
    for name, checksum in files:
        if not (part / name).is_file() or (checksum and file_sha256(part / name) != checksum):
            raise UserError(f"{part / name} is missing or has changed since it was written: prepare that part again")
        try:
            os.link(part / name, work / name)
        except OSError:  # another file system
            shutil.copyfile(part / name, work / name)


def reopen(work: Path, number: int, kept: np.ndarray, dtype: np.dtype[Any]) -> None:
    """Move a unit's tokens to a .whole.npz file, from which `Preparation.encode` writes them again, without duplicates.
    `kept` (N,): whether each document of the unit was encoded."""
    ids, ends = (
        np.fromfile(path, kind) if (path := work / f"{number:05}{suffix}").exists() else np.empty(0, kind)
        for suffix, kind in ((".bin", dtype), (".ends", np.dtype(np.uint64)))
    )
    with atomic_write(work / "parts" / f"{number:05}.whole.npz") as new:
        np.savez(new, ids=ids, ends=ends, kept=kept)
    for name in f"{number:05}.bin", f"{number:05}.ends", f"parts/{number:05}.json":
        (work / name).unlink(missing_ok=True)
