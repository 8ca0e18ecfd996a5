"""Tests prices of a measured machine for models with several kinds of layers: experts, windows."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import product
from math import prod
from pathlib import Path

import pytest

from parallel3d.blueprint.dispatch import share_sent
from parallel3d.blueprint.ops import layer_flops, layer_kinds, ops_of
from parallel3d.blueprint.rank import PipelineRank
from parallel3d.errors import UserError
from parallel3d.estimate.profiled_cost import (
    WAYS,
    MeasuredMachine,
    Table,
    check_experts_measured,
    layer_passes,
    measured_sizes,
    passes,
    price_measured,
    read,
    scaled,
    sent_seconds,
    step_time,
)
from parallel3d.estimate.search import LayoutChoice, planned
from parallel3d.estimate.traffic import OVERLAPPED, RESULTS, transfers
from parallel3d.experts.keys import ExpertsConfig
from parallel3d.models.keys import ModelConfig
from parallel3d.resolve import layout_of
from parallel3d.run_config import Config, check_config
from tests.unit.estimate.measured_machine import MADE, MIXED, MODEL, RATE, machine, seconds

ONE_CORE = dataclasses.replace(MADE, count=1)
DENSE, SPARSE = layer_kinds(MIXED)


def config(model: ModelConfig = MIXED, **keys: object) -> Config:
    ranks = prod(keys.get(dim, 1) for dim in ("tp", "pp", "dp", "cp"))  # type: ignore[misc]
    given = {"global_batch_size": 8, "micro_batch_size": 1, "dp": 1} | keys
    dispatch = given.pop("dispatch", "auto")
    made = Config(**given, model=model)  # type: ignore[arg-type]
    made.moe.dispatch = str(dispatch)
    return check_config(made, ranks, own_samples=True)


def alone(name: str, at: tuple[float, ...], model: ModelConfig = MIXED) -> float:
    """Returns the seconds of a machine on which only blocks take time."""
    plain = name.startswith(("block", "experts", "together", "threads"))
    return seconds(name, at, model) if plain else 1e-12


@pytest.mark.parametrize("changes", [{}, {"num_layers": 6}, {"dense_layers": [0, 1]}])
def test_a_step_is_the_sum_of_its_layers_of_each_kind(changes: dict[str, object]) -> None:
    """The machine was measured for equally many layers of the two kinds."""
    made = config(dataclasses.replace(MIXED, **changes))  # type: ignore[arg-type]
    here = machine(alone, ONE_CORE, MIXED, **{"launch.action": 1e-12})
    kinds = layer_kinds(made.model)
    flops = sum(count * layer_flops(made.model, kind=kind) for kind, count in kinds.items())
    assert step_time(made, here).core == pytest.approx(3 * flops * 8 * 256 / RATE, rel=1e-3)


@pytest.mark.parametrize("kind", [DENSE, SPARSE])
def test_recomputation_repeats_the_share_of_its_own_kind(kind: object) -> None:
    """All parts of one kind cost as much as its forward, and parts of the other kind cost
    nothing."""
    index = [DENSE, SPARSE].index(kind)  # type: ignore[arg-type]

    def of(name: str, at: tuple[float, ...]) -> float:
        if name.startswith("recompute"):
            return 1.0 if (name.count(".") == 2) == bool(index) else 1e-9
        return alone(name, at)

    here = machine(of, ONE_CORE, MIXED, **{"launch.action": 1e-12})
    plain, again = (step_time(config(recompute=r), here).core for r in ("none", "[attention]"))
    flops = 2 * layer_flops(MIXED, kind=kind)  # type: ignore[arg-type]
    assert again - plain == pytest.approx(flops * 8 * 256 / RATE, rel=1e-3)


@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (1, 4), (2, 4)])
def test_fewer_experts_with_more_rows_take_the_measured_difference(tp: int, ep: int) -> None:
    """The difference belongs to a tensor rank's own tokens, and to blocks with experts alone."""

    def of(name: str, at: tuple[float, ...]) -> float:
        return at[0] ** -0.5 if name.startswith("experts") else alone(name, at)

    here = machine(of, ONE_CORE, MIXED)
    made = config(tp=tp, sp=tp > 1, dp=4, ep=ep)
    own = 256 / tp
    for kind, gained in ((DENSE, 1.0), (SPARSE, ep**-0.5)):
        plain = layer_flops(MIXED, kind=kind) * own / RATE
        assert passes(here, made, "block", kind) == pytest.approx(plain * gained, rel=1e-6)


# Three kinds: layers with an MLP, and layers with experts with and without a window.
SPARSE_KINDS = dataclasses.replace(MIXED, num_layers=6, dense_layers=[0])


def test_kinds_with_experts_differ_in_attention_alone() -> None:
    """The effect of ep on one kind is therefore that on every kind."""
    kinds = [kind for kind in layer_kinds(SPARSE_KINDS) if kind.experts]
    assert len(kinds) == 2
    for tp, ep, sp in product((1, 2), (1, 2, 4), (False, True)):
        for settings in (ExpertsConfig(), ExpertsConfig(dispatch="gather")):
            one, other = (
                [
                    op
                    for op in ops_of(
                        SPARSE_KINDS, kind, tp, sp, frozenset(), ep=ep, settings=settings
                    ).plain
                    if op.name != "attention"
                ]
                for kind in kinds
            )
            assert one == other


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (1, 2), (1, 4), (2, 4)])
def test_ep_adds_the_same_seconds_to_each_kind_with_experts(least: int, tp: int, ep: int) -> None:
    """A block is the sum of an attention, which depends on its kind, and of experts.

    `least`: the smallest ep that was measured, which is that of all blocks.
    """
    model = SPARSE_KINDS

    def experts(ep: float, tokens: float) -> float:
        return 1e-6 * tokens / ep**0.5

    def attention(index: int, tp: float, tokens: float) -> float:
        return (1 + index) * 1e-6 * tokens / tp

    def of(name: str, at: tuple[float, ...]) -> float:
        if name.startswith("experts"):
            block = (attention(1, 1, at[1]) + experts(n, at[1]) for n in (at[0], least))
            return next(block) / next(block)
        if name.startswith("block"):
            index = int(name.split(".")[1]) if name.count(".") == 2 else 0
            return attention(index, *at) + (index > 0) * experts(least, at[1] / at[0])
        return alone(name, at, model)

    here = machine(of, model=model)
    if least > 1:  # the table begins with ep = `least`
        tables = dict(here.tables)
        for way in WAYS:
            axes = (2.0, 4.0), here[f"experts.{way}"].axes[1]
            points = tuple(of("experts", at) for at in product(*axes))
            tables[f"experts.{way}"] = Table(axes, points)
        here = dataclasses.replace(here, tables=tables)
    made = config(model, tp=tp, sp=tp > 1, dp=4, ep=ep)
    for index, kind in enumerate(layer_kinds(model)):
        wanted = attention(index, tp, 256) + kind.experts * experts(ep, 256 / tp)
        # Prices of an ep that was not measured are extrapolated.
        close = 1e-6 if ep >= least else 0.2
        assert passes(here, made, "block", kind) == pytest.approx(wanted, rel=close)
    said = scaled(here, "here.yaml", model)
    assert ("of ep=1 are extrapolated from those of ep=2" in said) == (least == 2), said


# Overlap needs a table of its own for the head.
UNTIED = dataclasses.replace(MIXED, tie_embeddings=False)


def on_gpu(name: str, at: tuple[float, ...], exchange: float) -> float:
    """Returns a machine on which a byte of an exchange takes `exchange` seconds."""
    if name.removesuffix(".shared") in ("all_to_all", "all_gather", "reduce_scatter"):
        return exchange * at[1]
    return alone(name, at)


@pytest.mark.parametrize("dispatch", ["all_to_all", "gather"])
@pytest.mark.parametrize(
    ("exchange", "recompute"), [(1e-12, "none"), (1e-12, "full"), (1e-3, "none")]
)
def test_overlap_hides_exchanges_behind_the_layers_of_another_micro_batch(
    dispatch: str, exchange: float, recompute: str
) -> None:
    """Exchanges of choices and weights, and of the first and the last pass, are not hidden."""
    gpus = dataclasses.replace(MADE, device="cuda", count=4)
    here = machine(partial(on_gpu, exchange=exchange), gpus, UNTIED, **{"launch.action": 1e-12})
    made = config(UNTIED, dp=4, ep=4, dispatch=dispatch, recompute=recompute, global_batch_size=16)
    layout, rank = layout_of(made), PipelineRank(planned(made), 0)
    sent = [t for t in transfers(made, layout, 0) if t.dim == "ep"]
    states = [t for t in sent if t.nbytes > 4096 * 8]
    assert {t.what for t in states} == {*OVERLAPPED} - (
        {RESULTS} if dispatch == "all_to_all" else set()
    )
    travels = sum(sent_seconds(here, rank, t) for t in states)
    layers = 4 * float(layer_passes(here, made, rank.stages[0], rank).sum())
    assert (travels > layers) == (exchange == 1e-3), "each of them is the shorter one once"
    overlaps = dataclasses.replace(made, moe=dataclasses.replace(made.moe, overlap=True))
    plain, less = (step_time(check_config(c, 4, own_samples=True), here) for c in (made, overlaps))
    wanted = (1 - 16 / 132) * 3 / 4 * min(travels, layers)
    assert plain.compute - less.compute == pytest.approx(wanted, rel=1e-6)
    assert plain.total - less.total == pytest.approx(wanted, rel=1e-6)


def test_overlap_hides_nothing_on_cpus_or_with_a_single_micro_batch() -> None:
    gpus = dataclasses.replace(MADE, device="cuda", count=4)
    for made, batch in ((MADE, 16), (gpus, 4)):
        here = machine(partial(on_gpu, exchange=1e-9), made, UNTIED)
        one, other = (config(UNTIED, dp=4, ep=4, global_batch_size=batch) for _ in range(2))
        other.moe.overlap = True
        assert step_time(one, here).total == pytest.approx(step_time(other, here).total)


def test_a_layout_with_overlap_moves_up_in_the_ranking() -> None:
    """Experts of a rank alone are slower here than those of several ranks that overlap."""

    def of(name: str, at: tuple[float, ...]) -> float:
        if name.startswith("experts"):
            return at[0] ** -0.15
        return on_gpu(name, at, 3e-9)

    here = machine(of, dataclasses.replace(MADE, device="cuda", count=4), UNTIED)
    choices = [LayoutChoice(1, 1, 1, 4, 1, "1f1b", "none", 0, 1, ep) for ep in (1, 4)]
    best = []
    for overlap in (False, True):
        made = config(UNTIED, global_batch_size=32)
        made.cluster.file, made.moe.overlap = "here.yaml", overlap
        priced = price_measured(choices, measured_sizes(made, here, 4), made, here)
        best.append(choices[priced.order[0]].ep)
    assert best == [1, 4]


@pytest.mark.parametrize(("ep", "load", "counts"), [(1, 3.0, 1.0), (2, 1.5, 1.5), (4, 9.0, 4.0)])
def test_the_load_multiplies_the_products_of_experts(ep: int, load: float, counts: float) -> None:
    """A rank has at most the rows of all tokens of its group."""
    here = machine(alone, MADE, MIXED, **{"launch.action": 1e-12})
    made = config(dp=4, ep=ep)
    even, uneven = (step_time(made, here, each).core for each in (1.0, load))
    # Two layers, forward, input and weight gradient, of two experts with three matrices of a token.
    inside = 2 * 3 * 2 * (2 * 3 * 256 * 128) * 8 * 256 / RATE
    assert uneven - even == pytest.approx((counts - 1) * inside, rel=1e-3)


def test_an_exchange_carries_each_token_at_most_once_to_a_rank() -> None:
    """The rows of the fullest rank are four times the mean, but many are of the same tokens."""

    def of(name: str, at: tuple[float, ...]) -> float:
        plain = name.startswith(("together", "threads"))
        return 1.0 if plain else 1e-9 * at[1] if name.startswith("all_to_all") else 1e-12

    here = machine(of, MADE, MIXED, **{"launch.action": 1e-12})
    made = config(dp=4, ep=4, dispatch="all_to_all")
    even, uneven = (step_time(made, here, each).core for each in (1.0, 4.0))
    share = share_sent(MIXED.num_experts, MIXED.experts_per_token, 4)
    assert uneven / even == pytest.approx(1 / share, rel=0.01)


@pytest.mark.parametrize("op", ["all_to_all", "all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(
    "keys",
    [
        {"dp": 4, "ep": 2, "dispatch": "all_to_all"},
        {"dp": 4, "ep": 4, "dispatch": "gather", "zero": 1},
        {"dp": 2, "tp": 2, "sp": True, "ep": 2, "recompute": "[mlp]"},
        {"dp": 2, "pp": 2, "ep": 2, "dispatch": "all_to_all"},
    ],
)
def test_dispatch_and_the_gradients_of_experts_are_priced(op: str, keys: dict[str, object]) -> None:
    """Compares with `traffic.transfers`, which tests/distributed/test_traffic.py compares with real
    runs."""

    def of(name: str, at: tuple[float, ...]) -> float:
        plain = name.startswith(("together", "threads"))
        return 1.0 if plain or name.removesuffix(".shared") == op else 1e-12

    made = config(**keys)  # type: ignore[arg-type]
    here = machine(of, MADE, MIXED, **{"launch.action": 1e-12})
    layout = layout_of(made)
    sent = [t for index in range(made.pp) for t in transfers(made, layout, index) if t.op == op]
    calls = sum(t.count for t in sent) * layout.world_size / made.pp
    assert step_time(made, here).core == pytest.approx(calls, abs=1e-6)


@pytest.mark.parametrize("zero", [0, 1])
def test_the_update_of_experts_is_divided_over_the_ranks_with_the_same_ones(zero: int) -> None:
    """With ep = 4 on four ranks nobody else has a rank's experts."""

    def of(name: str, at: tuple[float, ...]) -> float:
        if name.startswith(("together", "threads")):
            return 1.0
        return 1e-6 * at[0] if name == "update" else 1e-12

    experts = 2 * 8 * 3 * 256 * 128
    whole = step_time(config(), machine(of, model=MIXED)).core / 1e-6
    here = step_time(config(dp=4, ep=4, zero=zero), machine(of, model=MIXED)).optimizer
    alike = step_time(config(), machine(of, model=MIXED)).optimizer
    elements = experts / 4 + (whole - experts) / (4 if zero else 1)
    # Four ranks share two cores.
    assert here / alike == pytest.approx(2 * elements / whole, rel=1e-3)


def test_windows_are_priced_by_their_own_block() -> None:
    """A full layer takes ten times as long here, which FLOPs would not say."""
    model = dataclasses.replace(MIXED, num_experts=0, dense_layers=[])
    sliding, full = layer_kinds(model)

    def of(name: str, at: tuple[float, ...]) -> float:
        return 10.0 if name.startswith("block.1.") else 1.0

    here = machine(of, model=model)
    assert passes(here, config(model), "block", sliding)[0] == pytest.approx(1.0)
    assert passes(here, config(model), "block", full)[0] == pytest.approx(10.0)
    wider = dataclasses.replace(model, sliding_window=64)
    kinds = layer_kinds(wider)
    ratio = layer_flops(wider, kind=next(iter(kinds))) / layer_flops(model, kind=sliding)
    found = passes(here, config(wider), "block", next(iter(kinds)))
    assert found[0] == pytest.approx(ratio) and ratio > 1
    assert "times its FLOPs, so times are scaled" in scaled(here, "here.yaml", wider)
    assert scaled(here, "here.yaml", dataclasses.replace(model, num_layers=2)) == ""


def test_experts_of_another_width_are_scaled_and_said_so() -> None:
    wider = dataclasses.replace(MIXED, expert_ffn_size=256)
    here = machine(partial(alone, model=MIXED), model=MIXED)
    found = passes(here, config(wider), "block", SPARSE)
    assert found[0] == pytest.approx(layer_flops(wider, kind=SPARSE) * 256 / RATE, rel=1e-6)
    assert scaled(here, "here.yaml", MIXED) == ""
    assert "measured for" in scaled(here, "here.yaml", wider)


def test_layouts_with_experts_are_ranked_by_price() -> None:
    """Tensor parallelism turns sequence parallelism on, which experts need."""
    here, made = machine(model=MIXED), config()
    made.cluster.file = "here.yaml"
    sizes = measured_sizes(made, here, 4)
    choices = [
        LayoutChoice(tp, 1, 1, 4 // tp, 1, "1f1b", "none", zero, 1, ep)
        for tp, zero, ep in product((1, 2, 4), (0, 1), (1, 2, 4))
        if not (tp == 4 and zero)
    ]
    priced = price_measured(choices, sizes, made, here)
    assert sorted(priced.order) == list(range(len(choices)))
    # The load costs memory and time on ranks that divide the experts.
    full = price_measured(choices, sizes | {"load": 2.0}, made, here)
    for i, choice in enumerate(choices):
        more = full.seconds[i] - priced.seconds[i], full.memory[i] - priced.memory[i]
        assert all(m > 0 for m in more) if choice.ep > 1 else more == (0, 0)
    assert priced.seconds[priced.order[0]] == pytest.approx(min(priced.seconds), rel=0.005)


def test_a_file_of_several_kinds_gives_the_machine_again(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(machine(model=MIXED).text())
    found = read(str(path))
    assert found.model == MIXED and found.kinds == [DENSE, SPARSE]
    for name, table in machine(model=MIXED).tables.items():
        assert found[name].seconds == pytest.approx(table.seconds, rel=1e-3)


@pytest.mark.parametrize("table", ["block.1.input", "recompute.1.mlp", "experts.weight"])
def test_a_file_without_a_table_of_a_kind_is_damaged(tmp_path: Path, table: str) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(machine(model=MIXED).text().replace(f"  {table}:", "  another:", 1))
    with pytest.raises(UserError, match=f"is damaged \\('{table}'\\): calibrate again"):
        read(str(path))


def test_a_file_of_version_3_prices_its_model_as_before(tmp_path: Path) -> None:
    path, made = tmp_path / "here.yaml", config(MODEL)
    texts = machine().text(), machine().text().replace("version: 4", "version: 3", 1)
    prices = []
    for text in texts:
        path.write_text(text)
        prices.append(step_time(made, read(str(path))))
    assert prices[0] == prices[1]


def test_experts_have_no_price_in_a_file_without_them() -> None:
    dense: MeasuredMachine = machine()
    check_experts_measured(machine(model=MIXED), "f.yaml", MIXED)
    check_experts_measured(dense, "f.yaml", MODEL)
    with pytest.raises(UserError, match=r"num_experts=8 must be 0 with cluster=f.yaml.*calibrate"):
        check_experts_measured(dense, "f.yaml", MIXED)
