"""Runs and explains jobs of Slurm (`parallel3d slurm …`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel3d.cli.verbs import HELP, Verb, run_verb, verb_help
from parallel3d.errors import UserError, print_line
from parallel3d.faults.keys import RecoveryConfig

SLURM = "slurm"
VERBS = {
    "run": Verb(
        "be the process of a batch script: start the ranks, and start them again after a failure, "
        "on the same nodes, on spare ones, or after a requeue; all words after -- are overrides of "
        "parallel3d train",
        {},
        (),
        "parallel3d slurm run -- experiment=llama3_1_8b data.path=corpora/web",
    ),
    "nodes": Verb(
        "list the nodes that a run avoids, and why",
        {
            "run": "name of the run",
            "runs_dir": "folder of all runs (runs)",
            "forget": "node to use again from now on",
        },
        ("run",),
        "parallel3d slurm nodes my_run\nparallel3d slurm nodes my_run forget=node17",
        names=("run",),
        paths=("runs_dir",),
    ),
    "decide": Verb(
        "repeat the decisions about the starts of a run from what is kept in its recovery.jsonl, "
        "and say which would be other ones now",
        {"run": "name of the run", "runs_dir": "folder of all runs (runs)"},
        ("run",),
        "parallel3d slurm decide my_run",
        names=("run",),
        paths=("runs_dir",),
    ),
    "guard": Verb(
        "be the process that looks after the ranks of one host; parallel3d slurm run starts it",
        {},
        (),
        "parallel3d slurm guard --help",
    ),
    "self-test": Verb(
        "test this node, and print the answer as one line of JSON; parallel3d slurm run asks for "
        "it before each start",
        {},
        (),
        "parallel3d slurm self-test --gpus 8",
    ),
}


def slurm(arguments: Sequence[str]) -> int:
    """Runs a `parallel3d slurm …` command line. Returns its exit code.

    Raises UserError for invalid arguments.
    """
    verb, words = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if verb == "run" and not HELP & set(words[:1]):
        from parallel3d.slurm.job import Signals, run  # here: every command imports this module

        signals = Signals()
        signals.install()
        return run(words[1:] if words[:1] == ["--"] else words, signals)
    if verb == "guard":
        from parallel3d.slurm.guard import main as guard

        return guard(words)
    if verb == "self-test":
        from parallel3d.host.self_test import main as self_test

        return self_test(words)
    if verb == "run":
        print(verb_help(f"{SLURM} {verb}", VERBS[verb]))
        return 0
    return run_verb(SLURM, VERBS, arguments, _explain)


def _explain(verb: str, given: Mapping[str, str], _: list[str]) -> int:
    run_dir = Path(given.get("runs_dir", "runs"), given["run"])
    if not run_dir.is_dir():
        raise UserError(f"{SLURM} {verb}: {run_dir} is no folder of a run; give runs_dir=…")
    if verb == "nodes":
        from parallel3d.slurm import nodes

        days = _exclude_days(run_dir)
        lines = nodes.report(run_dir, time.time(), days, given.get("forget"), print_line)
        print("\n".join(lines))
        return 0
    return _repeat(run_dir)


def _exclude_days(run_dir: Path) -> float:
    """Returns `recovery.exclude_days` of the run."""
    from parallel3d.run.directory import newest_config

    try:
        config = newest_config(run_dir)
    except (OSError, UserError):
        config = None
    return (config.recovery if config is not None else RecoveryConfig()).exclude_days


def _repeat(run_dir: Path) -> int:
    """Prints each decision, and what it would be now; returns 1 if one would differ."""
    from parallel3d.metrics import recovery_log
    from parallel3d.slurm.decide import replayed

    found = replayed(recovery_log.read(run_dir))
    if not found:
        print(f"{run_dir.name}: {recovery_log.RECOVERY} has no decision of a Slurm job")
    for each in found:
        print(each.sentence())
    return int(any(each.differs for each in found))
