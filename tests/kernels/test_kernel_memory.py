"""Kernels stay within the memory of their operands, whatever the default dtype and the number of threads."""

import ast
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onward
from onward import Decoder, DecoderConfig, KVCache, Request, Sampling, SelfAttention
from onward.compiled.interface import NotCompilable
from onward.compiled.steps import compile_step
from onward.generation import Proposal
from onward.generation.engine.sampler import Sampler
from onward.kernels.cross_entropy import cross_entropies, cross_entropy
from onward.kernels.operations import linear, rotate
from onward.kernels.quantized_linear import quantized_linear
from onward.model import GatedFeedForwardModule, RMSNormModule
from onward.model import attention as backends
from onward.model.mask import AttentionMask
from onward.transforms.quantize import quantize_weight

from support.decoders import DECODERS
from support.guard import SIDES, Case, kernels_used
from support.kernels import CASES, Plain


def assert_equals_pytorch(case: Case, side: str) -> None:
    torch.manual_seed(0)
    with kernels_used(side) as memory:
        for got, wanted, bound in case(memory):
            assert got.shape == wanted.shape
            largest = max(1.0, float(wanted.abs().max()))
            assert (got.double() - wanted.double()).abs().max() <= bound * largest
    assert memory.count, "no kernel was used"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CASES)
def test_kernel_stays_between_guard_pages(name: str, side: str) -> None:
    assert_equals_pytorch(CASES[name], side)


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("name", CASES)
def test_kernel_does_not_depend_on_the_default_dtype(name: str) -> None:
    assert_equals_pytorch(CASES[name], "end")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Yield a function that sets the number of PyTorch's threads; restore the number after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_kernel_with_several_threads_stays_between_guard_pages(name: str, threads: Callable[[int], None]) -> None:
    threads(3)
    assert_equals_pytorch(CASES[name], "end")


@torch.no_grad()
def test_program_follows_the_number_of_threads(threads: Callable[[int], None]) -> None:
    torch.manual_seed(0)
    # large enough for several threads
    config = replace(DECODERS["llama"], d_model=520, n_heads=8, n_kv_heads=8, d_head=64)
    with kernels_used("end") as memory:
        model = Decoder(config).eval()
        caches = [memory.cache(KVCache(config, 2, 12)) for _ in range(2)]
        threads(4)
        program: Any = compile_step(model, caches[0], (2, 1))

        def assert_step_equals(position: int) -> None:
            tokens, positions = torch.randint(config.vocab_size, (2, 1)), torch.full((2, 1), position)
            logits = program.run(tokens, positions, caches[0], 12)
            torch.testing.assert_close(logits, model(tokens, positions, caches[1]), rtol=1e-5, atol=1e-5)

        for position, count in enumerate((4, 1, 2, 3, 1)):
            threads(count)
            assert_step_equals(position)
            assert program.binding.scratch.size(0) == count

        def elsewhere() -> None:
            torch.set_num_threads(2)  # applies only to this Python thread
            with torch.no_grad():
                assert_step_equals(5)

        other = Thread(target=elsewhere)
        other.start()
        other.join()
        assert_step_equals(6)


@torch.no_grad()
def test_program_refuses_a_cache_of_another_form() -> None:
    config = DECODERS["llama"]
    model = Decoder(config).eval()
    program: Any = compile_step(model, KVCache(config, 2, 12), (2, 1))
    others = {
        "rows": KVCache(config, 1, 12),
        "torch.float32": KVCache(config, 2, 12, dtype=torch.bfloat16),
        "(2, 13, 2, 4)": KVCache(replace(config, n_kv_heads=4), 2, 12),
        "another kind": onward.PagedKVCache(config, 2, 12, blocks=9),
        "of another kind": KVCache(config, 2, 12, quantized=True),
    }
    for reason, cache in others.items():
        with pytest.raises(NotCompilable) as refusal:
            program.run(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64), cache, 1)
        assert reason in str(refusal.value)


def outcome(function: Callable[..., Tensor], *arguments: Any) -> Tensor | str:
    """The result of a function in fp64, or the type of its error."""
    try:
        return function(*arguments).detach().double()
    except Exception as error:
        return type(error).__name__


def assert_left_to_pytorch(function: Callable[..., Tensor], *arguments: Any) -> None:
    """Check that the result or error is the same with and without kernels."""
    found = []
    for watched in True, False:
        with kernels_used(), Plain() if watched else nullcontext():
            found.append(outcome(function, *arguments))
    plain, got = found
    if isinstance(plain, str) or isinstance(got, str):
        assert plain == got, [(t.dtype, t.shape, t.layout) for t in arguments if isinstance(t, Tensor)]
    else:
        torch.testing.assert_close(got, plain, rtol=5e-2, atol=5e-2)


DTYPES = torch.float32, torch.bfloat16
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "in another dtype": lambda t: t.to(torch.bfloat16 if t.dtype == torch.float32 else torch.float32),
    "in fp64": lambda t: t.double(),
    "in fp16": lambda t: t.half(),
    "every other": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "expanded": lambda t: t[..., :1].expand(t.shape),
    "inside of another": lambda t: torch.cat([t, t])[1 : 1 + len(t)],
    "negative": lambda t: torch.view_as_complex(torch.stack([t, t], -1)).conj().imag if t.dtype == torch.float32 else t,
    "sparse": lambda t: t.to_sparse(),
    "a parameter": lambda t: nn.Parameter(t, requires_grad=False),
    "of one row": lambda t: t[:1],
    "of one column": lambda t: t[..., :1],
    "one shorter": lambda t: t[:-1],
    "one narrower": lambda t: t[..., :-1].contiguous(),
    "one wider": lambda t: torch.cat([t, t[..., :1]], -1),
    "twice": lambda t: torch.cat([t, t]),
    "flat": lambda t: t.flatten(),
    "with a dimension more": lambda t: t[None],
    "a row": lambda t: t[0],
    "empty": lambda t: t[:0],
}


def nearly(*shapes: tuple[int, ...]) -> Iterator[list[Tensor]]:
    """Operands of these shapes, with one operand changed to another form."""
    for dtype, changed, form in product(DTYPES, range(len(shapes)), FORMS.values()):
        operands = [torch.randn(*shape).to(dtype) for shape in shapes]
        operands[changed] = form(operands[changed])
        yield operands


@torch.no_grad()
def test_products_take_only_operands_that_fit() -> None:
    for x, weight, bias in nearly((2, 32), (5, 32), (5,)):
        assert_left_to_pytorch(linear, x, weight, bias)
        assert_left_to_pytorch(linear, x, weight)


@torch.no_grad()
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_products_take_only_operands_that_fit(precision: Any) -> None:
    codes, scales = quantize_weight(torch.randn(4, 64), precision)
    for x, bias in nearly((2, 64), (4,)):
        assert_left_to_pytorch(quantized_linear, x, codes, scales, bias)
    x = torch.randn(3, 64)
    for form in FORMS.values():
        assert_left_to_pytorch(quantized_linear, x, codes, form(scales), None)
        assert_left_to_pytorch(quantized_linear, x, form(codes), scales, None)
    for inputs in 31, 33, 63, 65:
        assert_left_to_pytorch(quantized_linear, x[:, :1].expand(3, inputs), codes, scales, None)


@pytest.mark.parametrize("gradients", [False, True])
def test_norms_take_only_operands_that_fit(gradients: bool) -> None:
    for x, weight in nearly((2, 3, 20), (20,)):
        norm = RMSNormModule(20, 1e-6, 0.0)
        norm.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
        with torch.set_grad_enabled(gradients):
            assert_left_to_pytorch(norm, x)


def test_rotations_take_only_operands_that_fit() -> None:
    for table in (2, 3, 1, 4), (1, 3, 1, 4):
        for operands in nearly((2, 3, 2, 8), table, table):
            for tables in operands[1:], [t.float() for t in operands[1:]]:
                assert_left_to_pytorch(rotate, operands[0], *tables)


@pytest.mark.parametrize("gradients", [False, True])
def test_gates_take_only_operands_that_fit(gradients: bool) -> None:
    for x, *weights in nearly((3, 8), (12, 8), (12, 8), (8, 12)):
        mlp = GatedFeedForwardModule(8, 12, "silu", False, 0.0)
        for layer, weight in zip((mlp.gate, mlp.up, mlp.down), weights):
            layer.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
        with torch.set_grad_enabled(gradients):
            assert_left_to_pytorch(mlp, x)


def test_causal_windows_take_only_operands_that_fit() -> None:
    positions = torch.arange(16)[None]
    mask = AttentionMask(positions, positions, plain=True)
    for operands in nearly((2, 16, 2, 16), (2, 16, 2, 16), (2, 16, 2, 16)):
        q, k, v = (t.detach().requires_grad_(t.is_floating_point()) for t in operands)
        if q.shape[:2] == (2, 16):
            assert_left_to_pytorch(partial(backends.attend, mask=mask, scale=0.3), q, k, v)


def test_cross_entropies_take_only_operands_that_fit() -> None:
    for logits, targets in nearly((4, 9), (4,)):
        for dtype in torch.int64, torch.int32, torch.uint8, targets.dtype:
            ids = targets.abs().to(dtype)
            assert_left_to_pytorch(cross_entropy, logits.detach().requires_grad_(), ids)
            assert_left_to_pytorch(cross_entropies, logits.detach(), ids)


@torch.no_grad()
def test_sinks_of_another_form_are_left_to_pytorch() -> None:
    config = DecoderConfig(9, 8, 1, 2, attention=SelfAttention(sinks=True))
    model, tokens = Decoder(config).eval(), torch.randint(9, (2, 5))
    for form in FORMS.values():
        model.blocks[0].attn.attend.sinks = nn.Parameter(form(torch.randn(2)), requires_grad=False)
        assert_left_to_pytorch(model, tokens, torch.arange(5).expand(2, 5), KVCache(config, 2, 8, 5))


@pytest.mark.long
def test_every_access_of_a_kernel_is_within_its_operands() -> None:
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", "-m", "support.bounds"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 outside") == len(CASES)


@torch.no_grad()
def test_program_reads_no_row_that_an_embedding_lacks() -> None:
    config = DECODERS["gpt2"]
    with kernels_used("end") as memory:
        model = memory.model(Decoder(config).eval())
        cache = KVCache(config, 4, 12)
        program: Any = compile_step(model, cache, (4, 1))
        ids = torch.tensor([[0], [config.vocab_size], [-1], [1 << 60]])
        logits = program.run(ids, torch.zeros_like(ids), cache, 1)
    assert logits.isnan().all((1, 2)).tolist() == [False, True, True, True]


SOURCE = Path(onward.__file__).parent
IDENTITY = {  # files that compare the addresses of tensors but do not read memory
    "checkpoint/names.py",
    "checkpoint/peft/adapted_weights.py",
    "generation/cache/prefix_files.py",
    "generation/drafts/guess_program.py",
    "inspection/doctor/caching.py",
    "inspection/doctor/learning.py",
    "inspection/doctor/operations.py",
    "inspection/doctor/stream.py",
    "compiled/needed.py",
    "compiled/recording.py",
    "compiled/reuse.py",
    "compiled/fingerprint.py",
}


def attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_one_file_takes_addresses_and_allocates_what_kernels_write() -> None:
    """Excludes llama.cpp, a reference of `onward verify`, whose library gets separate memory."""
    taking, allocating = set(), set()
    for path in SOURCE.rglob("*.py"):
        name, tree = str(path.relative_to(SOURCE)), ast.parse(path.read_text(encoding="utf-8"))
        if attributes(tree) & {"data_ptr", "buffer_info"} and name not in IDENTITY:
            taking.add(name)
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                calls = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
                kernels = calls & {"address", "rows_address", "launch"}
                if kernels and any("empty" in attribute for attribute in attributes(function)):
                    allocating.add(f"{name} {function.name}")
    assert taking == {"kernels/memory.py", "inspection/references.py"}
    assert not allocating


EXTREMES = 0.0, -0.0, 1e-42, -1e-30, 3e-5, 1.0, -7.5, 80.0, -100.0, 3e4, -1e30, 3e38, math.inf, -math.inf, math.nan


def extreme_rows(*values: float, width: int = 37) -> Iterator[Tensor]:
    """Rows of small numbers with each of the values at the first, an inner and the last position."""
    for value, place in product(values, (0, 17, width - 1)):
        row = torch.linspace(-1, 1, width)
        row[place] = value
        yield row


def assert_same_numbers(function: Callable[..., Sequence[Tensor]], *arguments: Any) -> None:
    """The kernel gives PyTorch's results, including infinite and NaN values."""
    found = []
    for watched in True, False:
        with kernels_used(), Plain() if watched else nullcontext():
            found.append(function(*arguments))
    for plain, got in zip(*found):
        torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-6, equal_nan=True)


def gradients(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


def test_extreme_logits_have_the_cross_entropy_of_pytorch() -> None:
    targets = torch.tensor([0, 17, 36, 5])
    for row in extreme_rows(*EXTREMES):
        assert_same_numbers(gradients, lambda x: cross_entropy(x, targets, -100), row.repeat(4, 1))


def test_extreme_activations_have_the_norm_and_the_rotation_of_pytorch() -> None:
    norm = RMSNormModule(37, 1e-6, 0.0)
    for row in extreme_rows(*EXTREMES[:11], math.nan):
        assert_same_numbers(gradients, norm, row.repeat(2, 2, 1))
    cos, sin = torch.randn(2, 1, 2, 1, 18).sigmoid().unbind()
    for row in extreme_rows(*EXTREMES):
        assert_same_numbers(gradients, lambda x: rotate(x, cos, sin), row.repeat(1, 2, 1, 1))


def test_extreme_queries_and_values_have_the_attention_of_pytorch() -> None:
    positions = torch.arange(16)[None]
    attend = partial(backends.attend, mask=AttentionMask(positions, positions, plain=True), scale=0.1)
    others = torch.rand(2, 1, 16, 1, 16)
    for value in *EXTREMES[:8], math.nan:
        for place in (0, 7, 15):
            x = torch.rand(1, 16, 1, 16)
            x[0, place, 0, 3] = value
            assert_same_numbers(gradients, lambda q: attend(q, *others), x)
            assert_same_numbers(gradients, lambda v: attend(others[0], others[1], v), x)


def test_extreme_logits_draw_the_tokens_of_pytorch() -> None:
    # 3e38 becomes infinite in PyTorch when divided by a temperature of 0.5
    for value in (each for each in EXTREMES if each != 3e38):
        rows = list(extreme_rows(value))
        requests = [Request([1], Sampling(temperature=t), 5, seed=i) for i, t in enumerate((0, 0.5, 3))]
        sampler, plain = Sampler(), Sampler()
        plain.sample_plain = lambda *_: None  # type: ignore[method-assign]
        found = [each.sample(torch.stack(rows), requests, [Proposal()] * 3)[0] for each in (sampler, plain)]
        assert list(map(str, found[0])) == list(map(str, found[1]))
