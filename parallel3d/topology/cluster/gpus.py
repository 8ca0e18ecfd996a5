"""The cluster that the GPUs themselves tell of: NVLink domains and the NIC nearest to each GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel3d.config.cluster import ClusterConfig
from parallel3d.errors import UserError
from parallel3d.topology.cluster.configured import check_domain, check_rails, wires
from parallel3d.topology.cluster.gpu_facts import (
    Fabric,
    GpuMatrix,
    parse_fabric,
    parse_gpu_matrix,
)
from parallel3d.topology.cluster.parts import Cluster

Run = Callable[[list[str]], str]
TOPO_COMMAND = ["nvidia-smi", "topo", "-m"]
QUERY_COMMAND = ["nvidia-smi", "-q"]


@dataclass(frozen=True)
class NodeFacts:
    """One node: its name ("" where it has none), its matrix and its GPUs' fabric."""

    name: str
    matrix: GpuMatrix
    fabric: tuple[Fabric, ...]

    @classmethod
    def ask(cls, environ: Mapping[str, str], run: Run) -> NodeFacts:
        """This node's facts, of the GPUs of CUDA_VISIBLE_DEVICES if that is set.

        Raises UserError for what nvidia-smi prints and what cannot be read.
        """
        matrix, fabric = parse_gpu_matrix(run(TOPO_COMMAND)), parse_fabric(run(QUERY_COMMAND))
        chosen = _visible(environ, len(matrix.gpus))
        if len(fabric) != len(matrix.gpus):
            raise UserError(
                f"nvidia-smi contradicts itself: topo -m has {len(matrix.gpus)} GPUs and -q has "
                f"{len(fabric)}."
            )
        name = environ.get("SLURMD_NODENAME", "")
        return cls(name, matrix.select(chosen), tuple(fabric[gpu] for gpu in chosen))

    @property
    def domain(self) -> tuple[str, int] | None:
        """The NVLink domain beyond the node that all GPUs are in, None where there is none.

        Raises UserError if they are in different ones, or the matrix has no NVLink between them.
        """
        joined = {fabric.domain for fabric in self.fabric}
        if len(joined) > 1:
            raise UserError(
                f"nvidia-smi -q: the GPUs of {self.name or 'this node'} are in "
                f"{len(joined)} NVLink fabrics or partly in none, and one node must be in one."
            )
        found = joined.pop()
        if found is not None and max(self.matrix.domains()) > 0:
            raise UserError(
                f"nvidia-smi contradicts itself: by -q the GPUs of {self.name or 'this node'} are "
                f"in one NVLink fabric, and by topo -m some have no NVLink between them."
            )
        return found


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
    config: ClusterConfig,
    environ: Mapping[str, str],
    run: Run,
    world_size: int | None = None,
) -> Cluster:
    """A cluster of nodes like this one: `config.nodes`, or as many as `world_size` needs.

    Speeds, `unit_nodes` and the spine come from the configuration, and so does `domain_gpus` where
    it is more than a node, as one node cannot tell which others share its NVLink domain.

    Raises:
        UserError: nvidia-smi fails or prints what cannot be read, or the sizes do not fit.
    """
    node = NodeFacts.ask(environ, run)
    count = len(node.matrix.gpus)
    nodes = config.nodes or -(-(world_size or 1) // count)
    if world_size is not None and nodes * count < world_size:
        raise UserError(
            f"cluster.nodes={nodes} of {count} GPUs each, as nvidia-smi counts them, are too few "
            f"for {world_size} ranks; the nearest is cluster.nodes={-(-world_size // count)}."
        )
    names = (node.name,) if nodes == 1 and node.name else ()
    domain: dict[str, Any] = _own_domains(node)
    if config.domain_gpus is not None and config.domain_gpus > count:
        check_domain(config.domain_gpus, count)
        domain = {"domain_gpus": config.domain_gpus}
    return Cluster(
        nodes=nodes,
        gpus_per_node=count,
        unit_nodes=config.unit_nodes,
        node_names=names,
        origin="nodes from nvidia-smi, the rest from the configuration",
        **domain,
        **_rails(config, [node], count),
        **wires(config),
    )


def cluster_of_nodes(config: ClusterConfig, nodes: Sequence[NodeFacts]) -> Cluster:
    """The cluster of nodes that each told their facts, in this order.

    GPUs with one cluster UUID and clique are one NVLink domain, over all nodes; without a fabric
    each node has its own domains.

    Raises:
        UserError: no node, or nodes that cannot be in one cluster.
    """
    if not nodes:
        raise UserError("cluster.source=local needs the facts of at least one node, and has none.")
    sizes = tuple(len(node.matrix.gpus) for node in nodes)
    most = max(sizes)
    largest = nodes[sizes.index(most)]
    joined = [node.domain for node in nodes]
    domain: dict[str, Any]
    if any(joined):
        keys = [key or ("alone", number) for number, key in enumerate(joined)]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        node_domain = tuple(numbers[key] for key in keys)
        widest = max(node_domain.count(number) for number in numbers.values())
        domain = {"node_domain": node_domain, "domain_gpus": widest * most}
    else:
        domain = _own_domains(largest)
        shapes = {node.matrix.domains() for node in nodes}
        if any(largest.matrix.domains()[: len(shape)] != shape for shape in shapes):
            raise UserError(
                f"the nodes differ in their NVLinks: {largest.name or 'one'} has domains "
                f"{largest.matrix.domains()}; choose a preset and its sizes by hand."
            )
    return Cluster(
        nodes=len(nodes),
        gpus_per_node=most,
        unit_nodes=config.unit_nodes,
        node_names=tuple(node.name for node in nodes) if all(node.name for node in nodes) else (),
        node_gpus=sizes,
        origin="nodes and domains from nvidia-smi, units from the configuration",
        **domain,
        **_rails(config, nodes, most),
        **wires(config),
    )


def _own_domains(node: NodeFacts) -> dict[str, Any]:
    """`domain_gpus` of a node by itself, and `local_domain` where its islands are not alike."""
    islands = node.matrix.domains()
    size = islands.count(0)
    if islands == tuple(gpu // size for gpu in range(len(islands))) and len(islands) % size == 0:
        return {"domain_gpus": size}
    return {"domain_gpus": len(islands), "local_domain": islands}


def _rails(config: ClusterConfig, nodes: Sequence[NodeFacts], most: int) -> dict[str, Any]:
    """`rails` and `local_rail`: the configured number, else the nearest NICs, else one a GPU."""
    if config.rails is not None:
        check_rails(config.rails, most)
        return {"rails": config.rails}
    found = {node.matrix.rails() for node in nodes}
    longest = max(found, key=lambda rails: len(rails or ()))
    if longest is None:
        return {"rails": most}
    if any(rails is None or longest[: len(rails)] != rails for rails in found):
        raise UserError(
            "the nodes differ in which NIC is nearest to which GPU; say by cluster.rails how many "
            "rails there are."
        )
    if longest == tuple(gpu % (max(longest) + 1) for gpu in range(most)):
        return {"rails": max(longest) + 1}
    return {"rails": max(longest) + 1, "local_rail": longest}
