"""The inputs of a run: its tokens and their tokenizer, with checksums that tell whether any of them has changed.

RUN/inputs.json names the prepared folders, in order, with the checksum of each index, and those of tokenizer and model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

from onward import fields
from onward.checkpoint.huggingface.folder import required_tokenizer
from onward.config.decoder import DecoderConfig
from onward.data.prepare import Cleaning, prepare
from onward.data.progress import Progress, silent
from onward.data.sources import Source, download_corpora, passages, stored_streams
from onward.data.tokens import INDEX, Tokens, is_prepared, load_tokens
from onward.data.windows import Batch, Packing, ValidationWindows, Windows
from onward.errors import UserError
from onward.evaluation.text import evaluate_tokens
from onward.files import file_sha256, read_json, write_json
from onward.hub import locate
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer, train_tokenizer
from onward.training.config import RunConfig
from onward.training.finetuning.config import config_class
from onward.training.step.loss import CrossEntropy, Loss

AS_IT_IS = Cleaning(exact=False)
HELD_OUT = "held_out"  # the folder of a validation text that is none of the sources
MOST_HELD_OUT = 1 << 22  # the most tokens of a source for validation; more would not measure better


@dataclass(frozen=True)
class Record:
    """The content of inputs.json."""

    train: tuple[tuple[str, int | None], ...]  # of each source, its folder and its number there; none: all of them
    validation: str  # the folder of the validation text; "" where it is a share of each source, or none
    data: Mapping[str, Any]  # the checksum of the index of each folder
    tokenizer: str  # the checksum of tokenizer.json
    model: Mapping[str, Any]  # the fields of its DecoderConfig
    base: str = ""  # the checksum of the weights that the run compares its model with, if it does
    labels: tuple[str, ...] = ()  # of the head of outputs that the run trains, if it does


def read_record(folder: Path) -> Record:
    """The content of a run's inputs.json. A UserError names a key that is missing or of another type."""
    path = folder / "inputs.json"
    record = fields.build(Record, read_json(path), str(path))
    for name in {*(name for name, _ in record.train), record.validation} - {""}:
        if name not in record.data:
            raise UserError(f"{path}.data has no {name!r}: restore it, or start another run")
    return record


def read_config(folder: Path) -> RunConfig:
    """The configuration in a run's run.json, which is saved in `folder`."""
    if not (folder / "run.json").exists():
        file, there = f"{folder} is a file", f"there is no {'run.json in' if folder.is_dir() else 'folder'} {folder}"
        raise UserError(f"{file if folder.is_file() else there}: name the folder of a run")
    values = read_json(path := folder / "run.json")
    config = fields.build(config_class(values), values, str(path))
    if not (values.get("steps") or values.get("time")):
        raise UserError(f"{path}.steps is 0, and {path}.time is empty: one of them must be set")
    return replace(config, out=str(folder))


def same_tokens(folder: Path, config: RunConfig) -> dict[str, Any]:
    """The options by which a run trains on the tokens that are prepared in a folder by a configuration."""
    record = read_record(folder)
    validation = str(folder / record.validation) if record.validation else config.validation
    sources = dict.fromkeys(str(folder / name) for name, _ in record.train)
    return {"sources": [*sources], "validation": validation, "pack": config.pack}


class TrainingWindows(Protocol):
    """Windows, or rows of examples, to train on."""

    def __len__(self) -> int: ...  # in an epoch
    def read(self, numbers: Sequence[int]) -> Batch: ...  # from 0 on without end


class HeldOutWindows(TrainingWindows, Protocol):
    """Windows, or rows of examples, to validate on."""

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True)
class Inputs:
    """The tokens of a run."""

    train: tuple[Tokens, ...]  # of each source
    validation: Tokens | None
    unknown_characters: int
    validation_bytes: int | None = None  # of the validation text; None where it is a share of each source
    cut_documents: int = 0  # sources whose validation text begins inside a document
    labels: tuple[str, ...] = ()  # of the head of outputs that the run trains, if it does

    @property
    def tokens(self) -> int:
        """The number of training tokens."""
        return sum(map(len, self.train))

    def opening(self, tokenizer: Tokenizer) -> str | list[int]:
        """A prompt that shows what the model learns: the first words of the validation text."""
        tokens = self.train[0] if self.validation is None else self.validation
        return " ".join(tokenizer.decode(tokens[:64].tolist()).split()[:4])

    def windows(self, config: RunConfig, context_length: int) -> TrainingWindows:
        """What a run trains on."""
        return Windows(self.train, context_length, config.seed, weights=config.weights, pack=config.pack)

    def validation_windows(self, config: RunConfig, context_length: int) -> HeldOutWindows | None:
        """The whole validation text."""
        return None if self.validation is None else ValidationWindows(self.validation, context_length, config.pack)

    def measure(self, loss: Loss) -> Loss:
        """The loss that validations measure, in a run that trains with `loss`: of text the plain cross-entropy."""
        return CrossEntropy()

    def evaluate(self, model: Decoder, tokenizer: Tokenizer, loss: Loss, tokens: int = 0) -> dict[str, Any]:
        """The figures of a model on about this many tokens of the validation text (0: all), for result.json; {} where
        there is no such text."""
        if self.validation is None:
            return {}
        text = spread(self.validation, tokens or len(self.validation), model.config.context_length)
        n_bytes = self.validation_bytes if text is self.validation else None
        return asdict(evaluate_tokens(model, tokenizer, text, n_bytes=n_bytes))


def spread(tokens: Tokens, count: int, context_length: int) -> Tokens:
    """About `count` of some tokens, in pieces of eight windows that are spread evenly over them; all where there are no
    more. The first token of a piece is predicted from another one's text, which hardly changes a mean."""
    if count >= len(tokens):
        return tokens
    size = min(8 * context_length, count)
    apart = max(1, len(tokens) * size // count)
    starts = range(0, len(tokens) - size + 1, apart)
    return Tokens.join(tokens.part(start, start + size) for start in starts)


def prepare_inputs(config: RunConfig, folder: Path, progress: Progress = silent) -> Tokenizer:
    """Prepare the texts of a run in its folder, and write inputs.json; sources prepared before stay where they are."""
    options: dict[str, Any] = {"field": config.field, "encoding": config.encoding, "cleaning": AS_IT_IS}
    named = [] if config.validation == "none" or share(config.validation) else [config.validation]
    with stored_streams(config.sources, folder / ".streams", progress) as sources:
        names = list(map(str, sources))
        apart = {name: str(Path(name).resolve()) for name in [*names, *named] if is_prepared(name)}
        raw = [source for source in sources if str(source) not in apart]
        download_corpora(raw, progress)
        progress("learning the tokenizer", 0, 0)
        tokenizer = choose_tokenizer(config, list(apart), raw)
        if raw:
            prepare(raw, tokenizer, folder / "data", progress=progress, **options)
        if unprepared := [name for name in named if name not in apart]:
            prepare(unprepared, tokenizer, folder / HELD_OUT, progress=progress, **options)
    tokenizer.save(folder)
    numbers = iter(range(len(raw)))
    train = [(apart[name], None) if name in apart else ("data", next(numbers)) for name in names]
    validation = "".join(apart.get(name, HELD_OUT) for name in named)
    files = {name: file_sha256(folder / name / INDEX) for name in {*(name for name, _ in train), validation} - {""}}
    record = {
        "train": train,
        "validation": validation,
        "data": files,
        "tokenizer": file_sha256(folder / "tokenizer.json"),
        "model": fields.plain(config.decoder(tokenizer.vocab_size)),
    }
    write_json(folder / "inputs.json", record)
    return tokenizer


def open_inputs(config: RunConfig, folder: Path, verify: Literal["size", "sha256"] = "sha256") -> Inputs:
    """The tokens that inputs.json names, their checksums verified or, quickly, their sizes."""
    record = read_record(folder)
    data = {name: load_tokens(folder / name, verify) for name in record.data}
    # of a folder's sources, the one with this number or, for None, all
    sources = [data[name].sources if n is None else data[name].sources[n : n + 1] for name, n in record.train]
    if not sources or not all(sources):
        raise UserError(f"{folder / 'inputs.json'}.train names a source that is not there: restore it")
    validation = Tokens.join(data[record.validation].sources) if record.validation else None
    cut = 0
    if part := share(config.validation):
        starts = [[(tokens, validation_start(tokens, part, config.pack)) for tokens in several] for several in sources]
        pairs = list(chain.from_iterable(starts))
        validation = Tokens.join(tokens.part(start, len(tokens)) for tokens, start in pairs)
        cut = sum(not len(tokens.starts(start, start + 1)) for tokens, start in pairs)
        sources = [tuple(tokens.part(0, start) for tokens, start in several) for several in starts]
    if validation is not None and len(validation) < 2:
        raise UserError("the validation text has fewer than two tokens: give it more, or --validation none")
    unknown = sum(source.unknown_characters for one in data.values() for source in one.records)
    n_bytes = sum(source.bytes for source in data[name].records) if (name := record.validation) else None
    return Inputs(tuple(map(Tokens.join, sources)), validation, unknown, n_bytes, cut)


def validation_start(tokens: Tokens, share: float, pack: Packing) -> int:
    """The index of the first validation token of a source.

    Where documents are packed it is the beginning of the document that is nearest to the share, so that no document is
    in both texts, unless that would more than double the validation text.
    """
    start = max(int(len(tokens) * (1 - share)), len(tokens) - MOST_HELD_OUT)
    if pack == "stream":
        return start
    first = max(1, 2 * start - len(tokens))
    documents = first + tokens.starts(first, len(tokens))
    return int(documents[abs(documents - start).argmin()]) if len(documents) else start


def index_of(data: Path) -> Path:
    """The file whose checksum stands for data: the index of a prepared folder, or the one file."""
    return data / INDEX if data.is_dir() else data


def check_inputs(folder: Path, model: DecoderConfig) -> None:
    """A UserError that lists the inputs that differ from those the run was started with."""
    record = read_record(folder)
    differ = [
        f"the tokens in {name}" + ("" if index.exists() else " (which are gone)")
        for name, known in record.data.items()
        if not (index := index_of(folder / name)).exists() or file_sha256(index) != known
    ]
    if not (path := folder / "tokenizer.json").exists() or file_sha256(path) != record.tokenizer:
        differ.append("the tokenizer")
    now, then = fields.plain(model), record.model
    differ += [f"model.{name} ({then.get(name)} then, {now[name]} now)" for name in now if now[name] != then.get(name)]
    if differ:
        raise UserError(
            f"{folder} cannot go on as it was started, since it differs in {', '.join(differ)}: restore that, "
            "or start another run"
        )


def choose_tokenizer(config: RunConfig, prepared: Sequence[str], raw: Sequence[Source]) -> Tokenizer:
    """The tokenizer of prepared sources, or the one that is asked for, learned from the texts if need be."""
    base = str(locate(config.base)) if config.base else ""
    asked = config.tokenizer or base or ("" if prepared else "bpe:4096")
    texts = passages(raw, field=config.field, encoding=config.encoding) if raw else ()
    tokenizers = {name: Tokenizer.load(name) for name in prepared}
    if asked == base != "":
        tokenizers[base] = required_tokenizer(Path(base))
    elif asked:
        tokenizers[f"--tokenizer {asked}"] = train_tokenizer(asked, texts)
    name, tokenizer = next(iter(tokenizers.items()))
    for other, candidate in tokenizers.items():
        if candidate.inner.to_str() != tokenizer.inner.to_str():
            raise UserError(f"{name} and {other} have different tokenizers: prepare all sources with one")
    return tokenizer


def share(validation: str) -> float | None:
    """The share of each source that --validation asks for, if it is one."""
    try:
        part = float(validation)
    except ValueError:
        return None
    if not 0 < part < 1:
        raise UserError(f"validation is {validation}: give a file, a share above 0 and below 1, or none")
    return part
