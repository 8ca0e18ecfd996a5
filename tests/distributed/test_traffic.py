"""The price list of a step against the step itself: every call and every byte, on gloo ranks."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.data.sampler import Sample
from parallel3d.estimate.ops import stage_parameters
from parallel3d.estimate.traffic import transfers
from parallel3d.parameters.sharding import spec_of
from parallel3d.pipeline import executor
from parallel3d.topology.layout import Layout
from parallel3d.trainer import Trainer
from tests.distributed.pool import Pool
from tests.kernels import no_kernels

Count = Counter[tuple[str, str, int]]  # (group, operation, bytes of a call) → calls

# What the collectives may call themselves; anybody else calling it goes around the count.
RAW = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single", "broadcast", "reduce", "scatter", "gather",
    "all_to_all", "all_to_all_single", "isend", "irecv", "send", "recv", "batch_isend_irecv",
    "barrier", "all_gather_object", "broadcast_object_list",
)  # fmt: skip


class Ramp:
    """Samples that differ; all tokens count."""

    def sample(self, i: int) -> Sample:
        tokens = (np.arange(9) * (i + 1)) % 30
        return Sample(tokens, np.ones(8, dtype=bool))


class Counting:
    """Counts what a rank sends while it is entered."""

    def __init__(self) -> None:
        self.found: Count = Counter()
        self.around: Counter[str] = Counter()  # raw calls outside of the counted ones
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
            ("all_to_all_uneven", "all_to_all", lambda t, group: t.nbytes),
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
            if group.size > 1 and not self.inside:  # a bucket's call may be made of another
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
    config.tensor_parallel.chunks = changes.get("chunks", 1)
    config.precision.name = changes.get("precision", "fp32")
    config.ddp.reduce_every_microbatch = changes.get("every")
    config.ddp.comm_hook, config.ddp.powersgd_start = changes.get("comm_hook", "none"), 2
    config.ddp.powersgd_rank = 1
    config.ddp.bucket_cap_mb = changes.get("bucket_cap_mb", 0.004)
    config.tensor_parallel.attention = changes.get("attention", "heads")
    config.loss.chunk_tokens = changes.get("chunk_tokens")
    config.precision.lm_cross_entropy = changes.get("lm_cross_entropy", "fp32")
    config.train.noise_scale = changes.get("noise_scale", False)
    config.schedule.layers_per_stage = changes.get("layers_per_stage")
    config.schedule.name, config.vpp = changes.get("schedule", "1f1b"), changes.get("vpp", 1)
    config.schedule.slices = changes.get("slices")
    config.context_parallel.style = changes.get("style", "gather")
    config.optim.name, config.optim.momentum = changes.get("optim", "adamw"), 0.9
    return config


def sent_in_a_step(
    layout: Layout, changes: dict[str, Any]
) -> tuple[int, Count, Counter[str], list[tuple[int, bool]]]:
    """This rank's stage, what it sent in a step that is not its first, and its parameters."""
    groups = ProcessGroups.create(layout, "cpu", timeout_s=300)
    config = config_of(layout, changes)
    trainer = Trainer(config, groups, torch.device("cpu"), train_source=Ramp())
    with no_kernels():
        for _ in range(config.ddp.powersgd_start if config.ddp.comm_hook == "powersgd" else 1):
            trainer.train_step()
    with Counting() as counting:
        reducer = getattr(trainer.data_parallel, "reducer", None)
        if hasattr(getattr(reducer, "comm_hook", None), "__name__"):  # one of `collectives`
            reducer.comm_hook = getattr(collectives, reducer.comm_hook.__name__)
        trainer.train_step()
    parameters = [(p.numel(), spec_of(p).replicated) for p in trainer.parameters.values()]
    stage = groups.pp.index
    groups.close()
    return stage, counting.found, counting.around, parameters


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
GATHER_QK = {"attention": "gather_qk"}
UNTIED = {"model.tie_embeddings": False}
REPLICATED = {"model.embedding": "replicated"}
CASES = [
    pytest.param(Layout(), {}, id="one rank"),
    pytest.param(Layout(tp=2), {}, id="tp2"),
    pytest.param(Layout(tp=4), {"precision": "fp64"}, id="tp4 fp64"),
    pytest.param(Layout(tp=2), {"sp": True}, id="tp2 sp"),
    pytest.param(Layout(tp=2), {"sp": True, **LLAMA, **UNTIED}, id="tp2 sp llama"),
    pytest.param(Layout(tp=2), {"recompute": "full"}, id="tp2 recompute"),
    pytest.param(Layout(tp=2), {"recompute": "[norm,attention,mlp]"}, id="tp2 parts recomputed"),
    pytest.param(
        Layout(tp=2, pp=2),
        {"recompute": "full", "recompute_layers": [1, 0], "sp": True},
        id="tp2 pp2 sp, a layer recomputed",
    ),
    pytest.param(
        Layout(tp=2),
        {"sp": True, "recompute": "[norm,activation,attention]"},
        id="tp2 sp no collective repeated",
    ),
    pytest.param(
        Layout(tp=2),
        {"recompute": "[mlp]", "mlp_chunk_tokens": 8},
        id="tp2 an MLP in chunks",
    ),
    pytest.param(
        Layout(tp=2, pp=2),
        {"recompute": "[mlp]", "recompute_layers": [1, 0], "sp": True, "mlp_chunk_tokens": 8},
        id="tp2 pp2 sp, an MLP in chunks in a layer",
    ),
    pytest.param(Layout(tp=2), {"sp": True, "chunks": 2}, id="tp2 sp in two pieces"),
    pytest.param(
        Layout(tp=2, pp=2),
        {"sp": True, "chunks": 4, "recompute": "[norm,mlp]", **LLAMA},
        id="tp2 pp2 sp in four pieces, a gather repeated",
    ),
    pytest.param(
        Layout(tp=2),
        {"sp": True, "chunks": 2, "recompute": "full", "compile": True, "model.num_layers": 1},
        id="tp2 sp in two pieces, recompute, compiled",
    ),
    pytest.param(Layout(tp=2), REPLICATED, id="tp2 replicated table"),
    pytest.param(Layout(tp=2), {"sp": True, **REPLICATED}, id="tp2 sp replicated table"),
    pytest.param(Layout(tp=2), {"model.parallel_output": False}, id="tp2 gathered logits"),
    pytest.param(Layout(tp=2), {"chunk_tokens": 7}, id="tp2 loss in three chunks"),
    pytest.param(
        Layout(tp=2),
        {"chunk_tokens": 5, "model.parallel_output": False},
        id="tp2 gathered logits in four chunks",
    ),
    pytest.param(
        Layout(tp=4), {"sp": True, **LLAMA, "model.bias": True}, id="tp4 sp shared key-value heads"
    ),
    pytest.param(Layout(tp=2), QWEN3, id="tp2 norms of heads"),
    pytest.param(
        Layout(tp=4),
        {**QWEN3, "sp": True, "model.attention_bias": "qkv"},
        id="tp4 sp norms of heads and shared heads",
    ),
    pytest.param(Layout(tp=2, dp=2), {**QWEN3, "zero": 3}, id="tp2 dp2 norms of heads zero3"),
    pytest.param(
        Layout(tp=2),
        {**GATHER_QK, **LLAMA, "recompute": "[norm,attention]"},
        id="tp2 q and k gathered once",
    ),
    pytest.param(
        Layout(tp=4),
        {**GATHER_QK, **LLAMA, "sp": True, "recompute": "full"},
        id="tp4 sp q and k gathered recompute",
    ),
    pytest.param(Layout(pp=2), {}, id="pp2"),
    pytest.param(Layout(pp=2), UNTIED, id="pp2 untied"),
    pytest.param(Layout(pp=3), {"layers_per_stage": [1, 1, 1]}, id="pp3"),
    pytest.param(Layout(dp=2), {}, id="dp2"),
    pytest.param(Layout(dp=2), {**LLAMA, "bucket_cap_mb": None}, id="dp2 default buckets"),
    pytest.param(Layout(dp=4), {"precision": "fp64"}, id="dp4 fp64"),
    pytest.param(Layout(dp=2), {"zero": 1}, id="dp2 zero1"),
    pytest.param(Layout(pp=2, dp=2), {"zero": 1}, id="pp2 dp2 zero1"),
    pytest.param(Layout(dp=4), {"comm_hook": "bf16"}, id="dp4 bf16 buckets"),
    pytest.param(Layout(pp=2, dp=2), {"zero": 2}, id="pp2 dp2 zero2"),
    pytest.param(Layout(dp=2), {"zero": 2, "every": True}, id="dp2 zero2 every micro-batch"),
    pytest.param(Layout(dp=2), {"zero": 3, "every": False}, id="dp2 zero3 once a step"),
    pytest.param(Layout(tp=2, dp=2), {"zero": 3, "sp": True, **LLAMA}, id="tp2 dp2 sp zero3"),
    pytest.param(Layout(tp=2, dp=2), {"zero": 1, "sp": True, **LLAMA}, id="tp2 dp2 sp zero1"),
    pytest.param(Layout(tp=2, dp=2), {**QWEN3, "zero": 1}, id="tp2 dp2 norms of heads zero1"),
    pytest.param(Layout(pp=2, dp=2), {"zero": 3, "precision": "bf16"}, id="pp2 dp2 zero3 bf16"),
    pytest.param(Layout(pp=2, dp=2), {"comm_hook": "powersgd"}, id="pp2 dp2 powersgd"),
    pytest.param(
        Layout(tp=2, dp=2),
        {"precision": "fp16", "lm_cross_entropy": "fp16", "noise_scale": True},
        id="tp2 dp2 fp16, its loss too, noise scale",
    ),
    pytest.param(Layout(tp=2, pp=2, dp=2), {}, id="tp2 pp2 dp2"),
    pytest.param(Layout(tp=2, pp=2, dp=2), {**LLAMA, **UNTIED}, id="tp2 pp2 dp2 untied"),
    pytest.param(Layout(tp=2, pp=2, dp=2), {"sp": True}, id="tp2 pp2 dp2 sp"),
    pytest.param(
        Layout(tp=2, pp=2, dp=2),
        {"sp": True, **REPLICATED, "layers_per_stage": [2, 1], "precision": "fp64"},
        id="tp2 pp2 dp2 sp replicated fp64",
    ),
]


HEADS, RING = {"style": "heads", **LLAMA}, {"style": "ring", **LLAMA}
CASES += [
    pytest.param(Layout(cp=2), {**LLAMA, "zero": 1, "recompute": "full"}, id="cp2 zero1 recompute"),
    pytest.param(Layout(tp=2, cp=2), {**LLAMA, "sp": True, "zero": 3}, id="tp2 cp2 sp zero3"),
    pytest.param(Layout(cp=2, pp=2), {"zero": 2, **UNTIED}, id="cp2 pp2 zero2"),
    pytest.param(Layout(cp=2, dp=2), {**RING, "noise_scale": True}, id="cp2 dp2 ring noise scale"),
    pytest.param(
        Layout(tp=2, cp=2, dp=2), {**LLAMA, "zero": 1, "sp": True}, id="tp2 cp2 dp2 sp zero1"
    ),
    pytest.param(
        Layout(cp=3), {"comm_hook": "bf16", "noise_scale": True}, id="cp3 padded, noise scale"
    ),
    pytest.param(Layout(tp=2, cp=2), {"optim": "muon", "zero": 1}, id="tp2 cp2 muon zero1"),
    pytest.param(Layout(cp=2), {"model.dropout": 0.1, "recompute": "full"}, id="cp2 dropout"),
    pytest.param(
        Layout(cp=2, pp=2),
        {**HEADS, "recompute": "full", "recompute_layers": [1, 0]},
        id="cp2 pp2 heads, a layer recomputed",
    ),
    pytest.param(Layout(cp=4), {**HEADS, "sp": True}, id="cp4 heads, two of keys"),
    pytest.param(
        Layout(cp=4), {**RING, "recompute": "[attention]", "precision": "fp64"}, id="cp4 ring"
    ),
]


MUON = {"optim": "muon", **LLAMA}
CASES += [
    pytest.param(Layout(tp=4), MUON, id="tp4 muon"),
    pytest.param(Layout(tp=2, dp=2), MUON | {"zero": 1, "precision": "bf16"}, id="tp2 dp2 muon"),
    pytest.param(Layout(pp=2, dp=2), {"optim": "muon"}, id="pp2 dp2 muon"),
    pytest.param(Layout(dp=4), MUON | {"zero": 2}, id="dp4 muon zero2"),
]
LOOPS = {"schedule": "interleaved", "vpp": 2, "model.num_layers": 5}
V = {"schedule": "zbv", "vpp": 2, "model.num_layers": 5}
CASES += [
    pytest.param(Layout(pp=2), LOOPS, id="pp2 loops"),
    pytest.param(Layout(pp=2, dp=2), V | {"zero": 1}, id="pp2 dp2 v zero1"),
    pytest.param(Layout(pp=2, dp=2), V | {"zero": 3}, id="pp2 dp2 v zero3"),
    pytest.param(Layout(pp=2, dp=2), LOOPS | {"zero": 3}, id="pp2 dp2 loops zero3"),
    pytest.param(Layout(pp=2, dp=2), LOOPS | {"zero": 2}, id="pp2 dp2 loops zero2"),
    pytest.param(Layout(tp=2, pp=2), V | {"sp": True, **UNTIED}, id="tp2 pp2 v sp"),
    pytest.param(Layout(tp=2, pp=2), LOOPS | {"slices": True}, id="tp2 pp2 loops slices"),
    pytest.param(Layout(tp=2, pp=3), {"slices": True, **UNTIED}, id="tp2 pp3 slices"),
]


@pytest.mark.parametrize("layout, changes", CASES)
def test_the_list_is_what_a_step_sends(pool: Pool, layout: Layout, changes: dict[str, Any]) -> None:
    config = config_of(layout, changes)
    seen = set()
    for rank, (stage, found, around, _) in enumerate(
        pool.run(layout.world_size, sent_in_a_step, layout, changes, timeout_s=900)
    ):
        place = layout.coordinates(rank)
        data_rank = place.dp * layout.cp + place.cp
        seen.add(stage)
        if "optim" in changes and place.tp:
            continue  # Muon's home ranks send what they have; the list is of the first tp rank
        assert found == priced(config, layout, stage, data_rank), f"rank {rank}, stage {stage}"
        assert not around, f"rank {rank} sends what nobody counts: {around}"
    assert seen == set(range(layout.pp))
    if layout.world_size > 1:
        assert found  # comparing two empty lists would prove nothing


@pytest.mark.parametrize("changes", [{}, {**LLAMA, **UNTIED}, REPLICATED, QWEN3], ids=str)
def test_parameters_of_a_stage_are_those_of_the_model(pool: Pool, changes: dict[str, Any]) -> None:
    layout = Layout(tp=2, pp=2)
    changes = {**changes, "layers_per_stage": [1, 2]}
    config = config_of(layout, changes)
    layers = (range(0, 1), range(1, 3))
    for stage, _, _, parameters in pool.run(4, sent_in_a_step, layout, changes):
        ends = (stage == 0, stage == 1)
        listed = stage_parameters(config.model, layout.tp, layers[stage], *ends)
        assert [(p.numel, p.replicated) for p in listed] == parameters
