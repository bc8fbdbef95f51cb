"""A training run as one watches it: where it is, how well it does, and the same prompt continued again and again."""

from collections import deque
from statistics import fmean
from time import perf_counter

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onward.cli.output import console, printable
from onward.language_model import LanguageModel
from onward.training.journal import Journal
from onward.training.run import Event, Run
from onward.training.trainer import Step
from onward.training.validation import Validation

SAMPLE_TOKENS = 64


class Display:
    """Shows the events of a run; on a terminal as a picture that changes, elsewhere line by line."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.lm = LanguageModel(run.model, run.tokenizer, run.hf)
        self.prompt = run.config.prompt or self.opening()
        self.samples = Journal(run.folder / "samples.jsonl")
        self.losses: deque[float] = deque(maxlen=20)  # of the last steps
        self.validation: float | None = None
        self.rate = 0.0  # tokens per second
        self.sample = Text()
        self.step, self.shown = run.step, 0.0
        self.began, self.first = perf_counter(), run.step
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "Display":
        if self.live:
            self.live.start()
        if self.run.step == 0:
            self.continue_prompt()
            if not self.live:
                self.print()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.update(self.picture(), refresh=True)
            self.live.stop()

    def opening(self) -> str:
        """The first words of the validation text."""
        held, train = self.run.inputs.validation, self.run.inputs.train
        tokens = train[0] if held is None else held
        words = self.run.tokenizer.decode(tokens[:64].tolist()).split()
        return " ".join(words[:4])

    def show(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, Step):
            self.step = event.step
            self.losses.append(event.loss)
            rate = event.tokens / event.seconds
            self.rate = rate if not self.rate else 0.95 * self.rate + 0.05 * rate
        if isinstance(event, Validation):
            self.validation = event.validation_loss
            self.continue_prompt()
        if self.live:
            if perf_counter() - self.shown > 0.2:
                self.shown = perf_counter()
                self.live.update(self.picture(), refresh=True)
        elif isinstance(event, Validation):
            self.print()

    def print(self) -> None:
        """Where the run is, as lines."""
        console.print(" | ".join(f"{name} {value}" for name, value in self.figures().items()), soft_wrap=True)
        console.print(Text("  ") + self.sample, soft_wrap=True)

    def continue_prompt(self) -> None:
        """Let the model write on from the same prompt with the same draws, and keep what it wrote."""
        with self.run.averaged():
            text = self.lm.generate(self.prompt, SAMPLE_TOKENS, slide=True, temperature=0.8, seed=0)
        self.sample = Text(printable(self.prompt), style="bold").append(printable(text), style="not bold")
        self.samples.write({"step": self.run.step, "prompt": self.prompt, "text": text})

    def figures(self) -> dict[str, str]:
        """What to read off, as text."""
        steps = self.run.config.steps
        done = self.step - self.first
        left = (perf_counter() - self.began) / done * (steps - self.step) if done else 0.0
        return {
            "step": f"{self.step:,} of {steps:,}",
            "loss": f"{fmean(self.losses):.3f}" if self.losses else "-",
            "validation loss": "-" if self.validation is None else f"{self.validation:.3f}",
            "tokens/s": f"{self.rate:,.0f}",
            "time left": f"{int(left) // 60}:{int(left) % 60:02}",
        }

    def picture(self) -> RenderableType:
        figures = self.figures()
        table = Table.grid(padding=(0, 3))
        table.add_row(*(Text(name, style="dim") for name in figures))
        table.add_row(*(Text(value, style="bold") for value in figures.values()))
        bar = Table.grid(expand=True)  # a bar by itself does not end its line
        bar.add_row(ProgressBar(total=self.run.config.steps, completed=self.step))
        return Group(table, bar, Panel(self.sample, title="the same prompt, continued", title_align="left", height=9))
