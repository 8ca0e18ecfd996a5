"""Tests numbers and times as text."""

from __future__ import annotations

import math

import pytest

from parallel3d.text import duration, percent, si


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.5, "0.50 "),
        (42.0, "42.0 "),
        (999.6, "1.00 k"),
        (12_345, "12.3 k"),
        (999_960, "1.00 M"),
        (989.4e12, "989 T"),
        (2.25e15, "2.25 P"),
        (math.nan, "nan "),
    ],
)
def test_si_shows_three_digits_and_a_prefix(number: float, text: str) -> None:
    assert si(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7, "0:07"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03"), (273_845, "3d 04:04:05")],
)
def test_duration_reads_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_an_unknown_duration_is_not_a_number_on_the_screen() -> None:
    assert duration(math.nan) == "-:--"


def test_percent_keeps_three_digits() -> None:
    assert [percent(x) for x in (0.00123, 0.0567, 0.341)] == ["0.12 %", "5.67 %", "34.1 %"]
