"""Provides `key`, which declares a key, and helpers for values that need more than a range."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from fractions import Fraction
from typing import Any, NamedTuple

from parallel3d.errors import nearest

# The effect of a key's change on a resumed run. FREE and LAYOUT keys change nothing but rounding,
# and a LAYOUT key is reported as a change of layout. A REPORTED key changes the next steps. A
# REFUSED key must not change, as it defines the weights or the order of samples.
FREE, LAYOUT, REPORTED, REFUSED = "free", "layout", "reported", "refused"


def key(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    list_of: tuple[str, ...] | None = None,
    holds: Any = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    resume: str | None = None,
    alike: bool = False,
    once: bool = False,
    tried: tuple[Any, ...] = (),
) -> Any:
    """Declares a key with its default, range and help.

    `fields` enforces the limits.

    Args:
        default: value of the key if none is given.
        help: phrase for help texts and the page of all keys.
        choices: the allowed words; None allows all.
        list_of: words that may be given instead of a choice, alone or several as a list or text;
            RANKS allows numbers of ranks, and None no list.
        holds: `Path` for text that is a path, INTERVAL for a number of steps that may also be a
            time or auto, a type such as dict[str, float] for values in braces, and None for other
            keys.
        minimum, maximum: inclusive limits; None for no limit.
        above, below: exclusive limits; None for no limit.
        resume: whether a resumed run may change the key (FREE, LAYOUT, REPORTED or REFUSED); None
            stands for the `RESUME` of its class, or else for REPORTED.
        alike: whether the value must be the same on all ranks, even if `resume` lets it change.
        once: whether the key belongs to a single start, so that a resumed run does not inherit it.
        tried: values other than the default for the page of refusals, the fuzzer and tests.
    """
    meta = {
        "help": help,
        "choices": choices,
        "list_of": list_of,
        "holds": holds,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "below": below,
        "resume": resume,
        "alike": alike,
        "once": once,
        "tried": tried,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    return field(default=default, metadata=meta)


# Values of `attention_kernel`.

AUTO, FLASH, CUDNN, MATH = "auto", "flash", "cudnn", "math"
# Flash attention of other packages: its name in torch's registry, and the module to import.
PACKAGES = {"fa3": ("FA3", "flash_attn_interface"), "fa4": ("FA4", "flash_attn.cute")}
KERNELS = (AUTO, FLASH, CUDNN, MATH, *PACKAGES)
HALF_PRECISION = ("bf16", "fp16")
# Kernels that need half precision on GPUs. (On CPUs, flash attention takes all types.)
NARROW = (FLASH, CUDNN, *PACKAGES)


def in_other_precision(kernel: str) -> str:
    """Returns the kernel for computing in fp32 or fp64, as `verify` and `generate` do.

    It is one of attention, or one of gated DeltaNet.
    """
    return AUTO if kernel in (*NARROW, FLA) else kernel


def words_of(value: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the words of a value: of a list, a single word, or text such as `[norm,mlp]`."""
    if not isinstance(value, str):
        return tuple(value)
    return tuple(word.strip() for word in value.strip("[]").split(",") if word.strip())


def padded_length(length: int, cp: int, multiple: int = 1) -> int:
    """Returns the length of a sequence with the padding that `cp` ranks need.

    The padded sequence is split into 2 · cp equal pieces, and each rank gets a multiple of
    `multiple` tokens. With cp=1 there is no padding.
    """
    step = 1 if cp == 1 else math.lcm(2 * cp, cp * multiple)
    return -(-length // step) * step


# Values of `delta_kernel`.
TORCH, FLA = "torch", "fla"
DELTA_KERNELS = (AUTO, TORCH, FLA)

# Values of `context_parallel.states`.
CHAIN, HEADS = "chain", "heads"
STATE_STYLES = (AUTO, CHAIN, HEADS)

LOGGERS = ("wandb", "tensorboard")
RANKS = ("ranks",)


class BatchSizes(NamedTuple):
    """Global batch size of every step, as a function of the samples read before it.

    Attributes:
        entries: pairs (first, size) with increasing `first`, beginning with 0. A step has the size
            of the last pair whose `first` is at most the number of samples read before it.
        steps_before: number of steps done before these sizes apply, in a run that resumed with
            other sizes.
        samples_before: number of samples read in those steps.
    """

    entries: tuple[tuple[int, int], ...]
    steps_before: int = 0
    samples_before: int = 0

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.entries]

    def at(self, samples: int) -> int:
        """Returns the size of the step that begins after `samples` samples were read."""
        return next(size for first, size in reversed(self.entries) if first <= samples)

    @classmethod
    def of(cls, schedule: Mapping[Any, int]) -> BatchSizes:
        """Returns the sizes of a `train.batch_schedule`, which maps samples read to sizes."""
        # The keys are text in a manifest, and 1e9 is a float.
        return cls(tuple((int(Fraction(str(first))), size) for first, size in schedule.items()))

    def after(self, steps: int, samples: int) -> BatchSizes:
        """Returns these sizes for a run that has taken `steps` steps and read `samples` samples."""
        return BatchSizes(self.entries, steps, samples)

    def steps(self, samples: int) -> int:
        """Returns the least number of steps, from the run's start, that read at least `samples`."""
        steps, read = self.steps_before, self.samples_before
        for (_, size), end in self._until():
            last = samples if end is None else min(end, samples)
            count = max(0, -(-(last - read) // size))
            steps, read = steps + count, read + count * size
        return steps

    def samples(self, steps: int) -> int:
        """Returns how many samples the first `steps` steps read.

        `steps` must be at least `steps_before`.
        """
        steps, read = max(0, steps - self.steps_before), self.samples_before
        for (_, size), end in self._until():
            count = steps if end is None else min(steps, max(0, -(-(end - read) // size)))
            steps, read = steps - count, read + count * size
        return read

    def place(self, samples: int) -> float:
        """Returns the number of steps, as a fraction, after which `samples` samples are read.

        `samples` must be at least `samples_before`.
        """
        steps = self.steps(samples)
        over = self.samples(steps) - samples
        if over <= 0:
            return steps
        return steps - over / (self.samples(steps) - self.samples(steps - 1))

    def _until(self) -> list[tuple[tuple[int, int], int | None]]:
        """Returns each entry with the `first` of the next entry, or with None if it is the last."""
        after = [first for first, _ in self.entries[1:]]
        return list(zip(self.entries, [*after, None], strict=True))


class Replicas(NamedTuple):
    """Data-parallel replicas of a run.

    Attributes:
        micro_batch_size: number of sequences in a micro-batch.
        dp: number of data-parallel ranks.
    """

    micro_batch_size: int
    dp: int

    @property
    def multiple(self) -> int:
        """Returns the number that must divide every global batch size."""
        return self.micro_batch_size * self.dp


def number_of_tokens(typed: Any) -> int:
    """Returns a number of tokens that is written as 1000000000 or 1e9, or -1 for other text."""
    try:
        number = Fraction(str(typed))
    except (ValueError, ZeroDivisionError):
        return -1
    return int(number) if number.denominator == 1 and number < 2**63 else -1


# Intervals between checkpoints: a number of steps, a time such as 10min, or auto.

INTERVAL = "interval"  # `Key.holds` of a key whose value is such an interval
UNITS = {"s": 1, "min": 60, "h": 3600}
LONGEST_S = 10**9
_TIME = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)(s|min|h)", re.ASCII)
_ANY_TIME = re.compile(r"(\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})\s*([a-z]*)\.?", re.ASCII)


def seconds_of(interval: Any) -> float | None:
    """Returns the seconds of a time such as 10min, 90s or 1.5h, or None for anything else."""
    found = _TIME.fullmatch(interval) if isinstance(interval, str) else None
    return None if found is None else float(found[1]) * UNITS[found[2]]


def nearest_interval(given: str, default: Any) -> Any:
    """Returns `given` itself if it is `auto` or a time that can be waited for, else what is near.

    `10 minutes` is near 10min, and `500 steps` is near the number 500.
    """
    seconds = seconds_of(given)
    if given == AUTO or (seconds is not None and 1 <= seconds <= LONGEST_S):
        return given
    text = given.strip().lower()
    typed = _ANY_TIME.fullmatch(text)
    if typed is None:
        return nearest(text, (AUTO,)) or default
    number, unit = float(typed[1]), typed[2]
    if unit in ("", "steps", "step"):
        return int(number)
    if unit.startswith("d"):  # days
        number, unit = 24 * number, "h"
    elif unit == "ms":
        number, unit = number / 1000, "s"
    unit = next((name for name in UNITS if unit[0] == name[0]), None)
    if unit is None:
        return default
    if number * UNITS[unit] <= 2:
        return f"{max(1, round(number * UNITS[unit]))}s"
    return f"{min(round(number, 2), LONGEST_S // UNITS[unit]):.12g}{unit}"
