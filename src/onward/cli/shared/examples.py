"""Shows fine-tuning examples as tokens, in training order, with trained tokens in color."""

from itertools import islice

from rich.text import Text

from onward.cli.shared.output import console, printable
from onward.data.examples import Encoder, TokenSequence
from onward.data.records import read_records
from onward.errors import UserError
from onward.text.tokenizer import Tokenizer
from onward.training.finetuning.base import base_tokenizer
from onward.training.finetuning.config import FinetuneConfig

TRAINED, GIVEN, BETWEEN = "bold green", "dim", "\u2502"


def show_examples(config: FinetuneConfig, count: int) -> int:
    """Print the first `count` examples of the data as tokens; return the exit status."""
    if count < 0:
        raise UserError(f"show is {count}: it is a number of examples")
    tokenizer = base_tokenizer(config)
    records = (record for source in config.sources for record in read_records(source))
    for example in islice(config.method.examples(Encoder(tokenizer), records), count):
        numbers = "".join(f", {name} {value:g}" for name, value in example.numbers.items())
        for sequence in example.sequences:
            lengths = f"{sum(sequence.trained):,} of {len(sequence.tokens):,} tokens are trained"
            console.print(f"\n{example.place}: {lengths}{numbers}", style="bold", markup=False, highlight=False)
            console.print(colored(sequence, tokenizer), soft_wrap=True)
    console.print("\nTo train on them, leave out --show.")
    return 0


def colored(sequence: TokenSequence, tokenizer: Tokenizer) -> Text:
    """Return tokens as text with a line between them; without color, trained tokens are in brackets."""
    result = Text()
    for token, trained in zip(sequence.tokens, sequence.trained):
        piece = printable(tokenizer.piece(token)).replace("\n", "\\n")
        plain = f"[{piece}]" if trained and not console.is_terminal else piece
        result.append(plain, TRAINED if trained else GIVEN).append(BETWEEN, "dim")
    return result
