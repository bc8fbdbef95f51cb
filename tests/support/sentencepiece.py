"""A slow and simple computation of SentencePiece's tokens, and random model files."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from onward.text.pieces import NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, Piece

from support.vocabularies import BYTES, CONTROLS, message

Field = tuple[int, int | float | bytes]


@dataclass(frozen=True)
class Spec:
    """A model file: its pieces, the settings that Onward reads, and additional fields by message."""

    pieces: Sequence[Piece]
    kind: int = 2
    prefix: bool = True
    squeeze: bool = False
    suffix: bool = False
    fallback: bool = False
    more: dict[str, list[Field]] = field(default_factory=dict)

    def content(self) -> bytes:
        """The bytes of the file."""
        more = {"model": [], "piece": [], "trainer": [], "normalizer": [], **self.more}
        listed = [(1, message((1, p.text.encode()), (2, float(p.score)), (3, p.type))) for p in self.pieces]
        listed[-1] = (1, listed[-1][1] + message(*more["piece"]))
        trainer = message((3, self.kind), (24, self.suffix), (35, self.fallback), *more["trainer"])
        normalizer = message((3, self.prefix), (4, self.squeeze), *more["normalizer"])
        return message(*listed, (2, trainer), (3, normalizer), *more["model"])

    def symbols(self) -> list[str]:
        """The user-defined symbols, longest first."""
        texts = [piece.text for piece in self.pieces if piece.type == USER_DEFINED]
        return sorted(texts, key=len, reverse=True)

    def cut(self, text: str) -> list[str]:
        """Split a text into user-defined symbols and single characters."""
        found, at = [], 0
        while at < len(text):
            size = next((len(one) for one in self.symbols() if text.startswith(one, at)), 1)
            found.append(text[at : at + size])
            at += size
        return found

    def normalized(self, text: str) -> str:
        """The normalized text, before it is split into pieces."""
        parts = self.cut(text)
        if self.squeeze:
            while parts and parts[0] == " ":
                parts.pop(0)
        if not parts:
            return ""
        result, after_space = "", self.squeeze
        for part in parts:
            rest = part.lstrip(" ") if after_space else part
            result += rest
            after_space = self.squeeze and (rest.endswith(" ") if rest else after_space)
        result = (SPACE if self.prefix and not self.suffix else "") + result.replace(" ", SPACE)
        if self.squeeze:
            result = result.rstrip(SPACE)
        return result + (SPACE if self.prefix and self.suffix else "")

    def encode(self, text: str) -> list[int]:
        """The ids of a text, after repeated merges of the two neighbors that form the piece with the best score (the
        first such pair if scores are equal)."""
        scores = {p.text: p.score for p in self.pieces if p.type in (NORMAL, USER_DEFINED, UNUSED)}
        symbols, parts = {*self.symbols()}, self.cut(self.normalized(text))
        while True:
            pairs = [
                (-scores[left + right], at)
                for at, (left, right) in enumerate(pairwise(parts))
                if left + right in scores and not {left, right} & symbols
            ]
            if not pairs:
                return self.ids(parts)
            _, at = min(pairs)
            parts[at : at + 2] = ["".join(parts[at : at + 2])]

    def ids(self, parts: Sequence[str]) -> list[int]:
        ids = {piece.text: i for i, piece in enumerate(self.pieces)}
        unknown = next(i for i, piece in enumerate(self.pieces) if piece.type == UNKNOWN)
        found, before = list[int](), False
        for part in parts:
            if part in ids:
                found.append(ids[part])
            elif self.fallback:
                found += [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
            elif not before:
                found.append(unknown)
            before = part not in ids
        return found


LETTERS = ["a", "b", "c", SPACE, "é", "日"]
TEXT = [*LETTERS, "a", "b", " ", " ", "  ", "\n", "x", "e\u0301", "\u3000", "<s>", "</s>", "<unk>", "<0x41>", "🙂"]
STRANGE_FIELDS: dict[str, list[Field]] = {  # by protobuf message: fields that must be refused
    "model": [(4, message((1, message((1, b"a"), (2, b"no"))))), (5, message((2, b"map"))), (9, 1), (200, b"x")],
    "piece": [(4, 1), (200, b"x")],
    "trainer": [(8, 1), (56, 1), (200, b"x"), (3, 1), (3, 3), (3, 4), (3, 9)],
    "normalizer": [(2, b"a map"), (5, 0), (7, 1), (200, b"x")],
}
OF_TRAINING: list[Field] = [  # fields that matter only for training a vocabulary
    *((number, value) for number in (4, 11, 14, 16, 17, 18, 20, 49, 50, 52, 55) for value in (0, 1, 9999)),
    *((number, value) for number in (19, 21, 22, 23, 25, 26, 32, 33, 34) for value in (0, 1)),
    *((number, b"a text") for number in (1, 2, 5, 7, 30, 31, 36, 53, 54, 44)),
    *((number, 0.5) for number in (10, 15, 51)),
    *((number, value) for number in (40, 41, 42, 43) for value in (0, 1, 7)),
]


def random_spec(draw: random.Random) -> Spec:
    """A file with random pieces and fields."""
    letters = draw.sample(LETTERS, draw.randint(2, len(LETTERS)))
    texts = dict.fromkeys(letters)
    for _ in range(draw.randint(0, 14)):
        texts.setdefault("".join(draw.choices([*texts], k=2)))
    scores = draw.sample(range(1, 100), len(texts))
    pieces = [Piece(text, -score, NORMAL) for text, score in zip(texts, scores)]
    if not draw.randrange(3):
        symbols = ["ab", "<t>", f"{SPACE}{SPACE}", "a", " ", "  ", "x y", "</s>x"]
        used = [text for text in draw.sample(symbols, draw.randint(1, 3)) if text not in texts]
        pieces += [Piece(text, 0, USER_DEFINED) for text in used]
    fallback = bool(draw.randrange(2))
    pieces = [*CONTROLS, *(BYTES if fallback else []), *pieces]
    if not draw.randrange(8):  # change one piece
        at = draw.randrange(len(pieces))
        kind, score = draw.choice([1, 2, 3, 4, 5, 6]), draw.choice([pieces[at].score, pieces[-1].score, 0])
        pieces[at] = replace(pieces[at], type=kind, score=score)
    more: dict[str, list[Field]] = {
        "trainer": draw.sample(OF_TRAINING, draw.randint(0, 5)),
        "normalizer": draw.choice([[], [(1, b"identity")], [(5, 1), (6, b"a file")]]),
    }
    if not draw.randrange(6):
        where = draw.choice([*STRANGE_FIELDS])
        more[where] = [*more.get(where, []), draw.choice(STRANGE_FIELDS[where])]
    prefix, squeeze, suffix = (bool(draw.randrange(2)) for _ in range(3))
    return Spec(pieces, 2, prefix, squeeze, suffix, fallback ^ (not draw.randrange(20)), more)


def random_text(draw: random.Random) -> str:
    return "".join(draw.choices(TEXT, k=draw.randint(0, 9)))
