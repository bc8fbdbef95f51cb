"""The program: `onward`, or `python -m onward`."""

import gc
import os
import signal
import sys

FEW_COLLECTIONS = 100_000  # allocations between garbage collections; Python's default adds 0.3 s to the import of torch


def main() -> int:
    """Run the command line `onward` with the arguments of this process; return the exit status. Ctrl-C at any time
    prints one line, not a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background process may ignore SIGINT
        signal.signal(signal.SIGINT, end)
    gc.set_threshold(FEW_COLLECTIONS)
    from onward.cli import main as run

    status = run()
    gc.freeze()  # skip the collection of torch's modules at exit, which takes half a second
    return status


def end(*_: object) -> None:
    """Handle Ctrl-C: end the process at once with status 130, because imports and Python's exit do not handle a
    KeyboardInterrupt."""
    os.write(2, b"\nonward: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
