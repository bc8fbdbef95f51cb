"""A machine that lacks a requirement uses plain steps, with a warning; compiler bugs raise errors."""

import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import llvmlite.binding as llvm
import pytest
import torch

from onward import Decoder, Engine, KVCache, Request, Sampling
from onward.compiled import elementwise, linking, lowering
from onward.compiled.interface import NotCompilable
from onward.compiled.steps import compile_step
from onward.kernels import available, operations, requirements, self_test
from onward.kernels import draws as draws_of
from onward.kernels.available import NoCompiler, unavailable
from onward.kernels.llvm import cached_attention, draws, products, units
from onward.kernels.llvm.code import FLOATS
from onward.kernels.requirements import lacking

from support.decoders import DECODERS

CACHED = unavailable, operations.product_kernel


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Clear the cached state of the compiler before and after each test."""
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


def failing(error: Exception) -> Callable[..., None]:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    return fail


def without_llvmlite(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)


def without_its_library(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "llvmlite").mkdir()
    (folder / "llvmlite" / "__init__.py").touch()
    (folder / "llvmlite" / "binding.py").write_text("raise OSError('Could not find/load shared object file')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)


LACKING: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], object], str]] = {
    "llvmlite": (without_llvmlite, "llvmlite cannot be imported"),
    "the library of llvmlite": (without_its_library, "Could not find/load shared object file"),
    "a target of LLVM": (
        lambda m, _: m.setattr(llvm.Target, "from_default_triple", failing(RuntimeError("No available targets"))),
        "LLVM does not know this processor .No available targets",
    ),
    "an engine of LLVM": (
        lambda m, _: m.setattr(llvm, "create_mcjit_compiler", failing(RuntimeError("no JIT"))),
        "LLVM does not know this processor .no JIT",
    ),
    "OpenMP": (
        lambda m, _: m.setattr(requirements, "openmp", lambda: SimpleNamespace(GOMP_parallel=0)),
        "the OpenMP of PyTorch has no omp_get_thread_num",
    ),
    "memory to execute": (
        lambda m, _: m.setattr(requirements, "may_execute", lambda: False),
        "forbids executing memory",
    ),
}


def generated(model: Decoder, compile_after: int | None) -> list[int]:
    engine = Engine(model, rows=1, compile_after=compile_after)
    request = engine.add(Request([1, 2, 3], Sampling(temperature=0), 6))
    list(engine.run())
    return request.tokens


@pytest.mark.parametrize("name", LACKING)
def test_what_this_machine_lacks_is_named_in_a_warning_and_steps_stay_plain(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Decoder(DECODERS["llama"]).eval()
    wanted = generated(model, None)
    for function in CACHED:
        function.cache_clear()
    take_away, reason = LACKING[name]
    take_away(monkeypatch, tmp_path)
    with pytest.warns(NoCompiler, match=reason) as caught:
        assert generated(model, 2) == wanted
    assert len(caught) == 1
    with pytest.raises(NotCompilable, match=f"no compiler: .*{reason}"):
        compile_step(model, KVCache(model.config, 1, 8), (1, 1))


def test_this_machine_lacks_nothing() -> None:
    assert lacking() == ""


MUTANTS: dict[str, tuple[object, str, Callable[..., object], Callable[[], None]]] = {  # by name of the faulty kernel
    "products with float32 in float32": (
        units.Unit,
        "add",
        lambda unit, code, a, b, total: code.fma(a, a, total),
        products.products.cache_clear,
    ),
    "attention in float32": (cached_attention, "exp", lambda code, x: x, cached_attention.attention.cache_clear),
}


@pytest.mark.parametrize("kernel", MUTANTS)
def test_a_wrong_kernel_on_an_untested_processor_leads_to_plain_steps(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Decoder(DECODERS["llama"]).eval()
    wanted = generated(model, None)
    owner, name, mutant, forget = MUTANTS[kernel]
    monkeypatch.setattr(owner, name, mutant)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for function in *(function.cache_clear for function in CACHED), forget:
        function()
    with pytest.warns(NoCompiler, match=f"on this processor .aarch64. the kernel for {kernel} differs") as caught:
        assert generated(model, 2) == wanted
    assert len(caught) == 1
    forget()


def test_only_processors_other_than_x86_64_test_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = list[str]()
    monkeypatch.setattr(self_test, "wrong_kernel", lambda: tested.append(platform.machine()) or "")
    for machine in "x86_64", "AMD64", "arm64":
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        unavailable.cache_clear()
        assert unavailable() == unavailable() == ""
    assert tested == ["arm64"]


def test_the_self_test_finds_nothing_wrong_with_this_processor_and_keeps_the_random_state() -> None:
    state = torch.get_rng_state()
    assert self_test.wrong_kernel() == ""
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux to deny it")
def test_a_service_that_must_not_execute_written_memory_is_noticed() -> None:
    code = (
        "import ctypes; from onward.kernels.requirements import may_execute\n"
        "assert may_execute()\n"
        "denied = ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0  # PR_SET_MDWE, since Linux 6.3\n"
        "assert not denied or not may_execute()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


DEFECTS = (
    AttributeError("no such method"),
    RuntimeError("LLVM IR parsing error"),
    OSError("wrong"),
    ImportError("wrong"),
)


@pytest.mark.parametrize("error", DEFECTS, ids=lambda error: type(error).__name__)
def test_a_defect_of_a_kernel_is_raised(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "products", failing(error))
    with pytest.raises(type(error), match=str(error)), torch.no_grad():
        operations.linear(torch.ones(1, 8), torch.ones(8, 8))
    monkeypatch.setattr(draws, "draws", failing(error))
    with pytest.raises(type(error), match=str(error)):
        draws_of.draw_by_kernel(torch.zeros(1, 8), None, [1.0], [0], [0])
    monkeypatch.undo()
    monkeypatch.setitem(lowering.OPERATIONS, "silu", failing(error))
    with pytest.raises(type(error), match=str(error)):
        generated(Decoder(DECODERS["llama"]).eval(), 2)


def test_code_that_llvm_refuses_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_intrinsic(code, x):
        return code.intrinsic(f"llvm.fabs.{'v16f32' if x.type == FLOATS else 'f32'}", x.type, [x, x])

    monkeypatch.setitem(lowering.OPERATIONS, "silu", elementwise.unary(of_intrinsic))
    monkeypatch.setattr(linking, "KERNELS", {})  # hide kernels of other tests
    with pytest.raises(RuntimeError, match="incorrect argument type"):
        generated(Decoder(DECODERS["llama"]).eval(), 2)


def test_no_import_of_our_own_is_tried() -> None:
    """A defect in an imported module of Onward would be mistaken for a missing requirement."""
    for path in Path(available.__file__).parents[2].rglob("*.py"):
        for part in re.split(r"^ *try:$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            tried = re.split(r"^ *(?:except|finally)\b", part, maxsplit=1, flags=re.MULTILINE)[0]
            assert not re.search(r"^ *(?:from|import) onward", tried, re.MULTILINE), path
