"""Shows the progress of a run that was started from Python in one line of a terminal or a notebook."""

import sys
from collections.abc import Callable
from time import perf_counter

from onward.base.notebook import DisplayedLine, in_notebook
from onward.training.run.events import Event, Notice, Rollback
from onward.training.run.run import Run
from onward.training.step.trainer import Step
from onward.training.step.validation import Validation

REFRESH_SECONDS = 0.2


def progress(run: Run) -> Callable[[Event], object]:
    return NotebookProgress(run) if in_notebook() else Progress(run)


class Progress:
    """Prints events of a run to standard error: steps as one line that is rewritten, other events as separate lines.
    Prints nothing if standard error is not a terminal."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.visible = sys.stderr.isatty()
        self.shown, self.width = 0.0, 0

    def __call__(self, event: Event) -> None:
        if not self.visible:
            return
        if isinstance(event, Notice | Rollback):
            self.write(sentence(event), end="\n")
        elif isinstance(event, Validation):
            self.write(line(self.run, event), end="\n")
        elif self.run.ended or perf_counter() - self.shown > REFRESH_SECONDS:
            self.shown = perf_counter()
            self.write(line(self.run, event), end="\n" if self.run.ended else "")

    def write(self, line: str, end: str) -> None:
        """Print a line in place of the previous one; `end` is "" (the next line replaces it) or a line break."""
        print(f"\r{line:<{self.width}}", end=end, file=sys.stderr, flush=True)
        self.width = 0 if end else len(line)


class NotebookProgress:
    """Shows the events of a run in a notebook: steps and validations as one changing line of the cell's output, other
    events as separate lines."""

    def __init__(self, run: Run) -> None:
        self.run, self.displayed, self.shown = run, DisplayedLine(), 0.0
        self.parts = {Step: "", Validation: ""}  # parts of the line: the last step and the last validation

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice | Rollback):
            print(sentence(event))
        elif isinstance(event, Validation) or self.run.ended or perf_counter() - self.shown > REFRESH_SECONDS:
            self.shown = perf_counter()
            self.parts[type(event)] = loss(event) if isinstance(event, Validation) else line(self.run, event)
            self.displayed.show(" | ".join(filter(None, self.parts.values())))


def expected_steps(run: Run) -> int:
    """Return the total number of steps of a run, for displays. If a time limit has not fixed this number yet, return an
    estimate in the first process, and the number of completed steps in the other processes."""
    left = run.budget.steps_left(run.config.validation_interval) if run.budget else 0
    return run.config.steps or run.step + left


def steps_in_words(run: Run) -> str:
    return f"{'' if run.config.steps else 'about '}{expected_steps(run):,}"


def line(run: Run, event: Step | Validation) -> str:
    speed = f" | {event.tokens / event.seconds:,.0f} tokens/s" if isinstance(event, Step) else ""
    return f"step {event.step:,} of {steps_in_words(run)} | {loss(event)}{speed}"


def loss(event: Step | Validation) -> str:
    return f"loss {event.loss:.3f}" if isinstance(event, Step) else f"validation loss {event.validation_loss:.3f}"


def sentence(event: Notice | Rollback) -> str:
    if isinstance(event, Notice):
        return event.sentence
    return f"step {event.failed_step:,} failed ({event.reason}): back to step {event.step:,}"
