"""A saved model is loaded bit for bit; a damaged folder is refused in one sentence; a full disk leaves the old model as
it was."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from onward import DecoderConfig, UserError
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model
from onward.checkpoint.weights import fill, read_tensors

from support import disk
from support.decoders import DECODERS, decoder, token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS.keys())
@torch.inference_mode()
def test_a_model_comes_back_bit_for_bit(config: DecoderConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    model, tokens = decoder(config, dtype), token_ids(config)
    save_model(model, tmp_path, {"eos_token_id": 3})
    back, hf = load_model(tmp_path)
    assert back.config == config
    assert hf["eos_token_id"] == 3
    assert (back.head.weight is back.embed.weight) == config.tied
    parameters = dict(back.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameters.pop(name), parameter), name
    assert not parameters
    assert torch.equal(back(tokens), model(tokens))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def cut(keep: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[: keep(len(data))])

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return damage


def text(new: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "config.json").write_text(new)

    return damage


Q = "model.layers.1.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (cut(lambda n: n - 1), "model.safetensors is cut off"),
    "cut off in its header": (cut(lambda n: 20), "model.safetensors is cut off"),
    "empty": (cut(lambda n: 0), "model.safetensors is cut off"),
    "without weights": (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
    "a tensor missing": (tensors(lambda t: t.pop(Q)), f"no tensor {Q}"),
    "a tensor too many": (tensors(lambda t: t.update(extra=torch.zeros(1))), "tensor extra"),
    "a wrong shape": (tensors(lambda t: t.update({Q: t[Q][:-1].clone()})), f"{Q} has shape [15, 16]"),
    "a matrix as a vector": (tensors(lambda t: t.update({Q: torch.zeros(5)})), f"{Q} has shape [5]"),
    "a number alone": (tensors(lambda t: t.update({Q: torch.tensor(1.0)})), f"{Q} has shape []"),
    "whole numbers": (tensors(lambda t: t.update({Q: t[Q].int()})), Q),
    "without config.json": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "config.json broken off": (text('{"model_type": '), "config.json cannot be read as JSON"),
    "config.json not in UTF-8": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{"), "config.json"),
    "config.json nested without end": (text("[" * 100_000), "config.json"),
    "config.json a list": (text("[]"), "config.json is not a JSON object"),
    "an unknown family": (text('{"model_type": "lama"}'), "did you mean llama"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_sentence(damage: str, tmp_path: Path) -> None:
    save_model(decoder(DECODERS["llama"]), tmp_path)
    harm, sentence = DAMAGES[damage]
    harm(tmp_path)
    with pytest.raises(UserError) as error:
        load_model(tmp_path)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["nowhere", "config.json"])
def test_paths_that_are_no_folders_are_refused(path: str, tmp_path: Path) -> None:
    save_model(decoder(DECODERS["llama"]), tmp_path)
    with pytest.raises(UserError):
        load_model(tmp_path / path)


@pytest.mark.parametrize("room", [0, 100, 4000])
def test_a_full_disk_leaves_the_old_model_bit_for_bit(room: int, tmp_path: Path) -> None:
    save_model(decoder(DECODERS["llama"]), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with disk.with_room_for(room), pytest.raises(UserError, match=r"cannot write .*model.safetensors"):
        save_model(decoder(DECODERS["gpt2"]), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_tensors_come_back_whatever_their_layout(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    wanted = {"turned": base.mT, "a slice": base[1:, :2], "none": torch.zeros(0, 3), "one": torch.tensor(2.0)}
    fill(tmp_path / "t.safetensors", wanted, wanted.items())
    got = read_tensors(tmp_path / "t.safetensors")
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_config_that_still_describes_the_model_is_kept(tmp_path: Path) -> None:
    save_model(decoder(DECODERS["llama"]), tmp_path / "a", {"bos_token_id": 1})
    model, hf = load_model(tmp_path / "a")
    save_model(model, tmp_path / "b", {**hf, "prefix": "kept"})
    kept = json.loads((tmp_path / "b" / "config.json").read_text())
    assert kept == {**hf, "prefix": "kept"}
    save_model(decoder(DECODERS["gpt2"]), tmp_path / "c", hf)
    assert load_model(tmp_path / "c")[0].config == DECODERS["gpt2"]
