"""Training on many devices: the memory of one device, and the bytes that it sends in a step.

A mesh "8x4" has 8 groups of 4 devices. The groups are replicas that train on different windows and sum their gradients
(data parallel). Inside a group, either each matrix is divided by heads and by the width of the feed-forward, and all
devices work on the same windows (tensor parallel, Shoeybi et al. 2019, Megatron-LM); or weights, gradients and
optimizer state are divided, each device trains on its own windows, and the weights of a block are gathered when it is
computed (sharded data parallel, Rajbhandari et al. 2020, ZeRO stage 3; torch's FSDP). These are formulas: nothing here
runs on several devices.

An all-reduce of x bytes over n devices in a ring sends 2 (n - 1) / n x from each device; a gather or a scatter sends
half of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from onward.config.decoder import DecoderConfig, Experts, at, each
from onward.data.windows import Batch
from onward.errors import UserError
from onward.planning.memory import TrainingMemory, training_memory
from onward.planning.parameters import modules, parameters, size

Inside = Literal["tensor", "shards"]


@dataclass(frozen=True)
class Mesh:
    """An arrangement of devices for training: the number of groups, the devices of each group, and how a group divides
    its work (see the module)."""

    groups: int
    devices: int
    inside: Inside = "tensor"

    @classmethod
    def of(cls, text: str, inside: Inside) -> Mesh:
        """Parse a text such as 8x4 (groups x devices). Raises a UserError for any other form."""
        match = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", text.strip())
        if not match:
            raise UserError(f"mesh is {text!r}: write groups x devices of a group, such as 8x4")
        return cls(int(match[1]), int(match[2]), inside)

    @property
    def count(self) -> int:
        """The number of devices in all groups."""
        return self.groups * self.devices

    @property
    def batches(self) -> int:
        """The number of batches with different windows in a step."""
        return self.groups * (self.devices if self.inside == "shards" else 1)


@dataclass(frozen=True)
class Traffic:
    """The bytes that one device sends in a step, with their formulas."""

    inside: float  # to the devices of its group
    between: float  # to other groups
    formula_inside: str
    formula_between: str


def divided(config: DecoderConfig, devices: int) -> DecoderConfig:
    """Return the decoder of one device in a tensor-parallel group: its share of the heads, of the feed-forward and of
    the vocabulary. Key/value heads are repeated if there are fewer than devices. Raises a UserError if a size is not
    divisible by `devices`."""

    def share(name: str, number: int) -> int:
        if number % devices:
            raise UserError(
                f"mesh has {devices} devices in a group, which do not divide {name} {number:,}: choose others"
            )
        return number // devices

    def experts(part: Any) -> Any:
        if not isinstance(part, Experts):
            return part
        shared = share("d_shared", part.d_shared) if part.d_shared else 0
        return replace(part, d_ff=share("d_ff of experts", part.d_ff) if part.d_ff else 0, d_shared=shared)

    if config.n_kv_heads % devices and devices % config.n_kv_heads:
        raise UserError(f"mesh has {devices} devices in a group for {config.n_kv_heads} key/value heads: choose others")
    return replace(
        config,
        vocab_size=-(-config.vocab_size // devices),  # padded
        n_heads=share("n_heads", config.n_heads),
        n_kv_heads=max(1, config.n_kv_heads // devices),
        d_head=config.d_head,
        d_ff=share("d_ff", config.d_ff),
        mlp=tuple(map(experts, each(config.mlp))),
    )


def device_memory(
    config: DecoderConfig,
    mesh: Mesh,
    rows: int,
    length: int,
    loss: Callable[[Any, Batch], Any],
    *,
    precision: str = "bf16",
    **options: Any,
) -> TrainingMemory:
    """Compute the memory of training on one device, with `rows` windows per group or, if sharded, per device; options
    as in `training_memory`."""
    if mesh.inside == "tensor":
        return training_memory(divided(config, mesh.devices), rows, length, loss, precision=precision, **options)
    undivided = training_memory(config, rows, length, loss, precision=precision, **options)
    n = mesh.devices
    if n == 1:
        return undivided
    gathered = (
        2 * max(size(block) for block, _ in modules(config)[:-1]) * width(precision)
    )  # the block in use and the next block
    transient = undivided.at_loss + undivided.gradients // n
    return TrainingMemory(
        undivided.weights // n + gathered,
        undivided.gradients // n,
        undivided.optimizer // n,
        undivided.activations,
        undivided.at_loss,
        transient,
        undivided.holes * transient // undivided.transient,
    )


def width(precision: str) -> int:
    """Return the bytes of a number that is sent in this precision."""
    return 4 if precision == "fp32" else 2


def traffic(config: DecoderConfig, mesh: Mesh, rows: int, length: int, precision: str = "bf16") -> Traffic:
    """Compute the bytes that a device sends in one step: gradients are summed in fp32, everything else is sent in the
    precision of the matrix products."""
    n, share, total = mesh.devices, (mesh.devices - 1) / mesh.devices, 4 * parameters(config)
    between = 2 * (mesh.groups - 1) / mesh.groups * total / n
    ring = f"2 ({mesh.groups} - 1) / {mesh.groups} x 4 bytes x parameters / {n}: sum of gradients"
    if mesh.inside == "shards":
        inside = share * (2 * parameters(config) * width(precision) + total)
        return Traffic(
            inside, between, f"({n} - 1) / {n} x parameters x (2 gathers of {width(precision)} bytes + 4 bytes)", ring
        )
    vectors = rows * length * config.d_model * width(precision)
    additions = sum(at(config.block, layer).additions for layer in range(config.n_layers))
    inside = 2 * share * vectors * (2 * additions + 2)
    how = f"2 ({n} - 1) / {n} x hidden states x (2 x {additions} additions to the residual stream + embedding and head)"
    return Traffic(inside, between, how, ring)
