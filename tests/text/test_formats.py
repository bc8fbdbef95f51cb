"""Vocabularies of SentencePiece, tiktoken and tekken encode and decode like their reference libraries."""

import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken

from onward import Tokenizer, UserError
from onward.data import encode
from onward.text.patterns import CL100K, GPT2, LLAMA3, O200K, QWEN2, TEKKEN
from onward.text.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Piece
from onward.text.ranks import PUBLISHED, load_ranks

from support.llama_cpp import PARTS, awkward_texts
from support.vocabularies import (
    BYTES,
    CONTROLS,
    PIECES,
    WORDS,
    message,
    small_ranks,
    write_pieces,
    write_ranks,
    write_tekken,
)

TEXTS = awkward_texts(600)
OPENAI = (  # cl100k's pattern in tiktoken 0.14
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
    r"\s+(?!\S)|\s"
)


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return small_ranks()


PATTERNS = {
    "gpt2": (GPT2, GPT2),
    "cl100k": (CL100K, OPENAI),
    "llama3": (LLAMA3, LLAMA3),
    "o200k": (O200K, O200K),
    "qwen": (QWEN2, QWEN2),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_ranks_give_the_ids_of_tiktoken(name: str, ranks: dict[bytes, int], tmp_path: Path) -> None:
    ours, theirs = PATTERNS[name]
    tokenizer = Tokenizer(load_ranks(write_ranks(ranks, tmp_path / "x.tiktoken"), ours)[0])
    reference = tiktoken.Encoding(name, pat_str=theirs, mergeable_ranks=ranks, special_tokens={})
    wanted = [reference.encode_ordinary(text) for text in TEXTS]
    assert [tokenizer.encode(text) for text in TEXTS] == wanted
    assert [tokenizer.decode(ids) for ids in wanted] == TEXTS


def test_a_token_that_no_merge_forms_is_found_whole_as_in_tiktoken(ranks: dict[bytes, int], tmp_path: Path) -> None:
    odd = {**ranks, b" unreachable": len(ranks)}
    tokenizer = Tokenizer(load_ranks(write_ranks(odd, tmp_path / "x.tiktoken"), GPT2)[0])
    reference = tiktoken.Encoding("odd", pat_str=GPT2, mergeable_ranks=odd, special_tokens={})
    assert tokenizer.encode(" unreachable") == reference.encode_ordinary(" unreachable") == [len(ranks)]


@pytest.mark.long
def test_published_vocabularies_are_known_by_their_number_of_ranks(tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {b"x" + n.to_bytes(3, "big"): n for n in range(256, 128_000)}
    tokenizer = Tokenizer.load(write_ranks(ranks, tmp_path / "tokenizer.model"))
    ids = {name: tokenizer.inner.token_to_id(name) for name in ("<|begin_of_text|>", "<|eot_id|>", "<|end_header_id|>")}
    assert ids == {"<|begin_of_text|>": 128_000, "<|eot_id|>": 128_009, "<|end_header_id|>": 128_007}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (128_000, 128_001, 128_256)
    assert tokenizer.encode("<|eot_id|>") == list(b"<|eot_id|>")  # control tokens typed in a text are encoded as text
    assert {count: max(known.specials.values()) for count, known in PUBLISHED.items()} == {
        50_256: 50_256,
        100_256: 100_276,
        128_000: 128_255,
        151_643: 151_645,
        199_998: 200_018,
    }


def test_tekken_puts_control_tokens_first_and_cuts_the_vocabulary(ranks: dict[bytes, int], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tekken(ranks, tmp_path))
    kept = {token: rank for token, rank in ranks.items() if rank < 500}
    reference = tiktoken.Encoding("tekken", pat_str=TEKKEN, mergeable_ranks=kept, special_tokens={})
    wanted = [[i + 20 for i in reference.encode_ordinary(text)] for text in TEXTS]
    assert [tokenizer.encode(text) for text in TEXTS] == wanted
    assert [tokenizer.decode(ids) for ids in wanted] == TEXTS
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 520)


SYMBOL = Piece("<tag>", 0, USER_DEFINED)
SPELLED = {
    "ab": ["\u2581ab"],
    "ab ab": ["\u2581ab", "\u2581ab"],
    " ab": ["\u2581", "\u2581ab"],
    "abc": ["\u2581", "abc"],
    "": [],
    "a\n": ["\u2581", "a", "<0x0A>"],
    "é</s>": ["\u2581", "<0xC3>", "<0xA9>", *[f"<0x{byte:02X}>" for byte in b"</s>"]],
    "<0x41>": ["\u2581", *[f"<0x{byte:02X}>" for byte in b"<0x41>"]],
}


@pytest.mark.parametrize("text", SPELLED)
def test_sentencepiece_merges_by_score_and_falls_back_on_bytes(text: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_pieces(tmp_path / "tokenizer.model", PIECES))
    ids = tokenizer.encode(text)
    spelled = ["\u2581", "ab", "c"] if text == "abc" else SPELLED[text]  # \u2581ab has a better score than abc
    assert [tokenizer.inner.id_to_token(i) for i in ids] == (["\u2581ab", "c"] if text == "abc" else spelled)
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos, tokenizer.eos) == ("<s>", "</s>")


def test_sentencepiece_file_equals_the_tokenizer_json_of_its_model(shared: Path, tmp_path: Path) -> None:
    reference = Tokenizer.load(shared / "stories260K")
    table = json.loads(reference.inner.to_str())["model"]
    order = {"".join(merge): n for n, merge in enumerate(table["merges"], 1)}
    types = dict.fromkeys(("<s>", "</s>"), CONTROL) | {piece.text: BYTE for piece in BYTES} | {"<unk>": UNKNOWN}
    ordered = sorted(table["vocab"], key=table["vocab"].__getitem__)
    pieces = [Piece(text, -order.get(text, 1000), types.get(text, NORMAL)) for text in ordered]
    tokenizer = Tokenizer.load(write_pieces(tmp_path / "tokenizer.model", pieces))
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text, special=False)


@pytest.mark.parametrize(("text", "tokens"), [
    ("<tag>", ["\u2581", "<tag>"]),
    ("ab<tag>ab", ["\u2581ab", "<tag>", "ab"]),
    ("<tag> <tag>", ["\u2581", "<tag>", "\u2581", "<tag>"]),
    ("<tag></s>", ["\u2581", "<tag>", *[f"<0x{byte:02X}>" for byte in b"</s>"]]),
])  # fmt: skip
def test_symbols_are_found_behind_the_space_before_a_text(text: str, tokens: list[str], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_pieces(tmp_path / "tokenizer.model", [*PIECES, SYMBOL]))
    ids = tokenizer.encode(text)
    assert [tokenizer.inner.id_to_token(i) for i in ids] == tokens
    assert tokenizer.decode(ids) == text


def trained_by_library(kind: str, folder: Path) -> tuple[Tokenizer, Any]:
    """A vocabulary of sentencepiece, in Onward and in the library; skips the test if the library is not installed."""
    library = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed: its ids are not compared")
    plain: dict[str, Any] = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    options: dict[str, Any] = {
        "prefix": plain,
        "no prefix": plain | {"add_dummy_prefix": False},
        "user-defined": plain | {"add_dummy_prefix": False, "user_defined_symbols": ["<tag>", "ab", "\u2581\u2581"]},
        "user-defined with prefix": plain | {"user_defined_symbols": ["<tag>", "ab", "\u2581\u2581"]},
        **{rules: {"normalization_rule_name": rules} for rules in ("nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf")},
        "squeezed": {"normalization_rule_name": "identity"},
        "squeezed without prefix": {"normalization_rule_name": "identity", "add_dummy_prefix": False},
        "suffix": plain | {"treat_whitespace_as_suffix": True},
        "suffix, squeezed": {"normalization_rule_name": "identity", "treat_whitespace_as_suffix": True},
    }[kind]
    model, lines = io.BytesIO(), [part for part in PARTS if part.strip()] * 3
    settings: dict[str, Any] = {"vocab_size": 450, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, character_coverage=0.98, **settings, **options
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return Tokenizer.load(folder), library.SentencePieceProcessor(model_proto=model.getvalue())


OF_LIBRARY = ["prefix", "no prefix", "squeezed", "squeezed without prefix", "suffix", "suffix, squeezed"]
OF_LIBRARY += ["user-defined", "user-defined with prefix"]
SYMBOLS = ["<tag>", "ab", "aab", "\u2581\u2581", " ", "\u2581", "</s>", "<0x41>", "<unk>", "cat"]
WITH_SYMBOLS = [*SYMBOLS, *map("".join, itertools.product(SYMBOLS, SYMBOLS)), "<tag></s><tag>", "ab<0x41>ab"]


@pytest.mark.parametrize("kind", OF_LIBRARY)
def test_sentencepiece_gives_the_ids_of_its_library(kind: str, tmp_path: Path) -> None:
    tokenizer, reference = trained_by_library(kind, tmp_path)
    texts = [*TEXTS, *WITH_SYMBOLS]
    wanted = [reference.encode(text) for text in texts]
    assert [tokenizer.encode(text) for text in texts] == wanted
    if "squeezed" in kind:  # not texts that begin with U+2581: of two at the beginning the library drops one or both
        wanted = [ids for text, ids in zip(texts, wanted) if not text.lstrip(" ").startswith("\u2581")]
    assert [tokenizer.decode(ids) for ids in wanted] == [reference.decode(ids) for ids in wanted]


@pytest.mark.parametrize("rules", ["nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf"])
def test_files_with_a_character_map_are_refused_by_its_name(rules: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a character map"):
        trained_by_library(rules, tmp_path)


@pytest.mark.long
def test_cached_ids_of_ten_megabytes_are_those_of_sentencepiece(shared: Path, tmp_path: Path) -> None:
    tokenizer, reference = trained_by_library("prefix", tmp_path)
    story = (shared / "tinyshakespeare.txt").read_text()
    documents = [text + story[i * 130 : i * 130 + 2100] for i, text in enumerate(awkward_texts(8000))]
    assert sum(len(text.encode()) for text in documents) >= 10_000_000
    ids, _ = encode(tokenizer, documents)
    assert np.array_equal(ids, [i for text in documents for i in [*reference.encode(text), tokenizer.eos_id]])


def test_tokens_and_bos_of_the_configuration_are_added(tmp_path: Path) -> None:
    write_pieces(tmp_path / "tokenizer.model", PIECES)
    added = {str(len(PIECES)): {"content": "<|end|>", "special": True}}
    config = {"bos_token": "<s>", "eos_token": "<|end|>", "add_bos_token": True, "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("ab") == [1, *tokenizer.encode("ab", special=False)]
    assert tokenizer.eos_id == len(PIECES)
    config["added_tokens_decoder"] = {"7000": {"content": "<|odd|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError,
        match=r"Cannot add the token '<\|odd\|>' .* id 7000, which is not the next free id after .* tokenizer.model",
    ):
        Tokenizer.load(tmp_path)


BAD = {
    "no message": ("tokenizer.model", b"\xff" * 40, "is not a SentencePiece file"),
    "cut off": (
        "tokenizer.model",
        message((1, message((1, b"a"))))[:-1],
        "is not a SentencePiece file (it is cut off)",
    ),
    "nothing": ("tokenizer.model", b"", "it has no pieces"),
    "ranks cut off": ("x.tiktoken", b"YQ== 0\nYg==", "not a tiktoken file of ranks"),
    "ranks of no known vocabulary": (
        "x.tiktoken",
        b"YQ== 0\nYg== 1\n",
        "because Onward knows no vocabulary of 2 ranks",
    ),
    "no base64": ("x.tiktoken", b"a!! 0\n", "not a tiktoken file of ranks"),
    "tekken without a vocabulary": ("tekken.json", b'{"config": {}}', "is not a tekken.json (KeyError"),
    "tekken cut off": ("tekken.json", b'{"config": {', "is not a tekken.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_none_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    name, content, words = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        Tokenizer.load(tmp_path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "pieces", "words"), [
    (1, PIECES, "is of kind unigram, and Onward reads only bpe"),
    (2, [*PIECES, PIECES[-1]], "one twice"),
    (2, [*CONTROLS, *WORDS, SYMBOL], "has symbols that Onward would not find in all texts"),
])  # fmt: skip
def test_pieces_that_would_not_be_equal_are_refused(kind: int, pieces, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        Tokenizer.load(write_pieces(tmp_path / "tokenizer.model", pieces, kind=kind))
