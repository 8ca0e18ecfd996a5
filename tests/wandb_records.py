"""What a W&B session left on the disk, read by W&B's own tool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def wandb_records(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Records of one .wandb file by type; of a killed session, those that reached the file."""
    tool = str(Path(sys.executable).with_name("wandb"))
    done = subprocess.run(
        [tool, "leet", "inspect", "--json", str(path)], capture_output=True, text=True, check=True
    )
    records: dict[str, list[dict[str, Any]]] = {}
    for record in map(json.loads, done.stdout.splitlines()):
        records.setdefault(record["type"], []).append(record[record["type"]])
    return records
