"""Writes, reads and checks the file of rates that `parallel3d calibrate` measures."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from parallel3d.blueprint.collectives import bus_factor
from parallel3d.errors import UserError
from parallel3d.files import plain, read_bounded

FORMAT, VERSION = "parallel3d calibration", 5
LARGEST = 1 << 20  # maximum bytes of a file; calibrate writes about three thousand bytes

# The measured operations of a group, by their names in `collectives.OPERATIONS`.
MEASURED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")

# Name → description of a rate in a file. On CPUs, rates are those of one core.
RATES = {
    "product_tflops": "TFLOP/s of a large product",
    "product_ramp": "length of the sums at which a product has half of that rate",
    "attention_tflops": "TFLOP/s of attention's forward, over the causal half of the scores",
    "memory_gb_per_s": "1e9 bytes/s that an element-wise operation reads and writes",
    "launch_us": "microseconds of the host for an operation",
    "units": "multiprocessors of a GPU, or 1",
    "rank_gb": "1e9 bytes that a rank takes without tensors",
    "memory_gb": "1e9 bytes of a GPU, or of the host",
}


@dataclass(frozen=True)
class CalibrationSource:
    """Device, software and date of a calibration."""

    device: str  # cpu or cuda
    name: str  # the device's name
    count: int  # cores, or GPUs, of a host
    type: str  # compute type: fp32, bf16, …
    host: str
    torch: str
    parallel3d: str
    date: str


@dataclass(frozen=True)
class GroupTime:
    """Latency and bandwidth of an operation in a group.

    Attributes:
        latency_us: microseconds of a small message.
        gb_per_s: 1e9 bytes/s through the busiest port with large messages (bus bandwidth).
    """

    latency_us: float
    gb_per_s: float

    def seconds(self, op: str, ranks: int, nbytes: float) -> float:
        """Returns the seconds of an operation on a buffer of `nbytes`."""
        return 1e-6 * self.latency_us + bus_factor(op, ranks) * nbytes / (1e9 * self.gb_per_s)


@dataclass(frozen=True)
class MeasuredRates:
    """The measured rates of a cluster.

    Attributes:
        made: the device and the software that were measured.
        rates: the values of `RATES`.
        groups: operation → number of ranks → its time in a group of the first ranks.
    """

    made: CalibrationSource
    rates: Mapping[str, float]
    groups: Mapping[str, Mapping[int, GroupTime]]

    @property
    def shares_cores(self) -> bool:
        """Returns whether all ranks of a host compute on the same cores."""
        return self.made.device == "cpu"

    @property
    def has_network(self) -> bool:
        """Returns whether groups of ranks on several hosts were measured."""
        return not self.shares_cores and max(self.groups["all_gather"]) > self.made.count

    def text(self) -> str:
        """Returns the content of the file, as YAML."""
        groups = {
            op: {
                ranks: {name: _short(value) for name, value in asdict(time).items()}
                for ranks, time in of.items()
            }
            for op, of in self.groups.items()
        }
        content = {"format": FORMAT, "version": VERSION, "made": asdict(self.made)}
        content |= {"rates": {name: _short(value) for name, value in self.rates.items()}}
        content |= {"groups": groups}
        return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)


def _short(value: float) -> float | int:
    """Returns the value with four significant digits, as timers are not more precise."""
    return int(value) if value == int(value) and value < 1e15 else float(f"{value:.4g}")


def read(file: str) -> MeasuredRates:
    """Reads a file written by `parallel3d calibrate`. Raises UserError if it is not valid."""
    key = f"cluster={plain(file)}"
    try:
        content = _parsed(read_bounded(Path(file), LARGEST))
    except OSError as error:
        raise UserError(f"{key} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(
            f"{key} must be a file written by parallel3d calibrate, but is not: {_reason(error)}"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{key} must be a file written by parallel3d calibrate, but is not")
    if content.get("version") != VERSION:
        raise UserError(
            f"{key} has version {plain(str(content.get('version')))}, but this version of "
            f"parallel3d reads version {VERSION}: calibrate again"
        )
    try:
        return _rates(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"{key} is damaged ({_reason(error)}): calibrate again") from None


@functools.lru_cache(maxsize=8)  # a search reads the file for many layouts
def _parsed(text: str | bytes) -> Any:
    return yaml.load(text, _Loader)


def _reason(error: Exception) -> str:
    return plain(" ".join(str(error).split())[:150])


class _Loader(yaml.SafeLoader):
    """Loads plain values and refuses aliases, which could expand to a huge structure."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases are not read")
        return super().compose_node(parent, index)


def _rates(content: Mapping[str, Any]) -> MeasuredRates:
    """Checks the content of a file and returns its rates."""
    count = int(_number("made.count", content["made"]["count"]))
    texts = {name: str(value) for name, value in content["made"].items()}
    made = CalibrationSource(**(texts | {"count": count}))  # type: ignore[arg-type]
    rates = {name: _number(name, content["rates"][name]) for name in RATES}
    groups = {}
    for op in MEASURED:
        times = {int(_number(op, n)): content["groups"][op][n] for n in content["groups"][op]}
        if not times:
            raise ValueError(f"{op} has no groups")
        groups[op] = {
            n: GroupTime(
                _number(f"{op}.latency_us", times[n]["latency_us"]),
                _number(f"{op}.gb_per_s", times[n]["gb_per_s"]),
            )
            for n in sorted(times)
        }
    return MeasuredRates(made, rates, groups)


def _number(name: str, value: Any) -> float:
    """Returns a positive, finite number; raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is not a number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite")
    return float(value)


def check_type(machine: MeasuredRates, file: str, precision: str) -> None:
    """Raises UserError if the file was measured in a dtype other than `precision`."""
    if machine.made.type != precision:
        raise UserError(
            f"precision={precision} must be {machine.made.type}, in which cluster={plain(file)} "
            f"was measured; for {precision}, run parallel3d calibrate precision={precision}"
        )


def check_nodes(machine: MeasuredRates, file: str, nodes: int) -> None:
    """Raises UserError for several nodes if no group on several nodes was measured."""
    if nodes > 1 and not machine.has_network:
        raise UserError(
            f"cluster.nodes={nodes} must be 1 with cluster={plain(file)}, in which no network was "
            "measured; run parallel3d calibrate with a launcher on two nodes or more, or take "
            "cluster.nodes=1"
        )


def check_device(
    machine: MeasuredRates, file: str, kind: str, name: str | None, count: int
) -> None:
    """Raises UserError if the file was measured on another device.

    Args:
        kind: kind of this device, cpu or cuda.
        name: name of this device, or None if it is unknown and not compared.
        count: number of cores or GPUs of this host.
    """
    made = machine.made
    here = name or made.name
    other = made.device != kind or here != made.name
    if other or (machine.shares_cores and count != made.count):
        raise UserError(
            f"cluster={plain(file)} must have been measured on this device, {kind} ({plain(here)} "
            f"× {count}), but was measured on {plain(made.device)} ({plain(made.name)} × "
            f"{made.count}); give a new file written by parallel3d calibrate"
        )
