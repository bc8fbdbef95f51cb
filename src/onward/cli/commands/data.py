"""onward data: prepare texts for training, and list or download corpora."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from onward.base.errors import UserError
from onward.base.fields import part, plain
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_json, print_next, print_table, printable
from onward.cli.shared.sources import announce, skipped_in
from onward.config.ranges import Share
from onward.data import corpora
from onward.data.cleaning import Cleaning
from onward.data.progress import Measured, Progress
from onward.data.reading import Reading

if TYPE_CHECKING:
    from onward.data.tokens import TokenData

ABOUT = """\
Encode texts of any size into token shards on disk, list and download corpora, or show examples for fine-tuning.

examples:
  onward data prepare mybook.txt notes/ talks.jsonl.gz --field body --out prepared/mine
  onward data prepare 'web/*.parquet' --tokenizer tokenizers/web --gopher --near 0.8 --out prepared/web
  onward data prepare 'hf://user/name?name=config&split=train' --tokenizer bpe:32000 --out prepared/name
  onward data prepare 'web/*.parquet' --tokenizer tokenizers/web --out prepared/web --part 3/16   one of 16 machines
  onward data join prepared/web
  onward train prepared/mine prepared/web --weights 0.3 --weights 0.7
  onward data list
  onward data get tinyshakespeare
  onward data show chats.json
  onward data show pairs.csv --columns prompt=question --method dpo --model runs/mybook

To continue an interrupted preparation, run the same command again.
"""


@dataclass(frozen=True, kw_only=True)
class Options(Cleaning):
    """The options of `onward data`, which prepares texts and shows data sets."""

    positional: ClassVar[tuple[str, ...]] = ("action", "sources")
    common: ClassVar[tuple[str, ...]] = (
        *("out", "tokenizer", "field", "gopher", "near", "min_words", "workers", "json"),
        *("model", "method", "template", "columns", "ignore", "count"),
    )
    action: Literal["prepare", "join", "list", "get", "show"]  # prepare or show SOURCES, join FOLDER, get NAME, list
    sources: tuple[str, ...] = ()  # files, folders, globs, pipes, hf://NAME, - (standard input) or names of corpora
    model: str = ""  # model whose tokenizer and chat template are used; default: show texts without a model
    method: str = "sft"  # fine-tuning method for which the examples are prepared
    template: str = ""  # chat template; default: the model's own, or a plain one
    columns: str = ""  # columns to rename, such as prompt=question,completion=answer: Onward's name = the file's name
    ignore: str = ""  # columns to leave out, such as notes,critique; any other column with unused text raises an error
    count: int = 3  # number of examples to show
    tokenizer: str = "bpe:4096"  # char, byte, bpe:VOCABULARY_SIZE, or the path of a tokenizer
    out: str = ""  # folder for the shards
    field: str = "text"  # column of a table, or key of a .jsonl line, that contains the text
    encoding: str = "utf-8"  # encoding of text files
    raw: bool = False  # keep the markup of HTML, XML, Markdown and notebooks
    repeated_lines: Share = 0.3  # leave out lines on at least this fraction of a source's pages; 0: keep all
    workers: int = 0  # number of processes; 0: one per core
    part: str = ""  # process only one part of the work; 3/16 writes to OUT.part-3-of-16; `join` combines the parts
    json: bool = False  # print the result as JSON
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "prepare": (
            *(one.name for one in fields(Cleaning)),
            *("sources", "tokenizer", "out", "field", "encoding", "raw", "repeated_lines", "workers", "part", "json"),
        ),
        "join": ("sources", "workers", "json"),
        "get": ("sources", "json"),
        "show": ("sources", "model", "method", "template", "columns", "ignore", "count", "json"),
        "list": ("json",),
    }

    @property
    def view(self) -> str:
        return self.action


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward data", about=ABOUT)
    {"prepare": prepare, "join": join, "list": list_corpora, "get": get, "show": show}[options.action](options)


def prepare(options: Options) -> None:
    from onward.cli.shared.progress import progress_bars
    from onward.data.prepare import prepare

    if not options.out:
        raise UserError("no folder to write to: name one with --out")
    announce(options.sources)
    measured = Measured()
    reading = Reading(options.field, options.encoding, options.raw, options.repeated_lines)
    own: dict[str, Any] = {"reading": reading, "workers": options.workers}
    own["cleaning"] = Cleaning(**{field.name: getattr(options, field.name) for field in fields(Cleaning)})
    try:
        with progress_bars() as progress:
            if options.part:
                prepare_one_part(options, progress, own)
                return
            data = prepare(
                options.sources, options.tokenizer, Path(options.out), progress=progress, measured=measured, **own
            )
    except KeyboardInterrupt:
        console.print("\nstopped; run the same command again to continue")
        raise
    print_report(options, Path(options.out), data, measured)


def prepare_one_part(options: Options, progress: Progress, own: dict[str, Any]) -> None:
    from onward.data.parts import prepare_part
    from onward.data.prepare import MachinePart

    part = MachinePart.parse(options.part)
    folder = prepare_part(options.sources, options.tokenizer, Path(options.out), part, progress=progress, **own)
    if options.json:
        print_json({"folder": str(folder), "part": part.number, "parts": part.of})
    else:
        print(f"part {part.number} of {part.of} is in {folder}")
        print_next(f"onward data join {quote(options.out)}")


def join(options: Options) -> None:
    from onward.cli.shared.progress import progress_bars
    from onward.data.parts import join_parts

    if len(options.sources) != 1:
        raise UserError("name the folder whose parts to join, such as onward data join prepared/web")
    with progress_bars() as progress:
        data = join_parts(Path(options.sources[0]), workers=options.workers, progress=progress)
    print_report(options, Path(options.sources[0]), data, Measured())


def print_report(options: Options, folder: Path, data: "TokenData", measured: Measured) -> None:
    report = data.index.report
    sources = [{key: getattr(source, key) for key in COUNTS} for source in data.records]
    if options.json:
        speed = {"speed": plain(measured)} if measured.seconds else {}
        print_json({"folder": str(folder), **plain(report), "sources": sources, **speed})
        return
    rows = [*sources, {"name": "all", **plain(report)}] if len(sources) > 1 else sources
    print_table([{key: row[key] for key in COUNTS} | density(row) for row in rows])
    if measured.seconds:
        print(f"\n{in_words(measured)}")
    print(f"\nlongest document: {report.longest.tokens:,} tokens, in {report.longest.file}")
    print(f"  {first_words(report.longest.text)}")
    for reason, entry in report.dropped.items():
        print(f"\ndropped as {reason}: {entry.documents:,} documents")
        for sample in entry.samples:
            print(f"  {sample.file}: {first_words(sample.text)}")
    for record in data.records:
        if skipped := skipped_in(record.name, folder):
            console.print(skipped, markup=False, soft_wrap=True)
    if unknown := report.unknown_characters:
        console.print(f"{unknown:,} characters are unknown to the tokenizer and were encoded as \ufffd")
    print_next(f"onward train {quote(str(folder))} --out runs/{quote(folder.name)}")


def in_words(measured: Measured) -> str:
    """The encoding speed, the encoder, and each task's share of the time if it is at least 1 %."""
    total = sum(measured.seconds.values())
    shares = [f"{task} {seconds / total:.0%}" for task, seconds in measured.seconds.items() if seconds >= 0.01 * total]
    return f"{measured.megabytes_per_second:.3g} MB/s, encoded by {measured.encoder}: {', '.join(shares)}"


COUNTS = "name", "documents", "tokens", "bytes"


def density(row: Mapping[str, Any]) -> dict[str, float]:
    return {"bytes_per_token": row["bytes"] / max(1, row["tokens"])}


def first_words(text: str) -> str:
    return printable(" ".join(text.split()))[:100]


def list_corpora(options: Options) -> None:
    rows: list[dict[str, Any]] = [
        {"name": name, "bytes": corpus.size, "content": corpus.content, "license": "PSF", "from": "no network needed"}
        for name, corpus in corpora.BUILT_IN.items()
    ]
    for name, download in corpora.DOWNLOADS.items():
        own = asdict(download)
        rows.append({"name": name, **{key: own[key] for key in ("bytes", "content", "license")}, "from": download.url})
    if options.json:
        print_json(rows)
    else:
        print_table([{name: value for name, value in row.items() if name != "from"} for row in rows])
        print_next("onward train embedded --out runs/embedded", "onward data get tinyshakespeare")


def show(options: Options) -> None:
    from onward.cli.shared.examples import show_examples, show_without_model
    from onward.training.finetuning.config import FinetuneConfig
    from onward.training.methods import Method
    from onward.training.methods.answers.sft import SFT

    if not options.sources:
        raise UserError("no examples to show: name a .jsonl, .json, .csv or .parquet file")
    method = part(Method, options.method, "method")
    chosen = {name: getattr(options, name) for name in ("template", "columns", "ignore")}
    config = FinetuneConfig.of(sources=options.sources, base=options.model or "none", **chosen)
    object.__setattr__(config, "method", method)  # skips the check for fields that only a run needs, such as a reward
    (show_examples if options.model else show_without_model)(config, options.count, options.json)
    if not options.json:
        flags = [f"--{name} {quote(value)}" for name, value in chosen.items() if value]
        flags += [f"--method {quote(options.method)}"] if options.method != SFT.kind else []
        model = quote(options.model) if options.model else "MODEL"
        print_next(" ".join(["onward finetune", model, *map(quote, options.sources), *flags]))


def get(options: Options) -> None:
    from onward.cli.shared.progress import progress_bars

    if len(options.sources) != 1:
        raise UserError(f"onward data get takes the name of a corpus: {', '.join(corpora.DOWNLOADS)}")
    (name,) = options.sources
    with progress_bars() as progress:
        path = corpora.get(name, progress=progress)
    if options.json:
        print_json({"name": name, "path": str(path)})
    else:
        print(path)
        print_next(f"onward train {name} --out runs/{name}")
