"""Tests the gradient noise scale.

Squared norms of real ranks are compared with autograd on the reference model, and the estimate with
gradients of known noise.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data_parallel.noise_scale import NoiseScale, PartialNorms
from tests.distributed.cases import GLOBAL_BATCH, Case, Problem, UnequalMasks
from tests.distributed.harness import array, make_trainer
from tests.distributed.pool import Pool
from tests.reference.train import batch_loss, build

pytestmark = pytest.mark.nightly

ON = ("train.noise_scale", True)
GPT = Problem("gpt_tiny", "sgd", tied=True)
LLAMA = Problem("llama_tiny", "sgd", tied=False, model=(("num_query_groups", 2),))
GROWS = replace(GPT, batch=2 * GLOBAL_BATCH, batches=((0, GLOBAL_BATCH), (1, 2 * GLOBAL_BATCH)))
CASES = {
    (1, 1, 2): [Case(GROWS, microbatches=4, keys=(ON,)), Case(GPT, keys=(ON, ("zero", 1)))],
    (2, 1, 2): [Case(GPT, sp=True, keys=(ON,)), Case(LLAMA, keys=(ON, ("zero", 1)))],
    (4, 1, 1): [Case(LLAMA, microbatches=4, keys=(ON,))],
    (1, 2, 2): [Case(GPT, bucket_cap_mb=0.01, keys=(ON,))],
    (1, 2, 1): [Case(LLAMA, schedule="zb_h1", keys=(ON,))],
    (1, 1, 1): [Case(GROWS, microbatches=6, keys=(ON,))],
    (1, 1, 1, 2): [Case(GPT, microbatches=4, keys=(ON,))],
    (1, 1, 2, 2): [Case(LLAMA, keys=(ON, ("zero", 1)))],
}


def measured(sizes: tuple[int, ...], cases: list[Case]) -> list[tuple]:
    """Returns, for each case on every rank, initial weights, the two squared norms of its first
    step, and the values for a checkpoint."""
    groups, found = ProcessGroups.create(Layout(*sizes), "cpu", timeout_s=300), []
    for case in cases:
        trainer = make_trainer(case, groups)
        weights = {name: array(w) for name, w in trainer.full_parameters().items()}
        noise = trainer.train_step().noise
        found.append((weights, noise.trace, noise.signal, trainer.noise.progress()))
    groups.close()
    return found


def is_left_out(name: str, case: Case, sizes: tuple[int, ...]) -> bool:
    """Returns the names of parameters whose gradient is not complete on a replica before the
    reduction."""
    tp, pp, dp = sizes[:3]
    tied = case.problem.tied
    table = name == ("embedding.word.weight" if tied else "head.weight")  # the head's table
    if table and (dp == 1 or (pp > 1 and tied)):
        return True
    shared = tp > dict(case.problem.model).get("num_query_groups", 8)
    if shared and (".attention.k." in name or ".attention.v." in name):
        return True
    replicated = "norm" in name or "position" in name or name.endswith(
        ("attention.out.bias", "mlp.down.bias")
    )  # fmt: skip
    return case.sp and tp > 1 and replicated


def expected(case: Case, sizes: tuple[int, ...], weights: dict) -> tuple[float, float]:
    """Returns trace and signal by their definitions, from the gradients of parts of the batch."""
    config = case.config(Layout(*sizes))
    model = build(config.model, {n: torch.from_numpy(w) for n, w in weights.items()}, torch.float64)
    source = UnequalMasks(config.model.vocab_size, config.model.seq_length)
    counts = [int(source.sample(i).loss_mask.sum()) for i in range(GLOBAL_BATCH)]

    def gradient(first: int, count: int) -> dict[str, torch.Tensor]:
        """Returns the gradient of the sum of some samples' losses, over the tokens of all
        samples."""
        share = sum(counts[first : first + count]) / sum(counts)
        loss = batch_loss(model, source, first, count, config.loss) * share
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, parameters)
        found = dict(zip(names, gradients, strict=True))
        return {n: g for n, g in found.items() if not is_left_out(n, case, sizes)}

    def square(gradients: dict[str, torch.Tensor]) -> float:
        return sum(float(g.square().sum()) for g in gradients.values())

    dp = sizes[2]
    parts = dp if dp > 1 else GLOBAL_BATCH // config.micro_batch_size
    size = GLOBAL_BATCH // parts
    used = range(dp) if dp > 1 else range(1)  # the first micro-batch
    small = np.mean([parts**2 * square(gradient(r * size, size)) for r in used])
    big = square(gradient(0, GLOBAL_BATCH))
    trace = (small - big) / (1 / size - 1 / GLOBAL_BATCH)
    signal = (GLOBAL_BATCH * big - size * small) / (GLOBAL_BATCH - size)
    return trace, signal


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_norms_of_small_and_large_batches_equal_the_reference(
    sizes: tuple[int, ...], pool: Pool
) -> None:
    cases = CASES[sizes]
    ranks = pool.run(math.prod(sizes), measured, sizes, cases)
    for i, case in enumerate(cases):
        trace, signal = expected(case, sizes, ranks[0][i][0])
        for rank, found in enumerate(ranks):
            assert found[i][1:3] == pytest.approx((trace, signal), rel=1e-9), f"{case} {rank}"
            assert found[i][3] == ranks[0][i][3], "one estimate for all ranks"


class ByReplicas(PartialNorms):
    """Holds norms that a test makes itself."""

    def __init__(self, by_replicas: bool) -> None:
        self.by_replicas = by_replicas


@pytest.mark.parametrize("by_replicas", [True, False])
def test_the_estimate_recovers_a_known_noise(by_replicas: bool) -> None:
    """Draws gradients with |G|² = 3 and tr(Σ) = 60 in 400 dimensions of unequal noise; batches of
    12, in 4 parts."""
    rng, batch, parts = np.random.default_rng(0), 12, 4
    variance = rng.uniform(0, 1, 400)
    variance *= 60 / variance.sum()
    direction = rng.normal(size=400)
    direction *= np.sqrt(3 / np.square(direction).sum())
    noise = NoiseScale(batch, parts, ByReplicas(by_replicas))
    traces, signals, noise_scales = [], [], []
    for _ in range(1000):
        samples = direction + rng.normal(size=(batch, 400)) * np.sqrt(variance)
        sums = samples.reshape(parts, -1, 400).sum(1) / batch
        part = np.square(sums).sum() if by_replicas else np.square(sums[0]).sum()
        scale = 1024.0
        noise.update([part * scale**2, np.square(sums.sum(0)).sum() * scale**2], scale)
        traces.append(noise.last.trace)
        signals.append(noise.last.signal)
        noise_scales.append(noise.last.scale)
    assert np.mean(traces) == pytest.approx(60, rel=0.03)
    assert np.mean(signals) == pytest.approx(3, rel=0.05)
    mean = np.mean(noise_scales[100:])
    assert mean == pytest.approx(20, rel=0.1)


def test_a_nonfinite_step_keeps_the_means_and_a_resume_continues_them() -> None:
    noise = NoiseScale(8, 2, ByReplicas(True))
    noise.update([3.0, 4.0])
    before = noise.last, noise.progress()
    noise.update([float("nan"), 4.0])
    assert (noise.last, noise.progress()) == before
    again = NoiseScale(8, 2, ByReplicas(True))
    again.restore(noise.progress())
    again.update([5.0, 6.0])
    noise.update([5.0, 6.0])
    assert again.last == noise.last
    noise.restore({"steps": 3})  # from a run without measurements
    assert noise.progress() == {"noise_trace": 0.0, "noise_signal": 0.0}


def test_without_the_noise_scale_nothing_is_sent_or_kept() -> None:
    off = NoiseScale(8, 2, None)
    off.update(())
    sent = off.squares(None, torch.zeros((), dtype=torch.float64))  # needs no engine
    assert (sent.numel(), off.progress(), off.last) == (0, {}, None)
