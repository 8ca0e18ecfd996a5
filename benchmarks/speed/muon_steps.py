"""Times a step and its optimizer with AdamW and with Muon, which take turns.

    python -m benchmarks.speed.muon_steps
    torchrun --nproc-per-node 2 -m benchmarks.speed.muon_steps --dp 2 --zero 1

With `--dp` and zero=0 a third contender takes part: Muon in which each replica does all the work,
whereas Muon usually divides it among the replicas and sends the results.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.group import SINGLE
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample
from parallel3d.models.keys import ModelConfig
from parallel3d.optim.muon import Muon
from parallel3d.run_config import Config
from parallel3d.topology.assumptions import preset
from parallel3d.trainer import Trainer


class RandomTokens:
    seq_length = 256

    def sample(self, i: int) -> Sample:
        rng = np.random.default_rng(i)
        return Sample(rng.integers(0, 256, 257), np.ones(256, dtype=bool))


def timed(call: Callable[..., Any], seconds: list[float], *args: Any) -> Any:
    began = time.perf_counter()
    result = call(*args)
    seconds.append(time.perf_counter() - began)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"tp": 1, "dp": 1, "zero": 0, "hidden": 128, "steps": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    groups, layout = ProcessGroups.single(), Layout(tp=given.tp, dp=given.dp)
    if layout.world_size > 1:
        dist.init_process_group("gloo")
        groups = ProcessGroups.create(layout, "cpu")
    model = preset("model", "llama_tiny") | {"hidden_size": given.hidden, "ffn_hidden_size": None}
    trainers: dict[str, Trainer] = {}
    alone = ["muon, work not shared"] if given.dp > 1 and not given.zero else []
    for kind in ("adamw", "muon", *alone):
        config = Config(
            tp=given.tp, dp=given.dp, zero=given.zero, model=ModelConfig(**model), device="cpu",
            micro_batch_size=8, global_batch_size=8 * given.dp,
        )  # fmt: skip
        config.optim.name = kind.split(",")[0]
        config.optim.momentum = 0.95 if kind != "adamw" else 0.0
        trainers[kind] = trainer = Trainer(
            config, groups, torch.device("cpu"), train_source=RandomTokens()
        )
        if kind in alone:
            spans, own = [trainer.data_parallel.spans_of(0)], trainer.optimizer.muon
            assert isinstance(own, Muon)
            trainer.optimizer.muon = Muon(
                spans, own.mode, torch.float32, groups.tp, SINGLE, own.empty.device
            )
    steps: dict[str, list[float]] = {kind: [] for kind in trainers}
    updates: dict[str, list[float]] = {kind: [] for kind in trainers}
    for kind, trainer in trainers.items():
        trainer.optimizer.step = partial(timed, trainer.optimizer.step, updates[kind])  # type: ignore[method-assign]
    for _ in range(given.steps):
        for kind, trainer in trainers.items():
            timed(trainer.train_step, steps[kind])
    for kind in trainers if groups.rank == 0 else ():
        step, update = (1e3 * median(found[kind][3:]) for found in (steps, updates))
        print(f"{kind}: step {step:.0f} ms, of which optimizer {update:.1f} ms")


if __name__ == "__main__":
    main()
