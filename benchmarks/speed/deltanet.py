"""Times gated DeltaNet beside full attention, and at cp=2 beside one rank, on two CPU ranks.

    python -m benchmarks.speed.deltanet [--tokens 4096 8192] [--cp-tokens 4096] [--rounds 5]

A time is that of a forward and a backward, on the slower rank, with one thread a rank. All ways
take turns, the first turn does not count, and a ratio is one of medians over the turns: of seconds
of the clock, and of CPU seconds, which other processes disturb less. `one rank` computes whole
sequences while the other rank waits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.blueprint.layout import Layout
from parallel3d.comm.group import SINGLE, Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.context_parallel.documents import whole_samples
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext
from parallel3d.models.transformer import Stage
from parallel3d.parameters.initializer import Initializer

RANKS = 2
CPU = torch.device("cpu")
DELTA, FULL = "gated_deltanet", "full"
OF_TP = {"hidden_size": 512, "num_attention_heads": 8}
OF_CP = {"hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 64}


class Times(NamedTuple):
    """Seconds of a forward and a backward on the slower rank, of the clock and of a core."""

    clock: float
    cpu: float


Pass: TypeAlias = Callable[[], Tensor]  # a forward, whose result is a scalar


def stage_of(
    kind: str, count: int, tokens: int, sizes: Mapping[str, Any], ctx: BuildContext
) -> Stage:
    """Returns layers of a kind, without embedding and head."""
    model = ModelConfig(
        num_layers=count,
        head_dim=64,
        seq_length=tokens,
        norm="rmsnorm",
        position_embedding="none",
        bias=False,
        activation="swiglu",
        layer_types=[kind],
        vocab_size=512,
        **sizes,
    )
    return Stage(model, StageBlueprint.plain(range(count), first=False, last=False), ctx)


def context(tp: Group = SINGLE, cp: Group = SINGLE, states: str = "auto") -> BuildContext:
    initializer = Initializer(1, torch.float32, CPU)
    return BuildContext(initializer, tp, sp=False, cp=cp, cp_states=states)


def mixer(kind: str, tokens: int, tp: Group) -> Pass:
    """Returns a forward of the mixer of a layer at tp=2."""
    stage = stage_of(kind, 1, tokens, OF_TP, context(tp))
    x = torch.randn(1, tokens, OF_TP["hidden_size"], requires_grad=True)
    inputs = stage.with_positions(LayerInputs(), 1, tokens)
    attention: Any = next(iter(stage.blocks.values())).attention
    return lambda: attention(x, lambda x: x, inputs).sum()


def layers(kind: str, tokens: int, cp: Group, states: str = "auto") -> Pass:
    """Returns a forward of two whole layers on this rank's part of a sequence."""
    stage = stage_of(kind, 2, tokens, OF_CP, context(cp=cp, states=states))
    mine = tokens // cp.size
    x = torch.randn(1, mine, OF_CP["hidden_size"], requires_grad=True)
    inputs = LayerInputs()
    if cp.size > 1:
        split = SequenceSplit(tokens, cp.size, cp.index, hands_states=stage.hands_states)
        inputs = LayerInputs(documents=whole_samples(1, CPU, split))
    inputs = stage.with_positions(inputs, 1, mine)

    def run() -> Tensor:
        y = x
        for block in stage.blocks.values():
            y = block(y, inputs)
        return y.sum()

    return run


def timed(run: Pass | None) -> Times:
    """Runs a forward and a backward on all ranks, or with None on the other rank alone."""
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    if run is not None:
        run().backward()
    spent = [time.perf_counter() - began, time.process_time() - cpu]
    found = torch.tensor(spent if run is not None else [0.0, 0.0], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return Times(*found.tolist())


def in_turns(ways: Mapping[str, Pass | None], rounds: int) -> dict[str, Times]:
    """Returns the medians over the turns but the first."""
    turns = [{name: timed(run) for name, run in ways.items()} for _ in range(rounds + 1)][1:]
    return {
        name: Times(*(statistics.median(of) for of in zip(*(t[name] for t in turns), strict=True)))
        for name in ways
    }


def row(tokens: int, what: str, one: Times, other: Times) -> str:
    """Returns a row of the table: the ratio of the first to the other."""
    ratios = f"{one.clock / other.clock:.2f} | {one.cpu / other.cpu:.2f}"
    return f"| {tokens:,} | {what} | {ratios} | {other.clock:.2f} | {other.cpu:.2f} |"


def on_rank(rank: int, folder: str, lengths: Sequence[int], cp_tokens: int, rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)

    def show(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    show("| tokens | forward and backward | ratio of clock | of CPU | s beside which | CPU s |")
    show("|---|---|---|---|---|---|")
    groups = ProcessGroups.create(Layout(tp=RANKS), CPU.type, 600.0)
    for tokens in lengths:
        found = in_turns({kind: mixer(kind, tokens, groups.tp) for kind in (DELTA, FULL)}, rounds)
        show(row(tokens, "mixer, tp=2: gated_deltanet beside full", found[DELTA], found[FULL]))
    groups.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"{store}2", rank=rank, world_size=RANKS)
    groups = ProcessGroups.create(Layout(cp=RANKS), CPU.type, 600.0)
    ways: dict[str, Pass | None] = {}
    for kind in (DELTA, FULL):
        alone = layers(kind, cp_tokens, SINGLE)
        ways[f"{kind} one rank"] = alone if rank == 0 else None
    for states in ("chain", "heads"):
        ways[f"{DELTA} {states}"] = layers(DELTA, cp_tokens, groups.cp, states)
    ways[f"{FULL} gather"] = layers(FULL, cp_tokens, groups.cp)
    found = in_turns(ways, rounds)
    for name, times in found.items():
        kind, _, how = name.partition(" ")
        if how != "one rank":
            what = f"two layers, cp=2 beside one rank: {kind}, {how}"
            show(row(cp_tokens, what, times, found[f"{kind} one rank"]))
    groups.close()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--cp-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(words)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="parallel3d-") as folder:
        arguments = folder, given.tokens, given.cp_tokens, given.rounds
        mp.spawn(on_rank, args=arguments, nprocs=RANKS)
    print(f"load of the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
