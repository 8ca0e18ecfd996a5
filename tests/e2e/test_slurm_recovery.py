"""Runs slurm/train.sbatch on a real Slurm whose nodes die, fall silent or are drained.

The jobs train with one rank a node and a spare node beside them. However they are disturbed, each
ends with the weights and rows of an undisturbed run. `pytest -s` prints what the jobs decided, and
the seconds from each loss to the first new step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.e2e import rails
from tests.e2e.private_slurm import why_not
from tests.e2e.training_jobs import STEPS, Cluster, Story, TrainingJob, undisturbed

REASON = None if os.environ.get("CI") else why_not() or rails.why_not()
pytestmark = [
    pytest.mark.more,
    pytest.mark.first,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

NODES = 15


# Stories: what is done to a job, once it trains


def killed(job: TrainingJob) -> Iterator[None]:
    while not job.trains():
        yield
    job.kill_rank(job.nodes[1])
    yield from until_back(job, 2)


def crashed(job: TrainingJob) -> Iterator[None]:
    while not job.trains():
        yield
    job.crash(job.nodes[1])
    yield from until_back(job, 2)


def silent(job: TrainingJob) -> Iterator[None]:
    """The rank of the silent node is still there when its place is taken, or has been ended."""
    while not job.trains():
        yield
    job.silence(node := job.nodes[1])
    while job.rank_on(node) is not None:
        yield
    job.note("ended by its own guard")
    yield from until_back(job, 2)


def spare(job: TrainingJob) -> Iterator[None]:
    while not job.trains():
        yield
    job.crash(node := job.nodes[2])
    while node in job.nodes and not job.is_over:
        yield
    job.note("given up")
    job.release()


def second(job: TrainingJob) -> Iterator[None]:
    """The node that has replaced another dies before the ranks have met."""
    while not job.trains():
        yield
    nodes = job.nodes
    job.crash(nodes[1])
    while len(job.kinds) < 2:
        yield
    job.crash(nodes[2])
    yield from until_back(job, 2)


def drained(job: TrainingJob) -> Iterator[None]:
    while not job.trains():
        yield
    node = job.nodes[1]
    job.cluster.drain(node)
    job.kill_rank(node)
    yield from until_back(job, 2)


def struck(job: TrainingJob) -> Iterator[None]:
    """A rank of the same node crashes twice; then a signal stops the job."""
    while not job.trains():
        yield
    node = job.nodes[1]
    for strike in (1, 2):
        while not job.trains() or job.rank_on(node) is None:
            yield
        job.kill_rank(node, f"strike {strike}", signal.SIGSEGV)
        while len(job.first_steps()) < strike + 1:
            yield
    job.ask_to_stop()
    yield from until_back(job, 4)


def unguarded(job: TrainingJob) -> Iterator[None]:
    """A guard is killed while the ranks train on; the next one knows of a rank that is killed."""
    while not job.trains():
        yield
    node = job.nodes[1]
    first = job.guard_on(node)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    while job.guard_on(node) in (None, first):
        yield
    job.note("guarded again")
    job.kill_rank(node)
    yield from until_back(job, 2)


def used_up(job: TrainingJob) -> Iterator[None]:
    while not job.trains():
        yield
    job.crash(job.nodes[1])
    yield from until_back(job, 2)


def host(job: TrainingJob) -> Iterator[None]:
    while not job.trains():
        yield
    job.crash(node := job.nodes[0])
    job.cluster.slurm.down(node)  # Slurm would notice it by itself
    yield from until_back(job, 2)


def wrong(job: TrainingJob) -> Iterator[None]:
    """The data go away with a node."""
    while not job.trains():
        yield
    (job.folder / "wrong.txt").unlink()
    job.crash(job.nodes[1])
    while not job.is_over:
        yield


def until_back(job: TrainingJob, starts: int) -> Iterator[None]:
    while len(job.first_steps()) < starts and not job.is_over:
        yield
    job.release()


# As many at once as two cores can bear. Each has two ranks; the number is that of its spares.
WAVES: list[dict[Story, int]] = [
    {killed: 1, crashed: 1, silent: 1},
    {spare: 1, second: 2, drained: 1},
    {used_up: 0, host: 1, wrong: 1},
    {struck: 1, unguarded: 0},
]


@dataclass
class Told:
    """All jobs after their stories, and the run to compare with."""

    cluster: Cluster
    reference: TrainingJob
    jobs: dict[str, TrainingJob] = field(default_factory=dict)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    cwd, scratch = tmp_path_factory.mktemp("recovery"), tmp_path_factory.mktemp("scratch")
    with Cluster.up(cwd, scratch, NODES) as cluster:
        found = Told(cluster, undisturbed(cluster, 2))
        for wave in WAVES:
            tell(cluster, wave)
        found.jobs = cluster.jobs
        for job in found.jobs.values():
            print(account(job))
        yield found


def tell(cluster: Cluster, wave: dict[Story, int]) -> None:
    stories = {story.__name__: story for story in wave}
    for story, spares in wave.items():
        name, more = story.__name__, []
        if story is wrong:
            text = cluster.shell.cwd / "wrong.txt"
            text.write_text((cluster.shell.cwd / "book.txt").read_text())
            more.append(f"data.path={text}")
        if story is second:
            more.append("launch.timeout_s=20")  # until the ranks give up to meet
        cluster.submit(name, 2, spares, *more, slow_s=2.0 if story in (spare, unguarded) else 0.5)
    cluster.tell(stories, 60)
    cluster.repair_all()


def account(job: TrainingJob) -> str:
    """Returns what became of a job."""
    lines = [f"\n{job.name}: {job.now}"]
    for what in job.lost:
        back = job.back_after(what)
        lines.append(f"  {what}: first new step after {'–' if back is None else f'{back:.1f} s'}")
    for line in job.decisions:
        lines.append(f"  {line['decision']} {line['nodes']} {line['seconds']} {line['sentence']}")
    return "\n".join(lines)


def same_result(told: Told, name: str) -> None:
    job, reference = told.jobs[name], told.reference
    assert job.now is not None and job.now.state == "COMPLETED", job.output()
    assert [row[0] for row in job.rows()] == list(range(1, STEPS + 1))
    assert job.rows() == reference.rows()
    assert job.weights() == reference.weights()


@pytest.mark.parametrize("name", ["killed", "crashed", "silent", "spare", "drained"])
def test_a_disturbed_job_goes_on_in_its_place_to_the_undisturbed_result(
    told: Told, name: str
) -> None:
    same_result(told, name)
    assert told.jobs[name].now.restarts == 0, told.jobs[name].output()


def test_a_killed_rank_is_restarted_on_the_same_nodes(told: Told) -> None:
    assert told.jobs["killed"].kinds == ["first", "same", "done"]


@pytest.mark.parametrize("name", ["crashed", "silent"])
def test_a_spare_takes_the_place_of_a_lost_node(told: Told, name: str) -> None:
    job = told.jobs[name]
    assert job.kinds == ["first", "replace", "done"]
    lost = next(iter(job.lost))
    first, after, _ = job.decisions
    assert lost in first["nodes"] and lost not in after["nodes"]
    assert lost not in job.nodes  # the job has given it up


def test_the_rank_of_a_silent_node_is_ended_by_its_own_guard(told: Told) -> None:
    job = told.jobs["silent"]
    lost, ended = job.lost.values()
    assert ended - lost < 60
    assert all(not job.processes(node, "train") for node in job.lost)


def test_a_spare_that_dies_is_given_up_while_the_ranks_train_on(told: Told) -> None:
    job = told.jobs["spare"]
    assert job.kinds == ["first", "done"] and len(job.first_steps()) == 1
    assert "given up" in job.lost and next(iter(job.lost)) not in job.nodes


def test_a_job_that_can_give_up_no_second_node_is_queued_again_by_slurm(told: Told) -> None:
    """Without accounting, Slurm changes a job no more that has given up a node."""
    same_result(told, "second")
    job = told.jobs["second"]
    # Slurm may miss the node before the ranks have given up to meet.
    assert [kind for kind in job.kinds if kind != "requeue"] == [
        *("first", "replace", "first", "done")
    ], account(job)
    assert job.now.restarts == 1
    assert not set(job.decisions[-2]["nodes"]) & set(job.lost)


def test_a_drained_node_is_left_out_at_the_next_restart(told: Told) -> None:
    job = told.jobs["drained"]
    assert job.kinds == ["first", "replace", "done"]
    assert not set(job.decisions[1]["nodes"]) & set(job.lost)


def test_a_node_with_two_strikes_is_in_no_later_start(told: Told) -> None:
    """The requeue asks for other nodes, too."""
    same_result(told, "struck")
    job = told.jobs["struck"]
    assert job.kinds == ["first", "same", "replace", "requeue", "first", "done"], account(job)
    _, same, after, _, again, _ = job.decisions
    node = same["nodes"][1]
    assert "was killed by SIGSEGV" in same["sentence"] and "strike 1" in same["sentence"]
    assert "strike 2" in after["sentence"]
    assert node not in after["nodes"] and node not in again["nodes"]
    assert node in again["inputs"]["requeued_for"] and node not in again["inputs"]["nodes"]


def test_a_guard_that_ends_is_started_again_while_the_ranks_train_on(told: Told) -> None:
    same_result(told, "unguarded")
    job = told.jobs["unguarded"]
    assert job.kinds == ["first", "same", "done"], account(job)
    assert "the guard of" in job.output() and "has ended, and is started again" in job.output()
    assert "was killed by SIGKILL" in job.decisions[1]["sentence"], account(job)


def test_without_a_spare_the_job_is_queued_again_and_avoids_its_lost_nodes(told: Told) -> None:
    same_result(told, "used_up")
    job = told.jobs["used_up"]
    assert job.kinds == ["first", "requeue", "first", "done"], account(job)
    assert job.now.restarts == 1
    assert not set(job.decisions[2]["nodes"]) & set(job.lost)
    assert set(job.decisions[2]["inputs"]["history"]) == set(job.lost)


def test_a_job_whose_batch_host_dies_is_queued_again_by_slurm(told: Told) -> None:
    same_result(told, "host")
    job = told.jobs["host"]
    # Slurm may give it a dead node of another job at first, which it has not missed yet.
    assert job.now.restarts >= 1
    assert job.kinds == ["first", "first", "done"], account(job)
    causes = [line["cause"] for line in job.decisions]
    assert (causes[0], causes[2]) == (None, None)
    assert (causes[1]["kind"], causes[1]["host"]) == ("node", next(iter(job.lost))), causes[1]


def test_a_mistake_after_a_replacement_is_not_retried(told: Told) -> None:
    job = told.jobs["wrong"]
    assert (job.now.state, job.now.restarts) == ("FAILED", 0), job.output()
    assert job.kinds == ["first", "replace", "stop"], account(job)
    assert "wrong.txt" in job.output()


# Fewer nodes

SHRINK = ("precision=fp64", "global_batch_size=6", "recovery.shrink=true")


def shrunk(job: TrainingJob) -> Iterator[None]:
    """A node dies, and later the job is queued again, as at a time limit."""
    while not job.trains():
        yield
    job.crash(job.nodes[1])
    while len(job.first_steps()) < 2 and not job.is_over:
        yield
    job.ask_to_stop()
    yield from until_back(job, 3)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """Runs a job of three nodes without a spare, on four."""
    cwd, scratch = tmp_path_factory.mktemp("smaller"), tmp_path_factory.mktemp("scratch")
    with Cluster.up(cwd, scratch, 4) as cluster:
        # A run on its own cannot shrink.
        found = Told(cluster, undisturbed(cluster, 3, *SHRINK[:-1]))
        cluster.submit("shrunk", 3, 0, *SHRINK)
        cluster.tell({"shrunk": shrunk}, 60)
        found.jobs = cluster.jobs
        print(account(found.jobs["shrunk"]))
        yield found


def test_without_a_spare_a_job_goes_on_with_a_smaller_dp_and_grows_back(smaller: Told) -> None:
    job = smaller.jobs["shrunk"]
    assert job.now is not None and job.now.state == "COMPLETED", job.output()
    assert job.kinds == ["first", "smaller", "requeue", "first", "done"], account(job)
    assert [len(line["nodes"]) for line in job.decisions] == [3, 2, 0, 3, 0]
    assert "starting on 2 nodes with dp=2" in job.output()
    assert job.now.restarts == 1
    assert job.sizes() == [3, 2, 3]


def test_a_smaller_dp_has_the_losses_of_the_undisturbed_run(smaller: Told) -> None:
    job = smaller.jobs["shrunk"]
    assert [row[0] for row in job.rows()] == list(range(1, STEPS + 1))
    for row, other in zip(job.rows(), smaller.reference.rows(), strict=True):
        assert row == pytest.approx(other, rel=0, abs=1e-9)
