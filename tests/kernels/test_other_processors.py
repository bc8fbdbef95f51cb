"""Kernels are emitted for processors other than this one, verified and compiled by LLVM, and not run."""

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import pytest
import torch
from llvmlite import ir

from onward import Decoder, KVCache, PagedKVCache
from onward.compiled import linking
from onward.compiled.interface import NotCompilable, decoding_step
from onward.compiled.program import Program
from onward.compiled.recording import record_step
from onward.kernels.llvm import cached_attention, causal, chosen, compiler, cross_entropy, draws, fused, products
from onward.transforms import quantize_model

from support.decoders import DECODERS
from support.grids import first, thinned

BF16 = {"bf16": True}
PROCESSORS: dict[str, tuple[str, str, dict[str, bool]]] = {  # LLVM's target, CPU and features
    "aarch64": ("aarch64-unknown-linux-gnu", "generic", {}),
    "neoverse": ("aarch64-unknown-linux-gnu", "neoverse-v1", BF16),
    "mac": ("arm64-apple-darwin", "apple-m1", {}),
    "mac with bf16": ("arm64-apple-darwin", "apple-m2", BF16),
    "x86-64": ("x86_64-unknown-linux-gnu", "x86-64", {}),  # without AVX
}
DTYPES = "float32", "bfloat16"
NORM = fused.NormForm(72, "bfloat16", "bfloat16", "bfloat16", 1e-5, 0.0)
WINDOWS = causal.Causal(4, 2, 32, "bfloat16", 0.2)
SCORES = cached_attention.ScoreOptions(window=7, chunked=False, scale=0.2, softcap=30.0, sinks=True, slopes=True)
KERNELS: list[tuple[Any, ...]] = [  # functions that compile a kernel, with their arguments
    *((products.products, dtype, dtype, True) for dtype in DTYPES),
    *((products.products, form, dtype, True) for form in ("int8", "int4") for dtype in DTYPES),
    *(
        (cached_attention.attention, cached_attention.AttentionForm(6, 2, 24, 40, dtype, SCORES, paged, 8, quantized))
        for dtype in DTYPES
        for paged, quantized in ((False, False), (True, False), (True, True))
    ),
    *((chosen.chosen, dtype, True) for dtype in DTYPES),
    *((draws.draws, "bfloat16", masked) for masked in (False, True)),
    (fused.rms_norm, NORM),
    (fused.rms_norm_gradient, NORM),
    (fused.rms_norm_weight_gradient, NORM),
    (fused.rotation, 4, 24, 10, "bfloat16"),
    (fused.gate, "gelu", "bfloat16"),
    *((fused.gate_gradient, activation, "bfloat16") for activation in fused.ACTIVATIONS),
    *((cross_entropy.cross_entropy, 300, "bfloat16", -100, gradient) for gradient in (True, False)),
    (causal.causal, WINDOWS),
    (causal.causal_gradient, WINDOWS),
    (linking.sequence,),
]


class Emitted:
    """Replaces `compiler.load`: compiles modules for another processor, and records the size of their code."""

    def __init__(self, processor: str) -> None:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        self.triple, cpu, self.features = PROCESSORS[processor]
        try:
            target = llvm.Target.from_triple(self.triple)
        except RuntimeError as error:
            pytest.skip(f"the LLVM of this llvmlite lacks {self.triple}: {error}")
        self.target = target.create_target_machine(cpu=cpu, opt=3)
        self.sizes: list[int] = []

    def optimized(self, module: ir.Module) -> Any:
        module.triple = self.triple
        return compiler.optimized(str(module), self.target)

    def __call__(self, module: ir.Module, cpu: str | None = None, folder: object = None) -> Any:
        self.sizes.append(len(self.target.emit_object(self.optimized(module))))
        return SimpleNamespace(get_function_address=lambda name: 0)


@pytest.fixture
def emitted_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Emitted]:
    def emitted(processor: str) -> Emitted:
        load = Emitted(processor)
        for module in compiler, linking:
            monkeypatch.setattr(module, "load", load)
        monkeypatch.setattr(linking, "KERNELS", {})
        monkeypatch.setattr(linking, "MODULES", [])
        monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: llvm.FeatureMap(load.features))
        return load

    return emitted


@pytest.mark.parametrize(("processor", "number"), thinned([*PROCESSORS], range(len(KERNELS)), times=2))
def test_every_kernel_is_valid_code_for_other_processors(processor: str, number: int, emitted_for) -> None:
    load, (kernel, *arguments) = emitted_for(processor), KERNELS[number]
    kernel.__wrapped__(*arguments)
    assert load.sizes.pop() > 0


@pytest.mark.parametrize(
    ("processor", "dtype", "used"),
    [
        ("aarch64", "float32", "fmla"),
        ("aarch64", "bfloat16", "fmla"),
        ("neoverse", "bfloat16", "bfdot"),
        ("mac with bf16", "bfloat16", "bfdot"),
    ],
)
def test_products_on_arm_compute_in_neon_registers(processor: str, dtype: str, used: str, emitted_for) -> None:
    """Also on a CPU with SVE, whose registers have names with z."""
    module, load = ir.Module(), emitted_for(processor)
    compiler.add_kernel(module, "kernel", products.ProductArguments, products.emit(dtype, dtype, False))
    code = load.target.emit_assembly(load.optimized(module))
    found = re.findall(r"\t(fmla|bfdot)(\.4s)?\tv\d+", code)
    assert {name for name, _ in found} == {used}
    assert len(found) > 100
    assert not re.search(r"\t(fmla|fmad|bfdot)\tz\d+", code)


QUANTIZED = partial(KVCache, quantized=True)
FORMS: list[tuple[str, Any]] = [
    (form, kind) for form in ("bfloat16", "float32", "int8", "int4") for kind in (KVCache, PagedKVCache)
]
FORMS += [(form, QUANTIZED) for form in DTYPES]
STEPS = [("llama", form, kind) for form, kind in FORMS] + [
    (name, "bfloat16", KVCache) for name in DECODERS if name != "llama"
]


@pytest.mark.long
@pytest.mark.parametrize("step", first(1, STEPS))
def test_compiled_steps_are_valid_code_for_aarch64(step: tuple[str, str, Any], emitted_for) -> None:
    name, form, kind = step
    torch.manual_seed(0)
    model = Decoder(DECODERS[name]).eval().to(torch.bfloat16 if form == "bfloat16" else torch.float32)
    if form.startswith("int"):
        quantize_model(model, form)
    cache = kind(model.config, 1, 24, dtype=model.dtype, **({"blocks": 8} if kind is PagedKVCache else {}))
    load: Emitted | None = None
    try:
        recording = record_step(partial(decoding_step, model), cache, (1, 1))  # runs kernels for this processor
        load = emitted_for("aarch64")
        Program(recording, cache, list(model.parameters()))
    except NotCompilable:
        assert load is None or not load.sizes
    else:
        assert load.sizes


def test_kernels_of_this_test_are_all_kernels() -> None:
    """KERNELS lists every function of the kernel modules that compiles a kernel."""
    here = {kernel.__name__ for kernel, *_ in KERNELS}
    for module in cached_attention, causal, chosen, cross_entropy, draws, fused, products:
        cached = {name for name, value in vars(module).items() if hasattr(value, "__wrapped__")}
        own = {name for name in cached if vars(module)[name].__module__ == module.__name__}
        assert own <= here, own - here
