"""`metrics.jsonl`: one JSON object a line, each flushed, so that a killed run keeps every line.

A step's line: `step loss grad_norm lr tokens tokens_per_s mfu step_time_s`, where `tokens` counts
all tokens of the run so far (an x axis that survives a change of batch size); `times`, rank 0's
seconds by kind (`metrics.breakdown`; on an accelerator those of the step before, in some lines);
`memory`, on an accelerator the peak bytes of rank 0's so far (`metrics.memory`); `skipped: true`
where gradients were not finite; `loss_scale` with fp16. An evaluation's line:
`step eval_loss tokens`. JSON has no NaN: a value that is not finite is null, and the line
then has `"nonfinite": {"loss": "nan"}` (or "inf", "-inf").
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """`row` with NaN and infinities as null and named under `nonfinite`; valid JSON."""
    odd = {k: repr(v) for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    if not odd:
        return dict(row)
    return {k: None if k in odd else v for k, v in row.items()} | {"nonfinite": odd}


def value(row: Mapping[str, Any], key: str) -> float:
    """What `finite` was given for `key`, NaN and infinities restored. KeyError without it."""
    return float(row.get("nonfinite", {}).get(key, row[key]))


class MetricsFile:
    """Appends lines to a `metrics.jsonl`; on resume, first drops what the run is about to repeat.

    Lines of `first_step` and later, and a last line torn by a crash, belong to steps that will run
    again. They are not lost: the file as it was is kept beside, as `metrics.jsonl.1`, `.2`, …
    `earlier` holds the lines that stay.
    """

    def __init__(self, path: Path, first_step: int = 1) -> None:
        self.path = path
        self.earlier = _keep_before(path, first_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line and hand it to the operating system: it survives SIGKILL."""
        self._file.write(json.dumps(finite(row), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flush to the disk itself and close; may be called twice."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; a last line torn by a crash is left out."""
    return _parse(path.read_bytes())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` by `content` in one step: a reader sees the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)


def _parse(content: bytes) -> list[dict[str, Any]]:
    whole = content[: content.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


def _keep_before(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Drop the lines from `first_step` on, keeping a copy of the old file if there were any."""
    if not path.exists():
        return []
    content = path.read_bytes()
    # Before the first step there may be an evaluation at step 0: a fresh start repeats that too.
    kept = [row for row in _parse(content) if first_step > 1 and row["step"] < first_step]
    lines = "".join(json.dumps(row) + "\n" for row in kept).encode()
    if lines != content:
        number = 1
        while (old := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        os.replace(path, old)
        path.write_bytes(lines)
    return kept
