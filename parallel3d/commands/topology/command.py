"""Maps ranks onto a cluster and prices their groups (`parallel3d topology`), without torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from parallel3d.commands.options import CommandConfig
from parallel3d.commands.topology.report import (
    MADE_BY,
    facts_of,
    make_report,
    picture_of,
    write_report,
)
from parallel3d.config.user_files import check_free, write

if TYPE_CHECKING:
    from parallel3d.loop.own_parts import OwnParts


def topology(
    config: CommandConfig, typed: Sequence[str] | None = None, own: OwnParts | None = None
) -> int:
    """Prints the groups with their prices and warnings, and writes the requested files.

    `typed` lists the command-line overrides, whose keys count as chosen by the user. If it is None,
    all keys count as chosen. `own`: the parts of a script, which change no traffic. Returns the
    exit code, 0. Raises UserError for an impossible configuration.
    """
    svg, json_file = config.topology.svg, config.topology.json
    check_free("topology.svg", svg, "data-by='parallel3d'", MADE_BY)
    check_free("topology.json", json_file, f'"made_by": "{MADE_BY}"', MADE_BY)
    report = make_report(config, typed, os.environ, config.topology)
    if json_file:
        text = json.dumps(facts_of(report), indent=1, allow_nan=False)
        write("topology.json", json_file, text + "\n")
    if svg:
        write("topology.svg", svg, picture_of(report))
    write_report(report, [name for name in (svg, json_file) if name], sys.stdout)
    sys.stdout.flush()
    return 0
