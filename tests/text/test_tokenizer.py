"""Tokenizers: decoding restores the encoded text, and transformers reads the file in the same way."""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from onward import Tokenizer, UserError, train_tokenizer
from onward.text.learning import by_tokenizers, interruptible, learn_bpe
from onward.text.patterns import BYTE_OF
from onward.text.tokenizer import END, UNKNOWN

TEXT = "The cat sat.\n\n  The café\tsang — 猫 🐈! It's  12,345 o'clock.\r\n" * 8
SPECS = ["char", "byte", "bpe:300"]
TRAINED = {spec: train_tokenizer(spec, [TEXT]) for spec in SPECS}
EXACT = [t for spec, t in TRAINED.items() if spec != "char"]


@given(text=st.text())
def test_every_text_survives_bytes_and_bpe(text: str) -> None:
    for tokenizer in EXACT:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.byte_count(tokenizer.encode(text)) == len(text.encode())


@given(text=st.text(alphabet=[*sorted(set(TEXT)), "ß", "\0", "\U0001f984"]))
def test_unknown_characters_never_vanish(text: str) -> None:
    expected = "".join(c if c in TEXT else UNKNOWN for c in text)
    ids = TRAINED["char"].encode(text)
    assert len(ids) == len(text)
    assert TRAINED["char"].decode(ids) == expected


@pytest.mark.parametrize("spec", SPECS)
def test_half_characters_become_unknown_ones(spec: str) -> None:
    assert TRAINED[spec].decode(TRAINED[spec].encode("a\ud800t\udcff")) == f"a{UNKNOWN}t{UNKNOWN}"


@pytest.mark.parametrize("spec", SPECS)
def test_a_control_token_written_in_a_text_is_text(spec: str) -> None:
    tokenizer = train_tokenizer(spec, [TEXT, f"a{END}b"])
    assert tokenizer.eos_id is not None
    ids = tokenizer.encode(f"a{END}b")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == f"a{END}b"
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == f"a{END}b"


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("loader", ["AutoTokenizer", "PreTrainedTokenizerFast"])
def test_transformers_reads_the_saved_file_with_the_same_ids(spec: str, loader: str, tmp_path: Path) -> None:
    import transformers

    TRAINED[spec].save(tmp_path)
    theirs = getattr(transformers, loader).from_pretrained(tmp_path)
    again = Tokenizer.load(tmp_path)
    for text in [TEXT, "a cat", " two  spaces ", "日本", "", "\n"]:
        ids = TRAINED[spec].encode(text)
        assert theirs.encode(text) == ids == again.encode(text)
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == TRAINED[spec].decode(ids)
    assert theirs.eos_token_id == TRAINED[spec].eos_id == again.eos_id
    assert len(theirs) == TRAINED[spec].vocab_size == again.vocab_size


@pytest.mark.parametrize("spec", SPECS)
def test_training_a_tokenizer_twice_gives_the_same_file(spec: str, tmp_path: Path) -> None:
    for name in "first", "second":
        train_tokenizer(spec, [TEXT, TEXT[::-1]]).save(tmp_path / name)
    assert (tmp_path / "first/tokenizer.json").read_bytes() == (tmp_path / "second/tokenizer.json").read_bytes()


def test_bpe_has_the_vocabulary_that_was_asked_for() -> None:
    assert train_tokenizer("bpe:290", [TEXT]).vocab_size == 290
    assert TRAINED["byte"].vocab_size == 257


LEARNED: dict[str, list[str]] = {
    "words": ["abab abc", "don't DON'T we'll"],
    "nothing": [],
    "empty texts": ["", ""],
    "characters of every kind": ["".join(map(chr, random.Random(0).choices(range(0xD800), k=600))) * 2],
    "control tokens": [f"a{END}b" * 9],
}


@pytest.mark.parametrize("name", LEARNED)
def test_learned_merges_equal_those_of_tokenizers(name: str) -> None:
    for size in 257, 258, 700:
        ours = learn_bpe(iter(LEARNED[name]), size, END)
        theirs = by_tokenizers(iter(LEARNED[name]), size, END, sorted(BYTE_OF))
        assert ours.__getstate__() == theirs.__getstate__()


def test_learning_stops_where_the_texts_break_off() -> None:
    def texts() -> Iterator[str]:
        yield "a"
        raise UserError("cut off")

    with pytest.raises(UserError, match="cut off"):
        train_tokenizer("bpe:300", texts())


def test_ctrl_c_does_not_wait_for_the_merges() -> None:
    end, ended = Event(), Event()

    def learn() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        end.wait(60)  # stands for a library that learns merges and ignores signals
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        interruptible(learn)
    assert not ended.is_set()
    end.set()


def test_the_files_of_gpt2_give_the_ids_of_transformers(shared: Path, tmp_path: Path) -> None:
    from transformers import GPT2TokenizerFast

    ours = Tokenizer.load(shared / "gpt2-tokenizer")
    files = {
        name: str(shared / "gpt2-tokenizer" / f) for name, f in [("vocab", "vocab.json"), ("merges", "merges.txt")]
    }
    theirs = GPT2TokenizerFast(**files)
    shakespeare = (shared / "tinyshakespeare.txt").read_text()[:200_000]
    for text in [TEXT, shakespeare, "Hello world", " \n \n a\n"]:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.encode("Hello world") == [15496, 995]
    assert ours.eos_id == 50_256 == ours.vocab_size - 1
    ours.save(tmp_path)
    assert Tokenizer.load(tmp_path).encode(TEXT) == ours.encode(TEXT)


def metaspace() -> Tokenizer:
    """A tokenizer that marks the beginning of a text, like SentencePiece."""
    inner = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate("▁ab\n")}, []))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace()
    return Tokenizer(inner)


def across_lines() -> Tokenizer:
    """A tokenizer whose tokens may contain a line break and the next character."""
    vocabulary = {c: i for i, c in enumerate(["a", "b", "\n", "\nb"])}
    return Tokenizer(tokenizers.Tokenizer(models.BPE(vocabulary, [("\n", "b")])))


def normalizing() -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate("▁ab\n")}, []))
    inner.normalizer = normalizers.Prepend("▁")
    return Tokenizer(inner)


@pytest.mark.parametrize("make", [*(lambda s=s: TRAINED[s] for s in SPECS), metaspace, across_lines, normalizing])
def test_pieces_of_a_text_have_the_ids_of_the_whole(make: Callable[[], Tokenizer]) -> None:
    tokenizer, some = make(), random.Random(1)
    spaces = ["\n", "\n\n", " ", "  \n", "\n ", "\r\n", "\x85", "\u2028", "\x1c", "\u180e\n"]
    for _ in range(30):
        text = "".join(some.choice([*spaces, "a", "b", "ab", "'s", "12", "?!", "é"]) for _ in range(200))
        pieces = tokenizer.pieces(text, 16)
        assert (len(pieces) > 1) == tokenizer.cuttable
        assert "".join(pieces) == text
        assert [i for piece in pieces for i in tokenizer.inner.encode(piece).ids] == tokenizer.inner.encode(text).ids


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "chars",
        "bpe",
        "bpe:",
        "bpe:0",
        "bpe:256",
        "bpe:-3",
        "bpe:4k",
        "bpe:²",
        "bpe:" + "9" * 30,
        "no/such/path",
        "x" * 5000,
    ],
)
def test_a_bad_choice_of_tokenizer_is_one_sentence(spec: str) -> None:
    with pytest.raises(UserError, match="tokenizer") as caught:
        train_tokenizer(spec, [TEXT])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": 3}', b"[]"])
def test_a_broken_tokenizer_file_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_padding_and_holes_of_the_vocabulary_have_no_text() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 3}, unk_token="a"))
    assert Tokenizer(inner).textless(6) == [1, 2, 4, 5]
    assert TRAINED["byte"].textless(257) == []


def test_pieces_for_tables_keep_spaces_and_name_control_tokens(shared: Path) -> None:
    stories = Tokenizer.load(shared / "stories260K")
    ids = stories.encode("Once upon a time")
    assert "".join(stories.piece(i) for i in ids) == "<s> Once upon a time"
    byte = TRAINED["byte"]
    assert [byte.piece(i) for i in byte.encode("é")] == [UNKNOWN, UNKNOWN]


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config.json": {"bos_token_id": 1, "eos_token_id": [2, 0]}}, (1, 2)),
        (
            {"generation_config.json": {"eos_token_id": 2}, "config.json": {"bos_token_id": 1, "eos_token_id": 0}},
            (1, 2),
        ),
        ({"tokenizer_config.json": {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}}, (1, 2)),
        ({"tokenizer_config.json": {"bos_token": 3, "eos_token": ["</s>"]}}, (None, None)),
        ({"tokenizer_config.json": [], "config.json": {"bos_token_id": -1, "eos_token_id": 10**30}}, (None, None)),
    ],
)
def test_control_tokens_are_found_where_a_folder_names_them(files: dict, ids: tuple, tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.BPE({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3}, []))
    inner.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = Tokenizer.load(tmp_path)
    assert (found.bos_id, found.eos_id) == ids


def test_the_bytes_of_a_token_that_was_added_as_written_are_counted() -> None:
    tokenizer = train_tokenizer("byte", [])
    tokenizer.inner.add_tokens(["猫é  "])
    text = "a猫é  b"
    ids = tokenizer.encode(text)
    assert len(ids) == 3
    assert tokenizer.byte_count(ids) == len(text.encode())
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@given(texts=st.lists(st.text(), max_size=5))
def test_a_batch_has_the_ids_of_its_texts(texts: list[str]) -> None:
    for tokenizer in TRAINED.values():
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_the_beginning_token_precedes_a_document_once_where_there_is_one() -> None:
    tokenizer = train_tokenizer("byte", [])
    begin, tokens = tokenizer.bos_id, tokenizer.encode("ab")
    assert tokenizer.begin(tokens) == tokenizer.begin([begin, *tokens]) == [begin, *tokens]
    assert tokenizer.begin([]) == [begin]
    assert Tokenizer(tokenizer.inner, None, None).begin(tokens) == tokens


@pytest.mark.parametrize(
    ("merges", "sentence"), [(None, "there is no merges.txt in"), ("one\ntwo three four\n", "merges.txt are not")]
)
def test_missing_or_broken_merges_are_named(merges: str | None, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    if merges is not None:
        (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(UserError) as error:
        Tokenizer.load(tmp_path)
    assert sentence in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "tokenizer.json" not in str(error.value)
