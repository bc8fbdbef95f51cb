"""Score answers against references: BLEU and chrF by sacrebleu, ROUGE by rouge-score. Needs the extra `eval`. Does not
import torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from statistics import stdev
from typing import Any, Literal

from onward.base.errors import UserError

CORPUS = "bleu", "chrf"  # metrics that sacrebleu computes over all answers together, from 0 to 100
METRICS = *CORPUS, "rouge1", "rouge2", "rougeL"  # ROUGE scores are means over answers, from 0 to 1
Match = Literal["exact", "contains", "number", "regex", "bleu", "chrf", "rouge1", "rouge2", "rougeL"]
ROUNDS = 100  # number of bootstrap samples
References = Sequence[Sequence[str]]  # one or more references for each answer


def grades(metric: str, answers: Sequence[str], references: References) -> list[float]:
    """Return a metric of each answer against its references; ROUGE uses the reference with the best value."""
    one = scorer(metric, True)
    if metric in CORPUS:
        return [one.sentence_score(answer, list(some)).score for answer, some in zip(answers, references)]
    return [one.score_multi(list(some), answer)[metric].fmeasure for answer, some in zip(answers, references)]


def corpus_score(metric: str, answers: Sequence[str], references: References) -> float:
    """BLEU or chrF of all answers together, from 0 to 100, with the defaults of sacrebleu."""
    streams = [list(stream) for stream in zip_longest(*references)]
    return scorer(metric, False).corpus_score(list(answers), streams).score


def bootstrap_error(metric: str, answers: Sequence[str], references: References) -> float:
    """Standard error of BLEU or chrF: the standard deviation over samples of the questions, drawn with replacement
    (Koehn 2004)."""
    rng, count = random.Random(0), len(answers)
    drawn = [rng.choices(range(count), k=count) for _ in range(ROUNDS)]
    return stdev(corpus_score(metric, [answers[i] for i in some], [references[i] for i in some]) for some in drawn)


@lru_cache
def scorer(metric: str, alone: bool) -> Any:
    try:
        if metric == "bleu":
            from sacrebleu.metrics import BLEU

            return BLEU(effective_order=alone)
        if metric == "chrf":
            from sacrebleu.metrics import CHRF

            return CHRF()
        from rouge_score.rouge_scorer import RougeScorer

        return RougeScorer([metric])
    except ImportError:
        library = "sacrebleu" if metric in CORPUS else "rouge-score"
        raise UserError(f"{metric} needs the library {library}: pip install 'onward[eval]'") from None
