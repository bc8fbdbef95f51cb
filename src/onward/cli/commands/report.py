"""onward report: the page of a run or a model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, ClassVar

from onward.base.errors import UserError
from onward.base.files import writable_ending
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_json
from onward.hub.folder import locate

if TYPE_CHECKING:
    from onward.reports.runs.record import Figures

ABOUT = """\
Write the report of a model or of a run, even during training: a self-contained page with curves, report card, samples,
attention and next tokens. For a run, also write the report card as card.md. The card lists data, size, cost, loss,
limitations, and the scores stored by onward evaluate next to published figures.

examples:
  onward report runs/mybook                                 runs/mybook/report.html, card.md and loss.svg
  onward report runs/mybook --text "The cat sat on the mat, and the dog looked at the cat."
  onward report runs/mybook --compare runs/other            with the curves and options of another run
  onward report runs/mybook --out mybook.html --json
  onward report runs/mybook --csv --pdf                     with curves.csv, figures.csv, scores.csv and loss.pdf
"""


@dataclass(frozen=True)
class Options:
    """The options of `onward report`, which writes the report page of a model or run."""

    positional: ClassVar[tuple[str, ...]] = ("folder",)
    folder: str  # folder of a run or a model, or a name on the hub
    out: str = ""  # file to write the page to; default: report.html in the folder
    text: str = ""  # text whose attention and next tokens are shown; default: sentences from the run's validation text
    compare: str = ""  # folder of a second run whose curves are also drawn
    csv: bool = False  # also write the curves, figures and task scores as CSV files, in the folder of the page
    pdf: bool = False  # also write the loss curve of a run as loss.pdf, in the folder of the page
    device: str = "auto"  # auto, cpu, cuda, mps
    json: bool = False  # print the figures as JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward report", about=ABOUT)
    out = Path(options.out) if options.out else None
    if out and out.is_dir():
        raise UserError(f"{out} is a folder: set --out to a file, such as {out / 'report.html'}")
    if out:
        writable_ending(out, ".html")
    from onward.reports.runs.write import write_reports

    compare = Path(options.compare) if options.compare else None
    folder = locate(options.folder)
    if out is None and not Path(options.folder).is_dir():
        kind = "GGUF file" if Path(options.folder).exists() else "model on the hub"
        raise UserError(
            f"Cannot write a report into {options.folder}, a {kind}: set --out to a file, such as report.html"
        )
    figures = write_reports(folder, options.text, out=out, compare=compare, device=options.device)
    page = out or folder / "report.html"
    files = written(folder, page.parent, figures, options)
    if options.json:
        print_json(asdict(figures) | {"report": str(page), "files": [*map(str, files)]})
        return
    console.print(f"report: {quote(str(page))}", markup=False, soft_wrap=True)
    for file in files:
        console.print(f"numbers: {file}" if file.suffix == ".csv" else f"picture: {file}", markup=False, soft_wrap=True)


def written(folder: Path, out: Path, figures: "Figures", options: Options) -> list[Path]:
    """Write the files of --csv and --pdf to the folder `out`; return them."""
    from onward.reports.runs.files import write_csv, write_pdf

    return (write_csv(folder, out, figures) if options.csv else []) + (write_pdf(folder, out) if options.pdf else [])
