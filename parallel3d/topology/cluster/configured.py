"""The cluster that the `cluster` section of the configuration describes."""

from __future__ import annotations

from typing import Any

from parallel3d.config.cluster import ClusterConfig
from parallel3d.errors import UserError
from parallel3d.topology.cluster.parts import Cluster, Link

USUAL_NODE = 8  # GPUs of a node where neither the configuration nor the ranks tell


def cluster_from_config(config: ClusterConfig, world_size: int | None = None) -> Cluster:
    """The cluster of the configured sizes, large enough for `world_size` ranks (None: unknown).

    Left out (null): `nodes` are as many as the ranks need, else one domain; `gpus_per_node` shares
    the ranks out evenly, else 8; `domain_gpus` is a node; `rails` one a GPU; `unit_nodes` all
    nodes. The last domain and the last unit are smaller where the nodes do not fill them.
    `config.source` is not looked at.

    Raises:
        UserError: sizes that contradict each other, or fewer GPUs than ranks.
    """
    nodes, gpus = _nodes_and_gpus(config, world_size)
    domain = gpus if config.domain_gpus is None else config.domain_gpus
    check_domain(domain, gpus)
    rails = gpus if config.rails is None else config.rails
    check_rails(rails, gpus)
    return Cluster(
        nodes=nodes,
        gpus_per_node=gpus,
        domain_gpus=domain,
        rails=rails,
        unit_nodes=config.unit_nodes,
        origin="the configuration",
        **wires(config),
    )


def wires(config: ClusterConfig) -> dict[str, Any]:
    """The keywords of `Cluster` that are no sizes: name, speeds, and whether there is a spine."""
    return {
        "name": config.name,
        "nvlink": Link(config.nvlink_gb_per_s, config.nvlink_latency_us),
        "rail": Link(config.rail_gb_per_s, config.rail_latency_us),
        "spine": Link(config.rail_gb_per_s, config.spine_latency_us),
        "oversubscription": config.oversubscription if config.spine else None,
    }


def _nodes_and_gpus(config: ClusterConfig, world_size: int | None) -> tuple[int, int]:
    nodes, gpus = config.nodes, config.gpus_per_node
    if gpus is None:
        nodes = nodes or 1
        gpus = USUAL_NODE if world_size is None else -(-world_size // nodes)
    if nodes is None:
        needed = config.domain_gpus or gpus if world_size is None else world_size
        nodes = -(-needed // gpus)
    if world_size is not None and nodes * gpus < world_size:
        raise UserError(
            f"cluster.nodes={nodes} of cluster.gpus_per_node={gpus} are {nodes * gpus} GPUs, and "
            f"{world_size} ranks need one each; the nearest is "
            f"cluster.nodes={-(-world_size // gpus)}."
        )
    return nodes, gpus


def check_domain(domain: int, gpus: int) -> None:
    """Raises UserError if nodes of `gpus` GPUs cannot have NVLink domains of `domain`."""
    small, large = sorted((domain, gpus))
    if large % small == 0:
        return
    if domain > gpus:
        close = nearest_multiple(domain, gpus)
    else:
        divisors = [d for d in range(1, gpus + 1) if gpus % d == 0]
        close = min(divisors, key=lambda d: (abs(d - domain), d))
    raise UserError(
        f"cluster.domain_gpus={domain} must divide cluster.gpus_per_node={gpus} or be a multiple "
        f"of it; the nearest is cluster.domain_gpus={close}."
    )


def nearest_multiple(value: int, unit: int) -> int:
    """The multiple of `unit`, at least one, that is closest to `value` (ties: the smaller)."""
    below = max(unit, value // unit * unit)
    return below if value - below <= below + unit - value else below + unit


def check_rails(rails: int, gpus: int) -> None:
    """Raises UserError if a node of `gpus` GPUs cannot have `rails` rails."""
    if rails > gpus:
        raise UserError(
            f"cluster.rails={rails} must be at most cluster.gpus_per_node={gpus}, as each rail "
            f"takes the NIC of at least one GPU; the nearest is cluster.rails={gpus}."
        )
