"""Tests that the file of Megatron-LM's flags fits the keys."""

from __future__ import annotations

from parallel3d.config.fields import all_keys, megatron_flags, nearest_key
from parallel3d.run_config import Config


def test_every_row_is_of_a_key_and_has_flags() -> None:
    rows = megatron_flags()
    assert set(rows) <= set(all_keys(Config))
    for name, row in rows.items():
        assert row.flags, name
        assert all(flag.startswith("--") and flag.strip(",") == flag for flag in row.flags), name


def test_no_flag_has_two_keys() -> None:
    flags = [flag for row in megatron_flags().values() for flag in row.flags]
    assert sorted(flags) == sorted(set(flags))


def test_a_flag_leads_to_its_key() -> None:
    for name, row in megatron_flags().items():
        for flag in row.flags:
            assert nearest_key(flag, Config) == name
