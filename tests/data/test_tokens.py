"""Tokens on disk."""

from pathlib import Path

import numpy as np
import pytest

from onward.data.tokens import load_tokens, write_tokens
from onward.errors import UserError
from onward.text.tokenizer import train_tokenizer

CHAR = train_tokenizer("char", ["abc"])
END = CHAR.eos_id


def ids(text: str) -> list[int]:
    return [END if c == "|" else CHAR.encode(c)[0] for c in text]


@pytest.mark.parametrize(
    ("validation", "train", "held"),
    [(None, "abc|cab|", None), (0.25, "abc|ca", "b|"), (["aa", "b"], "abc|cab|", "aa|b|")],
)
def test_documents_are_written_and_mapped_back(validation, train: str, held: str | None, tmp_path: Path) -> None:
    write_tokens(tmp_path, CHAR, ["abc", "cab"], validation)
    data = load_tokens(tmp_path)
    assert isinstance(data.train, np.memmap)
    assert data.train.tolist() == ids(train)
    assert (data.validation.tolist() if data.validation is not None else None) == (held and ids(held))
    assert data.info["documents"] == 2
    assert data.info["bytes"] == 6


def test_unknown_characters_are_counted_wherever_they_are(tmp_path: Path) -> None:
    assert write_tokens(tmp_path / "1", CHAR, ["aXbY"], None).info["unknown_characters"] == 2
    assert write_tokens(tmp_path / "2", CHAR, ["aXb"], ["YYY"]).info["unknown_characters"] == 4


def test_ids_above_sixteen_bits_are_kept(tmp_path: Path) -> None:
    import tokenizers

    from onward.text.tokenizer import Tokenizer

    vocabulary = {"a": 0, "b": 70_000}
    large = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a")))
    assert write_tokens(tmp_path, large, ["b", "a", "b"], None).train.tolist() == [70_000, 0, 70_000]


def test_files_that_are_not_what_they_were_are_one_sentence(tmp_path: Path) -> None:
    write_tokens(tmp_path, CHAR, ["abc"], None)
    (tmp_path / "train.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match=r"train\.bin is missing or not the size"):
        load_tokens(tmp_path)
    (tmp_path / "train.bin").unlink()
    with pytest.raises(UserError, match=r"train\.bin is missing"):
        load_tokens(tmp_path)


def test_validation_text_of_one_token_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fewer than two tokens"):
        write_tokens(tmp_path, CHAR, ["abc"], 0.01)
    assert not list(tmp_path.iterdir())
