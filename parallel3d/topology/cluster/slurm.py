"""The cluster of a Slurm job: its nodes and ranks, their leaf switches and NVLink domains.

Slurm tells which nodes there are, how many ranks each has, and what joins them; the speeds come
from the configuration. Where Slurm says nothing of switches or domains, the sizes of the
configuration count through the nodes in Slurm's order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from parallel3d.config.cluster import ClusterConfig
from parallel3d.errors import UserError
from parallel3d.topology.cluster import configured
from parallel3d.topology.cluster.parts import Cluster
from parallel3d.topology.cluster.slurm_names import expand_hostlist, expand_tasks_per_node
from parallel3d.topology.cluster.slurm_topology import (
    SlurmTopology,
    parse_topology,
    topology_of_addresses,
)

Run = Callable[[list[str]], str]
SHOW_TOPOLOGY = ["scontrol", "show", "topology"]
# Steps that Slurm makes for itself (batch script, interactive shell, …) have ids from here on.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


def slurm_cluster(
    config: ClusterConfig,
    environ: Mapping[str, str],
    run: Run,
    addresses: Mapping[str, tuple[str, str]] | None = None,
) -> Cluster:
    """The cluster of the job whose environment this is.

    Args:
        config: speeds, `rails`, `topology_file`; `domain_gpus` and `unit_nodes` where Slurm names
            no blocks or leaf switches. A `domain_gpus` of at most a node says that Slurm's blocks
            are not NVLink domains; they count as units then. `gpus_per_node` is not read.
        environ: of any process of the job.
        run: runs `scontrol show topology`; not called if the topology is known without.
        addresses: SLURM_TOPOLOGY_ADDR and its pattern of every node, for those who gathered them.

    Raises:
        UserError: no job, variables that contradict each other, a topology that cannot be read or
            knows none of the nodes, sizes that do not fit.
    """
    names, gpus = job_nodes(environ)
    if config.nodes not in (None, len(names)):
        raise UserError(
            f"cluster.nodes={config.nodes} contradicts the Slurm job, which has {len(names)} "
            f"nodes; the nearest is cluster.nodes={len(names)}, or null."
        )
    topology, source = _topology(config, names, environ, run, addresses)
    most = max(gpus)
    blocks_are_domains = config.domain_gpus is None or config.domain_gpus > most
    units, domains = topology.unit, topology.block if blocks_are_domains else {}
    if not units and not blocks_are_domains:
        units = topology.block
    if (topology.unit or topology.block) and not any(n in units or n in domains for n in names):
        raise UserError(
            f"{source} knows none of the job's nodes, such as {names[0]}: is it of another cluster?"
        )
    node_domain, domain_gpus = _domains(config, names, domains, most)
    rails = most if config.rails is None else config.rails
    configured.check_rails(rails, most)
    return Cluster(
        nodes=len(names),
        gpus_per_node=most,
        domain_gpus=domain_gpus,
        rails=rails,
        unit_nodes=config.unit_nodes,
        node_names=tuple(names),
        node_gpus=tuple(gpus),
        node_unit=_numbered(names, units),
        node_domain=node_domain,
        origin=_origin(source, units, domains),
        **configured.wires(config),
    )


def job_nodes(environ: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """The nodes of the step, or else of the job, and the GPUs that it uses on each.

    A task is a GPU, but where there is one task a node and Slurm gave the node several GPUs: then
    the task is a launcher (torchrun) and starts a rank for each.

    Raises:
        UserError: no job, or lists that contradict each other.
    """
    prefix = "SLURM_STEP" if _in_users_step(environ) else "SLURM_JOB"
    tasks_key = "SLURM_STEP_TASKS_PER_NODE" if prefix == "SLURM_STEP" else "SLURM_TASKS_PER_NODE"
    nodes_key = f"{prefix}_NODELIST"
    if not environ.get(nodes_key):
        raise UserError(
            f"cluster.source=slurm needs a Slurm job, and {nodes_key} is not set; start with "
            f"sbatch, srun or salloc, or choose a preset such as cluster=dgx_h100."
        )
    names = expand_hostlist(environ[nodes_key], nodes_key)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{nodes_key}={environ[nodes_key]!r} names {twice} twice.")
    tasks = [1] * len(names)
    if environ.get(tasks_key):
        tasks = expand_tasks_per_node(environ[tasks_key], tasks_key)
    if len(tasks) != len(names):
        raise UserError(
            f"{tasks_key}={environ[tasks_key]!r} is for {len(tasks)} nodes, but {nodes_key} names "
            f"{len(names)}."
        )
    if max(tasks) > 1:
        return names, tasks
    return names, [_gpus_on_node(environ)] * len(names)


def _in_users_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a step of srun's, which may have fewer nodes and tasks than its job."""
    step = environ.get("SLURM_STEP_ID", "")
    known = environ.get("SLURM_STEP_NODELIST") and environ.get("SLURM_STEP_TASKS_PER_NODE")
    return bool(known) and step.isdecimal() and int(step) < FIRST_SPECIAL_STEP


def _gpus_on_node(environ: Mapping[str, str]) -> int:
    text = environ.get("SLURM_GPUS_ON_NODE") or "1"
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise UserError(f"SLURM_GPUS_ON_NODE={text!r} must be a whole number of at least 1.")
    return int(text)


def _topology(
    config: ClusterConfig,
    names: list[str],
    environ: Mapping[str, str],
    run: Run,
    addresses: Mapping[str, tuple[str, str]] | None,
) -> tuple[SlurmTopology, str]:
    """What is known of the network, and where from: a file, addresses, or scontrol."""
    if config.topology_file is not None:
        return _from_file(config.topology_file), f"cluster.topology_file={config.topology_file}"
    own = (environ.get("SLURM_TOPOLOGY_ADDR", ""), environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""))
    if addresses is not None:
        known = {node: addresses[node] for node in names if node in addresses}
        return topology_of_addresses(known), "SLURM_TOPOLOGY_ADDR"
    if own[1] == "node":  # topology/flat: there is nothing to ask for
        return SlurmTopology(), "Slurm"
    if len(names) == 1 and all(own):
        return topology_of_addresses({names[0]: own}), "SLURM_TOPOLOGY_ADDR"
    text = run(SHOW_TOPOLOGY)
    what = " ".join(SHOW_TOPOLOGY)
    if not text.strip() and not own[1]:
        return SlurmTopology(), "Slurm"
    return parse_topology(text, what), what


def _from_file(name: str) -> SlurmTopology:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"cluster.topology_file={name} cannot be read: {reason}.") from None
    return parse_topology(text, Path(name).name)


def _numbered(names: list[str], group: Mapping[str, str]) -> tuple[int, ...]:
    """A number for each node's group, in order of appearance; a node without one is alone.

    Empty where no node has a group.
    """
    if not any(name in group for name in names):
        return ()
    numbers: dict[tuple[bool, str], int] = {}
    keys = [(True, group[name]) if name in group else (False, name) for name in names]
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def _domains(
    config: ClusterConfig, names: list[str], domains: Mapping[str, str], most: int
) -> tuple[tuple[int, ...], int]:
    """`node_domain` and `domain_gpus` of the cluster; `most` GPUs are on its fullest node."""
    node_domain = _numbered(names, domains)
    if not node_domain:
        size = most if config.domain_gpus is None else config.domain_gpus
        configured.check_domain(size, most)
        return (), size
    fullest, count = Counter(node_domain).most_common(1)[0]
    largest = count * most
    if config.domain_gpus is not None and largest > config.domain_gpus:
        block = domains[names[node_domain.index(fullest)]]
        raise UserError(
            f"cluster.domain_gpus={config.domain_gpus} contradicts Slurm, whose block {block} "
            f"holds {largest} GPUs of the job; the nearest is "
            f"cluster.domain_gpus={configured.nearest_multiple(largest, most)}, or null."
        )
    return node_domain, largest


def _origin(source: str, units: Mapping[str, str], domains: Mapping[str, str]) -> str:
    """`units from scontrol show topology, domains from the configuration`."""
    unit = source if units else "the configuration"
    domain = source if domains else "the configuration"
    if unit == domain:
        return f"nodes from Slurm, units and domains from {unit}"
    return f"nodes from Slurm, units from {unit}, domains from {domain}"
