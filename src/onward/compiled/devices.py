"""The implementation of compiled steps for each type of device."""

from __future__ import annotations

from collections.abc import Callable

from onward.compiled.graphs import GraphStep
from onward.compiled.interface import CompiledStep, NotCompilable
from onward.kernels.available import unavailable


def cpu() -> type[CompiledStep]:
    if reason := unavailable():
        raise NotCompilable(f"no compiler: {reason}")
    from onward.compiled.program import Program  # imports llvmlite

    return Program


IMPLEMENTATIONS: dict[str, Callable[[], type[CompiledStep]]] = {"cpu": cpu, "cuda": lambda: GraphStep}
