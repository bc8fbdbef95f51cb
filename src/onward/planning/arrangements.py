"""The meshes that a number of devices can form, and the speed to expect of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onward.config.decoder import DecoderConfig
from onward.config.mesh import Mesh, divides_vocabulary, undivided
from onward.planning.devices import MACHINE
from onward.planning.flops import part_sizes, training_flops
from onward.planning.machine import Machine
from onward.planning.traffic import Collective, collectives

SAFE = 0.9  # share of a device's memory that a plan may use


def arrangements(count: int, neighbors: int = MACHINE, tensor: Sequence[int] = (1,)) -> list[Mesh]:
    """List the meshes (ways in which `count` devices replicate or divide a model in training) that are worth comparing,
    with `neighbors` devices per machine. First replicas on all devices; then, for each size in `tensor` of tensor
    parallelism, shards (FSDP) within a machine and shards over all devices."""
    meshes = [Mesh(replicate=count)]
    for n in tensor:
        for shards in (neighbors // n, count // n):
            if shards > 0 and count % (shards * n) == 0:
                meshes.append(Mesh(replicate=count // (shards * n), shard=shards, tensor=n))
    return list(dict.fromkeys(meshes))


def pipelines(config: DecoderConfig, count: int, tensor: Iterable[int], neighbors: int = MACHINE) -> list[Mesh]:
    """List the meshes of `count` devices in which the stages of a pipeline are on different machines of `neighbors`
    devices, and shards and a tensor axis within a machine. For each size in `tensor`, the list has every number of
    stages that divides the number of machines, up to the decoder's number of blocks."""
    machines = count // neighbors
    stages = [p for p in range(2, min(machines, config.n_layers) + 1) if machines % p == 0 and count % neighbors == 0]
    return [Mesh(p, machines // p, shard=neighbors // n, tensor=n) for n in tensor for p in stages]


def context_axes(count: int, tensor: Iterable[int], length: int) -> list[Mesh]:
    """List the meshes of `count` devices in which a context axis of 2, 4 or 8 devices divides windows of `length`
    tokens: with each size in `tensor` of tensor parallelism, and shards over the other devices."""
    pairs = ((n, c) for n in tensor for c in (2, 4, 8) if count % (n * c) == 0 and length % (2 * c) == 0)
    return [Mesh(shard=count // (n * c), context=c, tensor=n) for n, c in pairs]


def tensor_sizes(config: DecoderConfig, count: int, neighbors: int = MACHINE) -> list[int]:
    """List the possible sizes of tensor parallelism for a decoder: numbers of devices that divide its layers evenly,
    and that are divisors both of `count`, the number of devices, and of `neighbors`, the number of devices in a
    machine."""
    common = math.gcd(count, neighbors)
    return [n for n in range(1, common + 1) if common % n == 0 and not undivided(config, n)]


@dataclass(frozen=True)
class StepTime:
    """The expected duration of a training step, in seconds: of the arithmetic, of communication that runs at the same
    time (of shards and replicas), and of communication for which the arithmetic waits (of a pipeline, context or tensor
    axis)."""

    arithmetic: float
    meanwhile: float
    waiting: float

    @property
    def seconds(self) -> float:
        """The expected duration of the step: the longer of arithmetic and simultaneous communication, plus the
        communication that arithmetic waits for."""
        return max(self.arithmetic, self.meanwhile) + self.waiting


def step_time(
    config: DecoderConfig,
    mesh: Mesh,
    machine: Machine,
    rows: int,
    length: int,
    *,
    precision: str = "bf16",
    recompute: bool = False,
    **options: Any,
) -> StepTime:
    """Estimate the time of a training step in which each device of `mesh` trains on one batch of `rows` windows of
    `length` tokens. `machine` gives the speeds; the other options are those of `collectives`. Communication counts as 0
    seconds if the speed of the machine's links is unknown."""
    meanwhile = waiting = 0.0
    options = {**options, "precision": precision, "recompute": recompute}
    for one in collectives(config, mesh, rows, length, **options) if machine.link else ():
        seconds = one.sent / bandwidth(one, mesh, machine)
        if one.axis in ("shard", "replicate"):
            meanwhile += seconds
        else:
            waiting += seconds
    head = 3 * sum(part.flops for part in part_sizes(config) if part.name == "head")
    whole = 0 if divides_vocabulary(config, mesh.tensor) else head  # operations of each process
    operations = whole + (training_flops(config, length, recompute) - whole) / mesh.tensor
    turns = (2 * mesh.pipeline - 1) / mesh.pipeline  # work and waiting of a stage, relative to its work
    seconds = turns * rows * length / mesh.context * operations / (machine.training_share * machine.peak(precision))
    return StepTime(seconds, meanwhile, waiting)


def bandwidth(collective: Collective, mesh: Mesh, machine: Machine) -> float:
    """Return the bytes per second that a device sends in a collective (such as an all-reduce): over the links of a
    machine if all devices that take part are in one machine, else over the network."""
    strides = {"replicate": mesh.tensor * mesh.shards, "pipeline": mesh.stage}
    stride = strides.get(collective.axis, mesh.tensor if collective.axis in ("shard", "context") else 1)
    return machine.link if stride * collective.devices <= MACHINE else machine.network
