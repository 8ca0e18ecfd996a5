"""Compares zero=1 with zero=0: optimizer memory of a rank, and the time of a step.

Both trainers live in the same ranks and step in turns, so that a busy minute slows both equally.
The memory of each is measured in processes of its own: bytes of the tensors that the optimizer
keeps (moments, and masters if the model computes in another type), and resident memory of rank 0.

    python -m benchmarks.speed.zero [--dp 1 2 4] [--rounds 6] [--precision fp32]
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample
from parallel3d.host.memory import keep_freed_memory
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from parallel3d.trainer import Trainer

SEQUENCE = 256
MODEL: dict[str, Any] = {
    "name": "llama", "num_layers": 8, "hidden_size": 256, "num_attention_heads": 8,
    "ffn_hidden_size": 688, "seq_length": SEQUENCE, "norm": "rmsnorm", "position_embedding": "rope",
    "activation": "swiglu", "bias": False, "tie_embeddings": False,
}  # fmt: skip
TURN = 3  # number of steps; in the second and third the parameters' gather overlaps the forward
MICROBATCHES = 8  # number of micro-batches of 2 sequences over all ranks: 4,096 tokens a step


class Ramp:
    """A source of arbitrary tokens."""

    seq_length = SEQUENCE

    def sample(self, i: int) -> Sample:
        tokens = (np.arange(SEQUENCE + 1) * 7 + i) % 256
        return Sample(tokens, np.ones(SEQUENCE, dtype=bool))


def make_trainer(groups: ProcessGroups, zero: int, precision: str) -> Trainer:
    config = Config(micro_batch_size=2, global_batch_size=2 * MICROBATCHES)
    config.dp, config.zero, config.device = groups.layout.dp, zero, "cpu"
    config.model, config.precision.name = ModelConfig(**MODEL), precision
    return Trainer(config, groups, torch.device("cpu"), train_source=Ramp())


def state_bytes(trainer: Trainer) -> int:
    """Returns moments, and masters that are not the model's own parameters."""
    total = 0
    for group in trainer.optimizer.groups:
        total += sum(t.nbytes for tensors in group.state.values() for t in tensors)
        apart = [s.master for s in group.segments if s.master.data_ptr() != s.param.data_ptr()]
        total += sum(master.nbytes for master in apart)
    return total


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory(groups: ProcessGroups, zero: int, precision: str) -> tuple[int, int]:
    """Returns the bytes of optimizer state and of resident memory after two steps."""
    trainer = make_trainer(groups, zero, precision)
    for _ in range(2):
        trainer.train_step()
    return state_bytes(trainer), resident_bytes()


def step_times(groups: ProcessGroups, rounds: int, precision: str) -> list[tuple[float, float]]:
    """Returns the milliseconds of a step with zero=0 and zero=1, by round."""
    trainers = [make_trainer(groups, zero, precision) for zero in (0, 1)]
    rows = []
    for number in range(rounds + 1):
        row = []
        for trainer in trainers if number % 2 else reversed(trainers):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(TURN):
                trainer.train_step()
            trainer.data_parallel.wait_for_all_gathers()  # before the other trainer's turn
            row.append(1e3 * (time.perf_counter() - start) / TURN)
        if number:  # the first step warms up
            zero0, zero1 = row if number % 2 else reversed(row)
            rows.append((zero0, zero1))
    return rows


def _rank(index: int, size: int, port: int, job: functools.partial, result: Connection) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=index, world_size=size)
    groups = ProcessGroups.create(Layout(dp=size), "cpu", 60)
    found = job(groups)
    if index == 0:
        result.send(found)
    dist.barrier()
    groups.close()
    dist.destroy_process_group()


def on_ranks(size: int, job: functools.partial) -> Any:
    """Runs `job(groups)` on `size` new processes; returns rank 0's result."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    ranks = [context.Process(target=_rank, args=(i, size, port, job, theirs)) for i in range(size)]
    for rank in ranks:
        rank.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        for rank in ranks:
            rank.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--precision", default="fp32")
    given = parser.parse_args()
    print("| dp | state MB, zero=0 | zero=1 | resident MB, zero=0 | zero=1 | step ms, zero=0 "
          "| zero=1 | ratio of medians |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for dp in given.dp:
        sizes = [on_ranks(dp, functools.partial(memory, zero=z, precision=given.precision))
                 for z in (0, 1)]  # fmt: skip
        (state0, resident0), (state1, resident1) = sizes
        job = functools.partial(step_times, rounds=given.rounds, precision=given.precision)
        times = list(zip(*on_ranks(dp, job), strict=True))
        ms = [statistics.median(column) for column in times]
        spread = [f"{m:.0f} ({min(c):.0f}–{max(c):.0f})" for m, c in zip(ms, times, strict=True)]
        print(
            f"| {dp} | {state0 / 1e6:.1f} | {state1 / 1e6:.1f} | {resident0 / 1e6:.0f} "
            f"| {resident1 / 1e6:.0f} | {spread[0]} | {spread[1]} | **{ms[1] / ms[0]:.2f}** |",
            flush=True,
        )


if __name__ == "__main__":
    main()
