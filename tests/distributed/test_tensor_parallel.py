"""Tests tensor-parallel parts on real ranks: the autograd pairs, the layers, and their messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from parallel3d.tensor_parallel import mappings
from parallel3d.tensor_parallel.loss import HeadLoss, Objective
from tests.distributed.pool import Pool

SIZES = [2, 4]


def rank_tensor(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def of_each_size(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns the results of a function in a tp group of two of four ranks, and of all four."""
    found = []
    for size in SIZES:
        groups = ProcessGroups.create(Layout(tp=size, dp=4 // size), "cpu")
        found.append(function(groups.tp, *args))
        groups.close()
    return found


def run_collectives(tp: Group) -> list[float]:
    """Compares each collective's result with the expected sum, on the ranks that have the parts."""
    size = tp.size
    everyone = [rank_tensor(r, 2 * size, 3) for r in range(size)]
    mine = everyone[tp.index].clone()
    total = sum(everyone)
    torch.testing.assert_close(collectives.all_reduce(mine.clone(), tp), total)
    assert torch.equal(collectives.all_gather(mine, tp), torch.cat(everyone))
    shard = collectives.reduce_scatter(mine, tp)
    torch.testing.assert_close(shard, total.chunk(size)[tp.index])
    big = torch.full((5_000_000,), float(tp.index + 1))  # 20 MB: beyond any eager buffer
    return collectives.all_reduce(big, tp).unique().tolist()


def test_collectives_compute_the_right_values(pool: Pool) -> None:
    sums = [[size * (size + 1) / 2] for size in SIZES]
    assert pool.run(4, of_each_size, run_collectives) == [sums] * 4


def all_reduced_bits(tp: Group) -> bytes:
    return collectives.all_reduce(rank_tensor(tp.index, 1001).float(), tp).numpy().tobytes()


def test_all_reduce_is_bit_identical_on_all_ranks(pool: Pool) -> None:
    first, *others = pool.run(4, of_each_size, all_reduced_bits)
    assert others == [first] * 3


def pairs_are_adjoint(tp: Group) -> list[float]:
    """Returns Σ over ranks of <forward(x), y> − <x, backward(y)>, which is zero for a correct pair.

    Both sides are sums over all ranks. A replicated tensor counts once: it is divided by size.
    """
    size, sums = tp.size, []
    cases = [  # function, shape of x, x replicated, result replicated
        (mappings.reduce_from_tensor_parallel, (2, 4, 3), False, True),
        (mappings.scatter_to_sequence, (2, 8, 3), False, False),
        (mappings.gather_from_vocabulary, (2, 4, 3), False, True),
        (mappings.gather_heads, (2, 4, 3), False, False),
        (lambda w, g: mappings.rows_of_replicated(w, g, False), (8, 3), True, False),
    ]
    for function, shape, x_replicated, y_replicated in cases:
        x = rank_tensor(0 if x_replicated else tp.index, *shape).requires_grad_()
        out = function(x.clone(), tp)
        y = rank_tensor(100 if y_replicated else 100 + tp.index, *out.shape)
        (grad,) = torch.autograd.grad(out, x, y)
        left = (out * y).sum() / (size if y_replicated else 1)
        right = (x * grad).sum() / (size if x_replicated else 1)
        difference = torch.stack((left - right, left.abs())).detach()
        dist.all_reduce(difference)
        sums.append(float(difference[0].abs() / difference[1]))
    return sums


def test_backward_of_each_mapping_is_the_adjoint_of_its_forward(pool: Pool) -> None:
    for found in pool.run(4, of_each_size, pairs_are_adjoint):
        assert max(map(max, found)) < 1e-12, found


def split_losses(tp: Group) -> list[tuple[Tensor, Tensor]]:
    tables = ((16, 16), (13, 16), (5, 32))
    return [pair for table in tables for sp in (False, True) for pair in split_loss(tp, *table, sp)]


def split_loss(tp: Group, vocab: int, padded: int, sp: bool) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs that must be equal, of the split and of the whole: losses and their
    gradients."""
    size = tp.size
    x, table = rank_tensor(7, 2, 8, 5), rank_tensor(8, padded, 5)
    labels = torch.arange(16).view(2, 8) % vocab
    mask = torch.arange(16).view(2, 8) % 3 > 0
    scale = torch.tensor(0.3, dtype=torch.float64)
    pairs, capped = [], Objective(vocab, 0.1, 0.02, scale=0.4, cap=0.7)
    for objective, gather_logits, chunk in product(
        (Objective(vocab), Objective(vocab, 0.1, 0.02), capped), (False, True), (None, 5)
    ):
        whole, rows = x.clone().requires_grad_(), table.clone().requires_grad_()
        logits = (whole @ rows[:vocab].t()).flatten(0, 1) * objective.scale
        if objective.cap is not None:
            logits = objective.cap * torch.tanh(logits / objective.cap)
        smoothing = objective.label_smoothing
        expected = torch.nn.functional.cross_entropy(
            logits, labels.flatten(), reduction="none", label_smoothing=smoothing
        )
        expected = expected + objective.z_loss * logits.logsumexp(1).square()
        expected = (expected * mask.flatten()).sum()
        by_x, by_table = torch.autograd.grad(expected, (whole, rows), scale)
        head = HeadLoss(objective, tp, sp, gather_logits, chunk)
        mine = x.chunk(size, 1)[tp.index] if sp else x
        mine = mine.clone().requires_grad_()
        local = table.chunk(size)[tp.index].clone().requires_grad_()
        loss = head.train(mine, local, labels, mask, scale)
        grads = torch.autograd.grad(loss, (mine, local), scale)
        by_x = by_x.chunk(size, 1)[tp.index] if sp else by_x
        pairs += [(loss.detach(), expected.detach()), (grads[0], by_x)]
        pairs.append((grads[1], by_table.chunk(size)[tp.index]))
    return pairs


def test_split_head_and_loss_equal_the_whole_ones(pool: Pool) -> None:
    """Tests whole tables, padded ones, and one that is only padding on a rank."""
    for found in pool.run(4, of_each_size, split_losses):
        for ours, theirs in (pair for pairs in found for pair in pairs):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


class Ramp:
    """Returns samples 0, 1, 2 … modulo the vocabulary."""

    def __init__(self, seq: int, vocab: int) -> None:
        self.seq, self.vocab = seq, vocab

    def sample(self, i: int) -> Sample:
        tokens = (torch.arange(self.seq + 1) + i) % self.vocab
        return Sample(tokens.numpy(), torch.ones(self.seq, dtype=torch.bool).numpy())


def tiny_config(layout: Layout, sp: bool, microbatches: int) -> Config:
    model = ModelConfig(
        num_layers=3, hidden_size=16, num_attention_heads=4, seq_length=8, vocab_size=30,
        vocab_multiple=8, norm="rmsnorm", position_embedding="rope", activation="swiglu",
        bias=False, tie_embeddings=False,
    )  # fmt: skip
    gbs = 2 * microbatches * layout.dp
    return Config(
        tp=layout.tp, pp=layout.pp, dp=layout.dp, sp=sp, micro_batch_size=2,
        global_batch_size=gbs, model=model,
    )  # fmt: skip


def count_calls(layout: Layout, sp: bool, microbatches: int) -> tuple[Counter, int, int]:
    """Returns the collectives of one step by (kind, group size), the number of buckets, and of
    layers here."""
    groups = ProcessGroups.create(layout, "cpu")
    config = tiny_config(layout, sp, microbatches)
    config.ddp.bucket_cap_mb = 0.002
    trainer = Trainer(config, groups, torch.device("cpu"), train_source=Ramp(8, 30))
    trainer.train_step()
    calls: Counter = Counter()
    by_handle = {g.handle: g.name for g in (groups.tp, groups.dp, groups.pp) if g.handle}
    watched = ["all_reduce_async", "all_gather_async", "reduce_scatter_async"]
    originals = {name: getattr(collectives, name) for name in watched}
    raw = {name: getattr(dist, name) for name in ("all_reduce", "isend", "irecv", "broadcast")}

    def counting(name: str):
        def call(tensor, group, *args):
            calls[name.removesuffix("_async"), group.name, group.size] += tensor.numel() > 3
            return originals[name](tensor, group, *args)

        return call

    def raw_counting(name: str):
        def call(tensor, *args, **kwargs):
            group = kwargs.get("group", args[1] if len(args) > 1 else None)
            calls["raw", name, by_handle.get(group, "other")] += 1
            assert dist.get_world_size(group) > 1
            return raw[name](tensor, *args, **kwargs)

        return call

    try:
        for name in watched:
            setattr(collectives, name, counting(name))
        for name in raw:
            setattr(dist, name, raw_counting(name))
        trainer.train_step()
    finally:
        for name in watched:
            setattr(collectives, name, originals[name])
        for name in raw:
            setattr(dist, name, raw[name])
    return +calls, len(trainer.data_parallel.buckets), len(trainer.stages[0].layers)


def test_tensor_parallelism_sends_at_most_4l_plus_4_reductions(pool: Pool) -> None:
    microbatches = 3
    for calls, _, layers in pool.run(2, count_calls, Layout(tp=2), False, microbatches):
        reductions = calls["all_reduce", "tp", 2] / microbatches
        gathers = calls["all_gather", "tp", 2] / microbatches
        assert reductions == 4 * layers + 2  # the embedding's and the head's input gradient
        assert gathers == 1  # the loss: maximum, sum and target in one
        assert reductions + gathers <= 4 * layers + 4


def test_sequence_parallelism_replaces_each_reduction_by_its_two_halves(pool: Pool) -> None:
    microbatches = 3
    for calls, _, layers in pool.run(2, count_calls, Layout(tp=2), True, microbatches):
        scatters = calls["reduce_scatter", "tp", 2] / microbatches
        gathers = calls["all_gather", "tp", 2] / microbatches
        assert scatters == 4 * layers + 2
        # There are equally many gathers, one more for the loss, and one per column-parallel layer,
        # which gathers its input again in the backward instead of keeping it.
        assert gathers == 4 * layers + 2 + 1 + 2 * layers
        assert calls["all_reduce", "tp", 2] == 1  # the norms' partial gradients, once a step


def test_each_bucket_is_reduced_once_a_step_and_groups_of_one_send_nothing(pool: Pool) -> None:
    for calls, buckets, _ in pool.run(2, count_calls, Layout(dp=2), False, 3):
        assert buckets > 3
        assert calls["all_reduce", "dp", 2] == buckets
    for calls, _, _ in pool.run(2, count_calls, Layout(pp=2), False, 3):
        assert not [key for key in calls if key[1] in ("tp", "dp") and key[2] != 1]
    (alone,) = pool.run(1, count_calls, Layout(), False, 3)
    assert not [key for key in alone[0] if key[0] == "raw"]
