"""Tests that `p3d.init` reports a newer torch once, and refuses an older one on every rank."""

from __future__ import annotations

from unittest.mock import patch

import pytest

import parallel3d as p3d
from parallel3d import versions
from parallel3d.errors import UserError
from parallel3d.library import init
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly


def said(torch: str) -> list[str]:
    lines: list[str] = []
    with (
        patch.object(versions, "installed", {"torch": torch}.get),
        patch.object(init.LOG, "info", lines.append),
    ):
        try:
            p3d.init(device="cpu")
        except UserError as error:
            return [str(error)]
    return [line for line in lines if "torch" in line]


def test_a_newer_torch_is_named_by_rank_0(pool: Pool) -> None:
    line = "torch 2.17.1 is newer than 2.15, the newest that parallel3d was tried with"
    assert pool.run(2, said, "2.17.1") == [[line], []]
    assert pool.run(2, said, "2.15.2") == [[], []]


def test_an_older_torch_is_refused_by_every_rank(pool: Pool) -> None:
    (first,), (second,) = pool.run(2, said, "2.10.0")
    assert first == second and first.startswith("torch 2.10.0 is older than 2.11")
