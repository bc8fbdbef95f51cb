"""The counts in a comparison of tokenizers, and the first difference of two texts."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from onward import Tokenizer, train_tokenizer
from onward.text.compare import built_in, compare, kind, labeled, script
from onward.text.fast import samples
from onward.text.tokenizer import UNKNOWN

BYTE, BPE = train_tokenizer("byte", []), train_tokenizer("bpe:400", [text for text, _ in built_in()])
LATIN = ["English", "German", "French", "Spanish", "Polish", "Turkish", "Vietnamese"]
OTHERS = {"Russian": "Cyrillic", "Greek": "Greek", "Arabic": "Arabic", "Hebrew": "Hebrew", "Hindi": "Devanagari"}
ASIAN = {"Thai": "Thai", "Chinese": "Han", "Japanese": "Hiragana", "Korean": "Hangul"}
SCRIPTS = dict.fromkeys(LATIN, "Latin") | OTHERS | ASIAN


def test_bytes_per_token_are_those_of_encoding_each_text() -> None:
    texts = [("Where?\n" * 9, {"source": "a", "kind": "x"}), ("Wo ist es?", {"source": "b", "kind": "x"}), ("", {})]
    found = compare({"byte": BYTE, "bpe": BPE}, texts)
    rows = {(row["by"], row["text"]): row for row in found["texts"]}
    for label, parts in {("all", "all"): texts, ("source", "a"): texts[:1], ("kind", "x"): texts[:2]}.items():
        whole = [text for text, _ in parts]
        assert rows[label]["bytes"] == sum(len(text.encode()) for text in whole)
        for name, tokenizer in {"byte": BYTE, "bpe": BPE}.items():
            expected = rows[label]["bytes"] / sum(map(len, tokenizer.encode_batch(whole)))
            assert rows[label]["bytes_per_token"][name] == pytest.approx(expected)
    assert [one["vocabulary"] for one in found["tokenizers"]] == [257, 400]
    assert [one["bytes_per_token"] for one in found["tokenizers"]] == [*rows["all", "all"]["bytes_per_token"].values()]


def lowercase() -> Tokenizer:
    tokenizer = train_tokenizer("byte", [])
    tokenizer.inner.normalizer = normalizers.Lowercase()
    return tokenizer


def half() -> Tokenizer:
    """A tokenizer whose vocabulary contains only "a", and that drops all other text."""
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])))


@pytest.mark.parametrize(
    ("tokenizer", "failures", "example"),
    [
        (BYTE, 0, None),
        (train_tokenizer("char", ["Where?"]), 1, {"text": "Where? Ö", "back": f"Where?{UNKNOWN * 2}"}),
        (lowercase(), 2, {"text": "Where?", "back": "where?"}),
        (half(), 2, {"text": "Where?", "back": ""}),
    ],
    ids=["byte", "char", "lowercase", "half"],
)
def test_texts_that_do_not_come_back_are_counted_and_the_first_is_shown(tokenizer, failures, example) -> None:
    texts = [("Where?", {}), ("Where? Ö", {})]
    [found] = compare({"one": tokenizer}, texts)["tokenizers"]
    assert (found["round_trip_failures"], found["example"]) == (failures, example)


def test_the_built_in_texts_are_in_many_languages_and_of_every_kind() -> None:
    assert samples()["language"].keys() == SCRIPTS.keys()
    found = compare({"bpe": BPE}, built_in())
    assert [row["text"] for row in found["texts"]] == ["all", "dialogue", "code", "numbers", "markup", *SCRIPTS]
    assert found["tokenizers"][0]["round_trip_failures"] == 0


@pytest.mark.parametrize(
    ("by", "tell", "told"), [("language", script, SCRIPTS), ("kind", kind, {})], ids=["script", "kind"]
)
def test_script_and_kind_are_told_from_the_built_in_texts(by, tell, told) -> None:
    for name, text in samples()[by].items():
        assert tell(text) == told.get(name, name)
    assert {kind(text) for text in samples()["language"].values()} == {"prose"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "prose"),
        ("First Citizen:\nBefore we go any further.\n\nAll:\nSpeak.\n", "dialogue"),
        ("- Where are you?\n- Here.\n", "dialogue"),
        ("« Où ? » dit-il.\n", "dialogue"),
        ("\\begin{letter}\n\\section{One}\n", "markup"),
        ("1.5\t2.5\n3.5\t4.5\n", "numbers"),
        ("if this is so, the class of things\nfor which it holds is large\n", "prose"),
        ("let x = 3;\nreturn x;\n", "code"),
    ],
)
def test_kinds_are_told_by_their_lines(text: str, expected: str) -> None:
    assert kind(text) == expected


@given(text=st.text())
def test_every_text_has_a_script_and_a_kind(text: str) -> None:
    same, labels = labeled(text, "here")
    assert same == text
    assert labels["source"] == "here"
    assert all(labels.values())
