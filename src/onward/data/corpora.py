"""Known texts: one that every Python brings along, and well-known ones to fetch. Imports nothing heavy."""

import ast
import hashlib
import http.client
import inspect
import os
import platform
import sysconfig
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from onward.errors import UserError


@dataclass(frozen=True)
class Corpus:
    """Documents with a name, a version and a hash."""

    name: str
    version: str
    sha256: str
    documents: tuple[str, ...]


@dataclass(frozen=True)
class Known:
    """A corpus that can be fetched."""

    url: str
    bytes: int
    sha256: str
    what: str
    license: str


KNOWN = {
    "tinyshakespeare": Known(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        1_115_394,
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        "plays of Shakespeare, 40,000 lines",
        "public domain",
    ),
}
NAMES = ", ".join(["embedded", *KNOWN])


@cache
def embedded() -> Corpus:
    """The documentation inside this Python: the topics of its help, and the docstrings of its standard library.

    Read from the source files with `ast`, without importing them. It differs from one Python version to the next.
    """
    library = Path(sysconfig.get_path("stdlib"))
    texts = [*topics(library / "pydoc_data" / "topics.py"), *docstrings(library)]
    found = dict.fromkeys(text for text in texts if len(text) > 40)
    digest = hashlib.sha256("\0".join(found).encode()).hexdigest()
    return Corpus("embedded", f"Python {platform.python_version()}", digest, tuple(found))


def topics(path: Path) -> Iterator[str]:
    """The texts of `help("TOPIC")`."""
    if path.exists():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict):
                texts = [ast.literal_eval(v) for v in node.values if isinstance(v, ast.Constant | ast.BinOp)]
                yield from (inspect.cleandoc(text) for text in texts if isinstance(text, str))


def docstrings(folder: Path) -> Iterator[str]:
    """The docstrings of all modules, classes and functions in a folder, tests left out."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED)
        for name in sorted(name for name in names if name.endswith(".py")):
            try:
                tree = ast.parse(Path(parent, name).read_text(encoding="utf-8"))
            except (SyntaxError, ValueError, OSError):
                continue
            nodes: list[ast.AST] = [tree]
            for node in nodes:  # grows: statements within statements; expressions hold no docstrings
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield ast.get_docstring(node) or ""
                for part in ("body", "orelse", "handlers", "finalbody", "cases"):
                    inside = getattr(node, part, None)
                    nodes += inside if isinstance(inside, list) else []


SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def home() -> Path:
    """The folder of fetched corpora: $ONWARD_HOME or ~/.cache/onward."""
    return Path(os.environ.get("ONWARD_HOME") or Path.home() / ".cache" / "onward")


def get(name: str, folder: Path | None = None) -> Path:
    """The file of a known corpus, fetched if it is not there yet, its checksum verified.

    An interrupted download goes on where it stopped. A UserError tells that there is no network or another file.
    """
    from onward.fields import nearest

    if name not in KNOWN:
        raise UserError(f"{name!r} is not a corpus that can be fetched: {nearest(name, KNOWN)}")
    known, path = KNOWN[name], (folder or home()) / f"{name}.txt"
    if path.exists() and sha256(path) == known.sha256:
        return path
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        download(known, part, name)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"{name} cannot be fetched from {known.url} ({reason}): try again with a network, or train on the corpus "
            "`embedded`, which needs none"
        ) from None
    if sha256(part) != known.sha256:
        part.unlink()
        raise UserError(f"{known.url} is not the file it was (its checksum differs): try again, or use `embedded`")
    part.replace(path)
    return path


def download(known: Known, part: Path, name: str) -> None:
    """Fetch into `part`, going on behind what is there."""
    from rich.console import Console
    from rich.progress import Progress

    done = part.stat().st_size if part.exists() else 0
    if done >= known.bytes:
        return
    request = urllib.request.Request(known.url, headers={"Range": f"bytes={done}-"} if done else {})
    progress = Progress(console=Console(stderr=True), transient=True)
    with urllib.request.urlopen(request, timeout=30) as answer, progress:
        resumed = answer.status == 206
        task = progress.add_task(name, total=known.bytes, completed=done if resumed else 0)
        with open(part, "ab" if resumed else "wb") as file:
            while block := answer.read(1 << 16):
                file.write(block)
                progress.advance(task, len(block))
    if part.stat().st_size < known.bytes:
        raise ConnectionError("the connection broke; what came is kept")


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
