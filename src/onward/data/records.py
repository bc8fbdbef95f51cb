"""Records of tables: the objects in .jsonl and .json files, and the rows of .csv and .parquet files and of datasets."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.base.errors import UserError
from onward.data.formats import (
    SIZES,
    NotText,
    SourcePiece,
    as_text,
    decompressed,
    one_line,
    pyarrow,
    read_file,
    reading,
    seekable,
    suffixes,
)
from onward.data.reading import Reading
from onward.data.sources import BATCH_ROWS, HUB, dataset, source_files

ROWS = "give .jsonl, .json, .csv, .parquet or hf://NAME, with one example per row"
AS_WRITTEN = Reading(raw=True)
MOST_JSON = 1 << 30  # maximum number of bytes of a .json file, which is read into memory whole
csv.field_size_limit(1 << 26)


@dataclass(frozen=True)
class Record:
    """A row of a table: its values by column."""

    values: Mapping[str, Any]
    place: str  # location for messages, such as data.jsonl line 3
    source: str = ""  # the source as the user named it: a file, a folder, a glob or a dataset


def read_records(source: str) -> Iterator[Record]:
    """Rows of a .jsonl, .json, .csv or .parquet file, of a folder or glob of them, or of an `hf://` dataset."""
    if source.startswith(HUB):
        for i, row in enumerate(dataset(source), 1):
            yield Record({name: without_nulls(value) for name, value in row.items()}, f"{source} row {i}")
        return
    for path in source_files(source):
        kind, _ = suffixes(path.name)
        if kind not in READERS:
            raise UserError(f"{path} is not a table: {ROWS}")
        yield from READERS[kind](path)


def jsonl_records(path: Path) -> Iterator[Record]:
    for piece in utf8_pieces(path):
        for number, line in enumerate(io.BytesIO(piece.text), piece.line):
            if not line.strip():
                continue
            place = f"{path} line {number}"
            try:
                value = json.loads(as_text(line))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place} is not JSON ({error}): correct or remove the line") from None
            if not isinstance(value, dict):
                raise UserError(f"{place} is {type(value).__name__}, not an object: write it as {{...}}")
            yield Record(value, place)


def utf8_pieces(path: Path) -> Iterator[SourcePiece]:
    try:
        yield from read_file(path, str(path), AS_WRITTEN, SIZES)
    except NotText as error:
        raise UserError(f"{error.what}: JSON is written in UTF-8, so convert it") from None


def parquet_records(path: Path) -> Iterator[Record]:
    arrow = pyarrow(str(path))
    with reading(str(path)), open(path, "rb") as file, seekable(str(path), file) as table:
        try:
            opened = arrow.parquet.ParquetFile(table, buffer_size=1 << 20)
            number = 0
            for batch in opened.iter_batches(BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield Record({name: without_nulls(value) for name, value in row.items()}, f"{path} row {number}")
        except (arrow.ArrowException, UnicodeDecodeError) as error:
            raise UserError(
                f"{path} cannot be read as .parquet ({one_line(error)}): copy or download it again"
            ) from None
    if not number:
        raise UserError(f"{path} is empty: name a table with rows")


def without_nulls(value: Any) -> Any:
    # Arrow adds nulls to nested tables so that all have the same keys
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def json_records(path: Path) -> Iterator[Record]:
    with reading(str(path)), open(path, "rb") as file:
        text = decompressed(str(path), file).read(MOST_JSON + 1)
    if len(text) > MOST_JSON:
        raise UserError(f"{path} has more than {MOST_JSON:,} bytes: write its objects as the lines of a .jsonl")
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): correct it") from None
    if not isinstance(rows, list):
        arrays = [name for name, value in rows.items() if isinstance(value, list)] if isinstance(rows, dict) else []
        where = f" (its examples may be in {arrays[0]!r})" if arrays else ""
        raise UserError(f"{path} is {type(rows).__name__}, not an array of objects{where}: write it as [{{...}}, ...]")
    if not rows:
        raise UserError(f"{path} is empty: name a table with rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{path} row {number} is {type(row).__name__}, not an object: write it as {{...}}")
        yield Record(row, f"{path} row {number}")


def csv_records(path: Path) -> Iterator[Record]:
    """Rows of a .csv whose first line names the columns. Empty cells are left out; JSON lists and objects, and numbers
    in `label` and `margin`, are parsed."""
    with reading(str(path)), open(path, "rb") as file:
        lines = io.TextIOWrapper(decompressed(str(path), file), "utf-8-sig", newline="")
        rows, number = csv.reader(lines), 0
        try:
            names = next(rows, [])
            if len({*names}) < len(names) or not all(names):
                raise UserError(f"{path} line 1 does not name its columns: give each column its own name")
            for row in rows:
                if len(row) != len(names):
                    where = f"{path} line {rows.line_num}"
                    cells = f"{len(row)} cells under {len(names)} columns"
                    raise UserError(f"{where} has {cells}: quote cells that contain commas or line breaks")
                number += 1
                values = {name: cell(name, value) for name, value in zip(names, row) if value}
                yield Record(values, f"{path} line {rows.line_num}")
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read as .csv after line {rows.line_num} ({error}): correct it") from None
    if not number:
        raise UserError(f"{path} is empty: name a table with rows")


def cell(column: str, text: str) -> Any:
    number = column in ("label", "margin")
    if number or text[0] in "[{":
        try:
            return json.loads(text.lower() if number else text)
        except (ValueError, RecursionError):
            return text
    return text


READERS = {".jsonl": jsonl_records, ".json": json_records, ".csv": csv_records, ".parquet": parquet_records}
