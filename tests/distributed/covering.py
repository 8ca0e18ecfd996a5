"""Finds few combinations of levels that hold every allowed pair of levels.

A factor has levels: tensor parallelism has 1, 2 and 4 ranks, for example. A rule on a few factors
forbids some of their combinations. `Cover` searches greedily, then replaces a few combinations at
a time by cheaper ones, with the same result on every machine.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

Levels = Mapping[str, Any]  # factor → level, for some factors or for all
Level = tuple[str, Any]  # a factor and one of its levels
Pair = tuple[Level, Level]

NODES = 20_000  # bound of one search, which ends after some dozens of steps
AT_ONCE = (2, 3, 4, 6, 8)  # numbers of combinations that are replaced together


class Rule(NamedTuple):
    """A condition on the levels of a few factors.

    Attributes:
        why: the reason in a few words.
        factors: the factors that it reads.
        holds: whether their levels, in this order, may occur together.
    """

    why: str
    factors: tuple[str, ...]
    holds: Callable[..., bool]


def allowed(levels: Levels, rules: Sequence[Rule]) -> bool:
    """Returns whether levels break no rule; only rules whose factors are all given count."""
    for rule in rules:
        known = all(name in levels for name in rule.factors)
        if known and not rule.holds(*[levels[name] for name in rule.factors]):
            return False
    return True


class Cover:
    """Combinations of one level of each factor, which hold every pair that a combination can hold.

    Sets of levels are integers with a bit for each level, as a search looks at a million pairs.

    Args:
        factors: levels by factor.
        rules: conditions on combinations.
        cost: a number above 0, the seconds of a combination in some unit.
        usual: levels that a combination has unless it is made for others.
        early: factors that are decided first, since most rules read them.
        rounded: levels that hide others: a combination with one shows its pairs with these alone.
        later: whether a pair may be left to the combinations that come after the first ones.
        tries: number of combinations that are compared before one is taken.
        found: combinations to begin with.
        first: how many of them, at the beginning, are to hold all pairs that are not `later`.

    Attributes:
        found, first: as above; `fill` and `shrink` change them.
        impossible: the pairs that break no rule on two factors, and that a search has found no
            combination for.
    """

    def __init__(
        self,
        factors: Mapping[str, Sequence[Any]],
        rules: Sequence[Rule],
        cost: Callable[[Levels], float],
        *,
        usual: Levels | None = None,
        early: Sequence[str] = (),
        rounded: Sequence[Level] = (),
        later: Callable[[Level, Level], bool] = lambda one, other: False,
        tries: int = 6,
        found: Sequence[Levels] = (),
        first: int = 0,
    ) -> None:
        self.factors, self.cost, self.tries = factors, cost, tries
        self.usual, self.early = dict(usual or {}), early
        self.all = [(name, level) for name, levels in factors.items() for level in levels]
        self.bit = {level: 1 << index for index, level in enumerate(self.all)}
        self.of = {name: self.bits((name, v) for v in levels) for name, levels in factors.items()}
        self.rounded = self.bits(rounded)
        self.later = {
            one: self.bits([other for other in self.all if later(one, other)]) for one in self.all
        }
        self.rules = rules
        # Factor → its rules on more than two factors; `excluded` holds the others.
        self.wide = {
            name: [rule for rule in rules if len(rule.factors) > 2 and name in rule.factors]
            for name in factors
        }
        # Level → the levels that exclude it, and all levels of their factors.
        self.excluded = self._excluded()
        self.narrowed = {
            level: [of for of in self.of.values() if of & excluded]
            for level, excluded in self.excluded.items()
        }
        self.random = random.Random(0)
        self.found = [dict(levels) for levels in found]
        self.first = first
        self.impossible: list[Pair] = []
        self.missing: dict[Level, int] = {}  # level → the levels that it is still to meet

    def fill(self, spine: Sequence[Levels] = ()) -> None:
        """Adds combinations until the first ones hold every pair that is not `later`, and all of
        them every pair and the spine.

        Args:
            spine: levels that some combination must have together, whatever else it has.
        """
        rest, self.found = self.found[self.first :], self.found[: self.first]
        self.missing = self._unmet(first=True)
        self._fill()
        self.first = len(self.found)
        self.found += rest
        self.missing = self._unmet()
        for cell in spine:
            there = any(cell.items() <= levels.items() for levels in self.found)
            if not there and not self._add(cell):
                raise ValueError(f"no combination has {dict(cell)}")
        self._fill()

    def shrink(self, rounds: int) -> None:
        """Replaces a few of the first combinations by others that hold the same pairs and cost
        less, `rounds` times; those that come after them are dropped, for `fill` to find again."""
        self.found = self.found[: self.first]
        for _ in range(rounds):
            before = self.found
            out = {*self.random.sample(range(len(before)), k=self.random.choice(AT_ONCE))}
            self.found = [levels for at, levels in enumerate(before) if at not in out]
            self.first = len(self.found)
            self.missing = self._unmet(first=True)
            self._fill()
            if sum(map(self.cost, self.found)) > sum(map(self.cost, before)):
                self.found = before
        self.first = len(self.found)

    def _fill(self) -> None:
        """Adds combinations until no pair is missing that a combination can hold."""
        while pair := self._next():
            if not self._add(dict(pair)):
                self._exclude(pair)

    def _exclude(self, pair: Pair) -> None:
        """Notes that no combination holds a pair."""
        self.impossible.append(pair)
        for one, other in (pair, pair[::-1]):
            self.missing[one] &= ~self.bit[other]

    def bits(self, levels: Iterator[Level] | Sequence[Level]) -> int:
        """Returns a set of levels as one number."""
        return sum(self.bit[level] for level in levels)

    def met(self, levels: Levels) -> Iterator[tuple[Level, int]]:
        """Yields each level of a whole combination with the levels that it meets there."""
        every = self.bits([*levels.items()])
        rounded = every & self.rounded
        for level in levels.items():
            bit = self.bit[level]
            yield level, (every if bit & rounded or not rounded else rounded) & ~bit

    def uncovered(self, first: bool = False) -> list[Pair]:
        """Returns the pairs that a combination could hold, and that no combination holds, or none
        of the first ones, whose pairs are those that are not `later`."""
        self.missing, found = self._unmet(first), []
        for one in self.all:
            for other in self.all:
                if one < other and self.missing[one] & self.bit[other]:
                    pair = (one, other)
                    if self._completed(dict(pair)) is None:
                        self._exclude(pair)
                    else:
                        found.append(pair)
        return found

    def _unmet(self, first: bool = False) -> dict[Level, int]:
        """Returns level → the levels that it meets in no combination, although no rule on two
        factors forbids the pair, and it is not known to be impossible.

        Args:
            first: whether to look at the first combinations and at the pairs that are not `later`.
        """
        left = {
            level: self.bits(self.all) & ~self.of[level[0]] & ~self.excluded[level]
            for level in self.all
        }
        for one, other in self.impossible:
            left[one] &= ~self.bit[other]
            left[other] &= ~self.bit[one]
        for levels in self.found[: self.first] if first else self.found:
            for level, others in self.met(levels):
                left[level] &= ~others
        return {one: left[one] & ~self.later[one] for one in left} if first else left

    def _excluded(self) -> dict[Level, int]:
        found = dict.fromkeys(self.all, 0)
        for rule in self.rules:
            if len(rule.factors) == 2:
                one, other = rule.factors
                for a, b in product(self.factors[one], self.factors[other]):
                    if not rule.holds(a, b):
                        found[one, a] |= self.bit[other, b]
                        found[other, b] |= self.bit[one, a]
        return found

    def _next(self) -> Pair | None:
        """Returns a missing pair of the level with the most missing pairs."""
        one = max(self.all, key=lambda level: self.missing[level].bit_count())
        left = self.missing[one]
        return (one, self.all[left.bit_length() - 1]) if left else None

    def _add(self, given: Levels) -> bool:
        """Adds the best of several combinations that have `given`; returns False if there is
        none."""
        best: dict[str, Any] = {}
        most = -1.0
        for _ in range(self.tries):
            levels = self._completed(given)
            if levels is None:
                return False
            worth, levels = self._improved(levels, given)
            if worth > most:
                best, most = levels, worth
        for level, others in self.met(best):
            self.missing[level] &= ~others
        self.found.append({name: best[name] for name in self.factors})
        return True

    def _gain(self, levels: Levels) -> int:
        """Returns twice the number of missing pairs that a combination holds."""
        return sum((self.missing[one] & others).bit_count() for one, others in self.met(levels))

    def _improved(self, levels: dict[str, Any], given: Levels) -> tuple[float, dict[str, Any]]:
        """Changes levels as long as the combination gains missing pairs per cost.

        Returns the number of missing pairs per cost, and the combination.
        """
        gain = self._gain(levels)
        most = gain / self.cost(levels)
        every = self.bits([*levels.items()])
        names = [name for name in self.factors if name not in given and name not in self.usual]
        self.random.shuffle(names)
        for name in names:
            rest = every & ~self.of[name]
            for level in self.factors[name]:
                now = levels[name]
                if level == now or self.excluded[name, level] & rest:
                    continue
                seen = rest & self.rounded or rest
                if (self.bit[name, level] | self.bit[name, now]) & self.rounded:
                    continue
                more = gain + 2 * (
                    (self.missing[name, level] & seen).bit_count()
                    - (self.missing[name, now] & seen).bit_count()
                )
                other = levels | {name: level}
                if more / self.cost(other) > most and allowed(other, self.wide[name]):
                    levels, gain, most = other, more, more / self.cost(other)
            every = rest | self.bit[name, levels[name]]
        return most, levels

    def _order(self, given: Levels) -> list[str]:
        """Returns the factors that `given` lacks, in an order that soon shows an impossible choice:
        first those whose rules are nearly decided."""
        order = [name for name in (*self.usual, *self.early) if name not in given]
        known = {*given, *order}
        left = [name for name in self.factors if name not in known]
        self.random.shuffle(left)

        def undecided(name: str) -> int:
            return min(len({*rule.factors} - known) for rule in self.wide[name])

        while bound := [name for name in left if self.wide[name]]:
            near = min(bound, key=undecided)
            order.append(near)
            known.add(near)
            left.remove(near)
        return order + left

    def _completed(self, given: Levels) -> dict[str, Any] | None:
        """Returns a combination that has `given`, or None.

        One factor after the other takes the level with the most missing pairs; the search goes back
        if none is allowed.
        """
        if not allowed(given, self.rules):
            return None
        order, nodes = self._order(given), 0

        def fill(place: int, levels: dict[str, Any], held: int, out: int) -> dict[str, Any] | None:
            nonlocal nodes
            nodes += 1
            if nodes > NODES:
                raise RuntimeError(f"a search for {dict(given)} has no end: see Cover.early")
            if place == len(order):
                return levels
            name = order[place]
            worth = {
                level: (
                    level == self.usual.get(name),
                    (self.missing[name, level] & held).bit_count() + self.random.random(),
                )
                for level in self.factors[name]
                if not self.bit[name, level] & out
            }
            for level in sorted(worth, key=worth.__getitem__, reverse=True):
                more, now = levels | {name: level}, out | self.excluded[name, level]
                open_still = all(of & ~now for of in self.narrowed[name, level])
                if open_still and allowed(more, self.wide[name]):
                    whole = fill(place + 1, more, held | self.bit[name, level], now)
                    if whole is not None:
                        return whole
            return None

        excluded = [self.excluded[level] for level in given.items()]
        out = functools.reduce(int.__or__, excluded, 0)
        if any(not of & ~out for of in self.of.values()):
            return None
        return fill(0, dict(given), self.bits([*given.items()]), out)
