"""Standard streams that are closed or accept only ASCII, and Ctrl-C while modules are imported."""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from onward.base.errors import UserError


class Closed(io.RawIOBase):
    """A raw stream that replaces a closed standard stream: reading or writing raises a UserError."""

    def __init__(self, name: str) -> None:
        self.error = f"{name} is closed: connect it to a terminal, a file or a pipe"

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, _: Any) -> int:
        raise UserError(self.error)

    def write(self, _: Any) -> int:
        raise UserError(self.error)


class ClosedInput(io.TextIOWrapper):
    """Text stream that replaces a closed standard input: reading raises a UserError."""

    def __init__(self) -> None:
        super().__init__(io.BufferedReader(Closed("standard input")), encoding="utf-8")


def prepare() -> None:
    """Replace closed standard streams, escape characters that the output's encoding lacks, and read piped input as
    UTF-8."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError as error:
            if error.errno == errno.EBADF:  # otherwise the next opened file would become a standard stream
                os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = ClosedInput()
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(Closed("standard output")), encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def complain(message: str) -> None:
    with suppress(OSError):
        print(message, file=sys.stderr)


def drop_output() -> None:
    """Replace an output that cannot be written, because Python would fail again when it flushes the output at exit."""
    try:
        sys.stdout.flush()
    except (OSError, UserError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def interrupted(_: int, frame: FrameType | None) -> None:
    """The handler of Ctrl-C. During an import it ends the process at once: libraries expect no exception there."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"\nonward: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


@contextmanager
def handled_interrupts() -> Iterator[None]:
    """Handle Ctrl-C with `interrupted` inside the context, unless Ctrl-C is ignored."""
    before = signal.getsignal(signal.SIGINT)
    try:
        handled = callable(before) and signal.signal(signal.SIGINT, interrupted)
    except ValueError:  # not in the main thread
        handled = None
    try:
        yield
    finally:
        if handled:
            signal.signal(signal.SIGINT, before)
