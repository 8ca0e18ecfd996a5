"""Tests which last beats make a node dead or a rank gone."""

from __future__ import annotations

import pytest

from parallel3d.slurm.verdict import BeatLimits, LastBeat, RankReport, silent_nodes, verdict

NOW = 1000.0
LIMITS = BeatLimits()


def beat(
    silent: float = 1.0,
    still: float = 1.0,
    median: float = 2.0,
    state: str = "stepping",
    letter: str = "S",
    steps: int = 10,
) -> LastBeat:
    """A node's beat of `silent` seconds ago; its last step ended `still` seconds ago."""
    ranks = [
        RankReport(rank, letter, state, steps, still - silent, median)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    return LastBeat.of(NOW - silent, ranks)


def dead(*beats: LastBeat | None, since: float = 0.0, used: int | None = None) -> list[int]:
    """Returns the numbers of the nodes that are dead."""
    names = [str(number) for number in range(len(beats))]
    known = {n: b for n, b in zip(names, beats, strict=True) if b is not None}
    found = verdict(NOW, known, names[:used], since, LIMITS)
    assert found is None or not found.gone
    return [int(node) for node in found.dead] if found else []


def test_a_node_is_dead_if_it_is_silent_and_no_step_ends() -> None:
    assert dead(beat(30, 31), beat(1, 31)) == [0]
    assert dead(beat(30, 33), beat(4, 33)) == []  # a step may have ended in the last 4 s
    assert dead(beat(29, 31), beat(1, 31)) == []
    assert dead(beat(30, 31), beat(1, 29)) == []


def test_silence_alone_is_no_verdict() -> None:
    assert dead(beat(500, 500), beat(1, 2)) == []


def test_steps_that_stand_still_alone_are_no_verdict() -> None:
    assert dead(beat(1, 900), beat(4, 900)) == []


def test_a_step_may_take_half_more_than_the_median_and_ten_seconds() -> None:
    assert dead(beat(68, 69, median=40), beat(1, 69, median=40)) == []
    assert dead(beat(68, 72, median=40), beat(1, 72, median=40)) == [0]


@pytest.mark.parametrize("slow", [{"state": "paused"}, {"median": 0.0}])
@pytest.mark.parametrize("is_silent_one", [True, False])
def test_a_paused_rank_or_one_without_a_pace_has_two_minutes(
    slow: dict[str, object], is_silent_one: bool
) -> None:
    def both(silent: float) -> list[int]:
        first = beat(silent, silent + 1, **(slow if is_silent_one else {}))  # type: ignore[arg-type]
        other = beat(1, silent + 1, **({} if is_silent_one else slow))  # type: ignore[arg-type]
        return dead(first, other)

    assert both(119) == []
    assert both(120) == [0]


def test_a_pause_is_over_when_others_have_ended_two_steps_more() -> None:
    """The last word of a node may be older than its first step, and then it was lost."""
    assert dead(beat(31, 32, state="paused", steps=0), beat(1, 32, steps=1)) == []
    assert dead(beat(31, 32, state="paused", steps=0), beat(1, 32, steps=2)) == [0]
    assert dead(beat(31, 32, median=0.0, steps=1), beat(1, 32, steps=13)) == [0]


def test_a_node_whose_ranks_are_done_may_be_silent() -> None:
    assert dead(beat(300, 400, state="done"), beat(1, 400)) == []


def test_a_node_that_never_spoke_counts_from_the_ranks_start() -> None:
    assert dead(None, beat(1, 119, median=0), since=NOW - 119) == []
    assert dead(None, beat(1, 121, median=0), since=NOW - 121) == [0]


def test_the_time_before_the_ranks_start_counts_for_nothing() -> None:
    assert dead(beat(500, 500), beat(1, 100), since=NOW - 10) == []


def test_if_nobody_speaks_the_own_link_may_be_cut() -> None:
    assert dead(beat(32, 33), beat(28, 33)) == []
    assert dead(beat(100, 101), beat(99, 101)) == []
    assert dead(beat(121, 122), beat(120, 122)) == [0, 1]


def test_a_node_without_ranks_has_no_part_in_it() -> None:
    assert dead(beat(40, 40), beat(1, 40), beat(1, 1), used=2) == [0]
    assert dead(beat(1, 40), beat(1, 40), beat(300, 300), used=2) == []
    heard = {"a": LastBeat(NOW - 30), "b": LastBeat(NOW - 29)}
    assert silent_nodes(NOW, heard, ["a", "b", "never"], LIMITS) == {"a"}


@pytest.mark.parametrize("letter", ["", "Z", "X"])
def test_a_rank_without_a_process_is_gone_unless_it_is_done(letter: str) -> None:
    beats = {"a": beat(), "b": beat(letter=letter)}
    found = verdict(NOW, beats, ["a", "b"], 0.0, LIMITS)
    assert found is not None and found.gone == (("b", 0), ("b", 1))
    beats["b"] = beat(letter=letter, state="done")
    assert verdict(NOW, beats, ["a", "b"], 0.0, LIMITS) is None


@pytest.mark.parametrize("letter", ["T", "D", "R", "t"])
def test_a_stopped_rank_is_not_gone(letter: str) -> None:
    assert verdict(NOW, {"a": beat(letter=letter)}, ["a"], 0.0, LIMITS) is None


def test_a_verdict_says_when_the_last_step_ended() -> None:
    found = verdict(NOW, {"a": beat(40, 45), "b": beat(1, 42)}, ["a", "b"], 0.0, LIMITS)
    assert found is not None and found.failed_at == NOW - 42
    said = "node a: no word for 40 s, and no step ended anywhere for 42 s"
    assert found.sentence() == said


def test_trials_run_with_shorter_limits() -> None:
    fast = LIMITS.faster(10)
    assert (fast.silent, fast.paused, fast.without_step(0.4)) == (3, 12, 3)
    assert fast.without_step(4) == 7
    assert fast.connect == LIMITS.connect
