"""Quantized files are read as the values that their formats define, and the loaded model is saved without
quantization."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from onward import UserError
from onward.base.files import read_json, write_json
from onward.checkpoint.huggingface.quantized import dequantized
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model
from onward.checkpoint.weights import StoredTensor, stored_tensors

from support.decoders import DECODERS, decoder

MXFP4: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def read(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> dict[str, StoredTensor]:
    save_file(tensors, folder / "model.safetensors")
    return dequantized({"quantization_config": quantization}, stored_tensors(folder))


def random_mxfp4(experts: int, rows: int, groups: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    blocks = torch.randint(256, (experts, rows, groups, 16), dtype=torch.uint8)
    return blocks, torch.randint(90, 140, (experts, rows, groups), dtype=torch.uint8)


def mxfp4_in_fp64(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values (experts, rows, groups * 32), by the definitions of E2M1 and E8M0."""
    halves = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2).double()  # the low nibble is first
    sign, exponent, mantissa = 1 - 2 * (halves // 8), halves // 2 % 4, halves % 2
    magnitude = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2 ** (exponent - 1))
    return (sign * magnitude * 2 ** (scales.double() - 127)[..., None]).flatten(-2)


def random_fp8(rows: int, columns: int, block: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    weight = torch.randn(rows, columns).mul(50).to(torch.float8_e4m3fn)
    return weight, torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.01


def fp8_in_fp64(weight: Tensor, scales: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    result = weight.double()
    for i in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            result[i, j] *= scales[i // block[0], j // block[1]].double()
    return result


def test_mxfp4_equals_transformers_and_the_specification(tmp_path: Path) -> None:
    blocks, scales = random_mxfp4(3, 8, 2)
    stored = read(tmp_path, {"e.gate_blocks": blocks, "e.gate_scales": scales}, MXFP4)
    assert stored.keys() == {"e.gate"}
    assert stored["e.gate"].shape == [3, 64, 8]
    got = torch.cat([stored["e.gate"].rows(0, 2), stored["e.gate"].rows(2, 3)])
    assert torch.equal(got.double(), mxfp4_in_fp64(blocks, scales).mT)
    assert torch.equal(got.bfloat16(), convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize("shape", [(256, 128), (384, 512), (128, 384)])
def test_fp8_equals_transformers(shape: tuple[int, int], tmp_path: Path) -> None:
    weight, scales = random_fp8(*shape)
    stored = read(tmp_path, {"w.weight": weight, "w.weight_scale_inv": scales}, FP8)["w.weight"]
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=torch.bfloat16)
    assert torch.equal(stored.rows(0, shape[0]).bfloat16(), theirs)


@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(13, 20, (4, 8)), (3, 5, (4, 8)), (8, 8, (3, 3)), (130, 9, (128, 128))]
)
def test_fp8_equals_the_definition_with_cut_off_blocks(
    rows: int, columns: int, block: tuple[int, int], tmp_path: Path
) -> None:
    weight, scales = random_fp8(rows, columns, block)
    tensors = {"w.weight": weight, "w.weight_scale_inv": scales}
    stored = read(tmp_path, tensors, FP8 | {"weight_block_size": list(block)})["w.weight"]
    wanted = fp8_in_fp64(weight, scales, block)
    for start in range(rows):
        for end in range(start + 1, rows + 1):
            torch.testing.assert_close(stored.rows(start, end).double(), wanted[start:end], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_fp8_of_stacked_experts_has_blocks_in_each_expert(dtype: torch.dtype, tmp_path: Path) -> None:
    matrices = [random_fp8(20, 12, (8, 8)) for _ in range(3)]
    weight = torch.stack([matrix for matrix, _ in matrices])
    scales = torch.stack([scale * (i + 1) for i, (_, scale) in enumerate(matrices)]).to(dtype)
    tensors = {"experts.gate_up_proj": weight, "experts.gate_up_proj_scale_inv": scales}
    stored = read(tmp_path, tensors, FP8 | {"weight_block_size": [8, 8]})["experts.gate_up_proj"]
    wanted = torch.stack([fp8_in_fp64(w, s.float(), (8, 8)) for w, s in zip(weight, scales)])
    for start, end in [(0, 3), (1, 2)]:
        torch.testing.assert_close(stored.rows(start, end).double(), wanted[start:end], rtol=1e-6, atol=0)


def quantize_to_fp8(folder: Path) -> dict[str, Tensor]:
    """Replace each matrix of a folder except the embedding by random fp8 weights; return the values of all tensors."""
    meant = {}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim == 2 and "embed" not in name:
            weight, scales = random_fp8(tensor.size(0), tensor.size(1), (8, 8))
            tensors |= {name: weight, f"{name}_scale_inv": scales}
            meant[name] = fp8_in_fp64(weight, scales, (8, 8))
        else:
            tensors[name] = meant[name] = tensor.clone()
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    hf = read_json(folder / "config.json") | {"quantization_config": FP8 | {"weight_block_size": [8, 8]}}
    write_json(folder / "config.json", hf)
    return meant


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_fp8_folder_is_saved_dequantized(dtype: torch.dtype | None, tmp_path: Path) -> None:
    save_model(decoder(DECODERS["llama"], torch.bfloat16), tmp_path / "fp8")
    meant = quantize_to_fp8(tmp_path / "fp8")
    model, hf = load_model(tmp_path / "fp8", dtype)
    save_model(model, tmp_path / "plain", hf)
    got = load_file(tmp_path / "plain" / "model.safetensors")
    assert got.keys() == meant.keys()
    for name, tensor in got.items():
        assert tensor.dtype == (dtype or torch.bfloat16)
        torch.testing.assert_close(tensor.double(), meant[name].double(), rtol=1e-6 if dtype else 2**-8, atol=0)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    load_model(tmp_path / "plain")


@torch.no_grad()
def test_an_mxfp4_folder_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    theirs = GptOssForCausalLM(GptOssConfig(**sizes, **heads, max_position_embeddings=12)).eval()
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    parameters = dict(theirs.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks, scales = random_mxfp4(experts, rows, columns // 32)
        scales = scales // 10 + 110  # values of a realistic size
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameters[name].copy_(convert_moe_packed_tensors(blocks, scales))
    assert sum(name.endswith("_blocks") for name in tensors) == 4
    path.unlink()
    save_file(tensors, path)
    write_json(tmp_path / "config.json", read_json(tmp_path / "config.json") | {"quantization_config": MXFP4})
    ours, _ = load_model(tmp_path, torch.float32)
    tokens = torch.arange(12)[None]
    wanted = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), wanted, rtol=0, atol=2e-5 * wanted.abs().max().item())


REFUSED: dict[str, tuple[Any, str]] = {
    "another method": ({"quant_method": "hqq", "bits": 4}, "'hqq'"),
    "no method": ({"bits": 4}, "None"),
    "not a table": ("fp8", "quantization_config"),
    "a method that is a list": ({"quant_method": []}, "quantization_config"),
    "blocks of no size": (FP8 | {"weight_block_size": [0, 8]}, "weight_block_size [0, 8]"),
    "blocks read as one": (FP8 | {"weight_block_size": None}, "is not fp8 with one scale"),
    "blocks of one size": (FP8 | {"weight_block_size": [8]}, "weight_block_size [8]"),
    "other blocks": (FP8 | {"weight_block_size": [8, 4]}, "is not fp8 in blocks of 8 by 4"),
    "read as mxfp4": (MXFP4, "holds F8_E4M3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_formats_are_refused_by_name(case: str, tmp_path: Path) -> None:
    save_model(decoder(DECODERS["llama"], torch.bfloat16), tmp_path)
    quantize_to_fp8(tmp_path)
    quantization, sentence = REFUSED[case]
    write_json(tmp_path / "config.json", read_json(tmp_path / "config.json") | {"quantization_config": quantization})
    with pytest.raises(UserError) as error:
        load_model(tmp_path)
    assert sentence in str(error.value)


@pytest.mark.parametrize("spoil", ["blocks", "scales", "both"])
def test_mxfp4_of_other_shapes_is_refused_by_name(spoil: str, tmp_path: Path) -> None:
    blocks, scales = random_mxfp4(3, 8, 2)
    blocks = blocks[..., :8].contiguous() if spoil == "blocks" else blocks.int() if spoil == "both" else blocks
    scales = scales[:2].clone() if spoil == "scales" else scales
    with pytest.raises(UserError, match=r"e\.gate is stored as .* not MXFP4"):
        read(tmp_path, {"e.gate_blocks": blocks, "e.gate_scales": scales}, MXFP4)


def test_quantized_weights_without_a_config_are_refused_by_name(tmp_path: Path) -> None:
    save_model(decoder(DECODERS["llama"], torch.bfloat16), tmp_path)
    quantize_to_fp8(tmp_path)
    config = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", {key: config[key] for key in config if key != "quantization_config"})
    with pytest.raises(UserError, match=r"has no quantization_config, and .*_scale_inv is a part of a quantized"):
        load_model(tmp_path)
