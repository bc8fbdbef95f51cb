"""Text decoded token by token equals the complete text at the end."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import Tokenizer, train_tokenizer
from onward.text import TextStream
from onward.text.tokenizer import UNKNOWN

TEXT = "The cat sat.\n The café — 猫 🐈!\n" * 20
TOKENIZERS = {spec: train_tokenizer(spec, [TEXT]) for spec in ("char", "byte", "bpe:300")}


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_joined_are_the_whole_for_any_tokens(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)) | st.text().map(tokenizer.encode))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 511) | st.integers(3, 258)))
def test_pieces_joined_are_the_whole_with_sentencepiece(shared: Path, ids: list[int]) -> None:
    tokenizer = sentencepiece(shared)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def sentencepiece(shared: Path, made: dict[Path, Tokenizer] = {}) -> Tokenizer:  # noqa: B006
    return made.setdefault(shared, Tokenizer.load(shared / "stories260K"))


@given(text=st.text(st.characters(exclude_characters=UNKNOWN, exclude_categories=["Cs"])))
def test_no_piece_holds_half_a_character(text: str) -> None:
    for name in "byte", "bpe:300":
        tokenizer = TOKENIZERS[name]
        assert UNKNOWN not in "".join(streamed(tokenizer, tokenizer.encode(text)))


def test_a_character_is_said_as_soon_as_it_is_whole() -> None:
    byte = TOKENIZERS["byte"]
    assert streamed(byte, byte.encode("aé猫")) == ["a", "", "é", "", "", "猫", ""]
    char = TOKENIZERS["char"]
    assert streamed(char, char.encode("aXa")) == ["a", UNKNOWN, "a", ""]


def test_control_tokens_have_no_text_in_a_stream() -> None:
    bpe = TOKENIZERS["bpe:300"]
    assert "".join(streamed(bpe, [bpe.eos_id, *bpe.encode("cat"), bpe.eos_id])) == "cat"


def test_the_cost_of_a_token_does_not_grow_where_no_character_ever_ends() -> None:
    byte = TOKENIZERS["byte"]
    continuation = byte.encode("é")[1:] * 50_000  # would take minutes if each token decoded the complete text again
    assert "".join(streamed(byte, continuation)) == UNKNOWN * 50_000
