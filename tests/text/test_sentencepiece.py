"""Every field of a SentencePiece file is used as in the library, or the file is refused with the field's name."""

import importlib.util
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onward import Tokenizer, UserError
from onward.text.pieces import CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, Piece

from support.sentencepiece import OF_TRAINING, Spec, random_spec, random_text
from support.vocabularies import BYTES, CONTROLS, message

TEXTS = ["ab", f"ab{SPACE}", SPACE, f"b{SPACE}", "b"]
SMALL = [*CONTROLS, *(Piece(text, -score, NORMAL) for score, text in enumerate(TEXTS, 1)), Piece("a", -9, NORMAL)]
PLAIN = Spec(SMALL)


def load(spec: Spec, folder: Path) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(spec.content())
    return Tokenizer.load(folder)


SPELLED: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "ab a", [SPACE, f"ab{SPACE}", "a"]),
    ({"suffix": True}, "ab a", [f"ab{SPACE}", "a", SPACE]),
    ({"suffix": True}, "", []),
    ({"suffix": True}, " ", [SPACE, SPACE]),
    ({"suffix": True, "prefix": False}, "ab a", [f"ab{SPACE}", "a"]),
    ({"suffix": True, "squeeze": True}, "  ab  a  ", [f"ab{SPACE}", "a", SPACE]),
    ({"suffix": True, "squeeze": True}, "  ", []),
    ({"suffix": True, "squeeze": True}, f" {SPACE} ", [SPACE]),
    ({"squeeze": True}, f" {SPACE} ", []),
    ({"suffix": True}, "ab\n", ["ab", "<unk>", SPACE]),
]


@pytest.mark.parametrize(("options", "text", "tokens"), SPELLED)
def test_spaces_are_where_the_specification_has_them(options, text: str, tokens: list[str], tmp_path: Path) -> None:
    spec = replace(PLAIN, **options)
    tokenizer = load(spec, tmp_path)
    assert [tokenizer.inner.id_to_token(i) for i in tokenizer.encode(text)] == tokens
    assert spec.encode(text) == tokenizer.encode(text)


def with_fields(where: str, *fields: tuple[int, int | float | bytes]) -> Spec:
    return replace(PLAIN, more={where: list(fields)})


def with_pieces(*pieces: Piece, fallback: bool = False) -> Spec:
    return replace(PLAIN, pieces=[*SMALL, *pieces], fallback=fallback)


SAMPLE = message((1, message((1, b"ab a"), (2, f"{SPACE} ab{SPACE} a".encode()))))
REFUSED = {
    "a character map": (with_fields("normalizer", (1, b"nmt_nfkc"), (2, b"map")), "(precompiled_charsmap, 'nmt_nfkc')"),
    "a character map, no name": (with_fields("normalizer", (2, b"map")), "(precompiled_charsmap, 'its own')"),
    "spaces as they are": (with_fields("normalizer", (5, 0)), "escape_whitespaces is false"),
    "a denormalizer": (with_fields("model", (5, message((2, b"map")))), "denormalizer_spec"),
    "other samples": (with_fields("model", (4, SAMPLE.replace(b"ab a", b"ab b"))), "in self_test_data"),
    "unigrams": (replace(PLAIN, kind=1), "is of kind unigram"),
    "words": (replace(PLAIN, kind=3), "is of kind word"),
    "characters": (replace(PLAIN, kind=4), "is of kind char"),
    "a new field of the trainer": (with_fields("trainer", (57, 1)), "has field 57 in trainer_spec, which"),
    "an extension of the trainer": (with_fields("trainer", (200, b"x")), "has field 200 in trainer_spec"),
    "a new field of the normalizer": (with_fields("normalizer", (8, b"x")), "has field 8 in normalizer_spec"),
    "a new field of the model": (with_fields("model", (6, b"x")), "has field 6 in the model"),
    "a new field of a piece": (with_fields("piece", (4, 1)), "has field 4 in a piece"),
    "bytes, not declared": (with_pieces(*BYTES), "has 256 pieces for bytes, although byte_fallback is false"),
    "bytes, not there": (replace(PLAIN, fallback=True), "has 0 pieces for bytes, although byte_fallback is true"),
    "a byte too few": (with_pieces(*BYTES[1:], fallback=True), "has 255 pieces for bytes"),
    "a byte as text": (with_pieces(Piece("<0x41>", 0, USER_DEFINED)), "has '<0x41>' as text"),
    "two unknown pieces": (with_pieces(Piece("?", 0, UNKNOWN)), "has 2 pieces of type UNKNOWN"),
    "a character as control token": (with_pieces(Piece("!", 0, CONTROL)), "the control token '!'"),
    "pieces of one score": (with_pieces(Piece("ba", -2, NORMAL)), "has several pieces of the score -2"),
    "an unused piece": (with_pieces(Piece("bb", -7, UNUSED)), "has the unused piece 'bb'"),
    "an unused character": (with_pieces(Piece("c", -7, UNUSED)), "has the unused piece 'c'"),
    "a piece without its parts": (with_pieces(Piece("ac", -7, NORMAL)), "has the piece 'ac' and no piece 'c'"),
    "a symbol with two spaces": (
        replace(with_pieces(Piece("a  b", 0, USER_DEFINED)), squeeze=True),
        "the symbol 'a  b', whose spaces SentencePiece keeps despite remove_extra_whitespaces",
    ),
    "a piece of another type": (with_pieces(Piece("c", 0, 7)), "is not a SentencePiece file (the piece 'c' has type 7"),
    "an endless score": (with_pieces(Piece("c", float("nan"), NORMAL)), "and score nan"),
    "an empty piece": (with_pieces(Piece("", 0, NORMAL)), "the piece '' has type 1"),
    "a number as text": (
        with_fields("trainer", (3, b"bpe")),
        "a SentencePiece file (model_type is not a number)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_file_that_would_give_other_tokens_is_refused_by_name(case: str, tmp_path: Path) -> None:
    spec, words = REFUSED[case]
    with pytest.raises(UserError) as error:
        load(spec, tmp_path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_fields_of_training_change_nothing(tmp_path: Path) -> None:
    one, other = load(PLAIN, tmp_path), load(with_fields("trainer", *OF_TRAINING), tmp_path)
    assert one.inner.to_str() == other.inner.to_str()


def test_samples_of_a_file_are_checked(tmp_path: Path) -> None:
    assert load(with_fields("model", (4, SAMPLE)), tmp_path).encode("ab a") == PLAIN.encode("ab a")


def test_control_tokens_have_the_names_of_the_specification(tmp_path: Path) -> None:
    tokenizer = load(with_pieces(Piece("<pad>", 0, CONTROL)), tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == ("<s>", "</s>", "<pad>")
    renamed = with_fields("trainer", (46, b"</s>"), (47, b"<s>"), (48, b"ab"))
    tokenizer = load(renamed, tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == ("</s>", "<s>", None)  # ab is not a control token


@pytest.mark.fuzzer
@pytest.mark.parametrize("count", [60, pytest.param(20_000, marks=pytest.mark.long)])
def test_any_file_gives_the_tokens_of_sentencepiece_or_is_refused(count: int, tmp_path: Path) -> None:
    failures, loaded = list[Any](), 0
    reference = importlib.import_module("sentencepiece") if importlib.util.find_spec("sentencepiece") else None
    for seed in range(count):
        draw = random.Random(seed)
        spec = random_spec(draw)
        texts = [random_text(draw) for _ in range(20)]
        try:
            tokenizer = load(spec, tmp_path)
        except UserError as error:
            if "\n" in str(error) or "tokenizer.model" not in str(error):
                failures.append((seed, str(error)))
            continue
        loaded += 1
        wanted = [spec.encode(text) for text in texts]
        failures += [seed] * ([tokenizer.encode(text) for text in texts] != wanted)
        if reference:
            theirs = reference.SentencePieceProcessor(model_proto=spec.content())
            failures += [(seed, "library")] * ([theirs.encode(text) for text in texts] != wanted)
    assert not failures
    assert loaded > count / 2


def test_tokens_are_those_of_the_library_and_not_only_of_the_oracle() -> None:
    reference = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed: its ids are not compared")
    for options, text, _ in SPELLED:
        spec = replace(PLAIN, **options)
        assert reference.SentencePieceProcessor(model_proto=spec.content()).encode(text) == spec.encode(text)
