"""Store the results of an evaluation's requests in a file, so that a repeated evaluation continues where the first one
ended."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from onward.base.alone import ALONE, Alone
from onward.base.errors import UserError
from onward.compiled.fingerprint import fingerprint
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer

LARGEST = 1 << 26  # maximum number of bytes in a file
FOLDER = 1 << 28  # maximum number of bytes in the folder; beyond this size, the least recently used files are deleted
ENDING = ".jsonl"
PACKAGES = "onward", "torch", "tokenizers"  # packages that affect the results
T = TypeVar("T")


class NotKept(UserWarning):
    """Warning that results cannot be stored on disk."""


class Kept:
    """A store of the results of an evaluation (scores, answers, grades), keyed by a hash of the request, in memory and,
    with a `file`, on disk, so that a repeated evaluation reuses them.

    A request is everything besides the model on which a result depends: its kind, token ids or a text, and options. A
    line of the file is a JSON list of hash and result; other lines, such as the incomplete last line of a killed
    process, are skipped. Several processes may append to one file.

    The processes `replicas` of one evaluation have the same results in memory, and the first process of each replica
    appends the replica's results to its file.
    """

    def __init__(self, file: Path | None = None, replicas: Alone = ALONE) -> None:
        self.results: dict[str, Any] = dict(lines(file)) if file else {}
        self.replicas = replicas
        if file:
            self.unite(file.name)
        self.before = frozenset(self.results)  # keys of results of earlier evaluations
        self.added: list[tuple[str, Any]] = []  # results since the last call of `divide`
        self.file, self.reused, self.descriptor = file, 0, -1
        if file:
            try:
                file.parent.mkdir(0o700, parents=True, exist_ok=True)
                shrink(file)
                self.descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
                os.utime(file)
                self.room = LARGEST - os.fstat(self.descriptor).st_size
                os.write(self.descriptor, b"\n")  # ends an incomplete line of a killed process
            except OSError as error:
                self.give_up(error)

    def get(self, kind: str, *request: Any) -> Any:
        """Return the stored result of a request, or None. The elements of the request, such as "score", context and
        continuation, are separate arguments, `kind` first."""
        key = key_of(kind, request)
        self.reused += key in self.before
        return self.results.get(key)

    def add(self, results: list[tuple[tuple[Any, ...], Any]]) -> None:
        """Store results, given as pairs (request, result), where a request is (kind, ...) as for `get`."""
        new = [(key_of(request[0], request[1:]), result) for request, result in results]
        self.results.update(new)
        self.added += new
        data = "".join(json.dumps(line) + "\n" for line in new).encode()
        if self.descriptor >= 0 and self.replicas.leads and len(data) <= self.room:
            try:
                os.write(self.descriptor, data)
                self.room -= len(data)
            except OSError as error:
                self.give_up(error)

    def unite(self, name: str) -> None:
        """Merge the results that the processes have read from their files, if these differ."""
        keys = hashlib.sha256(repr(sorted(self.results)).encode()).hexdigest()
        if len({*self.replicas.together(f"answers for {name}", lambda: keys)}) > 1:
            for results in self.replicas.together(f"all answers for {name}", lambda: self.results):
                self.results |= results

    def divide(self, name: str, compute: Callable[[], None]) -> None:
        """Call `compute`, which adds a share of the results, in each process, and merge the results of all."""

        def own() -> list[tuple[str, Any]]:
            self.added = []
            compute()
            return self.added

        for results in self.replicas.together(name, own):
            self.results.update(results)

    def give_up(self, error: OSError) -> None:
        self.close()
        warnings.warn(NotKept(f"answers are not kept in {self.file} ({error.strerror})"), stacklevel=3)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def key_of(kind: str, request: tuple[Any, ...]) -> str:
    # without the name of the task, so that another task or number of examples computes only new requests
    return hashlib.sha256(repr((kind, *request)).encode(errors="replace")).hexdigest()[:32]


def whole(results: Sequence[T | None]) -> list[T]:
    """Check results that several processes have computed; a result is None if the processes got different questions."""
    if None in results:
        raise UserError("the ranks ask different questions: give all of them the same files and versions")
    return [one for one in results if one is not None]


def kept_for(model: Decoder, tokenizer: Tokenizer, folder: Path, replicas: Alone = ALONE) -> Kept:
    """The store of a model's results in `folder`, named by a hash of everything on which results depend besides the
    requests: weights, configuration, tokenizer, kind of device, and versions. A model with hooks or edits gets a store
    that is only in memory."""
    weights = fingerprint(model)
    if weights is None:
        return Kept(replicas=replicas)
    facts = (weights, repr(model.config), tokenizer.inner.to_str(), tokenizer.end_ids, model.device.type, versions())
    return Kept(folder / (hashlib.sha256(repr(facts).encode()).hexdigest()[:32] + ENDING), replicas)


def versions() -> list[str]:
    installed = []
    for package in PACKAGES:
        try:
            installed.append(version(package))
        except PackageNotFoundError:
            installed.append("")
    return installed


def lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (hash of the request, result) of each valid line; nothing if the file cannot be read."""
    try:
        with open(file, "rb") as stream:
            data = stream.read(2 * LARGEST)
    except OSError:
        return
    for line in data.splitlines():
        try:
            key, result = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        if isinstance(key, str):
            yield key, result


def shrink(file: Path) -> None:
    """Delete the least recently used files next to `file` until they take at most FOLDER bytes."""
    others = sorted((one for one in file.parent.glob(f"*{ENDING}") if one != file), key=lambda one: one.stat().st_mtime)
    size = sum(one.stat().st_size for one in others)
    while size > FOLDER:
        oldest = others.pop(0)
        size -= oldest.stat().st_size
        oldest.unlink(missing_ok=True)
