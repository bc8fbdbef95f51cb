"""onward scaling run: small runs on this machine, their law, and the forecast of a larger run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from onward import fields
from onward.cli.commands.scaling_fit import fitted, show_fit
from onward.cli.commands.train import Requests, default_name, from_toml, signals
from onward.cli.shared.options import read
from onward.cli.shared.output import console, print_json, print_next, print_table
from onward.cli.shared.progress import progress_bars
from onward.cli.shared.variants import Shown, in_one_process, time_in_words
from onward.config.part_types import SizeOrZero
from onward.errors import UserError
from onward.files import read_json, write_json
from onward.training.config import RunConfig, Tokens, seconds
from onward.training.presets import merge

if TYPE_CHECKING:
    from onward.planning.fits import Run
    from onward.training.studies.scaling_grid import Cell, Sizes
    from onward.training.studies.variants import Outcome

ABOUT = """\
Plan a grid of small runs for the time there is, train it, fit the law of its losses, and forecast a run of ten times as
many operations; with --check, that run is trained as well and compared with its forecast.

The runs differ in width, with muP, and in length: three sizes around the best one for each of four budgets. Cheap runs
come first, so that what is left out when the time is over is least missed. Runs that have ended are not repeated: the
same command goes on after an interruption.

examples:
  onward scaling run mybook.txt --budget 10m
  onward scaling run mybook.txt --budget 1h --check --out runs/law
  onward scaling run mybook.txt --grid-flops 1e12 --learning-rate 1e-2 --json
"""
LARGER = 10.0  # operations of the run that is forecast, by those of the largest in the grid


@dataclass(frozen=True)
class Options(RunConfig):
    """The grid."""

    positional: ClassVar[tuple[str, ...]] = ("sources",)
    fixed: ClassVar[tuple[str, ...]] = ("steps", "time", "epochs", "base", "batch_size", "validate_every", "weights")
    budget: str = ""  # how long everything may take, such as 10m; --check included
    grid_flops: str = ""  # or the operations of the whole grid, such as 1e12, on any machine
    check: bool = False  # train the larger run as well, and compare it with its forecast
    tokenizer: str = "byte"  # char, byte, bpe:VOCABULARY or a path; of small runs, a small vocabulary
    preset: str = "tiny"  # whose width is varied; --model.* changes its other fields
    mup: SizeOrZero = 64  # the width from which the learning rate is carried over to any width
    learning_rate: float | None = None  # of steps of 1024 tokens; none: 0.5 / mup
    validation_tokens: Tokens = (
        4096  # tokens of the validation text that are used at the end of a run, besides the next
    )
    evaluation_tokens: SizeOrZero = 32_768  # tokens of it by which the loss is measured
    config: str = ""  # a TOML file with options of `onward train`
    json: bool = False  # print the result as JSON


def main(argv: Sequence[str]) -> int:
    values = read(Options, argv, prog="onward scaling run", about=ABOUT)
    in_one_process("onward scaling run")
    given = {name: values.pop(name, None) for name in ("budget", "grid_flops", "check", "json", "config")}
    if not values.get("sources"):
        raise UserError("no text to train on: name files or folders, or `embedded` for the built-in corpus")
    if bool(given["budget"]) == bool(given["grid_flops"]):
        raise UserError("give one of --budget, such as 10m, and --grid-flops, such as 1e12")
    limit = seconds(given["budget"], "budget") if given["budget"] else None
    defaults = {
        name: getattr(Options, name)
        for name in ("tokenizer", "preset", "mup", "validation_tokens", "evaluation_tokens")
    }
    if any((Path(source) / "tokenizer.json").exists() for source in values["sources"]):
        del defaults["tokenizer"]  # tokens that were prepared have one
    shared = from_toml(Path(given["config"]), RunConfig) if given["config"] else {}
    values = merge(defaults, merge(shared, values)) | {"steps": 1, "time": "", "epochs": 0.0}
    values.setdefault("out", f"runs/{default_name(values['sources'][0])}-scaling")
    config = fields.build(RunConfig, values)
    result = run(config, limit, given)
    if isinstance(result, int):
        return result
    if given["json"]:
        print_json(result)
    return 0


def run(config: RunConfig, limit: float | None, given: dict[str, Any]) -> dict[str, Any] | int:
    """Plan, train, fit, forecast and check; the exit status where a signal ended it."""
    from onward.device import choose_device
    from onward.planning.fits import LEAST, Run
    from onward.text.tokenizer import Tokenizer
    from onward.training.inputs.texts import open_inputs, prepare_inputs
    from onward.training.studies.scaling_grid import FEW_STEPS, Sizes, grid, larger
    from onward.training.studies.variants import Variant, check_variants

    began, folder = perf_counter(), Path(config.out)
    config = replace(config, device=str(choose_device(config.device)))
    check_variants([Variant("the grid", config)])
    tokens = folder / "data-1"
    if not (tokens / "inputs.json").exists():
        with progress_bars() as progress:
            prepare_inputs(config, tokens, progress)
    vocab_size, inputs = Tokenizer.load(tokens).vocab_size, open_inputs(config, tokens, "size")
    sizes = Sizes(config, vocab_size)
    known = folder / "grid.json"
    asked = {"budget": given["budget"] or "", "grid_flops": given["grid_flops"] or "", "check": bool(given["check"])}
    plan: dict[str, Any] = read_json(known) if known.exists() else {**asked}
    if differ := next((name for name, value in asked.items() if plan.get(name) != value and name != "check"), None):
        raise UserError(
            f"{folder} holds a grid with {differ} {plan.get(differ)!r}: give the same, or choose another --out"
        )
    if not known.exists():
        plan |= planned(config, sizes, inputs, limit, asked)
        write_json(known, plan)
    config = replace(config, precision=plan["precision"], experts=plan["experts"])
    cells = grid(sizes, plan["largest"])
    say = partial(console.print, markup=False, soft_wrap=True)
    say(
        f"{len(cells)} runs of {cells[0].parameters:,} to {max(c.parameters for c in cells):,} parameters and "
        f"{min(c.tokens for c in cells):,} to {max(c.tokens for c in cells):,} tokens, into {folder}"
    )
    if (steps := min(cell.steps for cell in cells)) < FEW_STEPS:
        say(
            f"warning: the shortest run has {steps} steps, and below {FEW_STEPS} a loss says more of the first steps "
            "than of size and length: give more time or operations"
        )
    if (most := max(cell.tokens for cell in cells)) > 4 * inputs.tokens:
        say(
            f"warning: the longest run reads the {inputs.tokens:,} training tokens {most / inputs.tokens:.0f} times, "
            "and the law is one of new tokens: give more text"
        )
    left = None if limit is None else limit - (perf_counter() - began) - plan["seconds_of_check"] * asked["check"]
    outcomes = train_cells(config, cells, left)
    if isinstance(outcomes, int):
        return outcomes
    runs = [
        Run(cell.parameters, cell.tokens, figures["loss"])
        for cell, one in zip(cells, outcomes)
        for figures in one.figures
        if figures
    ]
    if len(runs) < LEAST:
        raise UserError(
            f"{len(runs)} runs ended in the time, and a law needs {LEAST}: give a longer --budget; the runs "
            f"are kept in {folder}"
        )
    result, law = fitted(runs, str(folder / "law.svg"))
    if missing := len(cells) - len(runs):
        result["warnings"].append(f"{fields.counted(missing, 'run')} of the grid diverged or had no time")
    flops = LARGER * max(one.flops for one in runs)
    size = law.law.optimum(flops)[0] if law.determined else max(one.parameters for one in runs)
    large = larger(sizes, flops, size, cells)
    forecast = law.forecast(large.parameters, large.tokens)
    result["forecast"] = {"flops": large.flops, **vars(forecast)}
    if not given["json"]:
        table(runs)
        show_fit(result, str(folder / "law.svg"))
    if given["check"]:
        checked = train_cells(config, [large], None)
        if isinstance(checked, int):
            return checked
        truth = checked[0].figures[0]
        loss = truth["loss"] if truth else None
        inside = loss is not None and forecast.low <= loss <= forecast.high
        result["check"] = {"loss": loss, "inside": inside, "error": loss and loss - forecast.loss}
        if not given["json"]:
            say(
                "check: the run diverged"
                if loss is None
                else f"check: the run has loss {loss:.3f}; forecast {forecast.loss:.3f} ({loss - forecast.loss:+.3f}), "
                f"{'inside' if inside else 'outside'} the interval"
            )
    if not given["json"]:
        print_next(f"onward runs {quote(str(folder))} --sort parameters", f"onward scaling fit {quote(str(folder))}")
    return result


def planned(
    config: RunConfig, sizes: "Sizes", inputs: Any, limit: float | None, asked: dict[str, Any]
) -> dict[str, Any]:
    """The operations of the largest run for which everything fits into the time, and the precision of all runs."""
    from onward.planning.tables import amount
    from onward.training.studies.scaling_grid import (
        grid,
        larger,
        largest_budget,
        least_budget,
        measured,
        with_precision,
    )

    least = least_budget(sizes)
    smallest = grid(sizes, least)
    config = with_precision(config, inputs, sizes.vocab_size, smallest[-1])
    fixed = {"precision": config.precision, "experts": config.experts, "seconds_of_check": 0.0}
    if limit is None:
        total, of_least = amount(asked["grid_flops"], "grid_flops"), sum(cell.flops for cell in smallest)
        if total < of_least:
            raise UserError(f"grid_flops is {total:.3g}, and the smallest grid takes {of_least:.3g}: give more")
        return fixed | {"largest": least * total / of_least}
    evaluated = config.validation_tokens + config.evaluation_tokens

    def time_of(largest: float) -> tuple[float, float]:
        cells = grid(sizes, largest)
        large = larger(sizes, LARGER * largest, cells[-1].parameters, cells)
        own = sum(speed.seconds(cell, evaluated) for cell in cells)
        return own, speed.seconds(large, evaluated) * asked["check"]

    began, largest, pair = perf_counter(), least, [smallest[0], smallest[-1]]
    for _ in range(2):  # the second time at the sizes that the first one chose
        speed = measured(config, inputs, sizes.vocab_size, pair)
        left = 0.95 * (limit - (perf_counter() - began))
        largest = largest_budget(lambda flops, left=left: sum(time_of(flops)) <= left, least)  # type: ignore[misc]
        if not largest:
            need = sum(time_of(least)) / 0.95 + perf_counter() - began
            raise UserError(
                f"budget is {asked['budget']}, and the smallest grid takes about {time_in_words(need)} on this machine"
                f"{' with --check' if asked['check'] else ''}: give more time"
            )
        pair = [smallest[0], max(grid(sizes, largest), key=lambda cell: cell.flops / cell.steps)]
    return fixed | {"largest": largest, "seconds_of_check": time_of(largest)[1]}


def train_cells(config: RunConfig, cells: "Sequence[Cell]", limit: float | None) -> "list[Outcome] | int":
    """Train runs of a grid, with their progress; the exit status where a signal ended it."""
    from onward.training.studies.variants import prepare_variants, train_variants

    variants = prepare_variants([cell.variant(config) for cell in cells])
    say = partial(console.print, markup=False, soft_wrap=True)
    with signals(Requests(say, interrupts=1)) as requests, Shown() as shown:
        outcomes = train_variants(variants, 1, shown, requests.stop, float("inf") if limit is None else limit)
    if outcomes is None:
        say("Stopped and saved. To go on, give the same command again.")
        return 128 + requests.signal
    return outcomes


def table(runs: "Sequence[Run]") -> None:
    """Print the runs of a grid."""
    rows = [
        {
            "FLOPs": f"{one.flops:.2e}",
            "parameters": f"{one.parameters:,.0f}",
            "tokens": f"{one.tokens:,.0f}",
            "per parameter": f"{one.tokens / one.parameters:.1f}",
            "loss": f"{one.loss:.4f}",
        }
        for one in sorted(runs, key=lambda one: one.flops)
    ]
    print_table(rows)
    console.print()
