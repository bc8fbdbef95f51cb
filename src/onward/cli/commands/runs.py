"""onward runs: the runs in a folder, with their figures."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar, Literal

from onward.base.errors import UserError
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_json, print_next, print_table

ABOUT = """\
List the runs in a folder and its subfolders, with their progress and results. The size is the number of parameters. The
loss is the validation loss in nats per token.

examples:
  onward runs
  onward runs runs/ablations --sort bits-per-byte
  onward runs --json
"""


@dataclass(frozen=True)
class Options:
    """The options of `onward runs`, which lists training runs."""

    positional: ClassVar[tuple[str, ...]] = ("folder",)
    folder: str = "runs"  # folder to search, three levels deep
    sort: Literal["when", "name", "parameters", "validation-loss", "bits-per-byte"] = "when"  # when: newest first
    json: bool = False  # print the figures as JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward runs", about=ABOUT)
    folder = Path(options.folder)
    if not folder.is_dir() and options.folder != Options.folder:
        raise UserError(f"there is no folder {folder}: name a folder of runs")
    from onward.reports.runs.record import RunRecord, find_runs

    figures = [asdict(RunRecord(run).figures()) for run in find_runs(folder)]
    key = options.sort.replace("-", "_")
    figures.sort(key=lambda run: (run[key] is None, run[key] or 0) if key != "name" else run[key])
    if key == "when":
        figures.reverse()
    if options.json:
        print_json(figures)
    elif not figures:
        console.print(f"There are no runs in {folder}: onward train mybook.txt --out runs/mybook starts one.")
    else:
        print_table([row(run) for run in figures])
        print_next(f"onward report {quote(figures[0]['name'])}")


def row(run: dict[str, Any]) -> dict[str, str]:
    from onward.reports.pictures.plot import clock, short

    shown = lambda name, form: "" if run[name] is None else form(run[name])
    return {
        "run": run["name"],
        "state": run["state"],
        "step": f"{run['step']}/{shown('steps', str) or '?'}",
        "size": shown("parameters", short),
        "loss": shown("validation_loss", "{:.4f}".format),
        "bits/byte": shown("bits_per_byte", "{:.4f}".format),
        "time": shown("seconds", clock),
        "written": run["when"][5:],
    }
