"""Compares saves and loads with torch.save and torch.load of the same bytes, by number of ranks.

    python -m benchmarks.speed.checkpoint --ranks 1 2 4 8

There is a row per number of ranks: a Llama of `--hidden` and `--layers` over dp with zero=1, so
that the whole stays the same and each rank's part shrinks. Every figure is the median of
`--repeats`, of the slowest rank, in milliseconds. torch.save and torch.load have each rank's part
in a file of its own (flushed to the disk, as ours), with weights_only; they neither verify nor
agree on anything. "stall" is the time for which an asynchronous save stops the loop (its start, and
the update's wait for the copy). "slower" is the additional time of all steps until the checkpoint
is "written", copy included: on a CPU the writer and the training share the cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.checkpoint.keys import CheckpointConfig
from parallel3d.checkpoint.storage import chunks_by_name
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from parallel3d.trainer import Trainer

COLUMNS = ("torch.save", "save", "stall", "written", "slower", "torch.load", "load")


class Noise:
    """A source of random tokens."""

    masks = False

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length

    def sample(self, i: int) -> Sample:
        tokens = np.random.default_rng(i).integers(0, 257, self.seq_length + 1)
        return Sample(tokens, np.ones(self.seq_length, dtype=bool))


def build(args: argparse.Namespace, ranks: int, run_dir: Path) -> tuple[Trainer, Checkpoints]:
    """Returns a trainer that has taken a step, so that all its state exists."""
    model = ModelConfig(
        num_layers=args.layers, hidden_size=args.hidden, seq_length=64, norm="rmsnorm"
    )
    config = Config(
        dp=ranks,
        zero=int(ranks > 1),
        micro_batch_size=1,
        global_batch_size=ranks,
        run=run_dir.name,
        device="cpu",
        model=model,
        checkpoint=CheckpointConfig(every=10**6, keep=1),
    )
    groups = ProcessGroups.create(Layout(dp=ranks), "cpu")
    source = Noise(model.seq_length)
    trainer = Trainer(config, groups, torch.device("cpu"), train_source=source)
    checkpoints = Checkpoints(config, run_dir, groups, print)
    checkpoints.restore(trainer)
    trainer.train_step()
    return trainer, checkpoints


def slowest(work: Callable[[], object]) -> float:
    """Returns the milliseconds that `work` takes on the slowest rank; all ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    work()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item() * 1000


def plain_save(path: Path, tensors: dict[str, list[Tensor]]) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def plain_load(path: Path, tensors: dict[str, list[Tensor]]) -> None:
    for name, loaded in torch.load(path, weights_only=True).items():
        for target, values in zip(tensors[name], loaded, strict=True):
            target.copy_(values)


def steps_during(trainer: Trainer, checkpoints: Checkpoints) -> tuple[float, float, float]:
    """Measures (stall, milliseconds until it is written, milliseconds that the steps meanwhile
    lost)."""
    usual = statistics.median(slowest(trainer.train_step) for _ in range(3))
    begun = time.perf_counter()
    stall = slowest(lambda: checkpoints.save(trainer, wait=False))
    wait_for_copy, waited = trainer.before_update, []

    def timed_wait() -> None:
        start = time.perf_counter()
        wait_for_copy()
        waited.append((time.perf_counter() - start) * 1000)

    trainer.before_update = timed_wait
    lost, written = 0.0, 0.0
    while checkpoints.step_in_flight is not None:
        lost += slowest(trainer.train_step) - usual
        checkpoints.after_step(trainer)
        written = (time.perf_counter() - begun) * 1000
    wait = torch.tensor(sum(waited))
    dist.all_reduce(wait, op=dist.ReduceOp.MAX)
    return stall + wait.item(), written, max(0.0, lost)


def worker(args: argparse.Namespace) -> None:
    """Runs one rank of one row; rank 0 prints the row."""
    torch.set_num_threads(1)
    rank, ranks = args.rank, args.ranks[0]
    store = dist.FileStore(str(args.folder / f"store-{ranks}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    run_dir = args.folder / f"run-{ranks}"
    run_dir.mkdir(exist_ok=True)
    trainer, checkpoints = build(args, ranks, run_dir)
    state = chunks_by_name(trainer.parameter_slices(), shared=True)
    tensors = {name: [v.clone() for _, v in t.chunks] for name, t in state.items()}
    path = args.folder / f"plain-{ranks}-{rank}.pt"
    found: dict[str, list[float]] = {name: [] for name in COLUMNS}
    checkpoints.save(trainer)  # imports the modules that a save needs, half a second
    checkpoints.say = lambda _: None
    for _ in range(args.repeats):
        path.unlink(missing_ok=True)
        found["torch.save"].append(slowest(lambda: plain_save(path, tensors)))
        found["torch.load"].append(slowest(lambda: plain_load(path, tensors)))
        trainer.train_step()
        found["save"].append(slowest(lambda: checkpoints.save(trainer)))
        found["load"].append(slowest(lambda: checkpoints.restore(trainer)))
        trainer.train_step()
        for name, value in zip(
            ("stall", "written", "slower"), steps_during(trainer, checkpoints), strict=True
        ):
            found[name].append(value)
    path.unlink()
    mine = sum(v.nbytes for values in tensors.values() for v in values)
    sizes = torch.tensor([float(mine)])
    dist.all_reduce(sizes)
    if rank == 0:
        (newest,) = (run_dir / "checkpoints").glob("step-*")
        written = sum(file.stat().st_size for file in newest.iterdir())
        medians = [statistics.median(found[name]) for name in COLUMNS]
        share = medians[2] / medians[1]
        print(
            f"| {ranks} | {sizes.item() / ranks / 1e6:.1f} | {written / 1e6:.1f} "
            f"(+{written / sizes.item() - 1:.2%}) | "
            + " | ".join(f"{m:.0f}" if m >= 10 else f"{m:.1f}" for m in medians)
            + f" | {share:.1%} |",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder to write to (default: a temporary one)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        worker(args)
        return
    print(f"| ranks | MB a rank | MB on the disk | {' | '.join(COLUMNS)} | stall / save |")
    print("|---" * (len(COLUMNS) + 4) + "|")
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.folder) as folder:
            words = [
                *(sys.executable, __file__, "--folder", folder, "--ranks", str(ranks)),
                *("--hidden", str(args.hidden), "--layers", str(args.layers)),
                *("--repeats", str(args.repeats)),
            ]
            started = [subprocess.Popen([*words, "--rank", str(r)]) for r in range(ranks)]
            if any([process.wait() for process in started]):
                sys.exit("a rank failed")


if __name__ == "__main__":
    main()
