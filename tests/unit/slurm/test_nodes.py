"""Tests the file of a run's evidence against nodes: what is read, kept, forgotten and printed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel3d.errors import UserError
from parallel3d.slurm import nodes
from parallel3d.slurm.decide import DAY_S, Evidence, History, is_out
from parallel3d.slurm.nodes import MOST_BYTES, NODES, add, read, report

NOW, DAYS = 1_800_000_000.0, 7.0


def entry(evidence: str = "does not answer", age_days: float = 0.0, decisive: bool = True):
    return Evidence(evidence, NOW - age_days * DAY_S, 3, decisive)


def strike(age_days: float = 0.0) -> Evidence:
    return entry("had a device error (CUDA error: unknown error)", age_days, decisive=False)


def silent(sentence: str) -> None:
    raise AssertionError(sentence)


def table(run_dir: Path, forget: str | None = None) -> list[str]:
    return report(run_dir, NOW, DAYS, forget, silent)


def test_entries_of_several_jobs_are_added_up(tmp_path: Path) -> None:
    assert read(tmp_path, NOW, DAYS, silent) == {}
    add(tmp_path, {"node3": (strike(),)}, NOW, DAYS, silent)
    add(tmp_path, {"node4": (entry(),), "node3": (strike(),)}, NOW, DAYS, silent)
    found = read(tmp_path, NOW, DAYS, silent)
    assert found == {"node3": (strike(), strike()), "node4": (entry(),)}
    assert os.stat(tmp_path / NODES).st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == [NODES]


def test_a_run_without_evidence_gets_no_file(tmp_path: Path) -> None:
    assert add(tmp_path, {}, NOW, DAYS, silent) == {}
    assert os.listdir(tmp_path) == []


def test_old_entries_expire_one_by_one(tmp_path: Path) -> None:
    old, new = strike(age_days=6.5), strike()
    add(tmp_path, {"node3": (old, new), "node4": (entry(age_days=6.5),)}, NOW, DAYS, silent)
    assert is_out(read(tmp_path, NOW, DAYS, silent)["node3"])
    assert read(tmp_path, NOW + DAY_S, DAYS, silent) == {"node3": (new,)}
    assert read(tmp_path, NOW, 0.0, silent) == {}, "recovery.exclude_days=0 remembers nothing"
    add(tmp_path, {"node5": (entry(age_days=-1),)}, NOW + DAY_S, DAYS, silent)
    assert list(json.loads((tmp_path / NODES).read_text())) == ["node3", "node5"]


def test_an_entry_of_the_far_future_expires_too(tmp_path: Path) -> None:
    add(tmp_path, {"node3": (entry(age_days=-8),)}, NOW, DAYS, silent)
    assert read(tmp_path, NOW, DAYS, silent) == {}


def text(content: object) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(content))


def good(**changes: object) -> dict[str, list[dict[str, object]]]:
    return {"node3": [{**vars(entry()), **changes}]}


def writable(path: Path) -> None:
    text(good())(path)
    path.chmod(0o666)


def link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    text(good())(elsewhere)
    path.symlink_to(elsewhere)


STRANGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_text(""),
    "not JSON": lambda path: path.write_text("{"),
    "a list": text([1]),
    "a program's own": text({"nodes": 3}),
    "a version to come": text(good(weight=2)),
    "a number for a sentence": text(good(evidence=3)),
    "true for a number": text(good(start=True)),
    "no time": text(good(time=float("nan"))),
    "deep": lambda path: path.write_text("[" * 100_000),
    "too large": lambda path: path.write_bytes(b" " * (MOST_BYTES + 1)),
    "a link": link,
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "writable for others": writable,
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_file_is_ignored_aloud_and_kept(tmp_path: Path, name: str) -> None:
    STRANGE[name](tmp_path / NODES)
    status = os.lstat(tmp_path / NODES)
    (tmp_path / f"{NODES}.1").write_text("of an earlier time")
    said: list[str] = []
    assert read(tmp_path, NOW, DAYS, said.append) == {}
    (line,) = said
    assert f"{tmp_path / NODES} does not count" in line
    assert line.endswith(f"; it is kept as {NODES}.2")
    assert os.path.samestat(os.lstat(tmp_path / f"{NODES}.2"), status)
    add(tmp_path, {"node9": (entry(),)}, NOW, DAYS, silent)
    assert list(read(tmp_path, NOW, DAYS, silent)) == ["node9"]


def test_a_file_that_cannot_be_renamed_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NODES).write_text("of somebody")

    def refuse(*paths: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(nodes.os, "rename", refuse)
    said: list[str] = []
    assert list(add(tmp_path, {"node9": (entry(),)}, NOW, DAYS, said.append)) == ["node9"]
    assert said[0].endswith("it cannot be renamed either")
    assert "so a later job will not know of node9" in said[1]
    assert (tmp_path / NODES).read_text() == "of somebody"


def test_a_disk_that_fails_for_the_moment_keeps_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path, {"node3": (entry(),)}, NOW, DAYS, silent)

    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(nodes, "no_link", fail)
        assert read(tmp_path, NOW, DAYS, said.append) == {}
        assert list(add(tmp_path, {"node9": (entry(),)}, NOW, DAYS, said.append)) == ["node9"]
    assert all("Input/output error" in line for line in said)
    assert len(said) == 3
    assert list(read(tmp_path, NOW, DAYS, silent)) == ["node3"]


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nodes, "replace_durably", fail)
    said: list[str] = []
    found = add(tmp_path, {"node3": (entry(),)}, NOW, DAYS, said.append)
    assert list(found) == ["node3"], "this job leaves the node out all the same"
    assert said == [
        f"{tmp_path / NODES} cannot be written (No space left on device), so a later job will not "
        "know of node3"
    ]


def test_the_table_shows_who_is_out_and_why(tmp_path: Path) -> None:
    assert table(tmp_path) == [f"{tmp_path.name}: no node is left out, and none has a strike"]
    history: History = {"node3": (strike(1), strike()), "node1": (strike(),), "node2": (entry(),)}
    add(tmp_path, history, NOW, DAYS, silent)
    lines = table(tmp_path)
    assert [line.split("  ")[0] for line in lines] == ["node", "node1", "node2", "node3", ""]
    assert "1 of 2 strikes" in lines[1]
    assert "left out" in lines[2]
    assert "does not answer" in lines[2]
    assert "left out" in lines[3]
    assert "CUDA error: unknown error" in lines[4]


def test_the_table_escapes_what_a_file_may_hold(tmp_path: Path) -> None:
    add(tmp_path, {"node\x1b[3": (entry("\x1b[31mred"),)}, NOW, DAYS, silent)
    assert not any("\x1b" in line for line in table(tmp_path))


def test_a_node_is_forgotten_by_its_name(tmp_path: Path) -> None:
    add(tmp_path, {"node3": (entry(),), "node4": (strike(),)}, NOW, DAYS, silent)
    assert "node3" not in "".join(table(tmp_path, "node3"))
    assert list(read(tmp_path, NOW, DAYS, silent)) == ["node4"]
    with pytest.raises(UserError, match=r"has no entry of this node; it has entries of node4; "):
        table(tmp_path, "node3")
    with pytest.raises(UserError, match=r"the nearest is forget=node4"):
        table(tmp_path, "node44")
    table(tmp_path, "node4")
    with pytest.raises(UserError, match=r"it has no entries"):
        table(tmp_path, "node4")
