"""onward scaling: the best size and length of training for an amount of computation, and laws fitted to runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, human, print_json, print_next, print_table

ABOUT = """\
Apply published scaling laws, and fit your own. `optimum` computes the model size and number of tokens with the lowest
loss for a compute budget, by the published laws. `fit` fits a law to your own runs, from a folder of runs or a table
with the columns parameters, tokens (or flops) and loss. `run` trains small runs, fits their law and forecasts a larger
run; onward scaling run --help lists its options.

examples:
  onward scaling optimum --flops 1e21
  onward scaling optimum --params 7B                          the compute budget for which 7 billion parameters are best
  onward scaling optimum --hours 24 --device h100 --out optimum.svg
  onward scaling optimum --params 7B --requests 1e9           includes the cost of using the model
  onward scaling fit runs/                                    finished runs of several sizes and lengths
  onward scaling fit mine.csv --json
  onward scaling run mybook.txt --budget 10m --check
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `onward scaling optimum` and `onward scaling fit`."""

    positional: ClassVar[tuple[str, ...]] = ("action", "runs")
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "optimum": ("flops", "params", "tokens", "hours", "requests"),
        "fit": ("runs",),
        "hours": ("device", "count", "share"),
    }
    action: Literal["optimum", "fit", "run"]  # optimum of published laws; fit a law to RUNS; run a grid and fit its law
    runs: str = ""  # fit: a folder of runs, or a table (.csv, .tsv)
    flops: str = ""  # optimum: operations for the entire training run, such as 1e21
    params: str = ""  # optimum: number of parameters, such as 7B
    tokens: str = ""  # optimum: number of training tokens, such as 300B
    hours: str = ""  # optimum: training time in hours on --device
    device: str = "h100"  # device for --hours: b200, h200, h100, mi300x, a100, l40s, l4, v100, t4, rtx4090, rtx3090
    count: Annotated[int, Range(1, 1 << 24)] = 1  # number of devices for --hours
    share: Annotated[float, Range(0.01, 1)] = 0.4  # fraction of the peak operations per second that training reaches
    requests: str = ""  # optimum: number of tokens that the model will process in its lifetime, such as 1e12
    out: str = ""  # also draw the laws, to a file that ends in .svg, .pdf, .png, .html, .json or .csv
    json: bool = False  # print the result as JSON

    @property
    def view(self) -> str:
        if self.action == "run":
            raise UserError("the word run comes first: onward scaling run DATA --budget 10m")
        return self.action


def main(argv: Sequence[str]) -> int | None:
    if argv[:1] == ["run"]:
        from onward.cli.commands.scaling import run

        return run.main(argv[1:])
    options = parse(Options, argv, prog="onward scaling", about=ABOUT)
    result = optimum(options) if options.action == "optimum" else fit(options)
    if options.json:
        print_json(result)
    return None


def optimum(options: Options) -> dict[str, Any]:
    """Compute the best model size by each law, and print and draw the sizes as the options require."""
    from onward.planning.devices import device_flops
    from onward.planning.laws import LAWS, NEWEST, REFIT, flops_for, smaller_models
    from onward.planning.laws import optimum as best
    from onward.planning.tables import amount
    from onward.reports.pictures.law_pictures import optimum_picture

    given = [name for name in ("flops", "params", "tokens", "hours") if getattr(options, name)]
    if len(given) != 1:
        raise UserError("give one of --flops, --params, --tokens and --hours: the others follow from it")
    value = amount(getattr(options, given[0]), given[0])
    budgets = {law.name: value for law in LAWS}
    if given[0] == "hours":
        seconds = value * 3600
        budgets = dict.fromkeys(budgets, seconds * device_flops(options.device, options.count, options.share))
    elif given[0] in ("params", "tokens"):
        key = "parameters" if given[0] == "params" else "tokens"
        budgets = {law.name: flops_for(law, **{key: value}) for law in LAWS}
    result: dict[str, Any] = {"laws": [asdict(best(law, budgets[law.name])) for law in LAWS]}
    if options.requests:
        models = smaller_models(REFIT, budgets[NEWEST.name], amount(options.requests, "requests"))
        result["smaller_models"] = [{**asdict(model), "total": model.total} for model in models]
    if options.out:
        optimum_picture(budgets[NEWEST.name]).write(Path(options.out))
    if not options.json:
        show_optimum(result, options)
    return result


def show_optimum(result: dict[str, Any], options: Options) -> None:
    from onward.planning.laws import FITTED

    print_table(
        [
            {
                "law": row["law"],
                "FLOPs": f"{row['flops']:.3g}",
                "parameters": human(round(row["parameters"])),
                "range": " to ".join(human(round(end)) for end in row["range"] or ()),
                "tokens": human(round(row["tokens"])),
                "per parameter": f"{row['tokens_per_parameter']:.1f}",
                "loss": "" if row["loss"] is None else f"{row['loss']:.3f}",
                "by": row["source"],
            }
            for row in result["laws"]
        ]
    )
    if any(row["extrapolated"] for row in result["laws"]):
        console.print(
            f"\nHoffmann et al. compared sizes at {FITTED[0]:.0e} to {FITTED[1]:.0e} FLOPs: this is an extrapolation.",
            soft_wrap=True,
        )
    if models := result.get("smaller_models"):
        console.print("\nThe same loss from smaller models (re-fit of 2024), in FLOPs:")
        print_table(
            [
                {
                    "parameters": human(round(model["parameters"])),
                    "tokens": human(round(model["tokens"])),
                    "training": f"{model['training']:.3g}",
                    "use": f"{model['answering']:.3g}",
                    "together": f"{model['total']:.3g}",
                }
                for model in models
            ]
        )
    if options.out:
        console.print(f"picture: {options.out}", markup=False, soft_wrap=True)
    print_next("onward scaling fit runs", "onward models")


def fit(options: Options) -> dict[str, Any]:
    """Fit a scaling law to the runs in a folder or a table, and print and draw it as the options require."""
    from onward.cli.commands.scaling.laws import fit_with_picture, show_fit
    from onward.planning.tables import read_table
    from onward.reports.runs.record import finished_runs

    if not options.runs:
        raise UserError("no runs: name a folder of runs, or a table with the columns parameters, tokens and loss")
    path = Path(options.runs)
    runs, left_out = finished_runs(path) if path.is_dir() else (read_table(path), [])
    if left_out:
        console.print(f"left out: {', '.join(left_out)}", markup=False, soft_wrap=True)
    result = fit_with_picture(runs, options.out).plain() | {"left_out": left_out}
    if not options.json:
        show_fit(result, options.out)
        print_next(f"onward scaling optimum --flops {10 * max(run.flops for run in runs):.2g}")
    return result
