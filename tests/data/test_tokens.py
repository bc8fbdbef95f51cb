"""Tokens in memory and on disk."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from onward import Tokenizer, Tokens, UserError, train_tokenizer
from onward.data import encode, load_tokens
from onward.data.encoding import PASSAGE_CHARS
from onward.data.prepare import Cleaning, prepare
from onward.data.tokens import is_prepared

CHAR = train_tokenizer("char", ["abc\n"])
SOURCES = st.lists(st.lists(st.integers(1, 6), max_size=4), max_size=3)  # lengths of the documents of each source
PLACE = st.integers(0, 40)


@given(sources=SOURCES, a=PLACE, b=PLACE, c=PLACE, d=PLACE)
def test_tokens_of_several_sources_know_where_documents_begin(
    sources: list[list[int]], a: int, b: int, c: int, d: int
) -> None:
    begins = np.cumsum([0, *(length for lengths in sources for length in lengths)])
    several = np.split(np.arange(begins[-1]), np.cumsum([sum(lengths) for lengths in sources])[:-1])
    whole = Tokens.join(Tokens.of(ids, np.cumsum(lengths)) for ids, lengths in zip(several, sources))
    part, expected = whole.part(a, b), np.arange(begins[-1])[a:b]
    assert (len(whole), len(part)) == (begins[-1], len(expected))
    assert part[:].tolist() == whole[a:b].tolist() == expected.tolist()
    assert part[c:d].tolist() == part.part(c, d)[:].tolist() == expected[c:d].tolist()
    here = [i for i, token in enumerate(expected[c:d]) if token in begins]
    assert part.starts(c, d).tolist() == here
    smaller = part.part(c, d)
    assert smaller.starts(0, len(smaller)).tolist() == here
    joined = Tokens.join([smaller])
    assert joined.starts(0, len(joined)).tolist() == sorted({*here, 0} if len(joined) else here), (
        "a document begins with each source"
    )


@pytest.mark.parametrize("ids", [np.zeros(4), np.array([1, -1]), np.zeros((2, 2), int), np.array(["a"])], ids=str)
def test_ids_that_are_no_sequence_of_token_ids_are_refused(ids: np.ndarray) -> None:
    with pytest.raises(UserError, match=r"^ids are .*: give token ids \(N,\)"):
        Tokens.of(ids)


@pytest.mark.parametrize("ends", [[3, 2], [5], [-1, 4], [1.0, 4.0], [[4]]], ids=str)
def test_ends_of_documents_that_are_not_ascending_indices_are_refused(ends: list) -> None:
    with pytest.raises(UserError, match=r"^ends are .*: give ascending integers .* from 0 to 4$"):
        Tokens.of(np.arange(4), np.array(ends))


@pytest.mark.parametrize("end", [CHAR.eos_id, None])
def test_documents_are_followed_by_the_end_token_if_there_is_one(end: int | None) -> None:
    tokenizer = CHAR if end else Tokenizer(CHAR.inner, eos=None)
    texts = ["abc", "", "cab\n" * (PASSAGE_CHARS // 2), "a"]
    after = [] if end is None else [end]
    documents = [tokenizer.encode(text) + after for text in texts]
    ids, ends = encode(tokenizer, iter(texts))
    assert ids.dtype == np.uint16
    assert ids.tolist() == [i for document in documents for i in document]
    assert ends.tolist() == np.cumsum([len(document) for document in documents]).tolist()


def test_ids_above_16_bits_are_stored(tmp_path: Path) -> None:
    large = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 70_000}, unk_token="a")))
    (tmp_path / "t.jsonl").write_text('{"text": "b"}\n{"text": "a"}\n{"text": "b"}')
    data = prepare([str(tmp_path / "t.jsonl")], large, tmp_path / "out", cleaning=Cleaning(exact=False))
    assert data.sources[0][:].tolist() == [70_000, 0, 70_000]
    assert data.index.dtype == "uint32"


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    (tmp_path / "t.txt").write_text("abc")
    return prepare([str(tmp_path / "t.txt")], CHAR, tmp_path / "out").folder


@pytest.mark.parametrize("file", ["00000.bin", "00000.ends"])
def test_changed_shard_is_a_user_error(file: str, prepared: Path) -> None:
    path, content = prepared / file, (prepared / file).read_bytes()
    load_tokens(prepared, verify="sha256")
    path.write_bytes(bytes(255 - byte for byte in content))
    load_tokens(prepared)
    with pytest.raises(UserError, match=rf"{file} is missing or has changed"):
        load_tokens(prepared, verify="sha256")
    for change in lambda: path.write_bytes(content[1:]), path.unlink:
        change()
        with pytest.raises(UserError, match=rf"{file} is missing or has changed"):
            load_tokens(prepared)


@pytest.mark.parametrize(
    "index", ["{}", "[]", "no JSON", '{"dtype": "object", "sources": []}', '{"dtype": "uint16", "sources": [3]}']
)
def test_invalid_index_is_a_user_error(index: str, prepared: Path) -> None:
    (prepared / "data.json").write_text(index)
    with pytest.raises(UserError, match=r"data\.json"):
        load_tokens(prepared)


def test_shard_outside_of_its_folder_is_not_read(prepared: Path) -> None:
    info = json.loads((prepared / "data.json").read_text())
    info["sources"][0]["shards"][0]["file"] = "../../t.bin"
    (prepared / "data.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=r"out/t\.bin is missing"):
        load_tokens(prepared)


@pytest.mark.parametrize("name", ["", ".", "-", "*.txt", "embedded", "x" * 5000])
def test_other_paths_are_not_prepared_folders(name: str, tmp_path: Path) -> None:
    assert not is_prepared(Path(name))
    with pytest.raises(UserError, match="contains no prepared tokens"):
        load_tokens(Path(name))
