"""Counts and n-grams of earlier tokens for penalties, updated token by token instead of recomputed in each step.

Shapes: N rows of logits (after the last token of a request, and after each proposed token), B rows, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from onward.base.device import tensor_on
from onward.generation.distribution import History, counts
from onward.generation.request import Request


class NgramIndex:
    """An index of a growing text of tokens that finds repeated n-grams of `size` tokens: it holds the tokens that
    followed each sequence of `size` - 1 tokens."""

    def __init__(self, size: int) -> None:
        self.size, self.tokens = size, list[int]()
        self.following: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def push(self, token: int) -> None:
        """Append a token to the text."""
        self.tokens.append(token)
        if len(self.tokens) >= self.size:
            self.following[tuple(self.tokens[-self.size : -1])].append(token)

    def pop(self) -> None:
        """Remove the last token of the text."""
        if len(self.tokens) >= self.size:
            self.following[tuple(self.tokens[-self.size : -1])].pop()
        self.tokens.pop()

    def repeats(self) -> list[int]:
        """Return the tokens that, appended to the text, would repeat one of its n-grams of `size` tokens."""
        return self.following.get(tuple(self.tokens[len(self.tokens) - self.size + 1 :]), [])


class TokenCounts:
    """Token counts for repetition, frequency and presence penalties, kept on the device across steps: which
    tokens are in the prompt of each request, and how often each token was generated."""

    def __init__(self) -> None:
        self.requests: list[Request | None] = []  # the request of each row
        self.counted: list[int] = []  # number of generated tokens counted so far, of each row
        self.prompts = self.generated = torch.empty(0, 0)  # (B, V) of bool, (B, V)

    def update(self, requests: Sequence[Request], like: Tensor) -> None:
        """Assign row i of the counts to request i, and count the tokens generated since the last call; `like` (B, V)
        gives V and the device."""
        rows = len(requests)
        if rows > len(self.prompts) or self.prompts.device != like.device:
            self.requests, self.counted = [None] * rows, [0] * rows
            self.generated = torch.zeros(rows, like.size(1), device=like.device, dtype=torch.float32)
            self.prompts = torch.zeros(rows, like.size(1), device=like.device, dtype=torch.bool)
        new: list[Sequence[int]] = [()] * len(self.requests)
        for row, request in enumerate(requests):
            if self.requests[row] is not request or self.counted[row] > len(request.tokens):
                self.requests[row], self.counted[row] = request, 0
                self.generated[row] = 0
                self.prompts[row] = counts(like[:1], [request.prompt])[0] > 0
            new[row] = request.tokens[self.counted[row] :]
            self.counted[row] = len(request.tokens)
        if any(new):
            self.generated += counts(self.generated, new)


class RequestHistory(History):
    """The earlier tokens of each row of logits in an engine: prompt and answer of a request and, in speculative
    decoding, the draft tokens proposed before the row. Used for penalties and n-gram bans.

    `prefixes` holds, for each row of logits, the index of its request and these draft tokens. `counts` and `ngrams` are
    kept across steps.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        prefixes: Sequence[tuple[int, Sequence[int]]],
        counts: TokenCounts,
        ngrams: WeakKeyDictionary[Request, NgramIndex],
    ) -> None:
        self.requests, self.prefixes = requests, prefixes
        self.counts, self.ngrams = counts, ngrams

    def num_generated(self) -> list[int]:
        """Return the number of generated and draft tokens before each row of logits."""
        return [len(self.requests[i].tokens) + len(proposed) for i, proposed in self.prefixes]

    def text(self, row: int) -> Sequence[int]:
        """Return the prompt, the answer and the draft tokens before a row of logits."""
        i, proposed = self.prefixes[row]
        return [*self.requests[i].prompt, *self.requests[i].tokens, *proposed]

    def seen(self, like: Tensor) -> Tensor:
        """Return whether each token occurs before each row of logits, (N, V) of bool. `like` gives V and the device."""
        generated = self.generated(like)
        return self.counts.prompts[self.rows(like)] | (generated > 0)

    def generated(self, like: Tensor) -> Tensor:
        """Return how often each token was generated or drafted before each row of logits, (N, V). `like` gives V and
        the device."""
        self.counts.update(self.requests, like)
        generated = self.counts.generated[self.rows(like)]
        proposed = [proposed for _, proposed in self.prefixes]
        return generated + counts(like, proposed) if any(proposed) else generated

    def rows(self, like: Tensor) -> Tensor:
        """Return the index of the request of each row of logits, (N,), on the device of `like`."""
        return tensor_on(like.device, [i for i, _ in self.prefixes])

    def repeats(self, row: int, size: int) -> Iterable[int]:
        """Return the tokens that, as the next token of a row, would repeat an n-gram of `size` tokens in the row's
        text; empty if `size` is 0."""
        if not size:
            return ()
        i, proposed = self.prefixes[row]
        request = self.requests[i]
        index = self.ngrams.get(request)
        if index is None or index.size != size:
            index = self.ngrams[request] = NgramIndex(size)
        known, length = len(index.tokens), len(request.prompt)
        for token in chain(request.prompt[known:], request.tokens[max(0, known - length) :]):
            index.push(token)
        for token in proposed:
            index.push(token)
        repeats = set(index.repeats())
        for _ in proposed:
            index.pop()
        return repeats
