"""NCCL's own model of its collectives: the time of every algorithm and protocol, and its choice.

NCCL prices each (algorithm, protocol) as latency + bytes / bandwidth and takes the cheapest; this
is that arithmetic for GPUs joined by NVSwitch, with one NIC each. Source of formulas and constants:
NVIDIA/nccl, src/graph/tuning.cc (commit 5067397).
The search that NCCL runs over the machine's wires is replaced by what it finds on DGX systems:
`CHANNELS` channels that share NVLink and the NICs evenly.

The tuner's figures are made to choose by, not to plan by. Held against measured all-reduces on H100
nodes of 8 GPUs with 400 Gb/s InfiniBand, 4 to 1,024 of them, 1 MiB to 16 GiB, busbw of the model
over busbw measured, minus 1 (two plots, read off by pixel; "slide" is NVIDIA's with
NCCL_ALGO=NVLSTree, "paper" arXiv:2411.13055; tests/unit/test_nccl_model.py has a part of them):

| model                                        | slide: mean, largest | paper: mean, largest |
|----------------------------------------------|----------------------|----------------------|
| tuner, NVLSTree                              | 29 %, 95 %           | 38 %, 113 %          |
| tuner, NVLSTree, messages from 512 MiB on    | 8 %, 31 %            | 16 %, 38 %           |
| tuner, what it would choose                  | 63 %, 263 %          | 56 %, 211 %          |
| `fitted_all_reduce`, two constants for all   | 8 %, 32 %            | 5 %, 31 %            |
| two constants for each curve (α, busbw)      | 11 %, 32 %           | 5 %, 19 %            |

The tuner's errors are all in one direction, too fast, most between 1 and 256 MiB. None of this
holds on AWS's EFA: 8 nodes of p5 reach 99.6 GB/s at 256 MB (nanotron's playbook), where
`fitted_all_reduce` says 281.

Not modelled: CollNet (SHARP in InfiniBand switches), PCIe machines, more or fewer NICs than GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from parallel3d.topology.price.nccl_constants import (
    ARCHITECTURES,
    BASE_LATENCY,
    CHANNELS,
    NETWORK_LATENCY,
    NVLINK_LATENCY,
    PLATEAU_BYTES,
    PROTOCOLS,
    RING_PLATEAU,
    TREE_CORRECTION,
    Architecture,
)

FITTED_HOP_US = 32.0  # a level of the tree across nodes: NCCL's 20.9, as measured
FITTED_FILL = 0.5  # c in c·√(latency · transfer); an optimally cut pipeline has 2

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


@dataclass(frozen=True)
class Choice:
    """One way to run a collective, with its price."""

    algorithm: str  # Ring, Tree, NVLS, NVLSTree or PAT
    protocol: str
    seconds: float


@dataclass(frozen=True)
class _Call:
    """A collective of `n` GPUs in `nodes` NVLink domains, `per_node` in each."""

    op: str
    n: int
    nodes: int
    nbytes: float
    arch: Architecture

    @property
    def per_node(self) -> float:
        return self.n / self.nodes

    @property
    def scale(self) -> int:
        """Place in `Scales`."""
        return min(self.nodes, 3) - 1

    @property
    def ring_steps(self) -> int:
        return {"all_reduce": 2 * (self.n - 1), "broadcast": self.n, "reduce": self.n}.get(
            self.op, self.n - 1
        )

    @property
    def network_steps(self) -> int:
        """Those of `ring_steps` that leave a node."""
        return {"all_reduce": 2 * (self.nodes - 1)}.get(self.op, self.nodes - 1)

    @property
    def bus(self) -> float:
        """GB/s that a ring carries: NVLink's, or that of one NIC for each GPU of a node."""
        if self.nodes == 1:
            return self.arch.nvlink_gb_per_s
        return min(self.arch.nvlink_gb_per_s, self.per_node * self.arch.nic_gb_per_s)


def _allowed(call: _Call) -> list[tuple[str, int]]:
    """(algorithm, protocol) pairs that NCCL considers for a call."""
    pairs = [("Ring", p) for p in range(3)]
    if call.op == "all_reduce":
        pairs += [("Tree", p) for p in range(3)]
        # The switch multiplies above four GPUs only: below, H100s and B200s were seen on the ring.
        if call.arch.nvls_efficiency and call.per_node > 4:
            pairs.append(("NVLS" if call.nodes == 1 else "NVLSTree", 2))
    elif call.op in ("all_gather", "reduce_scatter") and call.nodes == call.n:
        pairs.append(("PAT", 2))
    return pairs


def _bandwidth(call: _Call, algorithm: str, protocol: int) -> float:
    """GB/s of the whole buffer (algorithm bandwidth)."""
    arch, scale, bus = call.arch, call.scale, call.bus
    to_algorithm = call.n / call.ring_steps
    if algorithm == "Ring":
        if protocol == 0:
            bus = min(bus * 0.5, arch.ll_max[scale])
        elif protocol == 1:
            bus = min(bus * 0.92, CHANNELS * arch.ring_ll128[scale])
        return bus * to_algorithm
    if algorithm == "PAT":
        return bus * 0.75 * to_algorithm
    if algorithm == "Tree":
        bus = min(bus * 0.92, CHANNELS * arch.tree[scale])
        if protocol == 0:
            bus = min(bus / 3.8, arch.ll_max[scale])
        elif protocol == 1:
            line = 7 / 9 if call.nodes == 1 else 120 / 128
            bus = min(bus * line, CHANNELS * arch.tree_ll128[scale])
        return bus * 0.5 * _tree_correction(call.nbytes, protocol)
    inside = arch.nvls_channel_gb_per_s * arch.nvls_efficiency * (CHANNELS - 1) / CHANNELS * 2
    if algorithm == "NVLS":
        return CHANNELS * inside * to_algorithm
    outside = call.per_node * arch.nic_gb_per_s / CHANNELS * (2 if call.nodes == 2 else 1)
    return CHANNELS * min(inside, outside, arch.nvls_tree[scale]) * to_algorithm


def _tree_correction(nbytes: float, protocol: int) -> float:
    lines = int(nbytes) >> 6
    place = lines.bit_length() - 1
    factors = TREE_CORRECTION[protocol]
    return factors[place] if 0 <= place < len(factors) else 1.0


def _latency_us(call: _Call, algorithm: str, protocol: int) -> float:
    base = BASE_LATENCY[algorithm][protocol]
    inside = NVLINK_LATENCY[algorithm][protocol]
    if algorithm == "NVLS":
        return base + inside
    # One GPU a node has nothing to hide the network behind: NCCL then takes the tree's latency.
    outside = NETWORK_LATENCY["Tree" if call.per_node == 1 else algorithm][protocol]
    levels = math.floor(math.log2(call.nodes))
    if algorithm == "NVLSTree":
        return base + inside + 2 * levels * outside
    if algorithm == "Tree":
        return base + 2 * ((call.per_node - 1) * inside + levels * outside)
    if algorithm == "PAT":
        return base + levels * outside / 3.5 + call.n * 2.8
    if call.op in ("broadcast", "reduce"):
        hops = NVLINK_LATENCY if call.nodes == 1 else NETWORK_LATENCY
        return base + call.ring_steps * hops["Tree" if protocol == 2 else "Ring"][protocol]
    if call.nodes > 1:
        inside = max(inside, call.arch.net_overhead_us * (3 if protocol == 2 else 1))
    steps = call.network_steps
    latency = base + (call.ring_steps - steps) * inside + steps * outside
    on_plateau = call.nbytes / (CHANNELS * call.n) >= PLATEAU_BYTES
    if call.op == "all_reduce" and call.nodes > 1 and protocol == 2 and on_plateau:
        latency *= RING_PLATEAU
    return latency


def _check(op: str, n_gpus: int, n_nodes: int, nbytes: float, architecture: str) -> None:
    if op not in OPERATIONS:
        raise ValueError(f"NCCL's tuner prices {', '.join(OPERATIONS)}, not {op!r}")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{architecture!r} is none of {', '.join(ARCHITECTURES)}")
    if n_nodes < 1 or n_gpus < n_nodes or n_gpus % n_nodes:
        raise ValueError(f"{n_gpus} GPUs do not spread evenly over {n_nodes} nodes")
    if not nbytes >= 0:
        raise ValueError(f"a message of {nbytes} bytes")


def nccl_table(
    op: str, n_gpus: int, n_nodes: int, nbytes: float, architecture: str = "hopper"
) -> list[Choice]:
    """Every way that NCCL considers, cheapest first.

    Args:
        op: all_reduce, all_gather, reduce_scatter, broadcast or reduce.
        n_nodes: NVLink domains that the group is spread over evenly; NCCL counts an NVL72 rack as
            one node.
        nbytes: of the whole buffer, as in `costs`.
        architecture: ampere, hopper or blackwell.

    Raises:
        ValueError: another op or architecture, fewer than no bytes, GPUs that do not fill the nodes
            evenly.
    """
    _check(op, n_gpus, n_nodes, nbytes, architecture)
    if n_gpus == 1:
        return [Choice("Ring", "LL", 0.0)]
    call = _Call(op, n_gpus, n_nodes, nbytes, ARCHITECTURES[architecture])
    found = []
    for algorithm, protocol in _allowed(call):
        transfer = nbytes / (_bandwidth(call, algorithm, protocol) * 1e9)
        seconds = _latency_us(call, algorithm, protocol) * 1e-6 + transfer
        found.append(Choice(algorithm, PROTOCOLS[protocol], seconds))
    return sorted(found, key=lambda choice: choice.seconds)


def nccl_choice(
    op: str, n_gpus: int, n_nodes: int, nbytes: float, architecture: str = "hopper"
) -> Choice:
    """What NCCL would run, by its own model. Arguments as of `nccl_table`."""
    return nccl_table(op, n_gpus, n_nodes, nbytes, architecture)[0]


def nccl_time(
    op: str, n_gpus: int, n_nodes: int, nbytes: float, architecture: str = "hopper"
) -> float:
    """Seconds by NCCL's model of what it would run. Arguments as of `nccl_table`."""
    return nccl_choice(op, n_gpus, n_nodes, nbytes, architecture).seconds


def fitted_all_reduce(
    n_gpus: int, n_nodes: int, nbytes: float, architecture: str = "hopper"
) -> float:
    """Seconds of a large cluster's NVLSTree all-reduce, as measured: a + s + c·√(a·s).

    a = 25 µs + 2·log₂(nodes)·h is the way up and down the tree, s = 2(n − 1)/n · N/B the transfer
    at the NICs' bandwidth, and c·√(a·s) what it takes to fill the tree with pieces: 2·√(a·s) is
    the term of a pipeline cut into the best number of pieces. h = 32 µs and c = 1/2 were fitted to
    198 points; errors above. For whole nodes of 8 GPUs, 4 nodes or more.

    Raises ValueError for one node, and as `nccl_table`.
    """
    _check("all_reduce", n_gpus, n_nodes, nbytes, architecture)
    if n_nodes == 1:
        raise ValueError("the fit is for several nodes; on one, ask nccl_time")
    call = _Call("all_reduce", n_gpus, n_nodes, nbytes, ARCHITECTURES[architecture])
    inside = NVLINK_LATENCY["NVLSTree"][2]
    latency = (inside + 2 * math.log2(n_nodes) * FITTED_HOP_US) * 1e-6
    network = call.per_node * call.arch.nic_gb_per_s * 1e9
    transfer = 2 * (n_gpus - 1) / n_gpus * nbytes / network
    return latency + transfer + FITTED_FILL * math.sqrt(latency * transfer)
