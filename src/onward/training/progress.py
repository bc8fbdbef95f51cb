"""One line that shows the progress of a run that is trained from Python, where somebody can see it."""

import sys
from time import perf_counter

from onward.training.events import Event, Notice, Rollback
from onward.training.run import Run
from onward.training.trainer import Step
from onward.training.validation import Validation

REFRESH_SECONDS = 0.2


class Progress:
    """Prints events of a run to standard error: steps as one line that is rewritten, other events as lines. Prints
    nothing unless standard error is a terminal or a notebook."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.visible = sys.stderr.isatty() or "ipykernel" in sys.modules
        self.shown, self.width = 0.0, 0

    def __call__(self, event: Event) -> None:
        if not self.visible:
            return
        if isinstance(event, Validation):
            self.write(f"{self.done(event)} | validation loss {event.validation_loss:.3f}", end="\n")
        elif isinstance(event, Notice):
            self.write(event.sentence, end="\n")
        elif isinstance(event, Rollback):
            self.write(f"step {event.failed_step:,} failed ({event.reason}): back to step {event.step:,}", end="\n")
        elif self.run.ended or perf_counter() - self.shown > REFRESH_SECONDS:
            self.shown = perf_counter()
            self.write(self.line(event), end="\n" if self.run.ended else "")

    def line(self, step: Step) -> str:
        """A step in words."""
        speed = step.tokens / step.seconds
        return f"{self.done(step)} | loss {step.loss:.3f} | {speed:,.0f} tokens/s"

    def done(self, event: Step | Validation) -> str:
        """How far the run is."""
        return f"step {event.step:,} of {self.run.steps_in_words}"

    def write(self, line: str, end: str) -> None:
        """Write over the present line."""
        print(f"\r{line:<{self.width}}", end=end, file=sys.stderr, flush=True)
        self.width = 0 if end else len(line)
