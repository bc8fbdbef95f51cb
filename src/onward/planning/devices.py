"""Well-known devices with the limits on their makers' data sheets.

Compared in November 2026 with copies of these sheets, since the makers' own pages were not at hand: b200 to a100 and
l40s with S. Bekman, Machine Learning Engineering, compute/accelerator (August 2026), which links the sheets; l4, v100
and t4 with tables of dealers; the two GeForce cards with cards of the same chips, scaled by units and clock.
"""

from dataclasses import dataclass

from onward.errors import UserError
from onward.fields import nearest


@dataclass(frozen=True)
class Device:
    """The limits of a device: bytes of memory, bytes read per second, and operations per second of dense products in
    bf16 (`flops`) and in fp32."""

    memory: float
    bandwidth: float
    flops: float  # in bf16, or in fp16 where there is no bf16
    fp32: float = 0.0  # 0: half of that, as TF32


DEVICES = {
    "b200": Device(180e9, 8.0e12, 2250e12),
    "h200": Device(141e9, 4.8e12, 989e12),
    "h100": Device(80e9, 3.35e12, 989e12),  # SXM
    "mi300x": Device(192e9, 5.3e12, 1307e12),
    "a100": Device(80e9, 2.039e12, 312e12),  # SXM
    "l40s": Device(48e9, 864e9, 362e12),
    "l4": Device(24e9, 300e9, 121e12),
    "v100": Device(32e9, 900e9, 125e12, 15.7e12),  # SXM2
    "t4": Device(16e9, 320e9, 65e12, 8.1e12),
    "rtx4090": Device(24e9, 1008e9, 165e12),
    "rtx3090": Device(24e9, 936e9, 71e12),
}
FLOPS = {name: device.flops for name, device in DEVICES.items()}


def device_flops(device: str, count: int = 1, share: float = 1.0) -> float:
    """Return the operations per second of `count` devices that reach a `share` of their peak. Raises a UserError for an
    unknown device."""
    if device not in FLOPS:
        raise UserError(f"device is {device!r}: {nearest(device, FLOPS)}")
    return count * share * FLOPS[device]
