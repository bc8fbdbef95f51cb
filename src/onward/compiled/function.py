"""A function of tensors without a cache, as one program of machine code on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onward.compiled.interface import NotCompilable
from onward.compiled.linking import LinkedCalls
from onward.compiled.lowering import lower_operations
from onward.compiled.needed import needed
from onward.compiled.recording import record_function
from onward.kernels.available import unavailable


class CompiledFunction:
    """A `function` without arguments, compiled from its recorded operations to a sequence of kernels. It reads
    the tensors `inputs`, which the caller fills before each run, and `weights`, which may change in place; all are on a
    CPU. Raises NotCompilable if an operation has no kernel."""

    def __init__(self, function: Callable[[], Any], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        if reason := unavailable():
            raise NotCompilable(f"no compiler: {reason}")
        self.kept = [*inputs, *weights]  # the program contains the addresses of these tensors
        self.recording = record_function(function)
        self.calls = lower_operations(needed(self.recording, self.kept))
        self.linked, self.threads = LinkedCalls(self.calls, None), 0

    def run(self) -> Any:
        """Compute and return the result, which the next run overwrites."""
        if self.threads != (threads := torch.get_num_threads()):
            for call in self.calls:
                call.arguments.threads = threads if call.parallel else 1
            self.threads = threads
        self.linked.run()
        return self.recording.result
