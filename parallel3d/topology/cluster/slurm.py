"""Finds the cluster of a Slurm job: node lists, topology, leaf switches and NVLink domains.

Slurm knows the nodes, their ranks and their connections; speeds come from the configuration. If
Slurm names no switches or domains, the configuration's sizes divide the nodes in Slurm's order. The
grammar of node lists follows `scontrol show hostnames` of Slurm 22.05.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel3d.blueprint.cluster import Cluster, cluster_of
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.config.user_files import read_given
from parallel3d.errors import UserError

MOST_NODES = 1_000_000  # a longer list must be a mistake, and would fill the memory
NAME = re.compile(r"[A-Za-z0-9_.-]+")
RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
REPEATED = re.compile(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,8})\))?")


def expand_hostlist(text: str, what: str = "node list") -> list[str]:
    """Expands a node list, in order: `n[01-03,7],rack[1-2]node[1-2]`.

    Leading zeros are part of a name, the last brackets vary fastest, and a name may occur twice.
    `what`: the list's name in messages.

    Raises UserError for unmatched brackets, ranges that do not count up, or a list without names.
    """
    names: list[str] = []
    try:
        if set("[]") & set(re.sub(r"\[[^\[\]]*\]", "", text)):
            raise ValueError("its brackets do not match")
        for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):  # commas in brackets stay
            pieces = re.split(r"\[(.*?)\]", entry.strip())  # literal, ranges, literal, ranges, …
            choices = [_numbers(p) if place % 2 else [p] for place, p in enumerate(pieces)]
            if len(names) + math.prod(map(len, choices)) > MOST_NODES:
                raise ValueError(f"it names more than {MOST_NODES:,} nodes")
            expanded = ["".join(parts) for parts in itertools.product(*choices)]
            if expanded[0] and not NAME.fullmatch(expanded[0]):
                raise ValueError(f"{entry!r} is not a node name")
            names += filter(None, expanded)
        if not names:
            raise ValueError("it names no node")
    except ValueError as error:
        raise UserError(
            f"the {what} {shortened(text)!r} cannot be read: {error}; it must look like "
            "n[01-03,7],m1."
        ) from None
    return names


def _numbers(ranges: str) -> list[str]:
    """Expands `01-03,7` to 01, 02, 03, 7. Raises ValueError if it is malformed or too long."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is not a range such as 01-03")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise ValueError(f"the range {part!r} counts down")
        if high - low >= MOST_NODES:
            raise ValueError(f"it names more than {MOST_NODES:,} nodes")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(low, high + 1)]
    return numbers


def shortened(text: str, most: int = 60) -> str:
    """Returns the beginning of a text, on one line, for a message."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def expand_tasks_per_node(text: str, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Expands the tasks of each node: `8(x3),4` is 8, 8, 8, 4. Raises UserError if malformed."""
    matches = [REPEATED.fullmatch(part.strip()) for part in text.split(",")]
    parts = [(int(match[1]), int(match[2] or 1)) for match in matches if match]
    if len(parts) < len(matches) or sum(repeats for _, repeats in parts) > MOST_NODES:
        raise UserError(
            f"{name}={shortened(text)!r} cannot be read: it must look like 8(x3),4 and cover at "
            f"most {MOST_NODES:,} nodes."
        )
    return [tasks for tasks, repeats in parts for _ in range(repeats)]


ARBITRARY = "arbitrary"


def host_of_rank_0(environ: Mapping[str, str], read: Callable[[str], str]) -> str:
    """Returns the node on which rank 0 of an srun step runs. Raises UserError if it is unknown.

    Rank 0 runs on the first of the step's sorted nodes. With `-m arbitrary`, it runs on the first
    node in SLURM_HOSTFILE, and in a heterogeneous job, on a node of the first component. `read`
    returns the text of a file, or raises OSError.
    """
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not listed:
        raise UserError("SLURM_PROCID is set but SLURM_STEP_NODELIST is not: start with srun")
    nodes = expand_hostlist(listed)
    if len(nodes) == 1:
        return nodes[0]
    how = environ.get("SLURM_DISTRIBUTION", ARBITRARY if environ.get("SLURM_HOSTFILE") else "")
    if how.startswith(ARBITRARY):
        return _first_of_hostfile(environ.get("SLURM_HOSTFILE"), nodes, read)
    size = environ.get("SLURM_HET_SIZE", "1")
    if size == "1":
        return nodes[0]
    for group in range(int(size) if size.isdecimal() and int(size) <= MOST_NODES else 0):
        if of_group := environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}"):
            for node in expand_hostlist(of_group):
                if node in nodes:
                    return node
        else:
            break
    raise UserError(
        f"SLURM_HET_SIZE={size} means a job of several components, but "
        "SLURM_JOB_NODELIST_HET_GROUP_0 and its successors do not show where rank 0 is: pass all "
        "variables of srun on to this process, or give launch.master_addr, the node of rank 0"
    )


def _first_of_hostfile(path: str | None, nodes: list[str], read: Callable[[str], str]) -> str:
    """Returns the first node of a hostfile, whose lines are `node` or `node*tasks`."""
    remedy = "give launch.master_addr, the node of rank 0"
    if path is None:
        raise UserError(f"srun -m arbitrary without SLURM_HOSTFILE hides where rank 0 is: {remedy}")
    try:
        lines = [line.partition("#")[0].strip() for line in read(path).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"SLURM_HOSTFILE={path} tells where rank 0 is, but cannot be read here ({error}): "
            f"{remedy}"
        ) from None
    first = next((line for line in lines if line), "")
    node = expand_hostlist(first.partition("*")[0], "first line of SLURM_HOSTFILE")[0]
    if node not in nodes:
        raise UserError(
            f"SLURM_HOSTFILE={path} begins with {node}, which is not a node of this step: {remedy}"
        )
    return node


# Formats: SchedMD/slurm doc/man/man5/topology.conf.5, src/plugins/topology/{tree,block}.
# topology/tree names leaf switches; topology/block names blocks, the NVLink domains of multi-node
# NVLink systems.

LINE = re.compile(
    r"(SwitchName|BlockName|AggregatedBlock|BlockSizes)=\S+"
    r"(\s+(Nodes|Switches|Level|LinkSpeed|BlockIndex|BlockSize)=\S+)*",
    re.IGNORECASE,
)
FORMS = "SwitchName=… Nodes=…, SwitchName=… Switches=… or BlockName=… Nodes=…"


@dataclass(frozen=True)
class SlurmTopology:
    """Maps nodes to their leaf switches (`unit`) and to their blocks, for nodes that have them."""

    unit: dict[str, str] = field(default_factory=dict)
    block: dict[str, str] = field(default_factory=dict)


def parse_topology(text: str, what: str) -> SlurmTopology:
    """Parses the output of `scontrol show topology`, or a topology.conf, of trees, blocks or both.

    A leaf switch has no switches below it. Aggregated blocks (several racks) are ignored. `what`:
    the text's name in messages.

    Raises UserError for an empty or malformed text, a switch that is named but not described (a
    truncated text), or a node under two leaf switches or in two blocks.
    """
    topology = SlurmTopology()
    described: set[str] = set()
    children: dict[str, str] = {}
    plain = re.sub(r"\\[ \t]*\n", " ", re.sub(r"#.*", "", text))  # a backslash continues a line
    for number, line in enumerate(plain.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{what} line {number}"
        if not LINE.fullmatch(line.strip()):
            raise UserError(
                f"{where}, {shortened(line)!r}, cannot be read: it must look like {FORMS}."
            )
        words = [word.partition("=") for word in line.split()]
        fields = {key.lower(): value for key, _, value in words}
        head, name = next(iter(fields.items()))
        if head not in ("switchname", "blockname"):
            continue
        described.add(name)
        switch = head == "switchname"
        if switch and "switches" in fields:
            below = expand_hostlist(fields["switches"], f"Switches of {where}")
            children |= dict.fromkeys(below, name)
        elif "nodes" in fields:
            groups = topology.unit if switch else topology.block
            for node in expand_hostlist(fields["nodes"], f"Nodes of {where}"):
                if groups.setdefault(node, name) != name:
                    kind = "leaf switches" if switch else "blocks"
                    raise UserError(f"{where}: {node} is in two {kind}, {groups[node]} and {name}.")
        # A line with a level is valid: scontrol prints it for a leaf switch without nodes yet.
        elif switch and "level" not in fields:
            raise UserError(
                f"{where}: switch {name} has neither Nodes nor Switches; the text may be cut off"
            )
    if not described:
        raise UserError(
            f"{what} describes no switch and no block: it must have lines such as {FORMS}."
        )
    missing = [child for child in children if child not in described]
    if missing:
        raise UserError(
            f"{what} names switch {missing[0]} under {children[missing[0]]} but does not describe "
            f"it; the text may be cut off"
        )
    return topology


def parse_address(address: str, pattern: str) -> tuple[str | None, str | None, str]:
    """Returns (leaf switch, block, node) of SLURM_TOPOLOGY_ADDR and SLURM_TOPOLOGY_ADDR_PATTERN.

    `spine.leaf1.node2` with `switch.switch.node` gives leaf1; `rack3.node7` with `block.node` gives
    block rack3; a plain `node` has neither. The top of a tree may be empty (`.core.leaf.node`), and
    a node's name may have dots.

    Raises UserError for an unknown pattern, or an address that does not match it.
    """
    kinds = pattern.split(".")
    if kinds[-1] != "node" or not set(kinds[:-1]) <= {"switch", "block"}:
        raise UserError(
            f"SLURM_TOPOLOGY_ADDR_PATTERN={shortened(pattern)!r} is unknown: it must be node, or "
            "switch or block, once or several times, and then node, joined by dots, such as "
            "switch.switch.node."
        )
    parts = address.split(".", len(kinds) - 1)
    # The last of several switches is the nearest to the node, and `dict` keeps the last.
    found = dict(zip(kinds, parts, strict=False))
    if len(parts) != len(kinds) or not all(found.values()) or set("[], ") & set(parts[-1]):
        raise UserError(
            f"SLURM_TOPOLOGY_ADDR={shortened(address)!r} does not match "
            f"SLURM_TOPOLOGY_ADDR_PATTERN={pattern}: it must have {len(kinds)} names joined by "
            "dots."
        )
    return found.get("switch"), found.get("block"), found["node"]


def topology_of_addresses(addresses: Mapping[str, tuple[str, str]]) -> SlurmTopology:
    """Returns the topology from each node's SLURM_TOPOLOGY_ADDR and pattern.

    Raises UserError for an address that is malformed or belongs to another node.
    """
    topology = SlurmTopology()
    for node, (address, pattern) in addresses.items():
        unit, block, named = parse_address(address, pattern)
        if named != node:
            raise UserError(
                f"SLURM_TOPOLOGY_ADDR={shortened(address)!r} of node {node} must end with {node}."
            )
        if unit is not None:
            topology.unit[node] = unit
        if block is not None:
            topology.block[node] = block
    return topology


Run = Callable[[list[str]], str]
SHOW_TOPOLOGY = ["scontrol", "show", "topology"]
# Slurm's own steps (batch script, interactive shell, …) have ids from here on.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


def slurm_cluster(
    config: ClusterConfig,
    environ: Mapping[str, str],
    run: Run,
    addresses: Mapping[str, tuple[str, str]] | None = None,
) -> Cluster:
    """Returns the cluster of the Slurm job that `environ` describes.

    Args:
        config: gives the speeds, `rails` and `topology_file`. It also gives `domain_gpus` if Slurm
            names no blocks, and `unit_nodes` if Slurm names no leaf switches. If `domain_gpus` does
            not exceed the GPUs of a node, Slurm's blocks count as units instead of NVLink domains.
            `gpus_per_node` is ignored.
        environ: environment of any process of the job.
        run: runs a command, here `scontrol show topology` if nothing else gives the topology.
        addresses: each node's SLURM_TOPOLOGY_ADDR and pattern, or None if they were not gathered.

    Raises:
        UserError: if there is no job, variables contradict each other, the topology cannot be read
            or has none of the nodes, or sizes do not fit.
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
            f"{source} names none of the job's nodes, such as {names[0]}; give the topology of "
            "this cluster as cluster.topology_file"
        )
    own: dict[str, Any] = {"node_gpus": tuple(gpus), "node_unit": _numbered(names, units)}
    if node_domain := _numbered(names, domains):
        own |= {"node_domain": node_domain}
        own |= {"domain_gpus": _domain_size(config, names, domains, node_domain, most)}
    return cluster_of(config, len(names), most, _origin(source, units, domains), names, **own)


def job_nodes(environ: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """Returns the nodes of the step, or else of the job, and the number of GPUs of each.

    Each task counts as a GPU. But if every node has a single task, the tasks count as launchers
    (torchrun), which start a rank for each GPU of their node.

    Raises UserError if there is no job, or if the lists contradict each other.
    """
    prefix = "SLURM_STEP" if _in_users_step(environ) else "SLURM_JOB"
    tasks_key = "SLURM_STEP_TASKS_PER_NODE" if prefix == "SLURM_STEP" else "SLURM_TASKS_PER_NODE"
    nodes_key = f"{prefix}_NODELIST"
    if not environ.get(nodes_key):
        raise UserError(
            f"cluster.source=slurm needs a Slurm job, but {nodes_key} is not set; start with "
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
    """Returns whether this process runs in a step of srun, which may be smaller than its job."""
    step = environ.get("SLURM_STEP_ID", "")
    known = environ.get("SLURM_STEP_NODELIST") and environ.get("SLURM_STEP_TASKS_PER_NODE")
    return bool(known) and step.isdecimal() and int(step) < FIRST_SPECIAL_STEP


def _gpus_on_node(environ: Mapping[str, str]) -> int:
    """Returns the number of GPUs per node of a job with one task per node.

    If no variable gives the number, it is 1 in a step of srun. Otherwise, UserError is raised,
    because assuming one GPU could describe a different machine.
    """
    local = environ.get("LOCAL_WORLD_SIZE")  # set by torchrun, if the task started it
    for name, text, count in (
        ("SLURM_GPUS_ON_NODE", environ.get("SLURM_GPUS_ON_NODE"), _whole),
        ("SLURM_STEP_GPUS", environ.get("SLURM_STEP_GPUS"), _listed),
        ("SLURM_JOB_GPUS", environ.get("SLURM_JOB_GPUS"), _listed),
        ("SLURM_GPUS_PER_NODE", environ.get("SLURM_GPUS_PER_NODE"), _by_type),
        ("LOCAL_WORLD_SIZE", local, _whole),
    ):
        if text:
            found = count(text.strip())
            if not 1 <= found <= 1024:
                raise UserError(f"{name}={text!r} must give 1 to 1024 GPUs for each node.")
            return found
    if _in_users_step(environ):
        return 1  # srun started one rank per node
    raise UserError(
        "the job has one task per node, but none of SLURM_GPUS_ON_NODE, SLURM_JOB_GPUS and "
        "SLURM_GPUS_PER_NODE says how many GPUs a node has: ask Slurm for GPUs "
        "(--gpus-per-node=8) or for a task per GPU (--ntasks-per-node=8), or export "
        "SLURM_GPUS_ON_NODE"
    )


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0


def _listed(text: str) -> int:
    """Returns the length of a list such as 0,2-3, or 0 for other text."""
    parts = [re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part) for part in text.split(",")]
    if not all(parts):
        return 0
    return sum(int(p[2] or p[1]) - int(p[1]) + 1 for p in parts if p is not None)


def _by_type(text: str) -> int:
    """Returns the sum of a request such as 8, a100:8 or a100:4,v100:4, or 0 for other text."""
    parts = [re.fullmatch(r"(?:[\w.-]+:)?([0-9]{1,4})", part) for part in text.split(",")]
    return sum(int(p[1]) for p in parts if p is not None) if all(parts) else 0


def _topology(
    config: ClusterConfig,
    names: list[str],
    environ: Mapping[str, str],
    run: Run,
    addresses: Mapping[str, tuple[str, str]] | None,
) -> tuple[SlurmTopology, str]:
    """Returns the topology, and its source: a file, addresses, or scontrol."""
    if config.topology_file is not None:
        text = read_given("cluster.topology_file", config.topology_file)
        topology = parse_topology(text, Path(config.topology_file).name)
        return topology, f"cluster.topology_file={config.topology_file}"
    own = (environ.get("SLURM_TOPOLOGY_ADDR", ""), environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""))
    if addresses is not None:
        known = {node: addresses[node] for node in names if node in addresses}
        return topology_of_addresses(known), "SLURM_TOPOLOGY_ADDR"
    if own[1] == "node":  # topology/flat has nothing to query
        return SlurmTopology(), "Slurm"
    if len(names) == 1 and all(own):
        return topology_of_addresses({names[0]: own}), "SLURM_TOPOLOGY_ADDR"
    text = run(SHOW_TOPOLOGY)
    what = " ".join(SHOW_TOPOLOGY)
    if not text.strip() and not own[1]:
        return SlurmTopology(), "Slurm"
    return parse_topology(text, what), what


def _numbered(names: list[str], group: Mapping[str, str]) -> tuple[int, ...]:
    """Numbers the nodes' groups in order of appearance.

    A node without a group counts as a group of its own. Returns () if no node has a group.
    """
    if not any(name in group for name in names):
        return ()
    numbers: dict[tuple[bool, str], int] = {}
    keys = [(True, group[name]) if name in group else (False, name) for name in names]
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def _domain_size(
    config: ClusterConfig,
    names: list[str],
    domains: Mapping[str, str],
    node_domain: tuple[int, ...],
    most: int,
) -> int:
    """Returns the number of GPUs in the largest domain, with `most` GPUs per node."""
    fullest, count = Counter(node_domain).most_common(1)[0]
    largest = count * most
    if config.domain_gpus is not None and largest > config.domain_gpus:
        block = domains[names[node_domain.index(fullest)]]
        raise UserError(
            f"cluster.domain_gpus={config.domain_gpus} contradicts Slurm, whose block {block} "
            f"holds {largest} GPUs of the job; the nearest is cluster.domain_gpus={largest}, or "
            "null."
        )
    return largest


def _origin(source: str, units: Mapping[str, str], domains: Mapping[str, str]) -> str:
    """Formats `units from scontrol show topology, domains from the configuration`."""
    unit = source if units else "the configuration"
    domain = source if domains else "the configuration"
    if unit == domain:
        return f"nodes from Slurm, units and domains from {unit}"
    return f"nodes from Slurm, units from {unit}, domains from {domain}"
