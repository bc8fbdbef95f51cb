"""The live display of a run: its figures, a progress bar, and a continuation of the same prompt at each validation."""

import warnings
from collections import deque
from statistics import fmean
from time import perf_counter

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onward.api.language_model import LanguageModel
from onward.base.errors import UserError
from onward.cli.shared.output import console, printable
from onward.generation.engine.engine import Engine
from onward.generation.options import GenerationOptions
from onward.generation.prompts import Prompt
from onward.training.run.events import Event
from onward.training.run.journal import Journal
from onward.training.run.progress import expected_steps, steps_in_words
from onward.training.run.run import Run
from onward.training.step.trainer import Step
from onward.training.step.validation import Validation

SAMPLE_TOKENS = 64
REFRESH_SECONDS = 0.2
SCORES = {"accuracy", "reward", "rollout_share"}  # figures of fine-tuning that are more informative than the loss


class NoSamples(UserWarning):
    """Warns that a run writes no samples, because parts of its decoder cannot generate text."""


class Display:
    """The progress of a run: on a terminal as a picture that is redrawn after steps, otherwise as lines at each
    validation. In a run without held-out data, a line of figures is printed whenever a validation would be due."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.lm = LanguageModel(run.model, run.tokenizer, run.hf)
        prompt = run.config.prompt or run.inputs.opening(run.tokenizer)
        self.tokens: Prompt = prompt  # prompt that the model continues
        self.prompt = prompt if isinstance(prompt, str) else run.tokenizer.decode(prompt)
        self.samples = Journal(run.folder / "samples.jsonl")
        self.losses: deque[float] = deque(maxlen=20)  # losses of the last steps
        self.scores: dict[str, deque[float]] = {}  # scores of the last steps, by name
        self.validation: float | None = None
        self.tokens_per_second = 0.0
        self.sample = Text()
        self.step, self.shown = run.step, 0.0
        self.began, self.first = (
            0.0,
            run.step,
        )  # time and number of the first step shown
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

    def show(self, event: Event) -> None:
        if isinstance(event, Step):
            if not self.began or event.step <= self.first:  # the first step, or a rollback to before it
                self.began, self.first = perf_counter(), event.step
            self.step = event.step
            self.losses.append(event.loss)
            for name in SCORES & event.figures.keys():
                self.scores.setdefault(name, deque(maxlen=20)).append(event.figures[name])
            speed = event.tokens / event.seconds
            self.tokens_per_second = 0.95 * self.tokens_per_second + 0.05 * speed if self.tokens_per_second else speed
        if isinstance(event, Validation):
            self.validation = event.validation_loss
            self.continue_prompt()
        if self.live:
            if perf_counter() - self.shown > REFRESH_SECONDS:
                self.shown = perf_counter()
                self.live.update(self.picture(), refresh=True)
        elif isinstance(event, Validation):
            self.print()
        elif isinstance(event, Step) and self.run.held_out is None and self.run.due(event.step):
            self.print_figures()

    def print(self) -> None:
        self.print_figures()
        if self.sample:
            console.print(Text("  ") + self.sample, soft_wrap=True)

    def print_figures(self) -> None:
        known = {name: value for name, value in self.figures().items() if value}
        console.print(" | ".join(f"{name} {value}" for name, value in known.items()), soft_wrap=True)

    def continue_prompt(self) -> None:
        """Continue the run's prompt and record the text in samples.jsonl. Does nothing if the processes divide the
        model, because each has only a part of it."""
        if self.run.processes.divides:
            return
        with self.run.trainer.averaged():
            text = sample_text(self.lm, self.tokens)
        self.sample = Text(printable(self.prompt), style="bold").append(printable(text), style="not bold")
        self.samples.write({"step": self.run.step, "prompt": self.prompt, "text": text})

    def figures(self) -> dict[str, str]:
        """Return the figures of the run as text by name; "" for a figure that is not yet known."""
        steps, done = expected_steps(self.run), self.step - self.first
        left = (perf_counter() - self.began) / done * (steps - self.step) if done > 0 else 0.0
        return {
            "step": f"{self.step:,} of {steps_in_words(self.run)}",
            "loss": f"{fmean(self.losses):.3f}" if self.losses else "",
            **{name.replace("_", " "): f"{fmean(values):.3f}" for name, values in sorted(self.scores.items())},
            "validation loss": "" if self.validation is None else f"{self.validation:.3f}",
            "tokens/s": f"{self.tokens_per_second:,.0f}" if self.tokens_per_second else "",
            "time left": f"{int(left) // 60}:{int(left) % 60:02}" if done > 0 else "",
        }

    def picture(self) -> RenderableType:
        figures = self.figures()
        table = Table.grid(padding=(0, 3))
        table.add_row(*(Text(name, style="dim") for name in figures))
        table.add_row(*(Text(value or "-", style="bold") for value in figures.values()))
        bar = Table.grid(expand=True)  # in a table, because a bar alone does not end its line
        bar.add_row(ProgressBar(total=expected_steps(self.run), completed=self.step))
        sample = Panel(self.sample, title="the same prompt, continued", title_align="left", height=9)
        # a terminal appends ^C to the last line; on a full line ^C would wrap and move the next picture down
        return Group(table, bar, sample, Text("Ctrl-C saves and stops.", style="dim"))


def sample_text(lm: LanguageModel, prompt: Prompt) -> str:
    """Continue a prompt with the same seed in each call, so that the texts at different steps can be compared. Steps
    are not compiled, because compilation would take longer than generating the texts. If the model's parts cannot
    generate, warn with the reason and return ""."""
    stops, allowed = lm.stop_token_ids, lm.allowed()
    try:
        engine = Engine(lm.model, rows=1, stop_token_ids=stops, allowed=allowed, slide=True, compile_after=None)
    except UserError as error:
        warnings.warn(f"the run writes no samples: {error}", NoSamples, stacklevel=2)
        return ""
    answers = lm.submit(engine, [prompt], GenerationOptions(max_new_tokens=SAMPLE_TOKENS, temperature=0.8, seed=0))
    engine.finish()
    return "".join(answer.finish() for answer in answers.values())
