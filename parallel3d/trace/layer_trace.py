"""What one layer of a rank does in each pass, for any number of sequences in a micro-batch.

Most numbers are linear in the number of sequences from two on. One sequence has numbers of its own,
because some tensors then need no copy to be put in order; and attention under context parallelism
gathers fewer heads at once if a micro-batch has more tokens.

Layers are recorded for the numbers of sequences that are asked for. The lines go through two of
them, so that all others follow without a further recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from parallel3d.models.flops import keys_seen


@dataclass(frozen=True)
class MatrixProducts:
    """Equal matrix products: each of `count` kernels multiplies `groups` pairs of matrices.

    The factors are (rows, inner) and (inner, columns).

    Attributes:
        dtype: the dtype of the factors, such as "bfloat16".
        nbytes: bytes that each kernel reads and writes.
    """

    count: int
    rows: float
    columns: float
    inner: float
    groups: int
    dtype: str
    nbytes: float

    @property
    def flops(self) -> float:
        return 2.0 * self.count * self.groups * self.rows * self.columns * self.inner


@dataclass(frozen=True)
class AttentionCalls:
    """Equal calls of the attention kernel.

    Attributes:
        products: number of products of queries and keys: 2 in a forward and 5 in a backward.
        sequences: number of sequences; documents are not known here, so each is one.
        heads, key_heads: number of query and of key heads.
        width, value_width: size of a head of q and k, and of v.
        queries, keys: tokens of a sequence.
        causal: whether a query sees only the keys up to its own position.
        window: number of keys that a query sees, or None for all.
    """

    count: int
    products: int
    sequences: float
    heads: int
    key_heads: int
    width: int
    value_width: int
    queries: float
    keys: float
    causal: bool
    window: int | None
    dtype: str
    nbytes: float

    @property
    def flops(self) -> float:
        """FLOPs of the products without the masked part; both widths count for one half each."""
        seen = keys_seen(self.queries, self.keys, self.causal, self.window)
        rows = self.sequences * self.heads * self.queries
        return self.count * self.products * rows * seen * (self.width + self.value_width)


@dataclass(frozen=True)
class CollectiveCalls:
    """Equal collectives over a group of `ranks` ranks.

    Attributes:
        group: name of the group, such as "tp".
        op: the operation, such as "all_gather", as in `collectives.bus_factor`.
        nbytes: bytes of the whole tensor: of the result of an all-gather, of all other inputs.
    """

    count: int
    group: str
    ranks: int
    op: str
    nbytes: float


@dataclass(frozen=True)
class OperatorCalls:
    """Equal calls of an operator that multiplies no matrices.

    Attributes:
        launches: number of kernels of each call.
        nbytes: bytes that each call reads and writes.
    """

    count: int
    name: str
    launches: int
    nbytes: float


@dataclass(frozen=True)
class Pass:
    """One pass of a layer over a micro-batch.

    Attributes:
        waits: how often the host waits for the device.
        peak: most bytes that the pass has allocated at once, less those that it has freed by then;
            relative to the beginning of the pass, and never below 0.
        peak_of_rest: the same after the gradients of experts are complete, if FSDP2 gathers their
            parameters.
        live: bytes allocated in the pass less those freed in it.
    """

    products: tuple[MatrixProducts, ...] = ()
    attentions: tuple[AttentionCalls, ...] = ()
    sent: tuple[CollectiveCalls, ...] = ()
    others: tuple[OperatorCalls, ...] = ()
    waits: int = 0
    peak: float = 0.0
    peak_of_rest: float = 0.0
    live: float = 0.0

    @property
    def launches(self) -> int:
        """Number of kernels, without collectives."""
        calls = sum(each.count for each in self.products)
        calls += sum(each.count for each in self.attentions)
        return calls + sum(other.count * other.launches for other in self.others)

    @property
    def nbytes(self) -> float:
        """Bytes that all kernels read and write, without collectives."""
        kernels: Iterable[Any] = (*self.products, *self.attentions, *self.others)
        return sum(each.count * each.nbytes for each in kernels)

    @property
    def other_bytes(self) -> float:
        """Bytes that all operators but products and attention read and write."""
        return sum(other.count * other.nbytes for other in self.others)

    @property
    def product_flops(self) -> float:
        return sum(product.flops for product in self.products)

    @property
    def flops(self) -> float:
        return self.product_flops + sum(attention.flops for attention in self.attentions)


@dataclass(frozen=True)
class LayerPasses:
    """What a layer does with a micro-batch of a given number of sequences.

    Attributes:
        forward: the forward.
        repeated: what the backward repeats of the forward; its memory counts in the backward.
        backward: the whole backward, without what it repeats.
        inputs: the backward that defers the gradients of weights, without what it repeats.
        weights: the deferred gradients of weights.
        shared: sizes in bytes of the tensors that all layers of a stage share for a micro-batch,
            such as its rows of the rotary tables.
        kept: sizes of the tensors that are kept from the forward to the backward. The
            result of the layer is among them, and its input is not.
        deferred: sizes of the tensors that are kept from `inputs` to `weights`.
    """

    forward: Pass
    repeated: Pass
    backward: Pass
    inputs: Pass
    weights: Pass
    shared: tuple[float, ...]
    kept: tuple[float, ...]
    deferred: tuple[float, ...]


class Line(NamedTuple):
    """A number for n sequences: base + n · slope."""

    base: float
    slope: float

    @classmethod
    def through(cls, some: int, value: float, more: int, other: float) -> Line:
        """Returns the line through `value` for `some` sequences and `other` for `more`."""
        slope = (other - value) / (more - some)
        return cls(value - some * slope, slope)

    def at(self, sequences: float) -> float:
        return self.base + sequences * self.slope


class RecordedEvents(NamedTuple):
    """Equal events of a pass.

    Attributes:
        times: how often they happen.
        what: product, attention, sent, other or wait.
        again: whether they belong to a repeated forward.
        facts: values that do not depend on the number of sequences.
        numbers: those that do.
    """

    times: int
    what: str
    again: bool
    facts: tuple[Any, ...]
    numbers: tuple[Line, ...]


class PassRecord(NamedTuple):
    """What a pass does; `peaks` are lines whose maximum, if above 0, is the peak.

    `of_rest` are such lines of the moments after the gradients of experts are complete.
    """

    events: tuple[RecordedEvents, ...]
    peaks: tuple[Line, ...]
    of_rest: tuple[Line, ...]
    live: Line

    def at(self, sequences: float, again: bool | None = False) -> Pass:
        """Returns the pass; only its repeated forward if `again`, and all of it if None."""
        kinds: dict[str, list[Any]] = {kind: [] for kind in _MAKERS}
        waits = 0
        for event in self.events:
            if again is not None and event.again is not again:
                continue
            if event.what == "wait":
                waits += event.times
                continue
            numbers = [line.at(sequences) for line in event.numbers]
            kinds[event.what].append(_MAKERS[event.what](event.times, *event.facts, *numbers))
        found = Pass(
            tuple(kinds["product"]),
            tuple(kinds["attention"]),
            tuple(kinds["sent"]),
            tuple(kinds["other"]),
            waits,
        )
        if again:
            return found
        peak, of_rest = (
            max((line.at(sequences) for line in lines), default=0.0)
            for lines in (self.peaks, self.of_rest)
        )
        live = self.live.at(sequences)
        return replace(found, peak=max(0.0, peak), peak_of_rest=of_rest, live=live)


def _product(count: int, groups: int, dtype: str, *numbers: float) -> MatrixProducts:
    rows, columns, inner, nbytes = numbers
    return MatrixProducts(count, rows, columns, inner, groups, dtype, nbytes)


def _attention(
    count: int,
    products: int,
    heads: int,
    key_heads: int,
    width: int,
    value_width: int,
    causal: bool,
    window: int | None,
    dtype: str,
    *numbers: float,
) -> AttentionCalls:
    sequences, queries, keys, nbytes = numbers
    of_heads = heads, key_heads, width, value_width
    seen = causal, window, dtype
    return AttentionCalls(count, products, sequences, *of_heads, queries, keys, *seen, nbytes)


_MAKERS: Mapping[str, Callable[..., Any]] = {
    "product": _product,
    "attention": _attention,
    "sent": CollectiveCalls,
    "other": OperatorCalls,
}

PASSES = ("forward", "backward", "inputs", "weights")


class LayerRecord(NamedTuple):
    """The passes and the kept tensors of a layer (see `LayerPasses`).

    `defers`: whether the backward has also been recorded with deferred gradients of weights.
    """

    forward: PassRecord
    backward: PassRecord
    inputs: PassRecord
    weights: PassRecord
    shared: tuple[Line, ...]
    kept: tuple[Line, ...]
    deferred: tuple[Line, ...]
    defers: bool

    def at(self, sequences: float) -> LayerPasses:
        return LayerPasses(
            self.forward.at(sequences),
            self.backward.at(sequences, again=True),
            self.backward.at(sequences),
            self.inputs.at(sequences),
            self.weights.at(sequences, again=None),
            tuple(line.at(sequences) for line in self.shared),
            tuple(line.at(sequences) for line in self.kept),
            tuple(line.at(sequences) for line in self.deferred),
        )

    @classmethod
    def from_json(cls, made: Sequence[Any]) -> LayerRecord:
        *of_passes, shared, kept, deferred, defers = made
        forward, backward, inputs, weights = map(_pass_from, of_passes)
        lines = _lines(shared), _lines(kept), _lines(deferred)
        return cls(forward, backward, inputs, weights, *lines, bool(defers))


@dataclass(frozen=True)
class LayerTrace:
    """What a layer of a rank does.

    Attributes:
        exact: records for given numbers of sequences.
        several: the record for two and more sequences, if it is linear in their number.
    """

    exact: dict[int, LayerRecord]
    several: LayerRecord | None = None
    _made: dict[float, LayerPasses] = field(default_factory=dict, compare=False, repr=False)

    def covers(self, sequences: int, defers: bool = False) -> bool:
        """Returns whether `at` knows this number of sequences.

        `defers`: whether it must also know the passes with deferred gradients of weights.
        """
        record = self._record_of(sequences)
        return record is not None and (record.defers or not defers)

    def _record_of(self, sequences: int) -> LayerRecord | None:
        return self.exact.get(sequences, self.several if sequences > 1 else None)

    @property
    def defers(self) -> bool:
        """Whether `at` knows passes with deferred gradients of weights."""
        known = [*self.exact.values(), *filter(None, [self.several])]
        return any(record.defers for record in known)

    def at(self, sequences: int) -> LayerPasses:
        """Returns what the layer does with a micro-batch of this many sequences.

        Raises ValueError if the trace does not cover them.
        """
        if sequences not in self._made:
            record = self._record_of(sequences)
            if record is None:
                raise ValueError(f"nothing is recorded for {sequences} sequences")
            self._made[sequences] = record.at(sequences)
        return self._made[sequences]

    def with_more(self, other: LayerTrace) -> LayerTrace:
        """Returns a trace that covers what either of the two covers; `other` is the newer one."""
        return LayerTrace(self.exact | other.exact, other.several or self.several)

    def as_json(self) -> list[Any]:
        return [[*self.exact.items()], self.several]

    @classmethod
    def from_json(cls, made: Sequence[Any]) -> LayerTrace:
        """Raises ValueError, TypeError or KeyError if the content is not that of a trace."""
        exact, several = made
        return cls(
            {int(count): LayerRecord.from_json(record) for count, record in exact},
            None if several is None else LayerRecord.from_json(several),
        )


def _lines(made: Sequence[Sequence[float]]) -> tuple[Line, ...]:
    return tuple(Line(float(base), float(slope)) for base, slope in made)


def _pass_from(made: Sequence[Any]) -> PassRecord:
    events, peaks, of_rest, live = made
    return PassRecord(
        tuple(
            RecordedEvents(count, what, again, tuple(facts), _lines(numbers))
            for count, what, again, facts, numbers in events
        ),
        _lines(peaks),
        _lines(of_rest),
        *_lines([live]),
    )


def highest(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Returns those of the lines that are the highest somewhere from two sequences on."""
    found: list[Line] = []
    at = 2.0
    now = max(lines, key=lambda line: (line.at(at), line.slope), default=None)
    while now is not None:
        found.append(now)
        steeper = [line for line in lines if line.slope > now.slope]
        places = {line: (now.base - line.base) / (line.slope - now.slope) for line in steeper}
        now = min(steeper, key=lambda line: (places[line], -line.slope), default=None)
    return tuple(found)
