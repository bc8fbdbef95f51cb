"""Where the time of a prompt goes: the parts of the model and of the engine, each without the parts that it calls."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

import onward
from benchmarks.decode.bench import Bench
from benchmarks.decode.models import prompt
from benchmarks.decode.peers import Onward
from benchmarks.decode.tables import Table
from onward import Decoder, Engine
from onward.model import Linear, attention, context, layers
from onward.model.layer_cache import LayerCache
from onward.planning import peak_flops
from onward.transforms.quantize import QuantizedLinear

TIMED: dict[str, Sequence[tuple[Any, str]]] = {
    "products": ((Linear, "forward"), (QuantizedLinear, "forward")),
    "attention": ((attention, "attend"),),
    "norms": ((layers, "rms_norm"),),
    "rotations": ((context, "rotate"),),
    "gates": ((layers, "gate"),),
    "writes to the cache": ((LayerCache, "update"),),
    "residuals, modules": ((layers.PreNormModule, "forward"),),
    "embedding, masks": ((Decoder, "hidden_of_checked"),),
    "head": ((Decoder, "logits"),),
    "engine": ((Engine, "step"),),
}


class Timer:
    """Adds up the seconds of each part, without the time of the parts that it calls; the head includes its product."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(TIMED, 0.0)
        self.inside = [0.0]  # seconds of the parts inside each open call
        self.part = ""  # part of the innermost open call

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.part == "head":
                return function(*args, **kwargs)
            outer, self.part = self.part, part
            self.inside.append(0.0)
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                taken = perf_counter() - start
                self.seconds[part] += taken - self.inside.pop()
                self.inside[-1] += taken
                self.part = outer

        return call

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part, places in TIMED.items():
                for owner, name in places:
                    stack.enter_context(patch.object(owner, name, self.around(part, getattr(owner, name))))
            yield


def parts(bench: Bench) -> Table:
    """The milliseconds that each part takes up to the first new token of a prompt, and the FLOP/s of the matrix
    products."""
    length = bench.sizes.prompt
    columns = ["precision", *TIMED, "all", "GFLOP/s of the products", "of the peak", "whole prompt, of the peak"]
    table = Table(f"A prompt of {length} tokens: ms of each part, medians", columns)
    with torch.device("meta"):
        layers = onward.Decoder(bench.sizes.config).blocks
    flops = 2 * length * sum(p.numel() for p in layers.parameters() if p.dim() > 1)
    for precision in bench.precisions:
        peer = Onward(bench.files, precision, rows=1)
        timers: list[Timer] = []
        for _ in range(2 + bench.rounds):
            timers.append(timer := Timer())
            with timer.running():
                peer.generate([prompt(bench.sizes.config, length)], 1)
        found = {part: median(timer.seconds[part] for timer in timers[2:]) for part in TIMED}
        rate, peak = flops / found["products"], peak_flops(peer.model.dtype, kernels=True)
        whole = sum(found.values())
        row = [1e3 * seconds for seconds in (*found.values(), whole)]
        table.rows.append([precision, *row, rate / 1e9, f"{rate / peak:.0%}", f"{flops / whole / peak:.0%}"])
    return table
