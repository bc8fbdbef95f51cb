"""`onward evaluate MODEL ... chats.jsonl`: the loss of several models on the answers of examples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from onward.base.errors import UserError
from onward.cli.commands.evaluate.divided import load_alike
from onward.cli.shared.output import console, print_json, print_next, print_table

if TYPE_CHECKING:
    from onward.api.language_model import LanguageModel
    from onward.cli.commands.evaluate.options import Options
    from onward.parallel.replicas import Replicas
    from onward.text.tokenizer import Tokenizer

Z = 1.96  # half the width of a 95 % interval, in standard errors
TEXTS = "texts", "labeled texts"  # layouts whose rows are documents


def are_models(names: Sequence[str]) -> list[str]:
    """Return the names that are folders or files of a model or of an adapter."""
    from onward.hub.folder import is_adapter, is_model

    return [name for name in names if is_model(name) or (os.path.isdir(name) and is_adapter(Path(name)))]


def are_examples(sources: Sequence[str], field: str, columns: str, ignore: str) -> bool:
    """Whether the first row of the first source is an example with an answer, and not a document with a text."""
    from onward.data.formats import suffixes
    from onward.data.layouts import Records, layout_of
    from onward.data.records import READERS
    from onward.data.sources import HUB, is_stream, source_files

    if not sources or is_stream(sources[0]):
        return False
    named = sources[0] if sources[0].startswith(HUB) else str(source_files(sources[0])[0])
    if not named.startswith(HUB) and suffixes(named)[0] not in READERS:
        return False
    try:
        record = next(iter(Records([named], columns, ignore)), None)
    except UserError:  # reported later by the reader of examples, if its options are given, or of texts
        return bool(columns or ignore)
    layout = layout_of(record.values) if record else None
    if record is None or layout is None or record.values.get(field) is not None:
        return False
    return layout.name not in TEXTS


def evaluate_chats(
    models: Sequence[LanguageModel | str], names: Sequence[str], options: Options, replicas: Replicas
) -> None:
    """Print the loss of each model on the answers, with its standard error, and its difference from the loss of the
    first model, which is already loaded."""
    from onward.data.layouts import Records
    from onward.evaluation.chats import AnswerLosses, answer_losses, answer_sequences

    tokenizers = {name: tokenizer_of(name) for name in names}
    with_own = [one for one in tokenizers.values() if one.templates]
    measured: dict[str, AnswerLosses] = {}
    for name, model in zip(names, models):
        lm = load_alike(model, options, replicas) if isinstance(model, str) else model
        tokenizer = asked_in(name, lm, options.template, with_own[:1])
        records = Records(options.sources, options.columns, options.ignore)
        sequences = answer_sequences(tokenizer, records, lm.model.config.context_length)
        measured[name] = answer_losses(lm.model, sequences, replicas)
        del lm
    if replicas.rank:
        return
    first, *others = names
    rows = [{"model": name} | asdict(losses.evaluation) for name, losses in measured.items()]
    pairs = {name: pair for name in others if (pair := measured[name].difference(measured[first]))}
    differences = [
        {"model": name, "difference": mean, "standard_error": error, "interval": [mean - Z * error, mean + Z * error]}
        for name, (mean, error) in pairs.items()
    ]
    if options.json:
        print_json({"results": rows, "differences": differences})
        return
    print_table(rows)
    if differences:
        print(f"\nloss minus that of {first}, on the same answers (below 0 is better)")
        ranges = [f"{mean - Z * error:.4f} to {mean + Z * error:.4f}" for mean, error in pairs.values()]
        print_table([one | {"interval": interval} for one, interval in zip(differences, ranges)])
    elif len({losses.counts.tobytes() for losses in measured.values()}) > 1:
        console.print(
            "the models tokenize the answers differently, so their losses per token cannot be compared", soft_wrap=True
        )
    print_next(f"onward chat {quote(names[-1])}")


def tokenizer_of(name: str) -> Tokenizer:
    from onward.checkpoint.load import open_source
    from onward.hub.folder import locate
    from onward.text.tokenizer import Tokenizer

    folder = locate(name)
    return Tokenizer.load(folder) if folder.is_dir() else open_source(folder).required_tokenizer()


def asked_in(name: str, lm: LanguageModel, template: str, others: Sequence[Tokenizer]) -> Tokenizer:
    """Return the tokenizer of a model with a chat template: the named template, the model's own, that of another model
    with the same token ids, or a plain one."""
    from onward.text.templates import with_template

    own, size = lm.text(), lm.model.config.vocab_size
    if template:
        asked = with_template(own, template)
        if asked.vocab_size > max(size, own.vocab_size):
            raise UserError(f"template is {template!r}, whose control tokens {name} does not have: choose another one")
        return asked
    if own.templates:
        return own
    vocabulary = own.inner.get_vocab()
    for other in others:
        theirs = other.inner.get_vocab()
        if other.vocab_size <= size and all(theirs.get(token) == number for token, number in vocabulary.items()):
            return other
    console.print(f"{name} has no chat template, so a plain one is used", markup=False, soft_wrap=True)
    return with_template(own, "plain")
