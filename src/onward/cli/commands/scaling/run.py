"""onward scaling run: small runs on this machine, their law, and the forecast of a larger run."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar

from onward.base import fields
from onward.base.errors import UserError
from onward.cli.commands.scaling.laws import fit_with_picture, show_fit
from onward.cli.shared.options import read
from onward.cli.shared.output import console, print_json, print_next, print_table
from onward.cli.shared.progress import progress_bars
from onward.cli.shared.run_options import COMMON, default_name, from_toml
from onward.cli.shared.variants import watched
from onward.config.ranges import SizeOrZero
from onward.training.config import RunConfig, TokenCount, seconds
from onward.training.presets import merge

if TYPE_CHECKING:
    from onward.planning.fits import RunPoint
    from onward.training.studies.scaling_study import ScalingStudy

ABOUT = """\
Plan a grid of small runs for a time budget, train it, fit a law to its losses, and forecast a run with ten times the
operations; with --check, also train that run and compare it with its forecast.

The runs differ in width, with muP, and in length: three sizes around the best one for each of four budgets. Cheap runs
come first, so that only the most expensive runs are missing if time runs out. Finished runs are not repeated: the same
command continues after an interruption.

examples:
  onward scaling run mybook.txt --budget 10m
  onward scaling run mybook.txt --budget 1h --check --out runs/law
  onward scaling run mybook.txt --grid-flops 1e12 --learning-rate 1e-2 --json
"""


@dataclass(frozen=True)
class Options(RunConfig):
    """The options of `onward scaling run`, which trains a grid of small runs to forecast a larger one."""

    positional: ClassVar[tuple[str, ...]] = ("sources",)
    fixed: ClassVar[tuple[str, ...]] = ("steps", "time", "epochs", "base", "batch_size", "validate_every", "weights")
    common: ClassVar[tuple[str, ...]] = (
        *("budget", "grid_flops", "check", "out", "config", "mup", *COMMON),
        *("evaluation_tokens", "validation_tokens"),
    )
    budget: str = ""  # time limit for the command, including --check, such as 10m
    grid_flops: str = ""  # number of operations for the entire grid, such as 1e12, instead of --budget
    check: bool = False  # also train the larger run, and compare its loss with the forecast
    tokenizer: str = "byte"  # char, byte, bpe:VOCABULARY or a path; small runs need a small vocabulary
    preset: str = "tiny"  # preset whose width is varied; --model.* changes its other fields
    mup: SizeOrZero = 64  # width for which learning_rate is given; muP adapts it to the other widths
    learning_rate: float | None = None  # learning rate for steps of 1024 tokens; default: 0.5 / mup
    validation_tokens: TokenCount = (
        4096  # number of tokens of the validation text for the validation at the end of a run
    )
    evaluation_tokens: SizeOrZero = 32_768  # number of tokens of the validation text on which the loss is measured
    config: str = ""  # a TOML file with options of `onward train`
    json: bool = False  # print the result as JSON


def main(argv: Sequence[str]) -> int:
    values = read(Options, argv, prog="onward scaling run", about=ABOUT)
    given = {name: values.pop(name, None) for name in ("budget", "grid_flops", "check", "json", "config")}
    if not values.get("sources"):
        raise UserError("no text to train on: name files or folders, or `embedded` for the built-in corpus")
    if bool(given["budget"]) == bool(given["grid_flops"]):
        raise UserError("give either --budget, such as 10m, or --grid-flops, such as 1e12")
    if given["budget"]:
        seconds(given["budget"], "budget")  # raises a UserError before any text is read
    defaults = {
        name: getattr(Options, name)
        for name in ("tokenizer", "preset", "mup", "validation_tokens", "evaluation_tokens")
    }
    if any((Path(source) / "tokenizer.json").exists() for source in values["sources"]):
        del defaults["tokenizer"]  # prepared tokens have a tokenizer
    shared = from_toml(Path(given["config"]), RunConfig) if given["config"] else {}
    values = merge(defaults, merge(shared, values)) | {"steps": 1, "time": "", "epochs": 0.0}
    values.setdefault("out", f"runs/{default_name(values['sources'][0])}-scaling")
    config = fields.build(RunConfig, values)
    result = run(config, given)
    if isinstance(result, int):
        return result
    if given["json"]:
        print_json(result)
    return 0


def run(config: RunConfig, given: dict[str, Any]) -> dict[str, Any] | int:
    """Return the result as a JSON object, or the exit status if a signal ended the training."""
    from onward.training.studies.scaling_study import compared, law_figures, open_study, train_cells

    budget, flops, check = given["budget"] or "", given["grid_flops"] or "", bool(given["check"])
    with progress_bars() as progress:
        study = open_study(config, budget=budget, grid_flops=flops, check=check, progress=progress)
    describe(study)
    outcomes = watched(partial(train_cells, study.config, study.cells, limit=study.seconds_left))
    if isinstance(outcomes, int):
        return outcomes
    runs, picture = study.runs(outcomes), str(Path(config.out) / "law.svg")
    law = fit_with_picture(runs, picture)
    large = study.larger_cell(law)
    forecast = law.loss.forecast(large.parameters, large.tokens)
    result = law_figures(study, law, forecast)
    if not given["json"]:
        table(runs)
        show_fit(result, picture)
    if check:
        checked = watched(partial(train_cells, study.config, [large]))
        if isinstance(checked, int):
            return checked
        result["check"] = compared(forecast, checked[0])
        if not given["json"]:
            show_check(result)
    if not given["json"]:
        folder = quote(config.out)
        print_next(f"onward runs {folder} --sort parameters", f"onward scaling fit {folder}")
    return result


def describe(study: "ScalingStudy") -> None:
    say, sizes = partial(console.print, markup=False, soft_wrap=True), [cell.parameters for cell in study.cells]
    lengths = [cell.tokens for cell in study.cells]
    say(
        f"{len(sizes)} runs of {sizes[0]:,} to {max(sizes):,} parameters and {min(lengths):,} to {max(lengths):,} "
        f"tokens, into {study.config.out}"
    )
    for warning in study.warnings():
        say(f"warning: {warning}")


def show_check(result: dict[str, Any]) -> None:
    check, expected = result["check"], result["forecast"]["loss"]
    sentence = "check: the run diverged"
    if check["loss"] is not None:
        place = "inside" if check["inside"] else "outside"
        sentence = (
            f"check: the run has loss {check['loss']:.3f}; forecast {expected:.3f} ({check['error']:+.3f}), "
            f"{place} the interval"
        )
    console.print(sentence, markup=False, soft_wrap=True)


def table(runs: "Sequence[RunPoint]") -> None:
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
