"""The training loop of a run: its steps, validations and saves, and the rollback to a save after a failed step."""

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from onward.base import fields
from onward.base.alone import ALONE
from onward.base.arguments import checked
from onward.base.errors import UserError
from onward.base.notebook import Shown
from onward.checkpoint.saves.newest import newest_state
from onward.checkpoint.saves.saver import Saver
from onward.evaluation.kept import PACKAGES, versions
from onward.model.decoder import Decoder
from onward.training.finetuning.base import adapter_base, base_model
from onward.training.run.beginning import Parts
from onward.training.run.events import Event, EventLog, Rollback
from onward.training.run.lock import Hold, run_lock
from onward.training.run.run_folder import check_saved, record_steps
from onward.training.run.saved_progress import fitting, saved_progress
from onward.training.step.build import build_trainer
from onward.training.step.plans import Planner
from onward.training.step.schedule import learning_rate
from onward.training.step.trainer import Step, StepPlan
from onward.training.step.validation import Validation, validate

MAX_FAILURES = 3  # number of failed steps in a row that ends a run


class Diverged(UserError):
    """Raised when three steps in a row fail on different windows: the loss, the gradient or the weights are not finite,
    or the loss is a spike (see `health.Spikes`)."""


class Loop(Shown):
    """The training loop of a run, built from its `Parts`; `run.Run` makes these from a configuration or a folder, and
    describes the attributes."""

    def __init__(self, parts: Parts) -> None:
        p = parts
        self.config, self.tokenizer, self.inputs, self.hf = p.config, p.tokenizer, p.inputs, p.hf
        self.interval = p.config.validation_interval
        self.fresh, self.choice, self.budget, self.progress = p.fresh, p.choice, p.budget, p.progress
        self.folder, self.processes = Path(p.config.out), p.processes or ALONE
        self.trainer = build_trainer(p.config, p.model, p.processes, p.loss, p.fill)
        self.model: Decoder = self.trainer.model
        self.device, context_length = self.model.device, self.model.config.context_length
        self.planner = Planner(p.config, p.inputs.windows(p.config, context_length), self.device, self.processes)
        if p.processes:
            p.processes.check_windows(len(self.planner.windows))
        self.held_out = p.inputs.validation_windows(p.config, context_length)
        self.held_out_sets = p.inputs.validation_sets(p.config, context_length)
        self.tasks = p.tasks
        writers = p.processes if p.processes and p.processes.divides else None
        self.saver = Saver(self.folder, p.config.keep, adapter_base(p.config, p.model), writers)
        self.log = EventLog(self.folder, not self.processes.rank, p.messages)
        self.hold: Hold | None = None  # keeps the folder locked until the training starts
        if p.state:
            self.trainer.load_state(p.state)

    @property
    def step(self) -> int:
        return self.trainer.step

    @property
    def ended(self) -> bool:
        """Whether all steps are completed."""
        return 0 < self.config.steps <= self.step

    def due(self, step: int) -> bool:
        """Return whether the run saves and validates after step number `step`, counted from 1."""
        return step % self.interval == 0 or step == self.config.steps

    @checked
    def train(
        self, stop: Callable[[], bool] = lambda: False, save: Callable[[], bool] = lambda: False
    ) -> Iterator[Event]:
        """Train to the last step, or until `stop()` is true; write metrics and saves, and yield each event.

        `save()` returns true to request a save after the current step. Raises a UserError if the last step cannot be
        saved, and Diverged if steps fail three times in a row.
        """
        lock = nullcontext() if self.processes.rank else run_lock(self.folder, again=True)
        with lock, self.log.tracked(self.config.track, fields.plain(self.config)):
            self.hold = None  # the lock is released when this training ends
            try:
                yield from self.events(stop, save)
                self.save()  # again, in case the last save failed
                self.saver.finish()
                if not self.processes.rank:
                    check_saved(self.folder, self.step, self.saver.pop_failure())
                self.processes.wait()
            finally:  # even if training ends early, finish all writes before the lock is released
                self.saver.finish()

    def events(self, stop: Callable[[], bool], save: Callable[[], bool]) -> Iterator[Event]:
        """Train, and yield the events; `train` calls this with its own arguments while it holds the lock of the
        folder."""
        began = perf_counter() - self.progress.seconds
        check_ranks(self)
        yield from self.validate()  # the process may have been killed between a save and its validation
        if self.budget:
            self.budget.begin_step()
        stopping = int(self.processes.sum([stop()])[0])
        while not (self.ended or stopping):
            first = self.step
            with closing(self.planner.plans(self.progress.position, self.progress.skipped)) as plans:
                for plan in plans:
                    step = self.train_step(plan)
                    if step.failure:
                        yield self.roll_back(plan, step, first)
                        yield from self.validate()
                        break  # the prefetched windows are no longer the next ones
                    seconds = perf_counter() - began
                    self.progress = replace(self.progress, position=plan.next_position, seconds=seconds)
                    yield self.log.write(step)
                    due = self.due(self.step)
                    if due:
                        self.log.write_samples(self.step, self.trainer.loss.samples)
                    if self.budget:
                        self.budget.note_step()
                    steps = self.budget.last_step(self.step, self.config) if self.budget else 0
                    stopping, saving, steps = map(int, self.processes.sum([stop(), save(), steps]))
                    if steps:
                        self.fix_steps(steps)
                    if due or stopping or saving or self.progress.recovered(self.step):
                        check_ranks(self)
                        self.save()
                    yield from self.validate()
                    yield from self.log.notices(self.step, self.saver.pop_failure())
                    if stopping or self.ended:
                        break

    def save_first(self) -> None:
        """Save step 0. Raises a UserError if saving fails."""
        self.save()
        self.saver.finish()
        if failure := self.saver.pop_failure():
            raise failure

    def train_step(self, plan: StepPlan) -> Step:
        """Make an optimizer step on the batches of `plan`; see `Trainer.train_step`. The step also counts as failed if
        a save is due after it and the weights are not finite."""
        due = self.due(self.step + 1)
        step = self.trainer.train_step(replace(plan, measure_update=due))
        if due and not step.failure and not self.trainer.finite():
            return replace(step, failure="the weights are not finite")
        return step

    def fix_steps(self, steps: int) -> None:
        """Fix the total number of steps of a run with a time limit, and record it in run.json; during the
        remaining steps the learning rate decays."""
        self.config = replace(self.config, time="", steps=steps, decay=steps - self.step)
        self.interval = self.config.validation_interval
        peak = self.config.peak_learning_rate(self.model.config.d_model)
        self.trainer.learning_rate = learning_rate(self.config, peak)
        if not self.processes.rank:
            record_steps(self.config)

    def validate(self) -> Iterator[Validation]:
        """Validate if a validation is due; record its result, and yield it. A validation other than the last one is
        skipped if the time limit leaves no time for it."""
        if not self.step or not self.due(self.step) or self.held_out is None:
            return
        steps_left = max(0, self.config.steps - self.step)
        late = bool(self.budget and steps_left and not self.budget.affords_validation(steps_left))
        if any(self.processes.sum([late])):
            return
        loss = self.inputs.measure(self.trainer.loss)
        with self.budget.validating() if self.budget else nullcontext():
            validation = validate(
                self.trainer, self.tokenizer, self.held_out, self.config, loss, self.held_out_sets, self.tasks
            )
            if not self.processes.rank:
                self.saver.best(self.step, validation.validation_loss)
            yield self.log.write(validation)

    def roll_back(self, plan: StepPlan, step: Step, first: int) -> Rollback:
        """Return to the newest undamaged save; from now on, skip the windows (sequences) of the failed step.

        `plan` is the input of the failed step, `step` its result, and `first` the step of the save that training
        continued from. If the first step after that save has failed twice, on different windows, the save is bad:
        return to the save before it, and skip all windows since. Raises Diverged after the third failure in a row.
        """
        failed_steps = (*self.progress.failed_steps, step.step)
        if len(failed_steps) >= MAX_FAILURES:
            raise Diverged(
                f"step {step.step} failed, the {len(failed_steps)}rd failure in a row ({step.failure}), so the "
                "windows are not the cause: start again with a lower learning rate, more warm-up or a smaller --clip"
            )
        spoiled = first if failed_steps[-2:] == (step.step, step.step) and self.step == first else None
        self.saver.finish()
        with self.processes.first_before_others():  # newest_state renames damaged saves
            lazy = self.processes.divides
            base = base_model(self.folder, self.config, self.inputs.labels, lazy=lazy)
            state = newest_state(self.folder, torch.device("cpu"), spoiled, base, lazy=lazy)
            self.trainer.load_state(fitting(state, self.config))
        saved = saved_progress(state).reached
        begin = saved.position if spoiled is not None and self.step < spoiled else plan.numbers[0]
        windows, skipped = (begin, plan.next_position), self.progress.skipped
        self.progress = replace(saved, skipped=(*skipped, windows), failed_steps=failed_steps)
        self.log.messages += state.messages
        first_window = self.tokenizer.decode(self.planner.windows.read([windows[0]]).tokens[0].tolist())
        return self.log.roll_back(Rollback(self.step, step.step, step.failure, windows), first_window)

    def save(self) -> None:
        """Save the state, so that the run can be resumed from here; the files are written while training continues.

        Weights that are not finite are never saved.
        """
        if self.progress.recovered(self.step):
            self.progress = replace(self.progress, failed_steps=())
        divides = self.processes.divides
        state = self.trainer.state_dict()
        if (self.processes.rank and not divides) or not self.trainer.finite():
            return
        if not self.processes.rank:
            record_steps(self.config)
        progress = {
            **fields.plain(self.progress),
            "config": fields.plain(self.config),
            "costs": fields.plain(self.budget.costs) if self.budget else None,
        }
        self.saver.save(self.model, replace(state, progress=state.progress | progress), self.hf)


def check_ranks(run: Loop) -> None:
    """Raise a UserError if the processes do not all train the same run, for example if the run folder of one is on
    another disk."""
    if processes := run.trainer.processes:
        facts = {
            **{f"version of {package}": number for package, number in zip(PACKAGES, versions())},
            "configuration": fields.plain(replace(run.config, out="")),
            "data": run.inputs.checksums,
            "step": run.step,
            "weights": processes.checksum(run.model),
        }
        processes.check_same(facts, of_part={"weights"})
