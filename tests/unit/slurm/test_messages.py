"""Tests that only signed messages of the same start, in their order, are believed."""

from __future__ import annotations

import pytest

from parallel3d.slurm.messages import LONGEST, Lines, Refusal, message, opened

SECRET = b"secret"


def test_a_message_comes_back_as_it_was_sent() -> None:
    payload = {"node": "a", "ranks": [[0, "S", 1, 3, 0.5, 0.1]]}
    line = message(SECRET, "guard", 3, 17, payload)
    assert line.endswith(b"\n")
    assert opened(SECRET, "guard", 3, line[:-1]) == (17, payload)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (message(b"other", "guard", 3, 1, {}), "signature"),
        (message(SECRET, "collector", 3, 1, {}), "signature"),
        (message(SECRET, "guard", 2, 1, {}), "start 2"),
        (message(SECRET, "guard", 3, 1, {}).replace(b"[3,1", b"[3,2"), "signature"),
        (message(SECRET, "guard", 3, 1, []), "not a message"),
        (b"\n", "signature"),
        (b"\xff\x00 {}\n", "signature"),
        (b"\xe4 \xe4\n", "signature"),
    ],
)
def test_other_messages_are_refused(line: bytes, why: str) -> None:
    with pytest.raises(Refusal, match=why):
        opened(SECRET, "guard", 3, line[:-1])


def test_lines_are_put_together_from_pieces() -> None:
    lines = Lines()
    assert list(lines.of(b"ab")) == []
    assert list(lines.of(b"c\nde\nf")) == [b"abc", b"de"]
    assert list(lines.of(b"\n")) == [b"f"]


def test_a_line_that_is_too_long_is_refused_before_it_ends() -> None:
    lines = Lines()
    with pytest.raises(Refusal, match="longer"):
        for _ in range(20):
            list(lines.of(b"x" * (LONGEST // 10)))
