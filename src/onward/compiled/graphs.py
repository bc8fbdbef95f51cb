"""Decoding steps on CUDA: the kernels of a step are captured once as a CUDA graph, and then launched together.

Shapes: B rows, T tokens per row, V vocabulary.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Self
from weakref import ref

import torch
from torch import Tensor

from onward.compiled.interface import CompiledStep, NotCompilable, Step, StepShape, decoding_step
from onward.kernels.llvm.kept import private_folder
from onward.model.adapters import selection
from onward.model.cache import KVCache
from onward.model.decoder import Decoder

MIN_SLOTS = 256  # slots that the graph for the shortest rows reads; each further graph reads twice as many
Replay = Callable[[], Tensor]


def captured(step: Callable[[], Tensor]) -> Replay:
    """Capture the operations of `step()` as a CUDA graph; return a function that repeats them on the same memory and
    returns the same output tensor, overwritten each time. Raises NotCompilable if CUDA cannot capture an operation."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):  # allocates workspaces first, because a capture forbids it
            step()
            step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = step()
    except RuntimeError as error:
        raise NotCompilable(f"no CUDA graph: {str(error).splitlines()[0]}") from error

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class GraphStep(CompiledStep):
    """A decoding step as CUDA graphs, one for each first row and number of cache slots that a graph reads.

    Tokens and positions are copied into memory that the graphs read. Graphs are captured again for another cache, and
    after the cache has grown. A step cannot be captured if it needs a value of a tensor on the host, as mixtures of
    experts do, or if its rows use different LoRA adapters. With `fused`, torch.compile makes the kernels; `capture`
    makes a graph from a function.
    """

    def __init__(
        self,
        model: Decoder,
        shape: StepShape,
        step: Step = decoding_step,
        *,
        fused: bool = False,
        capture: Callable[[Callable[[], Tensor]], Replay] = captured,
    ) -> None:
        self.model, self.capture = ref(model), capture  # a weak reference: the steps do not keep the model alive
        self.step = torch.compile(step) if fused else step
        self.tokens, self.positions = (torch.zeros(shape, dtype=torch.int64, device=model.device) for _ in range(2))
        self.graphs: dict[tuple[int, int], Replay] = {}  # captured graphs, by first row and number of slots
        self.cache: Callable[[], KVCache | None] = lambda: None
        self.capacity = 0  # capacity of the cache when the graphs were captured

    @classmethod
    def compile(cls, model: Decoder, cache: KVCache, shape: StepShape, step: Step) -> Self:
        if len(selection(model).current.in_use) > 1:
            raise NotCompilable("rows with different adapters")
        return cls(model, shape, step)

    @classmethod
    def compile_ahead(cls, model: Decoder, cache: KVCache, shape: StepShape, step: Step, folder: Path | None) -> Self:
        """Make a step for `shape` (rows, tokens per row) whose kernels torch.compile generates now; `folder` keeps
        their code for the next start. The step is run at position 0 of the rows, which must be empty."""
        if folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_folder(folder) or temporary_folder())
        graphs, zeros = cls(model, shape, step, fused=True), torch.zeros(shape, dtype=torch.int64, device=model.device)
        graphs.run(zeros, zeros, cache, shape[1])
        return graphs

    def run(self, tokens: Tensor, positions: Tensor, cache: KVCache, length: int, first: int = 0) -> Tensor:
        if self.cache() is not cache or self.capacity != cache.capacity:
            self.graphs.clear()
            self.cache, self.capacity = ref(cache), cache.capacity
        model = self.model()
        assert model is not None, "a step runs only while its model exists"
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        key = first, max(MIN_SLOTS, 1 << (length - 1).bit_length())
        if key not in self.graphs:
            view = cache.view(first, first + len(tokens), key[1])
            with torch.cuda.device_of(self.tokens), cache.states.preserved():  # `capture` runs the step first
                self.graphs[key] = self.capture(lambda: self.step(model, self.tokens, self.positions, view))
        return self.graphs[key]()


@cache
def temporary_folder() -> str:
    folder = tempfile.mkdtemp(prefix="onward-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
