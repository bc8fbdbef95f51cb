"""Evaluate a classifier or a reward model on examples.

Shapes: M examples.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from onward.base.alone import ALONE, Alone
from onward.base.errors import UserError
from onward.data.examples import Examples
from onward.data.forms import Encoder, Example, classified, preferred
from onward.data.records import Record
from onward.data.tables import tabulated
from onward.evaluation.outputs import ROWS, outputs
from onward.evaluation.score import batched
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer
from onward.transforms.heads import VALUE, head_labels


@dataclass(frozen=True)
class ClassEvaluation:
    """The figures of a classifier on examples."""

    accuracy: float  # share of examples for which the most likely class is the label
    label_loss: float  # mean cross-entropy of the labels, in nats
    examples: int
    confusion: dict[str, dict[str, int]]  # for each label, the number of examples by predicted class


@dataclass(frozen=True)
class PairEvaluation:
    """The figures of a reward model on pairs of a chosen and a rejected answer."""

    accuracy: float  # share of pairs whose chosen answer has the higher reward; equal rewards count as half
    margin: float  # mean difference of the rewards of the chosen and the rejected answer
    chosen_reward: float  # mean reward of the chosen answers
    rejected_reward: float  # mean reward of the rejected answers
    pairs: int


def judges(model: Decoder) -> bool:
    """Whether a model is a classifier or a reward model; a model with a value head is neither."""
    return head_labels(model) not in ((), VALUE)


def examples_of(model: Decoder, tokenizer: Tokenizer, records: Iterable[Record]) -> Examples:
    """Texts and labels for a classifier, pairs of answers for a reward model."""
    encoder, labels = Encoder(tokenizer), head_labels(model)
    encoder.labels = labels
    form = classified if len(labels) > 1 else preferred
    length = model.config.context_length
    return tabulated(within(form(encoder, records), length), length, "error")[0]


def within(examples: Iterable[Example], length: int) -> Iterator[Example]:
    for example in examples:
        longest = max(len(sequence.tokens) for sequence in example.sequences)
        if longest > length:
            raise UserError(f"{example.place} has {longest:,} tokens, more than the context of {length:,}: shorten it")
        yield example


def evaluate_head(model: Decoder, examples: Examples, replicas: Alone = ALONE) -> ClassEvaluation | PairEvaluation:
    """The figures of a classifier or, for a head with one output, of a reward model."""
    labels = head_labels(model)
    sequences = (examples.sequence(i).until_trained() for i in range(len(examples.ends)))
    of_batch = lambda batch: outputs(model, batch).cpu()
    scores = torch.cat(replicas.map(f"{len(examples):,} examples", of_batch, batched(sequences, ROWS)))
    if len(labels) < 2:
        chosen, rejected = scores[::2, 0], scores[1::2, 0]
        right = (chosen > rejected).float() + 0.5 * (chosen == rejected)
        mean = lambda values: float(values.mean())
        return PairEvaluation(mean(right), mean(chosen - rejected), mean(chosen), mean(rejected), len(examples))
    wanted = torch.from_numpy(examples.numbers["label"]).long()
    predicted = scores.argmax(-1)  # (M,)
    counts = torch.bincount(wanted * len(labels) + predicted, minlength=len(labels) ** 2).view(len(labels), -1)
    return ClassEvaluation(
        accuracy=float((predicted == wanted).float().mean()),
        label_loss=float(F.cross_entropy(scores, wanted)),
        examples=len(examples),
        confusion={label: dict(zip(labels, row)) for label, row in zip(labels, counts.tolist())},
    )
