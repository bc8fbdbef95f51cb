"""Corpora by name: the documentation of the Python installation, and corpora to download. Importing this module does
not import torch."""

import ast
import hashlib
import http.client
import inspect
import os
import platform
import sysconfig
import urllib.request
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from onward.base.errors import UserError
from onward.base.files import file_sha256
from onward.data.progress import Progress, silent
from onward.data.prose import NewProse, comments


@dataclass(frozen=True)
class Corpus:
    """The documents of a corpus (a collection of texts) in memory, with its version and a checksum."""

    name: str
    version: str
    sha256: str
    documents: tuple[str, ...]


@dataclass(frozen=True)
class Download:
    url: str
    bytes: int
    sha256: str
    content: str
    license: str


DOWNLOADS = {
    "tinyshakespeare": Download(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        1_115_394,
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        "plays of Shakespeare, 40,000 lines",
        "public domain",
    ),
}
HELD_OUT = 0.1008  # held-out fraction of the bytes of `embedded`, as in `onward train embedded` on Python 3.11


@cache
def embedded() -> Corpus:
    """Collect the documentation of this Python (2.2 MB): the topics of `help()` and the docstrings of the standard
    library, without repetitions and texts of at most 40 characters.

    The docstrings are parsed from source files; nothing is imported. The text differs between Python versions.
    """
    library = standard_library()
    texts = [*topics(library / "pydoc_data" / "topics.py"), *docstrings(library)]
    return corpus("embedded", dict.fromkeys(text for text in texts if len(text) > 40))


def corpus(name: str, documents: Iterable[str]) -> Corpus:
    texts = tuple(documents)
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return Corpus(name, f"Python {platform.python_version()}", digest, texts)


@cache
def embedded_train() -> Corpus:
    """The training pages of `embedded`, and prose from comments in the standard library (together 2.7 MB). Comment
    paragraphs that occur in `embedded`, or that share eight words in a row with a held-out page, are dropped."""
    pages, held_out = split_pages()
    prose = NewProse([*pages, *held_out], held_out)
    texts = (prose.of(comment) for _, source in modules(standard_library()) for comment in comments(source))
    return corpus("embedded-train", [*pages, *filter(None, texts)])


@cache
def embedded_validation() -> Corpus:
    """Collect the held-out pages of `embedded`: its last pages, about a tenth of its bytes."""
    return corpus("embedded-validation", split_pages()[1])


def split_pages() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (training documents, held-out documents) of `embedded`; the last fraction HELD_OUT of its bytes is held
    out."""
    documents = embedded().documents
    ends = [*accumulate(len(text.encode()) for text in documents)]
    first = bisect_left(ends, (1 - HELD_OUT) * ends[-1]) + 1
    return documents[:first], documents[first:]


@dataclass(frozen=True)
class BuiltIn:
    collect: Callable[[], Corpus]
    size: str
    content: str


BUILT_IN = {
    "embedded": BuiltIn(
        embedded, "about 2.2 MB", "topics of help() (0.4 MB), docstrings of the standard library (1.8 MB)"
    ),
    "embedded-train": BuiltIn(
        embedded_train, "about 2.7 MB", "embedded without its last tenth, comments of the standard library (0.7 MB)"
    ),
    "embedded-validation": BuiltIn(embedded_validation, "about 0.2 MB", "the last tenth of embedded"),
}
NAMES = ", ".join([*BUILT_IN, *DOWNLOADS])


def topics(path: Path) -> Iterator[str]:
    """Texts of `help("TOPIC")` in pydoc_data/topics.py; none if the file is missing."""
    if path.exists():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict):
                texts = [ast.literal_eval(v) for v in node.values if isinstance(v, ast.Constant | ast.BinOp)]
                yield from (inspect.cleandoc(text) for text in texts if isinstance(text, str))


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def modules(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, source text) of each module below a folder, except tests, installed packages and unreadable
    files."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        for file in sorted(name for name in names if name.endswith(".py")):
            with suppress(ValueError, OSError):
                yield file.removesuffix(".py"), Path(parent, file).read_text(encoding="utf-8")


def parsed_modules(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    for name, source in modules(folder):
        with suppress(SyntaxError, ValueError):
            yield name, ast.parse(source)


def docstrings(folder: Path) -> Iterator[str]:
    """Yield the docstring of each module, class and function below a folder; "" for one without a docstring."""
    for _, tree in parsed_modules(folder):
        nodes: list[ast.AST] = [tree]
        for node in nodes:  # the loop appends nested statements; expressions have no docstrings
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""
            for part in ("body", "orelse", "handlers", "finalbody", "cases"):
                inside = getattr(node, part, None)
                nodes += inside if isinstance(inside, list) else []


SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def cache_folder() -> Path:
    """Folder of downloaded corpora: $ONWARD_HOME, by default ~/.cache/onward."""
    folder = Path(os.environ.get("ONWARD_HOME") or os.path.expanduser("~/.cache/onward"))
    if folder.parts[0] == "~":
        raise UserError("this user has no home folder for downloaded corpora: set ONWARD_HOME to a folder")
    return folder


def get(name: str, folder: Path | None = None, progress: Progress = silent) -> Path:
    """Path of a corpus in DOWNLOADS, downloaded into `folder` (default: `cache_folder()`) if it is missing."""
    from onward.base.fields import nearest

    if name not in DOWNLOADS:
        raise UserError(f"{name!r} is not a corpus that can be downloaded: {nearest(name, DOWNLOADS)}")
    return fetch(DOWNLOADS[name], (folder or cache_folder()) / f"{name}.txt", progress)


def fetch(wanted: Download, path: Path, progress: Progress = silent) -> Path:
    """Download a corpus to `path` unless this file has the right checksum; continue an interrupted download."""
    if path.exists() and file_sha256(path) == wanted.sha256:
        return path
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        download(wanted, part, lambda done: progress(f"downloading {path.stem}", done, wanted.bytes))
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"{path.stem} cannot be downloaded from {wanted.url} ({reason}): try again with a network, or train on the "
            "corpus `embedded`, which needs no network"
        ) from None
    if file_sha256(part) != wanted.sha256:
        part.unlink()
        raise UserError(f"{wanted.url} has changed (its checksum differs): try again, or use the corpus `embedded`")
    part.replace(path)
    return path


def download(wanted: Download, part: Path, progress: Callable[[int], None]) -> None:
    """Append the rest of the corpus to `part`, or write all of it if the server cannot resume; `progress` is called
    with its size in bytes."""
    done = part.stat().st_size if part.exists() else 0
    if done >= wanted.bytes:
        return
    request = urllib.request.Request(wanted.url, headers={"Range": f"bytes={done}-"} if done else {})
    with urllib.request.urlopen(request, timeout=30) as answer:
        resumed = answer.status == 206
        with open(part, "ab" if resumed else "wb") as file:
            while block := answer.read(1 << 16):
                file.write(block)
                progress(file.tell())
    if part.stat().st_size < wanted.bytes:
        raise ConnectionError("the connection was closed early; the received bytes are kept")
