"""Dequantizes published quantized formats while they are read. A table lists the tensors of a weight in each format."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onward.base.errors import UserError
from onward.checkpoint.huggingface.formats import bitsandbytes, compressed, float4, mlx, scaled, words
from onward.checkpoint.huggingface.formats.parts import Config, Parts
from onward.checkpoint.names import LeftOut
from onward.checkpoint.weights import StoredTensor
from onward.families import HF


@dataclass(frozen=True)
class Format:
    """A weight that is stored as several tensors, each with the name of its module and a suffix."""

    endings: Sequence[str]  # suffixes of its required tensors; the first identifies the format
    read: Callable[[str, Parts, Config], StoredTensor]
    optional: Sequence[str] = ()
    weight: str = ".weight"  # the ending of the weight itself


ELEMENTS = Format((".weight", ".weight_scale"), scaled.elements, (".weight_zero_point",))
METHODS: dict[str, Sequence[Format]] = {  # by quant_method; the first format whose tensors all exist is used
    "mxfp4": [Format(("_blocks", "_scales"), float4.experts_mxfp4, weight="")],
    "fp8": [Format(("", "_scale_inv"), scaled.fp8, weight=""), ELEMENTS],
    "fbgemm_fp8": [ELEMENTS],
    "compressed-tensors": [
        Format((".weight_packed", ".weight_scale", ".weight_global_scale"), float4.nvfp4),
        Format(
            (".weight_packed", ".weight_scale", ".weight_shape"),
            compressed.packed_integers,
            (".weight_zero_point", ".weight_g_idx"),
        ),
        Format((".weight_packed", ".weight_scale"), float4.mxfp4),
        ELEMENTS,
    ],
    "modelopt": [Format((".weight", ".weight_scale", ".weight_scale_2"), float4.nvfp4), ELEMENTS],
    "gptq": [Format((".qweight", ".qzeros", ".scales"), words.gptq, (".g_idx",))],
    "awq": [Format((".qweight", ".qzeros", ".scales"), words.awq)],
    "mlx": [Format((".weight", ".scales"), mlx.matrix, (".biases",))],
    "bitsandbytes": [
        Format(
            (".weight", ".weight.absmax", ".weight.quant_map"),
            bitsandbytes.four_bits,
            (*bitsandbytes.NESTED, *bitsandbytes.STATES),
        ),
        Format((".weight", ".SCB"), bitsandbytes.int8, (".weight_format",)),
    ],
}
OF_ACTIVATIONS = re.compile(
    r"[._](?:(?:input|activation|output)(?:_global)?|[qkv]|kv|prob)_(?:scale|zero_point)(?:_inv|_ub)?$"
)
PARTS = re.compile(r"\.(?:qweight|weight_scale|weight_scale_inv|weight_packed|weight\.absmax|SCB|W_q|_data|scales)$")
BITSANDBYTES = "load_in_4bit", "load_in_8bit"
CHECKS: dict[str, Callable[[Config], None]] = {"compressed-tensors": compressed.check_compressed}


def dequantized(hf: HF, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The stored tensors with each quantized weight as one tensor that is dequantized when read."""
    config = hf.get("quantization_config", hf.get("quantization"))  # the second is MLX's
    if config is None:
        if odd := next(filter(PARTS.search, stored), ""):
            raise UserError(
                f"config.json has no quantization_config, and {odd} is a part of a quantized weight: get the "
                "config.json that belongs to these weights"
            )
        return stored
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if isinstance(config, Mapping) and "quant_method" not in config and "group_size" in config and "bits" in config:
        method = "mlx"
    if isinstance(config, Mapping) and "quant_method" not in config and any(map(config.get, BITSANDBYTES)):
        method = "bitsandbytes"  # old files do not record it
    if not isinstance(config, Mapping) or not isinstance(method, str) or method not in METHODS:
        raise UserError(
            f"config.json has a quantization_config with quant_method {method!r}: Onward reads "
            f"{', '.join(METHODS)}, so get the weights in a format that is not quantized"
        )
    CHECKS.get(method, lambda config: None)(config)
    left = {name: tensor for name, tensor in stored.items() if not OF_ACTIVATIONS.search(name)}
    if keys := [*activation_keys(config), *(stored.keys() - left.keys())]:
        message = f"Only weights are quantized as in {method}: {keys[0]}, for activations or caches, is left out"
        warnings.warn(LeftOut(message), stacklevel=2)
    for name in list(left):
        for form in METHODS[method]:
            module = name.removesuffix(form.endings[0])
            if module + form.endings[0] == name and all(module + ending in left for ending in form.endings):
                endings = [*form.endings, *(ending for ending in form.optional if module + ending in left)]
                parts = {ending: left.pop(module + ending) for ending in endings}
                left[module + form.weight] = form.read(module + form.weight, parts, config)
                break
    return left


def activation_keys(config: Config) -> Iterator[str]:
    """The keys that ask for quantized activations or caches."""
    yield from (key for key in ("activation_scheme", "kv_cache_scheme", "kv_cache_quant_algo") if config.get(key))
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else []:
        keys = "input_activations", "output_activations"
        yield from (key for key in keys if isinstance(group, Mapping) and group.get(key))
