"""Declares a key, and says which values keys may have that a range or a choice cannot describe."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from fractions import Fraction
from typing import Any, NamedTuple

# Whether a resumed run may change a key. FREE and LAYOUT change nothing but rounding, and LAYOUT is
# told as one; REPORTED changes the next steps; REFUSED defines the weights or the order of samples.
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
    """Declares a key with default, range and help.

    `fields` enforces `choices`, `minimum` and `maximum` (inclusive), `above` and `below`
    (exclusive). With `list_of`, one or a list of such words may stand for a choice, as a list or
    as text; of RANKS, a list of numbers. `holds` is Path for text that is a path; for values in
    braces it gives the types of names and values, as dict[str, float]. `resume` says
    whether a resumed run may change the key; None: as `RESUME` of its class says, else REPORTED.
    `alike`: all ranks must have the same value, although it may change. `once`: the key is of a
    single start, and a resumed run does not take it over. `tried`: values, other
    than the default, that the page of refusals, the fuzzer and tests try.
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


# `attention_kernel`

AUTO, FLASH, CUDNN, MATH = "auto", "flash", "cudnn", "math"
# Flash attention of other packages: name in torch's registry, module that torch imports.
PACKAGES = {"fa3": ("FA3", "flash_attn_interface"), "fa4": ("FA4", "flash_attn.cute")}
KERNELS = (AUTO, FLASH, CUDNN, MATH, *PACKAGES)
HALF_PRECISION = ("bf16", "fp16")
# Kernels that GPUs have in half precision only. (Flash attention on a CPU takes all types.)
NARROW = (FLASH, CUDNN, *PACKAGES)


def in_other_precision(kernel: str) -> str:
    """Returns the kernel for a run's computations in fp32 or fp64 (`verify`, `generate`)."""
    return AUTO if kernel in NARROW else kernel


# `recompute`: the parts of a layer that are recomputed in the backward (`models/recompute.py`)

PARTS = ("norm", "activation", "attention", "mlp", "layer")
WORDS: dict[str, tuple[str, ...]] = {"none": (), "selective": ("attention",), "full": ("layer",)}
_IMPLIED = {"mlp": ("activation",), "layer": PARTS[:-1]}


def words_of(value: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the words of a list, of a word, or of text such as `[norm,mlp]`."""
    if not isinstance(value, str):
        return tuple(value)
    return tuple(word.strip() for word in value.strip("[]").split(",") if word.strip())


def padded_length(length: int, cp: int, multiple: int = 1) -> int:
    """Returns the tokens of a sequence of `length` with its padding, split over cp ranks.

    2 · cp equal pieces, and on each rank a multiple of `multiple` tokens. One rank pads nothing.
    """
    step = 1 if cp == 1 else math.lcm(2 * cp, cp * multiple)
    return -(-length // step) * step


def parts_of(recompute: str | Sequence[str]) -> frozenset[str]:
    """Returns the named parts without those that others imply."""
    is_word = isinstance(recompute, str) and recompute in WORDS
    return _least(WORDS[str(recompute)] if is_word else words_of(recompute))


@functools.lru_cache(maxsize=256)
def _least(parts: tuple[str, ...]) -> frozenset[str]:
    return frozenset(parts).difference(*(_IMPLIED.get(part, ()) for part in parts))


def spelled(recompute: str | Sequence[str]) -> str:
    """Returns `recompute` as typed: a word if there is one, else `parts_of` in PARTS' order."""
    least = tuple(sorted(parts_of(recompute), key=PARTS.index))
    return next((word for word, means in WORDS.items() if means == least), f"[{','.join(least)}]")


LOGGERS = ("wandb", "tensorboard")
RANKS = ("ranks",)


class BatchSizes(NamedTuple):
    """Gives the global batch of every step, a function of the samples read before it.

    Attributes:
        entries: (first, size) with growing `first`, the first one 0: a step before which at least
            `first` samples were read takes `size`.
        steps_before, samples_before: done before these sizes hold: of a run that goes on with
            others than it began with.
    """

    entries: tuple[tuple[int, int], ...]
    steps_before: int = 0
    samples_before: int = 0

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.entries]

    def at(self, samples: int) -> int:
        """Returns the size of the step before which `samples` were read."""
        return next(size for first, size in reversed(self.entries) if first <= samples)

    @classmethod
    def of(cls, schedule: Mapping[Any, int]) -> BatchSizes:
        """Returns sizes by the samples before them, as `train.batch_schedule` has them."""
        # Keys are text in a manifest, and 1e9 is a float.
        return cls(tuple((int(Fraction(str(first))), size) for first, size in schedule.items()))

    def after(self, steps: int, samples: int) -> BatchSizes:
        """Returns these sizes for a run that has done `steps` steps of `samples` samples."""
        return BatchSizes(self.entries, steps, samples)

    def steps(self, samples: int) -> int:
        """Returns the least number of steps, those before included, that read `samples` or more."""
        steps, read = self.steps_before, self.samples_before
        for (_, size), end in self._until():
            last = samples if end is None else min(end, samples)
            count = max(0, -(-(last - read) // size))
            steps, read = steps + count, read + count * size
        return steps

    def samples(self, steps: int) -> int:
        """Returns the samples that the first `steps` steps read, at least `steps_before`."""
        steps, read = max(0, steps - self.steps_before), self.samples_before
        for (_, size), end in self._until():
            count = steps if end is None else min(steps, max(0, -(-(end - read) // size)))
            steps, read = steps - count, read + count * size
        return read

    def place(self, samples: int) -> float:
        """Returns the steps of these sizes that `samples` are, at least `samples_before`: a whole
        number at the end of a step, a fraction within one."""
        steps = self.steps(samples)
        over = self.samples(steps) - samples
        if over <= 0:
            return steps
        return steps - over / (self.samples(steps) - self.samples(steps - 1))

    def _until(self) -> list[tuple[tuple[int, int], int | None]]:
        """Returns each entry with the number of samples at which the next one begins."""
        after = [first for first, _ in self.entries[1:]]
        return list(zip(self.entries, [*after, None], strict=True))


class Replicas(NamedTuple):
    """The data-parallel ranks of a run.

    Attributes:
        micro_batch_size: sequences of a micro-batch.
        dp: how many ranks there are.
    """

    micro_batch_size: int
    dp: int

    @property
    def multiple(self) -> int:
        """Divides every global batch."""
        return self.micro_batch_size * self.dp


def number_of_tokens(typed: Any) -> int:
    """Returns a number of tokens, typed as 1000000000 or 1e9; -1 for other text."""
    try:
        number = Fraction(str(typed))
    except (ValueError, ZeroDivisionError):
        return -1
    return int(number) if number.denominator == 1 and number < 2**63 else -1
