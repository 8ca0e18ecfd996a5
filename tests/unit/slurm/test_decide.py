"""Tests each rule of the decision after a start's end, and its sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from parallel3d.metrics.recovery_log import RecoveryLine
from parallel3d.run.failure import RankFailure, of_node
from parallel3d.slurm.decide import (
    DAY_S,
    Decision,
    Evidence,
    History,
    Inputs,
    Limits,
    ProbeAnswer,
    SmallerLayout,
    StartEnd,
    decide,
    line_of,
    merged,
    of_end,
    replayed,
)

NOW = 1_800_000_000.0
NODES = tuple(f"node{n}" for n in range(1, 7))  # four are needed, two are spares
USED = NODES[:4]
OK = {node: ProbeAnswer(True) for node in NODES}
BOOM = RankFailure(2, "pp 0, dp 1", "node3", "train step 12", "KeyError: 'boom'", NOW - 9)
DEVICE = "AcceleratorError: CUDA error: unspecified launch failure"
SILENT = of_node("node3", "has sent no beat for 31 s", NOW - 9)


def device(host: str = "node3", **more: Any) -> RankFailure:
    return replace(BOOM, host=host, error=DEVICE, **more)


def before(**more: Any) -> Inputs:
    """Returns the inputs before the first start of four nodes and two spares."""
    made = Inputs(1, NOW, "node1", NODES, 4, Limits(max_restarts=3, spares=2), answers=OK)
    return replace(made, **more)


def after(ended: StartEnd | RankFailure | None, **more: Any) -> Inputs:
    """Returns the inputs after the end of a start on the first four nodes."""
    end = StartEnd(1, cause=ended) if not isinstance(ended, StartEnd) else ended
    return replace(before(start=2, used=USED, starts_in_row=1, ended=end), **more)


def without(*nodes: str) -> dict[str, ProbeAnswer]:
    return {node: answer for node, answer in OK.items() if node not in nodes}


def past(*entries: bool, days: float = 0.1) -> tuple[Evidence, ...]:
    """Returns earlier entries of a node, decisive or not."""
    return tuple(Evidence("was bad", NOW - days * DAY_S, 1, decisive) for decisive in entries)


OUT, STRIKE = past(True), past(False)


# The first start


def test_the_first_start_takes_the_first_nodes_and_keeps_spares() -> None:
    found = decide(before())
    assert (found.action, found.how, found.nodes) == ("run", "first", USED)
    assert (found.starts_in_row, found.replaced_in_row) == (1, 0)
    assert found.sentence == "starting on 4 nodes"
    assert (found.release, found.history, found.words) == ((), {}, ())


def test_a_bad_spare_is_found_before_the_first_step() -> None:
    answers = {**without("node5"), "node6": ProbeAnswer(False, "GPU 3: a wrong product")}
    found = decide(before(answers=answers))
    assert found.nodes == USED
    assert found.release == ("node5",), "Slurm would end the job for it"
    assert found.sentence == (
        "node5 does not answer; node6 failed its self-test (GPU 3: a wrong product); "
        "starting on 4 nodes"
    )
    assert [(node, e.evidence, e.decisive) for node, (e,) in found.history.items()] == [
        ("node5", "does not answer", True),
        ("node6", "failed its self-test (GPU 3: a wrong product)", True),
    ]


def test_a_node_that_was_left_out_before_is_left_out_by_a_later_job() -> None:
    found = decide(before(history={"node2": OUT, "node4": past(False, False)}))
    assert found.nodes == ("node1", "node3", "node5", "node6")


def test_evidence_expires() -> None:
    history = {"node2": past(True, days=7.1), "node4": (*past(False, days=7.1), *STRIKE)}
    assert decide(before(history=history)).nodes == USED
    history = {"node2": past(True, days=6.9), "node4": (*past(False, days=6.9), *STRIKE)}
    assert not {"node2", "node4"} & {*decide(before(history=history)).nodes}


def test_a_job_that_asks_no_node_starts_on_all() -> None:
    one = replace(before(answers=None), nodes=("node1",), needed=1, limits=Limits(3))
    assert decide(one).nodes == ("node1",)
    failed = replace(one, used=("node1",), ended=StartEnd(1), starts_in_row=1)
    assert decide(failed).sentence == "the ranks ended with code 1; starting again"


# Ends that no node has caused


def test_success_and_requeue_after_a_save() -> None:
    done = decide(after(StartEnd(0)))
    assert (done.action, done.code, done.name) == ("done", 0, "done")
    saved = after(StartEnd(0, saved_and_asked=True, asked="SIGUSR1"), history={"node3": OUT})
    found = decide(replace(saved, answers=None))
    assert (found.action, found.code, found.exclude) == ("requeue", 0, ("node3",))
    assert found.sentence == (
        "a signal stopped the run and it has saved; the job is queued again without node3"
    )


def test_a_signal_before_a_save_queues_the_job_again_with_its_code() -> None:
    assert decide(after(StartEnd(1, asked="SIGTERM"))).sentence == (
        "SIGTERM came and the ranks ended with code 1; the job is queued again"
    )
    found = decide(after(StartEnd(138)))
    assert (found.action, found.code) == ("requeue", 138), "128 + SIGUSR1"


def test_wrong_input_is_final() -> None:
    """The ranks' own word always is, with a record or without one, as before they have met."""
    found = decide(after(StartEnd(2, first=True)))
    assert (found.action, found.code) == ("stop", 2)
    user = replace(BOOM, kind="user", error="data.path=web does not exist")
    found = decide(after(StartEnd(2, cause=user)))
    assert (found.action, found.code) == ("stop", 2)
    assert decide(after(StartEnd(2))).action == "stop"
    assert decide(after(StartEnd(2, cause=BOOM))).how == "same"


def test_a_decision_of_the_ranks_is_final() -> None:
    found = decide(after(replace(BOOM, kind="decided")))
    assert (found.action, found.code, found.history) == ("stop", 1, {})


@pytest.mark.parametrize("in_row", (3, 4))
def test_starts_in_a_row_without_a_checkpoint_end_the_job(in_row: int) -> None:
    found = decide(after(BOOM, starts_in_row=in_row))
    assert (found.action == "run") == (in_row == 3)
    if in_row == 4:
        assert found.code == 1
        assert found.sentence.endswith(
            "4 starts in a row came to no new checkpoint; not started again"
        )
    first = decide(before(starts_in_row=in_row))
    assert (first.action == "run") == (in_row == 3), "a requeue does not begin the count anew"


def test_a_replacement_after_a_nodes_death_is_not_counted_as_a_restart() -> None:
    dead = after(SILENT, answers=without("node3"), starts_in_row=4)
    found = decide(dead)
    assert (found.how, found.starts_in_row, found.replaced_in_row) == ("replace", 5, 1)
    assert decide(replace(dead, starts_in_row=5)).action == "stop"
    assert decide(replace(dead, starts_in_row=6, replaced_in_row=2)).action == "stop"
    spent = replace(dead, starts_in_row=3, replaced_in_row=2)
    assert decide(spent).replaced_in_row == 2, "as often as there are spares"


def test_nodes_are_asked_before_the_count_ends_the_job() -> None:
    """A dead node would allow one more start."""
    assert of_end(after(BOOM, starts_in_row=9, answers=None)) is None
    assert of_end(before()) is None
    for ended in (
        StartEnd(0),
        StartEnd(138),
        StartEnd(2, first=True),
        StartEnd(0, saved_and_asked=True),
    ):
        assert of_end(after(ended)) == decide(after(ended))


# Evidence against nodes


def test_a_silent_node_is_replaced_and_given_up_at_once() -> None:
    found = decide(after(SILENT, answers=without("node3")))
    assert (found.how, found.release) == ("replace", ("node3",))
    assert found.nodes == ("node1", "node2", "node4", "node5")
    assert found.sentence == (
        "node3 has sent no beat for 31 s; node3 does not answer; node5 takes the place of node3"
    )
    (entry,) = found.history["node3"]
    assert (entry.decisive, entry.time, entry.start) == (True, NOW, 2)


def test_a_job_that_may_not_give_up_its_silent_node_is_queued_again() -> None:
    """Otherwise Slurm ends it within minutes, and gives it the same nodes again."""
    limits = Limits(max_restarts=3, spares=2, may_release=False)
    dead = after(SILENT, answers=without("node3"), limits=limits)
    found = decide(dead)
    assert (found.action, found.exclude, found.release) == ("requeue", ("node3",), ())
    assert "; Slurm does not let the job give up node3; the job is queued again" in found.sentence
    new = replace(dead, ended=None, used=())
    assert decide(new).action == "requeue"
    found = decide(replace(new, requeued_for=("node3",)))
    assert (found.how, found.release) == ("first", ()), "asked once"
    bad = replace(dead, answers={**OK, "node3": ProbeAnswer(False, "GPU 3")})
    assert decide(bad).how == "replace", "Slurm does not miss a node that answers"


def test_the_batch_host_is_never_given_up() -> None:
    found = decide(after(SILENT, answers=without("node1", "node3")))
    assert found.release == ("node3",)
    assert found.nodes == ("node2", "node4", "node5", "node6"), "its GPUs are left out"


@pytest.mark.parametrize("state", ("DOWN", "down*", "MIXED+DRAIN", "DRAINING", "drng", "FAILING"))
def test_a_node_that_slurm_no_longer_uses_is_replaced(state: str) -> None:
    found = decide(after(BOOM, states={"node2": state, "node1": "MIXED"}))
    assert found.nodes == ("node1", "node3", "node4", "node5")
    assert found.release == (("node2",) if "DOWN" in state.upper() else ())
    assert f"node2 is {state.upper()} in Slurm" in found.sentence


@pytest.mark.parametrize("state", ("MIXED+CLOUD+POWER_DOWN", "ALLOCATED+POWERING_UP"))
def test_a_node_that_will_be_powered_down_after_the_job_is_in_use(state: str) -> None:
    found = decide(after(BOOM, states={"node2": state}))
    assert (found.how, found.release) == ("same", ())


def test_a_node_that_slurm_took_away_is_replaced() -> None:
    nodes = tuple(node for node in NODES if node != "node3")
    found = decide(after(None, nodes=nodes, answers=without("node3")))
    assert found.nodes == ("node1", "node2", "node4", "node5")
    assert found.replaced_in_row == 1
    assert "node3 was taken out of the job by Slurm" in found.sentence


def test_the_first_strike_keeps_the_node_and_the_second_leaves_it_out() -> None:
    found = decide(after(device()))
    assert (found.how, found.nodes) == ("same", USED)
    assert "this is strike 1 against node3; starting again on the same 4 nodes" in found.sentence
    (entry,) = found.history["node3"]
    assert not entry.decisive
    assert entry.evidence == f"had a device error ({DEVICE})"
    found = decide(after(device(), history={"node3": STRIKE}))
    assert found.nodes == ("node1", "node2", "node4", "node5")
    assert found.release == (), "it answers, and Slurm has nothing against it"
    assert found.replaced_in_row == 1


def test_strikes_leave_no_node_out_without_a_spare() -> None:
    four = after(device(), nodes=USED, history={"node3": STRIKE})
    found = decide(replace(four, limits=Limits(3)))
    assert (found.how, found.nodes) == ("same", USED)
    assert "no spare is left for node3" in found.sentence


def test_of_two_nodes_with_strikes_the_one_with_fewer_is_used() -> None:
    five = after(device("node2"), nodes=NODES[:5], limits=Limits(3, spares=1))
    history = {"node2": past(False, False), "node3": past(False, False)}
    assert decide(replace(five, history=history)).nodes == ("node1", "node3", "node4", "node5")


def test_a_node_that_was_called_dead_but_answers_has_a_strike() -> None:
    found = decide(after(StartEnd(1, cause=SILENT, dead=("node3", "node4"))))
    assert list(found.history) == ["node3", "node4"]
    assert not any(entry.decisive for (entry,) in found.history.values())
    assert found.how == "same"


@pytest.mark.parametrize("echo", ("Connection closed by peer [10.0.0.2]:7", "boom"))
def test_a_node_that_was_called_dead_after_the_failure_has_none(echo: str) -> None:
    cause = replace(BOOM, error=f"RuntimeError: {echo}")
    found = decide(after(StartEnd(1, cause=cause, dead=("node4",))))
    assert list(found.history) == (["node4"] if echo != "boom" else [])


def test_peers_of_a_lost_node_have_no_strike_for_their_nccl() -> None:
    nccl = replace(BOOM, host="node2", error="DistBackendError: NCCL error: internal error")
    assert list(decide(after(nccl)).history) == ["node2"]
    found = decide(after(nccl, answers=without("node3")))
    assert list(found.history) == ["node3"]
    assert list(decide(after(nccl, answers=without("node6"))).history) == ["node6", "node2"], (
        "a spare has no peers"
    )


def test_the_same_device_error_at_the_same_step_of_another_node_stops_the_run() -> None:
    found = decide(after(device(), previous=device("node2")))
    assert (found.action, found.code, found.history) == ("stop", 1, {})
    assert found.sentence.endswith(
        "the same error at the same step as in the start before, so it would come again"
    )
    other = device("node2", phase="train step 11")
    assert decide(after(device(), previous=other)).history.keys() == {"node3"}
    assert decide(after(device(), previous=device())).history.keys() == {"node3"}, "a lemon's"


def test_the_same_unknown_error_at_the_same_step_stops_the_run() -> None:
    assert decide(after(BOOM)).how == "same"
    assert decide(after(BOOM, previous=BOOM)).action == "stop"
    start = replace(BOOM, phase="rendezvous with the other ranks")
    assert decide(after(start, previous=start)).how == "same", "it may be the network's"


def test_a_signal_that_kills_on_two_nodes_without_a_checkpoint_is_no_strike() -> None:
    segv = replace(BOOM, kind="killed", phase="", error="was killed by SIGSEGV")
    twice = after(segv, previous=replace(segv, host="node2"))
    assert decide(twice).history == {}
    assert decide(twice).how == "same"
    assert decide(replace(twice, starts_in_row=0)).history.keys() == {"node3"}


def test_many_lost_nodes_at_once_stop_the_run_and_are_not_kept() -> None:
    assert decide(after(SILENT, answers=without(*NODES[3:]))).action == "requeue"
    found = decide(after(SILENT, answers=without(*NODES[2:])))
    assert (found.action, found.code, found.history) == ("stop", 1, {})
    assert found.sentence == (
        "node3 has sent no beat for 31 s; node3, node4 and 2 more do not answer; "
        "4 of 6 nodes would be left out at once: it is not the nodes"
    )
    known: History = {"node5": OUT, "node6": OUT}
    half = after(SILENT, answers=without("node3", "node4", "node5", "node6"), history=known)
    assert decide(half).action == "requeue", "two of the other four"


def test_a_job_whose_nodes_are_drained_is_queued_again() -> None:
    drained = dict.fromkeys(NODES[2:], "MIXED+DRAIN")
    found = decide(after(BOOM, states=drained))
    assert (found.action, found.exclude) == ("requeue", NODES[2:])
    assert decide(after(BOOM, states=drained, answers=without("node1"))).action == "requeue"
    assert decide(before(states=drained)).action == "requeue"


def test_a_job_whose_nodes_hardly_answer_at_first_starts_anyway() -> None:
    """A slow disk must not end a job that has waited in the queue; nothing has failed yet."""
    found = decide(before(answers=without(*NODES[2:])))
    assert (found.how, found.nodes, found.history, found.release) == ("first", USED, {}, ())
    assert found.sentence == (
        "4 of 6 nodes do not answer or fail their self-test, and nothing has failed yet; "
        "starting on 4 nodes"
    )
    failed = dict.fromkeys(NODES, ProbeAnswer(False, "1 GPU of 8 can be used"))
    assert decide(before(answers=failed)).how == "first"
    assert decide(before(answers=without(*NODES[2:]), starts_in_row=4)).action == "stop"


# Too few nodes


def few(*dead: str, **more: Any) -> Inputs:
    """Returns the inputs of a job without spares, some of whose nodes are dead."""
    four = after(SILENT, nodes=USED, answers=without(*dead), limits=Limits(3))
    return replace(four, **more)


def test_the_job_is_queued_again_without_the_dead_node() -> None:
    found = decide(few("node3", history={"node9": OUT}))
    assert (found.action, found.code, found.exclude) == ("requeue", 1, ("node3", "node9"))
    assert found.sentence == (
        "node3 has sent no beat for 31 s; node3 does not answer; 3 of the 4 nodes that the layout "
        "needs can be used; the job is queued again without node3 and node9"
    )
    assert found.history.keys() == {"node3"}
    assert (found.starts_in_row, found.replaced_in_row) == (1, 0)


def test_a_smaller_layout_is_used_if_it_is_allowed() -> None:
    limits = Limits(3, smaller=(SmallerLayout(2, ("dp=2",)), SmallerLayout(1, ("dp=1",))))
    found = decide(few("node3", limits=limits))
    assert (found.how, found.nodes, found.words) == ("smaller", ("node1", "node2"), ("dp=2",))
    assert found.sentence.endswith(
        "starting on 2 nodes with dp=2 until the job is queued again, with the same samples, and "
        "losses that are equal to rounding"
    )
    again = few("node3", limits=limits, used=("node1", "node2"), history={"node3": OUT})
    again = replace(again, ended=StartEnd(1, cause=replace(BOOM, host="node1")))
    found = decide(again)
    assert (found.how, found.nodes, found.words) == ("same", ("node1", "node2"), ("dp=2",))
    assert found.sentence.endswith("starting again on the same 2 nodes with dp=2")


def test_a_smaller_layout_takes_no_node_with_two_strikes_if_it_need_not() -> None:
    limits = Limits(3, smaller=(SmallerLayout(2, ("dp=2",)),))
    dead = few("node1", "node4", limits=limits, history={"node2": past(False, False)})
    assert decide(replace(dead, nodes=NODES[:5], answers=without("node1", "node4"))).nodes == (
        "node3",
        "node5",
    )


def test_a_node_is_asked_away_once_and_then_used_if_it_answers() -> None:
    new = before(nodes=USED, limits=Limits(3), history={"node3": OUT})
    assert (decide(new).action, decide(new).exclude) == ("requeue", ("node3",))
    found = decide(replace(new, requeued_for=("node3",)))
    assert (found.action, found.nodes) == ("run", USED)
    assert found.sentence == (
        "node3 is used although it was left out, as there is no other; starting on 4 nodes"
    )
    two = replace(new, requeued_for=("node3",), history={"node3": OUT, "node4": OUT})
    assert decide(two).exclude == ("node3", "node4"), "node4 was not asked away yet"


def test_a_dead_node_that_slurm_gives_again_ends_the_job() -> None:
    new = before(nodes=USED, limits=Limits(3), answers=without("node3"), history={"node3": OUT})
    found = decide(replace(new, requeued_for=("node3",)))
    assert (found.action, found.code) == ("stop", 1)
    assert "although the job was queued again without the others" in found.sentence
    ran = few("node3", requeued_for=("node3",), history={"node3": OUT})
    assert decide(ran).action == "requeue", "a start came between, which counts"


# The choice of nodes


def test_the_nearest_spare_takes_the_place_of_a_node() -> None:
    places = {"node3": "core.rack2.node3", "node5": "core.rack1.node5"}
    dead = after(SILENT, answers=without("node3"), places=places)
    assert "node5" in decide(dead).nodes
    near = replace(dead, places={**places, "node6": "core.rack2.node6"})
    assert decide(near).nodes == ("node1", "node2", "node4", "node6")
    two = replace(near, answers=without("node3", "node2"))
    assert decide(two).nodes == ("node1", "node4", "node5", "node6")


def test_nodes_of_the_last_start_are_kept() -> None:
    used = ("node2", "node3", "node5", "node6")
    found = decide(after(SILENT, used=used, answers=without("node3")))
    assert found.nodes == ("node1", "node2", "node5", "node6")


# Files


def test_inputs_and_decisions_are_the_same_after_json() -> None:
    limits = Limits(3, 2, smaller=(SmallerLayout(3, ("dp=3", "zero=1")),))
    more: dict[str, Any] = {"places": {"node1": "a.b"}, "states": {"node1": "MIXED"}}
    for made in (
        before(history={"node2": past(True, False)}, requeued_for=("node2",), **more),
        after(SILENT, answers=without("node3"), limits=limits, previous=BOOM),
        after(StartEnd(1, dead=("node3",)), answers=None),
    ):
        assert Inputs.from_json(json.loads(json.dumps(made.to_json()))) == made
        found = decide(made)
        assert Decision.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_merged_histories_keep_all_strikes_and_the_newest_of_equal_evidence() -> None:
    old = {"node3": (*past(False, days=2), *past(True, days=2)), "node4": OUT}
    new = {"node3": past(True, days=1), "node5": STRIKE}
    assert merged(old, new) == {
        "node3": (*past(False, days=2), *past(True, days=1)),
        "node4": OUT,
        "node5": STRIKE,
    }
    assert merged({"node3": STRIKE}, {"node3": STRIKE}) == {"node3": STRIKE * 2}


def lines_of(*inputs: Inputs) -> list[RecoveryLine]:
    return [line_of(each, decide(each)) for each in inputs]


def test_a_line_has_the_cause_without_the_rank_of_a_dead_node() -> None:
    inputs = after(SILENT, answers=without("node3"))
    line = line_of(inputs, decide(inputs), failed_at=NOW - 40, seconds={"probe": 1.5})
    assert line.cause is not None
    assert (line.cause.kind, line.cause.host, line.cause.rank) == ("node", "node3", None)
    assert (line.decision, line.nodes) == ("replace", ("node1", "node2", "node4", "node5"))
    assert (line.failed_at, line.seconds, line.start) == (NOW - 40, {"probe": 1.5}, 2)
    assert lines_of(after(BOOM))[0].cause.rank == 2


def test_a_line_names_a_node_that_is_gone_whatever_its_peers_have_seen() -> None:
    echo = replace(BOOM, host="node1", error="RuntimeError: Connection closed by peer [::1]:7")
    diverged = replace(echo, error=f"left out all_reduce of world; {echo.error}", diverged=True)
    wrong = replace(BOOM, kind="user")
    for cause, answers, kind, host in (
        (echo, without("node3"), "node", "node3"),
        (diverged, without("node3"), "node", "node3"),
        (None, without("node3"), "node", "node3"),
        (diverged, without("node6"), "error", "node1"),  # a spare
        (echo, OK, "unknown", "node1"),
        (wrong, without("node3"), "user", "node3"),
    ):
        (line,) = lines_of(after(cause, answers=answers))
        assert line.cause is not None and (line.cause.kind, line.cause.host) == (kind, host)
    (line,) = lines_of(after(StartEnd(0)))
    assert line.cause is None and line.decision == "done"


def test_replayed_decisions_that_differ_are_said() -> None:
    same, other, damaged = lines_of(after(BOOM), after(BOOM), after(BOOM))
    other = replace(other, decision="stop", nodes=(), sentence="so it was")
    inputs = dict(damaged.inputs or {})
    del inputs["limits"]
    found = replayed([same, other, replace(damaged, inputs=inputs), replace(same, inputs=None)])
    assert [each.differs for each in found] == [False, True, True]
    assert [each.sentence() for each in found] == [
        f"start 2: same: {same.sentence}",
        f"start 2: stop: so it was; now: same: {same.sentence}",
        f"start 2: same: {same.sentence}; its inputs are of another version",
    ]


@pytest.mark.slow
def test_deciding_needs_no_torch() -> None:
    code = (
        "import sys, parallel3d.slurm.decide, parallel3d.slurm.nodes; print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "False\n", ended.stderr
