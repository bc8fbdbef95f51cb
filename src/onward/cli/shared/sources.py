"""Checks of the texts of a command, and sentences about them."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from onward.cli.shared.output import console
from onward.data import corpora
from onward.data.sources import folder_files, is_pipe
from onward.errors import UserError


def announce(sources: Iterable[str]) -> None:
    """Print on standard error which sources of text the command waits for: pipes, and standard input on a terminal."""
    for source in sources:
        if is_pipe(source):
            console.print(f"reading the pipe {source} until it is closed", markup=False, soft_wrap=True)
        elif source == "-" and sys.stdin.buffer.isatty():
            console.print("reading standard input: type or paste the text, and end it with Ctrl-D")


def check_texts(sources: Sequence[str]) -> None:
    """Raise a UserError if a source of texts is the folder of a run, or a word that is probably meant as the name of a
    new run."""
    for source in sources:
        if (Path(source) / "run.json").exists():
            raise UserError(
                f"{source} is a run, not a text: --resume {source} goes on with it, --from {source} begins from its "
                "model, and --out names the folder of a new run"
            )
    last = sources[-1]
    if len(sources) > 1 and re.fullmatch(r"[\w./-]+", last) and not Path(last).suffix and not known(last):
        raise UserError(f"{last} does not exist: for the folder of the run, --out {last}; for a text, name its file")


def known(source: str) -> bool:
    """Return whether a source of texts whose name has no suffix is a path, standard input, or the name of a corpus."""
    return os.path.exists(source) or source in ("-", "embedded", *corpora.DOWNLOADS)


def skipped_in(source: str, out: Path) -> str:
    """Return a sentence on the files in a folder of texts (`source`) that are not read as texts, with an example of
    each kind; "" if there are none, or if the source is no folder. The folder `out` is not counted."""
    if not Path(source).is_dir():
        return ""
    kinds = []
    for reason, paths in sorted(folder_files(Path(source))[1].items()):
        if others := [path for path in paths if path.resolve() != out.resolve()]:
            kinds.append(f"{reason}: {len(others):,}, such as {min(others)}")
    return f"{source}: skipped {'; '.join(kinds)}" if kinds else ""
