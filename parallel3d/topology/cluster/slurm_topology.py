"""What Slurm says of the network: `scontrol show topology`, topology.conf, SLURM_TOPOLOGY_ADDR.

Formats: SchedMD/slurm doc/man/man5/topology.conf.5, src/plugins/topology/{tree,block}; outputs of
`scontrol show topology` as the plugins print them. topology/tree names leaf switches,
topology/block names blocks, which on multi-node NVLink systems are the NVLink domains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parallel3d.errors import UserError
from parallel3d.topology.cluster.slurm_names import expand_hostlist, shortened

HEADS = ("switchname", "blockname", "aggregatedblock", "blocksizes")
KEYS = (*HEADS, "nodes", "switches", "level", "linkspeed", "blockindex", "blocksize")
FORMS = "SwitchName=… Nodes=… or Switches=…, or BlockName=… Nodes=…"


@dataclass(frozen=True)
class SlurmTopology:
    """The leaf switch and the block of each node that has one, by name."""

    unit: dict[str, str] = field(default_factory=dict)
    block: dict[str, str] = field(default_factory=dict)


def parse_topology(text: str, what: str) -> SlurmTopology:
    """Read what `scontrol show topology` prints, or a topology.conf, of trees, blocks or both.

    A leaf switch is one without switches below it. Aggregated blocks (several racks) are passed
    over. `what` names the text in messages.

    Raises:
        UserError: no line of it, a line that cannot be read, a switch that is named and not
            described (a truncated text), a node under two leaf switches or in two blocks.
    """
    topology = SlurmTopology()
    described: set[str] = set()
    children: dict[str, str] = {}
    for number, line in _lines(text):
        where = f"{what} line {number}"
        fields = _fields(line, where)
        head = next(iter(fields))
        if head == "switchname":
            described.add(fields[head])
            _read_switch(fields, topology, children, where)
        elif head == "blockname":
            described.add(fields[head])
            nodes = (
                expand_hostlist(fields["nodes"], f"Nodes of {where}") if "nodes" in fields else []
            )
            _put(topology.block, nodes, fields[head], "blocks", where)
    if not described:
        raise UserError(f"{what} describes no switch and no block: it must have lines {FORMS}.")
    missing = [child for child in children if child not in described]
    if missing:
        raise UserError(
            f"{what} names switch {missing[0]} under {children[missing[0]]} and does not describe "
            f"it: is it cut off?"
        )
    return topology


def _lines(text: str) -> list[tuple[int, str]]:
    """(number, line) without comments and empty lines; a backslash continues a line."""
    lines: list[tuple[int, str]] = []
    open_line = ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line = open_line + raw.split("#", 1)[0].strip()
        open_line = line[:-1] + " " if line.endswith("\\") else ""
        if not open_line and line:
            lines.append((number, line))
    if open_line.strip():
        lines.append((text.count("\n") + 1, open_line))
    return lines


def _fields(line: str, where: str) -> dict[str, str]:
    """The keys of a line, in small letters, and their values."""
    fields: dict[str, str] = {}
    for word in line.split():
        name, sign, value = word.partition("=")
        name = name.lower()
        if not sign or not value or name not in KEYS or name in fields:
            raise UserError(f"{where}, {shortened(word)!r}, cannot be read: it must be {FORMS}.")
        fields[name] = value
    if next(iter(fields)) not in HEADS:
        raise UserError(f"{where}, {shortened(line)!r}, cannot be read: it must be {FORMS}.")
    return fields


def _read_switch(
    fields: Mapping[str, str], topology: SlurmTopology, children: dict[str, str], where: str
) -> None:
    name = fields["switchname"]
    if "switches" in fields:
        for child in expand_hostlist(fields["switches"], f"Switches of {where}"):
            children[child] = name
    elif "nodes" in fields:
        nodes = expand_hostlist(fields["nodes"], f"Nodes of {where}")
        _put(topology.unit, nodes, name, "leaf switches", where)
    elif "level" not in fields:  # scontrol prints a leaf that waits for nodes, a file has none
        raise UserError(f"{where}: switch {name} has neither Nodes nor Switches: is it cut off?")


def _put(found: dict[str, str], nodes: list[str], name: str, kind: str, where: str) -> None:
    for node in nodes:
        if found.setdefault(node, name) != name:
            raise UserError(f"{where}: {node} is in two {kind}, {found[node]} and {name}.")


def parse_address(address: str, pattern: str) -> tuple[str | None, str | None, str]:
    """(leaf switch, block, node) of SLURM_TOPOLOGY_ADDR and SLURM_TOPOLOGY_ADDR_PATTERN.

    `spine.leaf1.node2` with `switch.switch.node` is leaf1; `rack3.node7` with `block.node` is in
    block rack3; a plain `node` is under no switch that Slurm knows. The top of a tree may be empty
    (`.core.leaf.node` has been seen), and a node's name may hold dots.

    Raises:
        UserError: another pattern, or an address that does not have its parts.
    """
    kinds = pattern.split(".")
    if kinds[-1] != "node" or not set(kinds[:-1]) <= {"switch", "block"}:
        raise UserError(
            f"SLURM_TOPOLOGY_ADDR_PATTERN={shortened(pattern)!r} is not known: it must be node, or "
            f"switch and block joined by dots before it, such as switch.switch.node."
        )
    parts = address.split(".", len(kinds) - 1)
    found = dict(zip(kinds, parts, strict=False))  # the last of a kind is the nearest
    if len(parts) != len(kinds) or not all(found.values()) or set("[], ") & set(parts[-1]):
        raise UserError(
            f"SLURM_TOPOLOGY_ADDR={shortened(address)!r} does not fit "
            f"SLURM_TOPOLOGY_ADDR_PATTERN={pattern}: it must have {len(kinds)} names with dots "
            f"between."
        )
    return found.get("switch"), found.get("block"), found["node"]


def topology_of_addresses(addresses: Mapping[str, tuple[str, str]]) -> SlurmTopology:
    """The same from each node's SLURM_TOPOLOGY_ADDR and its pattern, by node name.

    Raises UserError for an address that cannot be read or is another node's.
    """
    topology = SlurmTopology()
    for node, (address, pattern) in addresses.items():
        unit, block, named = parse_address(address, pattern)
        if named != node:
            raise UserError(
                f"SLURM_TOPOLOGY_ADDR={shortened(address)!r} of node {node} ends in another name."
            )
        if unit is not None:
            topology.unit[node] = unit
        if block is not None:
            topology.block[node] = block
    return topology
