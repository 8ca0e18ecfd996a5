"""Tests the choice of the W&B run that a start continues, and the rows that it sends, without
starting W&B."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from parallel3d.checkpoint.identity import decisive
from parallel3d.errors import UserError
from parallel3d.metrics import wandb_ledger
from parallel3d.metrics.checks import check_loggers
from parallel3d.metrics.keys import LoggerConfig
from parallel3d.metrics.loggers import resolve_mode, sync_command
from parallel3d.metrics.wandb_ledger import (
    Ledger,
    RowPosition,
    UnknownRows,
    begin,
    kept_id,
    last_row,
    name_of_id,
    read_rows,
    sessions_of,
)
from parallel3d.run_config import Config

AGENT = {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": "agent-1"}
SHELL = {"WANDB_RUN_ID": "mine"}


def config_of(lr: float = 1e-3, batch: int = 8, **free: object) -> Config:
    config = Config()
    optim = dataclasses.replace(config.optim, lr=lr)
    return dataclasses.replace(config, optim=optim, global_batch_size=batch, **free)


KEYS = decisive(config_of())


def record(step: int, evaluation: bool = False) -> bytes:
    item = {"step": step, **({"valid/a/loss": 1.0} if evaluation else {"train/lr": 0.1})}
    return json.dumps({"type": "history", "history": {"item": item}}).encode() + b"\n"


RUN = b'{"type": "run", "run": {"run_id": "x"}}\n'


class Said(NamedTuple):
    """An output of W&B's tool and its meaning."""

    lines: tuple[bytes, ...]
    taken: RowPosition | str | None  # a text is a part of the refusing sentence
    size: int = 40000


OUTPUTS = [
    Said((RUN, record(1), record(2)), RowPosition(2, False)),
    Said((RUN, record(1), record(1, True)), RowPosition(1, True)),
    Said((RUN, b"\n", record(3), b'{"type": "stats"}\n'), RowPosition(3, False)),
    Said(
        (b'{ "type" : "history", "history":{"item":{"step":4,"train/lr":1}}}',),
        RowPosition(4, False),
    ),
    Said(
        (b'{"history":{"item":{"train/lr":1,"step":5}},"type":"history"}',), RowPosition(5, False)
    ),
    Said((RUN, b'{"type": "new kind"}\n', record(2)), RowPosition(2, False)),
    Said((RUN,), None),
    Said((), None, size=7),  # killed before its first block
    Said((), None, size=0),
    Said((), "shows no records"),
    Said((RUN, b'{"type": "History", "item": {"step": 4}}\n'), "'History'"),
    Said((RUN, b'{"type": "history", "item": {"step": 4}}\n'), "unknown format"),
    Said((RUN, b'{"type": "history", "history": {"item": {"_step": 4}}}\n'), "unknown format"),
    Said((RUN, b'{"type": "history", "history": {"item": {"step": null}}}\n'), "unknown format"),
    Said((RUN, b'[{"type": "history"}]\n'), "unknown format"),
    Said((b'{"kind": "history"}\n',), "unknown format"),
    Said((b"step 4\n",), "unknown format"),
    Said((b'{"type": "run"', b"}\n"), "unknown format"),
    Said((b"\xff\xfe\n",), "unknown format"),
]


@pytest.mark.parametrize("said", OUTPUTS, ids=str)
def test_outputs_of_wandbs_tool_are_read_or_refused(tmp_path: Path, said: Said) -> None:
    path = tmp_path / "run-x.wandb"
    path.write_bytes(bytes(said.size))
    if not isinstance(said.taken, str):
        assert read_rows(path, lambda _: iter(said.lines)) == said.taken
        return
    with pytest.raises(UnknownRows, match=said.taken):
        read_rows(path, lambda _: iter(said.lines))


def session(
    run_dir: Path,
    config: Config,
    last: RowPosition | None,
    first: int = 1,
    *,
    id: str | None = None,
    killed: bool = False,
    environ: Mapping[str, str] = {},
    stamp: str = "20260101_000000",
) -> str:
    """Runs a session like the logger; returns the run's id in W&B."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if id is not None:
        (run_dir / "wandb-id").write_text(f"{id}\n")
    begun = begin(run_dir, first, decisive(config), environ)
    folder = run_dir / "wandb" / f"offline-run-{stamp}-{begun.id}"
    folder.mkdir(parents=True)
    (folder / f"run-{begun.id}.wandb").write_bytes(bytes(40000))
    ledger = Ledger(run_dir)
    ledger.begin(begun.id, folder.name, first, decisive(config))
    ledger.sent(last)
    if not killed:
        ledger.sent(last, closed=True)
    return begun.id


# The tool's output for a file, in the tests below: the rows of a killed session.
Tool = Callable[[Mapping[str, list[bytes]]], None]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Tool:
    def says(lines: Mapping[str, list[bytes]]) -> None:
        def inspect(path: Path):
            found = [some for name, some in lines.items() if name in str(path)]
            assert len(found) == 1, path
            return iter(found[0])

        monkeypatch.setattr(wandb_ledger, "_tool", inspect)

    says({})
    return says


@pytest.mark.parametrize(
    ("before", "now", "first", "continues"),
    [
        # last row, earlier keys, present keys, first step of this start, whether it stays one run
        # in W&B
        (RowPosition(246, False), config_of(), 201, True),  # the same rows again
        (RowPosition(246, False), config_of(lr=1e-4), 201, False),
        (RowPosition(246, False), config_of(batch=16), 201, False),
        (RowPosition(246, False), config_of(lr=1e-4), 247, True),  # no row is replaced
        (RowPosition(246, False), config_of(lr=1e-4), 246, False),
        (RowPosition(246, True), config_of(lr=1e-4), 246, False),
        (RowPosition(246, True), config_of(lr=1e-4), 247, True),
        (
            RowPosition(246, False),
            config_of(tp=2, dp=4),
            201,
            True,
        ),  # another layout rounds differently
        (RowPosition(246, False), config_of(runs_dir="elsewhere"), 201, True),
        # without a checkpoint it starts from step 1
        (RowPosition(246, False), config_of(seed=5), 1, False),
        (RowPosition(246, False), config_of(), 1, True),
        (None, config_of(lr=1e-4), 1, True),
    ],
)
def test_rows_that_a_changed_resume_replaces(
    tmp_path: Path,
    tool: Tool,
    before: RowPosition | None,
    now: Config,
    first: int,
    continues: bool,
) -> None:
    for id, killed in product(("abc", "llama-8b-v2", "a-20260101_000000-b"), (False, True)):
        folder = tmp_path / f"{id}-{killed}"
        run_dir = folder / "a"
        session(run_dir, config_of(), before, id=id, killed=killed)
        tool({str(run_dir): [RUN] if before is None else [RUN, record(*before)]})
        begun = begin(run_dir, first, decisive(now), {})
        assert kept_id(run_dir) == begun.id
        if continues:
            is_noted = now.optim.lr != 1e-3 or now.seed != config_of().seed
            assert begun == (id, before, is_noted, ()), (id, killed)
            continue
        assert begun.id != id and begun.last is None, (id, killed)
        (line,) = begun.lines
        steps = (
            "step 246 of the run" if first == 246 else f"steps {first} to 246 of the run {id} are"
        )
        assert steps in line and line.endswith(f"a new W&B run, {begun.id}"), (id, killed)
        assert begin(run_dir, 1, decisive(now), {}).id == begun.id, (id, killed)


def test_keys_changed_and_restored_keep_earlier_rows(tmp_path: Path, tool: Tool) -> None:
    """Tests keys that change for one start and change back, which would replace other rows each
    time."""
    run_dir = tmp_path / "a"
    ids = [session(run_dir, config_of(), RowPosition(246, False), stamp="20260101_000000")]
    ids += [
        session(run_dir, config_of(lr=1e-4), RowPosition(230, False), 201, stamp="20260101_000001")
    ]
    ids += [session(run_dir, config_of(), RowPosition(250, False), 201, stamp="20260101_000002")]
    ids += [session(run_dir, config_of(), RowPosition(300, False), 201, stamp="20260101_000003")]
    assert len(set(ids[:3])) == 3 and ids[3] == ids[2]
    assert begin(run_dir, 301, KEYS, {}).last == RowPosition(300, False)


@pytest.mark.parametrize(
    ("environ", "taken", "words"),
    [
        ({}, None, None),
        (SHELL, None, "WANDB_RUN_ID=mine is used only under a sweep's agent"),
        ({"WANDB_RUN_ID": ""}, None, None),
        ({"WANDB_SWEEP_ID": "s1"}, None, None),
        (AGENT, "agent-1", None),
    ],
)
def test_the_id_of_a_first_start(
    tmp_path: Path, environ: Mapping[str, str], taken: str | None, words: str | None
) -> None:
    run_dir = tmp_path / "a"
    run_dir.mkdir()
    begun = begin(run_dir, 1, KEYS, environ)
    assert begun.id == taken if taken else begun.id != environ.get("WANDB_RUN_ID")
    assert len(begun.lines) == (words is not None)
    assert words is None or (words in begun.lines[0] and begun.id in begun.lines[0])
    # The run keeps its id, whatever is exported later.
    assert begin(run_dir, 1, KEYS, {"WANDB_RUN_ID": "other"}) == (begun.id, None, False, ())


def test_runs_of_one_shell_and_of_a_sweep_are_separate_runs(tmp_path: Path) -> None:
    shell = [session(tmp_path / name, config_of(), None, environ=SHELL) for name in "abc"]
    agent = [session(tmp_path / name, config_of(), None, environ=AGENT) for name in "def"]
    assert len({*shell, *agent}) == 6 and agent[0] == "agent-1"
    (tmp_path / "g").mkdir()
    (line,) = begin(tmp_path / "g", 1, KEYS, AGENT).lines
    assert line.startswith("WANDB_RUN_ID=agent-1 already belongs to run d")


def test_a_copied_folder_is_a_separate_run(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    made = session(a, config_of(), RowPosition(9, False))
    shutil.copytree(a, b)
    begun = begin(b, 10, KEYS, {})
    assert begun.id != made and begun.last is None
    assert f"this run is a copy of {a}, to which W&B's run {made}" in begun.lines[0]
    assert begin(a, 10, KEYS, {}) == (made, RowPosition(9, False), False, ())
    assert session(b, config_of(), RowPosition(12, False), 10, stamp="20260101_000001") == begun.id
    assert begin(b, 13, KEYS, {}) == (begun.id, RowPosition(12, False), False, ())
    assert name_of_id(b, begun.id) == "b" and name_of_id(b, "another") == "b-2"
    # The command for the copy does not upload the sessions of the other run again.
    newest = max((b / "wandb").iterdir())
    assert sync_command(newest).startswith(f"find {b}/wandb/offline-run-*-{begun.id} -name ")
    assert sync_command(max((a / "wandb").iterdir())).endswith(
        f"offline-run-20260101_000000-{made}"
    )


def test_a_moved_folder_keeps_its_run(tmp_path: Path) -> None:
    made = session(tmp_path / "a", config_of(), RowPosition(9, False))
    (tmp_path / "a").rename(tmp_path / "b")
    assert begin(tmp_path / "b", 10, KEYS, {}) == (made, RowPosition(9, False), False, ())
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert begin(tmp_path / "link", 10, KEYS, {}).id == made
    session(tmp_path / "a", config_of(), None)  # another run took the old name
    assert begin(tmp_path / "b", 10, KEYS, {}).id == made


def test_two_copies_of_a_deleted_folder_are_two_runs(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    made = session(a, config_of(), RowPosition(9, False))
    shutil.copytree(a, b)
    a.rename(c)
    begun = begin(b, 10, KEYS, {})
    assert begun.id != made and f"a copy of {c}, to which" in begun.lines[0]
    assert begin(c, 10, KEYS, {}) == (made, RowPosition(9, False), False, ())


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({"WANDB_MODE": "dryrun"}, "offline"),
        ({"WANDB_MODE": "disabled"}, "disabled"),
        ({"WANDB_DISABLED": "true"}, "disabled"),
        ({"WANDB_DISABLED": "True", "WANDB_MODE": "online"}, "disabled"),
        ({"WANDB_DISABLED": "false", "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_MODE": "Offline"}, "WANDB_MODE=Offline must be one of online, offline, disabled"),
        ({"WANDB_MODE": "off"}, "the nearest is offline"),
    ],
)
def test_modes_by_wandbs_own_variables(
    environ: dict[str, str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = LoggerConfig(name="wandb")
    for name in ("WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if " " in mode:
        with pytest.raises(UserError, match=mode):
            check_loggers(logger, environ)
        check_loggers(dataclasses.replace(logger, mode="offline"), environ)
        return
    check_loggers(logger, environ)
    assert resolve_mode("auto") == mode


@pytest.mark.parametrize("name", ["a", "5e10423", "007"])
def test_a_copy_of_a_run_from_before_ledgers(tmp_path: Path, name: str) -> None:
    a, b = tmp_path / name, tmp_path / "b"
    a.mkdir()
    (a / "wandb-id").write_text("old\n")
    (a / "config.yaml").write_text(f"# made by process 1 on x\nrun: {name}\nseed: 3\n")
    shutil.copytree(a, b)
    assert begin(a, 5, KEYS, {}) == ("old", None, False, ())
    assert "is a copy of" in begin(b, 5, KEYS, {}).lines[0]


def test_sessions_from_before_ledgers(tmp_path: Path, tool: Tool) -> None:
    """The newest session is found by its time, whatever its id; rows under another id are not its
    own."""
    (tmp_path / "wandb-id").write_text("llama-8b-v2\n")
    for name in ("20260102_000000-llama-8b-v2", "20260101_235959-llama-8b-v2", "20260103_000000-x"):
        folder = tmp_path / "wandb" / f"offline-run-{name}"
        folder.mkdir(parents=True)
        (folder / "run-x.wandb").write_bytes(bytes(40000))
    tool({"20260102": [RUN, record(20)], "20260101": [record(10)], "20260103": [record(30)]})
    assert last_row(tmp_path, "llama-8b-v2", []) == RowPosition(20, False)
    assert begin(tmp_path, 15, KEYS, {}).id == "llama-8b-v2"
    assert begin(tmp_path, 15, KEYS, {}, changed=True).id != "llama-8b-v2"


@pytest.mark.parametrize("harm", ["output", "no folder", "two files"])
def test_a_start_with_unknown_rows_becomes_a_separate_run(
    tmp_path: Path, tool: Tool, harm: str
) -> None:
    run_dir = tmp_path / "a"
    made = session(run_dir, config_of(), RowPosition(9, False), killed=True)
    (folder,) = run_dir.glob("wandb/*")
    tool({"a": [b"{}\n"] if harm == "output" else [record(9)]})
    if harm == "no folder":
        shutil.rmtree(folder)
    if harm == "two files":
        (folder / "run-2.wandb").touch()
    begun = begin(run_dir, 5, KEYS, {})
    assert begun.id != made and begun.last is None
    assert f"it is unknown which rows the run {made} has" in begun.lines[0]


def test_a_session_that_ended_well_needs_no_file(tmp_path: Path) -> None:
    """Tests files as they are after `wandb sync --clean`."""
    run_dir = tmp_path / "a"
    made = session(run_dir, config_of(), RowPosition(9, True))
    shutil.rmtree(run_dir / "wandb")
    assert begin(run_dir, 10, KEYS, {}) == (made, RowPosition(9, True), False, ())


def test_torn_lines_of_a_ledger_are_left_out(tmp_path: Path) -> None:
    made = session(tmp_path, config_of(), RowPosition(9, False))
    with (tmp_path / "wandb.jsonl").open("a") as file:
        file.write('{"session": 1, "last_st\n[]\n{"session": 7}\n')
    (found,) = sessions_of(tmp_path)
    assert (found.id, found.last, found.closed) == (made, RowPosition(9, False), True)
