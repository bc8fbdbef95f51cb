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
    """Print on standard error that the command waits for text from each pipe among `sources`, or from standard input if
    that is a terminal."""
    for source in sources:
        if is_pipe(source):
            console.print(f"reading the pipe {source} until it is closed", markup=False, soft_wrap=True)
        elif source == "-" and sys.stdin.buffer.isatty():
            console.print("reading standard input: type or paste the text, and end it with Ctrl-D")


def check_texts(sources: Sequence[str]) -> None:
    """Raise a UserError if one of `sources`, the files or folders of text to train on, is the folder of a run, or if
    the last one does not exist and was probably meant as the name of a new run."""
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
    """Return whether `source`, a name without suffix, is an existing path, standard input ("-"), or the name of a
    corpus, a public data set of text."""
    return os.path.exists(source) or source in ("-", *corpora.BUILT_IN, *corpora.DOWNLOADS)


def skipped_in(source: str, out: Path) -> str:
    """Return a sentence on the files in the folder `source` that are not read as text, with an example for each reason;
    "" if there are none, or if `source` is no folder or holds prepared tokens. The path `out`, a run's own folder, is
    not counted."""
    from onward.data.tokens import is_prepared

    if not Path(source).is_dir() or is_prepared(source):
        return ""
    kinds = []
    for reason, paths in sorted(folder_files(Path(source))[1].items()):
        if others := [path for path in paths if path.resolve() != out.resolve()]:
            kinds.append(f"{reason}: {len(others):,}, such as {min(others)}")
    return f"{source}: skipped {'; '.join(kinds)}" if kinds else ""
