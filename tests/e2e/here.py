"""Runs command lines in this process, for tests that are about words and not about processes."""

from __future__ import annotations

import os
import sys
import time

import pytest

from parallel3d.cli import command_line
from tests.e2e.command import FOREIGN, FOREIGN_PREFIXES, Ended, Shell, without_replaced


def answer(shell: Shell, capfd: pytest.CaptureFixture[str], *words: str, **environ: str) -> Ended:
    """Returns the output of `parallel3d WORDS` in the shell's directory; it must not start to
    train."""

    def accepted(*_: object, **__: object) -> None:
        raise AssertionError(f"not refused: {words}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "make_run_directory", accepted)
        patch.setattr(command_line, "run_joined", accepted)
        patch.setattr(sys, "argv", list(sys.argv))  # main sets it for Hydra
        patch.chdir(shell.cwd)
        for name in list(os.environ):
            if name in FOREIGN or name.startswith(FOREIGN_PREFIXES):
                patch.delenv(name)
        for name, value in environ.items():
            patch.setenv(name, value)
        capfd.readouterr()
        started, cpu = time.monotonic(), time.process_time()
        code = command_line.main(without_replaced(words))
        cpu = time.process_time() - cpu
        out, err = capfd.readouterr()
    return Ended(code, out, err, time.monotonic() - started, cpu)
