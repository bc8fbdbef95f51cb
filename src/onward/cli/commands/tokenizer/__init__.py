"""onward tokenizer: train a tokenizer on text, compare tokenizers, show the pieces of a text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

from onward.base.errors import UserError
from onward.cli.commands.tokenizer.pieces import print_pieces, show
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_json, print_next, print_table
from onward.cli.shared.sources import announce
from onward.config.ranges import Share
from onward.data.progress import Progress
from onward.data.reading import Reading
from onward.data.sources import Source, download_corpora, passages, stored_streams

ABOUT = """\
Train a tokenizer on text, compare tokenizers, or show the pieces of a text. The comparison shows bytes per token for
each language and kind of text, and whether decoding restores every text.

examples:
  onward tokenizer train mybook.txt --vocab-size 8192 --out tokenizers/mybook
  onward tokenizer compare tokenizers/mybook runs/mybook byte      on short texts in sixteen languages
  onward tokenizer compare tokenizers/mybook char --data mybook.txt --data talks.jsonl --json
  onward tokenizer show gpt2 runs/mybook byte "Hello, world"      pieces in colors; --ids: with ids and bytes
"""
OF_TEXT = "field", "encoding", "raw", "repeated_lines"  # options for reading texts
PASSAGE_CHARS = 4096  # maximum number of characters per passage; script and kind are determined for each passage


@dataclass(frozen=True)
class Options:
    """The options of `onward tokenizer`, which trains, compares and shows tokenizers."""

    positional: ClassVar[tuple[str, ...]] = ("action", "names")
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "train": ("out", "kind", "vocab_size", *OF_TEXT),
        "compare": ("data",),
        "show": ("ids",),
        "data": OF_TEXT,
    }
    action: Literal["train", "compare", "show"]  # train SOURCES, compare A B, or show MODELS TEXT
    names: tuple[str, ...] = ()  # SOURCES: texts; A, B: char, byte, bpe:N, a file or folder; TEXT may be - (stdin)
    out: str = ""  # folder for the trained tokenizer
    kind: Literal["bpe", "char", "byte"] = "bpe"  # byte-level BPE, characters, or bytes
    vocab_size: int = 4096  # maximum vocabulary size of a BPE tokenizer
    data: tuple[str, ...] = ()  # texts to compare on, grouped by source, script and kind; default: short built-in texts
    field: str = "text"  # column of a table, or key of a .jsonl line, that contains the text
    encoding: str = "utf-8"  # encoding of text files
    raw: bool = False  # keep the markup of HTML, XML, Markdown and notebooks
    repeated_lines: Share = 0.3  # leave out lines on at least this fraction of a source's pages; 0: keep all
    ids: bool = False  # show: also print a table with the id and the bytes of each piece
    json: bool = False  # print the result as JSON

    @property
    def view(self) -> str:
        return self.action


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward tokenizer", about=ABOUT)
    if options.vocab_size != Options.vocab_size and options.kind != "bpe":
        raise UserError(f"vocab_size is {options.vocab_size}, but applies to bpe, not to {options.kind}: leave it out")
    if options.ids and options.json:
        raise UserError("Cannot combine --ids with --json, which already includes the ids: leave out --ids")
    if options.action == "show":
        result = show(options.names)
    else:
        result = train(options) if options.action == "train" else compare(options)
    if options.json:
        print_json(result)
    elif options.action == "show":
        print_pieces(result, options.ids)
    elif options.action == "train":
        print(f"{result['folder']}: {result['vocabulary']:,} ids")
        sources, folder = join(options.names or ("mybook.txt",)), quote(options.out)
        print_next(f"onward tokenizer compare {folder} byte", f"onward train {sources} --tokenizer {folder}")
    else:
        print_comparison(result)


def train(options: Options) -> dict[str, Any]:
    from onward.cli.shared.progress import progress_bars
    from onward.text.training import train_tokenizer

    if not options.out:
        raise UserError("no folder to write to: name one with --out")
    if (there := Path(options.out) / "tokenizer.json").exists():
        raise UserError(f"{there} exists already: choose another folder with --out")
    spec = f"bpe:{options.vocab_size}" if options.kind == "bpe" else options.kind
    announce(options.names)
    with progress_bars() as progress:
        tokenizer = train_tokenizer(spec, read(options.names, options, progress))
    tokenizer.save(options.out)
    return {"folder": options.out, "vocabulary": tokenizer.vocab_size}


def compare(options: Options) -> dict[str, Any]:
    """Compare tokenizers; `char` and `bpe:N` are first trained on the compared texts."""
    from onward.cli.shared.progress import progress_bars
    from onward.text import compare
    from onward.text.training import train_tokenizer

    if not options.names:
        raise UserError("no tokenizer is named: give char, byte, bpe:N, a tokenizer.json or a folder that contains one")
    announce(options.data)
    with (
        progress_bars() as progress,
        TemporaryDirectory() as folder,
        stored_streams(options.data, Path(folder) / "streams", progress) as sources,
    ):

        def texts() -> Iterator[compare.Labeled]:
            for source in sources:
                for text in read([source], options, progress, PASSAGE_CHARS):
                    yield compare.labeled(text, str(source))
            if not options.data:
                yield from compare.built_in()

        tokenizers = {name: train_tokenizer(name, (text for text, _ in texts())) for name in options.names}
        return compare.compare(tokenizers, texts())


def read(sources: Sequence[Source], options: Options, progress: Progress, size: int = 1 << 16) -> Iterator[str]:
    """Iterate over the texts in passages of at most `size` characters."""
    download_corpora(sources, progress)
    reading = Reading(options.field, options.encoding, options.raw, options.repeated_lines)
    done = 0
    for text in passages(sources, reading, size):
        yield text
        done += len(text.encode())
        progress("reading", done, 0)


def print_comparison(result: dict[str, Any]) -> None:
    letters = {one["name"]: chr(ord("A") + n) for n, one in enumerate(result["tokenizers"])}
    columns = "name", "vocabulary", "bytes_per_token", "round_trip_failures"
    print_table([{"": letters[one["name"]], **{key: one[key] for key in columns}} for one in result["tokenizers"]])
    print("\nbytes per token")
    rows = [(row, row.pop("bytes_per_token")) for row in result["texts"]]
    print_table([row | {letters[name]: density for name, density in densities.items()} for row, densities in rows])
    for one in result["tokenizers"]:
        if example := one["example"]:
            line = f"{one['name']} encodes {example['text']!r} and decodes {example['back']!r}"
            console.print(line, markup=False, soft_wrap=True)
