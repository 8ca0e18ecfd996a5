"""The tasks of `benchmarks.gpu_first` that train: whole runs, one step in detail, and NCCL."""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from benchmarks.gpu.commands import (
    UNSAVED,
    command_line_missing,
    compared,
    dry_run,
    learns,
    model_words,
    new_run,
    run,
    run_words,
    speed_sentence,
    steps_of,
    trained,
)
from benchmarks.gpu.rows import model_of, trainer_of
from benchmarks.gpu.tasks import NOTED, Given, Row, judged, noted
from parallel3d.build import Trainer
from parallel3d.device import accelerator
from parallel3d.device.fused import has_kernel_compiler

# MFU, by the datasheet, that a 1B model should reach; an H100 reached 0.588 in eager mode.
EXPECTED_MFU = 0.50
BUSY = 0.90  # share of a step in which the card should run a kernel
TOP_KERNELS = 15
HOST_SYNCS = 1  # one wait per step, which gives loss and norm to the host
# torch's warning at each wait; it also warns once that the mode is a prototype.
HOST_SYNC = "called a synchronizing"


def train_words(given: Given, compiled: bool) -> list[str]:
    """Returns the keys of the run that is measured, and predicted by a dry run."""
    batch = 2 if given.is_tiny else given.micro_batch
    return [
        *model_words(given, "model=llama_1b"),
        "precision=bf16",
        *(f"micro_batch_size={batch}", f"global_batch_size={batch}"),
        *(f"train.steps={5 if given.is_tiny else 20}", *UNSAVED),
        f"compile={str(compiled).lower()}",
    ]


def train(given: Given, compiled: bool = False) -> Row:
    """Runs `parallel3d train` like a user, on one device."""
    if (missing := command_line_missing()) is not None:
        return missing
    if compiled and given.on_accelerator and not has_kernel_compiler():
        return {"skipped": "no Triton or no C compiler here"}
    run_dir = new_run(given, "train")
    figures = trained([*train_words(given, compiled), *run_words(given, run_dir)], run_dir)
    is_right = learns(figures["losses"])
    if given.is_timed:
        is_right = is_right and figures["mfu"] >= EXPECTED_MFU
    return judged(is_right, speed_sentence(figures), figures)


def dryrun(given: Given) -> Row:
    """Runs `parallel3d dryrun` for the eager run, and compares it with that run."""
    if (missing := command_line_missing()) is not None:
        return missing
    words = train_words(given, compiled=False)
    foretold = dry_run(given, *words, f"device={given.device.type}")
    found = compared(foretold, given.earlier.get("train", {}))
    # The prediction is about an accelerator's step.
    return found if given.is_timed else found | {"verdict": NOTED}


def forked_rank(given: Given) -> Row:
    """Runs a sweep of two runs, whose single rank is forked from the launcher: CUDA after a
    fork."""
    if (missing := command_line_missing()) is not None:
        return missing
    runs = new_run(given, "fork").parent
    words = [*model_words(given, "model=llama_tiny"), "precision=bf16", "train.steps=3", *UNSAVED]
    words += ["micro_batch_size=2", "global_batch_size=2", f"device={given.device.type}"]
    run("train", "-m", "seed=1,2", *words, f"runs_dir={runs}")
    losses = [[step["loss"] for step in steps_of(path.parent)]
              for path in sorted(runs.glob("*/metrics.jsonl"))]  # fmt: skip
    found = f"{len(losses)} runs, {', '.join(f'{one[-1]:.3f}' for one in losses)} after 3 steps"
    is_right = len(losses) == 2 and all(len(one) == 3 for one in losses) and losses[0] != losses[1]
    return judged(is_right, found, {"losses": losses})


def save_and_resume(given: Given) -> Row:
    """Compares a run that was saved, ended and resumed with one that was not; generates text from
    it.

    With `deterministic=true`, every loss and norm must have the bits of the other run.
    """
    if (missing := command_line_missing()) is not None:
        return missing
    first, last = (2, 4) if given.is_tiny else (20, 30)
    # A few layers of the 1B: large enough for its kernels, with files that are written in seconds.
    few = ("model=llama_1b", "model.num_layers=2", "model.vocab_size=32768")
    words = [*model_words(given, *few), "precision=bf16", "deterministic=true"]
    words += ["micro_batch_size=2", "global_batch_size=4", "train.eval_batches=0"]
    words += [f"optim.lr_decay_steps={last}"]
    whole, parted = new_run(given, "whole"), new_run(given, "parted")
    for run_dir, steps, every in (
        (whole, last, 0),
        (parted, first, first // 2),
        (parted, last, first // 2),
    ):
        run("train", *words, *run_words(given, run_dir), f"train.steps={steps}",
            f"checkpoint.every={every}")  # fmt: skip
    both = [[(s["loss"], s["grad_norm"]) for s in steps_of(path)] for path in (whole, parted)]
    text = run("generate", *run_words(given, parted), "prompt=the", "generate.max_tokens=16")
    # Limit of the gigabytes in use that are copied.
    shutil.rmtree(parted / "checkpoints", ignore_errors=True)
    went_on = len(both[0]) == len(both[1]) == last
    equal = went_on and both[0] == both[1]
    off = max((abs(a[0] - b[0]) / a[0] for a, b in zip(*both, strict=False)), default=0.0)
    found = f"{len(both[1])} steps in two runs, {len(both[0])} in one: "
    found += "all losses and norms equal" if equal else f"losses differ by {off:.1e}"
    found += f"; generated {len(text)} characters"
    figures = {"whole": both[0], "parted": both[1], "text": text}
    return judged(equal and text.startswith("the"), found, figures)


def host_syncs(given: Given) -> Row:
    """Returns how often the host waits for the card in one step, and where."""
    size = given.steps()  # two micro-batches per step, so that a wait in each would show
    model = model_of("llama_tiny", size)
    return syncs_of(given, lambda: trainer_of(model, given.device, 1, 2, size.precision))


def syncs_of(given: Given, make: Callable[[], Trainer]) -> Row:
    """Does so for the trainer that `make` returns."""
    if not hasattr(accelerator.module(given.device), "set_sync_debug_mode"):
        return {"skipped": f"{given.device.type} cannot count them"}
    trainer = make()
    for _ in range(2):
        trainer.train_step()
    accelerator.synchronize(given.device)
    module = accelerator.module(given.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.set_sync_debug_mode("warn")
        try:
            trainer.train_step()
        finally:
            module.set_sync_debug_mode("default")
    syncs = [w for w in caught if HOST_SYNC in str(w.message)]
    where = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in syncs)
    named = ", ".join(f"{place} × {count}" for place, count in where.most_common())
    return judged(
        len(syncs) <= HOST_SYNCS,
        f"{len(syncs)} in a step{f': {named}' if named else ''}",
        {"syncs": len(syncs), "where": dict(where)},
    )


def trace(given: Given) -> Row:
    """Profiles one step: the kernels that take the most time, and how busy the card is."""
    batch = 2 if given.is_tiny else given.micro_batch
    trainer = trainer_of(
        model_of("1b", given.steps()), given.device, batch, batch, given.steps().precision
    )
    for _ in range(3):
        trainer.train_step()
    accelerator.synchronize(given.device)
    with profile(activities=list(supported_activities())) as seen:
        trainer.train_step()
        accelerator.synchronize(given.device)
    path = given.folder / "step.json.gz"
    seen.export_chrome_trace(str(path))
    events = [e for e in seen.events() if e.device_type != DeviceType.CPU]
    host = not events
    spent: Counter[str] = Counter()
    for event in events or seen.events():
        us = event.self_cpu_time_total if host else event.time_range.elapsed_us()
        spent[event.name] += us
    total = sum(spent.values())
    most = spent.most_common(TOP_KERNELS)
    top: list[Row] = [{"name": name, "ms": 1e-3 * us, "share": us / total} for name, us in most]
    for row in top:
        print(f"{row['ms']:9.2f} ms {100 * row['share']:5.1f} %  {row['name'][:100]}")
    kind = "operation (host)" if host else "kernel"
    found = f"top {kind} {top[0]['name'][:60]} {100 * top[0]['share']:.0f} %; trace: {path}"
    figures: Row = {"top": top, "trace": str(path)}
    if host:
        return noted(found, figures)
    figures["busy"] = _busy_share([(e.time_range.start, e.time_range.end) for e in events])
    found = f"the card is busy {100 * figures['busy']:.0f} % of the step; {found}"
    return judged(not given.is_timed or figures["busy"] >= BUSY, found, figures)


def _busy_share(spans: list[tuple[float, float]]) -> float:
    """Returns the share of the time from the first start to the last end that some span covers."""
    spans = sorted(spans)
    covered, reached = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / (reached - spans[0][0]) if reached > spans[0][0] else 1.0


def communicators(given: Given) -> Row:
    """Tests a process group of one: made, split, used, and destroyed in the order of creation."""
    device, backend = given.device, accelerator.backend_of(given.device)
    bound = device if given.on_accelerator else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=bound)
    try:
        value = torch.ones(4, device=device)
        groups = [dist.group.WORLD]
        for _ in range(2):  # groups on a CPU cannot be split: there they are made one by one
            split = dist.split_group(split_ranks=[[0]]) if bound else dist.new_group([0])
            groups.append(split)
        for group in groups:
            dist.all_reduce(value, group=group)
        accelerator.synchronize(device)
        for group in groups[1:]:
            dist.destroy_process_group(group)
    finally:
        dist.destroy_process_group()
    is_right = bool((value == 1.0).all()) and not dist.is_initialized()
    return judged(
        is_right, f"{backend}: made, split twice, summed, destroyed", {"backend": backend}
    )
