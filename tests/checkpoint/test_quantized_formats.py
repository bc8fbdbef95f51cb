"""Each format of quantized weights is decoded as in its public description, and folders in this format load."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from onward import DecoderConfig, UserError
from onward.base.files import read_json, write_json
from onward.checkpoint.huggingface.quantized import dequantized
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model
from onward.checkpoint.names import LeftOut
from onward.checkpoint.weights import stored_tensors
from onward.families import read
from onward.transforms.quantize import QuantizedLinear

from support.decoders import decoder
from support.mlx_weights import Case, Stored, integers, mlx, mlx_floats, nvfp4_in_fp64

WIDE = DecoderConfig(vocab_size=40, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=96)
EXPERTS = Qwen3MoeConfig(
    vocab_size=40,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=12,
).to_dict()
TOKENS = torch.arange(12)[None]


def words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Codes packed into int32 along a dimension, starting at the lowest bits."""
    per = 32 // bits
    parts = codes.long().movedim(dim, 0).unflatten(0, (-1, per))
    packed = sum(parts[:, i] << bits * i for i in range(per))
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int().movedim(0, dim).contiguous()


def gptq(bits: int, size: int, version: str = "gptq", *, desc_act: bool = False, sym: bool = False) -> Case:
    ones = words(torch.ones(32 // bits), bits, 0)

    def make(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
        group_size = inputs if size == -1 else size
        groups = math.ceil(inputs / group_size)
        codes, scales = integers(0, 1 << bits, inputs, outputs), torch.rand(groups, outputs).half()
        zeros = torch.full((groups, outputs), 1 << (bits - 1)) if sym else integers(0, 1 << bits, groups, outputs)
        group = torch.arange(inputs) // group_size
        group = group[torch.randperm(inputs)] if desc_act else group
        meant = ((codes - zeros[group]).double() * scales[group].double()).T
        stored = {
            ".qweight": words(codes, bits, 0),
            ".qzeros": words(zeros, bits, 1) - ones * (version == "gptq"),  # with borrows between the fields
        }
        stored |= {".scales": scales} | ({".g_idx": group.int()} if desc_act or sym else {})
        return stored, meant

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": version}
    return config | {"desc_act": desc_act, "sym": sym}, make


def awq(size: int) -> Case:
    def make(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
        groups = inputs // (inputs if size == -1 else size)
        codes, zeros = integers(0, 16, inputs, outputs), integers(0, 16, groups, outputs)
        scales = torch.rand(groups, outputs).half()
        differences = codes - zeros.repeat_interleave(inputs // groups, 0)
        meant = (differences.double() * scales.double().repeat_interleave(inputs // groups, 0)).T
        order = [8 * (i // 8) + [0, 2, 4, 6, 1, 3, 5, 7][i % 8] for i in range(outputs)]
        return {
            ".qweight": words(codes[:, order], 4, 1),
            ".qzeros": words(zeros[:, order], 4, 1),
            ".scales": scales,
        }, meant

    return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}, make


def compressed(form: str, make_stored: Callable[[int, int], Stored], **weights: Any) -> Case:
    """Random tensors in a format of compressed-tensors, with the library's values or, for NVFP4, with values in
    fp64."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)

    def make(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
        stored = make_stored(outputs, inputs)
        local = {ending.removeprefix("."): tensor for ending, tensor in stored.items()}
        theirs = BaseCompressor.get_value_from_registry(form).decompress(local, scheme)["weight"].double()
        if "weight_global_scale" not in local:
            return stored, theirs
        meant = nvfp4_in_fp64(*(local[key] for key in ("weight_packed", "weight_scale", "weight_global_scale")))
        torch.testing.assert_close(theirs, meant, rtol=2**-6, atol=0)  # the library's result is in bf16
        return stored, meant

    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}, make


def scaled(dtype: torch.dtype, grid: Callable[[int, int], tuple[int, ...]], **options: Any) -> Case:
    kind = "int" if dtype == torch.int8 else "float"

    def stored(outputs: int, inputs: int) -> Stored:
        weight = integers(-128, 128, outputs, inputs).to(dtype)
        scales = torch.rand(grid(outputs, inputs)) + 0.1
        zeros = (
            {} if options.get("symmetric", True) else {".weight_zero_point": integers(-9, 9, *scales.shape).to(dtype)}
        )
        return {".weight": weight, ".weight_scale": scales} | zeros

    return compressed(f"{kind}-quantized", stored, num_bits=8, type=kind, **options)


def packed(bits: int, size: int | None, *, symmetric: bool) -> Case:
    def stored(outputs: int, inputs: int) -> Stored:
        groups, rows = inputs // (size or inputs), math.ceil(outputs * bits / 32) * 32 // bits
        zeros = words(integers(0, 1 << bits, rows, groups), bits, 0)
        return {
            ".weight_packed": words(integers(0, 1 << bits, outputs, inputs), bits, 1),
            ".weight_scale": torch.rand(outputs, groups),
            ".weight_shape": torch.tensor([outputs, inputs]),
        } | ({} if symmetric else {".weight_zero_point": zeros})

    how = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    return compressed("pack-quantized", stored, num_bits=bits, type="int", symmetric=symmetric, **how)


def nvfp4(outputs: int, inputs: int) -> Stored:
    return {
        ".weight_packed": integers(0, 256, outputs, inputs // 2).to(torch.uint8),
        ".weight_scale": (torch.rand(outputs, inputs // 16) * 400).to(torch.float8_e4m3fn),
        ".weight_global_scale": torch.tensor([700.0]),
    }


def mxfp4(outputs: int, inputs: int) -> Stored:
    bytes_ = integers(0, 256, outputs, inputs // 2).to(torch.uint8)
    return {".weight_packed": bytes_, ".weight_scale": integers(110, 130, outputs, inputs // 32).to(torch.uint8)}


def modelopt_nvfp4() -> Case:
    """ModelOpt's variant of NVFP4: the inverse of compressed-tensors' global scale, and other names."""
    _, make = compressed(
        "nvfp4-pack-quantized", nvfp4, num_bits=4, type="float", strategy="tensor_group", group_size=16
    )

    def renamed(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
        stored, meant = make(outputs, inputs)
        factor = 1 / stored.pop(".weight_global_scale")[0]
        return {".weight": stored.pop(".weight_packed"), ".weight_scale_2": factor.clone()} | stored, meant

    return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, renamed


def one_scale(method: str, ending: str) -> Case:
    def make(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
        weight, scale = torch.randn(outputs, inputs).to(torch.float8_e4m3fn), torch.rand(())
        return {".weight": weight, f".weight{ending}": scale}, weight.double() * scale.double()

    return {"quant_method": method, "weight_block_size": None}, make


def four_bits(kind: str, size: int, *, double: bool) -> Case:
    def make(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
        blocks, codes = math.ceil(outputs * inputs / size), integers(0, 16, outputs * inputs)
        numbers, maxima = torch.linspace(-1, 1, 16), torch.rand(blocks)
        state = {"quant_type": kind, "blocksize": size, "dtype": "float16", "shape": [outputs, inputs]}
        extra = {}
        if double:
            state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.25}
            kinds, nested = torch.linspace(-1, 1, 256), torch.rand(math.ceil(blocks / 8))
            quantized = integers(0, 256, blocks).to(torch.uint8)
            extra = {".weight.nested_absmax": nested, ".weight.nested_quant_map": kinds, ".weight.absmax": quantized}
            block = torch.arange(blocks) // 8
            maxima = kinds[quantized.long()].double() * nested[block].double() + 0.25
        meant = numbers[codes].double() * maxima.double().repeat_interleave(size)[: len(codes)]
        even = torch.cat([codes, codes.new_zeros(len(codes) % 2)]).view(-1, 2)
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return {
            ".weight": (even[:, :1] << 4 | even[:, 1:]).to(torch.uint8),
            ".weight.absmax": maxima.float(),
            ".weight.quant_map": numbers,
            f".weight.quant_state.bitsandbytes__{kind}": text,
        } | extra, meant.view(outputs, inputs)

    return {"load_in_4bit": True, "bnb_4bit_quant_type": kind} | (
        {"quant_method": "bitsandbytes"} if double else {}
    ), make


def eight_bits(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    weight, maxima = integers(-127, 128, outputs, inputs).to(torch.int8), torch.rand(outputs)
    stored = {".weight": weight, ".SCB": maxima, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, weight.double() * maxima.double()[:, None] / 127


F8 = torch.float8_e4m3fn
FP4 = {"num_bits": 4, "type": "float"}
CASES: dict[str, Case] = {
    "gptq": gptq(4, 32),
    "gptq symmetric": gptq(4, 16, sym=True),
    "gptq of one group": gptq(4, -1),
    "gptq with a smaller last group": gptq(8, 40),
    "gptq of 2 bits": gptq(2, 32, "gptq_v2"),
    "gptq desc_act": gptq(4, 16, desc_act=True),
    "gptq_v2 of 8 bits, desc_act": gptq(8, 32, "gptq_v2", desc_act=True),
    "awq": awq(16),
    "awq of one group": awq(-1),
    "fp8 by tensor": scaled(F8, lambda o, i: (1,), strategy="tensor"),
    "fp8 by channel": scaled(F8, lambda o, i: (o, 1), strategy="channel"),
    "fp8 by block": scaled(F8, lambda o, i: (o // 16, i // 32), strategy="block", block_structure=[16, 32]),
    "fp8 by group": scaled(F8, lambda o, i: (o, i // 16), strategy="group", group_size=16),
    "int8 by channel": scaled(torch.int8, lambda o, i: (o, 1), strategy="channel"),
    "int8 asymmetric": scaled(torch.int8, lambda o, i: (o, 1), strategy="channel", symmetric=False),
    "packed int4 asymmetric": packed(4, 16, symmetric=False),
    "packed int8 asymmetric": packed(8, None, symmetric=False),
    "packed int4 in groups of 16": packed(4, 16, symmetric=True),
    "nvfp4": compressed("nvfp4-pack-quantized", nvfp4, strategy="tensor_group", group_size=16, **FP4),
    "nvfp4 of modelopt": modelopt_nvfp4(),
    "mxfp4": compressed("mxfp4-pack-quantized", mxfp4, strategy="group", group_size=32, scale_dtype=torch.uint8, **FP4),
    "fp8 of modelopt": one_scale("modelopt", "_scale"),
    "fp8 with one scale": one_scale("fp8", "_scale_inv"),
    "fp8 with another name": one_scale("fp8", "_scale"),
    "mlx": mlx(4, 32),
    "mlx of 6 bits": mlx(6, 16, mode="affine"),
    "mlx of 3 bits": mlx(3, 32),
    **{f"{mode} of mlx": mlx_floats(mode) for mode in ("mxfp4", "mxfp8", "nvfp4")},
    "nf4": four_bits("nf4", 64, double=False),
    "nf4 with double quantization": four_bits("nf4", 64, double=True),
    "fp4 in blocks across rows": four_bits("fp4", 80, double=True),
    "int8 of bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, eight_bits),
}


@pytest.mark.parametrize("case", CASES)
def test_any_rows_of_a_weight_are_those_of_the_definition(case: str, tmp_path: Path) -> None:
    config, make = CASES[case]
    for seed, shape in enumerate([(32, 64), (48, 96), (16, 160)]):
        torch.manual_seed(seed)
        tensors, meant = make(*shape)
        save_file({f"layer{ending}": tensor for ending, tensor in tensors.items()}, tmp_path / "model.safetensors")
        stored = dequantized({"quantization_config": plain(config)}, stored_tensors(tmp_path))
        assert stored.keys() == {"layer.weight"}
        assert stored["layer.weight"].shape == list(shape)
        for start, end in [(0, shape[0]), (0, 1), (3, 4), (5, 15), (shape[0] - 3, shape[0])]:
            torch.testing.assert_close(
                stored["layer.weight"].rows(start, end).double(), meant[start:end], rtol=1e-6, atol=1e-6
            )


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """The config as read from config.json."""
    return json.loads(json.dumps(config, default=str))


def write(folder: Path, case: Case, hf: dict[str, Any] | None = None) -> Path:
    """Write two folders of one model, quantized and with the dequantized values; return the quantized folder."""
    torch.manual_seed(0)
    quantization, make = case
    save_model(decoder(read(hf)[1] if hf else WIDE), folder / "meant", hf)
    tensors, meant = Stored(), Stored()
    for name, tensor in load_file(folder / "meant" / "model.safetensors").items():
        if name.endswith("proj.weight"):
            stored, number = make(*tensor.shape)
            tensors |= {name.removesuffix(".weight") + ending: part for ending, part in stored.items()}
            meant[name] = number.float().contiguous()
        else:
            tensors[name] = meant[name] = tensor.clone()
    save_file(meant, folder / "meant" / "model.safetensors")
    (folder / "quantized").mkdir()
    save_file(tensors, folder / "quantized" / "model.safetensors")
    hf = read_json(folder / "meant" / "config.json") | {"quantization_config": plain(quantization)}
    write_json(folder / "quantized" / "config.json", hf)
    return folder / "quantized"


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_folder_gives_the_logits_of_the_dequantized_weights(case: str, tmp_path: Path) -> None:
    folder = write(tmp_path, CASES[case])
    ours, _ = load_model(folder, torch.float32)
    wanted = load_model(tmp_path / "meant", torch.float32)[0](TOKENS)
    kept = any(isinstance(module, QuantizedLinear) for module in ours.modules())
    assert kept == (case in ("int8 by channel", "int8 of bitsandbytes"))
    torch.testing.assert_close(ours(TOKENS), wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize("case", ["gptq desc_act", "awq", "nvfp4", "fp8 by channel", "int8 by channel", "nf4"])
def test_experts_are_read_one_matrix_at_a_time(case: str, tmp_path: Path) -> None:
    folder = write(tmp_path, CASES[case], EXPERTS)
    ours, _ = load_model(folder, torch.float32)
    wanted = load_model(tmp_path / "meant", torch.float32)[0](TOKENS)
    torch.testing.assert_close(ours(TOKENS), wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())


Q = "model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a layout of GPTQ": ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    "other bits of GPTQ": ("gptq", {"bits": 3}, "down_proj.weight is stored as"),
    "other groups of GPTQ": ("gptq", {"group_size": 64}, "in groups of 64"),
    "a layout of AWQ": ("awq", {"version": "gemv"}, "version 'gemv'"),
    "AWQ without zero points": ("awq", {"zero_point": False}, "zero_point False"),
    "blocks of another size": (
        "fp8 by block",
        {"config_groups": {"g": {"weights": {"block_structure": [64, 64]}}}},
        "down_proj.weight is stored as",
    ),
    "a rotation": ("gptq", {"rotation": "hadamard"}, "rotation 'hadamard'"),
    "another mode of MLX": ("mlx", {"mode": "nvfp8"}, "mode 'nvfp8'"),
    "integers of MLX as floats": ("mlx", {"mode": "mxfp4"}, "in mode mxfp4 with 4 bits in groups of 32"),
    "other groups of MXFP4": ("mxfp4 of mlx", {"group_size": 64}, "mode 'mxfp4', bits 4 and group_size 64"),
    "other bits of MLX": ("mlx", {"bits": 5}, "with 5 bits in groups of 32"),
    "sparse weights": ("nvfp4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_options_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, changes, sentence = REFUSED[case]
    config, make = CASES[name]
    folder = write(tmp_path, (config | changes, make))
    with pytest.raises(UserError) as error:
        load_model(folder)
    assert sentence in str(error.value)


def test_quantized_activations_and_caches_are_left_out_with_one_warning(tmp_path: Path) -> None:
    config, make = CASES["fp8 by tensor"]
    folder = write(tmp_path, (config | {"kv_cache_scheme": {"num_bits": 8}}, make))
    path = folder / "model.safetensors"
    scales = {f"{Q}.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(tensors | scales, path)
    with pytest.warns(LeftOut, match="kv_cache_scheme") as warned:
        load_model(folder)
    assert len([one for one in warned if issubclass(one.category, LeftOut)]) == 1


def test_a_bias_of_zeros_beside_a_layer_without_one_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path, CASES["gptq"])
    path = folder / "model.safetensors"
    for bias, fits in [(torch.zeros(64), True), (torch.ones(64), False)]:
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        path.unlink()
        save_file(tensors | {f"{Q}.bias": bias}, path)
        if fits:
            load_model(folder)
        else:
            with pytest.raises(UserError, match=r"a tensor .*bias that the model"):
                load_model(folder)


def test_a_module_of_mlx_may_have_sizes_of_its_own(tmp_path: Path) -> None:
    _, make = mlx(8, 16)
    tensors, meant = make(16, 64)
    save_file({f"layer{ending}": tensor for ending, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = {"group_size": 32, "bits": 4, "mode": "mxfp4", "layer": {"group_size": 16, "bits": 8}}
    stored = dequantized({"quantization": config}, stored_tensors(tmp_path))
    torch.testing.assert_close(stored["layer.weight"].rows(2, 9).double(), meant[2:9], rtol=1e-6, atol=1e-6)
