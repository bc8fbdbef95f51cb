"""The kernels for decoding equal their formulas in fp64, also for odd sizes, on this CPU and on CPUs without AVX."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from onward.kernels.llvm.products import BLOCK, TILE, products
from onward.kernels.operations import linear
from onward.model import Linear

PAIRS = [
    (w, d) for w in ("float32", "bfloat16", "int8", "int4") for d in ("float32", "bfloat16") if w in (d, "int8", "int4")
]
BOUND = {"float32": 3e-7, "bfloat16": 2**-8}  # rounding error of the result, relative to the sum of absolute products


def random_weight(weight_format: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in a format, its scales, and its values in fp64."""
    if weight_format in ("float32", "bfloat16"):
        weight = torch.randn(outputs, inputs, dtype=getattr(torch, weight_format))
        return weight, torch.empty(0), weight.double()
    if weight_format == "int8":
        codes, scales = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs)
        return codes, scales, codes.double() * scales.double()[:, None]
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scales, groups = torch.rand(outputs, inputs // 32).bfloat16(), codes.view(outputs, inputs // 32, 16)
    numbers = torch.cat([groups & 15, groups >> 4], -1).double() - 8
    return codes, scales, (numbers * scales.double()[..., None]).view(outputs, inputs)


@pytest.mark.parametrize("cpu", [None, pytest.param("x86-64", marks=pytest.mark.long)])
@pytest.mark.parametrize(("weight_format", "dtype"), PAIRS)
def test_products_equal_the_formula_and_do_not_depend_on_other_rows(weight_format: str, dtype: str, cpu: str | None):
    torch.manual_seed(0)
    kernel, kind = products(weight_format, dtype, True, cpu), getattr(torch, dtype)
    for outputs in 1, 3, 33:
        for inputs in (32, 64, 96, 224) if weight_format == "int4" else (1, 15, 16, 31, 64, 100, 130):
            weight, scales, exact = random_weight(weight_format, outputs, inputs)
            x, bias = torch.randn(10, inputs).to(kind), torch.randn(outputs).to(kind)
            results = list[Tensor]()
            for rows, threads in (10, 2), (3, 2), (9, 3), (1, 1):
                y = torch.full((rows, outputs), torch.nan, dtype=kind)
                addresses = (t.data_ptr() for t in (x, weight, scales, bias, y))
                kernel(*addresses, rows, outputs, inputs, outputs, threads)
                results.append(y)
                error = (y.double() - (x.double() @ exact.T + bias.double())[:rows]).abs()
                bound = BOUND[dtype] * (x.double().abs() @ exact.abs().T + bias.double().abs())[:rows]
                assert (error <= bound).all()
            first = 1 if weight_format.startswith("int") else 0  # a tile of integers may round differently
            assert all(torch.equal(y, results[i % 2 * first][: len(y)]) for i, y in enumerate(results))


@pytest.mark.parametrize("weight_format", ["bfloat16", "int8", "int4"])
def test_products_of_many_rows_do_not_depend_on_other_rows_and_threads(weight_format: str):
    torch.manual_seed(0)
    kernel, x, bias = (
        products(weight_format, "bfloat16", True),
        torch.randn(70, 288).bfloat16(),
        torch.randn(70).bfloat16(),
    )
    for outputs in 32, 70:  # whole tiles of a matrix unit, and a partial tile
        weight, scales, exact = random_weight(weight_format, outputs, 288)
        wanted = x.double() @ exact.T + bias[:outputs].double()
        bound = BOUND["bfloat16"] * (x.double().abs() @ exact.abs().T + bias[:outputs].double().abs())
        results = list[Tensor]()
        for rows, threads in (70, 1), (16, 2), (33, 3):
            y = torch.full((rows, outputs), torch.nan, dtype=torch.bfloat16)
            addresses = (t.data_ptr() for t in (x, weight, scales, bias, y))
            kernel(*addresses, rows, outputs, 288, outputs, threads)
            assert ((y.double() - wanted[:rows]).abs() <= bound[:rows]).all()
            results.append(y)
        assert all(torch.equal(y, results[0][: len(y)]) for y in results)


@pytest.mark.parametrize(("weight_format", "dtype"), PAIRS)
def test_the_last_block_of_rows_may_have_fewer_than_a_tile(weight_format: str, dtype: str):
    torch.manual_seed(0)
    inputs = BLOCK // TILE // 2  # a block then has three tiles
    kernel, x = products(weight_format, dtype, False), torch.randn(4 * TILE, inputs).to(getattr(torch, dtype))
    weight, scales, exact = random_weight(weight_format, 3 * TILE, inputs)
    bound = BOUND[dtype] * (x.double().abs() @ exact.abs().T)
    for rows in range(3 * TILE, 4 * TILE):
        y = torch.full((rows, 3 * TILE), torch.nan, dtype=x.dtype)
        addresses = (t.data_ptr() for t in (x, weight, scales, x, y))
        kernel(*addresses, rows, 3 * TILE, inputs, 3 * TILE, 2)
        assert ((y.double() - x[:rows].double() @ exact.T).abs() <= bound[:rows]).all()


@pytest.mark.parametrize("rows", [1, 4, 5, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_linear_without_gradients_equals_linear_with_them(rows: int, dtype: torch.dtype):
    torch.manual_seed(0)
    layer = Linear(70, 50).to(dtype)
    x = torch.randn(2, rows, 70, dtype=dtype)[:, :rows]
    with torch.no_grad():
        y = layer(x)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    assert torch.allclose(y.double(), exact, atol={torch.bfloat16: 2e-2}.get(dtype, 1e-6), rtol=0)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_linear_is_seen_by_a_counter_of_flops():
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear(torch.randn(1, 8), torch.randn(4, 8))
    assert counter.get_total_flops() == 2 * 8 * 4
