"""The program: `onward`, or `python -m onward`."""

import os
import signal
import sys


def main() -> int:
    """Run the command line; return the exit status. From its first line to Python's end, Ctrl-C is one line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in the background
        signal.signal(signal.SIGINT, end)
    from onward.cli import main as run

    return run()


def end(*_: object) -> None:
    """End at once: neither imports nor the end of Python expect a KeyboardInterrupt."""
    os.write(2, b"\nonward: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
