"""The texts that the tokens of a vocabulary can spell, and the search for tokens that complete an answer under a
grammar."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

BYTES_OF_TEXT = frozenset(bytes([b]) for b in range(0xF5)) - {b"\xc0", b"\xc1"}  # the bytes that occur in UTF-8
CONTINUATION = frozenset(bytes([b]) for b in range(0x80, 0xC0))  # bytes of a character after its first
JSON = '{}[]:,"-.0123456789truefalsn'  # characters that any JSON may need
BEYOND = re.compile(r"\\\\[pPuUx]|\[\^|format|x-guidance")  # schemas that may need further characters
FIRST, LAST = (
    '"}],:',
    "{[ \t\r\n",
)  # characters that end JSON early, and characters that extend it, in order of preference
SPACE_COST = 4
TRIES = 500  # maximum number of states that a search visits
STEPS = (1 / 64, 1 / 4, 4)  # token costs of three searches: the first allows long endings, the last finds the shortest


class Spelling:
    """The set of texts that the tokens of a vocabulary can spell, for constraints on answers. `pieces` are the bytes of
    the tokens; `generators` are the tokens that are not themselves sequences of shorter tokens."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        pieces = {piece for piece in pieces if piece}
        spelled_pieces = {piece for piece in pieces if len(piece) == 1}
        single = b"".join(spelled_pieces)
        for piece in sorted({p for p in pieces if p.translate(None, single)}, key=len):
            ends = [0]  # where a sequence of generators may end
            for end in range(1, len(piece) + 1):
                if any(piece[start:end] in spelled_pieces for start in ends):
                    ends.append(end)
            if ends[-1] < len(piece):
                spelled_pieces.add(piece)
        self.generators = frozenset(spelled_pieces)
        self.complete = spelled_pieces >= BYTES_OF_TEXT  # whether tokens can spell every text

    @cached_property
    def prefix_free(self) -> bool:
        """Whether no token in `generators` (those that are not sequences of shorter tokens) begins with another of
        them, so that a text divides into generators in only one way."""
        ranked = sorted(self.generators)
        return not any(second.startswith(first) for first, second in pairwise(ranked))

    @cached_property
    def expression(self) -> str:
        """The regular expression of all texts that the tokens can spell, for an llguidance grammar with
        `allow_invalid_utf8`."""
        characters = {piece: character(piece) for piece in sorted(self.generators)}
        classes = "".join(f"\\x{{{ord(c):x}}}" for c in characters.values() if c)
        rest = "|".join("".join(f"\\x{b:02x}" for b in piece) for piece, c in characters.items() if not c)
        return f"({'|'.join([f'(?u:[{classes}])'] * bool(classes) + [f'(?-u:{rest})'] * bool(rest))})*"

    def covers(self, schema: str) -> bool:
        """Return whether the tokens can complete every prefix of JSON that conforms to `schema`, a JSON schema as text;
        False if this is uncertain."""
        spelled = lambda c: c in self.generators or all(bytes([b]) in self.generators for b in c)
        partial = [piece for piece in self.generators if character(piece) is None]  # bytes of incomplete characters
        completable = not partial or (self.generators >= CONTINUATION and max(map(len, partial)) == 1)
        named = {c.encode(errors="replace") for c in {*JSON, *schema}}
        return completable and all(map(spelled, named)) and not BEYOND.search(schema)


def character(piece: bytes) -> str | None:
    """Return the character that the bytes of a token spell; None if they spell a part of a character, or more than one
    character."""
    text = piece.decode(errors="ignore")
    return text if len(text) == 1 and text.encode() == piece else None


class Search:
    """A search for token sequences that complete an answer under a grammar.

    `ids` maps the bytes of the tokens to search with to their ids, `end` is the id of the grammar's end token, and
    `others` are ids of tokens without bytes that the grammar names. Tokens are tried in this order: `others`,
    characters of `hint`, characters that end JSON, other characters of `text` (the text of the grammar), the rest,
    characters that extend JSON.
    """

    def __init__(self, ids: Mapping[bytes, int], hint: str, text: str, end: int, others: Sequence[int] = ()) -> None:
        def sort_key(piece: bytes) -> tuple[int, bool, bytes]:
            word = piece.decode(errors="replace")
            early, late = FIRST.find(word), LAST.find(word)
            if word in hint:
                order = -1
            elif early >= 0:
                order = early
            else:
                order = len(FIRST) + (2 + late if late >= 0 else word not in text)
            return order, not word.isalnum(), piece

        pieces = sorted(ids, key=sort_key)
        self.tokens, self.end = np.array([*others, *(ids[piece] for piece in pieces)], np.int64), end
        self.weights = np.array([1] * len(others) + [SPACE_COST if piece.isspace() else 1 for piece in pieces])

    def after(self, matcher: LLMatcher, token: int, known: Sequence[int]) -> Sequence[int] | None:
        """Return tokens that complete the answer after `token`, which `matcher` has not consumed yet; None if the
        search finds none. The matcher is not changed. `known` are tokens that complete the answer from the present
        state of the matcher."""
        for guess in (known[1:], known):  # `token` is the first of `known`, or part of a run of equal tokens
            if matcher.validate_tokens([token, *guess, self.end]) == len(guess) + 2:
                return guess
        following = matcher.deep_copy()
        following.consume_token(token)
        return self.find(following)

    def find(self, matcher: LLMatcher) -> list[int] | None:
        """Return tokens that complete the answer after the tokens that `matcher` has consumed. Returns None if no
        search finds such tokens within TRIES states, although they may exist."""
        return next((path for step in STEPS if (path := self.best_first(matcher, step)) is not None), None)

    def best_first(self, matcher: LLMatcher, step: float) -> list[int] | None:
        """Search for tokens that complete the answer, cheapest first; return None if TRIES states of the grammar do
        not suffice.

        A token costs `step` plus its rank, counted from 0, among the allowed tokens in order of preference; for white
        space the rank is multiplied by SPACE_COST.
        """
        order = count(0, -1)  # among states of equal cost, the latest comes first
        states: list[tuple[float, int, float, LLMatcher, list[int], np.ndarray, int]] = []

        def add(cost: float, state: LLMatcher, path: list[int], choice: np.ndarray, rank: int) -> None:
            if rank < len(choice):
                total = cost + step + rank * self.weights[choice[rank]]
                heappush(states, (total, next(order), cost, state, path, choice, rank))

        path: list[int] = []
        cost, state = 0.0, matcher.deep_copy()
        for _ in range(TRIES):
            allowed = allowed_tokens(state)
            if state.is_accepting():
                return path
            add(cost, state, path, allowed[self.tokens].nonzero()[0], 0)
            if not states:
                break
            total, _, cost, state, path, choice, rank = heappop(states)
            add(cost, state, path, choice, rank + 1)
            token, cost = int(self.tokens[choice[rank]]), total
            state, path = state.deep_copy(), [*path, token]
            state.consume_token(token)
        return None


def allowed_tokens(matcher: LLMatcher) -> np.ndarray:
    """Return a mask (V,) of bool: True for the tokens that a grammar allows next; the grammar's own end token is left
    out."""
    return np.frombuffer(matcher.compute_logit_bias(), np.uint8)[:-1] > 0
