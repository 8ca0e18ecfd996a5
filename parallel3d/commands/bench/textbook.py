"""`bench comm algorithms=true`: textbook forms beside the backend's collectives.

They run over the backend's point-to-point messages, on the same buffers and checks as the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch

from parallel3d.commands.bench.operations import (
    ITEM,
    REDUCING,
    Call,
    Operation,
    Site,
    pattern,
    reduced,
)
from parallel3d.commands.bench.operations import prepare as prepare_own
from parallel3d.textbook.forms import FORMS, own_block, price_of, rounds_of, segments_of
from parallel3d.textbook.messages import sent
from parallel3d.textbook.run import run
from parallel3d.topology.cluster.parts import Link
from parallel3d.topology.price.costs import collective_time

APART = 1.2  # forms whose prices differ by less are not expected in an order


def textbook_operations() -> list[Operation]:
    """Each collective as the backend has it, then in every form; sums where it reduces."""
    return [
        Operation(name, "sum" if name in REDUCING else None, form=form)
        for name in FORMS
        for form in (None, *FORMS[name])
    ]


def prepare(operation: Operation, site: Site, size: int) -> Call:
    """Any operation, textbook form or not, on buffers of `size` bytes."""
    if operation.form is None:
        return prepare_own(operation, site, size)
    name, n, me = operation.name, site.group.size, site.group.index
    count = 0 if name == "barrier" else site.whole_bytes(size) // ITEM
    before, after = _pattern_of(name, n, me, count)
    buffer = torch.empty(count, device=site.device)
    before, own = before.to(site.device), own_block(me, n, count)

    def fill() -> None:
        buffer.zero_()
        if me == 0 or name not in ("broadcast", "scatter"):
            place = own if name in ("gather", "all_gather") else slice(None)
            buffer[place] = before[place]

    seen = own if name in ("scatter", "reduce_scatter") else slice(None)
    has_result = me == 0 or name not in ("reduce", "gather")
    return Call(
        lambda: run(name, operation.form, buffer, "sum", site.group.handle, site.link),
        fill,
        lambda: buffer[seen] if has_result else None,
        after[seen],
    )


def _pattern_of(name: str, n: int, me: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(count,) before on this rank, and (count,) what all parts of the result are."""
    if name in REDUCING:
        return pattern(me, count), reduced("sum", n, count)
    if name in ("gather", "all_gather"):
        gathered = torch.cat([pattern(m, count // n) for m in range(n)])
        return gathered, gathered
    return pattern(0, count), pattern(0, count)


def priced(operation: Operation, n: int, nbytes: int, link: Link) -> float:
    """Seconds by the α–β model."""
    if operation.form is None:
        return collective_time(operation.name, n, nbytes, link)
    return price_of(operation.name, operation.form, n, nbytes // ITEM, ITEM, link)


def facts(operation: Operation, n: int, nbytes: int, link: Link | None) -> dict:
    """For JSON: segments, and what each rank of the group sends; nothing of the backend's own."""
    if operation.form is None:
        return {}
    name, form, count = operation.name, operation.form, nbytes // ITEM
    segments = segments_of(form, n, count, ITEM, link)
    ranks = sent(rounds_of(name, form, n, count, segments), n)
    return {
        "segments": segments,
        "messages_sent": [each.messages for each in ranks],
        "bytes_sent": [each.elements * ITEM for each in ranks],
    }


def orders(results: Sequence[dict]) -> str:
    """How often the cheaper of two forms was also the faster, as a sentence."""
    rows = [row for row in results if row["form"] and row["priced_s"]]
    pairs = kept = 0
    for one, other in combinations(rows, 2):
        if any(one[key] != other[key] for key in ("dim", "op", "size")):
            continue
        low, high = sorted((one, other), key=lambda row: row["priced_s"])
        if high["priced_s"] > APART * low["priced_s"]:
            pairs += 1
            kept += low["seconds"] < high["seconds"]
    return (
        f"Of {pairs} pairs of forms priced {APART - 1:.0%} apart or more the cheaper was the "
        f"faster in {kept}."
    )
