"""A machine as `parallel3d calibrate` measured it: a cluster file, read with suspicion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from parallel3d.errors import UserError
from parallel3d.files.reading import plain, read_bounded
from parallel3d.plan.measured.tables import Table

FORMAT = "parallel3d calibration"
VERSION = 1
LARGEST = 4 << 20  # bytes; what is written has some hundred thousand

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
SHARED = ".shared"  # behind the name of a collective: among ranks that share cores, a rank's work
# What a file must hold: tables by name, with the number of their axes.
TABLES = {
    **{f"gemm.{part}": 3 for part in ("forward", "input", "weight")},  # rows, outputs, inputs
    # heads of all sequences, tokens of a sequence, width of a head
    **{f"{name}.{way}": 3 for name in ("attention", "rotary") for way in ("forward", "backward")},
    **{
        f"{name}.{way}": 2  # rows, width
        for name in ("layernorm", "rmsnorm")
        for way in ("forward", "backward")
    },
    **{
        f"{name}.{way}": 1  # elements of the result
        for name in ("gelu", "relu", "swiglu", "embedding")
        for way in ("forward", "backward")
    },
    "add": 1,
    "bias": 1,  # elements that are summed
    "loss": 2,  # tokens, columns of this rank
    "adamw": 1,
    "sgd": 1,
    **{name + way: 2 for name in COLLECTIVES for way in ("", SHARED)},  # ranks, bytes
    "together.gemm": 1,  # how many times longer with so many ranks at work, a core each
    "together.move": 1,
    "threads": 1,  # how many times longer with so many threads
}
# Seconds of the host: a layer's pass, an action of the pipeline, a step; and bytes of a bare rank.
NUMBERS = (
    *("launch.forward", "launch.backward", "launch.action", "launch.step"),
    *("rank_gb", "memory_gb", "peak_tflops"),
)


@dataclass(frozen=True)
class CalibrationSource:
    """Where, when and by what a file was made."""

    device: str  # cpu or cuda
    name: str  # of the device
    count: int  # cores, or GPUs, of the host
    type: str  # of the compute: fp32, bf16, …
    host: str
    torch: str
    parallel3d: str
    date: str


@dataclass(frozen=True)
class MeasuredMachine:
    """Tables of seconds by size, a few numbers, and where they come from."""

    made: CalibrationSource
    tables: Mapping[str, Table]
    numbers: Mapping[str, float]

    @property
    def shares(self) -> bool:
        """Whether the ranks of a host compute on the same cores."""
        return self.made.device == "cpu"

    @property
    def ranks(self) -> int:
        """The most ranks whose collectives were measured."""
        return int(self.tables["all_reduce" + SHARED].axes[0][-1])

    def __getitem__(self, name: str) -> Table:
        return self.tables[name]

    def text(self) -> str:
        """The file."""
        tables = {
            name: {
                "axes": [[_short(v) for v in axis] for axis in table.axes],
                "seconds": [_short(s) for s in table.seconds],
            }
            for name, table in self.tables.items()
        }
        head = {"format": FORMAT, "version": VERSION, "made": asdict(self.made)}
        numbers = {name: _short(value) for name, value in self.numbers.items()}
        content = head | {"numbers": numbers, "tables": tables}
        return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)


def _short(value: float) -> float | int:
    """Four digits are more than a clock's."""
    return int(value) if value == int(value) and value < 1e15 else float(f"{value:.4g}")


def read(file: str) -> MeasuredMachine:
    """The machine of a cluster file. Raises UserError for what is none, in one sentence."""
    said = f"cluster={plain(file)}"
    try:
        content = yaml.load(read_bounded(Path(file), LARGEST), _Loader)
    except OSError as error:
        raise UserError(f"{said} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = plain(" ".join(str(error).split())[:150])
        raise UserError(f"{said} is no file of parallel3d calibrate: {reason}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{said} must be a file that parallel3d calibrate wrote, and it is not")
    if content.get("version") != VERSION:
        raise UserError(
            f"{said} has version {plain(str(content.get('version')))}, and this parallel3d reads "
            f"version {VERSION}: calibrate anew"
        )
    try:
        return _machine(content)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = plain(" ".join(str(error).split())[:150])
        raise UserError(f"{said} is damaged ({reason}): calibrate anew") from None


class _Loader(yaml.SafeLoader):
    """Plain values alone, none of them twice: a file of aliases could grow without end."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases are not read")
        return super().compose_node(parent, index)


def _machine(content: Mapping[str, Any]) -> MeasuredMachine:
    made = content["made"]
    kinds = {name: int if name == "count" else str for name in CalibrationSource.__annotations__}
    for name, kind in kinds.items():
        if type(made[name]) is not kind:
            raise ValueError(f"made.{name} is no {kind.__name__}")
    if made["count"] < 1:
        raise ValueError("made.count is below 1")
    numbers = {name: _number(name, content["numbers"][name]) for name in NUMBERS}
    tables = {}
    for name, count in TABLES.items():
        given = content["tables"][name]
        axes = tuple(tuple(_number(name, v) for v in axis) for axis in given["axes"])
        if len(axes) != count:
            raise ValueError(f"{name} has {len(axes)} axes")
        tables[name] = Table(axes, tuple(_number(name, v) for v in given["seconds"]))
    return MeasuredMachine(
        CalibrationSource(**{name: made[name] for name in kinds}), tables, numbers
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is no number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite")
    return float(value)


def check_type(machine: MeasuredMachine, file: str, precision: str) -> None:
    """Raises UserError where the file was measured in another type."""
    if machine.made.type != precision:
        raise UserError(
            f"precision={precision} must be {machine.made.type}, in which cluster={plain(file)} "
            f"was measured; the nearest is parallel3d calibrate precision={precision}"
        )


def check_device(
    machine: MeasuredMachine, file: str, kind: str, name: str | None, count: int
) -> None:
    """Raises UserError where the file is not of this device; `name` None: it is not known."""
    made = machine.made
    here = name or made.name
    other = made.device != kind or here != made.name
    if other or (machine.shares and count != made.count):
        raise UserError(
            f"cluster={plain(file)} must be of this device, {kind} ({plain(here)} × {count}), and "
            f"it is of {plain(made.device)} ({plain(made.name)} × {made.count}); the nearest is "
            "what parallel3d calibrate makes here"
        )
