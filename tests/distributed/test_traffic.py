"""Compares the list of a step's collectives with a real step: every call and every byte, on gloo
ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.parameters import stage_parameters
from parallel3d.build import Trainer
from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample
from parallel3d.estimate.traffic import transfers
from parallel3d.models.keys import ModelConfig
from parallel3d.parameters.state import spec_of
from parallel3d.pipeline import executor
from parallel3d.run_config import Config
from tests.distributed.pool import Pool
from tests.kernels import no_kernels

Count = Counter[tuple[str, str, int]]  # (group, operation, bytes of a call) → calls

# Names that the collectives may use; calls of other names bypass the count.
RAW = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single", "broadcast", "reduce", "scatter", "gather",
    "all_to_all", "all_to_all_single", "isend", "irecv", "send", "recv", "batch_isend_irecv",
    "barrier", "all_gather_object", "broadcast_object_list",
)  # fmt: skip


class Ramp:
    """A source of different samples in which all tokens count."""

    seq_length = 8

    def sample(self, i: int) -> Sample:
        tokens = (np.arange(9) * (i + 1)) % 30
        return Sample(tokens, np.ones(8, dtype=bool))


class Counting:
    """Counts the bytes that a rank sends inside the block."""

    def __init__(self) -> None:
        self.found: Count = Counter()
        self.around: Counter[str] = Counter()  # raw calls that bypass the counted ones
        self.inside = 0
        self.patches = ExitStack()

    def __enter__(self) -> Counting:
        for name, operation, sizes in (
            ("all_reduce_async", "all_reduce", lambda t, group: t.nbytes),
            ("reduce_scatter_bucket", "reduce_scatter", lambda t, group: t.nbytes),
            ("reduce_scatter_into", "reduce_scatter", lambda out, group: out.nbytes * group.size),
            ("all_gather_bucket", "all_gather", lambda t, group: t.nbytes),
            ("all_gather_async", "all_gather", lambda t, group: t.nbytes * group.size),
            ("reduce_scatter_async", "reduce_scatter", lambda t, group: t.nbytes),
            ("ring_shift_async", "send_recv", lambda t, group: t.nbytes),
            ("all_to_all_async", "all_to_all", lambda t, group: t.nbytes),
            ("all_to_all_uneven_async", "all_to_all", lambda t, group: t.nbytes),
        ):
            counted = self._collective(getattr(collectives, name), operation, sizes)
            self.patches.enter_context(patch.object(collectives, name, counted))
        self.patches.enter_context(patch.object(executor, "post", self._post(executor.post)))
        for name in RAW:
            if hasattr(dist, name):
                raw = self._raw(name, getattr(dist, name))
                self.patches.enter_context(patch.object(dist, name, raw))
        return self

    def __exit__(self, *_: object) -> None:
        self.patches.close()

    def _collective(self, original: Any, operation: str, nbytes: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any) -> Any:
            group = next(arg for arg in args if isinstance(arg, Group))
            if group.size > 1 and not self.inside:  # a bucket's call may consist of other calls
                self.found[group.name, operation, nbytes(tensor, group)] += 1
            return self._within(original, tensor, *args)

        return call

    def _post(self, original: Any) -> Any:
        def call(messages: Any, group: Any, *args: Any) -> Any:
            for action, tensor in messages:
                if action.kind.is_send:
                    self.found["pp", "send_recv", tensor.nbytes] += 1
            return self._within(original, messages, group, *args)

        return call

    def _within(self, original: Any, *args: Any) -> Any:
        self.inside += 1
        try:
            return original(*args)
        finally:
            self.inside -= 1

    def _raw(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.inside:
                self.around[name] += 1
            return original(*args, **kwargs)

        return call


def config_of(layout: Layout, changes: dict[str, Any]) -> Config:
    sizes = {
        "num_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8,
        "vocab_size": 30, "vocab_multiple": 8,
    }  # fmt: skip
    model = {k.removeprefix("model."): v for k, v in changes.items() if k.startswith("model.")}
    config = Config(
        tp=layout.tp, pp=layout.pp, dp=layout.dp, cp=layout.cp, micro_batch_size=2, device="cpu",
        global_batch_size=6 * layout.dp, model=ModelConfig(**(sizes | model)),
    )  # fmt: skip
    config.sp, config.zero = changes.get("sp", False), changes.get("zero", 0)
    config.recompute, config.compile = changes.get("recompute", "none"), "compile" in changes
    config.recompute_layers = changes.get("recompute_layers")
    config.mlp_chunk_tokens = changes.get("mlp_chunk_tokens")
    config.schedule.layers_per_stage = changes.get("layers_per_stage")
    config.tensor_parallel.chunks = changes.get("chunks", 1)
    config.precision.name = changes.get("precision", "fp32")
    config.ddp.reduce_every_microbatch = changes.get("every")
    config.ddp.comm_hook = changes.get("comm_hook", "none")
    config.ddp.bucket_cap_mb = changes.get("bucket_cap_mb", 0.004)
    config.tensor_parallel.attention = changes.get("attention", "heads")
    config.loss.chunk_tokens = changes.get("chunk_tokens")
    config.precision.lm_cross_entropy = changes.get("lm_cross_entropy", "fp32")
    config.schedule.layers_per_stage = changes.get("layers_per_stage")
    config.schedule.name, config.vpp = changes.get("schedule", "1f1b"), changes.get("vpp", 1)
    config.schedule.slices = changes.get("slices")
    config.context_parallel.style = changes.get("style", "gather")
    config.optim.name, config.optim.momentum = changes.get("optim", "adamw"), 0.9
    config.optim.freeze = changes.get("freeze")
    config.ep = max(layout.ep, 1)
    config.moe.dispatch = changes.get("dispatch", "auto")
    config.moe.aux_loss, config.moe.z_loss = changes.get("losses", (0.0, 0.0))
    return config


class Sent(NamedTuple):
    """Returns a rank's stage, its counted calls in a step, and the calls that bypass the count."""

    stage: int
    found: Count
    around: Counter[str]


def sent_in_a_step(groups: ProcessGroups, changes: dict[str, Any]) -> Sent:
    """Compares a step that is not the first."""
    config = config_of(groups.layout, changes)
    trainer = Trainer(config, groups, torch.device("cpu"), train_source=Ramp())
    with no_kernels():
        trainer.train_step()
    with Counting() as counting:
        reducer = getattr(trainer.data_parallel, "reducer", None)
        if hasattr(getattr(reducer, "comm_hook", None), "__name__"):  # names in `collectives`
            reducer.comm_hook = getattr(collectives, reducer.comm_hook.__name__)
        trainer.train_step()
    return Sent(groups.pp.index, counting.found, counting.around)


def priced(config: Config, layout: Layout, stage: int, data_rank: int) -> Count:
    found: Count = Counter()
    for t in transfers(config, layout, stage, data_rank):
        found[t.dim, t.op, t.nbytes] += t.count
    return found


LLAMA = {
    "model.norm": "rmsnorm", "model.position_embedding": "rope", "model.activation": "swiglu",
    "model.bias": False, "model.num_query_groups": 2,
}  # fmt: skip
QWEN3 = {**LLAMA, "model.qk_norm": True, "model.head_dim": 6}
FULL_NORM = {**QWEN3, "model.qk_norm_width": "full"}
GATHER_QK = {"attention": "gather_qk"}
UNTIED = {"model.tie_embeddings": False}
REPLICATED = {"model.embedding": "replicated"}
ODD_TABLE = {"model.vocab_size": 31, "model.vocab_multiple": 1}  # its last shard has fewer rows
HEADS, RING = {"style": "heads", **LLAMA}, {"style": "ring", **LLAMA}
MUON = {"optim": "muon", **LLAMA}
LOOPS = {"schedule": "interleaved", "vpp": 2, "model.num_layers": 5}
V = {"schedule": "zbv", "vpp": 2, "model.num_layers": 5}
# Each token uses three of four experts, so that it is sent to both ranks.
EXPERTS = {
    **LLAMA, "model.num_experts": 4, "model.experts_per_token": 3, "model.expert_ffn_size": 8,
}  # fmt: skip
SENT = {**EXPERTS, "dispatch": "all_to_all"}
GATHERED = {**EXPERTS, "dispatch": "gather"}
GATED = {"model.shared_expert_size": 8, "model.shared_expert_gate": True}
LOSSES = {"losses": (0.01, 0.001)}
# Two sliding layers, the first and the last; a rank's halo depends on its place.
WINDOW = {**LLAMA, "model.layer_types": ["sliding", "full"], "model.sliding_window": 3}
# Frozen parameters: all but the head; the first layers and half of one; one of two matrices of each
# MLP; all matrices of attention and experts; what is before the product with attention's results.
HEAD = {**UNTIED, "freeze": ["embedding.*", "layers.*", "final_norm.*"]}
FIRST = {
    **UNTIED,
    "freeze": ["embedding.*", "layers.0.*", "layers.1.input_norm.*", "layers.1.attention.*"],
}
OUTPUT = {
    **UNTIED,
    "freeze": ["embedding.*", "layers.0.*", "layers.1.input_norm.*", "layers.1.attention.[qkv].*"],
}
FULL = {"recompute": "full"}
UP = {"freeze": ["*.mlp.up.*", "*.mlp.gate.*"]}
IN_EXPERTS = {"freeze": ["*.attention.*", "*.experts.*", "embedding.*"]}
# By number of ranks, so that one run of the pool has all cases of that number.
CASES: dict[int, dict[str, tuple[Layout, dict[str, Any]]]] = {
    1: {
        "one rank": (Layout(), {}),
        "experts": (Layout(ep=1), {**EXPERTS, **LOSSES}),
    },
    2: {
        "tp2": (Layout(tp=2), {}),
        "tp2 sp": (Layout(tp=2), {"sp": True}),
        "tp2 parts recomputed": (Layout(tp=2), {"recompute": "[norm,attention,mlp]"}),
        "tp2 sp no collective repeated": (
            Layout(tp=2),
            {"sp": True, "recompute": "[norm,activation,attention]"},
        ),
        "tp2 an MLP in chunks": (Layout(tp=2), {"recompute": "[mlp]", "mlp_chunk_tokens": 8}),
        "tp2 sp in two pieces": (Layout(tp=2), {"sp": True, "chunks": 2, "recompute": "full"}),
        "tp2 sp replicated table": (Layout(tp=2), {"sp": True, **REPLICATED}),
        "tp2 loss in three chunks": (Layout(tp=2), {"chunk_tokens": 7}),
        "tp2 gathered logits in four chunks": (
            Layout(tp=2),
            {"chunk_tokens": 5, "model.parallel_output": False},
        ),
        "tp2 q and k gathered once": (
            Layout(tp=2),
            {**GATHER_QK, **LLAMA, "recompute": "[norm,attention]"},
        ),
        "tp2 norms over all heads, repeated": (
            Layout(tp=2),
            {**FULL_NORM, "recompute": "[attention]"},
        ),
        "pp2": (Layout(pp=2), {}),
        "dp2": (Layout(dp=2), {}),
        "dp2 default buckets": (Layout(dp=2), {**LLAMA, "bucket_cap_mb": None}),
        "dp2 zero1": (Layout(dp=2), {"zero": 1}),
        "dp2 zero2 every micro-batch": (Layout(dp=2), {"zero": 2, "every": True}),
        "dp2 zero3 once a step": (Layout(dp=2), {"zero": 3, "every": False}),
        "cp2 zero1 recompute": (Layout(cp=2), {**LLAMA, "zero": 1, "recompute": "full"}),
        "cp2 windows recomputed": (Layout(cp=2), {**WINDOW, "recompute": "full"}),
        "cp2 windows of experts": (
            Layout(cp=2, ep=1),
            {**EXPERTS, **LOSSES, **WINDOW, "model.num_layers": 4, "model.dense_layers": [0]},
        ),
        "cp2 windows frozen": (Layout(cp=2), {**WINDOW, **FIRST}),
        "cp2 windows, dropout": (Layout(cp=2), {**WINDOW, "model.dropout": 0.1}),
        "cp2 dropout": (Layout(cp=2), {"model.dropout": 0.1, "recompute": "full"}),
        "pp2 loops": (Layout(pp=2), LOOPS),
        "tp2 frozen": (Layout(tp=2), {**LLAMA, **FIRST, "recompute": "full"}),
        "tp2 sp frozen": (Layout(tp=2), {**LLAMA, **FIRST, "sp": True}),
        "tp2 sp frozen but the head": (Layout(tp=2), {**HEAD, "sp": True}),
        "tp2 frozen but the head": (Layout(tp=2), {**FULL_NORM, **HEAD, **GATHER_QK}),
        "tp2 norms over all heads frozen, not repeated": (
            Layout(tp=2),
            {**FULL_NORM, **FIRST, "recompute": "[attention]"},
        ),
        "tp2 sp up frozen": (Layout(tp=2), {**LLAMA, **UP, "sp": True, "chunks": 2}),
        "pp2 frozen": (Layout(pp=2), {**LOOPS, **FIRST}),
        "dp2 zero1 frozen": (Layout(dp=2), {"zero": 1, **FIRST}),
        "dp2 zero2 frozen": (Layout(dp=2), {"zero": 2, **FIRST}),
        "dp2 zero3 frozen": (Layout(dp=2), {"zero": 3, **FIRST}),
        "dp2 zero3 frozen but the head": (Layout(dp=2), {"zero": 3, **HEAD}),
        "cp2 frozen": (Layout(cp=2), {**HEADS, **FIRST}),
        "cp2 attention frozen, repeated": (
            Layout(cp=2),
            {**HEADS, "freeze": ["*.attention.*"], "recompute": "[attention]"},
        ),
        "cp2 attention before what is trained": (Layout(cp=2), {**LLAMA, **FIRST, **FULL}),
        "cp2 only the output of attention is trained": (
            Layout(cp=2),
            {**HEADS, **OUTPUT, "recompute": "[attention]"},
        ),
        "cp2 muon frozen": (Layout(cp=2), {**MUON, **FIRST, "zero": 1}),
        "dp2 ep2 gathered frozen": (Layout(dp=2, ep=2), {**GATHERED, **GATED, **IN_EXPERTS}),
        "dp2 ep2 sent frozen": (Layout(dp=2, ep=2), {**SENT, **FIRST, "recompute": "[mlp]"}),
        "tp2 ep1 zero1": (Layout(tp=2, ep=1), {**EXPERTS, **LOSSES, "sp": True, "zero": 1}),
        "dp2 ep2 gathered": (Layout(dp=2, ep=2), {**GATHERED, **GATED, "recompute": "full"}),
        "dp2 ep2 sent": (Layout(dp=2, ep=2), {**SENT, **LOSSES, "recompute": "[mlp]"}),
        "cp2 ep1 zero3": (Layout(cp=2, ep=1), {**EXPERTS, **LOSSES, "zero": 3}),
        "dp2 ep1 muon zero1": (Layout(dp=2, ep=1), {**EXPERTS, "optim": "muon", "zero": 1}),
    },
    3: {
        "pp3": (Layout(pp=3), {"layers_per_stage": [1, 1, 1]}),
        "cp3 windows, padded": (Layout(cp=3), WINDOW),
        "cp3 padded": (Layout(cp=3), {"comm_hook": "bf16"}),
    },
    4: {
        "tp2 pp2 sp in four pieces, a gather repeated": (
            Layout(tp=2, pp=2),
            {"sp": True, "chunks": 4, "recompute": "[norm,mlp]", **LLAMA},
        ),
        "tp4 sp norms over all heads, shared heads": (Layout(tp=4), {**FULL_NORM, "sp": True}),
        "tp4 sp norms of heads and shared heads": (
            Layout(tp=4),
            {**QWEN3, "sp": True, "model.attention_bias": "qkv"},
        ),
        "tp2 dp2 norms of heads zero3": (Layout(tp=2, dp=2), {**QWEN3, "zero": 3}),
        "tp2 dp2 shared heads zero3": (
            Layout(tp=2, dp=2),
            {**LLAMA, "model.num_query_groups": 1, "zero": 3},
        ),
        "tp4 sp q and k gathered recompute": (
            Layout(tp=4),
            {**GATHER_QK, **LLAMA, "sp": True, "recompute": "full"},
        ),
        "dp4 bf16 buckets": (Layout(dp=4), {"comm_hook": "bf16"}),
        "tp2 dp2 sp zero1": (Layout(tp=2, dp=2), {"zero": 1, "sp": True, **LLAMA}),
        "pp2 dp2 zero3 bf16": (Layout(pp=2, dp=2), {"zero": 3, "precision": "bf16"}),
        "tp2 dp2 fp16, its loss too": (
            Layout(tp=2, dp=2),
            {"precision": "fp16", "lm_cross_entropy": "fp16"},
        ),
        "tp2 cp2 sp zero3": (Layout(tp=2, cp=2), {**LLAMA, "sp": True, "zero": 3}),
        "cp2 dp2 ring": (Layout(cp=2, dp=2), RING),
        "tp2 cp2 muon zero1": (Layout(tp=2, cp=2), {"optim": "muon", "zero": 1}),
        "cp2 pp2 heads, a layer recomputed": (
            Layout(cp=2, pp=2),
            {**HEADS, "recompute": "full", "recompute_layers": [1, 0]},
        ),
        "cp4 heads, two of keys": (Layout(cp=4), {**HEADS, "sp": True}),
        "cp4 windows in a ring": (
            Layout(cp=4),
            {**WINDOW, "style": "ring", "recompute": "[attention]", "precision": "fp64"},
        ),
        "cp2 dp2 windows, heads": (Layout(cp=2, dp=2), {**WINDOW, "style": "heads"}),
        "cp2 pp2 long windows": (Layout(cp=2, pp=2), {**WINDOW, "model.sliding_window": 6}),
        "cp4 ring": (Layout(cp=4), {**RING, "recompute": "[attention]", "precision": "fp64"}),
        "tp4 muon": (Layout(tp=4), MUON),
        "dp4 muon zero2": (Layout(dp=4), MUON | {"zero": 2}),
        "pp2 dp2 v zero3": (Layout(pp=2, dp=2), V | {"zero": 3}),
        "pp2 dp2 loops zero2": (Layout(pp=2, dp=2), LOOPS | {"zero": 2, **ODD_TABLE}),
        "tp2 pp2 v frozen": (Layout(tp=2, pp=2), V | FIRST),
        "pp2 dp2 v zero3 frozen": (Layout(pp=2, dp=2), V | {"zero": 3, **FIRST}),
        "tp2 pp2 loops slices frozen": (Layout(tp=2, pp=2), LOOPS | {"slices": True, **FIRST}),
        "tp2 pp2 v sp": (Layout(tp=2, pp=2), V | {"sp": True, **UNTIED}),
        "tp2 pp2 loops slices": (Layout(tp=2, pp=2), LOOPS | {"slices": True}),
        "tp2 dp2 ep2 sent zero1": (
            Layout(tp=2, dp=2, ep=2),
            {**SENT, **GATED, **LOSSES, "sp": True, "zero": 1, "model.dense_layers": [0]},
        ),
        "cp2 dp2 ep2 gathered zero2": (
            Layout(cp=2, dp=2, ep=2),
            {**GATHERED, **LOSSES, "zero": 2, "precision": "fp64"},
        ),
        "pp2 dp2 ep2 v": (Layout(pp=2, dp=2, ep=2), V | {**SENT, "model.dense_layers": [4]}),
    },
    6: {
        "tp2 pp3 slices": (Layout(tp=2, pp=3), {"slices": True, **UNTIED}),
    },
    8: {
        "tp2 pp2 dp2 sp replicated fp64": (
            Layout(tp=2, pp=2, dp=2),
            {"sp": True, **REPLICATED, "layers_per_stage": [2, 1], "precision": "fp64"},
        ),
    },
}


# It belongs to the larger set, because it compiles for seconds.
PIECES = {"sp": True, "chunks": 2, "recompute": "full"}
COMPILED = {
    "compiled": (Layout(tp=2), {**PIECES, "compile": True, "model.num_layers": 1}),
}


def sent_in_steps(cases: dict[str, tuple[Layout, dict[str, Any]]]) -> dict[str, Sent]:
    """Runs the cases; those with the same layout share groups."""
    found = {}
    for layout in dict.fromkeys(layout for layout, _ in cases.values()):
        groups = ProcessGroups.create(layout, "cpu", timeout_s=300)
        for name, (own, changes) in cases.items():
            if own == layout:
                found[name] = sent_in_a_step(groups, changes)
        groups.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        # four ranks have more cases than all others
        *(pytest.param(*of, marks=[pytest.mark.nightly] * (of[0] == 4)) for of in CASES.items()),
        pytest.param(2, COMPILED, marks=pytest.mark.more),
    ],
    ids=[*(f"{ranks} ranks" for ranks in CASES), "compiled"],
)
def test_the_traffic_list_equals_the_traffic_of_a_step(
    pool: Pool, ranks: int, cases: dict[str, tuple[Layout, dict[str, Any]]]
) -> None:
    by_rank = pool.run(ranks, sent_in_steps, cases, timeout_s=900)
    for name, (layout, changes) in cases.items():
        check(name, layout, changes, [of_rank[name] for of_rank in by_rank])


def check(name: str, layout: Layout, changes: dict[str, Any], sent: Sequence[Sent]) -> None:
    """Asserts that the ranks have sent the calls in the list, and nothing else."""
    config = config_of(layout, changes)
    for rank, (stage, found, around) in enumerate(sent):
        place = layout.coordinates(rank)
        data_rank = place.dp * layout.cp + place.cp
        if "optim" in changes and place.tp:
            continue  # Muon's home ranks send their matrices; the list is the first tp rank's
        listed = priced(config, layout, stage, data_rank)
        assert found == listed, f"{name}: rank {rank}, stage {stage}"
        assert not around, f"{name}: rank {rank} sends what nobody counts: {around}"
    assert {stage for stage, *_ in sent} == set(range(layout.pp))
    if layout.world_size > 1:
        assert found  # comparing two empty lists would prove nothing


class AtRandom:
    """Replaces the choice of every layer by random experts, different ones on each rank."""

    def __init__(self, model: ModelConfig, rank: int) -> None:
        self.all, self.chosen_each = model.num_experts, model.experts_per_token
        self.chance = torch.Generator().manual_seed(rank)

    def chosen(self, layer: int, balance: Any, experts: torch.Tensor, margins: Any) -> torch.Tensor:
        order = torch.rand(len(experts), self.all, generator=self.chance).argsort(-1)
        return order[:, : self.chosen_each].contiguous()


class Long(Ramp):
    """A source of samples with 256 tokens, enough for a stable mean."""

    seq_length = 256

    def sample(self, i: int) -> Sample:
        tokens = (np.arange(257) * (i + 1)) % 30
        return Sample(tokens, np.ones(256, dtype=bool))


def sent_to_random_experts(layouts: list[Layout]) -> list[tuple[float, float]]:
    """Returns, by layout, the bytes to experts that this rank counted, and the bytes in the
    list."""
    found = []
    model = {"model.num_experts": 16, "model.experts_per_token": 4, "model.seq_length": 256}
    for layout in layouts:
        groups = ProcessGroups.create(layout, "cpu", timeout_s=300)
        config = config_of(layout, {**SENT, **model})
        trainer = Trainer(config, groups, torch.device("cpu"), train_source=Long())
        assert trainer.balance is not None
        trainer.balance.watch = AtRandom(config.model, groups.rank)
        with Counting() as counting:
            trainer.train_step()
        listed = priced(config, layout, 0, groups.dp.index)
        groups.close()
        found.append((_to_experts(counting.found), _to_experts(listed)))
    return found


def _to_experts(count: Count) -> float:
    return sum(n * calls for (dim, op, n), calls in count.items() if dim == "ep")


def test_random_choices_send_what_experts_chosen_at_random_need(pool: Pool) -> None:
    """Compares within three per cent: each token goes to a rank with probability `share_sent`."""
    layouts = [Layout(dp=4, ep=2), Layout(dp=4, ep=4)]
    for of_rank in pool.run(4, sent_to_random_experts, layouts):
        for counted, listed in of_rank:
            assert counted == pytest.approx(listed, rel=0.03)


MODELS: list[dict[str, Any]] = [{}, {**LLAMA, **UNTIED}, REPLICATED, QWEN3, FULL_NORM]


def parameters_of_stages(configs: list[Config]) -> tuple[int, list[list[tuple[int, bool]]]]:
    """Returns this rank's stage and, by configuration, the numel of its parameters, and whether all
    tp ranks have them."""
    groups = ProcessGroups.create(Layout(tp=2, pp=2), "cpu", timeout_s=300)
    trainers = [Trainer(c, groups, torch.device("cpu"), train_source=Ramp()) for c in configs]
    found = [[(p.numel(), spec_of(p).replicated) for p in t.parameters.values()] for t in trainers]
    groups.close()
    return groups.pp.index, found


def test_the_counted_parameters_of_a_stage_are_the_models(pool: Pool) -> None:
    layout = Layout(tp=2, pp=2)
    configs = [config_of(layout, {**model, "layers_per_stage": [1, 2]}) for model in MODELS]
    layers = (range(0, 1), range(1, 3))
    for stage, found in pool.run(4, parameters_of_stages, configs):
        ends = (stage == 0, stage == 1)
        for config, parameters in zip(configs, found, strict=True):
            listed = stage_parameters(config.model, layout.tp, layers[stage], *ends)
            assert [(p.numel, p.replicated) for p in listed] == parameters
