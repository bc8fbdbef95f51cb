"""Tokenizers in GGUF files: the tokens that end answers, and the splitting of texts by exact patterns, are those of
llama.cpp."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers, trainers

import onward
from onward import Tokenizer
from onward.checkpoint.gguf.ends import end_ids
from onward.checkpoint.gguf.header import read_header
from onward.checkpoint.gguf.splits import APPROXIMATED, PRE, RAW
from onward.checkpoint.gguf.vocabulary import TokenizerNotice, read_tokenizer, tokenizer_keys
from onward.checkpoint.gguf.writer import write_gguf
from onward.text.patterns import BYTE_OF, byte_level_bpe
from onward.text.pieces import BYTE, CONTROL, NORMAL

from support.llama_cpp import awkward_texts, opened

LETTERS = list(BYTE_OF)


def file_of(path: Path, **keys: Any) -> Path:
    """A GGUF file with a vocabulary but without tensors."""
    named = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    write_gguf(path, {"general.architecture": "llama", **named}, {}, [])
    return path


def vocabulary(*extra: str, **keys: Any) -> dict[str, Any]:
    """The keys of a byte-level vocabulary with the additional tokens `extra`."""
    defaults = {"model": "gpt2", "pre": "gpt-2", "merges": ["Ã ©"], "token_type": [NORMAL] * (256 + len(extra))}
    return {**defaults, "tokens": [*LETTERS, *extra], **keys}


HARMONY = "<|start|>", "<|end|>", "<|return|>", "<|call|>"
ENDS: list[tuple[Sequence[str], dict[str, int], list[str]]] = [  # additional tokens, ids by role, expected end tokens
    (["<|im_end|>"], {"eos": 0}, [LETTERS[0], "<|im_end|>"]),
    (["<|end|>", "<|eot_id|>", "<end_of_turn>"], {"eos": 256}, ["<|end|>", "<|eot_id|>", "<end_of_turn>"]),
    (["<a>", "<b>", "<c>"], {"eos": 256, "eot": 257, "eom": 258}, ["<a>", "<b>", "<c>"]),
    (HARMONY, {"eos": 258}, ["<|return|>", "<|call|>"]),
    (HARMONY[:3], {"eos": 258}, ["<|return|>", "<|end|>"]),
    (["<|end|>", "<|flush|>", "<|calls|>"], {"eos": 257}, ["<|flush|>", "<|calls|>"]),
    (["</s>", "<eos>", "<|tool_response>"], {"eos": 257}, ["<eos>", "<|tool_response>"]),
    (["</s>", "<eos>"], {"eos": 257}, ["<eos>", "</s>"]),
    (
        ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
        {"eos": 0},
        [LETTERS[0], "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
    ),
    (["<|fim_pad|>", "<mine>"], {"eos": 0, "fim_pad": 257}, [LETTERS[0], "<mine>"]),
    (["<PAD>"], {"eos": 0, "eot": 9_999}, [LETTERS[0], "<PAD>"]),
]


@pytest.mark.parametrize(("extra", "roles", "wanted"), ENDS)
def test_tokens_end_answers_by_key_and_by_name(extra, roles, wanted, tmp_path: Path) -> None:
    keys = vocabulary(*extra) | {f"{name}_token_id": i for name, i in roles.items()}
    tokenizer = read_tokenizer(read_header(file_of(tmp_path / "x.gguf", **keys)))
    assert tokenizer is not None
    assert [tokenizer.inner.id_to_token(i) for i in tokenizer.end_ids] == wanted
    named = [i for i in tokenizer.end_ids if i > 255 and i not in roles.values()]
    assert all(tokenizer.inner.get_added_tokens_decoder()[i].special for i in named)


@pytest.mark.parametrize(("extra", "roles", "wanted"), ENDS)
def test_llama_cpp_ends_answers_at_the_same_tokens(extra, roles, wanted, tmp_path: Path) -> None:
    keys = vocabulary(*extra) | {f"{name}_token_id": i for name, i in roles.items()}
    with opened(file_of(tmp_path / "x.gguf", **keys), 64, vocab_only=True) as model:
        import llama_cpp  # type: ignore[import-not-found]

        vocab = llama_cpp.llama_model_get_vocab(model._model.model)
        found = [i for i in range(len(keys["tokens"])) if llama_cpp.llama_vocab_is_eog(vocab, i)]
    assert found == sorted(end_ids(keys, keys["tokens"]))


def with_ends(extra: list[str], ends: list[str]) -> onward.LanguageModel:
    inner = onward.train_tokenizer("char", [""]).inner
    inner.add_special_tokens(extra)
    tokenizer = Tokenizer(inner, ends=[inner.token_to_id(text) for text in ends])
    config = onward.DecoderConfig(tokenizer.vocab_size, d_model=32, n_layers=1, n_heads=2, context_length=64)
    return onward.LanguageModel(onward.Decoder(config), tokenizer)


@pytest.mark.parametrize(("extra", "ends", "roles", "said"), [
    ([], [], {}, ""),
    (["<end_of_turn>"], [], {"eot": 2}, "in llama.cpp but not in Onward: '<end_of_turn>'"),
    (["<|eom_id|>", "<|eot_id|>"], ["<|eom_id|>", "<|eot_id|>"], {"eot": 3, "eom": 2}, ""),
    (["<|stop|>"], ["<|stop|>"], {"eot": 2}, ""),
    (["<a>", "<b>", "<|im_end|>"], ["<a>", "<b>", "<|im_end|>"], {"eot": 2, "eom": 3}, ""),
    (["<a>", "<b>", "<c>"], ["<a>", "<b>", "<c>"], {"eot": 2, "eom": 3}, "not in llama.cpp: '<c>'"),
    ([*HARMONY], ["<|end|>", "<|return|>", "<|call|>"], {}, "not in llama.cpp: '<|end|>'"),
])  # fmt: skip
def test_ends_of_answers_are_in_the_file_or_said(extra, ends, roles, said: str, tmp_path: Path) -> None:
    lm = with_ends(extra, ends)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        onward.save(lm, tmp_path / "x.gguf")
    assert [str(notice.message) for notice in found] == ([f"Tokens that end answers {said}"] if said else [])
    keys = read_header(tmp_path / "x.gguf").keys
    assert {role: keys[f"tokenizer.ggml.{role}_token_id"] for role in roles} == roles
    back = onward.load(tmp_path / "x.gguf")
    assert (set(back.tokenizer.end_ids) == set(lm.tokenizer.end_ids)) == (not said)
    onward.save(back, tmp_path / "folder")
    assert onward.load(tmp_path / "folder").tokenizer.end_ids == back.tokenizer.end_ids


@pytest.fixture(scope="module")
def merged() -> dict[str, Any]:
    """A byte-level vocabulary with merges across word boundaries, so that each split changes the tokens."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=sorted(LETTERS), show_progress=False)
    inner.train_from_iterator(TEXTS * 2, trainer)
    model = json.loads(inner.to_str())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    return vocabulary(tokens=sorted(model["vocab"], key=model["vocab"].get), merges=merges, eos_token_id=0) | {
        "token_type": [NORMAL] * len(model["vocab"]), "add_bos_token": False, "bos_token_id": 0,
    }  # fmt: skip


TEXTS = [
    *awkward_texts(200),
    *(
        "1234567 12345a 12 1234",
        "漢字かな交じり文123",
        "a\n\nb \r\n c\n",
        "İstanbul'un ÉCOLE's",
        "x     y",
        "`a` $5 ~b^c|d",
    ),
]
FIRST = {splits: name for name, splits in reversed(PRE.items())}  # one name for each way of splitting


@pytest.mark.parametrize("name", [name for name in FIRST.values() if name not in APPROXIMATED])
def test_texts_are_split_as_in_llama_cpp(name: str, merged: dict[str, Any], tmp_path: Path) -> None:
    file = file_of(tmp_path / "x.gguf", **merged | {"pre": name})
    tokenizer = read_tokenizer(read_header(file))
    assert tokenizer is not None
    with opened(file, 64, vocab_only=True) as model:
        wanted = [model.tokenize(text.encode(), add_bos=False, special=False) for text in TEXTS]
    assert [tokenizer.encode(text, special=False) for text in TEXTS] == wanted


@pytest.mark.parametrize("name", FIRST.values())
def test_a_way_of_splitting_is_written_under_its_name(name: str) -> None:
    splits = PRE[name]
    vocab = {symbol: i for i, symbol in enumerate(LETTERS)}
    inner = byte_level_bpe(models.BPE(vocab, [], ignore_merges=splits.lookup), splits.patterns)
    inner.add_special_tokens(["<end>"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TokenizerNotice)
        assert (
            PRE[tokenizer_keys(Tokenizer(inner, None, "<end>"), 257)["tokenizer.ggml.pre"]].patterns == splits.patterns
        )


def test_a_file_without_a_way_of_splitting_has_the_default_one_and_says_so(tmp_path: Path) -> None:
    keys = vocabulary()
    del keys["pre"]
    with pytest.warns(TokenizerNotice, match=r"has no tokenizer\.ggml\.pre"):
        tokenizer = read_tokenizer(read_header(file_of(tmp_path / "x.gguf", **keys)))
    assert tokenizer is not None
    assert [text for text, _ in tokenizer.inner.pre_tokenizer.pre_tokenize_str("a,1234")] == ["a", ",", "123", "4"]


def raw(**keys: Any) -> dict[str, Any]:
    """The keys of a vocabulary whose merges apply to the text itself (not to bytes), with spaces as U+2581."""
    letters = [
        "<unk>",
        "<bos>",
        "<eos>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abc\n",
        "▁a",
        "bc",
        "▁abc",
        "\n\n",
    ]
    types = [CONTROL] * 3 + [BYTE] * 256 + [NORMAL] * (len(letters) - 259)
    merges = ["▁ a", "b c", "▁a bc", "\n \n"]
    ids = {f"{name}_token_id": i for i, name in enumerate(("unknown", "bos", "eos"))}
    return {"model": "gemma4", "tokens": letters, "token_type": types, "merges": merges, **ids, **keys}


@pytest.mark.parametrize("keys", [{}, *({"model": "gpt2", "pre": name} for name in RAW)])
def test_merges_over_the_text_itself_are_read_and_written(keys: dict[str, Any], tmp_path: Path) -> None:
    texts = ["", " abc", "abc abc", "a\n\nb", "é abcabc", "  a ", "abc\n\n\n\nabc x"]
    file = file_of(tmp_path / "x.gguf", **raw(**keys))
    tokenizer = read_tokenizer(read_header(file))
    assert tokenizer is not None
    ids = [tokenizer.encode(text, special=False) for text in texts]
    assert [tokenizer.decode(each) for each in ids] == texts
    values = tokenizer_keys(tokenizer, tokenizer.vocab_size)
    again = {name.removeprefix("tokenizer.ggml."): value for name, value in values.items()}
    back = read_tokenizer(read_header(file_of(tmp_path / "y.gguf", **again)))
    assert back is not None
    assert [back.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
    for path in tmp_path.glob("*.gguf"):
        with opened(path, 64, vocab_only=True) as model:
            assert [model.tokenize(text.encode(), add_bos=False, special=False) for text in texts] == ids
