"""Tests clusters from recorded and mangled output of Slurm."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from parallel3d.blueprint.cluster import Cluster
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.errors import UserError
from parallel3d.topology.cluster.discover import discover, run_command
from parallel3d.topology.cluster.slurm import (
    expand_hostlist,
    expand_tasks_per_node,
    job_nodes,
    parse_address,
    parse_topology,
    slurm_cluster,
    topology_of_addresses,
)

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "topology"
JOB = json.loads((FIXTURES / "slurm_job.json").read_text(encoding="utf-8"))


def fixture(name: str) -> str:
    return (FIXTURES / name).read_text(encoding="utf-8")


def refuse_to_run(command: list[str]) -> str:
    raise AssertionError(f"{command} was run")


def environment(nodes: str, tasks: str, **more: str) -> dict[str, str]:
    return {"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks, **more}


def found(hosts: str, tasks: str, topology: str, **keys: Any) -> Cluster:
    config = ClusterConfig(**{"source": "slurm", **keys})
    return slurm_cluster(config, environment(hosts, tasks), lambda _: topology)


# --- short forms -----------------------------------------------------------------------------


# The output of `scontrol show hostnames` of Slurm 22.05 for each.
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", "node1"),
        ("n[01-03,7],m1", "n01 n02 n03 n7 m1"),
        ("rack[1-2]node[01-02]", "rack1node01 rack1node02 rack2node01 rack2node02"),
        ("n[1-2][3-4]", "n13 n14 n23 n24"),
        ("a,b,a", "a b a"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[09-11]", "n09 n10 n11"),
        (",,a", "a"),
    ],
)
def test_node_lists_expand_as_slurm_expands_them(text: str, names: str):
    assert expand_hostlist(text) == names.split()


def test_names_may_continue_after_brackets_and_be_addresses():
    assert expand_hostlist("n[1-2]-ib") == ["n1-ib", "n2-ib"]
    assert expand_hostlist("10.140.71.103,10.0.0.1") == ["10.140.71.103", "10.0.0.1"]


BAD_LISTS = ["", " ", "n[1-3", "n1]", "n[3-1]", "n[]", "n[1,]", "n[a-b]", "n[1--3]", "n[[1]]"]
BAD_LISTS += [
    "n[0-2/2]",
    "(null)",
    "n 1",
    "n[1-99999999]",
    "n[0-999][0-999][0-999]",
    ",",
    "[",
    "n;m",
]


@pytest.mark.parametrize("text", BAD_LISTS)
def test_invalid_node_lists_are_refused_in_a_sentence(text: str):
    with pytest.raises(UserError, match="cannot be read"):
        expand_hostlist(text)


def test_tasks_per_node():
    assert expand_tasks_per_node("8(x3),4") == [8, 8, 8, 4]
    assert expand_tasks_per_node("3,1(x2)") == [3, 1, 1]
    for text in ("", "8(x", "x3", "8(x0)", "0", "-1", "8,", "8(x99999999)", "²"):
        with pytest.raises(UserError, match="SLURM_TASKS_PER_NODE"):
            expand_tasks_per_node(text)


# --- addresses and topologies ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "pattern", "parts"),
    [
        ("spine.leaf1.node1", "switch.switch.node", ("leaf1", None, "node1")),
        ("sh04.sh04-isw-16.sh04-16n05", "switch.switch.node", ("sh04-isw-16", None, "sh04-16n05")),
        (
            ".ib-core.tors-r1pac16.gpu027",
            "switch.switch.switch.node",
            ("tors-r1pac16", None, "gpu027"),
        ),
        ("b8.tux1", "block.node", (None, "b8", "tux1")),
        ("rack3.10.140.71.103", "block.node", (None, "rack3", "10.140.71.103")),
        ("node7", "node", (None, None, "node7")),
    ],
)
def test_addresses_of_nodes(address: str, pattern: str, parts: tuple[str | None, ...]):
    assert parse_address(address, pattern) == parts


@pytest.mark.parametrize(
    ("address", "pattern"),
    [
        *[
            ("", "node"),
            ("leaf1", "switch.node"),
            ("leaf1.", "switch.node"),
            (".n1", "switch.node"),
        ],
        *[("a.b", ""), ("a.b", "switch"), ("a.b", "node.switch"), ("a.b", "torus.node")],
        *[("a.b", "switch..node"), ("leaf1.n[1-2]", "switch.node"), ("leaf.n 1", "switch.node")],
    ],
)
def test_addresses_that_contradict_their_pattern_are_refused(address: str, pattern: str):
    with pytest.raises(UserError, match="SLURM_TOPOLOGY_ADDR"):
        parse_address(address, pattern)


def test_a_tree_printed_by_scontrol_is_read():
    tree = parse_topology(fixture("scontrol_tree.txt"), "scontrol")
    assert tree.unit == {"node1": "leaf1", "node2": "leaf1", "node3": "leaf2", "node4": "leaf2"}
    assert tree.block == {}
    spartan = parse_topology(fixture("scontrol_spartan.txt"), "scontrol")
    assert spartan.unit["spartan-bm039"] == spartan.unit["spartan-bm029"] == "le-266-r19-1-res"
    assert len(spartan.unit) == 14 + 39 + 20 + 9 + 5


def test_blocks_printed_by_scontrol_are_read():
    blocks = parse_topology(fixture("scontrol_block.txt"), "scontrol")
    assert (blocks.block["node0018"], blocks.block["node0019"]) == ("block01", "block02")
    aggregated = parse_topology(fixture("scontrol_aggregated.txt"), "scontrol")
    assert set(aggregated.block.values()) == {"gb300_b0", "gb300_b1"}


def test_topology_conf_of_either_form_and_of_both():
    tree = parse_topology(fixture("topology_tree.conf"), "topology.conf")
    assert tree.unit == {
        **dict.fromkeys(("tux0", "tux1", "tux2", "tux3", "tux12"), "s0"),
        **dict.fromkeys(("tux4", "tux5", "tux6", "tux7"), "s1"),
    }
    both = parse_topology(fixture("topology_both.conf"), "topology.conf")
    assert (both.unit["g05"], both.block["g05"]) == ("leaf1", "rack2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no switch and no block"),
        ("# nothing\n\n", "no switch and no block"),
        ("BlockSizes=18\n", "no switch and no block"),
        ("slurm_load_topo error: Unable to contact slurm controller", "line 1"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Switches=a,c", "names switch c under b"),
        ("SwitchName=a Nodes=n1\nSwitchName=b", "neither Nodes nor Switches"),
        ("SwitchName=a Nodes=n[1-", "brackets"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1", "n1 is in two leaf switches, a and b"),
        ("BlockName=a Nodes=n1\nBlockName=b Nodes=n1", "n1 is in two blocks, a and b"),
        ("Nodes=n1 SwitchName=a", "cannot be read"),
        ("SwitchName=a SwitchName=b Nodes=n1", "cannot be read"),
        ("SwitchName= Nodes=n1", "cannot be read"),
        ("RingName=a Nodes=n1", "cannot be read"),
    ],
)
def test_invalid_topologies_are_refused_in_a_sentence(text: str, said: str):
    with pytest.raises(UserError, match=r"topology\.conf") as raised:
        parse_topology(text, "topology.conf")
    assert said in str(raised.value)


def test_an_address_of_another_node_is_refused():
    with pytest.raises(UserError, match="node n1 must end with n1"):
        topology_of_addresses({"n1": ("leaf.n2", "switch.node")})


# --- the job ---------------------------------------------------------------------------------


def test_nodes_of_the_recorded_job():
    for environ in (JOB["batch"], *JOB["ranks"]):
        assert job_nodes(environ) == (["node2", "node3", "node4"], [3, 1, 1])


def test_the_recorded_job_becomes_a_cluster():
    made = slurm_cluster(
        ClusterConfig(source="slurm"), JOB["batch"], lambda _: fixture("scontrol_tree.txt")
    )
    assert made.node_names == ("node2", "node3", "node4")
    assert made.node.tolist() == [0, 0, 0, 1, 2]
    assert made.unit.tolist() == [0, 0, 0, 1, 1]
    assert made.domain.tolist() == [0, 0, 0, 1, 2]
    assert made.rail_of.tolist() == [0, 1, 2, 0, 0]


def test_addresses_that_the_ranks_gathered_give_the_same_units():
    names = {"0": "node2", "1": "node3", "2": "node4"}
    addresses = {
        names[rank["SLURM_NODEID"]]: (
            rank["SLURM_TOPOLOGY_ADDR"],
            rank["SLURM_TOPOLOGY_ADDR_PATTERN"],
        )
        for rank in JOB["ranks"]
    }
    made = slurm_cluster(ClusterConfig(), JOB["ranks"][4], refuse_to_run, addresses)
    assert made.unit.tolist() == [0, 0, 0, 1, 1]
    assert (
        made.origin
        == "nodes from Slurm, units from SLURM_TOPOLOGY_ADDR, domains from the configuration"
    )


def test_a_steps_size_counts_but_not_that_of_sallocs_shell():
    job = environment("n[1-4]", "8(x4)")
    step = {"SLURM_STEP_NODELIST": "n2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert job_nodes(job | step | {"SLURM_STEP_ID": "3"}) == (["n2"], [2])
    assert job_nodes(job | step | {"SLURM_STEP_ID": "4294967290"})[0] == ["n1", "n2", "n3", "n4"]


def test_one_task_a_node_with_several_gpus_is_a_launcher():
    assert job_nodes(environment("n[1-2]", "1(x2)", SLURM_GPUS_ON_NODE="8"))[1] == [8, 8]
    one = environment("n[1-2]", "1(x2)")
    for more, gpus in (
        ({"SLURM_JOB_GPUS": "0,2-4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:4,v100:2"}, 6),
        ({"SLURM_GPUS_PER_NODE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
    ):
        assert job_nodes(one | more)[1] == [gpus, gpus]
    step = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert job_nodes(one | step | {"SLURM_STEP_ID": "0"})[1] == [1, 1]  # srun started the ranks


def test_gpus_of_a_node_are_not_guessed():
    """Under salloc without GPUs, one GPU per node would describe another machine."""
    for environ in (environment("n[1-2]", "1(x2)"), {"SLURM_JOB_NODELIST": "n[1-2]"}):
        with pytest.raises(UserError, match=r"says how many GPUs a node has: ask Slurm for GPUs"):
            job_nodes(environ)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "needs a Slurm job"),
        (environment("n[1-2]", "8(x3)"), "is for 3 nodes, but SLURM_JOB_NODELIST names 2"),
        (environment("n1,n1", "8(x2)"), "names n1 twice"),
        (environment("n1", "1", SLURM_GPUS_ON_NODE="gpu:8"), "SLURM_GPUS_ON_NODE='gpu:8'"),
        (environment("n1", "1", SLURM_GPUS_ON_NODE="0"), "must give 1 to 1024"),
    ],
)
def test_jobs_that_contradict_themselves_are_refused(environ: dict[str, str], said: str):
    with pytest.raises(UserError) as raised:
        job_nodes(environ)
    assert said in str(raised.value)


# --- domains and units -----------------------------------------------------------------------


def test_blocks_are_domains_over_nodes_in_any_order_and_not_complete():
    made = found("node[0017-0021]", "4(x5)", fixture("scontrol_block.txt"))
    assert made.node_domain == (0, 0, 1, 1, 1)
    assert (made.domain_gpus, made.gpus_per_node, made.rails) == (12, 4, 4)
    assert set(made.unit.tolist()) == {0}
    assert made.sorted_slots()[:12].tolist() == list(range(8, 20))


def test_blocks_are_units_if_nvlink_ends_at_the_node():
    made = found("node[0017-0021]", "4(x5)", fixture("scontrol_block.txt"), domain_gpus=4)
    assert made.node_unit == (0, 0, 1, 1, 1)
    assert made.domain.tolist() == [n for n in range(5) for _ in range(4)]


def test_blocks_and_switches_together():
    made = found("g[02,05-06]", "8(x3)", fixture("topology_both.conf"))
    assert (made.node_unit, made.node_domain) == ((0, 0, 0), (0, 1, 1))


def test_nodes_without_a_place_in_the_topology_are_units_of_one():
    made = found("node[1-5]", "2(x5)", fixture("scontrol_tree.txt"))
    assert made.node_unit == (0, 0, 1, 1, 2)


def test_without_switches_units_follow_the_configured_sizes():
    environ = environment("n[1-4]", "4(x4)", SLURM_TOPOLOGY_ADDR_PATTERN="node")
    config = ClusterConfig(domain_gpus=8, unit_nodes=3, rails=2)
    made = slurm_cluster(config, environ, refuse_to_run)
    assert made.domain.tolist()[::4] == [0, 0, 1, 1]
    assert made.unit.tolist()[::4] == [0, 0, 0, 1]
    assert (made.rails, made.origin) == (
        2,
        "nodes from Slurm, units and domains from the configuration",
    )
    assert slurm_cluster(config, environment("n[1-4]", "4(x4)"), lambda _: "\n").nodes == 4


def test_speeds_come_from_the_configuration():
    made = found("node1", "2", fixture("scontrol_tree.txt"), rail_gb_per_s=12.5, spine=False)
    assert made.rail.gb_per_s == 12.5
    assert made.oversubscription is None


def test_a_file_is_read_instead_of_asking(tmp_path: Path):
    config = ClusterConfig(topology_file=str(FIXTURES / "topology_tree.conf"))
    made = slurm_cluster(config, environment("tux[3-4]", "8(x2)"), refuse_to_run)
    assert made.node_unit == (0, 1)
    missing = ClusterConfig(topology_file=str(tmp_path / "none.conf"))
    with pytest.raises(UserError, match="cannot be read: No such file"):
        slurm_cluster(missing, environment("tux[3-4]", "8(x2)"), refuse_to_run)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"nodes": 3}, "cluster.nodes=3 contradicts the Slurm job, which has 2 nodes"),
        ({"domain_gpus": 3}, "nearest is cluster.domain_gpus=2"),
        ({"rails": 5}, "nearest is cluster.rails=4"),
    ],
)
def test_sizes_that_contradict_the_job_are_refused(keys: dict[str, Any], said: str):
    with pytest.raises(UserError) as raised:
        found("node[1-2]", "4(x2)", fixture("scontrol_tree.txt"), **keys)
    assert said in str(raised.value)


def test_a_topology_of_another_cluster_is_refused():
    with pytest.raises(UserError, match="names none of the job's nodes, such as gpu1"):
        found("gpu[1-2]", "4(x2)", fixture("scontrol_tree.txt"))


def test_a_block_larger_than_the_configured_domain_is_refused():
    with pytest.raises(UserError, match="block block01 holds 72 GPUs of the job"):
        found("node[0001-0018]", "4(x18)", fixture("scontrol_block.txt"), domain_gpus=36)


def test_discovery_asks_the_named_source_and_needs_enough_gpus():
    config = ClusterConfig(source="slurm")
    environ = environment("node[1-2]", "4(x2)")
    tree = fixture("scontrol_tree.txt")
    assert discover(config, environ, lambda _: tree, world_size=8).size == 8
    with pytest.raises(UserError, match="8 GPUs on 2 nodes, too few for 9 ranks"):
        discover(config, environ, lambda _: tree, world_size=9)
    assert discover(ClusterConfig(), {}, refuse_to_run, world_size=9).nodes == 2


def test_commands_that_fail_end_in_a_sentence():
    assert run_command(["echo", "hello"]) == "hello\n"
    with pytest.raises(UserError, match="no-such-command is not installed"):
        run_command(["no-such-command", "show"])
    with pytest.raises(UserError, match=r"`sh -c .*` failed with exit code 3 and said: oh"):
        run_command(["sh", "-c", "echo oh >&2; exit 3"])


# --- mangled -----------------------------------------------------------------------------------


def mangled(text: str, rng: random.Random) -> str:
    """Returns text that is cut, doubled, swapped or deleted somewhere."""
    at, to = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    junk = rng.choice(("[", "]", ",", "-", "=", "\n", " ", "9" * 30, "\x00", "²", "\\", "#", "."))
    return rng.choice(
        (
            text[:at],
            text[to:],
            text[:at] + text[to:],
            text[:to] + text[at:],
            text[:at] + junk + text[at:],
            text[at:] + text[:at],
        )
    )


NODES_OF = {
    "scontrol_tree.txt": "node[1-4]",
    "scontrol_block.txt": "node[0017-0021]",
    "scontrol_aggregated.txt": "10.140.71.103,10.140.79.152,10.140.88.115",
    "scontrol_spartan.txt": "spartan-bm[001,028,039-040,053]",
    "topology_tree.conf": "tux[3-5,12]",
    "topology_both.conf": "g[02-07]",
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", NODES_OF)
def test_mangled_topologies_end_in_a_sentence_or_a_cluster(name: str):
    rng = random.Random(name)
    nodes = NODES_OF[name]
    ends = {"cluster": 0, "sentence": 0}
    for _ in range(1500):
        text = fixture(name)
        for _ in range(rng.randint(1, 3)):
            text = mangled(text, rng)
        try:
            made = found(nodes, f"4(x{len(expand_hostlist(nodes))})", text)
        except UserError as error:
            ends["sentence"] += 1
            assert "\n" not in str(error) and len(str(error)) < 400
        else:
            ends["cluster"] += 1
            assert made.unit.size == made.domain.size == made.size == made.nodes * 4
    assert min(ends.values()) > 50


@pytest.mark.nightly
def test_mangled_variables_end_in_a_sentence_or_a_cluster():
    rng = random.Random(5)
    ends = {"cluster": 0, "sentence": 0}
    for _ in range(4000):
        environ = dict(rng.choice((JOB["batch"], *JOB["ranks"])))
        for _ in range(rng.randint(1, 3)):
            key = rng.choice([name for name in environ if name != "SLURM_JOB_ID"])
            environ[key] = mangled(environ[key], rng)
        addresses = rng.choice(
            (
                None,
                {"node2": (environ["SLURM_TOPOLOGY_ADDR"], environ["SLURM_TOPOLOGY_ADDR_PATTERN"])},
            )
        )
        try:
            made = slurm_cluster(
                ClusterConfig(), environ, lambda _: fixture("scontrol_tree.txt"), addresses
            )
        except UserError as error:
            ends["sentence"] += 1
            assert "\n" not in str(error) and len(str(error)) < 400
        else:
            ends["cluster"] += 1
            assert made.size >= made.nodes >= 1
    assert min(ends.values()) > 50
