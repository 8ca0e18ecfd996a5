"""Tests that garbage collection is off while torch is imported, and on again afterwards."""

from __future__ import annotations

import gc
import sys

import pytest
import torch  # noqa: F401  # what the tests take away for a moment

from parallel3d.host.memory import nothing_collected


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns whether collections were on at each call that would freeze existing objects."""
    calls: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(gc.isenabled()))
    return calls


def test_nothing_is_collected_during_the_first_import(
    monkeypatch: pytest.MonkeyPatch, frozen: list[bool]
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    with nothing_collected():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert frozen == [False]


def test_an_import_that_fails_leaves_collections_on(
    monkeypatch: pytest.MonkeyPatch, frozen: list[bool]
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(KeyboardInterrupt), nothing_collected():
        raise KeyboardInterrupt
    assert gc.isenabled()
    assert frozen == []


def test_a_later_job_of_a_sweep_freezes_no_objects(frozen: list[bool]) -> None:
    with nothing_collected():
        assert gc.isenabled()
    assert frozen == []


def test_garbage_collection_that_is_off_stays_off(
    monkeypatch: pytest.MonkeyPatch, frozen: list[bool]
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    gc.disable()
    try:
        with nothing_collected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert frozen == []
