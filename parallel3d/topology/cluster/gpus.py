"""The cluster that the GPUs themselves tell of: NVLink domains and the NIC nearest to each GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from parallel3d.config.cluster import ClusterConfig
from parallel3d.errors import UserError
from parallel3d.topology.cluster.configured import check_domain, check_rails, wires
from parallel3d.topology.cluster.gpu_facts import GpuMatrix, parse_gpu_matrix
from parallel3d.topology.cluster.parts import Cluster

Run = Callable[[list[str]], str]
TOPO_COMMAND = ["nvidia-smi", "topo", "-m"]


def _visible(environ: Mapping[str, str], count: int) -> list[int]:
    """The GPUs of CUDA_VISIBLE_DEVICES, or all of them."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    words = [word.strip() for word in text.split(",")]
    good = all(re.fullmatch(r"[0-9]{1,4}", word) and int(word) < count for word in words)
    chosen = [int(word) for word in words] if good else []
    if not chosen or len(set(chosen)) < len(chosen):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={text!r} must be numbers of the {count} GPUs here, each once, "
            f"for cluster.source=local; unset it, or choose a preset such as cluster=dgx_h100."
        )
    return chosen


def local_cluster(
    config: ClusterConfig, environ: Mapping[str, str], run: Run, world_size: int | None = None
) -> Cluster:
    """A cluster of nodes like this one: `config.nodes`, or as many as `world_size` needs.

    Speeds, `unit_nodes` and the spine come from the configuration, and so does `domain_gpus` where
    it is more than a node, as one node cannot tell which others share its NVLink domain.

    Raises:
        UserError: nvidia-smi fails or prints what cannot be read, or the sizes do not fit.
    """
    matrix = parse_gpu_matrix(run(TOPO_COMMAND))
    matrix = matrix.select(_visible(environ, len(matrix.gpus)))
    name, count = environ.get("SLURMD_NODENAME"), len(matrix.gpus)
    nodes = config.nodes or -(-(world_size or 1) // count)
    if world_size is not None and nodes * count < world_size:
        raise UserError(
            f"cluster.nodes={nodes} of {count} GPUs each, as nvidia-smi counts them, are too few "
            f"for {world_size} ranks; the nearest is cluster.nodes={-(-world_size // count)}."
        )
    domain = _own_domains(matrix)
    if config.domain_gpus is not None and config.domain_gpus > count:
        check_domain(config.domain_gpus, count)
        domain = {"domain_gpus": config.domain_gpus}
    return Cluster(
        nodes=nodes,
        gpus_per_node=count,
        unit_nodes=config.unit_nodes,
        node_names=(name,) if nodes == 1 and name else (),
        origin="nodes from nvidia-smi, the rest from the configuration",
        **domain,
        **_rails(config, matrix),
        **wires(config),
    )


def _own_domains(matrix: GpuMatrix) -> dict[str, Any]:
    """`domain_gpus` of a node by itself, and `local_domain` where its islands are not alike."""
    islands = matrix.domains()
    size = islands.count(0)
    if islands == tuple(gpu // size for gpu in range(len(islands))) and len(islands) % size == 0:
        return {"domain_gpus": size}
    return {"domain_gpus": len(islands), "local_domain": islands}


def _rails(config: ClusterConfig, matrix: GpuMatrix) -> dict[str, Any]:
    """`rails` and `local_rail`: the configured number, else the nearest NICs, else one a GPU."""
    count = len(matrix.gpus)
    if config.rails is not None:
        check_rails(config.rails, count)
        return {"rails": config.rails}
    nearest = matrix.rails()
    if nearest is None:
        return {"rails": count}
    rails = max(nearest) + 1
    if nearest == tuple(gpu % rails for gpu in range(count)):
        return {"rails": rails}
    return {"rails": rails, "local_rail": nearest}
