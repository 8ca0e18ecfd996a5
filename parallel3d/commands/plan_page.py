"""`plan.html=FILE`: what `parallel3d plan` has found, as one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parallel3d.config.schema import Config
from parallel3d.errors import UserError
from parallel3d.plan.constants import load
from parallel3d.plan.inside import inside
from parallel3d.plan.measured.price import configured as configured_here
from parallel3d.plan.own.memory import held
from parallel3d.plan.own.table import configured
from parallel3d.plan.reasons import reason
from parallel3d.plan.report.page import MARK, Page, render
from parallel3d.plan.report.pictures import cluster_map, mapped, spread, timeline
from parallel3d.plan.search import Priced, works
from parallel3d.topology.map.output import check_free, write

MADE_BY = "parallel3d plan"


def check_page(config: Config) -> None:
    """Refuse a file that cannot be written, before any work is done; raises UserError."""
    check_free("plan.html", config.plan.html, MARK, MADE_BY)


def write_page(
    config: Config,
    priced: Priced,
    rows: Sequence[int],
    mfu: Sequence[float],
    gpus: int,
    sizes: Mapping[str, float],
    command: str,
    assumed: Sequence[str],
) -> None:
    """Write the page. `rows` are those of the table, `mfu` theirs; raises UserError."""
    first = rows[0]
    is_measured = config.cluster.file is not None
    best = (configured_here if is_measured else configured)(config, priced.choices[first])
    domain = int(sizes["gpus_per_node"])
    stages = [held(best, index) for index in range(best.pp)]
    each = float(priced.time.compute[first]) / best.num_microbatches
    picture, placed = _map(best)
    page = Page(
        config=config,
        priced=priced,
        rows=rows,
        reasons=[reason(priced, i, first, domain) for i in rows],
        mfu=mfu,
        gpus=gpus,
        domain=domain,
        tokens=config.global_batch_size * config.model.seq_length,
        command=command,
        stages=stages,
        room=float(sizes["memory_bytes"]),
        reserve=float(priced.memory.total[first]) - max(h.total for h in stages),
        timeline=timeline(best, each) if best.pp > 1 else ("", 0),
        map=picture,
        assumed=assumed,
        spread=placed,
        inside={} if is_measured else _inside(priced, first, sizes, config.global_batch_size),
    )
    write("plan.html", str(config.plan.html), render(page))


def _inside(priced: Priced, first: int, sizes: Mapping[str, float], batch: int) -> dict[str, float]:
    """What the best layout computes, by kind."""
    work = works([priced.choices[first]], sizes, batch)
    return inside(work, load(), float(priced.time.compute[first]))


def _map(best: Config) -> tuple[str, str]:
    """The cluster's map, or why there is none, and what another placement would be worth."""
    try:
        report = mapped(best)
    except UserError as error:
        return f"No map: {error}", ""
    return cluster_map(report), spread(report)[1]
