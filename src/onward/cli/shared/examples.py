"""The examples of fine-tuning as the model reads them, with trained tokens in color."""

from itertools import groupby, islice
from typing import Any

from rich.text import Text

from onward.base.errors import UserError
from onward.cli.shared.output import console, print_json, printable
from onward.data.examples import Encoder, TokenSequence
from onward.data.layouts import Records
from onward.text.templates import with_template
from onward.text.tokenizer import Tokenizer
from onward.text.training import train_tokenizer
from onward.training.finetuning.base import base_tokenizer
from onward.training.finetuning.config import FinetuneConfig

TRAINED, GIVEN, BETWEEN = "bold green", "dim", "\u2502"


def show_examples(config: FinetuneConfig, count: int, as_json: bool = False) -> int:
    """Print examples of a run's data, in the tokens of its model."""
    return show(config, base_tokenizer(config), count, as_json, tokens=True)


def show_without_model(config: FinetuneConfig, count: int, as_json: bool) -> int:
    """Print examples of the data as text, in the chat template of the configuration or, by default, a plain one."""
    tokenizer = with_template(train_tokenizer("byte", []), config.template or "plain")
    return show(config, tokenizer, count, as_json, tokens=False)


def show(config: FinetuneConfig, tokenizer: Tokenizer, count: int, as_json: bool, tokens: bool) -> int:
    """Print the first `count` training examples, in color or as JSON. A bar follows each token if `tokens`; otherwise
    bars separate trained text from other text."""
    if count < 1:
        raise UserError(f"the number of examples is {count}: give at least 1")
    records, rows = Records(config.sources, config.columns, config.ignore), list[dict[str, Any]]()
    for example in islice(config.method.examples(Encoder(tokenizer), records), count):
        sequences = [spans(sequence, tokenizer, tokens) for sequence in example.sequences]
        texts = [[{"text": text, "trained": trained} for text, trained in parts] for parts in sequences]
        rows.append({"place": example.place, "sequences": texts, **example.numbers})
        if as_json:
            continue
        numbers = "".join(f", {name} {value:g}" for name, value in example.numbers.items())
        for sequence, parts in zip(example.sequences, sequences):
            lengths = f": {sum(sequence.trained):,} of {len(sequence.tokens):,} tokens are trained" if tokens else ""
            title = f"\n{example.place}{lengths}{numbers}"
            console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
            console.print(colored(parts), soft_wrap=True)
    shapes = {source: [*counts] for source, counts in records.counts.items()}
    if as_json:
        print_json({"shapes": shapes, "examples": rows})
        return 0
    console.print()
    for source, names in shapes.items():
        console.print(f"{source}: {', '.join(names)}", markup=False, highlight=False, soft_wrap=True)
    return 0


def spans(sequence: TokenSequence, tokenizer: Tokenizer, tokens: bool) -> list[tuple[str, bool]]:
    """Return a training sequence as pairs (text, whether it is trained on), one for each token if `tokens`."""
    pairs = list(zip(sequence.tokens, sequence.trained))
    if tokens:
        return [(tokenizer.piece(token), trained) for token, trained in pairs]
    groups = groupby(pairs, key=lambda pair: pair[1])
    decode = lambda ids: tokenizer.inner.decode(ids, skip_special_tokens=False)
    return [(decode([token for token, _ in group]), trained) for trained, group in groups]


def colored(parts: list[tuple[str, bool]]) -> Text:
    """The pairs of `spans` as one text; without color, trained texts are in brackets."""
    result = Text()
    for text, trained in parts:
        piece = printable(text).replace("\n", "\\n")
        plain = f"[{piece}]" if trained and not console.is_terminal else piece
        result.append(plain, TRAINED if trained else GIVEN).append(BETWEEN, "dim")
    return result
