"""Checks of a text corpus for training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onward.data.tokens import Tokens
from onward.inspection.doctor.finding import Check, Outcome, verdict
from onward.training.run.checks import apart

LARGEST = 0.5  # the largest share of the tokens that a document may have
FEW = 10  # with fewer documents, the share is reported but not judged
ENDS = 100_000  # fewer than twice this many document ends are checked


@dataclass(frozen=True)
class Corpus:
    """Input of the doctor's checks of data: a training text, its validation text, and ids that end documents."""

    train: Tokens
    validation: Tokens | None
    end_ids: tuple[int, ...]


def duplicates(c: Corpus) -> Outcome:
    """Check that few passages of the validation text occur in the training text, as `apart` does at the start of a
    run."""
    if c.validation is None:
        return "not applicable", "no validation text is given: add --validation"
    check = apart([c.train], c.validation)
    return verdict(check.ok, check.sentence)


def ended(c: Corpus) -> Outcome:
    """Check that the documents of the training text before the last, or a sample of them, end with an end token."""
    starts = c.train.starts(0, len(c.train))
    if not c.end_ids or len(starts) < 2:
        return "not applicable", "the corpus is a single document" if c.end_ids else "no end token is known"
    ends = starts[1 :: max(1, len(starts) // ENDS)]  # the last document may be cut
    good = sum(int(c.train[end - 1 : end][0]) in c.end_ids for end in ends.tolist())
    what = f"{good:,} of {len(ends):,} documents end with an end token"
    return verdict(good == len(ends), what, "the others were tokenized without an end token")


def dominated(c: Corpus) -> Outcome:
    """Check that no document makes up more than LARGEST (a fraction) of the training text."""
    starts = c.train.starts(0, len(c.train))
    lengths = np.diff(np.append(starts, len(c.train)))
    most = int(lengths.argmax())
    share = float(lengths[most] / max(1, len(c.train)))
    what = f"the longest of {len(lengths):,} documents has {lengths[most]:,} of {len(c.train):,} tokens, {share:.1%}"
    if len(lengths) < FEW:
        return "noted", what
    return verdict(share <= LARGEST, what, f"document {most:,}")


CORPUS = {
    "duplicates": Check(
        "a validation text",
        "searches the training text for passages from the validation text",
        "the validation loss falls while the model memorizes, and does not measure the loss on new texts",
        "remove duplicates before the texts are split, as onward data prepare does",
        duplicates,
    ),
    "documents end": Check(
        "a token that ends documents",
        "reads the last token of the documents, except the last document",
        "the model never learns to stop, and reads consecutive documents as one text",
        "append the end token to each document, with one document per file or per row",
        ended,
    ),
    "one document": Check(
        "",
        "measures the share of tokens in the longest document of ten or more",
        "the model memorizes one text",
        "split it, weight the sources, or leave it out",
        dominated,
    ),
}
