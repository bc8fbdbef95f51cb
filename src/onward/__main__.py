"""The program: `onward`, or `python -m onward`."""

import os
import signal
import sys


def main() -> int:
    """Run the command line; return the exit status. Ctrl-C at any time prints one line, not a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in the background
        signal.signal(signal.SIGINT, end)
    from onward.cli import main as run

    return run()


def end(*_: object) -> None:
    """End the process at once, as a signal handler: neither imports nor Python's exit expect a KeyboardInterrupt."""
    os.write(2, b"\nonward: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
