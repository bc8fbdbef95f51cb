"""Texts in two parts: the tokens of both parts decode to the text, with no space added or lost between them."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers

from onward import Tokenizer
from onward.data import Encoder, Record
from onward.data.forms import judged, own_sequences, preferred
from onward.data.layouts import converted
from onward.text import with_template
from onward.text.boundaries import continuing
from onward.training.environments.environment import reply_tokens

from support.kinds import KINDS, of_kind

PARTS = ["The answer is:", " ", " ", "four", "cats", "ca", "terpillar", "  ", "\n", "é", "猫", "🐈", ".", "<s>", "\t"]
HALVES = [  # halves that end or begin inside words or with spaces, or are empty
    ("The answer is: ", "four cats"),
    ("The answer is:", " four cats"),
    ("The answer is: four cats is ca", "terpillar"),
    ("the cat", "s"),
    ("", "four cats"),
    ("four\n", " cats"),
    ("four\n", "cats"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_completion_decode_to_the_text(kind: str, tmp_path: Path) -> None:
    names, draw = of_kind(kind, tmp_path), random.Random(kind)
    texts = ["".join(draw.choices(PARTS, k=draw.randint(1, 8))) for _ in range(200)]
    cuts = [draw.randint(0, len(text)) for text in texts]
    for before, after in HALVES + [(text[:cut], text[cut:]) for text, cut in zip(texts, cuts)]:
        whole = names.encode(before + after)
        if kind == "words" and len(whole) < len(names.encode(before)) + len(names.encode(after)):
            continue  # in a vocabulary of whole words, no token continues a word
        prompt = names.encode(before)
        assert names.decode(prompt + names.continuation(before, after)) == names.decode(whole), (before, after)
        sequence = Encoder(names).answer(before, after)
        assert list(sequence.tokens) == (prompt or [names.bos_id]) + names.continuation(before, after) + [names.eos_id]
        assert list(sequence.trained) == [i >= len(prompt or [0]) for i in range(len(sequence.tokens))]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("words", "characters", "GPT-2")])
def test_prompt_that_ends_within_a_token_goes_on_without_a_space(kind: str, tmp_path: Path) -> None:
    names = of_kind(kind, tmp_path)
    for before, after in HALVES:
        ids = names.encode(before) + names.continuation(before, after)
        text = names.decode(ids)
        assert text.removeprefix(" ") == before + after or kind == "SentencePiece that squeezes"
        assert text.replace("\n ", "\n").split() == (before + after).split()


@pytest.mark.parametrize("kind", ["marked everywhere", "unigram", "byte-level with a prefix"])
def test_every_method_trains_the_text_of_the_data(kind: str, tmp_path: Path) -> None:
    names = of_kind(kind, tmp_path)
    before, after, other = "The answer is ca", "terpillar", "ts"
    encoder, whole = Encoder(names), names.decode(names.encode(before + after))
    rows: list[Any] = [
        {"prompt": before, "chosen": after, "rejected": other},
        {"chosen": before + after, "rejected": before + other},
        {"prompt": before, "completion": after, "label": True},
        {"prompt": "four ca", "completion": other, "label": False},
    ]
    records = [converted(Record(row, "a row")) for row in rows]
    pairs = list(preferred(encoder, records[:2]))
    assert [names.decode(pair.sequences[0].tokens) for pair in pairs] == [whole, whole]
    assert pairs[0].sequences[1].tokens == encoder.answer(before, other).tokens
    both = [[names.decode(one.tokens) for one in example.sequences] for example in judged(encoder, records[2:])]
    assert both[0] == [whole, names.decode(names.encode(before + other))]
    assert names.decode(own_sequences(encoder, {"prompt": before, "completion": after})[0].tokens) == whole


@pytest.mark.parametrize("kind", ["marked everywhere", "unigram", "byte-level with a prefix", "byte-level"])
def test_replies_and_second_texts_begin_without_a_space(kind: str, tmp_path: Path) -> None:
    names = of_kind(kind, tmp_path)
    turn = names.encode("four", special=False)
    assert names.decode(turn + reply_tokens(names, "", "cats\n")).strip() == "fourcats"
    endless = Tokenizer(names.inner, "<s>", None)
    assert names.decode(Encoder(endless).texts("four", "cats").tokens).removeprefix(" ") == "four\ncats\n"
    assert names.decode(Encoder(with_template(endless, "chatml")).texts("four").tokens).removeprefix(" ") == "four\n"


def test_treatments_of_the_beginning_are_left_out_and_others_kept() -> None:
    inner = of_kind("marked everywhere", Path()).inner
    inner.normalizer = normalizers.Sequence(
        [normalizers.Strip(left=True, right=False), normalizers.NFC(), normalizers.Prepend("\u2581")]
    )
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always")])
    assert "".join(continuing(inner).encode(" cate\u0301").tokens) == "\u2581caté"
    inner.normalizer, inner.pre_tokenizer = normalizers.Prepend("\u2581"), None
    assert continuing(inner).normalizer is None
    assert "".join(continuing(inner).encode("cats").tokens) == "cats"
