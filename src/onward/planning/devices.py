"""Well-known devices with the limits on their makers' data sheets.

Compared in November 2026 with copies of these sheets, since the makers' own pages were not at hand: b200 to a100 and
l40s with S. Bekman, Machine Learning Engineering, compute/accelerator (github.com/stas00/ml-engineering, August 2026),
which links the sheets; l4 and t4 with tables of dealers; v100 with NVIDIA's white paper on A100, rtx4090 and rtx3090
with those on Ada and GA102 (fp16 products, summed in fp32, without sparsity), as quoted in public repositories.

Links are counted in one direction: NVLink and Infinity Fabric as on the sheets, else PCIe with 16 lanes. The network is
an adapter for each device: 400 Gb/s as in a DGX H100, 200 Gb/s as in a DGX A100 and for l40s, else 100 Gb/s.
"""

from dataclasses import dataclass

from onward.base.errors import UserError
from onward.base.fields import nearest


@dataclass(frozen=True)
class Device:
    """The limits of a device: memory in bytes, bandwidths in bytes per second, and operations per second."""

    memory: float
    bandwidth: float
    flops: float  # operations per second in bf16, or in fp16 on devices without bf16
    link: float
    network: float
    fp32: float = 0.0  # operations per second in fp32; 0: half of `flops`, as with TF32


DEVICES = {
    "b200": Device(180e9, 8.0e12, 2250e12, 900e9, 50e9),
    "h200": Device(141e9, 4.8e12, 989e12, 450e9, 50e9),
    "h100": Device(80e9, 3.35e12, 989e12, 450e9, 50e9),  # SXM
    "mi300x": Device(192e9, 5.3e12, 1307e12, 448e9, 50e9),
    "a100": Device(80e9, 2.039e12, 312e12, 300e9, 25e9),  # SXM
    "l40s": Device(48e9, 864e9, 362e12, 32e9, 25e9),
    "l4": Device(24e9, 300e9, 121e12, 32e9, 12.5e9),
    "v100": Device(32e9, 900e9, 125e12, 150e9, 12.5e9, 15.7e12),  # SXM2
    "t4": Device(16e9, 320e9, 65e12, 16e9, 12.5e9, 8.1e12),
    "rtx4090": Device(24e9, 1008e9, 165e12, 32e9, 12.5e9),
    "rtx3090": Device(24e9, 936e9, 71e12, 32e9, 12.5e9),
}
MACHINE = 8  # number of devices of a machine, which `link` connects
FLOPS = {name: device.flops for name, device in DEVICES.items()}


def device_flops(device: str, count: int = 1, share: float = 1.0) -> float:
    """Operations per second of `count` devices that reach `share` (0 to 1) of their peak in bf16 or, on devices without
    bf16, in fp16."""
    if device not in FLOPS:
        raise UserError(f"device is {device!r}: {nearest(device, FLOPS)}")
    return count * share * FLOPS[device]
