"""Checks of the texts of a command, and sentences about them."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from onward.base.errors import UserError
from onward.cli.shared.output import console
from onward.data import corpora
from onward.data.sources import folder_files, is_pipe


def announce(sources: Iterable[str]) -> None:
    """Print that the command waits for text, from a pipe or from a terminal."""
    for source in sources:
        if is_pipe(source):
            console.print(f"reading the pipe {source} until it is closed", markup=False, soft_wrap=True)
        elif source == "-" and sys.stdin.buffer.isatty():
            console.print("reading standard input: type or paste the text, and end it with Ctrl-D")


def check_texts(sources: Sequence[str]) -> None:
    """Raise a UserError for a source that is the folder of a run, and for a last source that was probably meant as the
    folder of a new run."""
    for source in sources:
        if (Path(source) / "run.json").exists():
            raise UserError(
                f"{source} is a run, not a text: --resume {source} continues it, --from {source} starts from its "
                "model, and --out sets the folder of a new run"
            )
    last = sources[-1]
    if len(sources) > 1 and re.fullmatch(r"[\w./-]+", last) and not Path(last).suffix and not known(last):
        raise UserError(f"{last} does not exist: to name the run's folder, write --out {last}; for text, name its file")


def known(source: str) -> bool:
    """Whether a name without suffix is a path, standard input, or a corpus."""
    return os.path.exists(source) or source in ("-", *corpora.BUILT_IN, *corpora.DOWNLOADS)


def skipped_in(source: str, out: Path) -> str:
    """Return a sentence about the paths in the folder `source`, except `out`, that are not read as text; "" if there
    are none."""
    from onward.data.tokens import is_prepared

    if not Path(source).is_dir() or is_prepared(source):
        return ""
    kinds = []
    for reason, paths in sorted(folder_files(Path(source))[1].items()):
        if others := [path for path in paths if path.resolve() != out.resolve()]:
            kinds.append(f"{reason}: {len(others):,}, such as {min(others)}")
    return f"{source}: skipped {'; '.join(kinds)}" if kinds else ""
