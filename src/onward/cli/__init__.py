"""The command `onward`: one module of `commands/` per sub-command, imported when called; `shared/` has common code."""

import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from time import sleep
from types import ModuleType

from onward.cli.overview import COMMANDS, IN_PROCESSES, SYNONYMS, show
from onward.cli.shared import streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit status: 0, 1 if a check failed, 2 for an error that the user can correct, or
    128 plus the number of the signal that ended the command (130 for Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    streams.prepare()
    with streams.handled_interrupts():
        try:
            status = dispatch(words)
            sys.stdout.flush()  # so that an output error is reported here and not when Python exits
            return status
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") == "0":  # one rank reports it
                streams.complain("\nonward: interrupted")
            return 130
        except BrokenPipeError:  # the reader of the output has exited
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (RuntimeError, MemoryError, ValueError, OSError) as error:
            message = sentence(error, words)
            if message is None:
                raise
            streams.complain(f"onward: {message}")
            streams.drop_output()
            return 2


def sentence(error: Exception, words: Sequence[str]) -> str | None:
    """The message for an exception; None if it is a bug. `words` are the words of the command line; the message names
    options as typed."""
    from onward.base.errors import UserError
    from onward.cli.shared.mistakes import with_flags
    from onward.cli.shared.output import printable, shortened

    if isinstance(error, UserError):
        return shortened(printable(with_flags(str(error), words)))
    if isinstance(error, OSError):
        return shortened(printable(f"{error.filename or 'standard output or a file'}: {error.strerror or error}"))
    if isinstance(error, MemoryError) or re.search("allocate memory|out of memory", str(error)):
        less = "smaller sizes or a smaller --batch-size" if "train" in words else "a smaller model, or shorter texts"
        return f"there is not enough memory: choose {less}"
    return None


def module_of(name: str) -> ModuleType:
    """Import the module of a command, with its `Options` and its `main`."""
    return importlib.import_module(f"{__name__}.commands.{name}")


def dispatch(words: list[str]) -> int:
    """Run the command that the first word names, or print the list of commands."""
    check_utf8(words)
    if not words or words[0] in ("-h", "--help") or words == ["help"]:
        show()
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"onward {version('onward')}")
        return 0
    if words[0] not in COMMANDS:
        from onward.base.errors import UserError
        from onward.base.fields import nearest
        from onward.learn.glossary import where_to_look

        if meant := SYNONYMS.get(words[0].lower()):
            advice = f"did you mean {meant}?"
        else:
            advice = where_to_look(" ".join(words)) or nearest(words[0], COMMANDS)
        raise UserError(f"{words[0]!r} is not a command: {advice}")
    if words[0] not in IN_PROCESSES and (count := os.environ.get("WORLD_SIZE", "1")) != "1":
        from onward.base.errors import UserError

        if os.environ.get("RANK", "0") != "0":  # one rank prints the message, unless this process ends first
            sleep(10)
            return 2
        raise UserError(f"Cannot run onward {words[0]} in {count} processes: call it without torchrun")
    with warnings.catch_warnings():
        warnings.showwarning = partial(show_warning, warnings.showwarning)
        try:
            status: int | None = module_of(words[0]).main(words[1:])
        except SystemExit:  # after --help
            sys.stdout.flush()
            raise
    return status or 0


def check_utf8(words: Sequence[str]) -> None:
    """Refuse arguments that are not UTF-8 text; a path that exists may have any name."""
    for number, word in enumerate(words, 1):
        try:
            word.encode()
        except UnicodeEncodeError as error:
            if not os.path.exists(word):
                from onward.base.errors import UserError

                start = len(word[: error.start].encode())
                raise UserError(f"argument {number} is not UTF-8 text (byte {start:,}): convert it") from None


def show_warning(usual: Callable[..., None], message: object, category: type[Warning], *where: object) -> None:
    """Print a warning of Onward on one line, and a warning of another library with `usual`, Python's own function."""
    if category.__module__.startswith("onward."):
        print(f"onward: {message}", file=sys.stderr)
    else:
        usual(message, category, *where)
