"""The lines of `benchmarks.gpu_first` that train: whole runs, one step looked at, and NCCL."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from benchmarks.gpu_first_kernels import NOTED, PASS, SKIPPED, Answer, Given, judged
from benchmarks.gpu_process import ROOT, Ended, reason
from benchmarks.gpu_rows import model_of, trainer_of
from parallel3d.device import accelerator

# MFU of the datasheet that a 1B model should reach: the lower ends of estimates from bytes and
# FLOPs for one H200, not measured.
EXPECTED_MFU = {False: 0.30, True: 0.40}
LOSS_OFF, NORM_OFF = 1e-4, 1e-3  # relative: fp32 sums in another order, five steps of AdamW
PEAK_OFF, SECONDS_OFF = 0.05, 0.20  # of a dryrun, relative to the run
BUSY = 0.90  # share of a step in which the card should have a kernel
TOP_KERNELS = 15
HOST_SYNCS = 1  # a step: the one that hands loss and norm to the host
# Other words than `parallel3d train` alone would need: the same run, for a CPU and seconds.
TINY = (
    *("model=llama_tiny", "model.num_layers=2", "model.hidden_size=64", "model.seq_length=64"),
    *("model.ffn_hidden_size=96", "launch.peak_tflops=0.1", "data=text"),
)


class RunFailed(RuntimeError):
    """A command of parallel3d ended with another code than 0; its own sentence."""


def run_words(given: Given, compiled: bool) -> list[str]:
    """The keys of the run that is measured, and that a dryrun foretells."""
    model = [f"data.path={ROOT / 'README.md'}", *TINY] if given.is_tiny else ["model=llama_1b"]
    batch = 2 if given.is_tiny else given.micro_batch
    return [
        *model,
        "precision=bf16",
        *(f"micro_batch_size={batch}", f"global_batch_size={batch}"),
        *(f"train.steps={5 if given.is_tiny else 20}", "train.eval_batches=0"),
        *("checkpoint.every=0", f"compile={str(compiled).lower()}", f"device={given.device.type}"),
        *([f"data.cache_dir={given.folder / 'cache'}"] if given.is_tiny else []),
    ]


def train(given: Given, compiled: bool = False) -> Answer:
    """`parallel3d train` as a user starts it, on one device."""
    if (missing := _command_line_missing()) is not None:
        return missing
    words, run_dir = run_words(given, compiled), _new_run(given, "train")
    _succeeded(_parallel3d("train", *words, f"runs_dir={run_dir.parent}", f"run={run_dir.name}"))
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    losses = [step["loss"] for step in steps if step.get("loss") is not None]
    peak = max((step["memory"]["allocated"] for step in steps if "memory" in step), default=None)
    figures = {
        "tokens_per_s": summary["tokens_per_s"]["median"],
        "mfu": summary["mfu"]["value"],
        "peak_source": summary["mfu"]["peak_source"],
        "seconds": statistics.median(step["step_time_s"] for step in steps),
        "peak_bytes": peak,
        "losses": [losses[0], losses[-1]],
    }
    found = f"{figures['tokens_per_s']:,.0f} tokens/s, MFU {100 * figures['mfu']:.1f} % of "
    found += f"{figures['peak_source']}, {1e3 * figures['seconds']:.0f} ms a step, "
    found += f"peak {'–' if peak is None else f'{peak / 1e9:.1f}'} GB, "
    found += f"loss {losses[0]:.3f} → {losses[-1]:.3f}"
    is_right = len(losses) == len(steps) and losses[-1] < losses[0]
    if given.is_timed:
        is_right = is_right and figures["mfu"] >= EXPECTED_MFU[compiled]
    return judged(is_right, found, figures)


def cluster_of(name: str) -> list[str]:
    """The preset with this card's memory and speed; none: the dry run's own, an H100."""
    known = {"H200": "dgx_h200", "H100": "dgx_h100", "B200": "dgx_b200", "A100": "dgx_a100"}
    return [f"cluster={preset}" for word, preset in known.items() if word in name][:1]


def dryrun(given: Given) -> Answer:
    """`parallel3d dryrun` of the eager run, beside what that run took."""
    if (missing := _command_line_missing()) is not None:
        return missing
    if "parallel3d dryrun" not in _parallel3d("help").stdout:
        return Answer(SKIPPED, "this parallel3d has no dryrun", {})
    path = _new_run(given, "dryrun").with_suffix(".json")
    words = run_words(given, compiled=False)
    words = [*words, *cluster_of(accelerator.name(given.device)), f"dryrun.json={path}"]
    _succeeded(_parallel3d("dryrun", *words))
    foretold = json.loads(path.read_text(encoding="utf-8"))
    found = compared(foretold, given.earlier.get("train", {}).get("figures") or {})
    # What is foretold is an accelerator's step.
    return found if given.is_timed else found._replace(verdict=NOTED)


def compared(foretold: dict[str, Any], measured: dict[str, Any]) -> Answer:
    """Peak memory and seconds of a dryrun beside a run's, relative to the run's."""
    figures: dict[str, Any] = {"dryrun": foretold}
    said, is_near = [], True
    for key, limit in (("peak_bytes", PEAK_OFF), ("seconds", SECONDS_OFF)):
        if not measured.get(key) or foretold.get(key) is None:
            continue
        off = foretold[key] / measured[key] - 1.0
        figures[f"{key}_off"] = off
        is_near = is_near and abs(off) <= limit
        said.append(f"{key} {foretold[key]:.4g}, measured {measured[key]:.4g} ({100 * off:+.1f} %)")
    if not said:
        return Answer(NOTED, "nothing measured to compare with: the line `train` first", figures)
    return judged(is_near, "; ".join(said), figures)


def host_syncs(given: Given) -> Answer:
    """How often the host waits for the card in one step, and where."""
    if not hasattr(accelerator.module(given.device), "set_sync_debug_mode"):
        return Answer(SKIPPED, f"{given.device.type} cannot count them", {})
    size = given.steps()  # two micro-batches a step: a sync in each would show
    trainer = trainer_of(model_of("llama_tiny", size), given.device, 1, 2, size.precision)
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
    syncs = [w for w in caught if "synchronizing" in str(w.message)]
    where = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in syncs)
    named = ", ".join(f"{place} × {count}" for place, count in where.most_common())
    return judged(
        len(syncs) <= HOST_SYNCS,
        f"{len(syncs)} in a step of two micro-batches{f': {named}' if named else ''}",
        {"syncs": len(syncs), "where": dict(where)},
    )


def trace(given: Given) -> Answer:
    """One step under the profiler: the kernels that take most, and how busy the card is."""
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
    path = given.folder / "step.json"
    seen.export_chrome_trace(str(path))
    events = [e for e in seen.events() if e.device_type != DeviceType.CPU]
    host = not events
    spent: Counter[str] = Counter()
    for event in events or seen.events():
        us = event.self_cpu_time_total if host else event.time_range.elapsed_us()
        spent[event.name] += us
    total = sum(spent.values())
    most = spent.most_common(TOP_KERNELS)
    top = [{"name": name, "ms": 1e-3 * us, "share": us / total} for name, us in most]
    for row in top:
        print(f"{row['ms']:9.2f} ms {100 * row['share']:5.1f} %  {row['name'][:100]}")
    kind = "operation (host)" if host else "kernel"
    found = f"top {kind} {top[0]['name'][:60]} {100 * top[0]['share']:.0f} %; trace: {path}"
    figures: dict[str, Any] = {"top": top, "trace": str(path)}
    if host:
        return Answer(NOTED, found, figures)
    figures["busy"] = _busy_share([(e.time_range.start, e.time_range.end) for e in events])
    found = f"the card is busy {100 * figures['busy']:.0f} % of the step; {found}"
    return judged(not given.is_timed or figures["busy"] >= BUSY, found, figures)


def _busy_share(spans: list[tuple[float, float]]) -> float:
    """Share of the time from the first start to the last end that some span covers."""
    spans = sorted(spans)
    covered, reached = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / (reached - spans[0][0]) if reached > spans[0][0] else 1.0


def losses(given: Given) -> Answer:
    """Five steps of llama_tiny in fp32 on the card and on the CPU."""
    results = []
    for device in (given.device, torch.device("cpu")):
        trainer = trainer_of(model_of("llama_tiny", given.steps()), device, 2, 4, "fp32")
        results.append([trainer.train_step() for _ in range(5)])
    off = {
        key: max(_relative(getattr(a, key), getattr(b, key)) for a, b in zip(*results, strict=True))
        for key in ("loss", "grad_norm")
    }
    rows = [[(r.loss, r.grad_norm) for r in some] for some in results]
    found = f"loss off by {off['loss']:.1e}, gradient norm by {off['grad_norm']:.1e} at most"
    is_near = off["loss"] <= LOSS_OFF and off["grad_norm"] <= NORM_OFF
    return judged(is_near, found, {"off": off, "here": rows[0], "cpu": rows[1]})


def communicators(given: Given) -> Answer:
    """A process group of one: made, split, used, and destroyed in the order of making."""
    device, backend = given.device, accelerator.backend_of(given.device)
    bound = {"device_id": device} if given.on_accelerator else {}
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **bound)
    try:
        value = torch.ones(4, device=device)
        groups = [dist.group.WORLD]
        for _ in range(2):  # a CPU's groups cannot be split: they are made one by one there
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


def verify(given: Given, words: str) -> Answer:
    """`parallel3d verify` on two ranks, where two devices are there."""
    if (missing := _command_line_missing()) is not None:
        return missing
    if given.on_accelerator and accelerator.module(given.device).device_count() < 2:
        return Answer(SKIPPED, "one device here, two ranks need two", {})
    tiny = [f"data.path={ROOT / 'README.md'}", f"data.cache_dir={given.folder / 'cache'}", *TINY]
    small = [*tiny, "verify.steps=1"] if given.is_tiny else ["model=llama_tiny"]
    batch, run_dir = ["micro_batch_size=2", "global_batch_size=8"], _new_run(given, "verify")
    where = [f"device={given.device.type}", f"runs_dir={run_dir.parent}", f"run={run_dir.name}"]
    done = _parallel3d("verify", words, *small, *batch, *where)
    if done.returncode:
        path = run_dir / "verify.json"
        differs = json.loads(path.read_text(encoding="utf-8"))["failure"] if path.exists() else None
        if differs is not None:
            return judged(False, differs, {})
    _succeeded(done)
    return Answer(PASS, "the layout does not change the model", {})


def _new_run(given: Given, name: str) -> Path:
    """A run directory that is not there yet: a line may be repeated in the same folder."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=given.folder)) / name


def _parallel3d(*words: str) -> subprocess.CompletedProcess[str]:
    """A command line of its own; its group is the line's, and is ended with it."""
    command = [sys.executable, "-m", "parallel3d", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _succeeded(done: subprocess.CompletedProcess[str]) -> None:
    """Raises RunFailed, with what the command said, if it ended badly."""
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise RunFailed(reason(Ended(done.returncode, "", done.stderr, 0.0), 0.0))


def _command_line_missing() -> Answer | None:
    try:
        import hydra  # noqa: F401
        import omegaconf  # noqa: F401
    except ImportError as error:
        return Answer(SKIPPED, f"parallel3d's command line needs a package: {error}", {})
    return None


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-30) if math.isfinite(a) else math.inf
