"""Weight-only quantization of a trained model: linear layers store integers and scales in place of their weights.

int8: one scale per output (a row of the weight). int4: one bf16 scale per group of 32 inputs, two weights per byte.
Activations are not quantized: x is multiplied by the dequantized weight.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.base.errors import UserError
from onward.kernels.quantized import GROUP, dequantize_weight
from onward.kernels.quantized_linear import quantized_linear  # noqa: F401  # which registers the operation
from onward.model.attachments import attach, keep_hooks
from onward.model.decoder import Decoder
from onward.model.latent import LatentAttentionModule
from onward.model.layers import Linear

Precision = Literal["int8", "int4"]
ALREADY = "the weights are quantized already: load the model without quantize, or use it as it is"
ELEMENTS = 1 << 18  # number of elements of a weight to quantize at a time


def quantize_weight(weight: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Quantize a weight (O, I) to int8 or int4, rounded to nearest: return its codes and scales.

    int8: codes (O, I) from -127 to 127, scales (O,) in fp32. int4: codes (O, I / 2) as bytes, with the first half of a
    group in the low bits and its second half in the high bits, each plus 8; scales (O, I / 32) in bf16.
    """
    weight = weight.detach().float()
    if precision == "int8":
        scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        return (weight / scales[:, None]).round_().to(torch.int8), scales
    groups = weight.unflatten(1, (-1, GROUP))
    # the element of largest magnitude gets the code -8
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (extreme / -8).bfloat16()
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    integers = (groups * inverse).round_().clamp_(-8, 7).to(torch.int8)
    return pack(integers.flatten(1), "int4"), scales[:, :, 0]


def pack(integers: Tensor, precision: Precision) -> Tensor:
    """The codes of integers (O, I) given in int8; for int4, two codes per byte."""
    if precision == "int8":
        return integers
    low, high = (integers + 8).to(torch.uint8).unflatten(1, (-1, GROUP)).split(GROUP // 2, 2)
    return (low | (high << 4)).flatten(1)


def quantize_rows(
    read: Callable[[int, int], tuple[Tensor, Tensor]], start: int, end: int, inputs: int
) -> tuple[Tensor, Tensor]:
    """Codes and scales of the rows from `start` to `end` - 1, read a few rows at a time to limit memory."""
    results = [part.new_empty(end - start, *part.shape[1:]) for part in read(start, min(start + 1, end))]
    step = max(1, ELEMENTS // inputs)
    for first in range(start, end, step):
        last = min(first + step, end)
        for tensor, part in zip(results, read(first, last)):
            tensor[first - start : last - start] = part
    return results[0], results[1]


def quantize_tensor(weight: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Like `quantize_weight`, but a few rows at a time, with little temporary memory."""
    read = lambda start, end: quantize_weight(weight[start:end], precision)
    return quantize_rows(read, 0, len(weight), weight.size(1))


class DequantizedLinear(torch.autograd.Function):
    """The autograd function that multiplies x (..., I) by a quantized weight and adds a bias, with gradients of x and
    the bias only. The backward pass dequantizes the weight again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.dtype = x.dtype
        return F.linear(x, dequantize_weight(codes, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        codes, scales = ctx.saved_tensors
        bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return (grad @ dequantize_weight(codes, scales, grad.dtype)).to(ctx.dtype), None, None, bias


class QuantizedLinear(nn.Module):
    """A linear layer with an int8 or int4 weight, which cannot be trained: (..., I) -> (..., O). `codes` and `scales`
    are the weight as `quantize_tensor` returns it: codes (O, I) in int8, or (O, I / 2) with two int4 numbers in a
    byte."""

    codes: Tensor
    scales: Tensor

    def __init__(self, codes: Tensor, scales: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.precision: Precision = "int8" if codes.dtype == torch.int8 else "int4"
        self.out_features, self.in_features = len(codes), codes.size(1) * (1 if self.precision == "int8" else 2)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.bias = bias

    @staticmethod
    def of(layer: nn.Linear, precision: Precision) -> QuantizedLinear:
        return QuantizedLinear(*quantize_tensor(layer.weight, precision), layer.bias)

    @property
    def weight(self) -> Tensor:
        dtype = torch.float32 if self.bias is None else self.bias.dtype
        return dequantize_weight(self.codes, self.scales, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return DequantizedLinear.apply(x, self.codes, self.scales, self.bias)
        return torch.ops.onward.quantized_linear(x, self.codes, self.scales, self.bias)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.precision}, in_features={self.in_features}, out_features={self.out_features}"


def quantize_model(model: nn.Module, precision: str) -> list[str]:
    """Replace the linear layers of a model by quantized layers, in place; `precision` is int8 or int4. Returns the
    names of the layers that are not replaced; see `choose_layers`."""
    chosen, kept = choose_layers(model, precision)
    layers: Any = {name: model.get_submodule(name) for name in chosen}
    replace_layers(model, {name: QuantizedLinear.of(layers[name], kind) for name, kind in chosen.items()})
    return kept


def replace_layers(model: nn.Module, layers: Mapping[str, QuantizedLinear]) -> None:
    for name, layer in layers.items():
        keep_hooks(model.get_submodule(name), layer)
        model.set_submodule(name, layer)
    counts = Counter(layer.precision for layer in layers.values())
    if counts:
        attach(model, "quantization", ", ".join(f"{count} layers in {kind}" for kind, count in counts.items()))


def choose_layers(model: nn.Module, precision: str) -> tuple[dict[str, Precision], list[str]]:
    """Return the linear layers to quantize, {name: precision}, and the names of the linear layers that cannot be
    quantized: for int4, those whose number of inputs is not a multiple of 32.

    A head tied to the embedding becomes int8. Embeddings, norms, routers and stacks of experts are
    not quantized, nor are the projections of latents to keys and values, because decoding multiplies them with queries
    and outputs instead of latents (`LatentAttentionModule.absorbed`). Raises a UserError for an unknown precision, for
    a model that is quantized already, and for pruned or parametrized weights.
    """
    if precision not in get_args(Precision):
        raise UserError(f"quantize is {precision!r}: choose int8 or int4")
    if is_quantized(model):
        raise UserError(ALREADY)
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    absorbed = {id(module.kv) for module in model.modules() if isinstance(module, LatentAttentionModule)}
    chosen, kept = dict[str, Precision](), list[str]()
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) and id(layer) not in absorbed:
            check_stored(layer, "weight", f"{name}.weight")
            kind: Precision = "int8" if precision == "int8" or id(layer.weight) in tied else "int4"
            if kind == "int4" and layer.in_features % GROUP:
                kept.append(name)
            else:
                chosen[name] = kind
    return chosen, kept


@dataclass(frozen=True)
class LayerError:
    """The relative quantization error of one layer's weight, and its precision."""

    layer: str
    precision: Precision
    relative_error: float  # norm of the difference divided by the norm of the unquantized weight (Frobenius)


def layer_errors(plain: nn.Module, quantized: nn.Module) -> list[LayerError]:
    """The error of each quantized layer, in descending order; `plain` is the model before quantization."""
    squares = squared_errors(plain, quantized)
    layers = {name: quantized.get_submodule(name) for name in squares}
    errors = [LayerError(name, layer.precision, ratio(squares[name])) for name, layer in layers.items()]  # type: ignore[arg-type]
    return sorted(errors, key=lambda one: -one.relative_error)


def squared_errors(plain: nn.Module, quantized: nn.Module) -> dict[str, Tensor]:
    """For each layer, the sums of squares (2,) of its weight's quantization error and of the weight in `plain`."""
    squares = {}
    for name, layer in quantized.named_modules():
        if isinstance(layer, QuantizedLinear):
            weight: Any = plain.get_submodule(name).weight
            step, sums = max(1, ELEMENTS // layer.in_features), torch.zeros(2, dtype=torch.float64)
            for start in range(0, layer.out_features, step):
                rows = slice(start, start + step)
                exact = weight[rows].detach().to(layer.codes.device).float()
                difference = dequantize_weight(layer.codes[rows], layer.scales[rows], torch.float32) - exact
                sums += torch.stack([difference.square().sum(), exact.square().sum()]).cpu()
            squares[name] = sums
    return squares


def ratio(sums: Tensor) -> float:
    """The relative error from the sums of squares of error and weight; 0 if the weight is 0."""
    return float((sums[0] / sums[1]).sqrt()) if sums[1] else 0.0


def check_stored(module: nn.Module, parameter: str, name: str) -> None:
    """Raise a UserError if the weight `name` is not a parameter of its module, because code of torch.nn.utils, such as
    `prune`, computes it from other tensors."""
    if parameter not in module._parameters:
        raise UserError(
            f"Cannot replace {name}, because it is computed from other parameters, by pruning or a parametrization: "
            "first call torch.nn.utils.prune.remove or parametrize.remove_parametrizations"
        )


def is_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def quantized_bytes(model: Decoder) -> tuple[int, int]:
    """The bytes of all weights of a quantized model, and of the same weights before quantization."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    own = [layer for name, layer in layers.items() if not (model.config.tied and name == "head")]
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    plain = sum(layer.in_features * layer.out_features for layer in own) * model.dtype.itemsize
    return size, size - sum(layer.codes.nbytes + layer.scales.nbytes for layer in layers.values()) + plain
