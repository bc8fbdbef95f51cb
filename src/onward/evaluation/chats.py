"""The loss of a model on the answers of examples, as fine-tuning's validation measures it, with its standard error.

Shapes: M examples.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onward.base.alone import ALONE, Alone
from onward.base.errors import UserError
from onward.data.examples import Encoder, TokenSequence
from onward.data.forms import supervised
from onward.data.records import Record
from onward.evaluation.score import TOGETHER, batched, logprobs
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerEvaluation:
    """The figures of a model on the answers of examples."""

    loss: float  # mean negative log-probability of an answer's token, in nats
    standard_error: float | None  # standard error of the loss over examples; None for one example
    perplexity: float  # exp(loss)
    tokens: int  # number of tokens of the answers
    examples: int


@dataclass(frozen=True)
class AnswerLosses:
    """The sum of the negative log-probabilities of each example's answer tokens, and the number of these tokens, (M,)
    each."""

    totals: np.ndarray
    counts: np.ndarray

    @property
    def evaluation(self) -> AnswerEvaluation:
        tokens = int(self.counts.sum())
        loss = math.fsum(self.totals) / tokens
        error = ratio_error(self.totals, self.counts) if len(self.counts) > 1 else None
        return AnswerEvaluation(loss, error, math.exp(min(loss, 700)), tokens, len(self.counts))

    def difference(self, other: "AnswerLosses") -> tuple[float, float] | None:
        """Return (loss minus the loss of `other`, standard error of the difference), paired by example; None if the
        answers have different numbers of tokens, or if there is only one example."""
        if len(self.counts) < 2 or not np.array_equal(self.counts, other.counts):
            return None
        totals = self.totals - other.totals
        return math.fsum(totals) / int(self.counts.sum()), ratio_error(totals, self.counts)


def ratio_error(totals: np.ndarray, counts: np.ndarray) -> float:
    """Standard error of sum(totals) / sum(counts) over independent examples of several tokens each (Cochran
    1977, chapter 6)."""
    residuals = totals - totals.sum() / counts.sum() * counts
    n = len(counts)
    return float(math.sqrt(n / (n - 1) * np.square(residuals).sum()) / counts.sum())


def answer_sequences(tokenizer: Tokenizer, records: Iterable[Record], length: int) -> list[TokenSequence]:
    """The examples that have an answer, as token sequences. Raises a UserError for an example of more than `length`
    tokens, and if no example has an answer."""
    sequences = []
    for example in supervised(Encoder(tokenizer), records):
        (sequence,) = example.sequences
        if len(sequence.tokens) > length:
            raise UserError(
                f"{example.place} has {len(sequence.tokens):,} tokens, more than the context of {length:,}: shorten it"
            )
        if any(sequence.trained[1:]):
            sequences.append(sequence)
    if not sequences:
        raise UserError("no example has an answer to evaluate: name examples with answers")
    return sequences


def answer_losses(model: Decoder, sequences: Sequence[TokenSequence], replicas: Alone = ALONE) -> AnswerLosses:
    """The losses of a model on the answers of the sequences; the processes `replicas` divide them."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i].tokens))
    longest = len(sequences[order[-1]].tokens)

    def nats_of(batch: list[int]) -> list[float]:
        width = max(len(sequences[i].tokens) for i in batch)
        # padding at the end does not affect earlier tokens
        padded = lambda values: np.pad(np.array(values), (0, width - len(values)))
        windows = np.stack([padded(sequences[i].tokens) for i in batch])
        trained = np.stack([padded(sequences[i].trained) for i in batch])
        return [-math.fsum(row[mask]) for row, mask in zip(logprobs(model, windows), trained[:, 1:])]

    batches = batched(order, max(1, TOGETHER // longest))
    values = [value for part in replicas.map(f"{len(order):,} examples", nats_of, batches) for value in part]
    totals = np.empty(len(order))
    totals[order] = values
    return AnswerLosses(totals, np.array([sum(one.trained[1:]) for one in sequences]))
