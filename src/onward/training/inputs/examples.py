"""The inputs of a fine-tuning run: tokenized examples in RUN/data/train.safetensors and validation.safetensors.

RUN/inputs.json records the checksums of these files.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from onward.base import fields
from onward.base.device import choose_device
from onward.base.errors import UserError
from onward.base.files import file_sha256, write_json
from onward.checkpoint.load import open_source
from onward.config.mixtures import MovingWeight
from onward.data.curricula import interleaving
from onward.data.examples import Encoder, Examples
from onward.data.forms import with_fields
from onward.data.layouts import Records
from onward.data.mixtures import SET, MixedRows, joined, one_set, weighted
from onward.data.packing import PackedExamples, batch_of
from onward.data.progress import Progress, silent
from onward.data.records import Record
from onward.data.tables import held_out, tabulated
from onward.data.windows import TrainingWindows
from onward.hub.folder import locate
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer
from onward.training.finetuning.base import base_checksum, base_of, base_tokenizer, load_base
from onward.training.finetuning.config import FinetuneConfig
from onward.training.inputs.record import read_record
from onward.training.inputs.texts import Inputs, share, short_names
from onward.training.losses.answers import REFERENCE
from onward.training.methods.answers.distill import Distill
from onward.training.methods.completions.policy import PolicyMethod
from onward.training.methods.reference import Kept
from onward.training.step.loss import Loss, mean_figures

TRAIN, VALIDATION = "data/train.safetensors", "data/validation.safetensors"
MAX_LENGTH = 4096  # default maximum number of tokens per row, for models with a longer context


@dataclass(frozen=True, kw_only=True)
class ExampleInputs(Inputs):
    """The inputs of fine-tuning: tokenized examples to train on, and held-out examples for validation."""

    examples: Examples
    held_out: Examples | None
    config: FinetuneConfig

    def opening(self, tokenizer: Tokenizer) -> str | list[int]:
        first = (self.examples if self.held_out is None else self.held_out).sequence(0)
        return list(first.tokens[: max(1, first.trained.index(True))])

    def packed(
        self, examples: Examples, context_length: int, seed: int | None, chosen: Sequence[int] | None = None
    ) -> PackedExamples:
        """Pack `examples`, or only the examples with the indices `chosen`, into rows. If the configuration packs
        examples and the method does not generate answers itself, a row holds as many as fit into the number of tokens
        that `row_length` returns, otherwise a single one. The examples are shuffled with `seed`, or keep their order if
        it is None."""
        c, method = self.config, self.config.method
        packed = c.packed and not method.samples_itself
        length = row_length(c, context_length)
        return PackedExamples(examples, length, seed, packed=packed, by_example=method.by_example, chosen=chosen)

    def windows(self, config: Any, context_length: int) -> TrainingWindows:
        if not config.curriculum:
            return self.packed(self.examples, context_length, config.seed)
        sets = self.examples.numbers.get(SET, np.zeros(len(self.examples)))
        chosen = [np.flatnonzero(sets == index).tolist() for index in range(len(config.weights))]
        tables = [self.packed(self.examples, context_length, config.seed + i, own) for i, own in enumerate(chosen)]
        return MixedRows(tables, interleaving(config.weights, config.windows), config.seed)

    def validation_windows(self, config: Any, context_length: int) -> PackedExamples | None:
        return None if self.held_out is None else self.packed(self.held_out, context_length, None)

    def validation_sets(self, config: Any, context_length: int) -> dict[str, PackedExamples]:
        if self.held_out is None or SET not in self.held_out.numbers:
            return {}
        present = {int(index) for index in self.held_out.numbers[SET]}
        sets = {name: one_set(self.held_out, i) for i, name in enumerate(short_names(config.sources)) if i in present}
        return {name: self.packed(examples, context_length, None) for name, examples in sets.items()}

    def measure(self, loss: Loss) -> Loss:
        return loss

    def evaluate(self, model: Decoder, tokenizer: Tokenizer, loss: Loss, tokens: int = 0) -> dict[str, Any]:
        """Return the loss and its figures, by name, averaged over about `tokens` tokens of held-out examples (0: all),
        and the number of these tokens; {} without held-out examples."""
        rows = self.validation_windows(self.config, model.config.context_length)
        if rows is None:
            return {}
        chosen = range(0, len(rows), max(1, rows.num_tokens // (tokens or rows.num_tokens)))
        size = self.config.batch_size
        batches = (rows.read(chosen[i : i + size]).to(model.device) for i in range(0, len(chosen), size))
        means = mean_figures(model, batches, loss)
        return {"loss": means.loss, "tokens": rows.num_tokens * len(chosen) // len(rows)} | means.figures


def row_length(config: FinetuneConfig, context_length: int) -> int:
    """Return the maximum number of tokens in a training sequence: the option `length` or, if this is 0, the smaller of
    the model's `context_length` and 4096. Raises a UserError if `length` exceeds `context_length`."""
    if config.length > context_length:
        raise UserError(
            f"length is {config.length}, more than the {context_length} tokens of the model's context: give no more"
        )
    return config.length or min(context_length, MAX_LENGTH)


def prepare_examples(config: FinetuneConfig, folder: Path, progress: Progress = silent) -> Tokenizer:
    """Tokenize the examples of a fine-tuning run, write them and inputs.json to the run folder `folder`, and return the
    tokenizer."""
    tokenizer = base_tokenizer(config)
    method, context_length = config.method, config.decoder(1).context_length
    if isinstance(method, Distill):
        check_teacher(method.teacher, config.base, tokenizer)
    encoder, length = Encoder(tokenizer), row_length(config, context_length)
    if isinstance(method, PolicyMethod):
        length = min(length, context_length - 1)  # reserve room for one token of the completion

    notes: list[str] = []
    too_long: dict[str, dict[str, dict[str, int]]] = {}  # counts by "train" or "validation", then by source

    def table(sources: Sequence[str], part: str = "train") -> Examples:
        progress("reading examples", 0, 0)
        rows = Records(sources, config.columns, config.ignore)
        records: Iterable[Record] = rows
        if isinstance(method, PolicyMethod) and method.reward:
            records = with_fields(records, method.reward.needs, fields.notation(method.reward))
        # a draft head trains on the model's own answers, so its examples may be cut
        treat = "cut" if method.beside and config.too_long == "error" else config.too_long
        examples, left = tabulated(method.examples(encoder, records), length, treat)
        notes.extend(rows.sentences())
        notes.extend(filter(None, (counts.sentence(source, length) for source, counts in left.sources.items())))
        too_long.setdefault(part, {}).update({source: asdict(counts) for source, counts in left.sources.items()})
        return examples

    by_source = len(config.sources) > 1 and method.by_record
    train = joined([table([source]) for source in config.sources]) if by_source else table(config.sources)
    fraction = share(config.validation) if config.validation != "none" else None
    files = {TRAIN: train}
    if fraction:
        mask = held_out(len(train), fraction)
        if mask.any() and not mask.all():
            files = {TRAIN: train.select(np.flatnonzero(~mask)), VALIDATION: train.select(np.flatnonzero(mask))}
    elif config.validation != "none":
        files[VALIDATION] = table([config.validation], "validation")
    if config.curriculum:
        check_sets(files[TRAIN], config)
    elif config.weights:
        constant = [weight for weight in config.weights if not isinstance(weight, MovingWeight)]
        files[TRAIN] = weighted(files[TRAIN], constant, config.seed)
    check_labels(files[TRAIN], config)
    for name, examples in files.items():
        (with_reference(examples, config) if isinstance(method.reference, Kept) else examples).save(folder / name)
    tokenizer.save(folder)
    record = {
        "train": [(TRAIN, None)],
        "validation": VALIDATION if VALIDATION in files else "",
        "data": {name: file_sha256(folder / name) for name in files},
        "tokenizer": file_sha256(folder / "tokenizer.json"),
        "model": fields.plain(config.decoder(tokenizer.vocab_size)),
        "base": base_checksum(config) if method.reference and not isinstance(method.reference, Kept) else "",
        "labels": encoder.labels or method.labels,
        "notes": notes,
        "too_long": too_long,
    }
    write_json(folder / "inputs.json", record)
    return tokenizer


def check_teacher(teacher: str, base: str, tokenizer: Tokenizer) -> None:
    """Raise a UserError if the vocabulary of a distillation's teacher differs from that of `tokenizer`, the tokenizer
    of the trained model `base`, or if the teacher has fewer embeddings than the vocabulary has tokens."""
    source = open_source(locate(teacher))
    if source.required_tokenizer().inner.get_vocab() != tokenizer.inner.get_vocab():
        raise UserError(
            f"the vocabulary of the teacher {teacher} differs from that of {base}: use a teacher with the same "
            "tokenizer"
        )
    if (rows := source.family()[1].vocab_size) < tokenizer.vocab_size:
        raise UserError(
            f"Cannot learn from {teacher}, because it has embeddings for {rows} tokens and its tokenizer has "
            f"{tokenizer.vocab_size}: use another teacher"
        )


def check_sets(examples: Examples, config: FinetuneConfig) -> None:
    """Raise a UserError if a source of a mixture with weights has no examples to train on."""
    present = {int(index) for index in examples.numbers.get(SET, [0])}
    if missing := [source for index, source in enumerate(config.sources) if index not in present]:
        raise UserError(f"{missing[0]} has no examples to train on: add examples, or leave this source out")


def check_labels(examples: Examples, config: FinetuneConfig) -> None:
    """Raise a UserError if the method learns from labels and all examples have the same label."""
    labels = examples.numbers.get("label")
    if labels is not None and len(np.unique(labels)) == 1:
        raise UserError(
            f"Cannot learn to tell labels apart from {len(labels)} examples with the same label: add examples with "
            "another label"
        )


def with_reference(examples: Examples, config: FinetuneConfig) -> Examples:
    """Return the examples with the log-probability of each sequence under the base model added. These log-probabilities
    are computed once, before training; methods with a kept reference compare the trained model with them."""
    loss: Any = config.method.loss(base_of(config))
    model, size = load_base(config)[0].eval().to(choose_device(config.device)), config.batch_size
    rows = [[i] for i in range(len(examples))]
    batches = (batch_of(examples, rows[i : i + size]).to(model.device) for i in range(0, len(rows), size))
    with torch.inference_mode():
        totals = torch.cat([loss.logprobs(model, batch).total.cpu() for batch in batches])
    columns = totals.double().numpy().reshape(-1, examples.per_example).T
    return replace(examples, numbers={**examples.numbers, **{f"{REFERENCE}{i}": c for i, c in enumerate(columns)}})


def open_examples(config: FinetuneConfig, folder: Path, verify: Literal["size", "sha256"] = "sha256") -> ExampleInputs:
    """Open the examples named in the file inputs.json of the run in `folder`. `verify` "sha256" verifies the checksums
    of the files and of the base model, "size" skips the verification. Raises a UserError if the examples have changed,
    or if the base model has changed and the method compares the trained model with it."""
    record = read_record(folder)
    for name, digest in record.data.items():
        if verify == "sha256" and file_sha256(folder / name) != digest:
            raise UserError(f"{folder / name} has changed since it was written: restore it, or start another run")
    if record.base and verify == "sha256" and (now := base_checksum(config)) != record.base:
        raise UserError(
            f"{config.base} is not the model that {folder} was started from (its weights have the checksum {now[:12]}, "
            f"before {record.base[:12]}), and {config.method.kind} compares with it: restore it, or start another run"
        )
    train = Examples.load(folder / TRAIN)
    validation = Examples.load(folder / record.validation) if record.validation else None
    return ExampleInputs(
        train=(train.all_tokens(),),
        validation=None if validation is None else validation.all_tokens(),
        unknown_characters=0,
        labels=record.labels,
        notes=record.notes,
        checksums=record.checksums,
        examples=train,
        held_out=validation,
        config=config,
    )
