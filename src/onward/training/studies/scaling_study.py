"""A scaling study: a grid of small runs within a time limit or a compute budget, and a larger run whose loss is
forecast.

FOLDER/
  grid.json          the requested budget, the largest run of the grid, and the precision of all runs
  data-1/            the tokens
  NAME/seed-S/       the runs, as `variants` trains them
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from onward.base import fields
from onward.base.device import choose_device
from onward.base.errors import UserError
from onward.base.files import read_json, write_json
from onward.data.progress import Progress, silent
from onward.planning.fits import LEAST, Forecast, RunPoint
from onward.planning.fitted import LARGER, FittedLaw
from onward.planning.tables import amount
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig, seconds
from onward.training.inputs.texts import Inputs, open_inputs
from onward.training.studies.scaling_grid import (
    FEW_STEPS,
    Cell,
    Sizes,
    grid,
    larger,
    largest_budget,
    least_budget,
    measured,
    with_precision,
)
from onward.training.studies.tokens import study_tokens
from onward.training.studies.variants import (
    Moment,
    Outcome,
    Variant,
    check_variants,
    prepare_variants,
    train_variants,
)

SPENT = 0.95  # share of the time limit to plan for


@dataclass(frozen=True)
class ScalingStudy:
    """A planned grid of small runs, to which a scaling law will be fitted, with the configuration of these runs; their
    tokens are prepared."""

    config: RunConfig  # config of all runs; its `out` is the folder of the study
    sizes: Sizes
    cells: list[Cell]
    training_tokens: int
    seconds_left: float  # time left for the grid; infinity: no limit

    def warnings(self) -> list[str]:
        """List, as sentences, the reasons why a law fitted to this grid would be unreliable; an empty list if there are
        none."""
        sentences, steps = [], min(cell.steps for cell in self.cells)
        if steps < FEW_STEPS:
            sentences.append(
                f"the shortest run has {steps} steps, and with fewer than {FEW_STEPS} steps the loss depends more "
                "on the first steps than on model size and data: give more time or operations"
            )
        if (most := max(cell.tokens for cell in self.cells)) > 4 * self.training_tokens:
            sentences.append(
                f"the longest run reads the {self.training_tokens:,} training tokens "
                f"{most / self.training_tokens:.0f} times, but the law assumes new tokens: give more text"
            )
        return sentences

    def runs(self, outcomes: Sequence[Outcome]) -> list[RunPoint]:
        """Return the completed runs of the grid as points for a scaling law. `outcomes` are the results of the grid's
        cells, in their order. Raises a UserError if the completed runs are too few for a law."""
        pairs = zip(self.cells, outcomes)
        ended = [
            RunPoint(cell.parameters, cell.tokens, one["loss"]) for cell, done in pairs for one in done.figures if one
        ]
        if len(ended) < LEAST:
            raise UserError(
                f"Cannot fit a law to {len(ended)} runs, because it needs {LEAST}: give a longer --budget; "
                f"the completed runs are kept in {self.config.out}"
            )
        return ended

    def larger_cell(self, law: FittedLaw) -> Cell:
        """Return the larger run that tests the forecast of a fitted law: its model size is the optimum of the law for
        its number of operations."""
        fit = law.loss
        size = fit.law.optimum(law.larger_flops)[0] if fit.determined else max(run.parameters for run in law.runs)
        return larger(self.sizes, law.larger_flops, size, self.cells)


def open_study(
    config: RunConfig, *, budget: str = "", grid_flops: str = "", check: bool = False, progress: Progress = silent
) -> ScalingStudy:
    """Prepare the tokens and plan the grid of runs, or read the plan in the folder `config.out`.

    Set either `budget`, the total time such as 10m (including the larger run if `check`), or `grid_flops`, the
    operations of the grid such as 1e12. Raises a UserError if the smallest grid exceeds the budget, or if the folder
    contains a grid for another budget.
    """
    if bool(budget) == bool(grid_flops):
        raise UserError(
            "budget and grid_flops are both given, or both missing: give one of --budget, such as 10m, and "
            "--grid-flops, such as 1e12"
        )
    limit = seconds(budget, "budget") if budget else math.inf
    began, folder = perf_counter(), Path(config.out)
    config = replace(config, device=str(choose_device(config.device)))
    check_variants([Variant("the grid", config)])
    tokens, known = study_tokens(config, progress), folder / "grid.json"
    inputs, sizes = open_inputs(config, tokens, "size"), Sizes(config, Tokenizer.load(tokens).vocab_size)
    asked = {"budget": budget, "grid_flops": grid_flops, "check": check}
    plan: dict[str, Any] = read_json(known) if known.exists() else {**asked}
    if differ := next((name for name in ("budget", "grid_flops") if plan.get(name) != asked[name]), None):
        raise UserError(
            f"{folder} contains a grid with {differ} {plan.get(differ)!r}: give the same, or choose another --out"
        )
    if not known.exists():
        plan |= planned(config, sizes, inputs, limit, asked)
        write_json(known, plan)
    config = replace(config, precision=plan["precision"], experts=plan["experts"])
    left = limit - (perf_counter() - began) - plan["seconds_of_check"] * check
    return ScalingStudy(config, sizes, grid(sizes, plan["largest"]), inputs.tokens, left)


def planned(config: RunConfig, sizes: Sizes, inputs: Inputs, limit: float, asked: dict[str, Any]) -> dict[str, Any]:
    """Plan a grid: return the content of grid.json as a dict, with the operations of the grid's largest run and the
    precision of all runs. `asked` contains the user's options: "grid_flops", the operations of the whole grid;
    "budget", the time; "check", whether a larger run is also trained. Without grid_flops, all runs together take at
    most `limit` seconds. Raises a UserError if even the smallest grid takes more."""
    least = least_budget(sizes)
    smallest = grid(sizes, least)
    config = with_precision(config, inputs, sizes.vocab_size, smallest[-1])
    fixed = {"precision": config.precision, "experts": config.experts, "seconds_of_check": 0.0}
    if asked["grid_flops"]:
        total, of_least = amount(asked["grid_flops"], "grid_flops"), sum(cell.flops for cell in smallest)
        if total < of_least:
            raise UserError(f"grid_flops is {total:.3g}, less than the {of_least:.3g} of the smallest grid: give more")
        return fixed | {"largest": least * total / of_least}
    evaluated = config.validation_tokens + config.evaluation_tokens

    def time_of(largest: float) -> tuple[float, float]:
        """Estimate the seconds of a grid, and of the larger run if it is trained."""
        cells = grid(sizes, largest)
        large = larger(sizes, LARGER * largest, cells[-1].parameters, cells)
        own = sum(speed.seconds(cell, evaluated) for cell in cells)
        return own, speed.seconds(large, evaluated) * asked["check"]

    began, largest, pair = perf_counter(), least, [smallest[0], smallest[-1]]
    for _ in range(2):  # the second pass times the sizes that the first pass chose
        speed = measured(config, inputs, sizes.vocab_size, pair)
        left = SPENT * (limit - (perf_counter() - began))
        largest = largest_budget(lambda flops, left=left: sum(time_of(flops)) <= left, least)  # type: ignore[misc]
        if not largest:
            need = fields.time_in_words(sum(time_of(least)) / SPENT + perf_counter() - began)
            raise UserError(
                f"budget is {asked['budget']}, too short for the smallest grid, which takes about {need} on this "
                f"machine{' with --check' if asked['check'] else ''}: give more time"
            )
        pair = [smallest[0], max(grid(sizes, largest), key=lambda cell: cell.flops / cell.steps)]
    return fixed | {"largest": largest, "seconds_of_check": time_of(largest)[1]}


def train_cells(
    config: RunConfig,
    cells: Sequence[Cell],
    watch: Callable[[Moment], None] = lambda moment: None,
    stop: Callable[[], bool] = lambda: False,
    limit: float = math.inf,
) -> list[Outcome] | None:
    return train_variants(prepare_variants([cell.variant(config) for cell in cells]), 1, watch, stop, limit)


def law_figures(study: ScalingStudy, law: FittedLaw, forecast: Forecast) -> dict[str, Any]:
    """Return the law fitted to a grid as a JSON object, with the forecast for a larger run, and a warning if runs of
    the grid are missing."""
    result = law.plain()
    if missing := len(study.cells) - len(law.runs):
        result["warnings"].append(f"{fields.counted(missing, 'run')} of the grid diverged or did not start in time")
    flops = 6.0 * forecast.parameters * forecast.tokens
    return result | {"forecast": {"flops": flops, **vars(forecast)}}


def compared(forecast: Forecast, outcome: Outcome) -> dict[str, Any]:
    """Compare the larger run with the forecast of the law: return a JSON object with its measured loss (None if it
    diverged), whether this is inside the interval of the forecast, and how far it is from the forecast."""
    truth = outcome.figures[0]
    loss = truth["loss"] if truth else None
    inside = loss is not None and forecast.low <= loss <= forecast.high
    return {"loss": loss, "inside": inside, "error": loss and loss - forecast.loss}
