"""A draft that looks up earlier occurrences of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from onward.base.errors import UserError
from onward.generation.cache.manager import CacheManager
from onward.generation.drafts.proposal import Proposal
from onward.generation.request import Request


class LookupDraft:
    """A draft for speculative decoding that looks up earlier text (prompt lookup decoding, Saxena 2023). It finds the
    longest final n-gram of the text, of `least` to `ngram` tokens, that occurred before, and proposes up to
    `num_draft_tokens` tokens that followed its last occurrence. If these reach the end of the text, they are
    repeated."""

    manager: CacheManager | None = None

    def __init__(self, num_draft_tokens: int = 8, ngram: int = 3, least: int = 1) -> None:
        if num_draft_tokens < 1 or ngram < 1:
            raise UserError(f"num_draft_tokens is {num_draft_tokens} and ngram {ngram}: both must be at least 1")
        if not 1 <= least <= ngram:
            raise UserError(f"least is {least}: it must be at least 1, and at most ngram, {ngram}")
        self.num_draft_tokens, self.ngram, self.least = num_draft_tokens, ngram, least
        self.indices: WeakKeyDictionary[Request, LookupIndex] = WeakKeyDictionary()

    def start(self, rows: int, length: int, chunk: int, vocab_size: int) -> None:
        """Do nothing: this draft needs no preparation for an engine."""

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        """Propose, for requests[i], at most room[i] tokens that followed the last occurrence of the request's final
        n-gram; an empty proposal if there is none."""
        proposals = []
        for request, most in zip(requests, room):
            index = self.indices.setdefault(request, LookupIndex(self.ngram, self.least))
            index.extend(request.prompt[len(index.tokens) :])
            index.extend(request.tokens[len(index.tokens) - len(request.prompt) :])
            proposals.append(Proposal(index.find(self.num_draft_tokens)[:most]))
        return proposals


class LookupIndex:
    """An index of a text's n-grams of `least` to `ngram` tokens: the position after the last occurrence of each. Adding
    a token costs O(ngram)."""

    def __init__(self, ngram: int, least: int = 1) -> None:
        self.sizes, self.tokens, self.ends = range(least, ngram + 1), list[int](), dict[tuple[int, ...], int]()

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for size in self.sizes:
                if size <= end:
                    self.ends[tuple(self.tokens[end - size :])] = end
            self.tokens.append(token)

    def find(self, most: int) -> list[int]:
        """Return `most` tokens that followed the last earlier occurrence of the longest indexed n-gram at the end of
        the text, repeated if they reach the end of the text; empty if there is no earlier occurrence."""
        for size in reversed(self.sizes):
            end = self.ends.get(tuple(self.tokens[-size:])) if size < len(self.tokens) else None
            if end is not None:
                found = self.tokens[end : end + most]
                return (found * -(-most // len(found)))[:most]
        return []
