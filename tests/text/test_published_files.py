"""Published vocabularies, with the files that configure them, give the ids of transformers."""

import itertools
import json
import random
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from onward import Tokenizer, UserError
from onward.text.merges import CLASSES, OF_MODEL

from support.llama_cpp import PARTS, awkward_texts

SCRIPTS = ["12345 678", "१२३ ١٢٣ ２", "é" + unicodedata.normalize("NFD", "é ü Å ñ"), "नमस्ते कर्म", "ภาษาไทย", "안녕 각"]
SCRIPTS += ["  two\n\n three\t ", "don't WE'LL I'm", "中文，。テスト", "שלום עולם", "a\u0301\u0327b", "\ufb01 ½ ²"]


@cache
def bpe() -> tuple[dict[str, int], list[str]]:
    """The vocabulary and merges of a small byte-level tokenizer: merges that respect the splits of every tokenizer
    class, and some that cross them."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    parts = [part for part in PARTS if "<|" not in part]
    texts = [part for part in [*parts, *SCRIPTS, *map("".join, zip(SCRIPTS, parts))] for _ in range(3)]
    inner.train_from_iterator(texts, trainer)
    model = json.loads(inner.to_str())["model"]
    return model["vocab"], [" ".join(pair) for pair in model["merges"]]


def words() -> tuple[dict[str, int], list[str]]:
    """A vocabulary like that of the first GPT: letters, letters that end a word, an unknown token."""
    letters = [*"abcdefghijklmnopqrstuvwxyz.,'0123456789"]
    merges = ["t h", "th e</w>", "a n", "an d</w>"]
    tokens = ["<unk>", *letters, *(f"{letter}</w>" for letter in letters), *(m.replace(" ", "") for m in merges)]
    return {token: i for i, token in enumerate(tokens)}, merges


def texts(seed: int, symbols: list[str]) -> list[str]:
    some = random.Random(seed)
    pool = [*SCRIPTS, *awkward_texts(30), *symbols, *symbols, " ", "\n"]
    return [*pool, *("".join(some.choices(pool, k=some.randint(2, 6))) for _ in range(60))]


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def assert_same_ids(folder: Path, theirs: Any, seed: int = 0) -> Tokenizer:
    """Assert equal ids for random texts, with control tokens in a text encoded as text and as tokens."""
    ours = Tokenizer.load(folder)
    added = ours.inner.get_added_tokens_decoder()
    of_theirs = {i: repr(token) for i, token in theirs.added_tokens_decoder.items() if i != ours.unknown_id}
    # the unknown token is excluded, since Onward does not strip it from decoded texts
    assert {i: repr(token) for i, token in added.items()} == of_theirs
    for as_text in True, False:
        ours.inner.encode_special_tokens = as_text
        for text in texts(seed, [token.content for token in added.values()]):
            assert ours.inner.encode(text).ids == theirs(text, split_special_tokens=as_text).input_ids, text
    ours.inner.encode_special_tokens = True
    return ours


FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # config.json, tokenizer_config.json
    **{f"class {name}": ({"model_type": "llama"}, {"tokenizer_class": name}) for name in CLASSES},
    **{f"class {name}Fast": ({}, {"tokenizer_class": f"{name}Fast"}) for name in list(CLASSES)[:3]},
    **{f"model {name}": ({"model_type": name}, None) for name in ("gpt2", "qwen2", "qwen3_moe", "cohere", "gpt_neox")},
    "qwen2 named otherwise": ({"model_type": "qwen2"}, {"tokenizer_class": "GPT2Tokenizer"}),
    "qwen3.5 named Qwen2": ({"model_type": "qwen3_5_text"}, {"tokenizer_class": "Qwen2Tokenizer"}),
    "opt": (
        {"model_type": "opt"},
        {"add_bos_token": True, "bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"},
    ),
    "both ends": ({"model_type": "gpt_neox"}, {"add_bos_token": True, "add_eos_token": True}),
    "spaces before": ({"model_type": "qwen2"}, {"add_prefix_space": True}),
    "spaces before GPT-2": ({"model_type": "gpt2"}, {"add_prefix_space": True, "tokenizer_class": "GPT2Tokenizer"}),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_vocabulary_and_merges_are_split_as_by_their_class(name: str, tmp_path: Path) -> None:
    config, published = FOLDERS[name]
    vocab, merges = words() if "OpenAI" in name else bpe()
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    write(tmp_path, config=config, **({"tokenizer_config": published} if published else {}))
    if "3.5" in name or "3_5" in name:  # transformers reads only tokenizer.json for this class
        theirs = Qwen3_5Tokenizer(
            vocab=vocab, merges=[(left, right) for left, right in (line.split(" ") for line in merges)]
        )
    else:
        theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = assert_same_ids(tmp_path, theirs)
    ours.save(tmp_path / "saved")
    write(tmp_path / "saved", config=config)
    for again in Tokenizer.load(tmp_path / "saved"), AutoTokenizer.from_pretrained(tmp_path / "saved"):
        assert [again.encode(text) for text in SCRIPTS] == [ours.encode(text) for text in SCRIPTS]


def test_unknown_classes_of_vocabulary_and_merges_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    for config, published, name in (
        ({}, {"tokenizer_class": "RobertaTokenizerFast"}, "RobertaTokenizer"),
        ({"model_type": "llama"}, {}, "model_type 'llama'"),
    ):
        write(tmp_path, config=config, tokenizer_config=published)
        with pytest.raises(UserError, match=f"does not know how {name} splits texts"):
            Tokenizer.load(tmp_path)


def drawn_lists(some: random.Random, vocab: dict[str, int]) -> dict[str, Any]:
    """Configuration files with random added tokens, some of which are in the vocabulary."""
    contents = ["<|im_start|>", "<|im_end|>", "<tool>", "[PAD]", "<|x y|>", "ab", "é"]
    some.shuffle(contents)
    flags = {name: {"lstrip": some.random() < 0.3, "rstrip": some.random() < 0.3} for name in contents}
    count = some.randint(1, len(contents))
    free = itertools.count(max(vocab.values()) + 1)
    ids = {content: vocab[content] if content in vocab else next(free) for content in contents[:count]}
    config: dict[str, Any] = {}
    files: dict[str, Any] = {"tokenizer_config": config}
    style = some.choice(["decoder", "added_tokens", "named only"])
    if style == "decoder":
        config["added_tokens_decoder"] = {
            str(i): {
                "content": content,
                "special": some.random() < 0.5,
                "normalized": some.random() < 0.5,
                "single_word": some.random() < 0.2,
                **flags[content],
            }
            for content, i in ids.items()
        }
    elif style == "added_tokens":
        files["added_tokens"] = ids
    rest = contents if style == "added_tokens" and some.random() < 0.5 else contents[count:]
    names = ["bos_token", "eos_token", "pad_token", "image_token"]
    for name, content in zip(names, rest[: some.randint(0, 4)]):
        entry = {"content": content, "normalized": False, **flags[content], "single_word": False}
        config[name] = {"__type": "AddedToken", **entry} if some.random() < 0.4 and name != "image_token" else content
    if rest[4:] and some.random() < 0.7:
        config[some.choice(["additional_special_tokens", "extra_special_tokens"])] = rest[4:]
    if style == "added_tokens" and some.random() < 0.5:
        files["special_tokens_map"] = {"unk_token": some.choice(contents)}
    return files


@pytest.mark.parametrize("seed", range(16))
def test_tokens_of_other_files_are_added_to_tokenizer_json(seed: int, tmp_path: Path) -> None:
    some = random.Random(seed)
    vocab, merges = bpe()
    inner = tokenizers.Tokenizer(
        models.BPE(vocab, [(left, right) for left, right in (line.split(" ") for line in merges)])
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if some.random() < 0.5:
        inner.add_special_tokens(["<|endoftext|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    files = drawn_lists(some, inner.get_vocab())
    files["tokenizer_config"] |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": some.random() < 0.5}
    write(tmp_path, config={"model_type": "llama"}, **files)
    ours = assert_same_ids(tmp_path, AutoTokenizer.from_pretrained(tmp_path), seed)
    ours.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    assert again.inner.to_str() == ours.inner.to_str()
    assert again.names == ours.names


def test_every_class_of_a_model_type_is_known() -> None:
    assert {*OF_MODEL.values()} <= CLASSES.keys()
