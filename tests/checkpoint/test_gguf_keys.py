"""The keys of a GGUF file other than the decoder's: those of the reference converter, those of the tokenizer, and a
model name with which llama.cpp loads the file."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models

import onward
from onward import Tokenizer
from onward.checkpoint.gguf.architectures import ARCHITECTURES
from onward.checkpoint.gguf.blocks import CODES, TYPES
from onward.checkpoint.gguf.convert import plan, size_label
from onward.checkpoint.gguf.header import read_header
from onward.checkpoint.gguf.vocabulary import TokenizerNotice, general_name
from onward.checkpoint.gguf.writer import TensorOutline
from onward.text.patterns import BYTE_OF, GPT2, LLAMA3, O200K, TEKKEN, byte_level_bpe

from support.decoders import decoder
from support.gguf import COMPUTED
from support.vocabularies import CONTROLS, PIECES, write_pieces

F32 = TYPES[CODES["F32"]]
KEYS: dict[str, dict[str, Any]] = {  # by architecture, without the architecture's name as prefix
    "falcon": {"tensor_data_layout": "jploski"},
    "starcoder2": {"attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5},
    "stablelm": {"use_parallel_residual": False},
    "stablelm: norms of heads": {"use_parallel_residual": True},
    "command-r": {"rope.scaling.type": "none", "attention.layer_norm_rms_epsilon": 1e-5},
    "llama: YaRN": {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_of_the_reference_converter_are_written(case: str) -> None:
    name = case.split(":")[0]
    keys = plan(decoder(COMPUTED[case]), None, family=ARCHITECTURES[name].families[0]).keys
    assert {key: keys[f"{name}.{key}"] for key in KEYS[case]} == KEYS[case]
    assert keys["general.size_label"].endswith("K")


@pytest.mark.parametrize(("shapes", "label"), [
    ({"token_embd.weight": (37, 32)}, "1.2K"),
    ({"token_embd.weight": (3, 2)}, "0.01K"),
    ({"a": (1000, 1000)}, "1000K"),
    ({"a": (1000, 1001)}, "1.0M"),
    ({"a": (124_439_808,)}, "124M"),
    ({"a": (7_241_732_096,)}, "7.2B"),
    ({"a": (1_500_000_000_001,)}, "1.5T"),
    ({"a": (1_000_000,), "blk.0.ffn_up_exps.weight": (8, 1000, 700), "blk.0.ffn_up_exps.bias": (8, 700)}, "8x1.7M"),
])  # fmt: skip
def test_size_label_is_that_of_the_reference_converter(shapes: dict[str, Any], label: str) -> None:
    assert size_label({name: TensorOutline(shape, F32) for name, shape in shapes.items()}) == label


def keys_of(tokenizer: Tokenizer, path: Path) -> dict[str, Any]:
    """The keys of a GGUF file written with this tokenizer."""
    config = onward.DecoderConfig(tokenizer.vocab_size, d_model=32, n_layers=1, n_heads=2, context_length=64)
    model = onward.Decoder(config)
    onward.save(onward.LanguageModel(model, tokenizer), path)
    return dict(read_header(path).keys)


def test_sentencepiece_vocabulary_names_its_pre_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_pieces(tmp_path / "tokenizer.model", PIECES))
    assert keys_of(tokenizer, tmp_path / "x.gguf")["tokenizer.ggml.pre"] == "default"


@pytest.mark.parametrize(("pattern", "said"), [(GPT2, False), (LLAMA3, False), (O200K, True), (TEKKEN, True)])
def test_patterns_that_llama_cpp_changes_are_said(pattern: str, said: bool, tmp_path: Path) -> None:
    vocab = {symbol: byte for byte, symbol in enumerate(BYTE_OF)}
    inner = byte_level_bpe(models.BPE(vocab, [], ignore_merges=pattern == TEKKEN), [pattern])
    inner.add_special_tokens(["<end>"])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        keys_of(Tokenizer(inner, None, "<end>"), tmp_path / "x.gguf")
    assert ["U+FE0F" in str(notice.message) for notice in found] == [True] * said


def with_added(tokens: Sequence[AddedToken], folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(write_pieces(folder / "tokenizer.model", PIECES))
    tokenizer.inner.add_special_tokens(list(tokens))
    return tokenizer


PHI3 = [AddedToken("</s>", rstrip=True, normalized=False), AddedToken("<|endoftext|>", normalized=False)]
PHI3 += [AddedToken(text, rstrip=True, normalized=False) for text in ("<|user|>", "<|end|>")]
PLAIN = [AddedToken(token.content, normalized=False) for token in PHI3]
NAMES = [  # name of the model, added tokens, name in the file
    ("tiny-phi3-mine", [], "tiny-phi 3-mine"),
    ("Phi-3-mini", [], "Phi 3-mini"),
    ("PHI-3", PLAIN, "PHI 3"),
    ("modern-bert", [], "modern bert"),
    ("philosophy 3", [], "philosophy 3"),
    ("Phi-3-mini", PHI3, "Phi-3-mini"),
    ("mine", PHI3, "mine phi-3"),
]


@pytest.mark.parametrize(("name", "added", "wanted"), NAMES)
def test_name_that_llama_cpp_acts_upon_fits_the_tokenizer(name: str, added, wanted: str, tmp_path: Path) -> None:
    assert general_name(name, with_added(added, tmp_path)) == wanted
    assert len(CONTROLS) == 3  # no <|endoftext|>, which llama.cpp looks up if the name contains phi3


def test_file_name_with_phi3_makes_a_file_that_loads(tmp_path: Path) -> None:
    keys = keys_of(onward.train_tokenizer("byte", []), tmp_path / "my-phi3.gguf")
    assert keys["general.name"] == "my-phi 3"


def test_white_space_that_llama_cpp_would_keep_is_said(tmp_path: Path) -> None:
    tokenizer = with_added([AddedToken("<|user|>", rstrip=True, normalized=False)], tmp_path)
    with pytest.warns(TokenizerNotice, match="keeps white space around control tokens"):
        general_name("mine", tokenizer)
