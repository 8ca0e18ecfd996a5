"""Runs `parallel3d report run=a run=b to=report.html`; invalid input is refused without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parallel3d.cli.verbs import HELP, Verb, parse, refusing, verb_help
from parallel3d.config.user_files import check_free, write
from parallel3d.errors import UserError
from parallel3d.files import plain
from parallel3d.run_config import Config

REPORT = "report"
MADE_BY = "parallel3d report"
MARK = f"data-by='{MADE_BY}'"
MOST_RUNS = 12  # the colours of more runs could not be told apart in one chart
KEYS = Verb(
    "write a page of one run or several: curves over steps and tokens with the restarts, where a "
    "step's time goes, memory, layout and map, and the keys in which the runs differ",
    {
        "run": "name of a run; give run= once for each",
        "to": "HTML file to write (report.html); a file that report did not write is not "
        "overwritten",
        "runs_dir": "folder of all runs (runs)",
    },
    ("run",),
    "parallel3d report run=my_run\n"
    "parallel3d report run=my_run run=other_run to=both.html\n"
    "parallel3d report run=my_run runs_dir=/data/runs",
    paths=("to", "runs_dir"),
)


def report(arguments: Sequence[str]) -> int:
    """Writes the page and prints a line for each run. Returns the exit code, 0.

    Raises UserError for invalid arguments, a missing or damaged run, and a file that must not be
    overwritten.
    """
    if HELP & set(arguments):
        print(verb_help(REPORT, KEYS))
        return 0
    first, *more = [word for word in arguments if word.startswith("run=")] or [""]
    others = [word for word in arguments if not word.startswith("run=")]
    given, _ = parse(REPORT, KEYS, [*filter(None, (first,)), *others])
    names = list(dict.fromkeys([given["run"], *(word.removeprefix("run=") for word in more)]))
    if len(names) > MOST_RUNS:
        raise UserError(
            f"report: run= may be given at most {MOST_RUNS} times, not {len(names)} times"
        )
    to = given.get("to", "report.html")
    check_free("to", to, MARK, MADE_BY)
    from parallel3d.commands.report.page import RunRecord, page_of, read_run
    from parallel3d.metrics.starts import DAMAGED

    folder = Path(given.get("runs_dir", Config().runs_dir))

    def read(name: str) -> RunRecord:
        try:
            run = read_run(folder, name)
            page_of([run], MARK)
        except UserError:
            raise
        except DAMAGED as error:
            raise UserError(
                f"report: run={name} has a damaged file "
                f"({plain(repr(error))}): fix it, or give other runs"
            ) from None
        return run

    with refusing(REPORT):
        runs = [read(name) for name in names]
        page = page_of(runs, MARK)
    write("to", to, page)
    width = max(map(len, names))
    for run in runs:
        print(f"{run.name:<{width}}  {run.last[0]:>7,} steps  {run.state}")
    print(f"{to}: open it in a browser")
    return 0
