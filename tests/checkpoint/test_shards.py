"""Large models are written as shards with an index; an interrupted save never leaves a folder that loads
incorrectly."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import onward
from onward import Decoder, LanguageModel, Rotary, UserError
from onward.base.files import read_json, write_json
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model

from support.decoders import DECODERS, decoder, token_ids

INDEX = "model.safetensors.index.json"
LLAMA = DECODERS["llama"]


def contents(folder: Path) -> dict[str, list[str]]:
    """The names of the tensors in each file."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found[path.name] = list(file.keys())
    return found


def assert_same(got: Decoder, wanted: Decoder) -> None:
    assert got.config == wanted.config
    assert all(torch.equal(a, b) for a, b in zip(got.parameters(), wanted.parameters(), strict=True))


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
@pytest.mark.parametrize("shard_bytes", [1, 3000, 8000])
def test_shards_hold_all_tensors_once_and_transformers_reads_them(shape: str, shard_bytes: int, tmp_path: Path) -> None:
    model = decoder(DECODERS[shape])
    save_model(model, tmp_path, shard_bytes=shard_bytes)
    found, index = contents(tmp_path), read_json(tmp_path / INDEX)
    assert [*found] == [f"model-{i + 1:05}-of-{len(found):05}.safetensors" for i in range(len(found))]
    assert index["weight_map"] == {name: file for file, names in found.items() for name in names}
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    for file, names in found.items():
        assert len(names) == 1 or (tmp_path / file).stat().st_size < shard_bytes + 2000, "a file also has a header"
    assert_same(load_model(tmp_path)[0], model)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    with torch.inference_mode():
        torch.testing.assert_close(theirs(token_ids(LLAMA)).logits, model(token_ids(LLAMA)), rtol=0, atol=2e-5)


def test_a_tensor_larger_than_a_shard_has_its_own(tmp_path: Path) -> None:
    save_model(decoder(LLAMA), tmp_path, shard_bytes=2000)
    sizes = {name: tensor.nbytes for name, tensor in load_model(tmp_path)[0].named_parameters()}
    assert max(sizes.values()) > 2000
    assert any(len(names) == 1 for names in contents(tmp_path).values())
    assert any(len(names) > 1 for names in contents(tmp_path).values())


def test_shards_are_5_gigabytes_by_default(tmp_path: Path) -> None:
    onward.save(LanguageModel(decoder(LLAMA)), tmp_path / "many", shard_bytes=3000)
    onward.save(LanguageModel(decoder(LLAMA)), tmp_path / "one")
    assert len(contents(tmp_path / "many")) > 1
    assert [*contents(tmp_path / "one")] == ["model.safetensors"]


@pytest.mark.parametrize(("before", "after"), [(1e9, 3000), (3000, 1e9), (3000, 6000), (6000, 3000), (3000, 3000)])
def test_files_of_an_earlier_save_are_gone(before: float, after: float, tmp_path: Path) -> None:
    save_model(decoder(DECODERS["gpt2"]), tmp_path / "a", shard_bytes=before)
    (tmp_path / "a" / "model-notes.safetensors").write_text("not a shard")
    save_model(decoder(LLAMA), tmp_path / "a", shard_bytes=after)
    save_model(decoder(LLAMA), tmp_path / "b", shard_bytes=after)
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert {path.name for path in (tmp_path / "a").iterdir()} == names | {"model-notes.safetensors"}
    assert_same(load_model(tmp_path / "a")[0], decoder(LLAMA))


@pytest.mark.parametrize(("before", "after"), [(1e9, 1e9), (1e9, 8000), (8000, 1e9), (8000, 8000)])
def test_a_save_stopped_anywhere_leaves_the_old_model_the_new_one_or_none(
    before: float, after: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = decoder(LLAMA), decoder(replace(LLAMA, position=Rotary(theta=77.0)))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.neg_()
    seen = []
    for stop in range(100):
        folder, left = tmp_path / str(stop), [stop]
        save_model(old, folder, shard_bytes=before)

        def until_then(change: Callable[..., None], left: list[int] = left) -> Callable[..., None]:
            def changed(*args: Path, **options: bool) -> None:
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                change(*args, **options)

            return changed

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", until_then(os.replace))
            patch.setattr(Path, "unlink", until_then(Path.unlink))
            try:
                save_model(new, folder, shard_bytes=after)
            except KeyboardInterrupt:
                pass
        try:
            model, _ = load_model(folder)
        except UserError:
            seen.append("none")
        else:
            seen.append("new" if model.config == new.config else "old")
            assert_same(model, new if seen[-1] == "new" else old)
        if left[0]:
            break
    assert seen[0] == "old"
    assert seen[-1] == "new"


def place(name: str, file: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        index = read_json(folder / INDEX)
        index["weight_map"][name] = file
        write_json(folder / INDEX, index)

    return damage


Q, FIRST, SECOND = (
    "model.layers.1.self_attn.q_proj.weight",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
)
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard missing": (lambda folder: (folder / SECOND).unlink(), f"no {SECOND}"),
    "a shard cut off": (lambda folder: (folder / SECOND).write_bytes(b"\1\2"), f"{SECOND} is cut off"),
    "in a shard that lacks it": (place(Q, SECOND), f"{Q} to {SECOND}, which has no such tensor"),
    "outside": (place(Q, "../" + SECOND), f"{Q} to '../{SECOND}'"),
    "at an absolute path": (place(Q, "/etc/passwd"), "'/etc/passwd'"),
    "in a pickle": (place(Q, "pytorch_model.bin"), "'pytorch_model.bin'"),
    "in a name with a zero": (place(Q, "a\0b.safetensors"), Q),
    "in a name without end": (place(Q, "a" * 10_000 + ".safetensors"), "aaa"),
    "in no file": (place(Q, None), Q),  # type: ignore[arg-type]
    "a tensor left out": (
        lambda folder: write_json(
            folder / INDEX,
            {"weight_map": {n: f for n, f in read_json(folder / INDEX)["weight_map"].items() if n != Q}},
        ),
        f"no tensor {Q}",
    ),
    "no map": (lambda folder: write_json(folder / INDEX, {}), "no weight_map"),
    "an empty map": (lambda folder: write_json(folder / INDEX, {"weight_map": {}}), ""),
    "a list in place of a map": (lambda folder: write_json(folder / INDEX, {"weight_map": [1]}), "no weight_map"),
    "not JSON": (lambda folder: (folder / INDEX).write_text('{"weight_map": {'), "cannot be read as JSON"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_refused_in_one_sentence(damage: str, tmp_path: Path) -> None:
    save_model(decoder(LLAMA), tmp_path, shard_bytes=20_000)
    assert [*contents(tmp_path)] == [FIRST, SECOND]
    harm, sentence = DAMAGES[damage]
    harm(tmp_path)
    with pytest.raises(UserError) as error:
        load_model(tmp_path)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert json.dumps(str(error.value)), "it can be printed"


def test_a_file_that_holds_only_what_is_left_out_may_be_absent(tmp_path: Path) -> None:
    model = decoder(LLAMA)
    save_model(model, tmp_path, shard_bytes=10_000)
    index = read_json(tmp_path / INDEX)
    index["weight_map"]["model.layers.2.eh_proj.weight"] = "model-90000-of-90000.safetensors"
    write_json(tmp_path / INDEX, index)
    assert_same(load_model(tmp_path)[0], model)
    index["weight_map"]["model.layers.1.other.weight"] = "model-90000-of-90000.safetensors"
    write_json(tmp_path / INDEX, index)
    with pytest.raises(UserError, match=r"there is no model-90000-of-90000\.safetensors"):
        load_model(tmp_path)
