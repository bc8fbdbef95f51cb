"""Files that are there whole or not at all."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onward.errors import UserError

PART = ".part"  # how the names of folders end in which something is being written, or removed


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes `path`'s place, flushed, only if nothing went wrong.

    Works for a file and for a folder (which must not exist yet). A full disk is a UserError; `path` stays as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", suffix=PART, dir=path.parent, ignore_cleanup_errors=True
        ) as beside:
            new = Path(beside) / path.name
            yield new
            for file in [new, *new.rglob("*")] if new.is_dir() else [new]:
                flush(file)
            os.replace(new, path)
            flush(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; what was there is kept") from error


def remove_whole(path: Path) -> None:
    """Remove a folder at once: nobody ever finds a part of it."""
    aside = path.with_name(f".{path.name}{PART}")
    os.replace(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes had not finished to write, or to remove, in a folder."""
    for left in folder.glob(f".*{PART}"):
        shutil.rmtree(left, ignore_errors=True)


def flush(path: Path) -> None:
    """Have the disk keep what was written to a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all."""
    with written_whole(path) as new:
        new.write_text(json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file; a UserError if it is missing or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"there is no {path.name} in {path.parent}: name a folder that holds a model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): restore or write it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no table: restore or write it again")
    return value
