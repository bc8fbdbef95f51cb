"""onward push: a model to the Hugging Face hub."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from onward.base.errors import UserError
from onward.cli.shared.options import parse
from onward.cli.shared.output import print_json, print_next, print_table
from onward.hub.names import CARD, HubName, size_of
from onward.hub.upload import model_files, upload

ABOUT = """\
Upload a model to the Hugging Face hub, with its card, in one commit. Optimizer state, logs and data are not uploaded.
Log in with `hf auth login`, or set HF_TOKEN.

examples:
  onward push runs/mybook me/mybook --license mit --dry-run          list the files, and show the card
  onward push runs/mybook me/mybook --license mit --private
  onward push runs/mybook me/mybook                                  uses the README.md from onward card
"""


@dataclass(frozen=True)
class Options:
    """The options of `onward push`, which uploads a model to the Hugging Face hub."""

    positional: ClassVar[tuple[str, ...]] = ("folder", "name")
    folder: str  # folder of a run or a model
    name: str  # name of the model on the hub, such as me/mybook, or me/mybook@branch
    license: str = ""  # license of the model, for a new card: apache-2.0, mit, cc-by-4.0, ...
    private: bool = False  # make the model private when the upload creates it
    dry_run: bool = False  # list the files without uploading them
    json: bool = False  # print the result as JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward push", about=ABOUT)
    folder, model = Path(options.folder), HubName.of(options.name)
    if model is None or "/" not in model.name:
        raise UserError(f"{options.name} is not of the form OWNER/MODEL: give a name such as me/mybook")
    files = contents(folder, options.license, model.name)
    sizes = {path: len(file) if isinstance(file, bytes) else file.stat().st_size for path, file in files.items()}
    rows, total = [{"file": path, "bytes": size} for path, size in sizes.items()], sum(sizes.values())
    result = {"name": str(model), "files": rows, "bytes": total}
    if not options.dry_run:
        result["commit"] = upload(model, files, private=options.private)
    if options.json:
        print_json(result)
    elif options.dry_run:
        if isinstance(card := files[CARD], bytes):
            print(card.decode())
        print_table(rows)
        print(f"{len(rows)} files, {size_of(total)}, would go to {model}{' (private)' * options.private}")
    else:
        print(f"{len(rows)} files, {size_of(total)}: {result['commit']}")
        print_next(f'onward generate hf://{model} "Once upon"')


def contents(folder: Path, license: str, name: str) -> Mapping[str, Path | bytes]:
    """Return the files to upload, by their paths on the hub; if the folder has no model card, generate one, as
    bytes."""
    from onward.checkpoint.load import load_model
    from onward.reports.runs.card import model_card

    if not (folder / CARD).exists():
        card = model_card(folder, license, name).encode()
        return {CARD: card} | {path: folder / path for path in model_files(folder)}
    if license:
        raise UserError(
            f"Cannot add license {license}, because {folder / CARD} exists: name the license there, or remove that file"
        )
    load_model(folder)  # raises an error before the upload if the model cannot be loaded
    return {path: folder / path for path in model_files(folder)}
