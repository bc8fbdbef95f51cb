"""Records of tables: the objects in the lines of .jsonl files, and the rows of .parquet files and datasets."""

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.data.formats import (
    SIZES,
    NotText,
    Piece,
    as_text,
    one_line,
    pyarrow,
    read_file,
    reading,
    seekable,
    suffixes,
)
from onward.data.sources import BATCH_ROWS, HUB, dataset, source_files
from onward.errors import UserError

ROWS = "give .jsonl, .parquet or hf://NAME, of which each row is an example"


@dataclass(frozen=True)
class Record:
    """A row of a table."""

    values: Mapping[str, Any]
    place: str  # as in messages: data.jsonl line 3


def read_records(source: str) -> Iterator[Record]:
    """Iterate over the rows of a source: a .jsonl, a .parquet, a folder or glob of them, or `hf://` as for
    `data.sources.documents`.

    Raises a UserError if the source is missing, empty or of another kind, or if a line is not a JSON object.
    """
    if source.startswith(HUB):
        for i, row in enumerate(dataset(source), 1):
            yield Record(row, f"{source} row {i}")
        return
    for path in source_files(source):
        kind, _ = suffixes(path.name)
        if kind not in (".jsonl", ".parquet"):
            raise UserError(f"{path} is no table: {ROWS}")
        yield from (parquet_records if kind == ".parquet" else jsonl_records)(path)


def jsonl_records(path: Path) -> Iterator[Record]:
    """The objects in the lines of a .jsonl file."""
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


def utf8_pieces(path: Path) -> Iterator[Piece]:
    """The pieces of a .jsonl file, which is UTF-8."""
    try:
        yield from read_file(path, str(path), "", "utf-8", SIZES)
    except NotText as error:
        raise UserError(f"{error.what}: JSON is written in UTF-8, so convert it") from None


def parquet_records(path: Path) -> Iterator[Record]:
    """The rows of a .parquet file."""
    arrow = pyarrow(str(path))
    with reading(str(path)), open(path, "rb") as file, seekable(str(path), file) as whole:
        try:
            opened = arrow.parquet.ParquetFile(whole, buffer_size=1 << 20)
            number = 0
            for batch in opened.iter_batches(BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(row, f"{path} row {number}")
        except (arrow.ArrowException, UnicodeDecodeError) as error:
            raise UserError(
                f"{path} cannot be read as .parquet ({one_line(error)}): copy or download it again"
            ) from None
    if not number:
        raise UserError(f"{path} is empty: name a table with rows")
