"""Weights that another library quantized and saved are read with the values that this library itself dequantizes.

Most of these libraries (bitsandbytes, mlx, autoawq and gptqmodel) are not test dependencies; a test is skipped if its
library is missing. docs/interchange.md says which versions were compared.
"""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from onward.checkpoint.huggingface.quantized import dequantized
from onward.checkpoint.weights import stored_tensors

SHAPES = [(32, 64), (64, 96), (128, 256)]


def linear(outputs: int, inputs: int) -> nn.Linear:
    """A layer with outliers, and with a row of zeros."""
    torch.manual_seed(outputs)
    layer = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        layer.weight[1, :: inputs // 3] *= 30
        layer.weight[3] = 0
    return layer


def check(
    folder: Path, config: dict[str, Any], meant: Tensor, stored: dict[str, Tensor] | None = None, rtol: float = 1e-6
) -> None:
    """Read the weight from `folder`, after saving `stored` there if it is given, and compare ranges of rows with
    `meant`."""
    if stored is not None:
        save_file(
            {f"layer.{name}": tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors"
        )
    config = json.loads(json.dumps(config))  # as read from config.json
    weight = dequantized(config, stored_tensors(folder))["layer.weight"]
    assert weight.shape == list(meant.shape)
    for rows in [(0, len(meant)), (3, 4), (5, 15), (len(meant) - 3, len(meant))]:
        torch.testing.assert_close(weight.rows(*rows).double(), meant[slice(*rows)].double(), rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_of_bitsandbytes(kind: str, double: bool, shape: tuple[int, int], tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    weight = linear(*shape).weight.data.bfloat16()
    layer = bnb.nn.Linear4bit(shape[1], shape[0], bias=False, quant_type=kind, compress_statistics=double)
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type=kind, compress_statistics=double)
    layer.to("cpu")  # quantizes
    state = layer.weight.quant_state
    one_row = copy.copy(state)  # version 0.50.2 is wrong on CPUs if blocks cross rows
    one_row.shape, one_row.dtype = (1, weight.numel()), torch.float32
    meant = bnb.functional.dequantize_4bit(layer.weight.data, one_row).view(shape)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    check(tmp_path, {"quantization_config": config}, meant, layer.state_dict())


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_of_bitsandbytes(shape: tuple[int, int], tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear8bitLt(shape[1], shape[0], bias=False, has_fp16_weights=False)
    layer.load_state_dict({"weight": linear(*shape).weight.data.half()})
    layer.to("cpu")
    meant = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    check(tmp_path, {"quantization_config": config}, meant, layer.state_dict())


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_affine_integers_of_mlx(bits: int, size: int, shape: tuple[int, int], tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    if shape[1] % size:
        pytest.skip("mlx needs whole groups")
    weight = mx.array(linear(*shape).weight.detach().numpy()).astype(mx.bfloat16)
    words, scales, biases = mx.quantize(weight, group_size=size, bits=bits)
    parts = {"layer.weight": words, "layer.scales": scales, "layer.biases": biases}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), parts)
    exact = [scales.astype(mx.float32), biases.astype(mx.float32)]
    meant = torch.tensor(mx.dequantize(words, *exact, group_size=size, bits=bits).tolist())
    check(tmp_path, {"quantization": {"group_size": size, "bits": bits, "mode": "affine"}}, meant)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_floats_of_mlx(mode: str, shape: tuple[int, int], tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    words, scales = mx.quantize(mx.array(linear(*shape).weight.detach().numpy()), mode=mode)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"layer.weight": words, "layer.scales": scales})
    meant = torch.tensor(mx.dequantize(words, scales, mode=mode).astype(mx.float32).tolist())
    sizes = {"group_size": 16 if mode == "nvfp4" else 32, "bits": 8 if mode == "mxfp8" else 4}
    check(tmp_path, {"quantization": {**sizes, "mode": mode}}, meant)


def grid(weight: Tensor, size: int, bits: int, *, symmetric: bool = False) -> tuple[Tensor, Tensor]:
    """Scales and zero points (O, G) of each group of inputs."""
    groups = weight.unflatten(1, (-1, size))
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        scales = groups.abs().amax(-1).clamp(min=1e-4) / ((1 << bits - 1) - 1)
        return scales.half().float(), torch.full_like(scales, 1 << bits - 1)
    scales = ((most - least).clamp(min=1e-4) / ((1 << bits) - 1)).half().float()
    return scales, (-least / scales).round().clamp(0, (1 << bits) - 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [16, 32, -1])
def test_gemm_of_autoawq(size: int, shape: tuple[int, int], tmp_path: Path) -> None:
    gemm = pytest.importorskip("awq.modules.linear.gemm")
    config_of = pytest.importorskip("awq.models._config").AwqConfig
    dequantize_gemm = pytest.importorskip("awq.utils.packing_utils").dequantize_gemm
    layer, group = linear(*shape), shape[1] if size == -1 else size
    scales, zeros = (part.T.contiguous() for part in grid(layer.weight.data, group, 4))
    layer.weight.data = layer.weight.data.clamp((-zeros * scales).min(0).values[:, None])
    packed = gemm.WQLinear_GEMM.from_linear(layer, 4, group, scales=scales, zeros=zeros)
    meant = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, group).T
    config = config_of(q_group_size=size, w_bit=4, zero_point=True, version="gemm").to_transformers_dict()
    check(tmp_path, {"quantization_config": config}, meant, packed.state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptqmodel(
    bits: int, version: str, symmetric: bool, order: bool, shape: tuple[int, int], tmp_path: Path
) -> None:
    torch_linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    config_of = pytest.importorskip("gptqmodel").QuantizeConfig
    to_first_version = pytest.importorskip("gptqmodel.utils.model").convert_gptq_v2_to_v1_format_module
    (outputs, inputs), size = shape, 16
    layer = linear(*shape)
    options = {"bits": bits, "group_size": size, "sym": symmetric, "desc_act": order}
    packed = torch_linear(in_features=inputs, out_features=outputs, **options)
    group = torch.arange(inputs) // size
    group = group[torch.randperm(inputs)] if order else group
    scales, zeros = grid(layer.weight.data[:, group.argsort(stable=True)], size, bits, symmetric=symmetric)
    assert symmetric or (zeros == 0).any()  # zero points of 0, for which subtracting 1 borrows
    packed.pack_original(layer, scales, zeros, group.int())
    packed.post_init()
    packed.scales = packed.scales.float()
    meant = packed.dequantize_weight().T.detach()
    packed.scales = packed.scales.half()
    config = config_of(format=version, **options)
    if version == "gptq":
        to_first_version(packed, config)
    assert packed.qweight.shape == (math.ceil(inputs * bits / 32), outputs)
    check(tmp_path, {"quantization_config": config.to_dict()}, meant, packed.state_dict())


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "int4 asymmetric": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}),
    "int8 packed": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 by tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_compressed_tensors(form: str, shape: tuple[int, int], tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    layout, options = FORMS[form]
    if form == "mxfp4":
        options = options | {"scale_dtype": torch.uint8}
    args, weight = QuantizationArgs(**options), linear(*shape).weight.data
    size = {"channel": shape[1], "tensor": 0}.get(options["strategy"], options.get("group_size", 0))
    groups = weight.unflatten(1, (-1, size)) if size else weight.view(1, 1, -1)
    factor = {"global_scale": torch.tensor([448 * 6 / float(weight.abs().max())])} if form == "nvfp4" else {}
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, **factor)
    state = {"weight": weight, "weight_scale": scale if size else scale.view(1), "weight_zero_point": zero}
    state |= {f"weight_{name}": number for name, number in factor.items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = compressors.BaseCompressor.get_value_from_registry(layout)
    stored = compressor.compress(state, scheme)
    meant = compressor.decompress(stored, scheme)["weight"]
    group = {
        "targets": ["Linear"],
        "weights": {key: str(v) if key == "scale_dtype" else v for key, v in options.items()},
    }
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    rounded = 2**-7 if form == "nvfp4" else 1e-6  # the library returns bf16 for nvfp4
    check(tmp_path, {"quantization_config": config}, meant, stored, rounded)
