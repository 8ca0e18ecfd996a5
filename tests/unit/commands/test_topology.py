"""Tests `parallel3d topology`: its text equals its objects, and impossible input is refused."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from parallel3d.blueprint.cluster import LinkClass
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.commands.options import CommandConfig
from parallel3d.commands.topology.command import topology
from parallel3d.commands.topology.report import (
    TopologyReport,
    cluster_line,
    facts_of,
    group_table,
    heading,
    make_report,
    route_lines,
    search_table,
    warning_lines,
    write_report,
)
from parallel3d.errors import UserError
from parallel3d.estimate.network import messages
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config, check_config, conf_dir
from parallel3d.text import byte_text, percent
from parallel3d.topology.assumptions import assume_model, chosen_keys, full_batch
from parallel3d.topology.assumptions import preset as model_preset
from parallel3d.topology.keys import TopologyConfig

TYPED = ("tp=8",)  # the command line gave neither model nor batch


def preset(name: str, **more) -> ClusterConfig:
    values = OmegaConf.to_container(OmegaConf.load(conf_dir() / "cluster" / f"{name}.yaml"))
    return dataclasses.replace(ClusterConfig(**values), **more)


def config(cluster: ClusterConfig, **more) -> CommandConfig:
    shown = {k.partition("_")[2]: more.pop(k) for k in list(more) if k.startswith("show_")}
    return CommandConfig(cluster=cluster, topology=TopologyConfig(**shown), **more)


CASES = {
    "h100": config(preset("dgx_h100", nodes=16), tp=8, pp=4),
    "h100 tp4": config(preset("dgx_h100", nodes=4), tp=4, pp=2),
    "long": config(preset("dgx_h100", nodes=4), tp=4, cp=2, pp=2),
    "tp leaves": config(preset("dgx_h100", nodes=4), tp=16),
    "six": config(preset("rails_3x2"), tp=2, pp=3),
    "nvl72": config(preset("gb200_nvl72", nodes=36), tp=4, pp=8),
    "thin spine": config(preset("dgx_h100", nodes=4, oversubscription=8.0), tp=4, dp=8),
    "rails only": config(preset("rail_only", nodes=4), tp=8, pp=2),
    "laptop": config(preset("laptop"), tp=2),
}


@functools.cache
def made(name: str) -> TopologyReport:
    return make_report(CASES[name], TYPED, {}, CASES[name].topology)


def text_of(report: TopologyReport) -> str:
    out = io.StringIO()
    write_report(report, [], out)
    return out.getvalue()


def one_line(report: TopologyReport) -> str:
    return " ".join(text_of(report).split())


# --- the text ----------------------------------------------------------------------------


def test_context_parallel_groups_are_shown_with_what_they_send() -> None:
    report = made("long")
    text = one_line(report)
    assert "tp=4 cp=2 pp=2 dp=2" in text and "cp group 0 4" in text
    nvlink, spine = LinkClass.NVLINK, LinkClass.SPINE
    assert report.links["cp"].pairs == {nvlink: 32} and report.links["cp"].size == 2
    sent = {(p.transfer.op, p.transfer.what) for p in report.price.dims["cp"].transfers}
    assert sent == {
        ("all_gather", "keys and values"),
        ("reduce_scatter", "gradients of keys and values"),
    }
    # Gradients go over both groups; dp alone only carries a count of tokens.
    assert report.links["dp_cp"].size == 4
    assert report.links["dp_cp"].pairs == {nvlink: 16, spine: 16}
    assert [p.transfer.nbytes for p in report.price.dims["dp"].transfers] == [8]
    assert any("dp_cp=4 alternates between" in warning for warning in report.warnings)
    assert not any(warning.startswith("dp=") for warning in report.warnings)


@pytest.mark.parametrize("name", CASES)
def test_json_is_strict_and_holds_the_numbers_of_the_objects(name: str) -> None:
    report = made(name)
    facts = json.loads(json.dumps(facts_of(report), allow_nan=False))
    cluster, price = report.cluster, report.price
    assert (facts["cluster"]["nodes"], facts["cluster"]["rails"]) == (cluster.nodes, cluster.rails)
    assert facts["slots"] == report.placement.slots.tolist()
    assert facts["seconds"] == price.seconds
    assert list(facts["groups"]) == list(price.dims)
    for dim, group in facts["groups"].items():
        priced = price.dims[dim]
        assert group["seconds"] == priced.seconds
        assert group["price"]["nbytes"] == {k.label: n for k, n in priced.nbytes.items()}
        if dim in report.links:
            links = report.links[dim]
            assert group["links"]["pairs"] == {k.label: n for k, n in links.pairs.items()}
            assert links.in_domain + links.on_rail + links.crossing == links.groups
            assert links.size * links.groups in (report.layout.world_size, 2 * links.groups)
    for kind in (LinkClass.NVLINK, LinkClass.RAIL, LinkClass.SPINE):
        parts = [d.nbytes.get(kind, 0.0) for d in price.dims.values()]
        assert price.nbytes.get(kind, 0.0) == pytest.approx(sum(parts))


@pytest.mark.parametrize("name", CASES)
def test_the_cluster_is_described_by_its_sizes(name: str) -> None:
    cluster = made(name).cluster
    largest = Counter(cluster.domain.tolist()).most_common(1)[0][1]
    leaves = set(zip(cluster.unit.tolist(), cluster.rail_of.tolist(), strict=True))
    said = cluster_line(cluster)
    assert f"= {cluster.size:,}, {len(set(cluster.domain.tolist()))} " in said
    assert f"of {largest}, {cluster.rails} rail" in said
    assert f" with {len(leaves)} leaf switch" in said


@pytest.mark.parametrize("name", CASES)
def test_sentences_are_wrapped_to_the_width(name: str) -> None:
    report = made(name)
    for width in (40, 80, 160):
        parts = [part(report, width) for part in (heading, route_lines, warning_lines)]
        lines = [line for part in parts for line in part]
        assert len(lines) > 4 and max(map(len, lines)) <= width, width


@pytest.mark.parametrize("name", CASES)
def test_table_of_groups_shows_the_price(name: str) -> None:
    report = made(name)
    lines = group_table(report, 200)
    last = next(i for i, line in enumerate(lines) if line.startswith("all "))
    rows = [line.split() for line in lines[2 : last + 1]]
    dims = report.price.dims
    assert [row[0] for row in rows] == [*dims, "all"]
    for row, (dim, priced) in zip(rows, dims.items(), strict=False):
        links = report.links.get(dim)
        assert row[1] == f"{priced.paths.n:,}"
        assert links is None or row[2] == f"{links.groups:,}"
        assert " ".join(row[-3:-1]) == byte_text(sum(priced.nbytes.values()))
        shown = float(row[-1].replace(",", ""))
        assert shown == pytest.approx(priced.seconds * 1e3, rel=6e-3)
        for kind, count in links.pairs.items() if links else ():
            share = percent(count / sum(links.pairs.values()))
            assert f"{report.cluster.label(kind)} {share}" in " ".join(row)
    total = float(rows[-1][-1].replace(",", ""))
    assert total == pytest.approx(1e3 * report.price.seconds, rel=6e-3)


def test_search_rows_are_the_candidates_and_the_default() -> None:
    report = made("nvl72")
    shown, wanted = report.shown_candidates, report.settings.search
    assert shown[:wanted] == report.candidates[:wanted]
    (default,) = [c for c in shown if c.is_default]
    assert shown[0].seconds < default.seconds
    text = "\n".join(search_table(report, 120))
    assert f"{100 * shown[0].seconds / default.seconds:.1f} %" in text
    assert "placement=auto saves" in text


def test_search_can_be_left_out() -> None:
    report = make_report(config(preset("dgx_h100"), tp=8), TYPED, {}, TopologyConfig(search=0))
    assert report.candidates == []
    assert "placement search" not in text_of(report)


@pytest.mark.slow
def test_auto_takes_the_best_candidate() -> None:
    report = make_report(dataclasses.replace(CASES["nvl72"], placement="auto"), TYPED, {})
    assert report.price.seconds == report.candidates[0].seconds
    assert "placement=auto saves" not in text_of(report)


def test_rank_is_described_with_its_groups() -> None:
    case = dataclasses.replace(CASES["h100"], topology=TopologyConfig(rank=37))
    report = make_report(case, TYPED, {}, case.topology)
    said = one_line(report)
    assert "rank 37 = (pp 1, dp 0, tp 5) on node4 GPU 5; tp group 32 33 34" in said
    assert "; pp group 5 37 69 101" in said


def test_gpus_that_no_replica_fits_on_stay_idle_and_are_counted() -> None:
    report = made("nvl72")
    assert (report.layout.dp, report.layout.world_size, report.cluster.size) == (4, 128, 144)
    assert "128 of 144 GPUs hold ranks, 16 idle" in one_line(report)


def ways(report: TopologyReport) -> dict[tuple[str, ...], float]:
    """Returns seconds of the routes between rails by their wires, cheapest first."""
    assert report.between_rails is not None
    return {tuple(h.label for h in way.hops): way.seconds for way in report.between_rails.ways}


def test_both_routes_between_rails_are_priced_and_the_cheaper_comes_first() -> None:
    report = made("six")
    message, cluster = report.between_rails, report.cluster
    spine = messages(1, message.nbytes, cluster.link(LinkClass.SPINE))
    forwarded = messages(1, message.nbytes, cluster.nvlink)
    forwarded += messages(1, message.nbytes, cluster.rail)
    assert ways(report) == {("spine",): spine, ("nvlink", "rail"): forwarded}
    assert message.ways[0].seconds == min(spine, forwarded)
    assert cluster.rail_of[[message.source, message.target]].tolist() == [0, 1]


def test_a_thin_spine_makes_forwarding_the_cheaper_route() -> None:
    report = made("thin spine")
    assert list(ways(report)) == [("nvlink", "rail"), ("spine",)]
    spine = messages(1, report.between_rails.nbytes, report.cluster.link(LinkClass.SPINE))
    assert ways(report)["spine",] == spine
    said = one_line(report)
    assert said.index(" -nvlink- ") < said.index(" -spine- ")


def test_without_a_spine_forwarding_is_the_only_route() -> None:
    assert list(ways(made("rails only"))) == [("nvlink", "rail")]


def test_warnings_are_printed() -> None:
    report = made("h100 tp4")
    assert report.warnings
    said = " ".join(text_of(report).split())
    for warning in report.warnings:
        assert f"warning: {' '.join(warning.split())}" in said


# --- assumptions -------------------------------------------------------------------------


def test_the_assumed_model_and_batch_fill_the_pipeline() -> None:
    case, told = assume_model(Config(tp=8, pp=8), ())
    batch, more = full_batch(case.micro_batch_size, case.pp, 3)
    filled = dataclasses.replace(case, global_batch_size=batch)
    checked = check_config(filled, 8 * 8 * 3, own_samples=True)
    assert checked.num_microbatches == 4 * 8
    assert case.model == ModelConfig(**model_preset("model", "llama3_70b"))
    assert told == ["model=llama3_70b", "micro_batch_size=1"]
    assert more == "global_batch_size=96 (32 micro-batches a replica)"


def test_keys_given_by_the_user_are_kept() -> None:
    own = Config(tp=2, micro_batch_size=2, global_batch_size=6)
    words = ("micro_batch_size=2", "global_batch_size=6")
    kept, told = assume_model(own, words)
    assert (kept.micro_batch_size, told) == (2, ["model=llama3_70b"])
    for word in ("model=gpt_tiny", "model.num_layers=3", "+experiment=llama_3d", "++model.bias=0"):
        assert assume_model(own, (word,)) == (own, [])
    assert chosen_keys(["+model=a", "~tp", "cluster@x=b"]) == {"model", "tp", "cluster"}


def test_a_callers_own_configuration_is_used() -> None:
    case = config(preset("dgx_h100"), tp=8, global_batch_size=8)
    report = make_report(case, None, {}, case.topology)
    assert report.assumed == []
    assert report.blueprint.model.name == case.model.name


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (config(preset("dgx_h100", nodes=1), tp=8, pp=4), ("32 GPUs", "cluster.nodes=4")),
        (config(preset("dgx_h100", nodes=2), tp=8, dp=4), ("16 GPUs", "cluster.nodes=4")),
        (config(preset("dgx_h100", domain_gpus=3), tp=2), ("cluster.domain_gpus=3", "nearest")),
        (config(preset("dgx_h100", rails=9), tp=2), ("cluster.rails=9", "cluster.rails=8")),
        (config(preset("rail_only", nodes=2), tp=16), ("tp=16", "no spine", "PXN", "tp=8")),
        (config(preset("dgx_h100"), tp=8, placement="tp-pq"), ("placement='tp-pq'", "'pq'")),
        (config(preset("dgx_h100"), tp=8, placement="tp3-dp2"), ("tp multiplies to 3",)),
        (config(preset("dgx_h100"), tp=8, placement="file"), ("placement=file", "rank_file")),
        (config(preset("dgx_h100"), tp=8, show_rank=8), ("topology.rank=8", "rank=7")),
        (config(preset("dgx_h100"), tp=0), ("tp=0", "at least 1")),
    ],
)
def test_impossible_input_is_refused_in_one_sentence(case: Config, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        make_report(case, TYPED, {}, case.topology)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_given_dp_that_leaves_gpus_idle_is_accepted() -> None:
    report = make_report(config(preset("dgx_h100", nodes=4), tp=8, dp=3), TYPED, {})
    assert (report.layout.dp, report.layout.world_size, report.cluster.size) == (3, 24, 32)


def test_rank_file_places_the_ranks(tmp_path: Path) -> None:
    swapped = {1: ("node1", 1), 3: ("node0", 1)}
    lines = []
    for rank in range(6):
        host, local = swapped.get(rank, (f"node{rank // 2}", rank % 2))
        lines.append(f"{rank} {host} {local}")
    (tmp_path / "ranks.txt").write_text("\n".join(lines))
    case = dataclasses.replace(
        CASES["six"], placement="file", rank_file=str(tmp_path / "ranks.txt")
    )
    report = make_report(case, TYPED, {}, case.topology)
    assert report.placement.slots.tolist() == [0, 3, 2, 1, 4, 5]
    assert report.links["tp"].pairs[LinkClass.SPINE] == 4


# --- files -----------------------------------------------------------------------------------


def test_json_holds_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all.json"
    case = dataclasses.replace(CASES["h100 tp4"], topology=TopologyConfig(json=str(path)))
    assert topology(case, TYPED) == 0
    said = " ".join(capsys.readouterr().out.split())
    facts = json.loads(path.read_text())
    assert facts == json.loads(json.dumps(facts_of(made("h100 tp4"))))
    for group in facts["groups"].values():
        assert byte_text(sum(group["price"]["nbytes"].values())) in said
    for row in facts["search"]:
        assert row["placement"] in said
    for text in (*facts["assumed"], *facts["warnings"], facts["placement"], f"wrote {path}"):
        assert " ".join(text.split()) in said


@pytest.mark.parametrize("kind", ["svg", "json"])
def test_own_files_are_replaced_and_others_are_not(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"map.{kind}"
    case = dataclasses.replace(CASES["six"], topology=TopologyConfig(**{kind: str(path)}))
    assert topology(case, TYPED) == 0
    first = path.read_text()
    wider = dataclasses.replace(CASES["laptop"], topology=TopologyConfig(**{kind: str(path)}))
    assert topology(wider, TYPED) == 0
    assert path.read_text() != first
    path.write_text("<svg>my own drawing</svg>")
    with pytest.raises(UserError, match=rf"topology\.{kind}=.*exists"):
        topology(case, TYPED)
    assert path.read_text() == "<svg>my own drawing</svg>"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("where", "word"), [("", "is a folder"), ("none/map.svg", "exist")])
def test_an_output_path_that_cannot_be_a_file_is_refused(
    where: str, word: str, tmp_path: Path
) -> None:
    shown = TopologyConfig(svg=str(tmp_path / where))
    with pytest.raises(UserError, match=word):
        topology(dataclasses.replace(CASES["six"], topology=shown), TYPED)


def test_a_dangling_link_is_refused_and_kept(tmp_path: Path) -> None:
    link = tmp_path / "map.svg"
    link.symlink_to("gone.svg")
    shown = TopologyConfig(svg=str(link))
    with pytest.raises(UserError, match="or a link to one"):
        topology(dataclasses.replace(CASES["six"], topology=shown), TYPED)
    assert link.is_symlink() and list(tmp_path.iterdir()) == [link]


# --- size ------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_command_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from parallel3d.cli.command_line import main\n"
        "code = main(['topology', 'cluster=dgx_h100', 'cluster.nodes=2', 'tp=8', "
        "'placement=auto', 'topology.json=/dev/stdout'])\n"
        "assert code == 2, code\n"
        "code = main(['topology', 'cluster=dgx_h100', 'cluster.nodes=2', 'tp=8'])\n"
        "assert code == 0, code\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.nightly
def test_every_rank_of_a_million_is_in_the_right_groups() -> None:
    case = config(preset("superpod", nodes=125_000), tp=8, pp=8, show_search=0)
    report = make_report(case, TYPED, {}, case.topology)
    layout = report.layout
    assert layout.world_size == 1_000_000
    assert np.array_equal(np.sort(report.placement.slots), np.arange(1_000_000))
    assert report.links["tp"].pairs == {LinkClass.NVLINK: 1_000_000}
