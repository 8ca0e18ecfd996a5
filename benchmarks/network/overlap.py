"""Measures how much of data parallelism's communication is hidden behind the backward pass.

The network has one rank per host and throttles every NIC (tests/tools/railnet, one namespace per
host). Three kinds of steps take turns in one run: with overlap, without (all buckets are sent after
the backward), and with a hook that sends nothing, which leaves the compute alone. The hidden share
is

    (without overlap − with overlap) / (without overlap − nothing sent)

of the medians. Next to it stands the same share of the time that rank 0 waited for dp alone (from
its breakdown), which a busy machine affects less. Needs root and iproute2.

    python -m benchmarks.network.overlap [--dp 2 4] [--mbit 800] [--rounds 8]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from parallel3d.blueprint.layout import Layout
from parallel3d.comm import collectives
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from parallel3d.trainer import Trainer
from tests.e2e.command import Shell
from tests.e2e.rails import RAILNET, Rails, why_not

MODES = ("overlap", "after", "nothing")
MODEL: dict[str, Any] = {
    "name": "llama", "num_layers": 8, "hidden_size": 256, "num_attention_heads": 8,
    "ffn_hidden_size": 688, "seq_length": 256, "norm": "rmsnorm", "position_embedding": "rope",
    "activation": "swiglu", "bias": False, "tie_embeddings": False,
}  # fmt: skip


class Ramp:
    """Returns arbitrary tokens."""

    seq_length = MODEL["seq_length"]

    def sample(self, i: int) -> Sample:
        tokens = (np.arange(self.seq_length + 1) * 7 + i) % 256
        return Sample(tokens, np.ones(self.seq_length, dtype=bool))


class Turn(NamedTuple):
    """One step: its kind, its milliseconds, and the exposed milliseconds of dp on rank 0."""

    mode: str
    ms: float
    dp_ms: float


def of_rank(dp: int, rounds: int, sequences: int, bucket_mb: float) -> None:
    """Runs on every rank; the first one prints its turns as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = ModelConfig(**MODEL)
    config = Config(dp=dp, micro_batch_size=sequences, global_batch_size=sequences * dp)
    config.model, config.device, config.launch.shared_memory = model, "cpu", False
    config.ddp.bucket_cap_mb = bucket_mb
    groups = ProcessGroups.create(Layout(dp=dp), "cpu", 60, config.launch)
    trainer = Trainer(config, groups, torch.device("cpu"), train_source=Ramp())
    engine, timer = trainer.data_parallel, trainer.step_timer
    assert isinstance(engine, BucketedDataParallel)
    sending = engine.comm_hook
    turns = []
    for number in range(rounds + 1):
        for mode in MODES:
            engine.reducer.overlap = mode == "overlap"
            silent = mode == "nothing"
            engine.comm_hook = (lambda *_: collectives.CompletedWork()) if silent else sending
            dist.barrier()
            start = time.perf_counter()
            trainer.train_step()
            ms = 1e3 * (time.perf_counter() - start)
            if number:  # the first one warms up
                assert timer.last is not None
                turns.append(Turn(mode, ms, 1e3 * timer.last["dp"]))
    if dist.get_rank() == 0:
        sent = sum(bucket.grad.nbytes for bucket in engine.buckets)
        print(json.dumps({"megabytes": sent / 1e6, "turns": turns}))
    dist.destroy_process_group()


def measure(dp: int, given: argparse.Namespace) -> dict:
    """Runs `dp` throttled hosts; returns the output of rank 0."""
    with tempfile.TemporaryDirectory(prefix="parallel3d-") as folder:
        shell = Shell(Path(folder), Path(folder))
        limit = ("--rail-mbit", str(given.mbit))
        network = Rails.start(Path(folder) / "net", hosts=dp, gpus=1, options=limit)
        try:
            return _on(network, shell, dp, given)
        finally:
            network.stop()
            shell.end_all()


def _on(network: Rails, shell: Shell, dp: int, given: argparse.Namespace) -> dict:
    settings = (str(dp), str(given.rounds), str(given.sequences), str(given.bucket_mb))
    processes = [
        shell.start(
            *(sys.executable, str(RAILNET), "exec", "--state", str(network.state), f"h{rank + 1}"),
            *(sys.executable, "-m", "benchmarks.network.overlap", "--rank", *settings),
            RANK=str(rank),
            WORLD_SIZE=str(dp),
            MASTER_ADDR="h1",
            MASTER_PORT="29511",
            GLOO_SOCKET_IFNAME="rail0",
            OMP_NUM_THREADS="1",
            PYTHONPATH=str(Path(__file__).resolve().parents[2]),
        )
        for rank in range(dp)
    ]
    outputs = [process.communicate(timeout=given.timeout) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            sys.exit(errors)
    return json.loads(outputs[0][0].splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=int, default=800, help="bandwidth of every host's NIC")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--sequences", type=int, default=8, help="sequences of 256 tokens per rank and step"
    )
    parser.add_argument("--bucket-mb", type=float, default=2.0)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        dp, rounds, sequences, bucket = given.rank
        of_rank(int(dp), int(rounds), int(sequences), float(bucket))
        return
    if reason := why_not():
        sys.exit(reason)
    print(f"{os.cpu_count()} cores, {given.mbit} Mbit/s a host, buckets of {given.bucket_mb:g} MB")
    head = ["dp", "gradients MB", "overlap ms", "after ms", "nothing sent ms", "hidden"]
    head += ["waiting for dp, overlap ms", "after ms", "hidden by these"]
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for dp in given.dp:
        said = measure(dp, given)
        turns = [Turn(*turn) for turn in said["turns"]]
        ms = {m: [turn.ms for turn in turns if turn.mode == m] for m in MODES}
        with_overlap, after, nothing = (statistics.median(ms[m]) for m in MODES)
        waits = [statistics.median(t.dp_ms for t in turns if t.mode == m) for m in MODES[:2]]
        hidden = (after - with_overlap) / (after - nothing)
        spread = (f"{statistics.median(x):.0f} ({min(x):.0f}–{max(x):.0f})" for x in ms.values())
        print(
            f"| {dp} | {said['megabytes']:.1f} | {' | '.join(spread)} "
            f"| **{100 * hidden:.0f} %** | {waits[0]:.0f} | {waits[1]:.0f} "
            f"| **{100 * (1 - waits[0] / waits[1]):.0f} %** |",
            flush=True,
        )


if __name__ == "__main__":
    main()
