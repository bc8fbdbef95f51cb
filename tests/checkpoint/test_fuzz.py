"""Damaged files either load, with finite logits, or are refused in one sentence, which names the file or its folder
and, for config.json, the key or a tensor.

Each fuzzer runs a seeded sample by default and many more cases with `-m long`.
"""

import json
import math
import random
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onward import Tokenizer, UserError, train_tokenizer
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model
from onward.families import read

from support.decoders import DECODERS, decoder
from support.families import CASES
from support.limits import limited

pytestmark = pytest.mark.fuzzer
SECONDS, ROOM = 10, 1 << 30
REMOVED = Ellipsis
VALUES = (REMOVED, None, "many", -1, 0, 2**63, 1e300, 0.5, [1], math.nan)
FIRSTS: dict[str, dict[str, Any]] = {name.split(":")[0]: hf.to_dict() for name, hf in reversed(CASES.items())}
COUNTS = pytest.mark.parametrize("count", [80, pytest.param(10_000, marks=pytest.mark.long)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each family, and one for a decoder that no family can express."""
    root = tmp_path_factory.mktemp("families")
    for name, hf in FIRSTS.items():
        save_model(decoder(read(hf)[1]), root / name, hf)
    save_model(decoder(DECODERS["vaswani"]), root / "onward")
    return {path.name: path for path in sorted(root.iterdir())}


def paths(table: dict[str, Any], *before: str) -> Iterator[tuple[str, ...]]:
    """The paths of all values in a dict, including those in nested dicts."""
    for key, value in table.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, *before, key)


def changed(table: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The table with another value at a path; REMOVED deletes the key."""
    key, *rest = path
    if rest:
        return table | {key: changed(table[key], tuple(rest), value)}
    return {k: v for k, v in table.items() if k != key} | ({} if value is REMOVED else {key: value})


@torch.inference_mode()
def outcome(folder: Path) -> str:
    """The error message that refuses a folder's model; "" if it loads and its logits are finite."""
    with warnings.catch_warnings(), limited(SECONDS, ROOM):
        warnings.simplefilter("ignore")
        try:
            model, _ = load_model(folder)
            logits = model(torch.arange(5)[None] % model.config.vocab_size)
        except UserError as error:
            return str(error)
    assert logits.isfinite().all(), "logits are not finite"
    return ""


@COUNTS
def test_changed_config_works_or_is_refused_by_file_and_key(folders: dict[str, Path], count: int) -> None:
    cases = [
        (name, path, value)
        for name, folder in folders.items()
        for path in paths(json.loads((folder / "config.json").read_text()))
        for value in VALUES
    ]
    failures = []
    for name, path, value in random.Random(0).sample(cases, min(count, len(cases))):
        file = folders[name] / "config.json"
        before = file.read_text()
        file.write_text(json.dumps(changed(json.loads(before), path, value)))
        try:
            said = outcome(folders[name])
            # a message without the path of config.json names a tensor
            named = path[-1] in said or not said.startswith(str(file))
            if said and not named:
                file.write_text(json.dumps(changed(json.loads(before), path, REMOVED)))
                # the default gives the same message, so another key is the cause
                named = outcome(folders[name]) == said
            if said and ("config.json" not in said or "\n" in said or not named):
                failures.append((name, path, value, said))
        except Exception as error:  # any other exception is a failure too
            failures.append((name, path, value, repr(error)))
        finally:
            file.write_text(before)
    assert not failures, "\n".join(map(str, [len(failures), *failures]))


def damaged(data: bytes, choose: random.Random) -> bytes:
    """A safetensors file with one change: in its header, in its elements, or in its length."""
    size = struct.unpack("<Q", data[:8])[0]
    table, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    name = choose.choice([key for key in table if key != "__metadata__"])
    kind = choose.randrange(6)
    if kind == 0:
        return data[: choose.randrange(len(data))]
    if kind == 1:
        place = choose.randrange(8 + size)  # a changed element may stay finite and overflow in a matmul
        return data[:place] + bytes([choose.randrange(256)]) + data[place + 1 :]
    if kind == 2:
        start, _ = table[name]["data_offsets"]
        element = struct.pack("<f", choose.choice([math.nan, math.inf]))
        return data[: 8 + size + start] + element + data[12 + size + start :]
    if kind == 3:
        table[choose.choice([name + ".x", "model.norm.weight", ""])] = table.pop(name)
    else:
        key = choose.choice(["dtype", "shape", "data_offsets"])
        table[name][key] = choose.choice(["F64", "F16", "I8", [], [-1], [2**62, 2], [0, 4], [4, 0], None, 1e300, {}])
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + body


@COUNTS
def test_damaged_weights_work_or_are_refused_by_file(folders: dict[str, Path], count: int) -> None:
    failures = []
    for seed in range(count):
        choose = random.Random(seed)
        folder = folders[choose.choice([*folders])]
        file = folder / "model.safetensors"
        before = file.read_bytes()
        file.write_bytes(damaged(before, choose))
        try:
            said = outcome(folder)
            if said and (str(folder) not in said or "\n" in said):
                failures.append((seed, folder.name, said))
        except Exception as error:
            failures.append((seed, folder.name, repr(error)))
        finally:
            file.write_bytes(before)
    assert not failures, "\n".join(map(str, [len(failures), *failures]))


def tokenizer_files(folder: Path, story: str) -> None:
    """Write a tokenizer.json and, in the folder `gpt2`, a vocab.json and a merges.txt."""
    tokenizer = train_tokenizer("bpe:300", [story])
    tokenizer.save(folder)
    (folder / "gpt2").mkdir()
    tokenizer.inner.model.save(str(folder / "gpt2"))


@COUNTS
def test_damaged_tokenizer_works_or_is_refused_by_file(tmp_path: Path, story: str, count: int) -> None:
    tokenizer_files(tmp_path, story)
    files = [tmp_path / "tokenizer.json", tmp_path / "gpt2" / "vocab.json", tmp_path / "gpt2" / "merges.txt"]
    failures = []
    for seed in range(count):
        choose = random.Random(seed)
        file = choose.choice([*files, tmp_path / "tokenizer_config.json"])
        before = file.read_bytes()
        file.unlink()
        if choose.randrange(10):
            file.write_bytes(damaged_text(before, choose))
        try:
            with limited(SECONDS, ROOM):
                tokenizer = Tokenizer.load(file.parent)
                tokenizer.decode(tokenizer.encode("The cat sat."))
        except UserError as error:
            if str(file.parent) not in str(error) or "\n" in str(error):
                failures.append((seed, file.name, str(error)))
        except BaseException as error:  # a panic in the Rust library is not an Exception
            failures.append((seed, file.name, repr(error)))
        finally:
            file.write_bytes(before)
    assert not failures, "\n".join(map(str, [len(failures), *failures]))


def damaged_text(data: bytes, choose: random.Random) -> bytes:
    """Cut off a text file, or change one byte or, in JSON, one value."""
    kind = choose.randrange(4)
    if kind == 0:
        return data[: choose.randrange(len(data))]
    if kind == 1 or not data.startswith(b"{"):
        place = choose.randrange(len(data))
        return data[:place] + bytes([choose.randrange(256)]) + data[place + 1 :]
    table = json.loads(data)
    return json.dumps(changed(table, choose.choice([*paths(table)]), choose.choice(VALUES))).encode()
