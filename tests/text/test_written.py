"""Tokenizers of every kind give the same ids after a round trip through transformers' AutoTokenizer, and those made
from tiktoken's ranks give tiktoken's ids over 10 MB of text."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from onward import Tokenizer, train_tokenizer
from onward.text import TextStream
from onward.text.fast import encoder
from onward.text.patterns import GPT2, LLAMA3, QWEN2
from onward.text.pieces import USER_DEFINED, Piece
from onward.text.ranks import load_ranks

from support.llama_cpp import PARTS, awkward_texts
from support.vocabularies import PIECES, small_ranks, write_pieces, write_ranks, write_tekken

TEXTS = awkward_texts(300)
SYMBOLS = [Piece(text, 0, USER_DEFINED) for text in ("Hello", "the cat", "...")]


def ranked(pattern: str, folder: Path) -> Tokenizer:
    return Tokenizer(load_ranks(write_ranks(small_ranks(), folder / "x.tiktoken"), pattern)[0])


MADE: dict[str, Callable[[Path], Tokenizer]] = {
    "char": lambda folder: train_tokenizer("char", [" ".join(PARTS)]),
    "byte": lambda folder: train_tokenizer("byte", []),
    "bpe": lambda folder: train_tokenizer("bpe:500", [" ".join(PARTS) * 3]),
    "GPT-2's ranks": lambda folder: Tokenizer(load_ranks(write_ranks(small_ranks(), folder / "x.tiktoken"), GPT2)[0]),
    "Llama 3's ranks": lambda folder: ranked(LLAMA3, folder),
    "Qwen's ranks": lambda folder: Tokenizer(load_ranks(write_ranks(small_ranks(), folder / "z.tiktoken"), QWEN2)[0]),
    "tekken": lambda folder: Tokenizer.load(write_tekken(small_ranks(), folder)),
    "SentencePiece": lambda folder: Tokenizer.load(write_pieces(folder / "tokenizer.model", PIECES)),
    "SentencePiece without a prefix": lambda folder: Tokenizer.load(
        write_pieces(folder / "other.model", PIECES, prefix=0)
    ),
    "SentencePiece with symbols": lambda folder: Tokenizer.load(
        write_pieces(folder / "symbols.model", [*PIECES, *SYMBOLS], squeeze=1)
    ),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: make(tmp_path_factory.mktemp("vocabulary")) for name, make in MADE.items()}


@pytest.mark.parametrize("name", MADE)
def test_ids_stay_equal_through_transformers_and_back(name: str, tokenizers, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = tokenizers[name]
    tokenizer.save(tmp_path / "ours")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    back = Tokenizer.load(tmp_path / "theirs")
    wanted = [tokenizer.encode(text) for text in TEXTS]
    assert [theirs.encode(text, split_special_tokens=True) for text in TEXTS] == wanted
    assert [back.encode(text) for text in TEXTS] == wanted
    # transformers makes the unknown token a control token
    known = [ids for ids in wanted if tokenizer.unknown_id not in ids]
    assert [back.decode(ids) for ids in known] == [tokenizer.decode(ids) for ids in known]
    if tokenizer.eos_id is not None:  # transformers adds <|endoftext|> to tiktoken ranks without control tokens
        assert (back.bos_id, back.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)


@pytest.mark.parametrize("name", ["tekken", "Llama 3's ranks", *(name for name in MADE if "SentencePiece" in name)])
@given(data=st.data())
def test_pieces_of_any_tokens_joined_are_the_whole(name: str, data: st.DataObject, tokenizers) -> None:
    tokenizer = tokenizers[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)) | st.sampled_from(TEXTS).map(tokenizer.encode))
    stream = TextStream(tokenizer)
    pieces = [*(stream.push(i) for i in ids), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.long
@pytest.mark.parametrize("pattern", [GPT2, LLAMA3], ids=["GPT-2", "Llama 3"])
def test_ids_of_ten_megabytes_are_those_of_tiktoken(pattern: str, shared: Path, tmp_path: Path) -> None:
    story = (shared / "tinyshakespeare.txt").read_text()
    parts = [part + story[i * 200 : (i + 1) * 200] for i, part in enumerate(awkward_texts(5000))]
    text = "".join(parts) * 9
    ranks = small_ranks()
    tokenizer = ranked(pattern, tmp_path)
    reference = tiktoken.Encoding("reference", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    [ids] = encoder(tokenizer)([text])
    assert len(text.encode()) >= 10_000_000
    assert tokenizer.decode(ids.tolist()) == text
    assert np.array_equal(ids, np.array(reference.encode_ordinary(text)))
