"""Tests that the file of other trainers' names fits the keys."""

from __future__ import annotations

from parallel3d.config.fields import all_keys, nearest_key, other_names, unknown_key
from parallel3d.run_config import Config


def test_every_row_is_of_a_key_and_has_flags() -> None:
    rows = other_names()
    assert set(rows) <= set(all_keys(Config))
    for name, row in rows.items():
        assert row.flags or row.names, name
        assert all(flag.startswith("--") and flag.strip(",") == flag for flag in row.flags), name


def test_no_flag_has_two_keys() -> None:
    rows = other_names().values()
    flags = [flag for row in rows for flag in (*row.flags, *row.names)]
    assert sorted(flags) == sorted(set(flags))


def test_a_flag_leads_to_its_key() -> None:
    for name, row in other_names().items():
        for flag in row.flags:
            assert nearest_key(flag, Config) == name


def test_a_name_of_another_trainer_leads_to_its_key_with_what_differs() -> None:
    for name, row in other_names().items():
        for theirs, differs in row.names.items():
            said = unknown_key(theirs, Config, "x")
            typed = all_keys(Config)[name].typed
            more = f" ({differs})" if differs else ""
            assert said.endswith(f"the nearest is {typed}{more}."), said
    said = unknown_key("gradient_accumulation_steps", Config, 8)
    assert "global_batch_size (it is global_batch_size divided by" in said
    assert "the nearest is checkpoint.every." in unknown_key("save_steps", Config, 10)
