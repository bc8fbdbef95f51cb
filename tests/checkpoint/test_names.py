"""Files whose tensors have other prefixes or layouts load as the same model; unknown tensors are refused by name."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, LlamaConfig, MixtralConfig, Phi3Config, PreTrainedConfig

from onward import Decoder, UserError
from onward.base.files import read_json, write_json
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model
from onward.checkpoint.weights import COPY_BYTES
from onward.cli import main
from onward.families import read

from support.decoders import decoder

SIZES = {"vocab_size": 13, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 12}
GPT2 = {"vocab_size": 13, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 12}
SHAPES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),  # unchanged
    "gpt2": GPT2Config(**GPT2),  # transposed and fused
    "phi3": Phi3Config(**GROUPED, pad_token_id=0),  # fused
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=5),  # stacked
}


def saved(shape: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: int) -> Decoder:
    """A small random model, saved in the format of its family."""
    hf = SHAPES[shape].to_dict() | changes
    model = decoder(read(hf)[1], dtype)
    save_model(model, folder, hf)
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
        assert parameter.is_contiguous(), f"{name}: fused optimizers need it"
        assert parameter.data_ptr() % 64 == 0, f"{name}: products would round differently"
    assert not expected


def without_base(base: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name.removeprefix(base): tensor for name, tensor in tensors.items()}


CHANGES: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "llama without prefix": ("llama", without_base("model.")),
    "gpt2 without prefix": ("gpt2", without_base("transformer.")),
    "mixtral without prefix": ("mixtral", without_base("model.")),
    "only some without prefix": ("llama", lambda t: {n.replace("model.layers.0", "layers.0"): v for n, v in t.items()}),
    "gpt2 with the masks of old files": (
        "gpt2",
        lambda t: (
            t | {f"transformer.h.{i}.attn.{n}": torch.ones(1, 1, 4, 4) for i in (0, 1) for n in ("bias", "masked_bias")}
        ),
    ),
    "masks and no prefix": ("gpt2", lambda t: without_base("transformer.")(t) | {"h.0.attn.bias": torch.ones(4)}),
    "the frequencies of old files": ("llama", lambda t: t | {"model.layers.0.rotary_emb.inv_freq": torch.ones(2)}),
    "the embedding again, as the head": ("gpt2", lambda t: t | {"lm_head.weight": t["transformer.wte.weight"].clone()}),
    "tensors at odd places": ("llama", lambda t: t),  # written by safetensors' own writer, without gaps
    "other tensors at odd places": ("gpt2", lambda t: t),
    "stacked tensors at odd places": ("mixtral", lambda t: t),
    "fused tensors at odd places": ("phi3", lambda t: t),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CHANGES)
def test_the_same_tensors_however_they_are_stored(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    shape, change = CHANGES[case]
    model = saved(shape, tmp_path, dtype)
    rewrite(tmp_path, change)
    assert_same(load_model(tmp_path)[0], model)


@pytest.mark.parametrize("name", ["transformer.h.0.attn.masks", "wte.weight", "transformer.h.2.ln_1.weight"])
def test_tensors_that_no_family_ignores_are_refused_by_name(name: str, tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    rewrite(tmp_path, lambda t: t | {name: torch.zeros(13, 16)})
    with pytest.raises(UserError, match=f"has a tensor {name} that"):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_loading_in_a_dtype_equals_casting_the_model(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = saved(shape, tmp_path)
    got, hf = load_model(tmp_path, dtype)
    assert hf["dtype"] == "float32"
    assert_same(got, model.to(dtype))


# other dtypes than the file's, since weights in the same dtype stay mapped
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_casting_in_pieces_equals_casting_the_whole(dtype: torch.dtype, tmp_path: Path) -> None:
    model = saved("llama", tmp_path, vocab_size=300_000).to(dtype)
    assert model.embed.weight.nbytes > COPY_BYTES
    assert_same(load_model(tmp_path, dtype)[0], model)


@pytest.mark.parametrize("shape", SHAPES)
def test_training_a_loaded_model_never_changes_its_file_and_it_can_be_saved_over(shape: str, tmp_path: Path) -> None:
    saved(shape, tmp_path)
    path = tmp_path / "model.safetensors"
    before = path.read_bytes()
    model, hf = load_model(tmp_path)
    model(torch.arange(6)[None]).sum().backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()
    assert path.read_bytes() == before
    save_model(model, tmp_path, hf)
    assert path.read_bytes() != before
    assert_same(load_model(tmp_path)[0], model)


def test_tensors_that_need_no_change_stay_mapped(tmp_path: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc to see what is mapped")
    saved("llama", tmp_path)
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
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight"),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_name_unless_allowed(
    shape: str, name: str, bad: str, tmp_path: Path
) -> None:
    saved(shape, tmp_path)

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name].view(-1)[-1] = BAD[bad]
        return tensors

    rewrite(tmp_path, spoil)
    dtype = torch.float16 if bad == "too large for fp16" else None
    with pytest.raises(UserError, match=f"tensor {name} has NaN or infinite.*--allow-nonfinite"):
        load_model(tmp_path, dtype)
    model, _ = load_model(tmp_path, dtype, allow_nonfinite=True)
    assert sum((~parameter.isfinite()).sum() for parameter in model.parameters()) == 1


def test_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    write_json(tmp_path / "config.json", read_json(tmp_path / "config.json") | {"n_inner": 60})
    with pytest.raises(UserError) as error:
        load_model(tmp_path)
    assert "transformer.h.0.mlp.c_fc.weight has shape [16, 64], but the config asks for [16, 60]" in str(error.value)


def test_allow_nonfinite_loads_them_from_the_command_line(tiny_run: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.norm.weight"][:] = float("nan")
        return tensors

    rewrite(folder, spoil)
    for words in ["generate", str(folder), "The", "--temperature", "0"], ["evaluate", str(folder)]:
        assert main(words) == 2
        assert "model.norm.weight has NaN" in capsys.readouterr().err
        main([*words, "--allow-nonfinite"])
        assert "model.norm.weight" not in capsys.readouterr().err
