"""Reading GGUF files: every block type bit for bit, large headers, split files; malicious files give an error of one
sentence."""

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward
from onward import FinetuneConfig, RunConfig, UserError
from onward.checkpoint.gguf.blocks import CODES, TYPES
from onward.checkpoint.gguf.header import read_header
from onward.checkpoint.gguf.vocabulary import read_tokenizer
from onward.checkpoint.gguf.writer import TensorOutline, text, typed, write_gguf
from onward.checkpoint.load import load_model
from onward.checkpoint.peft.bases import weights_checksum
from onward.families import family
from onward.model.adapters import adapter_names
from onward.planning.releases import find
from onward.text.patterns import BYTE_OF
from onward.training.finetuning.base import base_tokenizer, load_base
from onward.training.inputs.texts import choose_tokenizer

from support.decoders import DECODERS, decoder
from support.gguf_files import split_in_two, tensor
from support.limits import limited

READ = {kind.name: kind for kind in TYPES.values() if kind.dequantize}
DIGESTS = {  # digests of the values that gguf.quants 0.19 gives for the same bytes
    "Q4_0": "cebce73ae42dedf3",
    "Q4_1": "d440a0a88627bf63",
    "Q5_0": "18b65525911d1131",
    "Q5_1": "c2a237eec5c4b6ef",
    "Q8_0": "02bbfa0b12b42e88",
    "Q4_K": "7bf6f7741319e060",
    "Q5_K": "b402985cb02e602e",
    "Q6_K": "2bd553c5fea41c6d",
    "MXFP4": "4521e2907beb7178",
}
ROOM = 100 << 20
MISSING = "the package gguf is not installed: blocks are compared with stored digests only"


def random_blocks(name: str, blocks: int = 300) -> np.ndarray:
    """Random bytes of blocks whose values are all finite."""
    kind = READ[name]
    raw = np.random.default_rng(kind.bytes).integers(0, 256, (blocks, kind.bytes), dtype=np.uint8)
    values = kind.decode(raw.reshape(-1)).view(blocks, -1)
    return raw[values.isfinite().all(1).numpy()]


@pytest.mark.parametrize("name", READ)
def test_blocks_stand_for_the_numbers_that_gguf_gives(name: str) -> None:
    raw = random_blocks(name)
    assert len(raw) > 200
    values = READ[name].decode(raw.reshape(-1)).numpy() + np.float32(0)  # -0.0 as 0.0
    assert hashlib.sha256(values.tobytes()).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("name", READ)
def test_blocks_equal_those_of_the_gguf_package(name: str) -> None:
    quants = pytest.importorskip("gguf.quants", reason=MISSING)
    raw = random_blocks(name)
    wanted = quants.dequantize(raw, CODES[name])
    assert np.array_equal(READ[name].decode(raw.reshape(-1)).numpy(), wanted.reshape(-1))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "BF16", "F16"])
def test_numbers_are_rounded_as_the_gguf_package_does(name: str) -> None:
    quants = pytest.importorskip("gguf.quants", reason=MISSING)
    normal = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    ties = torch.randint(-7, 8, (64, 64), generator=torch.Generator().manual_seed(1)) / 2
    for numbers in normal, ties, torch.zeros(2, 32):
        wanted = quants.quantize(numbers.numpy(), CODES[name])
        assert TYPES[CODES[name]].encode(numbers).tobytes() == wanted.tobytes()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers; tests must not change the file."""
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    tokenizer = onward.train_tokenizer("char", ["abcdefghij"])
    onward.save(onward.LanguageModel(decoder(DECODERS["llama"]), tokenizer), path)
    return path


def test_file_of_the_gguf_package_is_read(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason=MISSING)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_array("tokens", ["a", "é"])
    writer.add_array("numbers", [1.5, -2.0])
    writer.add_float32("eps", 1e-6)
    writer.add_bool("yes", True)
    rows = np.arange(128, dtype=np.float32).reshape(2, 64) / 64
    writer.add_tensor("a", rows)
    writer.add_tensor("b", gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0), raw_dtype=8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(tmp_path / "x.gguf")
    found = {"tokens": ["a", "é"], "numbers": [1.5, -2.0], "eps": 1e-6, "yes": True}
    assert {name: header.keys[name] for name in found} == found
    assert {name: (info.shape, info.type.name) for name, info in header.tensors.items()} == {
        "a": ((2, 64), "F32"),
        "b": ((2, 64), "Q8_0"),
    }


def test_header_with_a_large_vocabulary_takes_little_time_and_memory(tmp_path: Path) -> None:
    keys = {"tokens": [f"token{i}" for i in range(128_000)], "merges": [f"to ken{i}" for i in range(280_000)]}
    write_gguf(tmp_path / "x.gguf", keys, {}, [])
    with limited(1, ROOM):
        assert len(read_header(tmp_path / "x.gguf").keys["merges"]) == 280_000


def test_the_first_token_of_a_merge_may_begin_with_a_space(tmp_path: Path) -> None:
    tokens = [*BYTE_OF, " ", " a", "ab", " b", " ba"]
    merges = ["  a", "a b", "  b", " b a", "no merge", "alone"]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges}
    write_gguf(tmp_path / "x.gguf", {f"tokenizer.ggml.{name}": value for name, value in keys.items()}, {}, [])
    tokenizer = read_tokenizer(read_header(tmp_path / "x.gguf"))
    assert tokenizer is not None
    found = json.loads(tokenizer.inner.to_str())["model"]["merges"]
    assert found == [[" ", "a"], ["a", "b"], [" ", "b"], [" b", "a"]]


def test_weights_that_need_no_change_stay_mapped_and_files_unchanged(file: Path) -> None:
    before = file.read_bytes()
    model, _ = load_model(file)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert file.read_bytes() == before


def test_parts_of_a_split_file_are_one_model(file: Path, tmp_path: Path) -> None:
    first = split_in_two(file, tmp_path)
    one, other = load_model(file)[0], load_model(first)[0]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))
    with pytest.raises(UserError, match="name the first, which ends in -00001"):
        load_model(tmp_path / "llama-00002-of-00002.gguf")
    (tmp_path / "llama-00002-of-00002.gguf").unlink()
    with pytest.raises(UserError, match="has no llama-00002-of-00002"):
        load_model(first)


def header_of(*counts: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + rest


def key(name: str, value: bytes) -> bytes:
    return text(name) + value


HUGE = 2**63
LLAMA = key("general.architecture", typed("llama"))
TENSOR = text("a") + struct.pack("<IQQIQ", 2, 4, 4, 0, 0)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "another file": (b"PK\3\4" + bytes(50), "not a GGUF file"),
    "magic alone": (b"GGUF", "it announces 1 value"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (header_of(0, 0, version=1), "version 1"),
    "version 99": (header_of(0, 0, version=99), "version 99"),
    "keys without end": (header_of(0, HUGE), "announces 9,223,372,036,854,775,808 keys"),
    "tensors without end": (header_of(HUGE, 0), "9,223,372,036,854,775,808 tensors"),
    "a name without end": (header_of(0, 1, rest=struct.pack("<Q", HUGE) + bytes(99)), "bytes of a text"),
    "a text without end": (header_of(0, 1, rest=key("a", struct.pack("<IQ", 8, HUGE)) + bytes(99)), "bytes of a text"),
    "an array without end": (header_of(0, 1, rest=key("a", struct.pack("<IIQ", 9, 4, HUGE)) + bytes(9)), "values of a"),
    "texts without end": (header_of(0, 1, rest=key("a", struct.pack("<IIQ", 9, 8, HUGE)) + bytes(9)), "texts"),
    "nested arrays": (header_of(0, 1, rest=key("a", struct.pack("<IIQ", 9, 9, 2)) + bytes(99)), "array of type 9"),
    "an unknown type": (header_of(0, 1, rest=key("a", struct.pack("<I", 77)) + bytes(99)), "has type 77"),
    "a key twice": (header_of(0, 2, rest=2 * key("a", typed(1))), "the key a occurs twice"),
    "an alignment of 3": (header_of(0, 1, rest=key("general.alignment", typed(3))), "general.alignment is 3"),
    "an alignment of 0": (header_of(0, 1, rest=key("general.alignment", typed(0))), "general.alignment is 0"),
    "no architecture": (header_of(0, 1, rest=key("a", typed(1)) + bytes(99)), "no general.architecture"),
    "an unknown architecture": (
        header_of(0, 1, rest=key("general.architecture", typed("lama")) + bytes(99)),
        "of architecture 'lama', which Onward does not read: did you mean llama",
    ),
    "no embedding": (header_of(0, 1, rest=LLAMA + bytes(99)), "no matrix token_embd.weight"),
    "a tensor that is not there": (header_of(1, 1, rest=LLAMA + TENSOR), "is not all in the file"),
    "a tensor twice": (header_of(2, 1, rest=LLAMA + 2 * TENSOR + bytes(200)), "two tensors have the same name"),
    "five dimensions": (header_of(1, 1, rest=LLAMA + text("a") + struct.pack("<I", 5) + bytes(99)), "5 dimensions"),
    "sizes without end": (
        header_of(1, 1, rest=LLAMA + text("a") + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0) + bytes(99)),
        "is not all in the file",
    ),
    "an offset without end": (
        header_of(1, 1, rest=LLAMA + text("a") + struct.pack("<IQQIQ", 2, 4, 4, 0, HUGE) + bytes(99)),
        "is not all in the file",
    ),
    "half a block": (
        header_of(1, 1, rest=LLAMA + text("a") + struct.pack("<IQQIQ", 2, 33, 1, 8, 0) + bytes(999)),
        "rows of 33 numbers in blocks of 32",
    ),
    "a type of the future": (
        header_of(1, 1, rest=LLAMA + text("a") + struct.pack("<IQQIQ", 2, 32, 1, 200, 0) + bytes(999)),
        "has type 200, which Onward does not support",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    (tmp_path / "x.gguf").write_bytes(content)
    with limited(5, ROOM), pytest.raises(UserError) as error:
        load_model(tmp_path / "x.gguf")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def change(file: Path, keys: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    found = {name: value for name, value in read_header(file).keys.items() if name != "general.alignment"}
    keys(found)
    return found


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no width": (lambda keys: keys.pop("llama.embedding_length"), "has no llama.embedding_length"),
    "a width as text": (
        lambda keys: keys.update({"llama.embedding_length": "16"}),
        "has '16' as llama.embedding_length",
    ),
    "another width": (lambda keys: keys.update({"llama.embedding_length": 32}), "has shape [13, 16]"),
    "no heads": (lambda keys: keys.update({"llama.attention.head_count": 0}), "n_heads"),
    "far more layers": (lambda keys: keys.update({"llama.block_count": 2**31}), "block_count"),
    "one layer more": (lambda keys: keys.update({"llama.block_count": 3}), "no tensor blk.2.attn_norm.weight"),
    "one layer less": (lambda keys: keys.update({"llama.block_count": 1}), "a tensor blk.1."),
    "an odd scaling": (
        lambda keys: keys.update({"llama.rope.scaling.type": "spiral"}),
        "rope.scaling.type is 'spiral'",
    ),
    "no epsilon": (lambda keys: keys.pop("llama.attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon"),
    "an odd tokenizer": (lambda keys: keys.update({"tokenizer.ggml.model": "t5"}), "because its kind 't5' is not"),
    "odd patterns": (lambda keys: keys.update({"tokenizer.ggml.pre": "gtp-2"}), "did you mean gpt-2"),
    "too many tokens": (
        lambda keys: keys.update({"tokenizer.ggml.tokens": list(map(str, range(20)))}),
        "20 tokens and 13 rows of embeddings",
    ),
    "tokens alike": (lambda keys: keys.update({"tokenizer.ggml.tokens": ["a"] * 13}), "1 different tokens of 13"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_keys_that_cannot_be_are_refused_in_a_sentence(case: str, file: Path, tmp_path: Path) -> None:
    harm, message = DAMAGES[case]
    header = read_header(file)
    outlines = {name: TensorOutline(info.shape, info.type) for name, info in header.tensors.items()}
    tensors = [(name, tensor(file, name)) for name in outlines]
    write_gguf(tmp_path / "x.gguf", change(file, harm), outlines, tensors)
    with limited(5, ROOM), pytest.raises(UserError) as error:
        onward.load(tmp_path / "x.gguf")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_types_that_are_not_read_are_named_with_a_way_out(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes().replace(
        text("output.weight") + struct.pack("<IQQI", 2, 16, 13, 0),
        text("output.weight") + struct.pack("<IQQI", 2, 16, 13, 30),
    )
    (tmp_path / "x.gguf").write_bytes(content)
    load_model(tmp_path / "x.gguf")  # a file with mixed types loads
    quantized = struct.pack("<IQQI", 2, 256, 13, 10)
    (tmp_path / "y.gguf").write_bytes(content.replace(struct.pack("<IQQI", 2, 16, 13, 30), quantized) + bytes(2000))
    with pytest.raises(
        UserError, match="is Q2_K, which Onward does not read: make a Q8_0 of the file with llama-quantize"
    ):
        load_model(tmp_path / "y.gguf")


@pytest.mark.fuzzer
@pytest.mark.parametrize("count", [30, pytest.param(5000, marks=pytest.mark.long)])
def test_damaged_gguf_works_or_is_refused_by_file(count: int, file: Path, tmp_path: Path) -> None:
    whole, path = file.read_bytes(), tmp_path / "damaged.gguf"
    draw, failures = random.Random(0), []
    for number in range(count):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 3)):  # most damageable fields are in the header
            at = draw.randrange(4, len(content) - 17_000)
            content[at : at + draw.randint(0, 2)] = draw.randbytes(draw.randint(0, 2))
        path.write_bytes(content[: draw.choice([len(content), draw.randrange(len(content))])])
        try:
            with limited(5, 4 * ROOM):
                onward.load(path, allow_nonfinite=True)
        except UserError as error:
            if "\n" in str(error) or "damaged.gguf" not in str(error):
                failures.append((number, str(error)))
        except Exception as error:
            failures.append((number, repr(error)))
    assert not failures


def test_a_gguf_file_is_trained_further_and_described(tmp_path: Path) -> None:
    config = onward.DecoderConfig(257, d_model=32, n_layers=1, n_heads=2, context_length=64)
    lm = onward.LanguageModel(decoder(config), onward.train_tokenizer("byte", []))
    onward.save(lm, path := tmp_path / "x.gguf")
    assert choose_tokenizer(RunConfig(base=str(path)), [], []).encode("Once") == lm.tokenizer.encode("Once")
    kind, found = find(str(path))
    assert (kind, found.n_layers) == (family("llama"), 1)
    with pytest.raises(UserError, match="is a model and not a tokenizer: write its tokenizer with onward convert"):
        onward.train_tokenizer(str(path), [])


def test_a_gguf_file_is_the_base_of_fine_tuning_and_of_adapters(tmp_path: Path) -> None:
    config = onward.DecoderConfig(257, d_model=32, n_layers=1, n_heads=2, context_length=64)
    lm = onward.LanguageModel(decoder(config), onward.train_tokenizer("byte", []))
    onward.save(lm, tmp_path / "x.gguf")
    tuning = FinetuneConfig.of(base=str(tmp_path / "x.gguf"), sources=("chats.jsonl",), lora=2)
    model, _ = load_base(tuning)
    assert base_tokenizer(tuning).encode("Once") == lm.tokenizer.encode("Once")
    assert adapter_names(model)
    onward.save(lm, tmp_path / "same.gguf")
    onward.save(lm, tmp_path / "other.gguf", dtype="bf16")
    sums = [weights_checksum(tmp_path / f"{name}.gguf") for name in ("x", "same", "other")]
    assert sums[0] == sums[1] != sums[2]
