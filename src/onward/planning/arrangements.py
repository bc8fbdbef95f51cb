"""The meshes that a number of devices can form, and the speed to expect of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onward.config.decoder import DecoderConfig
from onward.config.mesh import Mesh, divides_vocabulary, undivided
from onward.planning.devices import MACHINE
from onward.planning.flops import part_sizes, training_flops
from onward.planning.machine import Machine
from onward.planning.traffic import Collective, collectives

SAFE = 0.9  # the share of a device's memory that a training may plan to use


def arrangements(count: int, neighbors: int = MACHINE, tensor: Sequence[int] = (1,)) -> list[Mesh]:
    """List meshes (arrangements of processes that replicate or divide a model) of `count` devices, of which `neighbors`
    are in one machine, in the order in which they divide more and send more: replicas, shards within a machine, shards
    over all; then the last two for each size in `tensor` of the tensor axis."""
    meshes = [Mesh(replicate=count)]
    for n in tensor:
        for shards in (neighbors // n, count // n):
            if shards > 0 and count % (shards * n) == 0:
                meshes.append(Mesh(count // (shards * n), shards, n))
    return list(dict.fromkeys(meshes))


def tensor_sizes(config: DecoderConfig, count: int, neighbors: int = MACHINE) -> list[int]:
    """List the sizes of a tensor axis that can divide a decoder and the devices of a machine: divisors of `count`, the
    number of devices, and of `neighbors`, those of a machine."""
    common = math.gcd(count, neighbors)
    return [n for n in range(1, common + 1) if common % n == 0 and not undivided(config, n)]


@dataclass(frozen=True)
class StepTime:
    """The expected seconds of a training step: of arithmetic, of communication that runs meanwhile (of shards and
    replicas), and of communication that arithmetic waits for."""

    arithmetic: float
    meanwhile: float
    waiting: float

    @property
    def seconds(self) -> float:
        """The expected duration of the step."""
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
    """Estimate the time of a step in which each device trains on one batch of `rows` windows of `length` tokens;
    options as of `collectives`. Communication takes no time on a machine whose links are not known."""
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
    return StepTime(rows * length * operations / (machine.training_share * machine.peak(precision)), meanwhile, waiting)


def bandwidth(collective: Collective, mesh: Mesh, machine: Machine) -> float:
    """Return the bytes per second that a device sends in a collective (such as an all-reduce): over the links of a
    machine if all devices that take part are in one machine, else over the network."""
    stride = {"tensor": 1, "shard": mesh.tensor, "replicate": mesh.tensor * mesh.shard}.get(collective.axis, 1)
    return machine.link if stride * collective.devices <= MACHINE else machine.network
