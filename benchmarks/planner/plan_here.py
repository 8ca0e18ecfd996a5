r"""Compares the plan of this machine with measured steps, and rates the choices of layout=auto.

    parallel3d calibrate calibrate.file=here.yaml model=llama_tiny model.num_query_groups=8 \
        model.seq_length=128 global_batch_size=16
    python -m benchmarks.plan_here here.yaml [--rounds 3] [--steps 5] \
        [--only one|steps|auto|experts|windows]

`one`: models of several shapes on one rank. The measured step uses one thread and the plan's uses
all, so compare their work. `steps`: twelve layouts of 2, 4 and 8 ranks, those with a pipeline under
five schedules. `auto`: on 2, 4 and 8 ranks the best of every (tp, pp) by the plan, and the loss of
the plan's first choice against the fastest of them. Each round runs every contender once, so that a
disturbance of the machine affects all of them; the best step of each counts. There are two figures:
the wall time of a step, which needs a quiet machine, and the CPU seconds of all ranks' processes,
which other work on the machine hardly changes.

`experts`: moe_tiny with ep=1 and more on 2 and 4 ranks, with the experts evenly chosen, from a file
of `model=moe_tiny global_batch_size=16`. `windows`: llama_tiny, of whose layers two of three see 32
keys, on 1 to 4 ranks, from a file of `model=llama_tiny model.num_query_groups=8 model.num_layers=6
model.seq_length=512 model.layer_types=[sliding,sliding,full] model.sliding_window=32
global_batch_size=16`. If the file is older than a few minutes, or the machine is busy, compare the
ratios of layouts: the last lines have the errors of each layout's ratio to the first one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from parallel3d.build import Trainer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.plan import searched
from parallel3d.data.sampler import Sample
from parallel3d.estimate.profiled_cost import MeasuredMachine, read, step_time
from parallel3d.estimate.search import configure
from parallel3d.host.memory import keep_freed_memory
from parallel3d.models.keys import ModelConfig
from parallel3d.resolve import layout_of
from parallel3d.run_config import Config, check_config
from tests.distributed.pool import Pool

MODEL: dict[str, Any] = {
    "name": "tiny_llama", "num_layers": 8, "hidden_size": 128, "num_attention_heads": 8,
    "ffn_hidden_size": 344, "seq_length": 128, "norm": "rmsnorm", "position_embedding": "rope",
    "activation": "swiglu", "bias": False, "tie_embeddings": False,
}  # fmt: skip
BATCH = 16
# tp, pp, dp
LAYOUTS = (
    *((2, 1, 1), (1, 2, 1), (1, 1, 2)),
    *((4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)),
    *((2, 2, 2), (1, 4, 2), (1, 2, 4)),
)
# The sizes of conf/model/moe_tiny.yaml.
EXPERTS: dict[str, Any] = {
    "name": "moe_tiny", "num_layers": 4, "hidden_size": 128, "num_attention_heads": 8,
    "num_query_groups": 4, "seq_length": 256, "norm": "rmsnorm", "position_embedding": "rope",
    "qk_norm": True, "activation": "swiglu", "bias": False, "tie_embeddings": False,
    "num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 128,
}  # fmt: skip
WINDOWS = MODEL | {
    "name": "windows", "num_layers": 6, "seq_length": 512, "sliding_window": 32,
    "layer_types": ["sliding", "sliding", "full"],
}  # fmt: skip
# tp, pp, dp, ep
OF_EXPERTS = (
    *((1, 1, 2, 1), (1, 1, 2, 2), (2, 1, 1, 1), (2, 1, 1, 2), (1, 2, 1, 1)),
    *((1, 1, 4, 1), (1, 1, 4, 2), (1, 1, 4, 4), (1, 2, 2, 1), (1, 2, 2, 2), (2, 1, 2, 2)),
)
OF_WINDOWS = ((1, 1, 1, 1), (1, 1, 2, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 4, 1), (1, 2, 2, 1))
MODELS = {"experts": (EXPERTS, OF_EXPERTS), "windows": (WINDOWS, OF_WINDOWS)}
SCHEDULES = {"1f1b": 1, "gpipe": 1, "zb_h1": 1, "interleaved": 2, "zbv": 2}
WORLDS = (2, 4, 8)


@dataclass
class Same:
    """A source of samples that take no time to make."""

    seq_length: int

    def sample(self, i: int) -> Sample:
        tokens = (np.arange(self.seq_length + 1) + i) % 256
        return Sample(tokens, np.ones(self.seq_length, dtype=bool))


class Ran(NamedTuple):
    """Measures steps of one rank: seconds of wall time, and CPU seconds of its process."""

    wall: list[float]
    work: list[float]


class Row(NamedTuple):
    """One contender: planned and measured seconds of a step, as wall time and as CPU time of all
    processes."""

    name: str
    ranks: int
    planned: float
    measured: float
    planned_work: float
    measured_work: float


def run_steps(config: Config, steps: int) -> Ran:
    """Runs the contender on every rank of a pool."""
    torch.set_num_threads(1)
    keep_freed_memory()
    groups = ProcessGroups.create(layout_of(config), "cpu", 120, config.launch)
    trainer = Trainer(
        config, groups, torch.device("cpu"), train_source=Same(config.model.seq_length)
    )
    wall, work = [], []
    for step in range(steps + 2):
        dist.barrier()
        begun, worked = time.perf_counter(), time.process_time()
        trainer.train_step()
        if step >= 2:
            wall.append(time.perf_counter() - begun)
            work.append(time.process_time() - worked)
    groups.close()
    return Ran(wall, work)


def base(file: str) -> Config:
    config = Config(global_batch_size=BATCH, micro_batch_size=1, device="cpu")
    config.model = ModelConfig(**MODEL)
    config.cluster.file = file
    return config


def contenders(file: str) -> list[Config]:
    """Returns twelve layouts, those with stages under five schedules."""
    found = []
    for tp, pp, dp in LAYOUTS:
        for name, vpp in SCHEDULES.items() if pp > 1 else (("1f1b", 1),):
            micro = 2 if dp < 4 else 1
            config = replace(base(file), tp=tp, pp=pp, dp=dp, vpp=vpp, micro_batch_size=micro)
            config.schedule.name = name
            found.append(check_config(config, tp * pp * dp, own_samples=True))
    return found


def kinds_of_layers(file: str, model: dict[str, Any], layouts: Sequence[Any]) -> list[Config]:
    """Returns (tp, pp, dp, ep) layouts of a model with experts or windows."""
    found = []
    for tp, pp, dp, ep in layouts:
        config = replace(base(file), tp=tp, pp=pp, dp=dp, ep=ep, sp=tp > 1, micro_batch_size=2)
        config.model = ModelConfig(**model)
        config.moe.routing = "balanced"
        found.append(check_config(config, tp * pp * dp, own_samples=True))
    return found


def alone(file: str) -> list[Config]:
    """Returns models for one rank, with their micro-batch, global batch and changed model keys."""
    gpt = {"activation": "gelu", "norm": "layernorm", "position_embedding": "learned"}
    shapes: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (1, 4, {}),
        (4, 16, {}),
        (2, 4, {"hidden_size": 256, "ffn_hidden_size": 688}),
        (2, 4, gpt | {"bias": True, "ffn_hidden_size": 512}),
        (2, 4, {"num_layers": 2, "seq_length": 512}),
        (1, 8, {"hidden_size": 64, "ffn_hidden_size": 176}),
        (4, 4, {"vocab_size": 4000}),
    )
    found = []
    for micro, batch, changes in shapes:
        config = replace(base(file), micro_batch_size=micro, global_batch_size=batch, dp=1)
        config.model = replace(config.model, **changes)
        found.append(check_config(config, 1, own_samples=True))
    return found


def chosen(file: str, ranks: int) -> list[Config]:
    """Returns the best layout of every (tp, pp) by the plan, the plan's choice first."""
    config = base(file)
    plan = searched(config, {}, ranks)
    return [
        check_config(configure(config, plan.priced.choices[i]), ranks, own_samples=True)
        for i in plan.rows
    ]


def measure(
    configs: Sequence[Config], machine: MeasuredMachine, pool: Pool, rounds: int, steps: int
) -> list[Row]:
    """Runs every contender once per round."""
    wall: list[list[float]] = [[] for _ in configs]
    work: list[list[float]] = [[] for _ in configs]
    for _ in range(rounds):
        for i, config in enumerate(configs):
            world = config.world_size
            ran = pool.run(world, run_steps, config, steps, timeout_s=300)
            wall[i] += [max(each) for each in zip(*(r.wall for r in ran), strict=True)]
            work[i] += [sum(each) for each in zip(*(r.work for r in ran), strict=True)]
    rows = []
    for config, seconds, cores in zip(configs, wall, work, strict=True):
        parts = step_time(config, machine)
        world = config.world_size
        figures = (parts.total, min(seconds), parts.core, min(cores))
        rows.append(Row(named(config), world, *figures))
    return rows


def named(config: Config) -> str:
    words = f"tp={config.tp} pp={config.pp} dp={config.dp} mb={config.micro_batch_size}"
    words += f" ep={config.ep}" * (config.model.num_experts > 0)
    if config.pp > 1:
        words += f" {config.schedule.name}" + f" vpp={config.vpp}" * (config.vpp > 1)
    return words + f" zero={config.zero}" * (config.zero > 0)


def ranks_of(values: Sequence[float]) -> np.ndarray:
    return np.argsort(np.argsort(values))


def rho(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns Spearman's rank correlation."""
    return float(np.corrcoef(ranks_of(a), ranks_of(b))[0, 1])


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """Prints the table, and returns its figures."""
    print("| layout | step, plan | measured | | work, plan | measured | |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        step = f"{1e3 * row.planned:.0f} | {1e3 * row.measured:.0f} ms | "
        step += f"{100 * (row.planned / row.measured - 1):+.0f} %"
        work = f"{1e3 * row.planned_work:.0f} | {1e3 * row.measured_work:.0f} ms | "
        work += f"{100 * (row.planned_work / row.measured_work - 1):+.0f} %"
        print(f"| {row.name} | {step} | {work} |")
    pairs = {
        "step": ([r.planned for r in rows], [r.measured for r in rows]),
        "work": ([r.planned_work for r in rows], [r.measured_work for r in rows]),
    }
    found: dict[str, Any] = {}
    for name, (plan, seen) in pairs.items():
        errors = [abs(p / s - 1) for p, s in zip(plan, seen, strict=True)]
        ratios = [p / s / (plan[0] / seen[0]) - 1 for p, s in zip(plan, seen, strict=True)][1:]
        found[name] = {"median_error": statistics.median(errors), "rho": rho(plan, seen)}
        print(f"{name}: median error {100 * found[name]['median_error']:.1f} %, ", end="")
        print(
            f"worst {100 * max(errors):.0f} %, rho {found[name]['rho']:.2f}; against the first ",
            end="",
        )
        print(f"row: {', '.join(f'{100 * ratio:+.0f}' for ratio in ratios)} %")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="file written by parallel3d calibrate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", choices=("one", "steps", "auto", *MODELS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    machine, found = read(args.file), {}
    print(f"load at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with Pool() as pool:
        if args.only == "one":
            report(measure(alone(args.file), machine, pool, args.rounds, args.steps))
        if args.only in MODELS:
            rows = measure(
                kinds_of_layers(args.file, *MODELS[args.only]),
                machine,
                pool,
                args.rounds,
                args.steps,
            )
            found[args.only] = report(rows)
        if args.only in (None, "steps"):
            rows = measure(contenders(args.file), machine, pool, args.rounds, args.steps)
            found["steps"] = report(rows)
        for world in WORLDS if args.only in (None, "auto") else ():
            rows = measure(chosen(args.file, world), machine, pool, args.rounds, args.steps)
            print(f"\n{world} ranks, the plan's choice first")
            report(rows)
            for name, of in (("step", 3), ("work", 5)):
                loss = float(rows[0][of]) / min(float(row[of]) for row in rows) - 1
                found.setdefault(f"auto_{world}", {})[name] = loss
                print(f"layout=auto loses {100 * loss:.1f} % of the best measured ({name})")
    print(f"load at the end: {os.getloadavg()[0]:.1f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
