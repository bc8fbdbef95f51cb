"""Whatever a file calls its tensors and however it lays them out, the model is the same."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import stacks
import torch
from decoders import DECODERS, config, decoder
from safetensors.torch import load_file, save_file
from torch import Tensor

from onward.checkpoint import names
from onward.checkpoint.folder import load_model, save_model
from onward.cli import main
from onward.errors import UserError
from onward.families import families
from onward.files import read_json, write_json
from onward.model.config import Experts
from onward.model.decoder import Decoder

SHAPES = {
    "llama": DECODERS["llama"],
    "gpt2": DECODERS["gpt2"],
    "stacks": config(n_kv_heads=2, mlp=Experts(count=5, d_ff=24, compute="loop")),
}


def saved(shape: str, folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> Decoder:
    """A small random model, written as its family does."""
    if shape == "stacks":
        monkeypatch.setitem(families(), "stacks", stacks)
        monkeypatch.setattr("onward.checkpoint.folder.express", lambda c: stacks.to_hf(c) | {"model_type": "stacks"})
    model = decoder(SHAPES[shape], dtype)
    save_model(model, folder)
    assert read_json(folder / "config.json")["model_type"] == shape
    return model


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Write the tensors of a folder again, with safetensors' own writer."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(change(tensors), path)


def assert_same(got: Decoder, wanted: Decoder) -> None:
    expected = dict(wanted.named_parameters())
    for name, parameter in got.named_parameters():
        assert torch.equal(parameter, expected.pop(name)), name
        assert parameter.is_contiguous(), f"{name}: fused optimisers need it"
        assert parameter.data_ptr() % 64 == 0, f"{name}: products would round otherwise"
    assert not expected


def without_base(base: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name.removeprefix(base): tensor for name, tensor in tensors.items()}


CHANGES: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "llama without prefix": ("llama", without_base("model.")),
    "gpt2 without prefix": ("gpt2", without_base("transformer.")),
    "stacks without prefix": ("stacks", without_base("base.")),
    "only some without prefix": ("llama", lambda t: {n.replace("model.layers.0", "layers.0"): v for n, v in t.items()}),
    "gpt2 with the masks of old files": (
        "gpt2",
        lambda t: (
            t | {f"transformer.h.{i}.attn.{n}": torch.ones(1, 1, 4, 4) for i in (0, 1) for n in ("bias", "masked_bias")}
        ),
    ),
    "masks and no prefix": ("gpt2", lambda t: without_base("transformer.")(t) | {"h.0.attn.bias": torch.ones(4)}),
    "a family's own buffers": ("stacks", lambda t: t | {"base.0.mask": torch.ones(2).int()}),
    "the frequencies of old files": ("stacks", lambda t: t | {"base.0.rotary_emb.inv_freq": torch.ones(2)}),
    "the embedding again, as the head": ("gpt2", lambda t: t | {"lm_head.weight": t["transformer.wte.weight"].clone()}),
    "tensors at odd places": ("llama", lambda t: t),  # safetensors' writer packs them
    "other tensors at odd places": ("gpt2", lambda t: t),
    "stacks at odd places": ("stacks", lambda t: t),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CHANGES)
def test_the_same_tensors_however_they_are_stored(
    case: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, change = CHANGES[case]
    model = saved(shape, tmp_path, monkeypatch, dtype)
    rewrite(tmp_path, change)
    assert_same(load_model(tmp_path)[0], model)


@pytest.mark.parametrize("name", ["transformer.h.0.attn.masks", "wte.weight", "transformer.h.2.ln_1.weight"])
def test_what_no_family_ignores_is_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("gpt2", tmp_path, monkeypatch)
    rewrite(tmp_path, lambda t: t | {name: torch.zeros(13, 16)})
    with pytest.raises(UserError, match=f"has a tensor {name} that"):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cast_piece_by_piece_is_the_cast_of_the_whole(
    shape: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(shape, tmp_path, monkeypatch)
    monkeypatch.setattr(names, "AT_ONCE", 100)
    monkeypatch.setattr("onward.checkpoint.weights.AT_ONCE", 300)
    got, hf = load_model(tmp_path, dtype)
    assert hf["dtype"] == "float32"
    assert_same(got, model.to(dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_training_a_loaded_model_never_changes_its_file_and_it_can_be_saved_over(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(shape, tmp_path, monkeypatch)
    path = tmp_path / "model.safetensors"
    before = path.read_bytes()
    model, hf = load_model(tmp_path)
    model(torch.arange(6)[None]).sum().backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()
    assert path.read_bytes() == before
    save_model(model, tmp_path, hf)
    assert path.read_bytes() != before
    assert_same(load_model(tmp_path)[0], model)


def test_what_needs_no_change_stays_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc to see what is mapped")
    saved("llama", tmp_path, monkeypatch)
    model, _ = load_model(tmp_path)
    ranges = [line.split()[0].split("-") for line in maps.read_text().splitlines() if str(tmp_path) in line]
    for name, parameter in model.named_parameters():
        assert any(int(start, 16) <= parameter.data_ptr() < int(end, 16) for start, end in ranges), name


BAD = {"NaN": float("nan"), "infinity": float("inf"), "minus infinity": -float("inf"), "too large for fp16": 1e6}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.bias"),
        ("stacks", "base.1.experts.3.down"),
        ("stacks", "base.0.kv"),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_name_unless_allowed(
    shape: str, name: str, bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(shape, tmp_path, monkeypatch)

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name].view(-1)[-1] = BAD[bad]
        return tensors

    rewrite(tmp_path, spoil)
    dtype = torch.float16 if bad == "too large for fp16" else None
    with pytest.raises(UserError, match=f"tensor {name} holds NaN or infinite.*--allow-nonfinite"):
        load_model(tmp_path, dtype)
    model, _ = load_model(tmp_path, dtype, allow_nonfinite=True)
    assert sum((~parameter.isfinite()).sum() for parameter in model.parameters()) == 1


def test_a_contradiction_shows_what_is_asked_for_and_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("gpt2", tmp_path, monkeypatch)
    write_json(tmp_path / "config.json", read_json(tmp_path / "config.json") | {"n_inner": 60})
    with pytest.raises(UserError) as error:
        load_model(tmp_path)
    assert "transformer.h.0.mlp.c_fc.weight has shape [16, 64], and config.json asks for [16, 60]" in str(error.value)


def test_the_command_line_can_load_them_all_the_same(tiny_run: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.norm.weight"][:] = float("nan")
        return tensors

    rewrite(folder, spoil)
    for words in ["generate", str(folder), "The", "--temperature", "0"], ["evaluate", str(folder)]:
        assert main(words) == 2
        assert "model.norm.weight holds NaN" in capsys.readouterr().err
        main([*words, "--allow-nonfinite"])
        assert "model.norm.weight" not in capsys.readouterr().err
