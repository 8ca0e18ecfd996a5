"""Reads the files of a W&B session with W&B's own tool."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest


def wandb_records(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the records of one .wandb file by type; after a kill, these are the records that
    reached the file.

    It runs `wandb leet inspect` in this process: starting the tool would take a second of a core.
    """
    from wandb.cli.leet import leet

    kept = os.dup(1)
    with tempfile.TemporaryFile() as out:
        os.dup2(out.fileno(), 1)  # where W&B's own process writes
        try:
            with pytest.raises(SystemExit) as ended:
                leet(["inspect", "--json", str(path)])
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        assert not ended.value.code, path
        out.seek(0)
        lines = out.read().splitlines()
    records: dict[str, list[dict[str, Any]]] = {}
    for record in map(json.loads, lines):
        records.setdefault(record["type"], []).append(record[record["type"]])
    return records
