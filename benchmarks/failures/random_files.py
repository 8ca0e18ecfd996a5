"""Makes a file system fail at random in processes of a run, at most once in each.

A process draws from the seed, the number of its start and the name that the launcher gave it, so
the same campaign draws the same faults; the call that meets a fault depends on timing.
tests/tools/failing_files.py says which calls are reached.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.tools.failing_files import LOST, SHORT, SLOW, FailingFiles, Fault

VARIABLE = "FAILING_FILES"
HOOK = Path(__file__).with_name("failing_processes")
WHAT = ("EIO", "ESTALE", "ENOSPC", "EACCES", "EMFILE", SHORT, SLOW, LOST)
CALLS = (1, 1, 3, 30)  # numbers of calls that a fault lasts
LAST_BEGIN = 600  # about the number of calls of a rank in these runs
# Variables that distinguish the processes of a start, and the starts of a rank.
NAMES = (
    *("RANK", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)


@dataclass(frozen=True)
class Failing:
    """Passes the faults to a run's processes: the seed, the rate, and the folder below which calls
    fail.

    `rate`: the share of processes that get a fault; `record`: the file in which they record the
    faults that they met.
    """

    folder: str
    seed: str
    rate: float
    record: str

    def environment(self) -> dict[str, str]:
        """Returns variables for all processes of a start; HOOK is added to PYTHONPATH."""
        return {VARIABLE: json.dumps(asdict(self))}


class RandomFiles(FailingFiles):
    """Gives `fault` to `calls` calls of any kind inside the block, from number `begin` on."""

    def __init__(self, failing: Failing, fault: Fault, begin: int, calls: int) -> None:
        super().__init__(Path(failing.folder), fault)
        self.begin, self.end = begin, begin + calls
        self.seen = 0
        self.record = os.open(failing.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def meets(self, kind: str) -> Fault | None:
        with self._lock:
            number = self.seen
            self.seen += 1
            if self.fault is None or not self.begin <= number < self.end:
                return None
            self.failed += 1
            if self.failed == 1:
                lasts = self.end - self.begin
                facts = {"what": self.fault.what, "kind": kind, "call": number, "lasts": lasts}
                os.write(self.record, f"{json.dumps(facts)}\n".encode())
            return self.fault


def enter(environ: Mapping[str, str]) -> None:
    """Draws this process's fault, if it gets one, and waits for its moment in the background. Each
    process that is forked from it, a local rank, draws a fault of its own, by its number."""
    failing = Failing(**json.loads(environ[VARIABLE]))
    name = "/".join(environ.get(variable, "-") for variable in NAMES)
    here, forks = _drawn(failing, name), 0

    def count() -> None:
        nonlocal forks
        forks += 1

    def draw_anew() -> None:
        nonlocal here
        if here is not None:
            here.__exit__(None, None, None)
        here = _drawn(failing, f"{name}/{forks}")

    os.register_at_fork(before=count, after_in_child=draw_anew)


def _drawn(failing: Failing, name: str) -> RandomFiles | None:
    chance = random.Random(f"{failing.seed}/{name}")
    if chance.random() >= failing.rate:
        return None
    fault, calls = Fault(chance.choice(WHAT)), chance.choice(CALLS)
    # Small numbers are as likely as large ones, because the few calls of a start all differ.
    begin = int(LAST_BEGIN ** chance.random()) - 1
    files = RandomFiles(failing, fault, begin, calls)
    files.__enter__()
    return files
