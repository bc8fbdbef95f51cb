"""Atomic writes of files and folders, JSON files, and the user's cache."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onward.base.errors import UserError

PART = ".part"  # suffix of the temporary folders in which files are written, or folders removed
NUMBERS = {  # how the numbers of a picture begin
    ".csv": (b"panel,row,column,value\n",),
    ".json": (b'{\n  "title": ', b'{"kind":'),
}


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Return a context with a temporary path, to which a file or a folder is written. The result atomically replaces
    `path` when the context ends without an error.

    The content is flushed to disk first. A folder `path` must not exist yet. A disk error is raised as a UserError, and
    `path` then keeps its content.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", suffix=PART, dir=path.parent, ignore_cleanup_errors=True
        ) as temporary:
            new = Path(temporary) / path.name
            yield new
            for file in [new, *new.rglob("*")] if new.is_dir() else [new]:
                flush(file)
            os.replace(new, path)
            flush(path.parent)
    except OSError as error:
        left = "its former content is kept" if os.path.exists(path) else "no part of it is left"
        raise UserError(f"cannot write {path}: {error.strerror or error}; {left}") from error


def writable_ending(path: Path, *endings: str) -> str:
    """Return the ending of a path to which a page or a picture is about to be written.

    Raises a UserError if it is none of `endings`, or if a .json or .csv file at the path holds anything but the numbers
    of a picture: it may be data or a part of a model.
    """
    if path.suffix not in endings:
        listed = " or ".join(filter(None, (", ".join(endings[:-1]), endings[-1])))
        raise UserError(f"Cannot write {path}: choose a name that ends in {listed}")
    if (starts := NUMBERS.get(path.suffix)) and path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            if not file.read(64).startswith(starts):
                raise UserError(
                    f"Cannot write {path}, because it exists and does not hold the numbers of a picture: choose "
                    "another name, or remove it"
                )
    return path.suffix


def remove_atomically(path: Path) -> None:
    """Remove a folder atomically: it is renamed before its files are deleted, so it never exists under its name with
    files missing."""
    aside = path.with_name(f".{path.name}{PART}")
    os.replace(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove from a folder the temporary folders that `atomic_write` and `remove_atomically` leave if their process is
    killed."""
    for left in folder.glob(f".*{PART}"):
        shutil.rmtree(left, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush a file or folder to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    with atomic_write(path) as new:
        new.write_text(json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, as a dict. Raises a UserError if the file is missing, is not JSON, or does not
    contain an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"there is no {path.name} in {path.parent}: name a folder that holds a model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): restore or write it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object: restore or write it again")
    return value


def check_text(text: str, name: str, instead: str) -> None:
    """Raise a UserError if `text`, the argument called `name`, is the path of an existing file, since the caller has
    probably confused the path with the content. `instead` advises how to pass the content instead, with {!r} for the
    path."""
    if "\n" not in text and os.path.isfile(text):
        raise UserError(f"{name} is {text!r}, the name of a file and not the text in it: {instead.format(text)}")


def cache_folder(name: str) -> Path | None:
    """The folder `name` in the user's cache, which may not exist; None if the cache has no absolute path."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", "")), Path(os.path.expanduser("~/.cache"))
    return next((folder / "onward" / name for folder in caches if folder.is_absolute()), None)
