"""Times mixtures of experts beside other trainers', in turns on one card.

Each turn makes a trainer, warms it up, times some steps and frees it, since a card cannot hold all
of them. All begin with our initial weights and train on the same sequences, and the losses of their
first steps are compared. The peers' models run in a loop of our own. PyTorch's grouped GEMM takes
no part in autocast, so their weights are bf16, and unlike ours they have no fp32 ones beside them:
their steps have less to do.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.mixtures import MIXTURES, RATE, Mixture, Repeated, trainer_of
from benchmarks.gpu.rows import MAX_GRAD_NORM, peak_memory_gb, seconds_of
from benchmarks.gpu.tasks import Given, Row, judged, noted
from benchmarks.peers.mixtures import (
    Missing,
    Weights,
    of_titan,
    of_transformers,
    take,
    titan_mixture,
    transformers_mixture,
)
from parallel3d.device import accelerator

Step = Callable[[], float]  # a step, which returns its loss
ROUNDS = 2
WARM_UP = 3
OURS = "parallel3d"
SLOWER = {"torchtitan": 1.2, "transformers": 1.5}  # how many times our step theirs should take
FIRST_OFF = 2e-2  # of the losses of the first step, in bf16: some tokens choose other experts


def side_by_side(given: Given, name: str) -> Row:
    """Measures whole steps of all installed trainers."""
    mixture = MIXTURES[name]
    weights: dict[str, Tensor] = {}

    def ours(micro_batch: int) -> Step:
        trainer = trainer_of(mixture, given, micro_batch)
        if not weights:
            weights.update(trainer.full_parameters())
        return lambda: trainer.train_step().loss or math.nan

    makers: dict[str, Callable[[int], Step]] = {OURS: ours}
    for trainer, make in (("torchtitan", _titan), ("transformers", _transformers)):
        makers[trainer] = partial(make, mixture, given, weights)
    found, absent = in_turns(makers, given, mixture)
    if len(found) < 2:
        return {"skipped": "; ".join(absent.values())}
    first = found[OURS]["losses"][0]
    near = all(abs(row["losses"][0] - first) <= FIRST_OFF * first for row in found.values())
    fast = all(row["times_ours"] >= SLOWER.get(name, 1.0) for name, row in found.items())
    learn = all(row["losses"][-1] < row["losses"][0] for row in found.values())
    said = []
    for trainer, row in found.items():
        times = f"{row['step_ms']:.1f} ms ({row['times_ours']:.2f}×)"
        said.append(f"{trainer} {times}, loss {row['losses'][0]:.3f} → {row['losses'][-1]:.3f}")
    figures = {"trainers": found, "absent": absent, "micro_batch": mixture.batch(given)[0]}
    is_right = near and learn and (fast or not given.is_timed)
    return judged(is_right, "; ".join([*said, *absent.values()]), figures)


def balanced(given: Given, name: str) -> Row:
    """Measures our step twice: with experts that are chosen equally often, and with the router's
    choice."""
    mixture = MIXTURES[name]

    def maker(routing: str) -> Callable[[int], Step]:
        def make(micro_batch: int) -> Step:
            trainer = trainer_of(mixture, given, micro_batch, routing)
            return lambda: trainer.train_step().loss or math.nan

        return make

    found, _ = in_turns({OURS: maker("model"), "balanced": maker("balanced")}, given, mixture)
    said = [f"{routing} {row['step_ms']:.1f} ms" for routing, row in found.items()]
    share = found["balanced"]["times_ours"]
    figures = {"trainers": found, "micro_batch": mixture.batch(given)[0]}
    return noted(f"{', '.join(said)}: balanced takes {share:.3f} of the time", figures)


def in_turns(
    makers: Mapping[str, Callable[[int], Step]], given: Given, mixture: Mixture
) -> tuple[dict[str, Row], dict[str, str]]:
    """Returns the rows of trainers, each of which is made with a micro-batch in every round, and
    why the others are absent. A trainer that runs out of memory gets smaller micro-batches."""
    micro_batches = dict.fromkeys(makers, mixture.batch(given)[0])
    few = dataclasses.replace(given.steps(), warm_up=0, steps=max(2, given.steps().steps // 2))
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    rows: dict[str, Row] = {}
    absent: dict[str, str] = {}
    for _ in range(ROUNDS):
        for name, make in makers.items():
            while name not in absent:
                try:
                    losses, took = _turn(lambda: make(micro_batches[name]), given, few)  # noqa: B023
                except Missing as why:
                    absent[name] = str(why)
                except torch.OutOfMemoryError:
                    micro_batches[name] //= 2
                    if not micro_batches[name]:
                        absent[name] = f"{name}: out of memory"
                else:
                    seconds[name].append(took)
                    peak = peak_memory_gb(given.device)
                    rows[name] = {"losses": losses, "peak_memory_gb": peak}
                    break
                finally:
                    _free(given.device)
    sequences = mixture.batch(given)[1]
    tokens = sequences * mixture.model(given).seq_length
    for name, row in rows.items():
        step = statistics.median(seconds[name])
        ratios = [b / a for a, b in zip(seconds[OURS], seconds[name], strict=True)]
        row |= {"step_ms": 1e3 * step, "tokens_per_s": tokens / step, "rounds": ratios}
        row |= {"times_ours": statistics.median(ratios), "micro_batch": micro_batches[name]}
    return rows, absent


def _turn(make: Callable[[], Step], given: Given, size: Any) -> tuple[list[float], float]:
    """Returns the losses of the first steps, and the median seconds of further ones."""
    if given.on_accelerator:
        accelerator.module(given.device).reset_peak_memory_stats(given.device)
    step = make()
    losses = [step() for _ in range(WARM_UP)]
    return losses, seconds_of(step, given.device, size)


def _free(device: torch.device) -> None:
    gc.collect()
    if accelerator.is_accelerator(device):
        accelerator.module(device).empty_cache()


def _transformers(mixture: Mixture, given: Given, weights: Weights, micro_batch: int) -> Step:
    """Trains transformers' model in bf16, with its grouped GEMM."""
    model = mixture.model(given)
    network = transformers_mixture(model, "grouped_mm", given.device).bfloat16()
    take(network, of_transformers(model, weights))
    call = lambda tokens: network(input_ids=tokens).logits  # noqa: E731
    return _training_step(mixture, given, network, call, micro_batch)


def _titan(mixture: Mixture, given: Given, weights: Weights, micro_batch: int) -> Step:
    """Trains torchtitan's model."""
    model = mixture.model(given)
    network = titan_mixture(model, given.device).bfloat16()
    take(network, of_titan(model, weights))
    return _training_step(mixture, given, network, network, micro_batch)


def _training_step(
    mixture: Mixture,
    given: Given,
    network: nn.Module,
    call: Callable[[Tensor], Tensor],
    micro_batch: int,
) -> Step:
    """Runs a step of the usual training loop; `call` returns the logits of tokens."""
    device, (_, sequences) = given.device, mixture.batch(given)
    fused = given.on_accelerator
    optimizer = torch.optim.AdamW(
        network.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
    )
    source, parts = Repeated(mixture.model(given), sequences), sequences // micro_batch
    tokens = torch.stack([torch.from_numpy(source.sample(i).tokens) for i in range(sequences)]).to(
        device
    )

    def step() -> float:
        total = torch.zeros((), device=device)
        for part in tokens.split(micro_batch):
            logits = call(part[:, :-1])
            value = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten()) / parts
            value.backward()
            total += value.detach()
        torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step
