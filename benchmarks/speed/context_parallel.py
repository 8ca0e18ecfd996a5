"""Compares two context-parallel ranks with one process on the same sequence, and with a plain ring.

    python -m benchmarks.speed.context_parallel steps [--tokens 16384] [--rounds 5]
    python -m benchmarks.speed.context_parallel attention [--tokens 16384] [--rounds 5]
    python -m benchmarks.speed.context_parallel windows [--tokens 16384] [--rounds 5]

`steps`: seconds of a training step of a small Llama with one thread per rank; one process and cp=2
in every style take turns. The table has the median of each run's steps after the first three, the
median over the rounds, and how many times faster than one process it is.

`attention`: forward and backward of one layer's attention on two ranks, by
`parallel3d.context_parallel_attention`, by a ring of blocking sends and receives that is written
here, by PyTorch's own context parallelism (or the exception it raises), and on one process.

`windows`: the same for a sliding layer, whose window is a sixteenth of the sequence, next to a full
layer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
STYLES = ("gather", "heads", "ring")
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 32
RUN = (
    *("model=llama_tiny", "model.num_layers=4", "model.hidden_size=256"),
    *(f"model.num_attention_heads={HEADS}", f"model.num_query_groups={KV_HEADS}"),
    *("model.ffn_hidden_size=688", "model.vocab_multiple=8", "micro_batch_size=1"),
    *("global_batch_size=1", "optim.lr_decay_style=constant", "train.eval_every=0"),
    *("train.eval_batches=0", "train.progress=false", "checkpoint.every=0", "device=cpu"),
    "launch.peak_tflops=0.1",
)
aten = torch.ops.aten


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def trained(words: tuple[str, ...]) -> list[dict]:
    """Trains in a folder of its own; returns the rows of metrics.jsonl."""
    with tempfile.TemporaryDirectory(prefix="parallel3d-") as folder:
        given = [*RUN, *words, "run=bench", f"runs_dir={folder}"]
        command = [sys.executable, "-m", "parallel3d", "train", *given]
        subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "bench" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "step_time_s" in row]


def steps(tokens: int, rounds: int) -> None:
    ways: dict[str, tuple[str, ...]] = {"one process": ()}
    ways |= {style: ("cp=2", f"context_parallel.style={style}") for style in STYLES}
    times: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    for _ in range(rounds):
        for name, words in ways.items():
            rows = trained((*words, f"model.seq_length={tokens}", "train.steps=8"))
            times[name].append(statistics.median(row["step_time_s"] for row in rows[3:]))
            losses[name] = rows[-1]["loss"]
    one = statistics.median(times["one process"])
    print(f"{tokens:,} tokens, fp32, {rounds} rounds")
    print("| cp=2 | s a step | spread | times faster than one process | last loss |")
    print("|---|---|---|---|---|")
    for name, found in times.items():
        middle = statistics.median(found)
        spread = f"{min(found):.2f}–{max(found):.2f}"
        print(f"| {name} | {middle:.2f} | {spread} | {one / middle:.2f} | {losses[name]:.6f} |")


# Attention of one layer


def merged(out: Tensor, lse: Tensor, part: Tensor, of_part: Tensor) -> tuple[Tensor, Tensor]:
    """Adds a block of keys to the attention of others (Milakov and Gimelshein 2018)."""
    total = torch.logaddexp(lse, of_part)
    weights = ((lse - total).exp().unsqueeze(-1), (of_part - total).exp().unsqueeze(-1))
    return out * weights[0] + part * weights[1], total


class PlainRing(torch.autograd.Function):
    """The textbook ring: contiguous halves, a blocking send and receive per block."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        out: Tensor | None = None
        lse: Tensor | None = None
        keys, values = k, v
        for turn in range(size):
            source = (rank - turn) % size
            if source <= rank:
                flash = aten._scaled_dot_product_flash_attention_for_cpu
                part, of_part = flash(q, keys, values, 0.0, source == rank)
                if out is None or lse is None:
                    out, lse = part, of_part
                else:
                    out, lse = merged(out, lse, part, of_part)
            if turn + 1 < size:
                keys, values = passed_on(keys), passed_on(values)
        assert out is not None  # a rank attends at least to its own half
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, size = dist.get_rank(), dist.get_world_size()
        of_q, of_k, of_v = (torch.zeros_like(x) for x in (q, k, v))
        keys, values = k, v
        for turn in range(size):
            source = (rank - turn) % size
            if source <= rank:
                flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
                found = flash(grad, q, keys, values, out, lse, 0.0, source == rank)
                of_q += found[0]
                of_k += found[1]
                of_v += found[2]
            keys, values, of_k, of_v = map(passed_on, (keys, values, of_k, of_v))
        return of_q, of_k, of_v


def passed_on(x: Tensor) -> Tensor:
    """Sends a tensor to the next rank, and returns the tensor from the previous rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    taken = torch.empty_like(x, memory_format=torch.contiguous_format)
    sending = dist.isend(x.contiguous(), (rank + 1) % size)
    dist.recv(taken, (rank - 1) % size)
    assert sending is not None
    sending.wait()
    return taken


def seconds(call: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    call(*inputs).sum().backward()
    dist.barrier()
    return time.perf_counter() - begun


def attention_on_ranks(tokens: int, rounds: int) -> None:
    """Measures on each of two ranks, under torchrun."""
    import parallel3d as p3d

    groups = p3d.init(cp=2, dp=1, device="cpu")
    torch.manual_seed(groups.rank)

    def random(length: int, repeat: bool = False) -> list[Tensor]:
        heads = (HEADS, HEADS if repeat else KV_HEADS, HEADS if repeat else KV_HEADS)
        return [torch.randn(1, n, length, HEAD_DIM, requires_grad=True) for n in heads]

    def one_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    half, split = tokens // 2, p3d.SplitSequences([[tokens]], groups.cp)

    def ours(style: str) -> Callable[..., Tensor]:
        return partial(
            p3d.context_parallel_attention, group=groups.cp, documents=split, style=style
        )

    ways: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        style: (ours(style), random(half)) for style in STYLES
    }
    ways["plain ring"] = (PlainRing.apply, random(half, repeat=True))
    times: dict[str, list[float]] = {name: [] for name in ways}
    alone: list[float] = []
    for _ in range(rounds):
        for name, (call, inputs) in ways.items():
            times[name].append(seconds(call, inputs))
        if groups.rank == 0:  # the other core is idle at that time
            begun = time.perf_counter()
            one_process(*random(tokens, repeat=True)).sum().backward()
            alone.append(time.perf_counter() - begun)
    said = torch_context_parallel(random(tokens, repeat=True))
    if groups.rank == 0:
        one = statistics.median(alone)
        print(f"{tokens:,} tokens, {HEADS} heads of {HEAD_DIM}, fp32, forward and backward")
        print("| on two ranks | ms | times faster than one process |\n|---|---|---|")
        for name, found in {"one process": alone, **times}.items():
            middle = statistics.median(found)
            print(f"| {name} | {1000 * middle:.0f} | {one / middle:.2f} |")
        print(f"PyTorch {torch.__version__}: {said}")


def windows_on_ranks(tokens: int, rounds: int) -> None:
    """Measures full and sliding layers on each of two ranks, under torchrun."""
    import parallel3d as p3d
    from parallel3d.context_parallel.attention import ContextParallel
    from parallel3d.context_parallel.documents import whole_samples
    from parallel3d.context_parallel.split import SequenceSplit
    from parallel3d.models.attention import attend_split

    groups, window, device = p3d.init(cp=2, dp=1, device="cpu"), tokens // 16, torch.device("cpu")
    torch.manual_seed(groups.rank)
    shapes = [(1, tokens // 2, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(s).transpose(1, 2).requires_grad_() for s in shapes]
    times: dict[tuple[str, int | None], list[float]] = {}
    for _ in range(rounds):
        for style in STYLES:
            rings = style == "ring"
            split = SequenceSplit(tokens, 2, groups.rank, ring=rings, window=window)
            documents, cp = whole_samples(1, device, split), ContextParallel(groups.cp, style)
            for seen in (None, window):
                attend = partial(attend_split, documents=documents, cp=cp, window=seen)
                times.setdefault((style, seen), []).append(seconds(attend, inputs))
    if groups.rank == 0:
        print(f"{tokens:,} tokens, {HEADS} heads of {HEAD_DIM}, fp32, forward and backward")
        print(f"| on two ranks | full, ms | window of {window:,}, ms | share |\n|---|---|---|---|")
        for style in STYLES:
            full, sliding = (statistics.median(times[style, seen]) for seen in (None, window))
            print(f"| {style} | {1000 * full:.0f} | {1000 * sliding:.0f} | {sliding / full:.2f} |")


def torch_context_parallel(inputs: list[Tensor]) -> str:
    """Returns the time of PyTorch's own context parallelism, or the exception it raises."""
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor.experimental import context_parallel

        mesh = init_device_mesh("cpu", (2,))
        begun = time.perf_counter()
        whole = [x.detach() for x in inputs]  # PyTorch splits these buffers in place
        with context_parallel(
            mesh, buffers=whole, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(whole)
        ):
            q, k, v = (x.requires_grad_() for x in whole)
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        return f"{1000 * (time.perf_counter() - begun):.0f} ms"
    except Exception as error:  # any exception is a result
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("steps", "attention", "windows", "rank"))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", action="store_true", help="what a rank measures")
    given = parser.parse_args()
    if given.what == "steps":
        steps(given.tokens or 16384, given.rounds)
    elif given.what == "rank":
        (windows_on_ranks if given.windows else attention_on_ranks)(given.tokens, given.rounds)
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words = ["rank", "--tokens", str(given.tokens or 16384), "--rounds", str(given.rounds)]
        command = [
            *launcher,
            "--nproc-per-node",
            "2",
            "-m",
            "benchmarks.speed.context_parallel",
            *words,
            *(["--windows"] if given.what == "windows" else []),
        ]
        subprocess.run(command, env=environment(), check=True)


if __name__ == "__main__":
    main()
