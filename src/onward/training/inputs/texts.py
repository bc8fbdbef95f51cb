"""The inputs of pre-training: texts as tokens, and their tokenizer.

RUN/inputs.json lists the prepared folders, in order, with the checksum of each index, the checksum of the tokenizer,
and the configuration of the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from onward.base import fields
from onward.base.errors import UserError
from onward.base.files import file_sha256, write_json
from onward.checkpoint.load import open_source
from onward.data.prepare import Cleaning, prepare
from onward.data.progress import Progress, silent
from onward.data.reading import Reading
from onward.data.sources import Source, download_corpora, passages, stored_streams
from onward.data.tokens import INDEX, Tokens, is_prepared, load_tokens
from onward.data.windows import HeldOutWindows, Packing, TrainingWindows, ValidationWindows, Windows
from onward.evaluation.text import evaluate_tokens
from onward.hub.folder import locate
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer
from onward.text.training import train_tokenizer
from onward.training.config import RunConfig
from onward.training.inputs.record import read_record
from onward.training.step.loss import CrossEntropy, Loss

AS_IT_IS = Cleaning(exact=False)
HELD_OUT = "held_out"  # folder for a validation text that is not part of a source
TASK_TOKENS = 1 << 18  # maximum number of tokens of the validation text that questions are made from
MOST_HELD_OUT = 1 << 22  # maximum number of tokens held out from a source; more would hardly improve the estimate


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run as tokens: training tokens of each source, and validation tokens."""

    train: tuple[Tokens, ...]  # training tokens of each source
    validation: Tokens | None
    unknown_characters: int
    validation_bytes: int | None = None  # bytes of the validation text; None if it is a share of each source
    validation_parts: tuple[Tokens, ...] = ()  # validation tokens of each source, if `validation` is a share of each
    cut_documents: int = 0  # number of sources whose validation text begins inside a document
    labels: tuple[str, ...] = ()  # labels of the output head, if the run trains one
    notes: tuple[str, ...] = ()  # messages to the user at the start of the run
    checksums: tuple[str, ...] = ()  # checksums of the data and the tokenizer

    @property
    def tokens(self) -> int:
        return sum(map(len, self.train))

    def opening(self, tokenizer: Tokenizer) -> str | list[int]:
        """Return the first words of the validation text or, without one, of the training text: the prompt for
        samples."""
        tokens = self.train[0] if self.validation is None else self.validation
        return " ".join(tokenizer.decode(tokens[:64].tolist()).split()[:4])

    def validation_text(self, tokenizer: Tokenizer) -> str:
        """Return the beginning of the validation text; empty without one."""
        return "" if self.validation is None else tokenizer.decode(self.validation[:TASK_TOKENS].tolist())

    def windows(self, config: RunConfig, context_length: int) -> TrainingWindows:
        """Return the training tokens as windows of `context_length` tokens, in the order of the run."""
        c = config
        return Windows(self.train, context_length, c.seed, weights=c.weights, total=c.windows, pack=c.pack)

    def validation_windows(self, config: RunConfig, context_length: int) -> HeldOutWindows | None:
        return None if self.validation is None else ValidationWindows(self.validation, context_length, config.pack)

    def validation_sets(self, config: RunConfig, context_length: int) -> Mapping[str, HeldOutWindows]:
        """Return the validation windows of each source by name, to report a separate loss for each source; {} unless
        the sources are mixed by weights."""
        names = short_names(config.sources) if config.weights else []
        parts = {name: part for name, part in zip(names, self.validation_parts) if len(part) > 1}
        return {name: ValidationWindows(part, context_length, config.pack) for name, part in parts.items()}

    def measure(self, loss: Loss) -> Loss:
        """Return the loss for validation; for text it is the plain cross-entropy."""
        return CrossEntropy()

    def evaluate(self, model: Decoder, tokenizer: Tokenizer, loss: Loss, tokens: int = 0) -> dict[str, Any]:
        """Evaluate a model on about `tokens` tokens of the validation text (0: all), after training; return the figures
        by name, for result.json, or {} without a validation text."""
        if self.validation is None:
            return {}
        text = spread(self.validation, tokens or len(self.validation), model.config.context_length)
        n_bytes = self.validation_bytes if text is self.validation else None
        return asdict(evaluate_tokens(model, tokenizer, text, n_bytes=n_bytes))


def spread(tokens: Tokens, count: int, context_length: int) -> Tokens:
    """Return about `count` of the tokens, in evenly spaced pieces of at most eight windows of `context_length` tokens,
    for an evaluation in limited time; if there are no more than `count` tokens, return all.

    The first token of each piece is predicted from the end of the piece before it; this hardly changes the mean loss.
    """
    if count >= len(tokens):
        return tokens
    size = min(8 * context_length, count)
    apart = max(1, len(tokens) * size // count)
    starts = range(0, len(tokens) - size + 1, apart)
    return Tokens.join(tokens.part(start, start + size) for start in starts)


def prepare_inputs(config: RunConfig, folder: Path, progress: Progress = silent) -> Tokenizer:
    """Tokenize the texts of a pre-training run, write the tokens and inputs.json to the run's folder, and return the
    tokenizer. Sources that `onward data prepare` has tokenized already stay in their own folders."""
    options: dict[str, Any] = {"reading": reading_of(config), "cleaning": AS_IT_IS}
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


def reading_of(config: RunConfig) -> Reading:
    return Reading(config.field, config.encoding, config.raw, config.repeated_lines)


def open_inputs(config: RunConfig, folder: Path, verify: Literal["size", "sha256"] = "sha256") -> Inputs:
    """Open the tokens named in a run's inputs.json, and verify their checksums or, faster, their sizes. Raises a
    UserError if they have changed, or the validation text is too short."""
    record = read_record(folder)
    data = {name: load_tokens(folder / name, verify) for name in record.data}
    # of each folder, the source with number n or, if n is None, all sources
    sources = [data[name].sources if n is None else data[name].sources[n : n + 1] for name, n in record.train]
    if not sources or not all(sources):
        raise UserError(f"{folder / 'inputs.json'}.train names a source that does not exist: restore it")
    validation = Tokens.join(data[record.validation].sources) if record.validation else None
    cut, parts = 0, list[Tokens]()
    if part := share(config.validation):
        starts = [[(tokens, validation_start(tokens, part, config.pack)) for tokens in own] for own in sources]
        pairs = list(chain.from_iterable(starts))
        parts = [Tokens.join(tokens.part(start, len(tokens)) for tokens, start in own) for own in starts]
        validation = Tokens.join(parts)
        cut = sum(not len(tokens.starts(start, start + 1)) for tokens, start in pairs)
        sources = [tuple(tokens.part(0, start) for tokens, start in own) for own in starts]
    if validation is not None and len(validation) < 2:
        raise UserError("the validation text has fewer than two tokens: give a longer text, or --validation none")
    unknown = sum(source.unknown_characters for one in data.values() for source in one.records)
    n_bytes = sum(source.bytes for source in data[name].records) if (name := record.validation) else None
    train = tuple(map(Tokens.join, sources))
    return Inputs(train, validation, unknown, n_bytes, tuple(parts), cut, checksums=record.checksums)


def short_names(sources: Sequence[str]) -> list[str]:
    """Return the file names of the sources without suffixes or, if two of these are equal, the sources as given."""
    names = [Path(source).name.partition(".")[0] for source in sources]
    return names if len({*names}) == len(names) else list(sources)


def validation_start(tokens: Tokens, share: float, pack: Packing) -> int:
    """Return the index of the first validation token among the tokens of a source, whose last part, a fraction `share`
    but at most MOST_HELD_OUT tokens, is for validation.

    With `pack` "documents" the index is moved to the nearest start of a document, so that no document is in both the
    training and the validation text, unless this move would more than double the validation text.
    """
    start = max(int(len(tokens) * (1 - share)), len(tokens) - MOST_HELD_OUT)
    if pack == "stream":
        return start
    first = max(1, 2 * start - len(tokens))
    documents = first + tokens.starts(first, len(tokens))
    return int(documents[abs(documents - start).argmin()]) if len(documents) else start


def choose_tokenizer(config: RunConfig, prepared: Sequence[str], raw: Sequence[Source]) -> Tokenizer:
    """Return the tokenizer of a run: that of the sources in the folders `prepared`, or the one requested by the
    options, trained on the texts of the sources `raw` if necessary. Raises a UserError if these tokenizers differ."""
    base = str(locate(config.base)) if config.base else ""
    asked = config.tokenizer or base or ("" if prepared else "bpe:4096")
    texts = passages(raw, reading_of(config)) if raw else ()
    tokenizers = {name: Tokenizer.load(name) for name in prepared}
    if asked == base != "":
        tokenizers[base] = open_source(Path(base)).required_tokenizer()
    elif asked:
        tokenizers[f"--tokenizer {asked}"] = train_tokenizer(asked, texts)
    name, tokenizer = next(iter(tokenizers.items()))
    for other, candidate in tokenizers.items():
        if candidate.inner.to_str() != tokenizer.inner.to_str():
            raise UserError(f"{name} and {other} have different tokenizers: prepare all sources with one")
    return tokenizer


def share(validation: str) -> float | None:
    """Return the fraction of each source that the option `validation` requests, such as 0.1 for "0.1"; None if the
    option names a file or is "none". Raises a UserError for a number that is not above 0 and below 1."""
    try:
        part = float(validation)
    except ValueError:
        return None
    if not 0 < part < 1:
        raise UserError(f"validation is {validation}: give a file, a share above 0 and below 1, or none")
    return part
