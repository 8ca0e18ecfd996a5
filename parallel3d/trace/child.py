"""Records traces in a child process, which alone loads torch and enables the simulated device.

A process that plans may train afterwards, on another device.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from parallel3d.errors import UserError
from parallel3d.trace.layer_trace import LayerTrace
from parallel3d.trace.wanted import WantedTrace


class RecordingProcess:
    """Records traces in a child process, which starts with the first ones and lasts until `close`.

    The child also ends with this process.
    """

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.pid = os.getpid()  # the process that started the child

    def __call__(self, wanted: Sequence[WantedTrace]) -> list[LayerTrace]:
        """Returns the traces.

        Raises:
            UserError: torch is not installed.
            RuntimeError: the child has ended, for example because the host's memory is full.
        """
        if importlib.util.find_spec("torch") is None:
            raise UserError(
                "the first plan of a model runs its layers without values, which needs torch; the "
                "nearest is pip install torch"
            )
        # A fork of this process cannot share the child, and a child that is gone is replaced.
        if self.child is None or self.pid != os.getpid() or self.child.poll() is not None:
            self.pid = os.getpid()
            words = sys.executable, "-m", "parallel3d.trace.recording_child"
            # The child finds this package wherever a script has found it.
            paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")
            env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            self.child = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
            )
        assert self.child.stdin is not None and self.child.stdout is not None
        try:
            pickle.dump([*wanted], self.child.stdin)
            self.child.stdin.flush()
            answer = pickle.load(self.child.stdout)
        except (EOFError, BrokenPipeError) as error:
            status, self.child = self.child.wait(), None
            raise RuntimeError(
                f"the process that runs a layer without values has ended with status {status}"
            ) from error
        return [LayerTrace.from_json(made) for made in answer]

    def close(self) -> None:
        """Ends the child."""
        if self.child is not None:
            self.child.communicate()
            self.child = None
