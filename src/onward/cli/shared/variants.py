"""Options and progress shared by `onward compare`, `onward sweep` and `onward scaling run`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rich.progress import BarColumn, Progress, TextColumn

from onward.base import fields
from onward.base.errors import UserError
from onward.cli.shared.options import read
from onward.cli.shared.output import console
from onward.cli.shared.run_options import COMMON, default_name, from_toml, join_duration
from onward.cli.shared.signals import Requests, Say, signals
from onward.cli.shared.sources import check_texts
from onward.config.ranges import Size
from onward.training.config import RunConfig

if TYPE_CHECKING:
    from onward.training.studies.groups import StudyGroup
    from onward.training.studies.variants import Length, Moment, Outcome, Variant

LENGTHS = "time", "steps", "tokens", "flops"
COMMON_OF_VARIANTS = "time", "tokens", "flops", "steps", "seeds", "out", "config", *COMMON  # shown by `--help`


@dataclass(frozen=True)
class VariantOptions(RunConfig):
    """The options of the commands that train several variants (configurations to compare): the configuration that all
    variants share, and how long each is trained."""

    positional: ClassVar[tuple[str, ...]] = ("sources",)
    fixed: ClassVar[tuple[str, ...]] = ("epochs",)
    tokens: str = ""  # number of tokens on which each variant is trained, such as 10M
    flops: str = ""  # number of operations for each variant, such as 1e13, of matrix products and attention
    seeds: Size = 1  # runs per variant, with seeds seed, seed + 1, ...; all variants use the same seeds
    config: str = ""  # a TOML file with options of `onward train` that all variants share
    json: bool = False  # print the result as JSON


def read_values(
    cls: type[VariantOptions], argv: Sequence[str], prog: str, about: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the TOML file of `--config`, and those of a command line, by name."""
    values = read(cls, join_duration(argv), prog=prog, about=about)
    toml = values.pop("config", "")
    shared = from_toml(Path(toml), RunConfig) if toml else {}
    if values.get("sources"):
        check_texts(values["sources"])
    else:
        values.pop("sources", None)
    no_length(shared, toml)
    return shared, values


def no_length(values: Mapping[str, Any], where: str) -> None:
    """Raise a UserError for a training length in `values`, the options from `where`, because all variants train equally
    long."""
    if given := next((name for name in ("time", "steps", "epochs") if values.get(name)), None):
        raise UserError(
            f"Cannot read {given} from {where}, because all variants train equally long: give --time, --tokens, "
            "--flops or --steps instead"
        )


def take(values: dict[str, Any], cls: type[VariantOptions]) -> tuple[dict[str, Any], "Length"]:
    """Remove from `values` the options that `cls` adds to RunConfig; return them, and the training length of each
    run."""
    from onward.planning.tables import amount
    from onward.training.studies.variants import Length

    own = fields.hints(cls).keys() - fields.hints(RunConfig).keys()
    own_options = {name: values.pop(name) for name in own & values.keys()}
    given = {name: own_options.pop(name, None) or values.pop(name, None) for name in LENGTHS}
    chosen = {name: value for name, value in given.items() if value}
    if len(chosen) != 1:
        which = f"{' and '.join(chosen)} are both given" if chosen else "no length of training is given"
        raise UserError(f"{which}: give one of --time, --tokens, --flops and --steps")
    ((name, value),) = chosen.items()
    if name == "time":
        return own_options, Length(time=value)
    number = amount(str(value), name)
    if name == "steps":
        return own_options, Length(steps=fields.convert(int, number, name))
    return own_options, Length(tokens=number) if name == "tokens" else Length(flops=number)


def variant(name: str, values: Mapping[str, Any]) -> "Variant":
    """Make a variant from a run's options; characters of `name` that a folder name cannot contain are replaced."""
    from onward.training.studies.variants import Variant

    plain = re.sub(r"[^\w.=+,()-]+", "-", name).strip(".-") or "variant"
    try:
        config = fields.build(RunConfig, {"preset": "mini", **values, "steps": 1})  # steps: a placeholder
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    return Variant(plain, config)


def folder_of(values: Mapping[str, Any], kind: str) -> str:
    """Return the folder for the runs: the option `out`, or runs/NAME-KIND, named after the first source and the
    command."""
    sources = values.get("sources") or RunConfig.sources
    return values.get("out") or f"runs/{default_name(sources[0])}-{kind}"


class Shown:
    """The progress of the runs: on a terminal a bar, and a line at the end of each run. If several groups of processes
    share the runs, the first process shows the bar, and the first process of each group prints the line."""

    def __init__(self, first: bool) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            TextColumn("{task.fields[left]}"),
        )
        self.bar = Progress(*columns, console=console, transient=True, disable=not (first and console.is_terminal))
        self.task = self.bar.add_task("", total=1.0, left="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, moment: "Moment") -> None:
        from onward.training.studies.variants import share_done

        if moment.run.processes.rank:
            return
        left = "" if moment.seconds_left is None else f"{fields.time_in_words(moment.seconds_left)} left"
        name = f"{moment.number} of {moment.runs}: {moment.variant.name}, seed {moment.seed}"
        loss = getattr(moment.event, "validation_loss", None)
        description = name if loss is None else f"{name}, validation loss {loss:.4f}"
        self.bar.update(self.task, completed=moment.share, description=description, left=left)
        if loss is not None and share_done(moment.run) == 1:
            console.print(f"{description}; {left}", markup=False, soft_wrap=True)


def train_all(variants: Sequence["Variant"], seeds: int, length: "Length") -> "list[Outcome] | int":
    """Train each variant with each seed and show the progress; torchrun's processes share the runs. Returns the
    outcomes, or an exit status: 0 if another process has the outcomes, else that of the signal that ended the runs."""
    from onward.cli.shared.progress import progress_bars
    from onward.training.studies.groups import StudyGroup
    from onward.training.studies.variants import prepare_variants, train_variants

    group = StudyGroup.join([one.config for one in variants], seeds)
    say: Say = partial(console.print, markup=False, soft_wrap=True) if group.first else lambda sentence: None
    with progress_bars() as progress:
        ready = prepare_variants(variants, length, progress, group)
    base = variants[0]
    for one, prepared in zip(variants, ready):
        differs = "" if one is base else f"; versus {base.name}: {'; '.join(one.differences(base)) or 'no difference'}"
        say(f"{one.name}: {prepared.parameters:,} parameters{differs}")
    shared = f", {group.count} at a time" if group.count > 1 else ""
    runs = fields.counted(seeds * len(ready), "run")
    say(f"{runs} of {length} each{shared}, into {ready[0].config.out}")
    outcomes = watched(partial(train_variants, ready, seeds, group=group), group)
    return outcomes if group.first or isinstance(outcomes, int) else 0


def watched(train: "Callable[..., list[Outcome] | None]", group: "StudyGroup | None" = None) -> "list[Outcome] | int":
    """Call `train`, which runs `train_variants`, with a display as `watch` and with signals as `stop`. Returns the
    outcomes, or the exit status of a signal."""
    first = group is None or group.first
    say: Say = partial(console.print, markup=False, soft_wrap=True) if first else lambda sentence: None
    # torchrun forwards Ctrl-C, which the terminal has already sent to each process
    interrupts = 1 if group is None or group.store is None else 2
    with signals(Requests(say, interrupts)) as requests, Shown(first) as shown:
        outcomes = train(watch=shown, stop=requests.stop)
    if outcomes is None:
        say("Stopped and saved. To go on, give the same command again.")
        return 128 + requests.signal
    return outcomes
