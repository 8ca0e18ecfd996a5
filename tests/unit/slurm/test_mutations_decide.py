"""Plants known bugs of the decision: each is caught by a named rule, and by simulated jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from parallel3d.run.failure import RankFailure
from parallel3d.slurm import decide as module
from parallel3d.slurm import evidence
from parallel3d.slurm.decide import Decision, Inputs, decide
from parallel3d.slurm.evidence import NodeFinding, evidence_of, node_of
from tests.unit.slurm import test_decide, test_decide_histories, test_evidence
from tests.unit.slurm.simulated_cluster import Job

pytestmark = pytest.mark.nightly

JOBS = 400
SYSTEM_ERROR = "DistBackendError: NCCL error: unhandled system error"


def deciding(change: Callable[[Inputs, Decision], Decision]) -> Iterator[None]:
    """Replaces decisions by the result of `change`."""

    def changed(inputs: Inputs) -> Decision:
        return change(inputs, decide(inputs))

    with ExitStack() as stack:
        for user in (test_decide, test_decide_histories):
            stack.enter_context(patch.object(user, "decide", changed))
        yield


def judging(change: Callable[[RankFailure, Any, NodeFinding], NodeFinding]) -> Iterator[None]:
    """Replaces what failures say about nodes by the result of `change`."""

    def changed(cause: RankFailure, nodes: Any, previous: RankFailure | None = None) -> NodeFinding:
        return change(cause, nodes, evidence_of(cause, nodes, previous))

    with (
        patch.object(module, "evidence_of", changed),
        patch.object(test_evidence, "evidence_of", changed),
    ):
        yield


@contextmanager
def an_echo_is_a_strike() -> Iterator[None]:
    """A rank whose connection was closed is taken for the cause."""
    yield from judging(
        lambda cause, nodes, found: (
            NodeFinding("strike", node_of(cause.host, nodes)) if cause.is_echo else found
        )
    )


@contextmanager
def a_full_disk_is_a_strike() -> Iterator[None]:
    """The errors that all nodes have are looked for last."""
    with patch.dict(evidence.SHARED, clear=True):
        yield


@contextmanager
def the_same_error_elsewhere_is_a_strike() -> Iterator[None]:
    """The start before the last one is forgotten."""

    def changed(cause: RankFailure, nodes: Any, previous: RankFailure | None = None) -> NodeFinding:
        return evidence_of(cause, nodes)

    with patch.object(module, "evidence_of", changed):
        yield


@contextmanager
def peers_of_a_lost_node_have_strikes() -> Iterator[None]:
    """An error of NCCL always counts."""
    yield from judging(lambda cause, nodes, found: replace(found, is_collective=False))


@contextmanager
def the_list_is_lost_at_a_requeue() -> Iterator[None]:
    """A requeue asks for no other nodes."""
    yield from deciding(lambda inputs, found: replace(found, exclude=()))


@contextmanager
def a_new_allocation_knows_no_history() -> Iterator[None]:
    """Before the first start, evidence of earlier jobs does not count."""

    def changed(inputs: Inputs) -> Decision:
        return decide(inputs if inputs.ended is not None else replace(inputs, history={}))

    with (
        patch.object(test_decide, "decide", changed),
        patch.object(test_decide_histories, "decide", changed),
    ):
        yield


@contextmanager
def a_replacement_resets_the_count() -> Iterator[None]:
    """A start with a spare is taken for the first one."""
    yield from deciding(
        lambda inputs, found: replace(found, starts_in_row=1) if found.how == "replace" else found
    )


@contextmanager
def spares_are_counted_into_dp() -> Iterator[None]:
    """All nodes of the allocation get ranks."""
    yield from deciding(
        lambda inputs, found: replace(found, nodes=inputs.nodes) if found.how == "first" else found
    )


@contextmanager
def a_dead_node_is_given_up_after_slurm_has_noticed() -> Iterator[None]:
    """Only Slurm's word for a node counts."""
    yield from deciding(
        lambda inputs, found: replace(
            found,
            release=tuple(n for n in found.release if "DOWN" in inputs.states.get(n, "").upper()),
        )
    )


@contextmanager
def the_batch_host_is_given_up() -> Iterator[None]:
    """The batch host is a node as others."""

    def change(inputs: Inputs, found: Decision) -> Decision:
        silent = inputs.answers is not None and inputs.batch_host not in inputs.answers
        if found.action != "run" or not silent or not inputs.limits.may_release:
            return found
        return replace(found, release=(inputs.batch_host, *found.release))

    yield from deciding(change)


@contextmanager
def a_failed_self_test_does_not_count() -> Iterator[None]:
    """A node that answers is used, whatever it says."""

    def changed(inputs: Inputs) -> Decision:
        answers = {node: replace(found, ok=True) for node, found in (inputs.answers or {}).items()}
        return decide(replace(inputs, answers=answers if inputs.answers is not None else None))

    with (
        patch.object(test_decide, "decide", changed),
        patch.object(test_decide_histories, "decide", changed),
    ):
        yield


@contextmanager
def one_strike_leaves_a_node_out() -> Iterator[None]:
    with patch.object(module, "STRIKES", 1):
        yield


@contextmanager
def evidence_never_expires() -> Iterator[None]:
    with patch.object(module, "unexpired", lambda history, now, days: dict(history)):
        yield


@contextmanager
def a_requeue_asks_again_and_again() -> Iterator[None]:
    """Each requeue is taken for the first."""

    def changed(inputs: Inputs) -> Decision:
        return decide(replace(inputs, requeued_for=()))

    with (
        patch.object(test_decide, "decide", changed),
        patch.object(test_decide_histories, "decide", changed),
    ):
        yield


ROOT_CAUSE = "strikes are those of the root cause alone"
# The bug, a test of a rule with its arguments, and what a simulated job's check says.
PLANTED: list[tuple[Callable, Callable, tuple, str]] = [
    (an_echo_is_a_strike, test_evidence.test_an_echo_is_never_a_strike, (), ROOT_CAUSE),
    (
        a_full_disk_is_a_strike,
        test_evidence.test_what_other_nodes_would_have_too_is_never_a_strike,
        (f"{SYSTEM_ERROR}: No space left on device", "a full or failing disk"),
        ROOT_CAUSE,
    ),
    (
        the_same_error_elsewhere_is_a_strike,
        test_decide.test_the_same_device_error_at_the_same_step_of_another_node_stops_the_run,
        (),
        ROOT_CAUSE,
    ),
    (
        peers_of_a_lost_node_have_strikes,
        test_decide.test_peers_of_a_lost_node_have_no_strike_for_their_nccl,
        (),
        ROOT_CAUSE,
    ),
    (
        the_list_is_lost_at_a_requeue,
        test_decide.test_the_job_is_queued_again_without_the_dead_node,
        (),
        "a requeue does not exclude what is out",
    ),
    (
        a_new_allocation_knows_no_history,
        test_decide.test_a_node_that_was_left_out_before_is_left_out_by_a_later_job,
        (),
        "an excluded node is listed",
    ),
    (
        a_replacement_resets_the_count,
        test_decide.test_a_replacement_after_a_nodes_death_is_not_counted_as_a_restart,
        (),
        "a start is not counted",
    ),
    (
        spares_are_counted_into_dp,
        test_decide.test_the_first_start_takes_the_first_nodes_and_keeps_spares,
        (),
        "the largest layout that fits",
    ),
    (
        a_dead_node_is_given_up_after_slurm_has_noticed,
        test_decide.test_a_silent_node_is_replaced_and_given_up_at_once,
        (),
        "a dead node is not given up at once",
    ),
    (
        the_batch_host_is_given_up,
        test_decide.test_the_batch_host_is_never_given_up,
        (),
        "the batch host is given up",
    ),
    (
        a_failed_self_test_does_not_count,
        test_decide.test_a_bad_spare_is_found_before_the_first_step,
        (),
        "each lost node is excluded",
    ),
    (
        one_strike_leaves_a_node_out,
        test_decide.test_the_first_strike_keeps_the_node_and_the_second_leaves_it_out,
        (),
        "counted as hardware",
    ),
    (
        evidence_never_expires,
        test_decide.test_evidence_expires,
        (),
        "a requeue does not exclude what is out",
    ),
    (
        a_requeue_asks_again_and_again,
        test_decide.test_a_node_is_asked_away_once_and_then_used_if_it_answers,
        (),
        "asked twice for the same nodes",
    ),
]
NAMES = [planted.__name__ for planted, *_ in PLANTED]


@pytest.mark.parametrize(("planted", "rule", "arguments", "said"), PLANTED, ids=NAMES)
def test_a_planted_bug_breaks_its_rule(
    planted: Callable, rule: Callable, arguments: tuple, said: str
) -> None:
    rule(*arguments)
    with planted(), pytest.raises(AssertionError):
        rule(*arguments)


@pytest.mark.parametrize(("planted", "rule", "arguments", "said"), PLANTED, ids=NAMES)
def test_a_planted_bug_is_found_in_simulated_jobs(
    planted: Callable, rule: Callable, arguments: tuple, said: str
) -> None:
    found: set[str] = set()
    with planted():
        for seed in range(JOBS):
            try:
                Job(seed, test_decide_histories.decide).run()
            except AssertionError as error:
                found.add(str(error).partition("\n")[0].partition(": ")[2])
                if said in found:
                    return
    raise AssertionError(f"the bug is found by {found}, not by: {said}")
