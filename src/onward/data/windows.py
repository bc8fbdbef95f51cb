"""Windows: which tokens are sample i.

Shapes: T context_length.
"""

from functools import lru_cache

import numpy as np

from onward.errors import UserError


class Windows:
    """Windows of T + 1 tokens, shuffled without replacement in each epoch.

    Which window is sample i is a pure function of (seed, i), so that a run resumes where it was. Each epoch cuts the
    text at other places. A UserError tells of a text shorter than one window.
    """

    def __init__(self, tokens: np.ndarray, context_length: int, seed: int) -> None:
        self.tokens, self.length, self.seed = tokens, context_length, seed
        if len(tokens) <= context_length:
            raise UserError(
                f"the text has {len(tokens)} tokens, and one window takes {context_length + 1}: give it more text or a "
                "smaller --model.context-length"
            )
        self.count = max(1, (len(tokens) - 1) // context_length - 1)  # one less than fit leaves room to shift the cuts
        self.epoch = lru_cache(maxsize=2)(self._epoch)

    def __len__(self) -> int:
        """Windows in an epoch."""
        return self.count

    def _epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        """Where the first window of an epoch begins, and the order of its windows."""
        random = np.random.default_rng((self.seed % 2**64, epoch))  # numpy takes no negative seeds
        room = len(self.tokens) - 1 - self.count * self.length
        return int(random.integers(0, min(room, self.length) + 1)), random.permutation(self.count)

    def batch(self, first: int, count: int) -> np.ndarray:
        """Samples `first` to `first + count`, (count, T + 1) int64."""
        result = np.empty((count, self.length + 1), dtype=np.int64)
        for row, i in enumerate(range(first, first + count)):
            shift, order = self.epoch(i // self.count)
            start = shift + int(order[i % self.count]) * self.length
            result[row] = self.tokens[start : start + self.length + 1]
        return result


def validation_windows(tokens: np.ndarray, context_length: int) -> np.ndarray:
    """Windows (N, T + 1) int64 that do not overlap and cover a text: each token but the first is predicted once.

    Behind the end of the text the last window has -1.
    """
    starts = np.arange(0, len(tokens) - 1, context_length)
    places = starts[:, None] + np.arange(context_length + 1)
    return np.where(places < len(tokens), np.asarray(tokens, dtype=np.int64)[places.clip(max=len(tokens) - 1)], -1)
