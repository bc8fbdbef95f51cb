"""onward data: well-known texts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from onward.cli.options import parse
from onward.cli.output import print_json, print_next, print_table
from onward.data import corpora
from onward.errors import UserError

ABOUT = """\
List well-known texts, or fetch one with its checksum verified.

examples:
  onward data list
  onward data get tinyshakespeare
"""


@dataclass(frozen=True)
class Options:
    """What to do with which corpus."""

    action: Literal["list", "get"]  # list, or get NAME
    name: str = ""  # the corpus to get
    json: bool = False  # print the result as JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward data", about=ABOUT, positional=("action", "name"))
    if options.action == "get":
        if not options.name:
            raise UserError(f"onward data get takes the name of a corpus: {', '.join(corpora.KNOWN)}")
        path = corpora.get(options.name)
        if options.json:
            print_json({"name": options.name, "path": str(path)})
        else:
            print(path)
            print_next(f"onward train {options.name} --out runs/{options.name}")
        return
    built_in = {"name": "embedded", "bytes": "about 2.2 MB", "what": "the documentation inside this Python"}
    rows = [built_in | {"licence": "PSF", "from": "no network needed"}]
    for name, known in corpora.KNOWN.items():
        own = asdict(known)
        rows.append({"name": name, **{key: own[key] for key in ("bytes", "what", "licence")}, "from": known.url})
    if options.json:
        print_json(rows)
    else:
        print_table([{name: value for name, value in row.items() if name != "from"} for row in rows])
        print_next("onward train embedded --out runs/embedded", "onward data get tinyshakespeare")
