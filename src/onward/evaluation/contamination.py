"""Find questions that were in the training data, by 13-grams that occur in both.

Brown et al. (2020, appendix C) examined GPT-3 in this way: an example is dirty if one of its N-grams occurs in the
training data. There an N-gram is N words without case or punctuation, with N = 13, or down to 8 for tasks with short
examples; here it is 13 tokens of the model's tokenizer. Differences in case, punctuation or spaces give different
N-grams: an N-gram that is found was in the training text word for word, but a question without one may have been there
in another form.

Shapes: T tokens of a part of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onward.data.tokens import Tokens

N = 13  # number of tokens in an N-gram
CHUNK = 1 << 16  # number of tokens of the data that are hashed at a time
TABLE_BITS = 22  # log2 of the size of a table of hashes, which excludes most N-grams without a further lookup
BASE = 0x9E3779B1  # odd, so that every token of an N-gram affects its hash


@dataclass(frozen=True)
class GradedQuestions:
    """The questions of a task, each as one or more texts, and the grades (0 to 1) of the model's answers."""

    task: str
    texts: Sequence[tuple[str, ...]]
    grades: Sequence[float]


Hashes = NDArray[np.uint32]


def ngrams(tokens: Sequence[int]) -> set[bytes]:
    """The N-grams of a text, each as the bytes of N uint32."""
    ids = np.array(tokens, np.uint32)
    return {ids[i : i + N].tobytes() for i in range(len(ids) - N + 1)}


def rolling_hashes(tokens: np.ndarray) -> Hashes:
    """The hash of each N-gram of token ids (T,), uint32 (T - N + 1,): the sum of tokens[i + k] BASE^(N - 1 - k) over k,
    modulo 2^32."""
    power, size = tokens.astype(np.uint32), 1  # hashes of all runs of `size` tokens
    result, done = np.zeros(len(tokens) + 1, np.uint32), 0  # hashes of all runs of `done` tokens
    base = BASE
    while True:
        if N & size:
            count = len(tokens) - done - size + 1
            result = result[:count] * np.uint32(base) + power[done : done + count]
            done += size
        if done == N:
            return result
        power = power[:-size] * np.uint32(base) + power[size:]
        base, size = base * base % (1 << 32), size * 2


def find_ngrams(
    wanted: Iterable[bytes], data: Sequence[Tokens], progress: Callable[[int], None] = lambda done: None
) -> set[bytes]:
    """The wanted N-grams that occur in any source of training data.

    The sources are read once, CHUNK tokens at a time; memory grows only with the number of wanted N-grams. N-grams with
    equal hashes are compared token by token, so the result is exact. `progress` is called with the number of tokens
    read."""
    wanted = set(wanted)
    table = np.zeros(1 << TABLE_BITS, np.bool_)
    shift = np.uint32(32 - TABLE_BITS)
    hashes = np.array([rolling_hashes(np.frombuffer(one, np.uint32))[0] for one in wanted], np.uint32)
    hashes.sort()
    table[hashes >> shift] = True
    present: set[bytes] = set()
    done = 0
    for tokens in data if wanted else ():
        for start in range(0, len(tokens) - N + 1, CHUNK):
            part = tokens[start : start + CHUNK + N - 1]
            each = rolling_hashes(part)
            near = np.flatnonzero(table[each >> shift])
            indices = near[hashes[np.searchsorted(hashes, each[near]).clip(max=len(hashes) - 1)] == each[near]]
            if len(indices):
                windows = np.lib.stride_tricks.sliding_window_view(part, N)[indices].astype(np.uint32)
                present |= {bytes(one) for one in np.unique(windows, axis=0)} & wanted
            progress(done + start + len(part))
        done += len(tokens)
    return present


def contaminated(
    items: Sequence[Sequence[int]], data: Sequence[Tokens], progress: Callable[[int], None] = lambda done: None
) -> list[bool]:
    """Return, for each item, whether one of its N-grams occurs in the data; an item of fewer than N tokens counts as
    clean."""
    grams = [ngrams(item) for item in items]
    present = find_ngrams({one for own in grams for one in own}, data, progress)
    return [not own.isdisjoint(present) for own in grams]
