"""onward tokenizer: learn a tokenizer from text, and compare tokenizers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote
from typing import Any, ClassVar, Literal

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from onward.cli.options import parse
from onward.cli.output import console, print_json, print_next, print_table
from onward.errors import UserError

ABOUT = """\
Learn a tokenizer from text, or compare tokenizers: how many bytes a token of each stands for, by language and kind of
text, and whether every text comes back.

examples:
  onward tokenizer train mybook.txt --vocab-size 8192 --out tokenizers/mybook
  onward tokenizer compare tokenizers/mybook runs/mybook byte      on short texts in sixteen languages
  onward tokenizer compare tokenizers/mybook char --data mybook.txt --data talks.jsonl --json
"""
PASSAGE = 4096  # characters of a text that are looked at together


@dataclass(frozen=True)
class Options:
    """What to learn or to compare."""

    positional: ClassVar[tuple[str, ...]] = ("action", "names")
    action: Literal["train", "compare"]  # train SOURCES, or compare A B
    names: tuple[str, ...] = ()  # texts to learn from; or tokenizers: char, byte, bpe:N, a file, or a folder with one
    out: str = ""  # the folder for what was learned
    kind: Literal["bpe", "char", "byte"] = "bpe"  # byte-level BPE, characters, or bytes
    vocab_size: int = 4096  # the most ids of BPE
    data: tuple[str, ...] = ()  # texts to compare on, by source, script and kind; none: short built-in ones
    field: str = "text"  # the field of each .jsonl line that holds the text
    encoding: str = "utf-8"  # of the text files
    json: bool = False  # print the result as JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward tokenizer", about=ABOUT)
    found = train(options) if options.action == "train" else compare(options)
    if options.json:
        print_json(found)
    elif options.action == "train":
        print(f"{found['folder']}: {found['vocabulary']:,} ids")
        sources, folder = join(options.names or ("mybook.txt",)), quote(options.out)
        print_next(f"onward tokenizer compare {folder} byte", f"onward train {sources} --tokenizer {folder}")
    else:
        show(found)


def train(options: Options) -> dict[str, Any]:
    """Learn a tokenizer into a folder that has none."""
    from onward.text.tokenizer import train_tokenizer

    if not options.out:
        raise UserError("no folder to write to: name one with --out")
    if (there := Path(options.out) / "tokenizer.json").exists():
        raise UserError(f"{there} is there already: choose another folder with --out")
    spec = f"bpe:{options.vocab_size}" if options.kind == "bpe" else options.kind
    with watch() as progress:
        tokenizer = train_tokenizer(spec, read(options.names, options, progress))
    tokenizer.save(options.out)
    return {"folder": options.out, "vocabulary": tokenizer.vocab_size}


def compare(options: Options) -> dict[str, Any]:
    """Compare tokenizers; those that learn do so from the texts on which they are compared."""
    from onward.text import compare
    from onward.text.tokenizer import train_tokenizer

    if not options.names:
        raise UserError("no tokenizer is named: give char, byte, bpe:N, a tokenizer.json or a folder that holds one")
    with watch() as progress:

        def texts() -> Iterator[compare.Labeled]:
            for source in options.data:
                yield from (compare.labeled(text, source) for text in read([source], options, progress, PASSAGE))
            if not options.data:
                yield from compare.built_in()

        tokenizers = {name: train_tokenizer(name, (text for text, _ in texts())) for name in options.names}
        return compare.compare(tokenizers, texts())


def watch() -> Progress:
    """What long work has come to, on a terminal."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def read(sources: Sequence[str], options: Options, progress: Progress, size: int = 1 << 16) -> Iterator[str]:
    """Passages of all sources of at most `size` characters, telling how much has been read."""
    from onward.data.sources import passages

    task = progress.add_task("reading")
    done = 0
    for text in passages(sources, field=options.field, encoding=options.encoding, size=size):
        yield text
        done += len(text)
        progress.update(task, description=f"{done / 1e6:,.1f} million characters read")


def show(found: dict[str, Any]) -> None:
    """The comparison as tables, in which a letter stands for each tokenizer, and what does not come back."""
    letters = {one["name"]: chr(ord("A") + n) for n, one in enumerate(found["tokenizers"])}
    shown = "name", "vocabulary", "bytes_per_token", "round_trip_failures"
    print_table([{"": letters[one["name"]], **{key: one[key] for key in shown}} for one in found["tokenizers"]])
    print("\nbytes per token")
    rows = [(row, row.pop("bytes_per_token")) for row in found["texts"]]
    print_table([row | {letters[name]: density for name, density in densities.items()} for row, densities in rows])
    for one in found["tokenizers"]:
        if example := one["example"]:
            told = f"{one['name']} reads {example['text']!r} and gives back {example['back']!r}"
            console.print(told, markup=False, soft_wrap=True)
