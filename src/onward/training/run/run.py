"""A training run: a folder that holds its configuration, its data, its metrics, and the model that it trains.

runs/mybook/
  run.json              the RunConfig, with steps, device, precision and the backend of experts fixed
  inputs.json           the token folders it trains on, the tokenizer and the model, with checksums
  data/, held_out/      the tokens, where they were not prepared before
  config.json, model.safetensors, tokenizer.json    the model of the newest save, as a Hugging Face folder
  checkpoints/step-N/   the last saves and the best, each with everything needed to go on
  *.jsonl               its events, see events.py
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import Any

import torch

from onward import fields
from onward.arguments import checked
from onward.checkpoint.peft.bases import check_base, is_adapter
from onward.checkpoint.saves import PROGRESS, SavedState, Saver, newest_state, saves, step_of
from onward.data.progress import Progress, silent
from onward.device import choose_device
from onward.errors import UserError
from onward.files import read_json, write_json
from onward.hub import locate
from onward.model.decoder import Decoder
from onward.notebook import Shown
from onward.text.tokenizer import Tokenizer
from onward.training.clock.budget import Budget
from onward.training.clock.calibration import Sampler
from onward.training.clock.dial import Choice
from onward.training.config import RunConfig, seconds
from onward.training.finetuning.base import adapter_base, base_model, load_base
from onward.training.processes import Processes
from onward.training.run.build import build_trainer, learning_rate
from onward.training.run.checks import Check, start_checks
from onward.training.run.events import Event, EventLog, Notice, Rollback
from onward.training.run.inputs import Inputs, check_inputs, read_config, read_record
from onward.training.run.lock import run_lock
from onward.training.run.plans import Planner
from onward.training.run.preparation import prepared
from onward.training.run.state import RunProgress
from onward.training.run.track import check_trackers
from onward.training.run.validation import validate
from onward.training.step.loss import Loss, LossFunction, as_loss
from onward.training.step.optimizer import check_optimizer
from onward.training.step.trainer import Step, StepPlan
from onward.training.tasks import task_of

MAX_FAILURES = 3  # steps that fail without a good save between them end a run


class Diverged(UserError):
    """Steps failed again and again, on different windows."""


class Run(Shown):
    """A run that can go on: `start` or `resume` makes it, `train` trains it."""

    def __init__(
        self, config: RunConfig, model: Decoder, tokenizer: Tokenizer, inputs: Inputs, hf: Any, loss: Loss | None
    ) -> None:
        self.config, self.tokenizer, self.inputs, self.hf = config, tokenizer, inputs, hf
        self.folder, self.processes = Path(config.out), Processes.join()
        record = read_record(self.folder)
        self.checksums = [*record.data.values(), record.tokenizer]
        self.windows = inputs.windows(config, model.config.context_length)
        self.held_out = inputs.validation_windows(config, model.config.context_length)
        self.trainer = build_trainer(config, model, self.processes, loss or task_of(config).loss(config))
        self.planner = Planner(config, self.windows, self.trainer.model.device, self.processes)
        self.saver, self.log = (
            Saver(self.folder, config.keep, adapter_base(config, model)),
            EventLog(self.folder, not self.processes.rank),
        )
        self.fresh = False  # whether the weights are those of the initialization
        self.seconds, self.position = 0.0, 0
        self.skipped: list[tuple[int, int]] = []  # windows left out, as half-open ranges of their numbers
        self.failed_steps: list[int] = []  # since the last good save after them
        self.loaded = 0  # the step of the save that was loaded last
        self.messages: list[str] = []  # for the user, yielded by `train`
        self.budget: Budget | None = None  # of a run of a given time, in the first process until it ends
        self.choice: Choice | None = None  # of the size, in a run that began in this process
        self.unrecorded = False  # whether run.json lacks the number of steps

    @property
    def model(self) -> Decoder:
        """The model that is trained."""
        return self.trainer.model

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @property
    def step(self) -> int:
        """The number of steps made."""
        return self.trainer.step

    @property
    def expected_steps(self) -> int:
        """The number of steps in all; in the first process, while the clock has not fixed it, how many fit."""
        left = self.budget.steps_left(self.config.validation_interval) if self.budget else 0
        return self.config.steps or self.step + left

    @property
    def steps_in_words(self) -> str:
        """The number of steps in all, with `about` while the clock has not fixed it."""
        return f"{'' if self.config.steps else 'about '}{self.expected_steps:,}"

    @property
    def ended(self) -> bool:
        """Whether all steps are made."""
        return 0 < self.config.steps <= self.step

    @classmethod
    @checked
    def start(
        cls,
        config: RunConfig,
        *,
        model: Decoder | None = None,
        loss: Loss | LossFunction | None = None,
        sample: Sampler = lambda model, tokenizer: None,
        progress: Progress = silent,
    ) -> "Run":
        """Prepare the data and the tokenizer, fix the options left open (steps, device, precision, experts), and save
        step 0.

        The run begins from `model`, which it trains in place, in its trainable parameters; by default from the model in
        the folder `config.base` or, without one, from a fresh model as configured. A given model takes the place of the
        configured preset and fields, and the configured tokenizer must be its own. `loss` replaces the configured one;
        give it to `resume` as well.
        `sample` does what the caller will do at each validation: a run of a given time leaves time for it.
        `progress` is called while texts are read: with the task, the bytes done, and the bytes in all (0: unknown).
        """
        folder, processes, hf = Path(config.out), Processes.join(), dict[str, Any]()
        for module in config.imports:
            fields.import_parts(module)
        for name in config.fixed:
            if name in fields.changed_fields(config):
                raise UserError(f"{name} is given, which a run on examples does not read: leave it out")
        if model is None and config.base:
            model, hf = load_base(config)
        if model is not None:
            config = replace(config, preset="mini", model=fields.plain(model.config))
        config.decoder(1)  # an impossible model is refused before any text is read
        check_optimizer(config.optimizer or "adamw")
        processes.check_batches(config.accumulation)
        check_trackers(config.track)
        if processes.rank:
            return cls.resume(folder, loss=loss)
        new = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {folder}: {error.strerror or error}; choose another --out") from None
        with run_lock(folder):
            if saves(folder):  # of a process that was faster
                raise UserError(f"{folder} holds a run already: --resume {quote(str(folder))}, or choose another --out")
            try:
                p = prepared(config, folder, model, hf, as_loss(loss) if loss else None, sample, progress)
                run = cls(p.config, p.model, p.tokenizer, p.inputs, p.hf, p.loss)
                run.fresh, run.budget, run.seconds, run.choice = model is None, p.budget, p.seconds, p.choice
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
    @checked
    def resume(cls, folder: str | Path, *, loss: Loss | LossFunction | None = None) -> "Run":
        """Go on from the newest undamaged save of a run, exactly as if it had never stopped.

        Modules of the user's own that the run was started with must be imported before.
        """
        folder, processes = Path(folder), Processes.join()
        if processes.rank:
            processes.wait()  # until the first process has made or repaired the folder
        config = read_config(folder)
        if (folder / "result.json").exists():
            steps = fields.counted(config.steps, "step")
            raise UserError(f"{folder} has finished its {steps}: start another with --out")
        if missing := [module for module in config.modules if module not in sys.modules]:
            raise UserError(f"{folder} was started with code from {', '.join(missing)}: {fields.trusted(missing)}")
        check_trackers(config.track)
        processes.check_batches(config.accumulation)
        try:
            device = choose_device(config.device)
        except UserError as error:
            raise UserError(f"{error}, in {folder / 'run.json'}") from None
        with nullcontext() if processes.rank else run_lock(folder):
            tokenizer = Tokenizer.load(folder)
            check_inputs(folder, config.decoder(tokenizer.vocab_size))
            adapter = is_adapter(folder)
            if adapter:
                check_base(folder, locate(config.base))
            inputs = task_of(config).open(config, folder, "size" if processes.rank else "sha256")
            state = newest_state(folder, device, base=base_model(folder, config, inputs.labels))
            hf = load_base(config)[1] if adapter else read_json(folder / "config.json")
            run = cls(config, state.model, tokenizer, inputs, hf, as_loss(loss) if loss else None)
            run.load_state(state)
            run.log.resume(run.step)
        if not processes.rank:
            processes.wait()
        return run

    def load_state(self, state: SavedState) -> None:
        """Go to the step of a save."""
        progress = fields.build(RunProgress, state.progress, str(state.folder / PROGRESS))
        self.trainer.load_state(state)
        self.loaded = self.step
        self.position, self.seconds, self.failed_steps = progress.position, progress.seconds, [*progress.failed_steps]
        self.skipped = [*progress.skipped]
        if self.config.time and not self.budget and progress.costs and not self.processes.rank:
            self.budget = Budget.of(seconds(self.config.time), self.seconds, progress.costs)
        known, now = progress.config, fields.plain(self.config)
        by_clock = ("time", "steps", "decay") if known.get("time") and self.config.steps else ()
        edited = [name for name in now if now[name] != known.get(name) and name not in ("out", *by_clock)]
        self.messages += state.messages
        if edited:
            self.messages.append(f"run.json has been edited: {', '.join(edited)} from here on")

    @checked
    def train(
        self, stop: Callable[[], bool] = lambda: False, save: Callable[[], bool] = lambda: False
    ) -> Iterator[Event]:
        """Train to the last step, or until `stop()` is true; write metrics and saves, and yield each event.

        `save()` asks for a save after the present step. A UserError if the last step cannot be saved, or if steps fail
        three times in a row.
        """
        lock = nullcontext() if self.processes.rank else run_lock(self.folder, again=True)
        with lock, self.log.tracked(self.config.track, fields.plain(self.config)):
            try:
                yield from self.steps(stop, save)
                self.finish()
            finally:  # where it ends early, too, nothing is written any more once the lock is free
                self.saver.finish()

    def steps(self, stop: Callable[[], bool], save: Callable[[], bool]) -> Iterator[Event]:
        """The events of `train`."""
        began = perf_counter() - self.seconds
        self.check_ranks()
        yield from self.validations()  # a kill may have come between the save and its validation
        if self.budget:
            self.budget.begin_step()
        stopping = int(self.processes.sum([stop()])[0])
        while not (self.ended or stopping):
            with closing(self.planner.plans(self.position, self.skipped)) as plans:
                for plan in plans:
                    step = self.trainer.train_step(replace(plan, measure_update=self.planner.due(self.step + 1)))
                    if self.planner.due(step.step) and not step.failure and not self.trainer.finite():
                        step = replace(step, failure="the weights are not finite")
                    if step.failure:
                        yield self.rollback(plan, step)
                        yield from self.validations()
                        break  # other windows follow than those that were prepared ahead
                    self.position, self.seconds = plan.next_position, perf_counter() - began
                    yield self.log.write(step)
                    if self.planner.due(self.step):
                        self.log.write_samples(self.step, self.trainer.loss.samples)
                    recovered = bool(self.failed_steps) and self.step >= self.failed_steps[-1]
                    stopping, saving, steps = map(int, self.processes.sum([stop(), save(), self.last_step()]))
                    if steps:
                        self.fix_steps(steps)
                    if stopping or saving or recovered or self.planner.due(self.step):
                        self.check_ranks()
                        self.save()
                    yield from self.validations()
                    yield from (Notice(self.step, sentence) for sentence in self.pop_messages())
                    if stopping or self.ended:
                        break

    def last_step(self) -> int:
        """Take account of a step in the budget; the number of steps in all, if the clock fixes it now, else 0."""
        if self.budget:
            self.budget.note_step()
        return self.budget.last_step(self.step, self.config) if self.budget and not self.config.steps else 0

    def fix_steps(self, steps: int) -> None:
        """Fix the number of steps, of which those to come are the decay, and record it in run.json."""
        self.config = replace(self.config, time="", steps=steps, decay=steps - self.step)
        self.planner.config = self.config
        self.trainer.learning_rate = learning_rate(self.config, self.model)
        self.unrecorded = not self.processes.rank
        self.record()

    def record(self) -> None:
        """Write run.json, if it lacks the number of steps that the clock has fixed; the next save does, where the disk
        is full."""
        if self.unrecorded:
            with suppress(UserError):
                write_json(self.folder / "run.json", fields.plain(self.config))
                self.unrecorded = False

    def check_ranks(self) -> None:
        """A UserError if a process trains another run than rank 0, such as one in a folder of another disk."""
        if self.processes.count > 1:
            facts = {
                "configuration": fields.plain(replace(self.config, out="")),
                "data": self.checksums,
                "step": self.step,
                "weights": self.trainer.checksum(),
            }
            self.processes.check_same(facts)

    def validations(self) -> Iterator[Event]:
        """Validate, if the present step is one to validate at; one before the last, only if there is time for it."""
        if not self.step or not self.planner.due(self.step) or self.held_out is None:
            return
        steps_left = max(0, self.config.steps - self.step)
        late = bool(self.budget and steps_left and not self.budget.affords_validation(steps_left))
        if any(self.processes.sum([late])):
            return
        loss = self.inputs.measure(self.trainer.loss)
        with self.budget.validating() if self.budget else nullcontext():
            validation = validate(self.trainer, self.tokenizer, self.held_out, self.config, loss)
            if not self.processes.rank:
                self.saver.best(self.step, validation.validation_loss)
            yield self.log.write(validation)

    def rollback(self, plan: StepPlan, step: Step) -> Rollback:
        """Go back to the newest undamaged save, and skip the windows of a step that failed from now on.

        Where the first step after a save has failed twice, on different windows, the save is spoiled: go back to the
        one before it, and skip all windows from there on.
        """
        windows, failed = (plan.numbers[0], plan.next_position), step.step
        failed_steps = [*self.failed_steps, failed]
        if len(failed_steps) >= MAX_FAILURES:
            raise Diverged(
                f"step {failed} failed, the {len(failed_steps)}rd failure in a row ({step.failure}), so not because of "
                "the windows: start again with a lower learning rate, more warm-up or a smaller --clip"
            )
        spoiled = self.loaded if failed_steps[-2:] == [failed, failed] and self.loaded == self.step else None
        self.saver.finish()
        if self.processes.rank:
            self.processes.wait()  # until the first process has moved damaged saves aside
        skipped = self.skipped
        self.load_state(
            newest_state(
                self.folder, torch.device("cpu"), spoiled, base_model(self.folder, self.config, self.inputs.labels)
            )
        )
        if not self.processes.rank:
            self.processes.wait()
        if spoiled is not None and self.step < spoiled:
            windows = self.position, plan.next_position
        self.failed_steps, self.skipped = failed_steps, [*skipped, windows]
        first_window = self.tokenizer.decode(self.windows.read([windows[0]]).tokens[0].tolist())
        return self.log.roll_back(Rollback(self.step, failed, step.failure, windows), first_window)

    def checks(self) -> Iterator[Check]:
        """Checks of data and model before training, one by one."""
        windows = range(self.config.batch_size * self.config.accumulation)
        batch, inputs = self.planner.batches(windows)[0], self.inputs
        return start_checks(self.model, batch, inputs.train, inputs.validation, fresh=self.fresh)

    def averaged(self) -> AbstractContextManager[object]:
        """A context in which the model has the weights that one uses: averaged ones, where the run averages them."""
        return self.trainer.averaged()

    def save(self) -> None:
        """Save the state, so that the run can be resumed from here; it is written while training goes on.

        Weights that are not finite are never saved.
        """
        if self.failed_steps and self.step >= self.failed_steps[-1]:
            self.failed_steps = []
        if self.processes.rank or not self.trainer.finite():
            return
        self.record()
        state = self.trainer.state_dict()
        progress = {
            "config": fields.plain(self.config),
            "position": self.position,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "failed_steps": self.failed_steps,
            "costs": fields.plain(self.budget.costs) if self.budget else None,
        }
        self.saver.save(self.model, replace(state, progress=state.progress | progress), self.hf)

    def finish(self) -> None:
        """Wait for the last save, and try again if it failed; a UserError if it cannot be written."""
        self.saver.finish()
        if not self.processes.rank and not self.saved():
            self.save()
            self.saver.finish()
            if not self.saved():
                failure = self.saver.pop_failure()
                raise (
                    UserError(f"{failure}; repair that, and go on with --resume {self.folder}")
                    if failure
                    else UserError(f"the weights of step {self.step} are not finite: nothing is saved")
                )
        self.processes.wait()

    def saved(self) -> bool:
        """Whether the present step is on disk."""
        return any(step_of(path) == self.step for path in saves(self.folder))

    def pop_messages(self) -> list[str]:
        """The messages for the user since the last call."""
        messages, self.messages = self.messages, []
        if failure := self.saver.pop_failure():
            messages.append(f"{failure}; training goes on, and the next save tries again")
        return messages
