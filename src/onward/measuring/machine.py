"""The machine of a plan: its memory, bandwidth and FLOPS, from a data sheet, from given limits, or measured."""

from __future__ import annotations

from dataclasses import replace

from onward.base.device import choose_device
from onward.base.errors import UserError
from onward.base.fields import nearest
from onward.config.decoder import DecoderConfig
from onward.measuring.generation import step_seconds
from onward.measuring.training import trial_share
from onward.planning.devices import DEVICES
from onward.planning.machine import Machine, measured_machine, same_flops

HERE = "auto", "cpu", "cuda", "mps"  # devices of this machine, which are measured


def machine_for(
    config: DecoderConfig,
    device: str = "auto",
    *,
    context: int,
    batch: int = 1,
    weights: str = "bfloat16",
    dtype: str = "bfloat16",
    precision: str = "bf16",
    memory: float = 0.0,
    bandwidth: float = 0.0,
    flops: float = 0.0,
    share: float | None = None,
) -> Machine:
    """The machine for which a decoder is planned: a name in DEVICES, with its data sheet, or a device of this machine,
    which is measured for some seconds while the decoder generates and trains. `memory`, `bandwidth` and `flops` (per
    second) and `share` override the device's values, unless they are 0 or None; with the first three, nothing is
    measured."""
    if device in DEVICES:
        known = DEVICES[device]
        sheet = same_flops(known.flops, known.fp32 or known.flops / 2)
        machine = Machine(device, "data sheet", known.memory, known.bandwidth, sheet)
        machine = replace(machine, link=known.link, network=known.network)
    elif device not in HERE:
        raise UserError(f"device is {device!r}: {nearest(device, (*HERE, *DEVICES))}")
    elif memory and bandwidth and flops:
        machine = Machine("a machine", "as given", memory, bandwidth, {})
    else:
        chosen = choose_device(device)
        machine = measured_machine((dtype, precision), chosen)
        step = step_seconds(config, weights, batch, chosen)
        reached = share or trial_share(config, precision, context, machine.flops[precision], chosen)
        machine = replace(machine, step_seconds=step, training_share=reached)
    if share:
        machine = replace(machine, training_share=share)
    if memory:
        machine = replace(machine, memory=memory)
    if bandwidth:
        machine = replace(machine, bandwidth=bandwidth, step_seconds=0.0)
    if flops:
        machine = replace(machine, flops=same_flops(flops, flops))
    if (memory or bandwidth or flops) and machine.source != "as given":
        machine = replace(machine, source=f"{machine.source}, with the figures given")
    return machine
