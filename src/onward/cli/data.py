"""onward data: texts as tokens to train on, and well-known texts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar, Literal

from onward.cli.options import parse
from onward.cli.output import console, print_json, print_next, print_table, printable
from onward.data import corpora
from onward.data.cleaning import Cleaning
from onward.errors import UserError

ABOUT = """\
Make tokens of texts of any size, or list and fetch well-known texts.

examples:
  onward data prepare mybook.txt notes/ talks.jsonl.gz --field body --out prepared/mine
  onward data prepare 'web/*.parquet' --tokenizer tokenizers/web --gopher --near 0.8 --out prepared/web
  onward data prepare 'hf://user/name?name=config&split=train' --tokenizer bpe:32000 --out prepared/name
  onward train prepared/mine prepared/web --weights 0.3 --weights 0.7
  onward data list
  onward data get tinyshakespeare

A preparation that was interrupted goes on when the same command is given again.
"""


@dataclass(frozen=True, kw_only=True)
class Options(Cleaning):
    """What to do with which texts."""

    positional: ClassVar[tuple[str, ...]] = ("action", "sources")
    action: Literal["prepare", "list", "get"]  # prepare SOURCES, list, or get NAME
    sources: tuple[str, ...] = ()  # files, folders, globs, .jsonl, .parquet, .gz, hf://NAME, - or a corpus
    tokenizer: str = "bpe:4096"  # char, byte, bpe:VOCABULARY, or a path to one
    out: str = ""  # the folder for the tokens
    field: str = "text"  # the field of each record that holds the text
    encoding: str = "utf-8"  # of the text files
    workers: int = 0  # processes; 0: one for each core
    json: bool = False  # print the result as JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward data", about=ABOUT)
    {"prepare": prepare, "list": known, "get": get}[options.action](options)


def prepare(options: Options) -> None:
    """Make tokens, and report what was made."""
    from onward.data.prepare import prepare

    if not options.out:
        raise UserError("no folder to write to: name one with --out")
    try:
        data = prepare(
            options.sources,
            options.tokenizer,
            Path(options.out),
            field=options.field,
            encoding=options.encoding,
            cleaning=Cleaning(**{field.name: getattr(options, field.name) for field in fields(Cleaning)}),
            workers=options.workers,
        )
    except KeyboardInterrupt:
        console.print("\nstopped; the same command goes on from here")
        raise
    report = data.info["report"]
    sources = [{key: source[key] for key in COUNTS} for source in data.info["sources"]]
    if options.json:
        print_json({"folder": options.out, **report, "sources": sources})
        return
    rows = [*sources, {"name": "all", **report}] if len(sources) > 1 else sources
    print_table([{key: row[key] for key in COUNTS} | density(row) for row in rows])
    longest = report["longest"]
    print(f"\nThe longest document has {longest['tokens']:,} tokens; it begins, in {longest['file']}:")
    print(f"  {shown(longest['text'])}")
    for reason, entry in report["dropped"].items():
        print(f"\nLeft out as {reason}: {entry['documents']:,} documents, such as")
        for sample in entry["samples"]:
            print(f"  {sample['file']}: {shown(sample['text'])}")
    if unknown := report["unknown_characters"]:
        console.print(f"{unknown:,} characters are unknown to the tokenizer and were read as \ufffd")
    print_next(f"onward train {quote(options.out)} --out runs/{quote(Path(options.out).name)}")


COUNTS = "name", "documents", "tokens", "bytes"


def density(row: Mapping[str, Any]) -> dict[str, float]:
    return {"bytes_per_token": row["bytes"] / max(1, row["tokens"])}


def shown(text: str) -> str:
    """The beginning of a text in one line."""
    return printable(" ".join(text.split()))[:100]


def known(options: Options) -> None:
    """The well-known texts."""
    built_in = {"name": "embedded", "bytes": "about 2.2 MB", "what": "the documentation inside this Python"}
    rows = [built_in | {"license": "PSF", "from": "no network needed"}]
    for name, corpus in corpora.KNOWN.items():
        own = asdict(corpus)
        rows.append({"name": name, **{key: own[key] for key in ("bytes", "what", "license")}, "from": corpus.url})
    if options.json:
        print_json(rows)
    else:
        print_table([{name: value for name, value in row.items() if name != "from"} for row in rows])
        print_next("onward train embedded --out runs/embedded", "onward data get tinyshakespeare")


def get(options: Options) -> None:
    """Fetch a well-known text."""
    if len(options.sources) != 1:
        raise UserError(f"onward data get takes the name of a corpus: {', '.join(corpora.KNOWN)}")
    (name,) = options.sources
    path = corpora.get(name)
    if options.json:
        print_json({"name": name, "path": str(path)})
    else:
        print(path)
        print_next(f"onward train {name} --out runs/{name}")
