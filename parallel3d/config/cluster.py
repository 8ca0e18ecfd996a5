"""The keys that describe the cluster, and those of `topology`, `bench` and `calibrate`."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.values import key


@dataclass
class ClusterConfig:
    """The machines and their network. Choose a preset: `cluster=dgx_h100`."""

    name: str = key("custom", "name of the preset, for logs")
    source: str = key(
        "config",
        "where nodes, domains and switches come from: these keys, or discovered and laid over them",
        choices=("config", "slurm", "local"),
    )
    nodes: int | None = key(
        None,
        "nodes; null: as many as the ranks need, or one NVLink domain where they are unknown",
        minimum=1,
    )
    gpus_per_node: int | None = key(
        8, "GPUs of a node; null: the ranks shared out evenly (8 where they are unknown)", minimum=1
    )
    intra: str = key(
        "nvlink", "what joins the GPUs of a domain, by nvlink_gb_per_s", choices=("nvlink", "pcie")
    )
    network: str = key(
        "infiniband",
        "what the NICs speak: infiniband (or RoCE: RDMA), or socket (TCP over Ethernet); only "
        "between infiniband and nvlink does NCCL forward to another rail (PXN)",
        choices=("infiniband", "socket"),
    )
    domain_gpus: int | None = key(
        None,
        "GPUs joined by NVLink or PCIe: part of a node, a node or several; null: a node",
        minimum=1,
    )
    rails: int | None = key(
        None,
        "NICs of a node, each on its own rail; GPU g has rail g mod rails; null: one a GPU",
        minimum=1,
    )
    unit_nodes: int | None = key(
        None, "nodes under one set of leaf switches (a scalable unit); null: all", minimum=1
    )
    spine: bool = key(True, "whether anything joins the rails; false: rail-only")
    oversubscription: float = key(
        1.0, "what the NICs could send over what the spine carries", minimum=1
    )
    nvlink_gb_per_s: float = key(
        50.0, "of one GPU to its domain, one way, 1e9 B/s, as the datasheet has it", above=0
    )
    nvlink_latency_us: float = key(2.0, "of one message inside the domain", minimum=0)
    rail_gb_per_s: float = key(
        10.0, "of one GPU's NIC, one way, 1e9 B/s, as the datasheet has it", above=0
    )
    rail_latency_us: float = key(5.0, "of one message through a leaf switch", minimum=0)
    spine_latency_us: float = key(8.0, "of one message over the spine", minimum=0)
    gpu: str | None = key(
        None, "dryrun: name of the GPU, as its driver tells it, by which its peaks are known"
    )
    gpu_memory_gb: float | None = key(
        None, "dryrun: memory of a GPU, 1e9 B, as its driver counts it", above=0
    )
    gpu_memory_gb_per_s: float | None = key(
        None, "dryrun: of a GPU to its memory, 1e9 B/s, as the datasheet has it", above=0
    )
    file: str | None = key(
        None,
        "plan and layout=auto: a machine that parallel3d calibrate measured; may be typed "
        "cluster=FILE.yaml",
    )
    topology_file: str | None = key(
        None, "with source=slurm: a topology.conf, or what `scontrol show topology` printed"
    )
    nvlink_interface: str | None = key(
        None, "on CPU: network interface for groups inside one domain; null: the system's choice"
    )
    rail_interface: str | None = key(
        None, "on CPU: interface for groups that leave the domain, a glob such as 'rail*'"
    )
    nccl_env: list[str] = key(
        [],
        "variables that NCCL gets on every rank unless the environment has them, as in "
        "NCCL_IB_HCA:mlx5 or NCCL_SOCKET_IFNAME:bond0",
    )


@dataclass
class TopologyConfig:
    """Options of `parallel3d topology`."""

    rank: int = key(0, "the rank whose groups are highlighted", minimum=0)
    svg: str | None = key(None, "file for a picture of the cluster, as SVG")
    json: str | None = key(None, "file for everything shown, as JSON")
    search: int = key(5, "rows of the placement search to list; 0: no search", minimum=0)


@dataclass
class BenchConfig:
    """Options of `parallel3d bench comm`."""

    sizes: list[int] = key([4096, 262144, 4194304], "bytes of each message")
    iterations: int = key(5, "timed calls of each row; the median counts", minimum=1)
    warmup: int = key(2, "calls before", minimum=0)
    budget_s: float = key(60.0, "seconds for all; iterations are cut to hold it", above=0)
    outlier: float = key(
        1.5, "a pair or rank slower than this many times the median is named", above=1
    )
    json: str | None = key(None, "file for all rows; null: bench.json in the run directory")


@dataclass
class CalibrateConfig:
    """Options of `parallel3d calibrate`, which measures in the type of `precision`."""

    file: str = key("calibrated.yaml", "the cluster file that it writes")
    replace: bool = key(False, "whether a file of that name may be written anew")
    ranks: int | None = key(
        None,
        "the most ranks of a group, a power of two; null: four a core and eight at least, or as "
        "many as there are GPUs",
        minimum=1,
        maximum=1024,
    )
    passes: int = key(
        3, "how often each piece is measured, the others between; the best counts", minimum=1
    )
