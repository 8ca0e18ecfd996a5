"""Keys of the layout, of the machines and of their network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from parallel3d.config.conflicts import Conflict, NoneOf, OneOf
from parallel3d.config.values import (
    FREE,
    LAYOUT,
    key,
)

# Keys that `layout=auto` chooses, unless the command line gives them.
CHOSEN = ("tp", "cp", "pp", "dp", "vpp", "micro_batch_size", "schedule", "recompute", "zero")


@dataclass
class LayoutKeys:
    """Sizes of the dimensions: world size = tp × pp × cp × dp."""

    tp: int = key(
        1,
        "tensor-parallel size",
        minimum=1,
        resume=LAYOUT,
        tried=(2,),
    )
    pp: int = key(
        1,
        "pipeline-parallel size",
        minimum=1,
        resume=LAYOUT,
        tried=(2,),
    )
    dp: int | None = key(
        None,
        "data-parallel size; null: world size / (tp · pp · cp)",
        minimum=1,
        resume=LAYOUT,
        tried=(2,),
    )
    cp: int = key(
        1,
        "context-parallel size",
        minimum=1,
        resume=LAYOUT,
        tried=(2,),
    )
    sp: bool = key(
        False,
        "sequence parallelism inside the tensor group; with tp=1 there is nothing to split",
        resume=LAYOUT,
    )
    vpp: int = key(
        1,
        "model chunks per pipeline rank",
        minimum=1,
        resume=LAYOUT,
    )


@dataclass
class PlacementKeys:
    """The choice of a layout, and the mapping of ranks to GPUs."""

    layout: str = key(
        "given",
        "train: auto takes the planner's best layout that fits the machine described by cluster=; "
        f"{', '.join(CHOSEN[:-1])} and {CHOSEN[-1]} are kept where the command line gives them",
        choices=("given", "auto"),
        resume=FREE,
        once=True,
    )
    placement: str = key(
        "default",
        "which GPU holds which rank: default (the launcher's order), auto (searched), an order "
        "such as tp-cp-pp-dp, a tiling such as tp4-dp2-pp2-dp4, or file (rank_file)",
        resume=FREE,
    )
    rank_file: str | None = key(
        None,
        "for placement=file: a line `rank host local_index` for each rank",
        holds=Path,
        resume=FREE,
        tried=("ranks.txt",),
    )


@dataclass
class ClusterConfig:
    """The machines and their network. Choose a preset: `cluster=dgx_h100`."""

    RESUME: ClassVar[str] = FREE
    name: str = key("custom", "name of the preset, for logs")
    source: str = key(
        "config",
        "source of nodes, domains and switches: config takes these keys; slurm and local discover "
        "them, which overrides the keys",
        choices=("config", "slurm", "local"),
    )
    nodes: int | None = key(
        None,
        "number of nodes; null: as many as the ranks need, or one NVLink domain if their number "
        "is unknown",
        minimum=1,
    )
    gpus_per_node: int | None = key(
        8,
        "GPUs per node; null: ranks are spread evenly over nodes (8 if their number is unknown)",
        minimum=1,
    )
    intra: str = key(
        "nvlink",
        "type of link between the GPUs of a domain; nvlink_gb_per_s is its bandwidth",
        choices=("nvlink", "pcie"),
    )
    network: str = key(
        "infiniband",
        "protocol of the NICs: infiniband (RDMA; RoCE too) or socket (TCP over Ethernet); NCCL "
        "forwards to another rail (PXN) only with infiniband and intra=nvlink",
        choices=("infiniband", "socket"),
    )
    domain_gpus: int | None = key(
        None,
        "number of GPUs joined by NVLink or PCIe: part of a node, a node or several; null: a node",
        minimum=1,
    )
    rails: int | None = key(
        None,
        "NICs per node, each on its own rail; GPU g uses rail g mod rails; null: one per GPU",
        minimum=1,
    )
    unit_nodes: int | None = key(
        None, "nodes under one set of leaf switches (a scalable unit); null: all nodes", minimum=1
    )
    spine: bool = key(True, "whether a spine connects the rails; false: rail-only")
    oversubscription: float = key(
        1.0, "bandwidth of the NICs divided by the bandwidth of the spine", minimum=1
    )
    nvlink_gb_per_s: float = key(
        50.0, "bandwidth of one GPU to its domain, one way, 1e9 B/s, from the datasheet", above=0
    )
    nvlink_latency_us: float = key(2.0, "latency of a message inside the domain", minimum=0)
    rail_gb_per_s: float = key(
        10.0, "bandwidth of one GPU's NIC, one way, 1e9 B/s, from the datasheet", above=0
    )
    rail_latency_us: float = key(5.0, "latency of a message through a leaf switch", minimum=0)
    spine_latency_us: float = key(8.0, "latency of a message over the spine", minimum=0)
    gpu: str | None = key(
        None, "dryrun: name of the GPU as its driver reports it; its peak speeds follow from it"
    )
    gpu_memory_gb: float | None = key(
        None, "dryrun: memory of a GPU, 1e9 B, as its driver reports it", above=0
    )
    gpu_memory_gb_per_s: float | None = key(
        None, "dryrun: memory bandwidth of a GPU, 1e9 B/s, from the datasheet", above=0
    )
    file: str | None = key(
        None,
        "plan and layout=auto: a machine that parallel3d calibrate measured; short form: "
        "cluster=FILE.yaml",
        holds=Path,
    )
    topology_file: str | None = key(
        None,
        "with source=slurm: a topology.conf, or the output of `scontrol show topology`",
        holds=Path,
    )
    nvlink_interface: str | None = key(
        None, "on CPU: network interface for groups inside one domain; null: the system's choice"
    )
    rail_interface: str | None = key(
        None, "on CPU: interface for groups that leave the domain, a glob such as 'rail*'"
    )
    nccl_env: list[str] = key(
        [],
        "variables set for NCCL on every rank unless the environment has them, such as "
        "NCCL_IB_HCA:mlx5 or NCCL_SOCKET_IFNAME:bond0",
    )


_LINES = (
    "placement=file reads rank_file=…, which has a line `rank host local_index` for each rank, but "
    "{placement} and {rank_file}"
)
CONFLICTS = (
    Conflict(
        {"placement": OneOf("file"), "rank_file": OneOf(None)}, _LINES, (("placement", "default"),)
    ),
    Conflict(
        {"placement": NoneOf("file"), "rank_file": NoneOf(None)}, _LINES, (("placement", "file"),)
    ),
)
