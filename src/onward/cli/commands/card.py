"""onward card: the model card of a model or a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import ClassVar

from onward.base.errors import UserError
from onward.base.files import atomic_write
from onward.cli.shared.options import parse
from onward.cli.shared.output import print_next
from onward.hub.names import CARD

ABOUT = """\
Write the model card of a model or a run. The card shows the model's parts, the training command, data and curves,
any evaluation, and how to load the model in Onward, transformers and llama.cpp.

examples:
  onward card runs/mybook --license mit                     runs/mybook/README.md, to edit before onward push
  onward card runs/mybook --license apache-2.0 --name me/mybook --out card.md
"""


@dataclass(frozen=True)
class Options:
    """The options of `onward card`, which writes a model card."""

    positional: ClassVar[tuple[str, ...]] = ("folder",)
    folder: str  # folder of a run or a model
    license: str = ""  # license of the model, as it is named on the hub: apache-2.0, mit, cc-by-4.0, ...
    name: str = ""  # name of the model on the hub, such as me/mybook; default: the name of the folder
    out: str = ""  # file to write; default: README.md in the folder


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward card", about=ABOUT)
    folder = Path(options.folder)
    out = Path(options.out) if options.out else folder / CARD
    if out.exists():
        raise UserError(f"{out} exists already: name another file with --out, or remove it")
    from onward.reports.runs.card import model_card

    text = model_card(folder, options.license, options.name)
    with atomic_write(out) as new:
        new.write_text(text, encoding="utf-8")
    print(f"card: {quote(str(out))}")
    # push writes a card of its own unless the folder has one
    license = "" if (folder / CARD).exists() or not options.license else f" --license {quote(options.license)}"
    name = quote(options.name or "me/" + folder.resolve().name)
    print_next(f"onward push {quote(str(folder))} {name}{license} --dry-run")
