"""Tests `parallel3d topology` as typed: its output, files, refusals and speed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from xml.etree import ElementTree

import pytest

from tests.e2e.command import PARALLEL3D, ROOT, Ended, Shell
from tests.e2e.here import answer
from tests.pace import in_cpu_time

pytestmark = pytest.mark.nightly

TOPOLOGY = (*PARALLEL3D, "topology")
H100 = ("cluster=dgx_h100", "cluster.nodes=16", "tp=8", "pp=4")
NVL72 = ("cluster=gb200_nvl72", "cluster.nodes=36", "tp=4", "pp=8")
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NTASKS": "32",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_TASKS_PER_NODE": "8(x4)",
    "SLURM_GPUS_ON_NODE": "8",
}


def test_topology_shows_groups_bytes_and_routes_of_h100(shell: Shell) -> None:
    ended = shell.run(*TOPOLOGY, *H100)
    assert (ended.code, ended.err) == (0, "")
    assert "dgx_h100: 16 nodes of 8 GPUs = 128" in ended.out
    assert re.search(r"tp +8 +16 +nvlink 100 %", ended.out)
    assert re.search(r"pp +4 +32 +rail 100 %", ended.out)
    assert re.search(r"dp +4 +32 +rail 100 %", ended.out)
    assert "rank       0 = (pp 0, dp 0, tp 0) on node0 GPU 0; tp group 0 1 2 3" in ended.out
    assert "placement search" in ended.out
    assert "-spine-" in ended.out and "-nvlink-" in ended.out
    assert "model=llama3_70b" in ended.out
    assert "\x1b" not in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80
    assert list(shell.cwd.iterdir()) == []


def test_topology_draws_nvl72(shell: Shell, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ("topology", *NVL72)
    ended = answer(shell, capfd, *asked, "topology.svg=map.svg", "topology.json=map.json")
    assert (ended.code, ended.err) == (0, "")
    assert "placement=tp-cp-pp-dp" in ended.out  # the warning names the order
    root = ElementTree.parse(shell.cwd / "map.svg").getroot()
    domains = [e for e in root.iter() if e.get("class") == "domain"]
    assert len(domains) == 2
    facts = json.loads((shell.cwd / "map.json").read_text())
    assert len(facts["slots"]) == 128
    assert facts["search"][0]["seconds"] < 0.99 * facts["seconds"]
    again = answer(shell, capfd, *asked, "placement=auto", "topology.json=map.json")
    best = json.loads((shell.cwd / "map.json").read_text())
    assert again.code == 0
    assert best["seconds"] == pytest.approx(facts["search"][0]["seconds"])


def test_topology_describes_the_nodes_of_a_slurm_job(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    where = {"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    ended = answer(shell, capfd, "topology", "cluster=slurm", "tp=8", **SLURM, **where)
    assert (ended.code, ended.err) == (0, "")
    assert "4 nodes of 8 GPUs = 32" in " ".join(ended.out.split())
    assert "Slurm" in ended.out
    assert " on n1 GPU 0" in ended.out


def test_slurm_task_other_than_the_first_is_silent(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    step = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    more = {"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    step |= {"SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}
    step |= {"SLURM_STEP_NODELIST": "n[1-4]", "SLURM_NODEID": "0"}
    words = ("cluster=slurm", "tp=8", "topology.svg=map.svg")
    ended = answer(shell, capfd, "topology", *words, **SLURM, **step, **more)
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert list(shell.cwd.iterdir()) == []


def test_a_pipe_gets_the_columns_asked_for(shell: Shell) -> None:
    """The first test has 80 columns, the default without a width."""
    ended = shell.run(*TOPOLOGY, *NVL72, COLUMNS="200")
    assert ended.code == 0
    assert 120 < max(map(len, ended.out.splitlines())) <= 200


def test_a_reader_that_leaves_early_sees_no_traceback(shell: Shell) -> None:
    words = (*TOPOLOGY, "cluster=rails_3x2")
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        words, cwd=shell.cwd, env=shell.environment(), stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("cluster=dgx_h100 tp=3 model=llama3_70b", ["tp=3", "num_attention_heads", "tp=2"]),
        ("cluster=rail_only cluster.nodes=2 tp=16", ["tp=16", "no spine", "tp=8"]),
        ("cluster=dgx_h100 cluster.domain_gpus=5 tp=2", ["cluster.domain_gpus=5", "=4"]),
        ("cluster=dgx_h100 cluster.nodes=0", ["cluster.nodes=0", "at least 1"]),
        ("cluster=dgx_h1000", ["cluster=dgx_h1000", "cluster=dgx_h100"]),
        ("cluster=dgx_h100 topology.rank=99", ["topology.rank=99", "topology.rank=7"]),
        ("cluster=dgx_h100 topology.width=80", ["topology.width=80", "COLUMNS"]),
        ("cluster=dgx_h100 placement=best", ["placement", "best"]),
        ("cluster=dgx_h100 tp=8 topology.svg=none/map.svg", ["topology.svg", "none"]),
        ("cluster=slurm", ["Slurm"]),
    ],
)
def test_impossible_input_is_refused_in_one_sentence(
    shell: Shell, capfd: pytest.CaptureFixture[str], words: str, parts: list[str]
) -> None:
    assert_refused(answer(shell, capfd, "topology", *words.split()), shell, parts)


def test_the_command_refuses_impossible_input(shell: Shell) -> None:
    ended = shell.run(*TOPOLOGY, "cluster=dgx_h100", "tp=8", "pp=4")
    assert_refused(ended, shell, ["32 GPUs", "cluster.nodes=4"])


def assert_refused(ended: Ended, shell: Shell, parts: list[str]) -> None:
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.errors) == 1, ended.err
    assert ended.errors[0].startswith("parallel3d: ")
    for part in parts:
        assert part in ended.errors[0]
    assert in_cpu_time(ended.cpu_s, 2.0)
    assert list(shell.cwd.iterdir()) == []


def test_a_users_drawing_is_not_overwritten(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    (shell.cwd / "map.svg").write_text("<svg/>")
    ended = answer(shell, capfd, "topology", *H100, "topology.svg=map.svg")
    assert ended.code == 2
    assert "topology.svg=map.svg exists" in ended.err
    assert (shell.cwd / "map.svg").read_text() == "<svg/>"


@pytest.mark.parametrize(
    ("nodes", "seconds"),
    [
        pytest.param(2048, 1.0, id="16384"),
        pytest.param(125_000, 10.0, id="1M", marks=pytest.mark.more),
    ],
)
def test_large_clusters_are_answered_in_time(shell: Shell, nodes: int, seconds: float) -> None:
    """Measures the process's own CPU time, which other processes hardly affect."""
    words = ("cluster=superpod", f"cluster.nodes={nodes}", "tp=8", "pp=8", "topology.svg=map.svg")
    took = []
    for _ in range(3):
        ended = shell.run(*TOPOLOGY, *words, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        assert ended.code == 0, ended.err
        took.append(ended.cpu_s)
        if in_cpu_time(took[-1], seconds):
            return
    pytest.fail(f"{took} s of CPU for {8 * nodes:,} GPUs, over {seconds} s each time")


PAGE = (ROOT / "docs" / "topology.md").read_text(encoding="utf-8")
# Blocks that begin with `$ parallel3d topology ...`, followed by lines of its output.
SHOWN = re.findall(r"^```\n\$ parallel3d topology ([^\n]*)\n(.*?)^```", PAGE, re.M | re.S)


def test_docs_show_figures_of_several_clusters() -> None:
    assert len({words for words, _ in SHOWN}) >= 5
    assert len({words.split()[0] for words, _ in SHOWN}) >= 3


@pytest.mark.parametrize(("words", "lines"), SHOWN, ids=[words for words, _ in SHOWN])
def test_docs_show_what_the_command_prints(
    shell: Shell, capfd: pytest.CaptureFixture[str], words: str, lines: str
) -> None:
    ended = answer(shell, capfd, "topology", *words.split())
    if ended.code:
        assert ended.err.split() == lines.split()
        return
    printed = iter([line for line in ended.out.splitlines() if line])
    missing = [line for line in lines.splitlines() if line != "…" and line not in printed]
    assert not missing, ended.out


def test_docs_name_only_commands_that_compose(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = re.findall(r"^parallel3d topology ([^\n#]*)", PAGE, re.M)
    assert len(lines) >= 3
    for line in lines:
        ended = answer(shell, capfd, "topology", *line.split(), "--cfg", "job")
        assert ended.code == 0, ended
