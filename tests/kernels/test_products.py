"""The kernels for decoding equal their formulas in fp64, also for odd sizes, on this CPU and on CPUs without AVX."""

import math

import pytest
import torch
from llvmlite.ir import VoidType
from torch import Tensor
from torch.nn import functional as F

from onward.kernels.llvm import matrix_products
from onward.kernels.llvm.compiler import arguments, callable_kernel
from onward.kernels.llvm.matrix import has_matrix_unit
from onward.kernels.llvm.products import BLOCK, TILE, products
from onward.kernels.memory import Kernel
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


def multiplied(
    weight_format: str, x: Tensor, weight: tuple[Tensor, Tensor], bias: Tensor | None, threads: int = 2
) -> Tensor:
    outputs, inputs = len(weight[0]), x.size(1)
    y = torch.full((len(x), outputs), torch.nan, dtype=torch.bfloat16)
    kernel = products(weight_format, "bfloat16", bias is not None)
    addresses = (t.data_ptr() for t in (x, *weight, x if bias is None else bias, y))
    kernel(*addresses, len(x), outputs, inputs, outputs, threads)
    return y


@pytest.mark.parametrize("weight_format", ["bfloat16", "int8", "int4"])
def test_products_of_many_rows_do_not_depend_on_other_rows_and_threads(weight_format: str):
    torch.manual_seed(0)
    x, bias = torch.randn(70, 320).bfloat16(), torch.randn(70).bfloat16()
    fewer = [(1, 1), (3, 2)] if has_matrix_unit(None) else []  # rows, threads
    for outputs in 32, 70:  # whole tiles of a matrix unit, and a partial tile
        *weight, exact = random_weight(weight_format, outputs, 320)
        wanted = x.double() @ exact.T + bias[:outputs].double()
        bound = BOUND["bfloat16"] * (x.double().abs() @ exact.abs().T + bias[:outputs].double().abs())
        results = list[Tensor]()
        for rows, threads in (70, 1), (16, 2), (33, 3), *fewer:
            y = multiplied(weight_format, x[:rows], (weight[0], weight[1]), bias[:outputs], threads)
            assert ((y.double() - wanted[:rows]).abs() <= bound[:rows]).all()
            results.append(y)
        assert all(torch.equal(y, results[0][: len(y)]) for y in results)


@pytest.mark.parametrize("weight_format", ["bfloat16", "int8", "int4"])
def test_products_of_numbers_of_all_sizes_equal_the_formula(weight_format: str):
    torch.manual_seed(0)
    x = torch.randn(7, 128)
    x[1], x[2], x[3], x[4, 5], x[5, 6], x[6] = x[1] * 1e-30, x[2] * 1e30, 0, math.inf, math.nan, x[6] ** 9
    codes, scales, exact = random_weight(weight_format, 40, 128)
    x = x.bfloat16()
    y, wanted = multiplied(weight_format, x, (codes, scales), None).double(), x.double() @ exact.T
    known = [0, 1, 2, 3, 6]
    assert ((y - wanted).abs() <= BOUND["bfloat16"] * (x.double().abs() @ exact.abs().T))[known].all()
    assert not y[4:6].isfinite().any()


@pytest.mark.parametrize("weight_format", ["bfloat16", "int8", "int4"])
def test_products_of_more_rows_than_a_block_equal_the_formula(weight_format: str):
    torch.manual_seed(0)
    inputs = matrix_products.BLOCK // 16  # with which a block of the matrix unit has two groups of 16 rows
    x, (*weight, exact) = torch.randn(35, inputs).bfloat16(), random_weight(weight_format, 33, inputs)
    y = multiplied(weight_format, x, (weight[0], weight[1]), None)
    bound = BOUND["bfloat16"] * (x.double().abs() @ exact.abs().T)
    assert ((y.double() - x.double() @ exact.T).abs() <= bound).all()


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


@pytest.mark.skipif(not has_matrix_unit(None), reason="this CPU has no matrix unit")
def test_products_keep_the_configuration_of_the_tiles_that_other_libraries_set() -> None:
    """llama.cpp sets it once per thread, and its next instruction would be an illegal one without it."""
    structure = arguments("TileConfiguration", "address")

    def instruction(name: str) -> Kernel:
        return callable_kernel(
            structure,
            lambda code, given, first, end: code.intrinsic(
                f"llvm.x86.{name}", VoidType(), [code.at(given.address, "int8", 0)]
            ),
        )

    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    load, store = instruction("ldtilecfg"), instruction("sttilecfg")
    empty, halves = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    halves[0], halves[16], halves[48] = 1, 32, 8  # palette 1; tile 0 has 8 rows of 32 bytes
    for given in halves, empty:
        load(given.data_ptr(), 1, 1)
        multiplied("bfloat16", x, (weight, weight), None, threads=1)
        found = torch.full((64,), 255, dtype=torch.uint8)
        store(found.data_ptr(), 1, 1)
        assert torch.equal(found, given)
