"""A training run: a folder that holds its configuration, its data, its metrics, and a model that gets better.

runs/mybook/
  run.json              the RunConfig, with steps, precision and the way of experts fixed
  inputs.json           what it is made from, with checksums
  data/, held_out/      the tokens, where they were not prepared before
  config.json, model.safetensors, tokenizer.json    the model of the newest save, as a Hugging Face folder
  checkpoints/step-N/   the last saves and the best, each with all that is needed to go on
  metrics.jsonl         a line per step and per validation
  skipped.jsonl         the windows that were left out since they did harm
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import Any

import torch

from onward import fields
from onward.checkpoint.training import Saver, State, load_state, reload, restore, saves, step_of
from onward.data.windows import Batch, ValidationWindows, Windows, take
from onward.device import choose_device
from onward.errors import UserError
from onward.files import read_json, write_json
from onward.model.compiling import compile_blocks
from onward.model.decoder import Decoder
from onward.model.recompute import recompute_blocks
from onward.text.tokenizer import Tokenizer
from onward.training.average import Average
from onward.training.balance import Balance
from onward.training.calibration import calibrated, choose_experts
from onward.training.checks import Check, start_checks
from onward.training.config import RunConfig
from onward.training.health import Spikes, matrices, measure, update_ratio
from onward.training.inputs import Inputs, check_inputs, open_inputs, prepare_inputs
from onward.training.journal import Journal
from onward.training.lock import in_use, is_running, run_lock
from onward.training.loop import Step, StepConfig, fit, mean_loss
from onward.training.loss import Objective
from onward.training.optimizer import optimizers
from onward.training.processes import Processes
from onward.training.schedule import lr_factor
from onward.training.track import Trackers

IN_A_ROW = 3  # so many failed_steps without a good save between them end a run


@dataclass(frozen=True)
class Validation:
    """How well the model predicts text it was not trained on, and how its insides are."""

    step: int
    validation_loss: float  # nats per token
    tokens: int
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollback:
    """A step failed: the run went back to its newest save and skips the windows of that step."""

    step: int  # of the save
    failed_step: int
    reason: str
    skipped: tuple[int, int]  # half-open range of window numbers that are left out from now on


@dataclass(frozen=True)
class Notice:
    """Something to tell that is no result, such as a save that failed."""

    step: int
    sentence: str


Event = Step | Validation | Rollback | Notice


class Run:
    """A run that can go on: `start` or `resume` makes it, `train` trains it."""

    def __init__(self, config: RunConfig, model: Decoder, tokenizer: Tokenizer, inputs: Inputs, hf: Any) -> None:
        c = self.config = config
        self.model, self.tokenizer, self.inputs, self.hf = model, tokenizer, inputs, hf
        self.folder, self.device = Path(c.out), model.device
        self.rate = c.peak_learning_rate(model.config.d_model)
        self.optimizers = optimizers(model, c.optimizer, self.rate, c.weight_decay, (c.beta1, c.beta2))
        self.average = Average(model, c.average) if c.average else None
        self.windows = Windows(inputs.train, model.config.context_length, c.seed, weights=c.weights, pack=c.pack)
        self.spikes, self.processes = Spikes(c.spike), Processes.join()
        if c.accumulation < self.processes.count:
            raise UserError(f"accumulation is {c.accumulation} for {self.processes.count} processes: give each a batch")
        self.step_config = StepConfig(
            objective=Objective(c.z_loss, c.label_smoothing, c.loss_chunk),
            clip=c.clip,
            precision=c.precision,
            check_step=self.spikes.check_step,
            balance=Balance(model, c.balance_loss, c.balance_bias),
            processes=self.processes,
        )
        self.scaler = self.step_config.scaler(self.device)
        self.saver, self.metrics = Saver(self.folder, c.keep), Journal(self.folder / "metrics.jsonl")
        self.step, self.seconds, self.position = 0, 0.0, 0
        self.skipped: list[tuple[int, int]] = []  # windows left out, as half-open ranges of their numbers
        self.failed_steps: list[int] = []  # the steps that went wrong since the last good save behind them
        self.messages: list[str] = []  # sentences for the user, told as soon as training goes on
        choose_experts(model, c.experts)
        if c.compile:
            compile_blocks(model)
        if c.recompute:  # outside of what is compiled
            recompute_blocks(model)

    @classmethod
    def start(cls, config: RunConfig) -> "Run":
        """Prepare the data, the tokenizer and a fresh model, and fix what was left open: steps, precision, experts."""
        folder, processes = Path(config.out), Processes.join()
        config.decoder(1)  # what cannot be is noticed before any text is read
        if processes.rank:
            return cls.resume(folder)
        if saves(folder):
            raise UserError(f"{folder} holds a run already: --resume {quote(str(folder))}, or choose another --out")
        new = not folder.exists()
        try:
            device = choose_device(config.device)
            tokenizer = prepare_inputs(config, folder)
            inputs = open_inputs(config, folder)
            torch.manual_seed(config.seed)
            model = Decoder(config.decoder(tokenizer.vocab_size)).to(device)
            hf = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.end_ids or None}
            trial = lambda config: cls(config, deepcopy(model), tokenizer, inputs, hf).alone()
            run = cls(calibrated(config, trial), model, tokenizer, inputs, hf)
            write_json(folder / "run.json", fields.plain(run.config))
            run.save()
            run.saver.finish()
            if failure := run.saver.pop_failure():
                raise failure
        except UserError:
            if new and not (folder / "data.unfinished").exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise
        processes.wait()
        return run

    @classmethod
    def resume(cls, folder: Path) -> "Run":
        """Go on from the newest save of a run that is whole, exactly as if it had never stopped."""
        processes = Processes.join()
        if processes.rank:
            processes.wait()  # the first has made or mended the folder
        config = replace(fields.build(RunConfig, read_json(folder / "run.json"), "run.json"), out=str(folder))
        if (folder / "result.json").exists():
            raise UserError(f"{folder} has finished its {config.steps:,} steps: start another with --out")
        if not processes.rank and is_running(folder):
            raise in_use(folder)
        tokenizer = Tokenizer.load(folder)
        check_inputs(folder, config.decoder(tokenizer.vocab_size))
        state = load_state(folder, choose_device(config.device))
        inputs = open_inputs(config, folder, "size" if processes.rank else "sha256")
        run = cls(config, state.model, tokenizer, inputs, read_json(folder / "config.json"))
        run.load_state(state)
        if not processes.rank:
            for name in "metrics.jsonl", "samples.jsonl", "skipped.jsonl":
                Journal(folder / name).cut(run.done)
            processes.wait()
        return run

    def done(self, row: dict[str, Any]) -> bool:
        """Whether a line is about what lies behind: at the step of a save only the step itself, which has a loss."""
        return row["step"] < self.step or (row["step"] == self.step and "loss" in row)

    def alone(self) -> "Run":
        """This run without other processes, to be timed."""
        self.step_config = replace(self.step_config, processes=Processes())
        return self

    def load_state(self, state: State) -> None:
        """Be where a save was made."""
        restore(state.tensors, self.model, self.optimizers)
        progress = state.progress
        self.step, self.position, self.seconds = (progress[name] for name in ("step", "position", "seconds"))
        self.skipped = [(first, end) for first, end in progress["skipped"]]
        self.failed_steps, self.spikes.state = progress["failed_steps"], progress["losses"]
        self.scaler.load_state_dict(progress["scaler"])
        if self.average:
            self.average.updates = progress["averaged"]
            for name, tensor in self.average.tensors.items():
                tensor.copy_(state.tensors[f"average/{name}"])
        known, now = progress["config"], fields.plain(self.config)
        edited = [name for name in now if now[name] != known.get(name) and name != "out"]
        self.messages += state.messages + [f"run.json has been edited: {', '.join(edited)} from here on"] * bool(edited)

    def train(
        self, stop: Callable[[], bool] = lambda: False, save: Callable[[], bool] = lambda: False
    ) -> Iterator[Event]:
        """Train to the last step, or until `stop()`; metrics and saves are written, the events yielded as they come.

        `save()` asks for a save after the present step. A UserError if the last step cannot be saved, or if training
        goes wrong three times in a row.
        """
        began = perf_counter() - self.seconds
        with nullcontext() if self.processes.rank else run_lock(self.folder), self.recorder() as record:
            yield from self.validations(record)  # a save comes before it, and the run may have stopped between
            for step in fit(self.model, self.source(), self.optimizers, self.rate_at, self.step_config, self.scaler):
                if self.due(step.step) and not step.failure and not self.finite():
                    step = replace(step, failure="the weights are not finite")
                if step.failure:
                    yield record(self.rollback(step))
                    yield from self.validations(record)
                    continue
                yield record(self.advance(step, perf_counter() - began))
                recovered = bool(self.failed_steps) and self.step >= self.failed_steps[-1]
                stopping, saving = map(bool, self.processes.sum([stop(), save()]))
                if stopping or saving or recovered or self.due():
                    self.save()
                yield from self.validations(record)
                yield from (Notice(self.step, sentence) for sentence in self.pop_messages())
                if stopping:
                    break
        self.finish()

    def validations(self, record: Callable[[Event], Event]) -> Iterator[Event]:
        """Validate where the present step is one to do so."""
        for validation in self.validate() if self.step and self.due() else ():
            if not self.processes.rank:
                self.saver.best(self.step, validation.validation_loss)
            yield record(validation)

    @contextmanager
    def recorder(self) -> Iterator[Callable[[Event], Event]]:
        """A function that writes an event down and gives it back."""
        trackers = Trackers(() if self.processes.rank else self.config.track, self.folder, fields.plain(self.config))

        def record(event: Event) -> Event:
            if not self.processes.rank:
                row = asdict(event)
                row |= row.pop("figures", {})
                if not row.get("failure"):
                    row.pop("failure", None)
                row |= {key: None for key, value in row.items() if isinstance(value, float) and not isfinite(value)}
                self.metrics.write(row)
                trackers.write(row)
            return event

        try:
            yield record
        finally:
            trackers.close()

    def source(self) -> Iterator[tuple[int, list[Batch]]]:
        """The number of each step to come, and this process's share of its windows."""
        c = self.config
        while self.step < c.steps:
            self.numbers, self.next_position = take(self.position, c.batch_size * c.accumulation, self.skipped)
            self.before = [m.clone() for m in matrices(self.model)] if self.due(self.step + 1) else []
            yield self.step, self.batches(self.numbers)

    def batches(self, numbers: Sequence[int]) -> list[Batch]:
        """The windows with these numbers, as this process's batches."""
        size = self.config.batch_size
        firsts = range(0, len(numbers), size)[self.processes.rank :: self.processes.count]
        return [self.windows.read(numbers[i : i + size]).to(self.device) for i in firsts]

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        c = self.config
        return self.rate * lr_factor(c.schedule, step, max(1, c.steps), c.warmup, c.min_lr_ratio, c.decay)

    def advance(self, step: Step, seconds: float) -> Step:
        """Take note of a step that was made."""
        self.step, self.position, self.seconds = step.step, self.next_position, seconds
        self.spikes.note(step.loss)
        if self.average:
            self.average.update()
        return replace(step, figures=step.figures | self.updates())

    def rollback(self, step: Step) -> Rollback:
        """Go back to the newest good save, to leave out the windows of a step that went wrong."""
        windows = self.numbers[0], self.next_position
        failed_steps, skipped, at = [*self.failed_steps, step.step], [*self.skipped, windows], step.step
        if len(failed_steps) >= IN_A_ROW:
            raise UserError(
                f"step {at} went wrong, the {len(failed_steps)}rd time in a row ({step.failure}), not the windows: "
                "start again with a lower learning rate, more warm-up or a smaller --clip"
            )
        self.saver.finish()
        if self.processes.rank:
            self.processes.wait()  # the first puts aside what is damaged
        self.load_state(reload(self.folder, self.model, self.optimizers))
        if not self.processes.rank:
            self.processes.wait()
        self.failed_steps, self.skipped = failed_steps, skipped
        event = Rollback(self.step, at, step.failure, windows)
        if not self.processes.rank:
            self.metrics.cut(lambda row: self.done(row) or (row["step"] == self.step and "reason" in row))
            Journal(self.folder / "samples.jsonl").cut(lambda row: row["step"] < max(1, self.step))
            text = self.tokenizer.decode(self.windows.read([windows[0]]).tokens[0].tolist())
            Journal(self.folder / "skipped.jsonl").write(asdict(event) | {"first_window": text})
        return event

    def checks(self) -> Iterator[Check]:
        """What must be right before training is worth its time, looked at one by one."""
        batch, inputs = self.batches(range(self.config.batch_size * self.config.accumulation))[0], self.inputs
        return start_checks(self.model, batch, inputs.train, inputs.validation, fresh=self.step == 0)

    def due(self, step: int | None = None) -> bool:
        """Whether a step, by default the present one, is one to save and validate at."""
        step, every = step or self.step, self.config.validation_interval
        return step % every == 0 or step == self.config.steps

    def updates(self) -> dict[str, float]:
        """How large the last update was, where that is looked at."""
        return {"update_ratio": update_ratio(self.before, self.model)} if self.before else {}

    def validate(self) -> Iterator[Validation]:
        """The loss over evenly spread windows of the validation text, if there is one, and the state of the insides."""
        if self.inputs.validation is None:
            return
        windows = ValidationWindows(self.inputs.validation, self.model.config.context_length, self.config.pack)
        apart = max(1, len(windows) * self.model.config.context_length // self.config.validation_tokens)
        chosen, size = range(0, len(windows), apart), self.config.batch_size
        with self.shown():
            batches = (windows.read(chosen[i : i + size]).to(self.device) for i in range(0, len(chosen), size))
            loss, tokens = mean_loss(self.model, batches, self.config.precision)
            figures = measure(self.model, windows.read(chosen[:size]).to(self.device))
        yield Validation(self.step, loss, tokens, figures)

    def shown(self) -> AbstractContextManager[object]:
        """The model as it is used: inside, it has the averaged weights where the run averages them."""
        return self.average.shown() if self.average else nullcontext()

    def save(self) -> None:
        """Save the state, so that the run can be resumed from here; it is written while training goes on.

        Weights that are not finite are never saved.
        """
        if self.failed_steps and self.step >= self.failed_steps[-1]:
            self.failed_steps = []
        if self.processes.rank or not self.finite():
            return
        progress = {
            "config": fields.plain(self.config),
            "step": self.step,
            "position": self.position,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "failed_steps": self.failed_steps,
            "losses": self.spikes.state,
            "scaler": self.scaler.state_dict(),
            "averaged": self.average.updates if self.average else 0,
        }
        averaged = self.average.tensors if self.average else None
        self.saver.save(self.model, self.optimizers, progress, self.hf, averaged)

    def finite(self) -> bool:
        """Whether all weights are numbers."""
        return all(bool(p.isfinite().all()) for p in self.model.parameters())

    def finish(self) -> None:
        """Wait for the last save, and try again if it failed; a UserError if it cannot be written."""
        self.saver.finish()
        if not self.processes.rank and not self.saved():
            self.save()
            self.saver.finish()
            if not self.saved():
                failure = self.saver.pop_failure()
                raise (
                    UserError(f"{failure}; mend that, and go on with --resume {self.folder}")
                    if failure
                    else UserError(f"the weights of step {self.step} are not finite: nothing is saved")
                )
        self.processes.wait()

    def saved(self) -> bool:
        """Whether the present step is on disk."""
        return any(step_of(path) == self.step for path in saves(self.folder))

    def pop_messages(self) -> list[str]:
        """What there is to tell the user since the last call."""
        failure = self.saver.pop_failure()
        found = [*self.messages, *([f"{failure}; training goes on, and the next save tries again"] if failure else [])]
        self.messages = []
        return found
