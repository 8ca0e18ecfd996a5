"""Whether the local ranks are started again after one of them died, and from where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from parallel3d.checkpoint.manifest import list_checkpoints, reason
from parallel3d.run.directory import keep_failures
from parallel3d.run.failure import RankFailure


@dataclass
class Restarts:
    """The decisions of one launcher.

    A restart needs a checkpoint: without one the run would begin anew, which its user may want to
    know first. And it needs hope: what the user must put right, what the run has decided, and what
    went wrong in the same way at the same step before, would go wrong again. (A kill is no such
    thing: it comes from outside.)

    Args:
        limit: restarts at most.
        say: takes a sentence for the user.
    """

    run_dir: Path
    limit: int
    say: Callable[[str], None]
    count: int = 0
    last: tuple[str, str] | None = None

    def decide(self, cause: RankFailure) -> bool:
        """Whether to start again; says so and puts the records of the failure aside."""
        if self.count >= self.limit or not self._has_hope(cause):
            return False
        try:
            saved = list_checkpoints(self.run_dir)
            if not saved:
                return False
            keep_failures(self.run_dir)
        except OSError as error:
            self.say(f"no restart, as {self.run_dir} cannot be used ({reason(error)})")
            return False
        self.count += 1
        self.last = (cause.phase, cause.error)
        step = int(saved[0].name.rpartition("-")[2])
        restart = f"restart {self.count} of {self.limit} from step {step}"
        self.say(f"{cause.sentence().rstrip('.')}; {restart}")
        return True

    def _has_hope(self, cause: RankFailure) -> bool:
        if cause.kind in ("user", "decided"):
            return False
        return cause.kind == "killed" or self.last != (cause.phase, cause.error)
