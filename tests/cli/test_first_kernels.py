"""The kernels that commands compile while importing PyTorch are those needed for the first token."""

import pytest

from onward import Decoder, Engine, Request, Sampling
from onward.cli.shared.loading import Loading, compile_first_kernels
from onward.kernels import operations
from onward.kernels.llvm import draws, products

from support.decoders import config


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    for kernel in products.products, draws.draws, operations.product_kernel:
        kernel.cache_clear()


def numbers_compiled() -> list[int]:
    """The numbers of compiled kernels for products and for draws."""
    return [kernel.cache_info().misses for kernel in (products.products, draws.draws)]


def test_the_first_token_needs_no_other_kernels() -> None:
    compile_first_kernels(Loading())
    assert numbers_compiled() == [1, 1]
    engine = Engine(Decoder(config()).eval(), compile_after=None)
    engine.add(Request([1, 2], Sampling(), max_new_tokens=1))
    assert len(list(engine.run())) == 1
    assert operations.product_kernel.cache_info().misses == 1
    assert numbers_compiled() == [1, 1]


@pytest.mark.parametrize(("options", "number"), [(Loading(device="cuda"), 0), (Loading(quantize="int8"), 1)])
def test_kernels_are_those_of_the_options(options: Loading, number: int) -> None:
    compile_first_kernels(options)
    assert numbers_compiled() == [number, number]
