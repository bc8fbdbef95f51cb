"""Decoding steps on CUDA: the kernels of a step are captured once as a CUDA graph, and then launched together.

Shapes: B rows, T tokens of each, V vocabulary.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from weakref import ref

import torch
from torch import Tensor

from onward.compiled.recording import NotCompilable
from onward.kernels.llvm.kept import private_folder
from onward.model.cache import CacheView, KVCache
from onward.model.decoder import Decoder

LEAST = 256  # slots that a graph reads; those for longer rows read twice as many, and so on
Replay = Callable[[], Tensor]


def decoding_step(model: Decoder, tokens: Tensor, positions: Tensor, view: CacheView) -> Tensor:
    """The logits (B, T, V) for tokens (B, T) at positions (B, T)."""
    return model.logits(model.hidden_of_checked(tokens, positions, view))


def captured(step: Callable[[], Tensor]) -> Replay:
    """What repeats `step()` on the memory that it uses now; its result is the same tensor each time."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):  # what is made once, such as workspaces, cannot be made in a capture
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


class GraphStep:
    """A decoding step of T tokens in B rows as graphs, one for each number of slots that is read.

    Tokens and positions are copied into memory that the graphs read. Graphs are captured again where the cache is
    another one or has grown. A step that needs a value of a tensor on the host, as mixtures of experts do, cannot be
    captured. `fused`: torch.compile makes the kernels.
    """

    def __init__(
        self,
        model: Decoder,
        shape: tuple[int, int],
        *,
        fused: bool = False,
        capture: Callable[[Callable[[], Tensor]], Replay] = captured,
    ) -> None:
        self.model, self.capture = ref(model), capture  # which keeps these steps, and is not kept by them
        self.step = torch.compile(decoding_step) if fused else decoding_step
        self.tokens, self.positions = (torch.zeros(shape, dtype=torch.int64, device=model.device) for _ in range(2))
        self.graphs: dict[int, Replay] = {}  # by the number of slots
        self.cache: Callable[[], KVCache | None] = lambda: None
        self.capacity = 0  # of the cache when they were captured

    def run(self, tokens: Tensor, positions: Tensor, cache: KVCache, length: int) -> Tensor:
        """The logits (B, T, V) for tokens (B, T) at positions (B, T), all below `length`; the next run overwrites them.
        Raises NotCompilable."""
        if self.cache() is not cache or self.capacity != cache.capacity:
            self.graphs.clear()
            self.cache, self.capacity = ref(cache), cache.capacity
        model = self.model()
        assert model is not None, "a step is run for a model that is there"
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        slots = max(LEAST, 1 << (length - 1).bit_length())
        if slots not in self.graphs:
            view = cache.view(0, len(tokens), slots)
            with torch.cuda.device_of(self.tokens):
                self.graphs[slots] = self.capture(lambda: self.step(model, self.tokens, self.positions, view))
        return self.graphs[slots]()


@cache
def temporary_folder() -> str:
    """A folder of this process alone, for code that cannot be kept."""
    folder = tempfile.mkdtemp(prefix="onward-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def fused_step(model: Decoder, cache: KVCache, shape: tuple[int, int], folder: Path | None = None) -> GraphStep:
    """A step whose kernels torch.compile makes, now; a `folder` keeps them for the next start. The step is run at
    position 0 of the first B rows of the cache, which must be empty. Raises NotCompilable."""
    if folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_folder(folder) or temporary_folder())
    step, zeros = GraphStep(model, shape, fused=True), torch.zeros(shape, dtype=torch.int64, device=model.device)
    step.run(zeros, zeros, cache, shape[1])
    return step
