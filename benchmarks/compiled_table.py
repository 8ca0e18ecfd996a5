"""Parts of `benchmarks.compiled_kernels` that need neither torch nor Triton."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_RESOURCES = re.compile(r"Function (\S+):\s*((?:[A-Z]+(?:\[\d+\])?:\d+\s*)+)")


def resources(text: str) -> dict[str, int]:
    """Registers of a thread and bytes that it spills, from `cuobjdump --dump-resource-usage`.

    What does not fit into registers is in the thread's stack frame or its other local memory.
    """
    found = _RESOURCES.findall(text)
    if len(found) != 1:
        raise ValueError(f"not the resources of one function: {text!r}")
    values = {k: int(v) for k, v in (pair.split(":") for pair in found[0][1].split())}
    return {"registers": values["REG"], "spilled": values["STACK"] + values["LOCAL"]}
