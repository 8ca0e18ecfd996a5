"""What the ranks of a hang tell each other, and which silent processes are to be killed.

Each says through the store what it was doing; the first of them finds the verdict. Of those that
say nothing, their neighbours look at the processes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallel3d.comm.job_store import get, get_all, put
from parallel3d.config.schema import Config
from parallel3d.faults import hang, hang_state
from parallel3d.host.processes import of_this_job, why_silent
from parallel3d.run import failure
from parallel3d.run.launch import Worker
from parallel3d.run.time_limits import until, within

if TYPE_CHECKING:
    from torch.distributed import Store

KEY = "parallel3d/hang"
HANG_FILE = "hang"  # by it ranks without a store agree on who speaks
ANSWER_S = 3.5  # ranks that have not answered after this are silent
RECORD_FILE_S = 3.0  # a file system that takes longer for one small file is dead
DUMP_S = 3.0  # what is left for files that are still being written then
# The others leave after so long, whatever the first of them found and said.
VERDICT_S = ANSWER_S + DUMP_S + RECORD_FILE_S + 1.0

# A verdict, on the rank that speaks, and processes (pid, born) of this host to kill.
Found = tuple[hang_state.Diagnosis | None, list[tuple[int, int]]]


@dataclass
class Inquiry:
    """One rank's part in finding out who is at fault.

    Args:
        store: of all ranks; None for a world of one.
        keeper: rank 0's process, should the store go with it.
    """

    config: Config
    worker: Worker
    store: Store | None
    keeper: dict[str, Any] | None = None
    _silent: list[int] | None = None  # on the rank that speaks

    def agree(self, state: hang_state.RankState) -> Found:
        """The verdict, on the rank that finds it, and processes to kill here.

        None elsewhere, once that rank has `spoken`: by the first that ends, launchers end all.
        """
        if self.store is None:
            return hang.diagnose({state.rank: state}, {}), []
        store, world = self.store, range(self.worker.world_size)
        put(store, f"{KEY}/state/{state.rank}", hang_state.to_json(state))
        store.set(f"{KEY}/asked", "1")
        first = store.add(f"{KEY}/first", 1) == 1
        if not first:
            verdict_key = f"{KEY}/verdict"
            until(lambda: store.check([verdict_key]), VERDICT_S)
            silent = get(store, verdict_key) if store.check([verdict_key]) else []
            return None, self._mine_to_kill(silent)
        answers = [f"{KEY}/state/{rank}" for rank in world]
        until(lambda: store.check(answers), ANSWER_S)
        there = {rank for rank in world if store.check([answers[rank]])}
        said = get_all(store, [answers[rank] for rank in sorted(there)])
        found = (hang_state.from_json(state) for state in said)
        states = {answer.rank: answer for answer in found}
        silent = {rank: self._look_at(rank) for rank in world if rank not in there}
        verdict = hang.diagnose(states, silent)
        self._silent = sorted(silent)
        return verdict, self._mine_to_kill(self._silent)

    def spoken(self) -> None:
        """Lets the others leave."""
        if self.store is not None and self._silent is not None:
            put(self.store, f"{KEY}/verdict", self._silent)

    def process(self, rank: int) -> dict[str, Any] | None:
        key = f"{KEY}/process/{rank}"
        assert self.store is not None
        return get(self.store, key) if self.store.check([key]) else None

    def _look_at(self, rank: int) -> tuple[str, str]:
        """Who a silent rank is, and why it gives no answer."""
        return self._look_at_process(rank, self.process(rank))

    def _look_at_process(self, rank: int, process: dict[str, Any] | None) -> tuple[str, str]:
        if process is None:
            return failure.who(self.config, rank), "has not started to train"
        return failure.who(self.config, rank, process["host"]), why_silent(process)

    def _mine_to_kill(self, silent: list[int]) -> list[tuple[int, int]]:
        """Silent processes of this host and job: a stopped one would outlive the job."""
        return of_this_job([self.process(rank) for rank in silent])

    def without_store(self, state: hang_state.RankState) -> Found:
        """What one rank can tell alone; the first to make the file speaks."""
        who, why = self._look_at_process(0, self.keeper)
        here = of_this_job([self.keeper])
        if not within(RECORD_FILE_S, self._is_first_without_store, True):
            time.sleep(DUMP_S + RECORD_FILE_S)  # the first speaks meanwhile
            return None, here
        why += ", and the store that it keeps gives no answer"
        return hang.diagnose({state.rank: state}, {0: (who, why)}), here

    def _is_first_without_store(self) -> bool:
        """Whether no other rank has made the file before this one."""
        try:
            (self.worker.run_dir / HANG_FILE).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            pass  # no disk to agree by: said twice is better than not at all
        return True
