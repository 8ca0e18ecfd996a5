"""Lists the compute, memory and links of GPUs, from their datasheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

BLACKWELL = 10  # the major compute capability of NVIDIA's Blackwell


@dataclass(frozen=True)
class Device:
    """The datasheet of one kind of GPU.

    Attributes:
        name: the name in cluster files.
        pattern: regular expression for the name that the driver reports; "": no running device is
            recognised as this GPU.
        source: the document that the figures are from.
        peak: dense TFLOP/s by dtype with accumulation in fp32 (vendors also print twice that, for
            2:4 sparsity). fp64 is the rate of matrix units; fp32 is the rate of vector units, or of
            matrix units that multiply in true fp32.
        memory_gib: memory in GiB, as the driver reports it; 0: unknown.
        memory_gb_s: memory bandwidth in GB/s; 0: unknown.
        units: number of multiprocessors (compute units); 0: unknown.
        link_gb_s: GB/s in one direction to the GPUs of the same NVLink domain; 0: the planner has
            no constants for this GPU.
    """

    name: str
    pattern: str
    source: str
    peak: dict[str, float]
    memory_gib: float = 0.0
    memory_gb_s: float = 0.0
    units: int = 0
    link_gb_s: float = 0.0


def _peaks(half: float, **others: float) -> dict[str, float]:
    return {"fp16": half, "bf16": half, **others}


_A100 = _peaks(312.0, fp64=19.5, fp32=19.5, tf32=156.0)
_H100_SXM = _peaks(989.4, fp64=66.9, fp32=66.9, tf32=494.7, fp8=1978.9)
_H100_PCIE = _peaks(756.0, fp64=51.0, fp32=51.0, tf32=378.0, fp8=1513.0)
_HOPPER_NVL = _peaks(835.5, fp64=60.0, fp32=60.0, tf32=417.5, fp8=1670.5)
_B200 = _peaks(2250.0, fp64=37.0, fp32=75.0, tf32=1125.0, fp8=4500.0, fp4=9000.0)
_GB200 = _peaks(2500.0, fp64=40.0, fp32=80.0, tf32=1250.0, fp8=5000.0, fp4=10000.0)
_B300 = _peaks(2250.0, tf32=1125.0, fp8=4500.0, fp4=14000.0)
_GB300 = _peaks(2500.0, tf32=1250.0, fp8=5000.0, fp4=15000.0)
_L4 = _peaks(121.0, fp32=30.3, tf32=60.0, fp8=242.5)
_L40S = _peaks(362.0, fp32=91.6, tf32=183.0, fp8=733.0)
_RTX_4090 = _peaks(165.2, fp32=82.6, tf32=82.6, fp8=330.3)
_MI250X_GCD = _peaks(191.5, fp64=47.9, fp32=47.9)
_MI300X = _peaks(1307.4, fp64=163.4, fp32=163.4, tf32=653.7, fp8=2614.9)
_MI355X = _peaks(2516.6, fp32=157.3, fp8=5033.2)

# fmt: off
DATASHEETS = (  # if two patterns match a name, the first one counts
    Device("v100", "", "NVIDIA V100 SXM3 datasheet", {"fp16": 125.0}, 31.7, 900, 80, 150),
    Device("a100", r"\bA100\b", "NVIDIA A100 datasheet", _A100, 79.2, 2039, 108, 300),
    Device("h100_nvl", r"\bH100 NVL\b", "NVIDIA H100 NVL datasheet", _HOPPER_NVL, units=132),
    Device("h100_pcie", r"\bH100 PCIe\b", "NVIDIA H100 PCIe datasheet", _H100_PCIE, units=114),
    Device("h100", r"\bH100\b", "NVIDIA H100 SXM datasheet", _H100_SXM, 79.1, 3350, 132, 450),
    # This variant has HBM2e and a power limit of 500 W, but the same peak as the H100 SXM.
    Device("h100_500w", "", "NVIDIA H100 SXM datasheet", _H100_SXM, 94.5, 2400, 132, 450),
    Device("h200_nvl", r"\bH200 NVL\b", "NVIDIA H200 NVL datasheet", _HOPPER_NVL, units=132),
    Device("h200", r"\bH200\b", "NVIDIA H200 datasheet", _H100_SXM, 139.8, 4800, 132, 450),
    Device("b200", r"\bB200\b", "NVIDIA HGX B200 datasheet, per GPU", _B200, 178.4, 7700, 148, 900),
    Device("gb200", r"\bGB200\b", "NVIDIA GB200 NVL72 specifications, per GPU",
           _GB200, 184.0, 8000, 152, 900),
    Device("b300", r"\bB300\b", "NVIDIA HGX B300 datasheet, per GPU", _B300, 268.0, 7700, 148, 900),
    Device("gb300", r"\bGB300\b", "NVIDIA GB300 NVL72 specifications, per GPU",
           _GB300, 277.0, 8000, 152, 900),
    Device("l40s", r"\bL40S\b", "NVIDIA L40S datasheet", _L40S, units=142),
    Device("l4", r"\bL4\b", "NVIDIA L4 datasheet", _L4, units=58),
    # The pattern excludes the 4090 D and the laptop's 4090, which are other, slower chips.
    Device("rtx_4090", r"\bRTX 4090$", "NVIDIA Ada architecture whitepaper", _RTX_4090, units=128),
    # PyTorch shows each of the package's two dies as a device, so AMD's numbers are halved.
    Device("mi250x", r"\bMI250X\b", "AMD Instinct MI250X datasheet, one of two dies", _MI250X_GCD,
           units=110),
    Device("mi300x", r"\bMI300X\b", "AMD Instinct MI300X datasheet", _MI300X, units=304),
    Device("mi325x", r"\bMI325X\b", "AMD Instinct MI325X datasheet", _MI300X, units=304),
    Device("mi355x", r"\bMI355X\b", "AMD Instinct MI355X datasheet", _MI355X, units=256),
)
# fmt: on

DEVICES = {d.name: d for d in DATASHEETS if d.link_gb_s}  # the devices that the planner knows

# Names of slices of a GPU: NVIDIA's virtual GPUs (GRID A100-20C, NVIDIA H100-2-20C), and MIG.
SLICE = re.compile(r"\bMIG\b|^GRID |-[0-9]+(C|Q|B|A|CME)$")
# A slice may have the name of the whole GPU, like AMD's partitions (CPX) and a hypervisor's shares,
# so sizes are compared too. The limit for memory is low because some A100s have half the memory.
LEAST_UNITS = 0.95
MOST_UNITS = 1.1
LEAST_MEMORY = 0.45


def find_device(name: str, units: int = 0, memory: int = 0) -> Device | None:
    """Returns the datasheet of the device that its driver calls `name`.

    Returns None if the table does not have the device, or if its name, multiprocessors or memory
    show that it is a slice of a GPU or another chip.

    Args:
        units: number of multiprocessors that the driver reports; 0: unknown.
        memory: number of bytes of memory that the driver reports; 0: unknown.
    """
    if SLICE.search(name):
        return None
    found = next((d for d in DATASHEETS if d.pattern and re.search(d.pattern, name)), None)
    if found is None:
        return None
    known = units > 0 and found.units > 0
    if known and not LEAST_UNITS <= units / found.units <= MOST_UNITS:
        return None
    if memory and memory < LEAST_MEMORY * found.memory_gib * 2**30:
        return None
    return found
