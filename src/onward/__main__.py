"""The program: `onward`, or `python -m onward`."""

import gc
import os
import signal
import sys

FEW_COLLECTIONS = 100_000  # allocations between garbage collections, which slow imports: that of torch by 0.3 s


def main() -> int:
    """Run the command line `onward` with the arguments of this process; return the exit status. Ctrl-C at any time
    prints one line, not a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a process in the background may ignore it
        signal.signal(signal.SIGINT, end)
    gc.set_threshold(FEW_COLLECTIONS)
    from onward.cli import main as run

    status = run()
    gc.freeze()  # the end of the process leaves the modules of torch to the system: half a second
    return status


def end(*_: object) -> None:
    """End the process at once with status 130; the handler of Ctrl-C, since neither imports nor Python's exit expect a
    KeyboardInterrupt."""
    os.write(2, b"\nonward: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
