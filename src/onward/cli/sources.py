"""What commands say about the texts they are given."""

import sys
from collections.abc import Iterable
from pathlib import Path

from onward.cli.output import console
from onward.data.sources import folder_files, is_pipe


def announce(sources: Iterable[str]) -> None:
    """Say which of the sources the command now waits for: pipes, and standard input on a terminal."""
    for source in sources:
        if is_pipe(source):
            console.print(f"reading the pipe {source} until it is closed", markup=False, soft_wrap=True)
        elif source == "-" and sys.stdin.buffer.isatty():
            console.print("reading standard input: type or paste the text, and end it with Ctrl-D")


def skipped_in(source: str, out: Path) -> str:
    """What is skipped in a source that is a folder, except `out`, with an example of each kind; "" if nothing is."""
    if not Path(source).is_dir():
        return ""
    kinds = []
    for reason, paths in sorted(folder_files(Path(source))[1].items()):
        if others := [path for path in paths if path.resolve() != out.resolve()]:
            kinds.append(f"{reason}: {len(others):,}, such as {min(others)}")
    return f"{source}: skipped {'; '.join(kinds)}" if kinds else ""
