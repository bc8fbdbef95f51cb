"""onward sweep: a run for each value of an option."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar

from onward.base import fields
from onward.base.errors import UserError
from onward.cli.shared.arguments import Argument, arguments
from onward.cli.shared.options import nest
from onward.cli.shared.output import console, print_json, print_next, print_table
from onward.cli.shared.training import in_processes
from onward.cli.shared.variants import (
    COMMON_OF_VARIANTS,
    VariantOptions,
    folder_of,
    read_values,
    take,
    train_all,
    variant,
)
from onward.training.config import RunConfig
from onward.training.presets import merge

ABOUT = """\
Train a run for each value of an option, and plot the losses.

Except --steps, --epochs and --seed, options of `onward train` that take a number accept several numbers, separated by
commas. For other options, use `--sweep OPTION=VALUE,VALUE`. Two options form a grid. Finished runs are not repeated:
the same command continues after an interruption, and accepts more values.

examples:
  onward sweep mybook.txt --learning-rate 1e-4,3e-4,1e-3,3e-3 --steps 500
  onward sweep mybook.txt --model.d-model 64,128,256 --flops 1e12
  onward sweep mybook.txt --sweep schedule=cosine,wsd,linear --time 60s --seeds 3
  onward sweep mybook.txt --learning-rate 1e-3,3e-3,1e-2 --sweep optimizer=adamw,muon --tokens 2M
  torchrun --standalone --nproc-per-node 2 -m onward sweep mybook.txt --learning-rate 1e-3,3e-3 --steps 500
"""
SAME = "out", "seed", "steps", "time", "epochs"  # options that cannot be swept
MOST = 2  # maximum number of options to sweep together


@dataclass(frozen=True)
class Options(VariantOptions):
    """The options of `onward sweep`, which trains a run for each value of an option."""

    common: ClassVar[tuple[str, ...]] = ("sweep", *COMMON_OF_VARIANTS)
    sweep: tuple[str, ...] = ()  # OPTION=VALUE,VALUE: an option and the values to try


def main(argv: Sequence[str]) -> int:
    return in_processes(lambda: sweep(argv), "give the same command again")


def sweep(argv: Sequence[str]) -> int:
    """All processes share the runs, and the first one prints the table."""
    values = merge(*read_values(Options, argv, "onward sweep", ABOUT))
    own, length = take(values, Options)
    axes = swept(values, own.get("sweep", ()))
    if not axes:
        raise UserError("nothing to sweep: give an option several values, such as --learning-rate 1e-4,3e-4,1e-3")
    if len(axes) > MOST:
        raise UserError(f"{', '.join(axes)} are too many options to sweep together: sweep one or two")
    values["out"] = folder_of(values, "sweep")
    grid = [dict(zip(axes, chosen)) for chosen in product(*axes.values())]
    names = [",".join(f"{name}={value}" for name, value in point.items()) for point in grid]
    variants = [variant(name, merge(values, nest(dict(point)))) for name, point in zip(names, grid)]
    seeds = fields.convert(int, own.get("seeds", Options.seeds), "seeds")
    outcomes = train_all(variants, seeds, length)
    if isinstance(outcomes, int):
        return outcomes
    from onward.reports.pictures.numbers import write_tables
    from onward.reports.runs.variants import Valley, exact, plain, results, row, valley_picture
    from onward.training.studies.variants import common_measure

    measure = common_measure(variants)
    swept_results = results(outcomes, measure)
    valley = Valley.of(grid, swept_results)
    _, _, best = valley.best()
    out = Path(values["out"])
    picture, against = valley_picture(valley, measure, str(length)), f"against {best.name}"
    for name in "sweep.svg", "sweep.pdf", "sweep-curves.csv":
        picture.write(out / name)
    table = [{k: v for k, v in row(one, best, measure).items() if k != against} for one in swept_results]
    written = write_tables(out / "sweep", table, [exact(one) for one in swept_results])
    warning = valley.edge()
    if own.get("json"):
        best_name = best.name if best.values else None
        differ = [one.differences(variants[0]) for one in variants]
        rows = [{**point, **plain(one), "differs": own} for point, one, own in zip(grid, swept_results, differ)]
        print_json({"measure": measure, "length": str(length), "runs": rows, "best": best_name, "warning": warning})
    else:
        print_table(table)
        console.print(f"\nbest: {best.name}" if best.values else "\nall runs diverged", markup=False, soft_wrap=True)
    if warning:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    console.print(f"picture: {out / 'sweep.svg'}, sweep.pdf, sweep-curves.csv", markup=False, soft_wrap=True)
    console.print(f"table: {out / 'sweep.md'}, {', '.join(path.name for path in written[1:])}", markup=False)
    if not own.get("json"):
        print_next(f"onward runs {quote(str(out))} --sort validation-loss")
    return 0


def swept(values: dict[str, Any], named: Sequence[str]) -> dict[str, list[str]]:
    """Remove numeric options with several values from `values`; return the values to sweep, of these options and of
    those that `--sweep` names."""
    table = {argument.name: argument for argument in arguments(RunConfig) if argument.name not in SAME}
    axes = {}
    for name, argument in table.items():
        given = lookup(values, name)
        if isinstance(given, str) and "," in given and takes_number(argument):
            remove(values, name)
            axes[name] = split(given)
    for text in named:
        name, equals, given = text.partition("=")
        name = name.strip().strip("-").replace("-", "_")
        if name not in table or not equals or not given:
            problem = f"{name} cannot be swept: {fields.nearest(name, table)}" if equals else "write OPTION=VALUE,VALUE"
            raise UserError(f"--sweep {text}: {problem}")
        axes[name] = split(given)
    for name, choices in axes.items():
        if len({*choices}) < len(choices) or len(choices) < 2 or "" in choices:
            raise UserError(f"{name} is {','.join(choices)}: give at least two different values")
    return axes


def takes_number(argument: Argument) -> bool:
    return argument.kind.classes <= {int, float, type(None)}


def split(text: str) -> list[str]:
    """Split at commas, except inside parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def lookup(values: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted name; None if there is none."""
    here: Any = values
    for step in name.split("."):
        here = here.get(step) if isinstance(here, Mapping) else None
    return here


def remove(values: dict[str, Any], name: str) -> None:
    """Remove the value at a dotted name, and inner dicts that become empty."""
    first, _, rest = name.partition(".")
    if not rest:
        del values[first]
    else:
        remove(values[first], rest)
        if not values[first]:
            del values[first]
