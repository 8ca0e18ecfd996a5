"""NCCL's constants: latencies, bandwidths and caps by algorithm, protocol and GPU generation.

Source: NVIDIA/nccl, src/graph/tuning.cc (commit 5067397); speeds of one NVLink from
src/graph/topo.h.
"""

from __future__ import annotations

from dataclasses import dataclass

CHANNELS = 16
PROTOCOLS = ("LL", "LL128", "Simple")

# Microseconds, by protocol in the order above; NVLS, NVLSTree and PAT know Simple alone.
BASE_LATENCY = {
    "Tree": (6.8, 14.0, 8.4),
    "Ring": (6.6, 14.0, 8.4),
    "NVLS": (0.0, 0.0, 0.0),
    "NVLSTree": (0.0, 0.0, 0.0),
    "PAT": (0.0, 0.0, 8.4),
}
NVLINK_LATENCY = {
    "Tree": (0.6, 1.25, 4.0),
    "Ring": (0.6, 1.9, 3.4),
    "NVLS": (0.0, 0.0, 25.0),
    "NVLSTree": (0.0, 0.0, 25.0),
    "PAT": (0.0, 0.0, 4.0),
}
NETWORK_LATENCY = {
    "Tree": (5.0, 8.5, 14.0),
    "Ring": (2.7, 4.0, 14.0),
    "NVLSTree": (0.0, 0.0, 20.9),
    "PAT": (0.0, 0.0, 14.0),
}


def _tenths(*values: int) -> tuple[float, ...]:
    return tuple(value / 10 for value in values)


# Trees fall short of the model at medium sizes: factors on their bandwidth for 64 B, 128 B, …,
# 256 MiB, by protocol; none beyond.
TREE_CORRECTION = (
    _tenths(10, 10, 10, 10, 9, 8, 7, 7, 7, 7, 6, 5, 4, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10),
    _tenths(10, 10, 10, 10, 10, 9, 8, 8, 8, 7, 6, 6, 6, 6, 6, 6, 8, 9, 9, 9, 9, 10, 10),
    _tenths(9, 9, 9, 9, 9, 9, 9, 8, 7, 6, 6, 5, 5, 5, 5, 6, 7, 8, 7, 7, 8, 9, 9),
)
RING_PLATEAU = 1.4  # on the latency of Ring/Simple all-reduces across nodes, from Ampere on
PLATEAU_BYTES = 64  # a channel and rank, from which on it counts

Scales = tuple[float, float, float]  # on one node, on two, on more


@dataclass(frozen=True)
class Architecture:
    """NCCL's constants of one GPU generation, in the system that it is mostly bought in.

    Attributes:
        nvlink_gb_per_s: what NCCL takes a GPU's NVLink for: links × its speed of one.
        nvls_channel_gb_per_s: of one NVLS channel: the next lower step of NCCL's search, which
            tries 20 and 40 but not 20.6 and 40.1.
        nic_gb_per_s: what a NIC carries (NVIDIA's point-to-point figures, GTC 2024).
        ll_max: cap of LL's bandwidth: one node by GPU, several by the system's CPU.
        net_overhead_us: to post a message, by CPU.
        ring_ll128, tree_ll128, tree, nvls_tree: caps of one channel's bandwidth. Those of LL128 on
            Blackwell are from memory; no cap but tree_ll128's on more than two nodes binds here.
    """

    name: str
    nvlink_gb_per_s: float
    nvls_channel_gb_per_s: float
    nvls_efficiency: float  # 0: no NVLS
    nic_gb_per_s: float
    net_overhead_us: float
    ll_max: Scales
    ring_ll128: Scales
    tree_ll128: Scales
    tree: Scales
    nvls_tree: Scales


# DGX A100 has AMD CPUs and 200 Gb/s NICs, DGX H100 and B200 have Intel's and 400 Gb/s.
AMPERE = Architecture(
    name="ampere",
    nvlink_gb_per_s=12 * 20.0,
    nvls_channel_gb_per_s=0.0,
    nvls_efficiency=0.0,
    nic_gb_per_s=24.0,
    net_overhead_us=2.0,
    ll_max=(87.7, 22.5, 19.0),
    ring_ll128=(20.0, 20.0, 20.0),
    tree_ll128=(20.0, 20.0, 20.0),
    tree=(24.0, 23.6, 17.8),
    nvls_tree=(0.0, 0.0, 0.0),
)
HOPPER = Architecture(
    name="hopper",
    nvlink_gb_per_s=18 * 20.6,
    nvls_channel_gb_per_s=20.0,
    nvls_efficiency=0.85,
    nic_gb_per_s=48.0,
    net_overhead_us=1.0,
    ll_max=(141.0, 39.0, 20.4),
    ring_ll128=(36.7, 36.7, 36.7),
    tree_ll128=(36.7, 36.7, 29.0),
    tree=(38.7, 41.4, 36.0),
    nvls_tree=(0.0, 57.7, 45.5),
)
BLACKWELL = Architecture(
    name="blackwell",
    nvlink_gb_per_s=18 * 40.1,
    nvls_channel_gb_per_s=40.0,
    nvls_efficiency=0.74,
    nic_gb_per_s=48.0,
    net_overhead_us=1.0,
    ll_max=(282.0, 39.0, 20.4),
    ring_ll128=(73.4, 73.4, 73.4),
    tree_ll128=(55.6, 31.7, 20.0),
    tree=(70.0, 42.8, 24.0),
    nvls_tree=(0.0, 96.0, 43.8),
)
ARCHITECTURES = {a.name: a for a in (AMPERE, HOPPER, BLACKWELL)}
