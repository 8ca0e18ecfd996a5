"""Takes nodes from jobs of slurm/train.sbatch, and checks that the result shows no trace of it.

Each job trains with two ranks on two nodes, with two spare nodes, and meets one to three faults at
random moments: a rank is killed, a node crashes (its sockets close), falls silent (its link is cut)
or is drained, a node crashes during a save or during a restart, a spare crashes, or the node of the
batch script crashes, after which Slurm queues the job again.

In the end the weights must be those of the undisturbed run, bit for bit, and every step must have
its row once, with the loss of the undisturbed run. The command prints for each job its faults, what
was decided, and the seconds from each fault to the first new step, and in the end their medians.

    python -m benchmarks.node_faults --runs 60 --seed 0 --json node_faults.json

It needs Linux, root, and Debian's slurm-wlm, munge and iproute2, runs from the repository's root,
and uses virtual nodes of this machine (tests/tools/minislurm).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e import rails
from tests.e2e.private_slurm import why_not
from tests.e2e.training_jobs import SLOW_FROM, STEPS, Cluster, TrainingJob, undisturbed

RANKS, SPARES = 2, 2
KINDS = ("killed", "crashed", "silent", "drained", "saving", "restart", "spare", "host")
AFTER_S = 4.0  # longest time between the first steps of a start and a fault
SLOW_STEP_S = 2.0


@dataclass
class Trial:
    """One job with its faults, and what became of it.

    Attributes:
        faults: pairs of a kind and the seconds that it waits.
        back_s: seconds from each fault to the first new step, by number and kind of the fault.
    """

    number: int
    faults: list[tuple[str, float]]
    decisions: list[str] = field(default_factory=list)
    state: str = ""
    restarts: int = 0
    is_bit_equal: bool = False
    has_rows_once: bool = False
    back_s: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def name(self) -> str:
        return f"trial{self.number}"

    @property
    def is_good(self) -> bool:
        return self.state == "COMPLETED" and self.is_bit_equal and self.has_rows_once

    def line(self) -> str:
        back = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.back_s.items())
        words = (
            f"{self.name}: {' '.join(kind for kind, _ in self.faults)}",
            f"decided {' '.join(self.decisions)}",
            f"requeued {self.restarts}",
            f"bit-equal {'yes' if self.is_bit_equal else 'NO'}",
            f"rows once {'yes' if self.has_rows_once else 'NO'}",
            f"back after {back or '–'}",
        )
        return "; ".join(words) + (f"; {self.error}" if self.error else "")


def plan(seed: int, runs: int) -> list[Trial]:
    """Returns the trials of a seed; the kinds take turns, so that each occurs about as often."""
    chosen = random.Random(seed)
    kinds: list[str] = []
    trials = []
    for number in range(runs):
        faults = []
        for _ in range(chosen.randint(1, 3)):
            if not kinds:
                kinds = list(KINDS)
                chosen.shuffle(kinds)
            faults.append((kinds.pop(), chosen.uniform(0, AFTER_S)))
        trials.append(Trial(number, faults))
    return trials


def story(trial: Trial, job: TrainingJob) -> Iterator[None]:
    """Does the faults of a trial to a job, one after another."""
    begun = 0
    for number, (kind, wait_s) in enumerate(trial.faults):
        while not is_ready(job, begun):
            if job.is_over:
                return
            yield
        begun = len(job.first_steps())
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            yield
        if job.is_over:
            return
        yield from do(kind, job, f"{number + 1} {kind}")
        while kind != "spare" and len(job.first_steps()) == begun and not job.is_over:
            yield
    job.release()


def is_ready(job: TrainingJob, begun: int) -> bool:
    """Returns whether a start after the `begun` first ones is at its slow steps."""
    running = job.now is not None and job.now.state == "RUNNING" and len(job.nodes) > 0
    return running and len(job.first_steps()) > begun - 1 and job.steps >= SLOW_FROM


def do(kind: str, job: TrainingJob, what: str) -> Iterator[None]:
    """Does one fault; a job without the node that it takes gets a killed rank."""
    used = job.decisions[-1]["nodes"] if job.decisions else []
    others = [node for node in used if node != job.nodes[0]]
    spares = [node for node in job.nodes if node not in used]
    node = others[0] if others else job.nodes[0]
    if kind == "spare" and spares:
        job.crash(spares[0], what)
        while spares[0] in job.nodes and not job.is_over:
            yield
        return
    if kind == "saving":
        folder = job.run_dir / "checkpoints"
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not any(folder.glob(".saving-*")):
            yield
    if kind == "host":
        host = job.nodes[0]
        job.crash(host, what)
        job.cluster.slurm.down(host)
    elif kind == "drained":
        job.cluster.drain(node)
        job.kill_rank(node, what)
    elif kind == "silent":
        job.silence(node, what)
    elif kind == "restart":
        before = len(job.decisions)
        job.kill_rank(node, what)
        while len(job.decisions) == before and not job.is_over:
            yield
        job.crash(node, what)
    elif kind in ("crashed", "saving"):
        job.crash(node, what)
    else:
        job.kill_rank(node, what)


def run_together(cluster: Cluster, trials: Sequence[Trial], reference: TrainingJob) -> None:
    """Runs trials at once to their ends, and notes what became of them."""
    for trial in trials:
        cluster.submit(trial.name, RANKS, SPARES, slow_s=SLOW_STEP_S)
    stories = {trial.name: functools.partial(story, trial) for trial in trials}
    try:
        cluster.tell(stories, 120)
    except AssertionError as error:
        for trial in trials:
            trial.error = str(error).splitlines()[0]
            cluster.jobs[trial.name].cancel()
    for trial in trials:
        judge(trial, cluster.jobs[trial.name], reference)
        print(trial.line(), flush=True)
    cluster.repair_all()


def judge(trial: Trial, job: TrainingJob, reference: TrainingJob) -> None:
    trial.decisions = job.kinds
    if job.now is not None:
        trial.state, trial.restarts = job.now.state, job.now.restarts
    rows = job.rows()
    trial.has_rows_once = [row[0] for row in rows] == list(range(1, STEPS + 1))
    try:
        same = job.weights() == reference.weights()
    except OSError:
        same = False
    trial.is_bit_equal = same and rows == reference.rows()
    for what in job.lost:
        back = job.back_after(what)
        if back is not None and not what.endswith("spare"):
            trial.back_s[what] = round(back, 2)


def summary(trials: Sequence[Trial]) -> list[str]:
    """Returns the last lines: how many trials are good, and medians by kind."""
    by_kind: dict[str, list[float]] = {}
    for trial in trials:
        for what, seconds in trial.back_s.items():
            by_kind.setdefault(what.split()[1], []).append(seconds)
    lines = [
        f"{kind}: first new step after {statistics.median(found):.1f} s (median of {len(found)}, "
        f"{min(found):.1f} to {max(found):.1f})"
        for kind, found in sorted(by_kind.items())
    ]
    good = sum(trial.is_good for trial in trials)
    return [*lines, f"{good} of {len(trials)} runs ended with the undisturbed run's bits"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=3, help="jobs that run at the same time")
    parser.add_argument("--only", type=int, help="runs the trial of this number alone")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args(arguments)
    if (reason := why_not() or rails.why_not()) is not None:
        print(f"node_faults: {reason}", file=sys.stderr)
        return 2
    # Slurm gives each rank one thread, on which the bits of a sum depend.
    os.environ["OMP_NUM_THREADS"] = "1"
    trials = plan(given.seed, given.runs)
    if given.only is not None:
        trials = [trials[given.only]]
    nodes = given.at_once * (RANKS + SPARES) + 6  # others for jobs that are queued again
    with tempfile.TemporaryDirectory(prefix="p3d-node-faults-") as folder:
        cwd, scratch = Path(folder, "cwd"), Path(folder, "scratch")
        cwd.mkdir()
        scratch.mkdir()
        with Cluster.up(cwd, scratch, nodes) as cluster:
            reference = undisturbed(cluster, RANKS)
            for first in range(0, len(trials), given.at_once):
                run_together(cluster, trials[first : first + given.at_once], reference)
    print("\n".join(summary(trials)))
    if given.json is not None:
        content: dict[str, Any] = {"seed": given.seed, "trials": [asdict(each) for each in trials]}
        given.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(trial.is_good for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
