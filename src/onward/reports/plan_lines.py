"""A line of a plan, and the lines about its mesh: memory of a device, bytes that a device sends, and speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from onward.config.decoder import DecoderConfig
from onward.config.mesh import Mesh, divides_vocabulary
from onward.hub.names import size_of
from onward.planning.arrangements import StepTime
from onward.planning.memory import TrainingMemory
from onward.planning.traffic import SUM, Collective


@dataclass(frozen=True)
class Line:
    """A figure in its section, with the formula from which it is computed."""

    section: str
    what: str
    value: float  # in bytes, operations, tokens, hours, ...
    text: str  # the value in readable form
    by: str  # formula, or source of the figure


def number(section: str, what: str, value: float, by: str) -> Line:
    return Line(section, what, value, f"{value:.4g}" if value >= 1e6 else f"{value:,.0f}", by)


def size(section: str, what: str, value: int, by: str) -> Line:
    return Line(section, what, value, size_of(int(value)), by)


def memory_lines(section: str, memory: TrainingMemory, mesh: Mesh) -> Iterator[Line]:
    line, part = partial(size, section), "the device's part of the parameters"
    of_tokens, of_heads = mesh.context > 1, mesh.tensor > 1
    own = (
        " of its tokens" * of_tokens
        + "," * (of_tokens and of_heads)
        + " of its heads and feed-forward units" * of_heads
    )
    yield line("weights", memory.weights, f"4 bytes x {part}")
    yield line("gradients", memory.gradients, f"4 bytes x {part}")
    yield line("optimizer", memory.optimizer, "state of its part")
    yield line("activations", memory.activations, f"dry run{own}")
    if memory.gathered:
        yield line("gathered weights", memory.gathered, "embedding and head in 4 bytes, and two blocks")


def vocabulary_line(section: str, config: DecoderConfig, mesh: Mesh) -> Line:
    if divides_vocabulary(config, mesh.tensor):
        rows, how = config.vocab_size // mesh.tensor, f"vocab_size / {mesh.tensor}"
    else:
        rows, how = config.vocab_size, f"whole, since {mesh.tensor} does not divide {config.vocab_size:,}"
    return Line(section, "rows of embedding and head", rows, f"{rows:,} rows", how)


def traffic_lines(section: str, sent: list[Collective], mesh: Mesh) -> Iterator[Line]:
    """A line for each collective, and one for the bytes sent along each axis."""
    for one in sent:
        what = f"{one.kind} of {one.purpose}"
        times = f"in {one.calls:,} calls, " if one.calls > 1 else ""
        yield size(section, what, one.bytes, f"{times}among {one.devices} of {one.axis or 'all'}")
    for axis in vars(mesh):
        along = [one for one in sent if one.axis == axis]
        if along:
            n = along[0].devices
            rings = sorted({one.kind == SUM for one in along})
            how = " + ".join(
                (f"({n} - 1) / {n} x gathers and scatters", f"2 ({n} - 1) / {n} x sums")[ring] for ring in rings
            )
            how = "sends, and the loss" if axis == "pipeline" else how
            yield size(section, f"sent along {axis}", round(sum(one.sent for one in along)), how)


def time_lines(section: str, time: StepTime, tokens: int, mesh: Mesh) -> Iterator[Line]:
    def line(what: str, seconds: float, by: str) -> Line:
        return Line(section, what, seconds, f"{1e3 * seconds:,.4g} ms", by)

    turns = f" x (2 x {mesh.pipeline} - 1) turns" * (mesh.pipeline > 1)
    yield line("arithmetic", time.arithmetic, f"operations of a device{turns} / its share of the arithmetic")
    yield line("sent meanwhile", time.meanwhile, "along shard and replicate / bandwidth of the link or network")
    waiting = [axis for axis in ("context", "tensor", "pipeline") if getattr(mesh, axis) > 1]
    yield line("waited for", time.waiting, f"along {' and '.join(waiting or ['tensor'])} / bandwidth")
    yield line("step", time.seconds, "the longer of arithmetic and sent meanwhile, plus waited for")
    speed = tokens / time.seconds / mesh.count
    by = f"{tokens:,} tokens / step / {mesh.count}"
    yield Line(section, "tokens per second", speed, f"{speed:,.0f} of each device", by)
