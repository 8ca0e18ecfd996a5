"""Accelerators and fabrics as the planner knows them: datasheets, nothing fitted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One GPU: dense TFLOP/s by type, memory in GiB and GB/s, units that run a tile at a time,
    and GB/s one way of the link to the GPUs of its domain."""

    peak: dict[str, float]
    memory_gib: float
    memory_gb_s: float
    units: int
    link_gb_s: float


_HOPPER = {"fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_BLACKWELL = {"fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0, "fp4": 9000.0}
_GRACE = {"fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0, "fp4": 10000.0}

# NVIDIA's datasheets: V100 SXM3, A100 SXM4, H100 and H200 SXM5, HGX B200, GB200 NVL72; memory as
# the driver reports it. h100_500w is a part with HBM2e and a power limit: its peak is the H100's.
DEVICES = {
    "v100": Device({"fp16": 125.0}, 31.7, 900, 80, 150),
    "a100": Device({"fp16": 312.0, "bf16": 312.0}, 79.2, 2039, 108, 300),
    "h100": Device(_HOPPER, 79.1, 3350, 132, 450),
    "h100_500w": Device(_HOPPER, 94.5, 2400, 132, 450),
    "h200": Device(_HOPPER, 139.8, 4800, 132, 450),
    "b200": Device(_BLACKWELL, 178.4, 7700, 148, 900),
    "gb200": Device(_GRACE, 184.0, 8000, 152, 900),
    "b300": Device({**_BLACKWELL, "fp4": 14000.0}, 268.0, 7700, 148, 900),
    "gb300": Device({**_GRACE, "fp4": 15000.0}, 277.0, 8000, 152, 900),
}

# GB/s one way of a GPU's share of its node's network.
FABRICS = {
    "hdr": 25.0,  # 8 × 200 Gb/s InfiniBand
    "hdr4": 12.5,  # 4 × 200 Gb/s
    "opa": 6.25,  # 4 × 100 Gb/s Omni-Path
    "roce": 25.0,  # 1,600 Gb/s a node
    "ndr": 50.0,  # 8 × 400 Gb/s
    "efa": 50.0,  # 3,200 Gb/s a node
    "edr": 12.5,  # 8 × 100 Gb/s
}
