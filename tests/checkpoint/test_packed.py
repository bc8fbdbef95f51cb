"""Quantized models in folders: saved and loaded bit for bit, in a format that transformers also reads."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from onward import Decoder, DecoderConfig, UserError
from onward.base.files import read_json, write_json
from onward.checkpoint.huggingface.save import OwnLayout, save_model
from onward.checkpoint.load import load_model
from onward.checkpoint.packed import packed, unpacked
from onward.families import read
from onward.transforms import quantize_model
from onward.transforms.quantize import Precision, QuantizedLinear

from support.decoders import DECODERS, decoder
from support.families import CASES, NAMES

FIRST = {name: next(hf for case, hf in CASES.items() if case.startswith(f"{name}: ")) for name in NAMES}
TRANSPOSED = {"openai_gpt"}  # files with matrices (I, O); a GPT-2 is saved as gpt_bigcode, with matrices (O, I)
WIDE = DecoderConfig(vocab_size=40, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=100)
TOKENS = torch.arange(12)[None]


@pytest.mark.filterwarnings("ignore::onward.checkpoint.huggingface.save.OwnLayout")
@pytest.mark.parametrize("name", NAMES)
def test_a_quantized_model_of_each_family_is_loaded_to_the_same_bits(name: str, tmp_path: Path) -> None:
    hf = FIRST[name].to_dict()
    model = decoder(read(hf)[1])
    quantize_model(model, "int8")
    save_model(model, tmp_path, hf)
    loaded, written = load_model(tmp_path)
    assert (written["model_type"] == "onward") == (name in TRANSPOSED)
    assert layers_of(loaded) == layers_of(model)
    with torch.inference_mode():
        assert torch.equal(loaded(TOKENS), model(TOKENS))


@pytest.mark.filterwarnings("ignore::onward.checkpoint.load.KeptLayers")
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_reading_quantizes_as_the_loaded_model_is_quantized(precision: Precision, tied: bool, tmp_path: Path) -> None:
    for number, config in enumerate((WIDE, DECODERS["gpt2"], DECODERS["neox"])):
        folder = tmp_path / str(number)
        save_model(decoder(replace(config, tied=tied)), folder)
        for dtype in torch.float32, torch.bfloat16:
            wanted, _ = load_model(folder, dtype)
            kept = quantize_model(wanted, precision)
            found, _ = load_model(folder, dtype, quantize=precision)
            assert layers_of(found) == layers_of(wanted)
            assert bool(kept) == any(isinstance(m, torch.nn.Linear) for m in found.modules())
            with torch.inference_mode():
                assert torch.equal(found(TOKENS), wanted(TOKENS))


def layers_of(model: Decoder) -> dict[str, str]:
    """The quantized layers, each with its precision."""
    return {name: m.precision for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def saved(
    folder: Path, precision: Precision, config: DecoderConfig = WIDE, dtype: torch.dtype = torch.float32
) -> Decoder:
    """A quantized model with random weights, saved in a folder."""
    model = decoder(config, dtype)
    quantize_model(model, precision)
    save_model(model, folder)
    return model


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [1, 7, 32, 100])
def test_packed_integers_follow_each_other_from_the_lowest_bits(bits: int, inputs: int) -> None:
    least = -(1 << (bits - 1))
    integers = torch.randint(least, -least, (3, inputs), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    words = packed(integers, bits)
    assert torch.equal(unpacked(words, bits, inputs), integers)
    for row, found in zip(integers.tolist(), words.tolist()):
        number = sum((value - least) << (bits * i) for i, value in enumerate(row))
        padded = sum((word % (1 << 32)) << (32 * i) for i, word in enumerate(found))
        assert padded % (1 << (bits * inputs)) == number


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_the_same_logits(precision: Precision, tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = saved(tmp_path, precision, replace(WIDE, tied=tied))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), rtol=1e-5, atol=1e-5)


def test_config_names_the_layers_that_stay_and_the_head_of_another_precision(tmp_path: Path) -> None:
    saved(tmp_path, "int4", replace(WIDE, tied=True))
    hf = read_json(tmp_path / "config.json")
    groups = hf["quantization_config"]["config_groups"].values()
    assert [(group["targets"], group["weights"]["num_bits"]) for group in groups] == [(["lm_head"], 8), (["Linear"], 4)]
    assert hf["quantization_config"]["ignore"] == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]  # 100 inputs
    assert hf["tie_word_embeddings"] is False


def test_a_transposed_format_is_left_for_our_own_with_a_warning(tmp_path: Path) -> None:
    save_model(decoder(read(FIRST["openai_gpt"].to_dict())[1]), tmp_path / "plain")
    model, hf = load_model(tmp_path / "plain", quantize="int8")
    with pytest.warns(OwnLayout, match="openai-gpt stores weights in an order"):
        save_model(model, tmp_path / "int8", hf)


Edit = Callable[[dict[str, Tensor], dict[str, Any]], object]


def other_groups(tensors: dict[str, Tensor], hf: dict[str, Any]) -> None:
    """Scales in fp16 for every 16 inputs, as other tools write them."""
    for name in [name for name in tensors if name.endswith("_scale") and tensors[name].size(1) > 1]:
        tensors[name] = tensors[name].half().repeat_interleave(2, 1)


def test_integers_in_other_groups_are_dequantized(tmp_path: Path) -> None:
    model = saved(tmp_path, "int4")
    edit(tmp_path, other_groups)
    loaded, _ = load_model(tmp_path, torch.float32)
    assert layers_of(loaded) == {}
    with torch.inference_mode():
        torch.testing.assert_close(loaded(TOKENS), model(TOKENS), rtol=0, atol=1e-3)


def edit(folder: Path, change: Edit) -> None:
    path = folder / "model.safetensors"
    tensors, hf = {name: tensor.clone() for name, tensor in load_file(path).items()}, read_json(folder / "config.json")
    change(tensors, hf)
    path.unlink()
    save_file(tensors, path)
    write_json(folder / "config.json", hf)


Q = "model.layers.0.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Edit, str]] = {
    "another format": (
        lambda tensors, hf: hf["quantization_config"].update(format="marlin-24"),
        "format 'marlin-24'",
    ),
    "rotations": (
        lambda tensors, hf: hf["quantization_config"].update(transform_config={"R1": {}}),
        "transform_config",
    ),
    "no zero points": (
        lambda tensors, hf: [
            group["weights"].update(symmetric=False) for group in hf["quantization_config"]["config_groups"].values()
        ],
        "without weight_zero_point",
    ),
    "groups that are a list": (
        lambda tensors, hf: (
            tensors.update({f"{Q}_zero_point": torch.zeros(64, 2)})
            or hf["quantization_config"].update(config_groups=[])
        ),
        f"{Q}_zero_point",
    ),
    "a missing scale": (lambda tensors, hf: tensors.pop(f"{Q}_scale"), f"no tensor {Q}"),
    "another shape": (
        lambda tensors, hf: tensors.update({f"{Q}_shape": torch.tensor([64, 640])}),
        f"{Q} is stored as",
    ),
    "a negative shape": (
        lambda tensors, hf: tensors.update({f"{Q}_shape": torch.tensor([-64, 64])}),
        f"{Q} is stored as",
    ),
    "a shape in floats": (
        lambda tensors, hf: tensors.update({f"{Q}_shape": torch.tensor([64.0, 64.0])}),
        f"{Q} is stored as",
    ),
    "scales of fewer rows": (
        lambda tensors, hf: tensors.update({f"{Q}_scale": tensors[f"{Q}_scale"][:3].clone()}),
        f"{Q} is stored as",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_and_other_integers_are_refused_by_name(case: str, tmp_path: Path) -> None:
    change, sentence = DAMAGES[case]
    saved(tmp_path, "int4")
    edit(tmp_path, change)
    with pytest.raises(UserError, match=re.escape(sentence)):
        load_model(tmp_path)


def test_quantized_weights_are_not_quantized_again(tmp_path: Path) -> None:
    model = saved(tmp_path, "int8")
    with pytest.raises(UserError, match="quantized already"):
        load_model(tmp_path, quantize="int4")
    with pytest.raises(UserError, match="quantized already"):
        quantize_model(model, "int4")


def test_a_failed_save_keeps_the_former_folder(tmp_path: Path) -> None:
    saved(tmp_path, "int8")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = decoder(WIDE)
    quantize_model(model, "int4")
    model.blocks[1].attn.q.codes = None  # causes an error while tensors are written
    with pytest.raises(AttributeError):
        save_model(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
