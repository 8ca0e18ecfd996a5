"""A collective as rounds of messages: this one list is counted, priced, drawn and run.

Every rank holds the whole buffer, `count` elements; block r of n is [r·count/n, (r + 1)·count/n),
rounded down. A message carries a slice of the sender's buffer to the same place of the receiver's,
where it is added or replaces the old values. In a round a rank sends the values that it held when
the round began. It enters the next round when its own messages of this round have been sent and
received, and waits for no other rank.
"""

from __future__ import annotations

from typing import NamedTuple

from parallel3d.blueprint.cluster import Link


class Message(NamedTuple):
    """Elements [start, stop) of `source`'s buffer, sent to `target`."""

    source: int
    target: int
    start: int
    stop: int
    adds: bool = False  # reduced with the target's values; else it replaces them

    @property
    def count(self) -> int:
        return self.stop - self.start


Rounds = list[list[Message]]


class Sent(NamedTuple):
    """The messages and elements that a rank sends in a collective."""

    messages: int
    elements: int


def edges(count: int, parts: int) -> list[int]:
    """Returns (parts + 1,) borders of `parts` nearly equal parts."""
    return [i * count // parts for i in range(parts + 1)]


def backwards(rounds: Rounds, adds: bool) -> Rounds:
    """Returns every message reversed, the last one first.

    Rounds that distribute parts then collect them (`adds` false: scatter → gather) or sum them
    (true: broadcast → reduce, all-gather → reduce-scatter). A sum is right only if no rank was sent
    data that it had already: it would return the data, and they would count twice.
    """
    return [
        [m._replace(source=m.target, target=m.source, adds=adds) for m in messages]
        for messages in reversed(rounds)
    ]


def sent(rounds: Rounds, n: int) -> list[Sent]:
    """Returns (n,) the messages and elements that each rank sends."""
    found = [Sent(0, 0)] * n
    for messages in rounds:
        for m in messages:
            before = found[m.source]
            found[m.source] = Sent(before.messages + 1, before.elements + m.count)
    return found


def price(rounds: Rounds, n: int, itemsize: int, link: Link) -> float:
    """Returns seconds by the α–β model: the critical path through the rounds.

    A message of x bytes begins when both ends have come to its round and takes α + x/B; in a round
    a rank sends one at most and receives one at most, through ports that do both at once (Hockney
    1994). Arithmetic on the data costs nothing, as in `estimate.network`, whose closed formulas
    this meets.
    """
    entered = [0.0] * n
    for messages in rounds:
        left = list(entered)
        for m in messages:
            seconds = link.latency_us * 1e-6 + m.count * itemsize / (link.gb_per_s * 1e9)
            done = max(entered[m.source], entered[m.target]) + seconds
            left[m.source] = max(left[m.source], done)
            left[m.target] = max(left[m.target], done)
        entered = left
    return max(entered)
