"""Fast encoding gives the ids of the `tokenizers` library for any text."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from onward import Tokenizer, train_tokenizer
from onward.text.fast import GPT2, LLAMA3, by_library, by_tiktoken, encoder, same_characters, samples
from onward.text.formats import byte_level
from onward.text.tokenizer import BYTE_OF, END

TEXTS = [text for group in samples().values() for text in group.values()]


def trained(pattern: str, texts: Sequence[str] = TEXTS) -> Tokenizer:
    """BPE trained on `texts`, which are split by `pattern`."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False, special_tokens=[END])
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)


def shuffled(tokenizer: Tokenizer) -> Tokenizer:
    """The same merges with shuffled ids."""
    table = json.loads(tokenizer.inner.to_str())
    vocab = table["model"]["vocab"]
    new = {old: (old * 7 + 5) % len(vocab) for old in vocab.values()}
    assert len({*new.values()}) == len(vocab)
    table["model"]["vocab"] = {token: new[i] for token, i in vocab.items()}
    for token in table["added_tokens"]:
        token["id"] = new[token["id"]]
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(table)))


OURS = train_tokenizer("bpe:900", TEXTS)
EQUAL = {"ours": OURS, "shuffled": shuffled(OURS), "llama-3": trained(LLAMA3), "gpt-2 as a split": trained(GPT2)}

WORDS = ["the", " the", "Ferry", "'s", "'S", "'ll", "'LL", "'ſ", "'", "12345", "٣٤", "½", "Ⅻ", "é", "e\u0301", "ß", "İ"]
SPACES = [" ", "  ", " " * 17, *"\t\n\r\f\v\x1c\x1f\x85\xa0\u2028\u180e\u200b\ufeff\u3000", "\n\n", "\r\n"]
OTHERS = ["!", "...", "<|", END, "|>", "👩\u200d👩\u200d👧", *"猫ナ가🐈\U0010ffff\u0378\u1c89\ufffd\0\x7f"]
LONG = ["a" * 300, "aA1!" * 40, "=" * 99, "漢" * 60]
HALVES = ["\ud800", "\udfff", "\ud83d\ude00"]
PARTS = st.sampled_from([*WORDS, *SPACES, *OTHERS, *LONG, *HALVES])
HOSTILE = st.lists(PARTS | st.text(max_size=8), max_size=40).map("".join)


def check(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Check that both ways of encoding give the ids of encode_batch."""
    fastest = by_tiktoken(tokenizer)
    assert fastest
    expected = tokenizer.encode_batch(texts)
    for encode in fastest, by_library(tokenizer):
        found = encode(texts)
        assert [ids.tolist() for ids in found] == expected
        assert all(ids.dtype == np.uint32 for ids in found)


@pytest.fixture(autouse=True)
def needs_tiktoken() -> None:
    pytest.importorskip("tiktoken")


@pytest.mark.parametrize("name", [*EQUAL, "gpt-2"])
def test_hostile_texts_have_the_ids_of_the_library(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = EQUAL.get(name) or Tokenizer.load(request.getfixturevalue("shared") / "gpt2-tokenizer")
    fastest = by_tiktoken(tokenizer)
    assert fastest

    @given(texts=st.lists(HOSTILE, max_size=4))
    def claim(texts: list[str]) -> None:
        assert [ids.tolist() for ids in fastest(texts)] == tokenizer.encode_batch(texts)

    claim()


def test_a_book_has_the_ids_of_the_library(shared: Path) -> None:
    book = (shared / "tinyshakespeare.txt").read_text()
    check(Tokenizer.load(shared / "gpt2-tokenizer"), [book[:300_000], book[-99_000:].replace("\n", "\r\n"), *TEXTS])


@pytest.mark.long
def test_both_libraries_know_the_same_characters() -> None:
    assert same_characters("".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000))


@pytest.mark.parametrize("what", ["a", "ab1", "!", " ", "\n", " \t", "\x1c", "!\x1c", "猫", "\u3000", "\ud800"])
def test_a_run_without_a_break_has_the_ids_of_the_library(what: str) -> None:
    """`tiktoken` by itself fails on a million spaces."""
    run = what * ((1_200_000 if what == " " else 90_000) // len(what))
    for name in "ours", "llama-3":
        check(EQUAL[name], [run, f"the {run[:70_000]} ferry\n", f"{run[:30_000]}x {run[:60_000]}"])


def test_library_encodes_many_texts_in_bounded_groups() -> None:
    sizes = []

    class Noted(Tokenizer):
        def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
            sizes.append(sum(map(len, texts := list(texts))))
            return super().encode_batch(texts)

    texts = ["A line of text.\n" * 5, "", "x", "Another.\n\n" * 9] * 20
    assert [ids.tolist() for ids in by_library(Noted(OURS.inner), 300)(texts)] == OURS.encode_batch(texts)
    assert len(sizes) > 5
    assert max(sizes) < 300 + max(map(len, texts))


def merges(*pairs: tuple[str, str], **options: object) -> Tokenizer:
    """A tokenizer with these merges, in this order."""
    vocab = {c: i for i, c in enumerate(BYTE_OF)}
    for left, right in pairs:
        vocab.setdefault(left + right, len(vocab))
    return Tokenizer(byte_level(models.BPE(vocab, list(pairs), **options), use_regex=True))


def with_own_token() -> Tokenizer:
    tokenizer = train_tokenizer("bpe:300", TEXTS)
    tokenizer.inner.add_tokens(["ferry"])
    return tokenizer


def normalizing() -> Tokenizer:
    tokenizer = train_tokenizer("bpe:300", TEXTS)
    tokenizer.inner.normalizer = tokenizers.normalizers.NFC()
    return tokenizer


REFUSED = {
    "never what its bytes become": lambda: merges(("a", "b"), ("b", "c"), ("a", "bc")),
    "made in two places": lambda: merges(("a", "b"), ("b", "c"), ("c", "d"), ("ab", "cd"), ("a", "bc"), ("abc", "d")),
    "made before its parts": lambda: merges(("b", "c"), ("a", "bcd"), ("bc", "d")),
    "bytes without a token": lambda: Tokenizer(byte_level(models.BPE({"a": 0}, []), use_regex=True)),
    "drops merges": lambda: merges(("a", "b"), dropout=0.5),
    "tokens of its own in texts": with_own_token,
    "normalizes": normalizing,
    "no words": lambda: train_tokenizer("byte", []),
    "characters": lambda: train_tokenizer("char", TEXTS),
    "another pattern": lambda: trained(r"\w+|\W"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_where_equality_is_not_proven_the_library_encodes(why: str) -> None:
    tokenizer = REFUSED[why]()
    assert by_tiktoken(tokenizer) is None
    if why != "drops merges":
        texts = ["abcd bc the ferry's e\u0301", *TEXTS]
        assert [ids.tolist() for ids in encoder(tokenizer)(texts)] == tokenizer.encode_batch(texts)


@given(
    pairs=st.lists(st.tuples(*[st.text("abc", min_size=1, max_size=3)] * 2), unique=True, max_size=12),
    text=st.text("abc", max_size=30),
)
def test_merges_in_any_order_are_refused_or_equal(pairs: list[tuple[str, str]], text: str) -> None:
    parts = set("abc")
    known = [(a, b) for a, b in pairs if a in parts and b in parts and not parts.add(a + b)]  # type: ignore[func-returns-value]
    tokenizer = merges(*known)
    if found := by_tiktoken(tokenizer):
        assert found([text])[0].tolist() == tokenizer.encode(text)


def test_without_tiktoken_the_library_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert by_tiktoken(OURS) is None
    assert encoder(OURS)(["The ferry."])[0].tolist() == OURS.encode("The ferry.")


def test_libraries_that_disagree_on_characters_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    class Older(tiktoken.Encoding):
        """Does not treat U+0085 as a space."""

        def __init__(self, name: str, *, pat_str: str, **options: Any) -> None:
            super().__init__(name, pat_str=r"[^\S\x85]" if pat_str == r"\s" else pat_str, **options)

    assert same_characters()
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(Encoding=Older))
    assert not same_characters()
    assert by_tiktoken(OURS) is None
