"""Signals as requests to save or to stop a run."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.text import Text

Say = Callable[[str | Text], None]  # prints a sentence, in the first process only


class Requests:
    """Signals as requests to a run: SIGINT, SIGTERM and SIGHUP to save and stop, SIGUSR1 to save and continue. After
    `interrupts` SIGINTs, a further one raises KeyboardInterrupt."""

    def __init__(self, say: Say, interrupts: int) -> None:
        self.say, self.interrupts = say, interrupts
        self.signal, self.saving = 0, False

    def note(self, number: int, _: object) -> None:
        """Record the signal `number`; the handler passed to `signal.signal`."""
        if number == signal.SIGUSR1:
            self.saving = True
            return
        if number == signal.SIGINT:
            if not self.interrupts:
                raise KeyboardInterrupt
            if self.signal != number:
                self.say("stopping after this step; press Ctrl-C again to stop at once")
            self.interrupts -= 1
        self.signal = number

    def stop(self) -> bool:
        return self.signal > 0

    def save(self) -> bool:
        """Return whether a signal has asked the run to save and continue since the last call."""
        wanted, self.saving = self.saving, False
        return wanted


@contextmanager
def signals(requests: Requests) -> Iterator[Requests]:
    """Record signals in `requests` inside the context."""
    before = {
        number: signal.signal(number, requests.note)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
