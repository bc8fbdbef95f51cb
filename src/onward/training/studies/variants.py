"""Trains variants of a run under equal conditions, each with one or more seeds: one after the other or, with several
groups of processes, several at the same time.

FOLDER/
  variants.json      the options of each variant
  data-N/            the tokens, shared by variants with the same texts and tokenizer; see `study_tokens`
  NAME/seed-S/       a run for each variant and seed
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from onward.base import fields
from onward.base.device import choose_device
from onward.base.errors import UserError
from onward.base.files import read_json, write_json
from onward.checkpoint.saves.folder import saves
from onward.config.decoder import DecoderConfig
from onward.data.progress import Progress, silent
from onward.planning.descriptions import ConfigChange, differences
from onward.planning.flops import training_flops
from onward.planning.parameters import parameters
from onward.text.tokenizer import Tokenizer
from onward.training import presets
from onward.training.config import RunConfig, seconds
from onward.training.inputs.record import read_config, same_tokens
from onward.training.inputs.texts import open_inputs
from onward.training.run.events import Event
from onward.training.run.loop import Diverged
from onward.training.run.result import evaluate_run
from onward.training.run.run import Run
from onward.training.run.together import planned, several
from onward.training.step.optimizer import check_optimizer
from onward.training.step.own_loss import text_loss
from onward.training.studies.groups import ONE_GROUP, StudyGroup
from onward.training.studies.tokens import other_texts, study_tokens

LENGTHS = "steps", "time", "epochs"  # options with the same value for all variants
MODEL = "preset", "model", "base"  # the options that choose the initial model
# files in the folder of a run: RESULT if it has ended, FAILURE if it diverged
RESULT, FAILURE = "result.json", "failure.json"
OVERHEAD = 1e9  # overhead of a step, in floating-point operations that take about as long
Measure = Literal["loss", "bits_per_byte"]


@dataclass(frozen=True)
class Variant:
    """A named configuration to compare with others that differ in some options. `config.out` is the folder of all
    variants, and `config.seed` the seed of the first run."""

    name: str
    config: RunConfig
    work: float = 1.0  # work of one run, in a unit common to all variants
    parameters: int = 0  # parameters of the model; 0 before its tokens are prepared

    def folder(self, seed: int) -> Path:
        return Path(self.config.out) / self.name / f"seed-{seed}"

    def identity(self) -> tuple[Any, ...]:
        """Return the options that determine the runs of this variant, except the seeds, in a normal form: a default and
        its explicit value give equal results."""
        model = self.config.decoder(1)
        rate = self.config.peak_learning_rate(model.d_model)
        options = {**fields.plain(self.config), "out": "", "seed": 0, "model": {}, "learning_rate": rate}
        return model, repr(options)

    def differences(self, base: "Variant") -> list[str]:
        """List the fields of the run and of the decoder in which this variant differs from the variant `base`, each as
        `optimizer adamw -> muon`. A default learning rate is shown as its value. Neither variant may have been changed
        by `prepare_variants` yet."""
        models = base.config.decoder(1), self.config.decoder(1)
        rates = (one.config.peak_learning_rate(model.d_model) for one, model in zip((base, self), models))
        pairs = {"learning_rate": (*rates,)} | {
            name: (getattr(base.config, name), getattr(self.config, name))
            for name in fields.hints(RunConfig)
            if name not in ("out", "model", "seed", "learning_rate", *LENGTHS)
        }
        changes = [ConfigChange(name, before, after, "") for name, (before, after) in pairs.items() if before != after]
        changes += differences(*models)
        return [presets.in_words(change) for change in changes if change.what not in presets.FIGURES]


@dataclass(frozen=True)
class Length:
    """How long each variant trains: exactly one of the four fields is set. `time` is a text such as "60s" or "10m"."""

    time: str = ""
    steps: int = 0
    tokens: float = 0.0
    flops: float = 0.0

    def __str__(self) -> str:
        texts = self.time, fields.counted(self.steps, "step"), f"{self.tokens:,.0f} tokens", f"{self.flops:.3g} FLOPs"
        return next(text for text, given in zip(texts, vars(self).values()) if given)

    def steps_of(self, config: RunConfig, model: DecoderConfig) -> int:
        """Compute the number of steps of a run of this length, for a configuration and a model; 0 if the length is a
        time. Raises a UserError if the length is less than a step."""
        if self.time or self.steps:
            return self.steps
        tokens = tokens_per_step(config, model)
        name, per_step = ("tokens", tokens) if self.tokens else ("flops", tokens * flops_per_token(model))
        amount = getattr(self, name)
        if amount < per_step:
            raise UserError(f"{name} is {amount:.4g}, less than the {per_step:.4g} of one step: give more")
        return int(amount / per_step)


@dataclass(frozen=True)
class Moment:
    """An event of the current run, number `number` of `runs` runs, with the progress of all runs; for displays."""

    variant: Variant
    seed: int
    number: int  # number of the run, from 1
    runs: int
    share: float  # completed share of the work of all runs
    seconds_left: float | None  # None until an estimate is possible
    run: Run
    event: Event


@dataclass(frozen=True)
class Outcome:
    """The result of a variant: the folders of its runs, one per seed, and the figures of each run's final evaluation,
    by name; None instead of figures for a run that diverged or was skipped."""

    variant: Variant
    runs: tuple[Path, ...]
    figures: tuple[dict[str, Any] | None, ...]

    def values(self, measure: Measure) -> list[float]:
        """Return a figure of the final evaluation, `measure` ("loss" or "bits_per_byte"), for each run; empty if a run
        diverged or was skipped, since the mean of the other runs would be biased in favor of the variant."""
        return [] if None in self.figures else [figures[measure] for figures in self.figures if figures]


def tokens_per_step(config: RunConfig, model: DecoderConfig) -> int:
    return config.batch_size * config.accumulation * model.context_length


def flops_per_token(model: DecoderConfig) -> float:
    """Floating-point operations of training per token, on windows of the model's context length: those of matrix
    products, including attention; see `training_flops`."""
    return training_flops(model, model.context_length)


def common_measure(variants: Sequence[Variant]) -> Measure:
    """Return the figure by which variants can be compared: "bits_per_byte" if texts or tokenizers differ, else
    "loss"."""
    same = len({(one.config.tokenizer or one.config.base, one.config.sources) for one in variants}) == 1
    return "loss" if same else "bits_per_byte"


@contextmanager
def naming(variant: Variant) -> Iterator[None]:
    """Context manager: prefixes a UserError raised inside it with the name of the variant."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{variant.name}: {error}") from None


def check_variants(variants: Sequence[Variant], group: StudyGroup = ONE_GROUP) -> None:
    """Raise a UserError for variants that the processes of `group` cannot train, or that cannot be compared with each
    other; called before any text is read."""
    names, first = [variant.name for variant in variants], variants[0]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two variants have the name {twice}: give each variant its own name")
    seen = dict[tuple[Any, ...], str]()
    for variant in variants:
        with naming(variant):
            same = seen.setdefault(variant.identity(), variant.name)
        if same != variant.name:
            raise UserError(
                f"{same} and {variant.name} have the same configuration, so their runs would be equal: "
                "change an option of one of them"
            )
        with naming(variant):
            check_optimizer(variant.config.optimizer)
            text_loss(variant.config)
            choose_device(variant.config.device)
            planned(variant.config, variant.config.decoder(1), several(group.processes))
            if variant.config.validation == "none":
                raise UserError(
                    "Cannot compare variants without a validation text: give --validation a text or a share"
                )
        if differ := other_texts(vars(first.config), vars(variant.config)):
            raise UserError(
                f"{first.name} and {variant.name} differ in {differ}, so their losses would be on different "
                "texts: give both the same --validation FILE"
            )


def prepare_variants(
    variants: Sequence[Variant],
    length: Length | None = None,
    progress: Progress = silent,
    group: StudyGroup = ONE_GROUP,
) -> list[Variant]:
    """Prepare variants for training: set their training `length` (None: as in each configuration), and tokenize their
    texts, once for all variants with the same texts and tokenizer. Returns the variants to pass to `train_variants`.
    `group` is the group of this process; the first process of all groups prepares the texts.

    Raises a UserError, before any training, if a variant cannot be trained, if the folder contains a variant of the
    same name with other options, or a variant whose losses are on other texts.
    """
    check_variants(variants, group)
    folder = Path(variants[0].config.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}; choose another --out") from None
    record = folder / "variants.json"
    earlier = read_json(record) if record.exists() else {}
    extent = vars(length) if length else {}
    asked = {one.name: {**fields.plain(one.config), **extent, "out": "", "seed": 0, "mesh": ""} for one in variants}
    for (name, options), (other, known) in product(asked.items(), earlier.items()):
        known = {**options, **known}
        changed = (key for key in options if options[key] != known[key])
        if differ := next(changed, None) if name == other else other_texts(known, options):
            raise UserError(
                f"{folder} contains {other} with {differ} {known[differ]}, not {options[differ]}: choose another --out"
            )
    ready = []
    with group.first_before_others():
        for variant in variants:
            with naming(variant):
                tokens = study_tokens(variant.config, progress, group)
                ready.append(with_tokens(variant, tokens, length))
        if group.first:
            write_json(record, earlier | asked)
    return ready


def with_tokens(variant: Variant, tokens: Path, length: Length | None) -> Variant:
    """Return the variant changed to train on the prepared tokens in the folder `tokens`, for `length` (None: for the
    steps of its own configuration)."""
    config = variant.config
    inputs, model = open_inputs(config, tokens, "size"), config.decoder(Tokenizer.load(tokens).vocab_size)
    inputs.windows(config, model.context_length)
    if not config.weights:  # with weights, keep the sources: the prepared tokens are a single source
        config = replace(config, tokenizer="", **same_tokens(tokens, config))
    length = length or Length(steps=config.steps)
    steps = length.steps_of(config, model)
    per_step = tokens_per_step(config, model) * flops_per_token(model) + OVERHEAD
    work = steps * per_step if steps else seconds(length.time)
    return Variant(variant.name, replace(config, steps=steps, time=length.time), work, parameters(model))


def train_variants(
    variants: Sequence[Variant],
    seeds: int,
    watch: Callable[[Moment], None] = lambda moment: None,
    stop: Callable[[], bool] = lambda: False,
    limit: float = math.inf,
    group: StudyGroup = ONE_GROUP,
) -> list[Outcome] | None:
    """Train prepared variants, each with `seeds` seeds: all with the first seed, then all with the next. Returns the
    result of each variant. Finished runs are not repeated; an interrupted run is resumed, exactly as if it had never
    stopped. `watch` is called with each event.

    If there are several groups of processes, `group` is the group of this process: it trains the next run that no other
    group has started, and at the end waits for the other groups.

    Returns None if `stop()` became true, after saving the current run. A diverged run does not stop the others. A run
    is skipped if, as estimated from earlier runs, it would not end within `limit` seconds.
    """
    first = variants[0].config.seed
    order = [(variant, seed) for seed in range(first, first + seeds) for variant in variants]
    total, behind, worked, began = sum(variant.work for variant, _ in order), 0.0, 0.0, perf_counter()
    for number, (variant, seed) in enumerate(order, 1):
        folder, work, spent = variant.folder(seed), variant.work, perf_counter() - began
        late = worked > 0 and spent + spent / worked * work > limit
        if not late and group.claim(number, partial(has_ended, folder)):
            with naming(variant):
                run = begin(variants, variant, seed, group, stop)
            if run is None:
                return None
            resumed = share_done(run)
            try:
                for event in run.train(stop):
                    now = worked + work * (share_done(run) - resumed)
                    left = total - behind - work * share_done(run)
                    seconds_left = (perf_counter() - began) / now * left / group.count if now else None
                    watch(Moment(variant, seed, number, len(order), 1 - left / total, seconds_left, run, event))
            except Diverged as error:
                if not run.processes.rank:
                    write_json(folder / FAILURE, {"reason": str(error)})
            else:
                if share_done(run) < 1:
                    return None
                if not run.processes.rank or run.processes.divides:
                    evaluate_run(run)
            worked += work * (1 - resumed)
        behind += work
    folders = [variant.folder(seed) for variant, seed in order]
    if group.count > 1 and not group.wait_until(lambda: all(map(has_ended, folders)), stop):
        return None
    return [outcome(variant, [variant.folder(seed) for seed in range(first, first + seeds)]) for variant in variants]


def has_ended(folder: Path) -> bool:
    return any((folder / name).exists() for name in (RESULT, FAILURE))


def begin(
    variants: Sequence[Variant], variant: Variant, seed: int, group: StudyGroup, stop: Callable[[], bool]
) -> Run | None:
    """Start the run of a variant with a seed in the processes of `group`, or resume it if it exists. Runs of the same
    model use the precision and the backend of experts that timing chose for the first such run among `variants`, so
    that they differ only in their options; if another group starts that first run, wait for it. Returns None if
    `stop()` became true while it waited."""
    folder, config, processes = variant.folder(seed), variant.config, group.processes
    if processes.agreed(lambda: "saved" * (folder.exists() and bool(saves(folder)))) == "saved":
        return Run.resume(folder, mesh=config.mesh or "replicate=1", processes=processes)
    same = lambda other: all(getattr(other.config, name) == getattr(config, name) for name in MODEL)
    alike = [other.folder(other.config.seed) for other in variants if same(other)]
    begun = lambda: [first for first in alike if (first / "run.json").exists()]
    awaits = group.count > 1 and folder != alike[0] and "auto" in (config.precision, config.experts)
    if awaits and not group.wait_until(lambda: bool(begun()), stop):
        return None
    for first in begun()[:1]:
        known = read_config(first)
        config = replace(
            config,
            precision=known.precision if config.precision == "auto" else config.precision,
            experts=known.experts if config.experts == "auto" else config.experts,
        )
    return Run.start(replace(config, out=str(folder), seed=seed), processes=processes)


def share_done(run: Run) -> float:
    """Return the completed share of a run, from 0 to 1: the share of its steps or, if a time limit has not fixed their
    number yet, of its time."""
    if run.config.steps:
        return min(1.0, run.step / run.config.steps)
    return min(0.99, run.progress.seconds / seconds(run.config.time))


def outcome(variant: Variant, runs: Sequence[Path]) -> Outcome:
    """Collect the results of a variant's runs; a run without result.json has diverged or was skipped."""
    figures = (read_json(run / RESULT) if (run / RESULT).exists() else None for run in runs)
    return Outcome(variant, tuple(runs), tuple(figures))
