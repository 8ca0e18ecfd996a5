"""Records the traces that `RecordingProcess` asks for, as its child process."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys


def main() -> None:
    """Answers lists of `WantedTrace` on the standard input until it ends."""
    # Ctrl-C reaches all processes of a terminal; this one ends with its parent's pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what torch prints is no answer
    gc.disable()  # imports create no garbage, and collections would take a tenth of their time
    from parallel3d.trace.recorder import Measured, record  # imports torch

    record([])
    gc.freeze()
    gc.enable()
    measured: Measured = {}
    while True:
        try:
            wanted = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump([trace.as_json() for trace in record(wanted, measured)], answers)
        answers.flush()


if __name__ == "__main__":
    main()
