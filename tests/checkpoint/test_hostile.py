"""A malicious folder gives either an error of one sentence or a model, in little time and memory."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CohereConfig, MixtralConfig

from onward import Experts, UserError
from onward.base.files import read_json, write_json
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model
from onward.families import read

from support.decoders import DECODERS, config, decoder
from support.limits import limited

pytestmark = pytest.mark.filterwarnings("ignore:config.json has keys")
ROOM = 400 << 20  # maximum bytes to allocate in addition to the current allocations
INDEX = "model.safetensors.index.json"


def refusal(folder: Path) -> str:
    """The one-sentence error with which a folder is refused."""
    with limited(5, ROOM), pytest.raises(UserError) as error:
        load_model(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_memory_guard_fails_on_large_allocations() -> None:
    with pytest.raises(MemoryError), limited(5, ROOM):
        bytes(20 * ROOM)  # more than earlier tests can have left free in the heap


def header(text: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EIGHT = bytes(8)
HEADERS = {
    "no bytes": b"",
    "less than a length": b"\1\2\3",
    "a length beyond all files": header({}, length=2**64 - 1),
    "a length beyond this file": header({"a": tensor()}, EIGHT, length=2**30),
    "a length of nothing": header({"a": tensor()}, EIGHT, length=0),
    "not JSON": header(b"{]", EIGHT),
    "not UTF-8": header(b"\xff\xfe", EIGHT),
    "nested without end": header(b'{"a":' * 50_000),
    "a list": header([1, 2]),
    "overlapping offsets": header({"a": tensor(), "b": tensor()}, EIGHT),
    "a hole": header({"a": tensor(), "b": tensor(offsets=(12, 20))}, bytes(20)),
    "offsets beyond the file": header({"a": tensor(shape=(2**40,), offsets=(0, 2**42))}, EIGHT),
    "offsets that turn back": header({"a": tensor(offsets=(8, 0))}, EIGHT),
    "bytes that belong to nothing": header({"a": tensor()}, bytes(99)),
    "a shape that is not its bytes": header({"a": tensor(shape=(3,))}, EIGHT),
    "a shape too large to count": header({"a": tensor(shape=(2**62, 2**62))}, EIGHT),
    "a negative shape": header({"a": tensor(shape=(-2,))}, EIGHT),
    "a shape of text": header({"a": tensor(shape="2")}, EIGHT),
    "an unknown type": header({"a": tensor(dtype="F99")}, EIGHT),
    "no type": header({"a": {"shape": (2,), "data_offsets": (0, 8)}}, EIGHT),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_hostile_header_is_refused(case: str, tmp_path: Path) -> None:
    save_model(decoder(DECODERS["llama"]), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(HEADERS[case])
    assert "model.safetensors is cut off or not a safetensors file" in refusal(tmp_path)


@pytest.mark.parametrize("shape", [(0, 2**62), (2**63, 0), (2**64 - 1, 0), (0,) * 1000])
@pytest.mark.parametrize("name", ["model.norm.weight", "extra"])
def test_empty_shapes_are_refused_by_name(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    save_model(decoder(DECODERS["llama"]), tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    end = len(data) - 8 - length
    table[name] = tensor(shape=shape, offsets=(end, end))
    if name != "extra":  # another tensor gets the 64 bytes
        table["other"] = tensor(shape=(16,), offsets=read_offsets(data, name))
    path.write_bytes(header(table, data[8 + length :]))
    assert name in refusal(tmp_path)


def read_offsets(data: bytes, name: str) -> list[int]:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[name]["data_offsets"]


SIZES = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
SMALL = {"mixtral": MixtralConfig(**SIZES, num_key_value_heads=1), "cohere": CohereConfig(**SIZES, use_qk_norm=True)}
MANY = {
    "layers": ("llama", {"num_hidden_layers": 10**9}),
    "layers as a fraction": ("llama", {"num_hidden_layers": 1e18}),
    "a few layers more than tensors": ("llama", {"num_hidden_layers": 22}),
    "tokens": ("llama", {"vocab_size": 10**15}),
    "more tokens than can be counted": ("llama", {"vocab_size": 10**19}),
    "more tokens than can be written": ("llama", {"vocab_size": 10**400}),
    "width": ("llama", {"hidden_size": 4 * 10**12}),
    "width of the feed-forward": ("llama", {"intermediate_size": 10**18}),
    "heads": ("llama", {"num_attention_heads": 10**9, "num_key_value_heads": 1, "head_dim": 2}),
    "heads, wide": ("llama", {"num_attention_heads": 10**9, "num_key_value_heads": 1, "head_dim": 2**40}),
    "positions": ("gpt2", {"n_positions": 10**12}),
    "layers of gpt2": ("gpt2", {"n_layer": 2**31}),
    "layers of ours": ("experts", {"n_layers": 10**9}),
    "experts": ("experts", {"mlp": {"kind": "experts", "count": 10**9}}),
    "shared experts": ("experts", {"mlp": {"kind": "experts", "shared": 10**9}}),
    "experts of mixtral": ("mixtral", {"num_local_experts": 10**9}),
    "heads with a norm each": ("cohere", {"num_attention_heads": 10**9, "head_dim": 4}),
}


@pytest.mark.parametrize("case", MANY)
def test_a_config_that_asks_for_far_more_than_the_files_hold_is_refused_at_once(case: str, tmp_path: Path) -> None:
    changes: Any
    shape, changes = MANY[case]
    published = SMALL[shape].to_dict() if shape in SMALL else {}
    ours = read(published)[1] if published else DECODERS.get(shape) or config(mlp=Experts(backend="loop"))
    save_model(decoder(ours), tmp_path, published)
    hf = read_json(tmp_path / "config.json")
    (hf["decoder"] if shape == "experts" else hf).update(changes)
    write_json(tmp_path / "config.json", hf)
    assert "config.json" in refusal(tmp_path)


PICKLES: dict[str, Callable[[Path], Path]] = {
    "pytorch_model.bin": lambda folder: folder,
    "ckpt.pt": lambda folder: folder,
    "model.pth": lambda folder: folder,
    "consolidated.00.pth": lambda folder: folder / "consolidated.00.pth",
    "last.ckpt": lambda folder: folder / "last.ckpt",
}


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("with_config", [True, False])
def test_pickles_are_refused_with_the_reason(name: str, with_config: bool, tmp_path: Path) -> None:
    save_model(decoder(DECODERS["llama"]), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    if not with_config:
        (tmp_path / "config.json").unlink()
    said = refusal(PICKLES[name](tmp_path))
    assert name in said
    assert "can run any code" in said
    assert "safetensors" in said


def test_pickle_beside_safetensors_is_ignored(tmp_path: Path) -> None:
    save_model(decoder(DECODERS["llama"]), tmp_path)
    (tmp_path / "training_args.bin").write_bytes(b"\x80")
    load_model(tmp_path)


# ---------------------------------------------------------------- any content: a model or a one-sentence error


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three valid folders: with one weight file, with shards, and with experts."""
    root = tmp_path_factory.mktemp("valid")
    save_model(decoder(DECODERS["gpt2"]), root / "one")
    save_model(decoder(DECODERS["llama"]), root / "shards", shard_bytes=9000)
    save_model(decoder(config(mlp=Experts(backend="loop"))), root / "experts")
    return {path.name: path for path in root.iterdir()}


def survives(folder: Path) -> None:
    with limited(5, ROOM), suppress(UserError):
        load_model(folder)


@contextmanager
def instead(path: Path, data: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


KINDS = st.sampled_from(["one", "shards", "experts"])
WORDS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 7, 2**31, 2**63, 10**9, 10**15, 10**30, 0.5, 1e300, float("nan"), float("inf")]),
    st.text(max_size=5),
    st.sampled_from(["llama", "onward", "experts", "10", "1e9", "../x", "model.safetensors", "\ud800", "F64", "U8"]),
)
VALUES = st.recursive(WORDS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3))


@given(KINDS, st.sampled_from(["config.json", INDEX, "model.safetensors"]), st.binary(max_size=300))
def test_random_bytes(folders: dict[str, Path], kind: str, name: str, data: bytes) -> None:
    path = folders[kind] / name
    if path.exists():
        with instead(path, data):
            survives(folders[kind])


@given(KINDS, st.data())
def test_a_few_changed_bytes(folders: dict[str, Path], kind: str, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(folders[kind].iterdir())))
    changed = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, min(len(changed), 4000) - 1))] = data.draw(st.integers(0, 255))
    with instead(path, bytes(changed[: data.draw(st.sampled_from([len(changed), 7, 100, len(changed) - 1]))])):
        survives(folders[kind])


def mutated(value: Any, data: st.DataObject) -> Any:
    """The JSON value with one nested value replaced, removed, renamed or duplicated."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 9)):
        key = data.draw(st.sampled_from(sorted(value)))
        match data.draw(st.sampled_from(["inside", "inside", "inside", "removed", "renamed"])):
            case "inside":
                return value | {key: mutated(value[key], data)}
            case "removed":
                return {k: v for k, v in value.items() if k != key}
        return {data.draw(st.text(max_size=5)) if k == key else k: v for k, v in value.items()}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        i = data.draw(st.integers(0, len(value) - 1))
        return [*value[:i], mutated(value[i], data), *value[i + data.draw(st.integers(0, 1)) :]]
    return data.draw(VALUES)


@settings(max_examples=25)
@given(KINDS, st.sampled_from(["config.json", INDEX]), st.integers(1, 3), st.data())
def test_mutated_tables(folders: dict[str, Path], kind: str, name: str, times: int, data: st.DataObject) -> None:
    path = folders[kind] / name
    if path.exists():
        value = json.loads(path.read_text())
        for _ in range(times):
            value = mutated(value, data)
        with instead(path, json.dumps(value).encode()):
            survives(folders[kind])


@given(KINDS, st.data())
def test_mutated_headers(folders: dict[str, Path], kind: str, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(folders[kind].glob("*.safetensors"))))
    old = path.read_bytes()
    length = int.from_bytes(old[:8], "little")
    table = mutated(json.loads(old[8 : 8 + length]), data)
    with instead(path, header(table, old[8 + length :])):
        survives(folders[kind])


@given(st.sampled_from(["mxfp4", "fp8"]), st.data())
def test_mutated_quantization(folders: dict[str, Path], method: str, data: st.DataObject) -> None:
    path = folders["experts"] / "config.json"
    value = json.loads(path.read_text())
    value["quantization_config"] = mutated({"quant_method": method, "weight_block_size": [8, 8]}, data)
    with instead(path, json.dumps(value).encode()):
        survives(folders["experts"])
