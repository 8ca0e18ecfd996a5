"""Runs a training job under Slurm, as the process of its batch script, until the run has ended.

It starts the ranks, waits for them, decides how to go on (`decide`), and starts them again: on the
same nodes, on others of the job, or after a requeue. It imports no torch, because it lives as long
as the job. tests/e2e/test_slurm_recovery.py shows on a real Slurm what becomes of jobs.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from parallel3d.comm.store import SECRET
from parallel3d.errors import UserError, print_line
from parallel3d.faults.progress import PROGRESS
from parallel3d.host.processes import drop_failed_output
from parallel3d.metrics import recovery_log
from parallel3d.metrics.recovery_log import RecoveryLine
from parallel3d.metrics.starts import STARTS, starts_of
from parallel3d.run import failure
from parallel3d.run.checks import START_VARIABLE
from parallel3d.run.directory import PLACEMENT_FILE, REQUEUE, keep_failures
from parallel3d.run.failure import RankFailure, root_cause
from parallel3d.run.launch import within
from parallel3d.slurm import commands, nodes
from parallel3d.slurm.commands import Allocation
from parallel3d.slurm.decide import (
    Decision,
    Evidence,
    Inputs,
    Limits,
    ProbeAnswer,
    SmallerLayout,
    StartEnd,
    decide,
    line_of,
    merged,
    of_end,
)
from parallel3d.slurm.guards import (
    ANSWER_S,
    FIRST_ANSWER_S,
    LEAVE_S,
    RECORDS_OF_DEAD_S,
    RECORDS_S,
    Guards,
    end_steps,
)
from parallel3d.slurm.job_state import JobState, private_folder
from parallel3d.slurm.smaller import check_shrink, config_of_run, smaller_layouts
from parallel3d.slurm.step_errors import EndedTask, StepErrors, ended_tasks_of
from parallel3d.slurm.train_keys import TrainKeys, asked
from parallel3d.slurm.verdict import Verdict
from parallel3d.text import count
from parallel3d.topology.placed_ranks import rank_of_launch

ASKING = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
DISK_S = 5.0  # a disk that takes longer for a few small files counts as dead
TERMINATED_S = 20.0  # after a requeue, until Slurm ends this process
LOST_LEAVE_S = 0.5
POLL_S = 1.0  # between looks whether the ranks have made the run's folder
LAST_ERRORS_S = 1.0  # until srun's last errors are read
SAID = 8  # lines of other ranks that are repeated …
END_BYTES = 1 << 16  # … from so much of the end of each log
TRAIN = "PARALLEL3D_TRAIN"  # a command that is run in place of `parallel3d train`


@dataclass
class Signals:
    """The signals that this process has received.

    Attributes:
        asked: name of the last one that asked the job to stop; None without one.
        terminated: whether SIGTERM came, as after a requeue.
        step: the srun of the ranks, to which they are passed on; None while no rank runs.
        woken: called after a signal.
    """

    asked: str | None = None
    terminated: bool = False
    step: subprocess.Popen[bytes] | None = None
    woken: Callable[[], None] = lambda: None

    def install(self) -> None:
        for number in ASKING:
            signal.signal(number, self._come)
        signal.signal(signal.SIGCHLD, lambda number, frame: self.woken())

    def _come(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        self.terminated |= number == signal.SIGTERM
        self.pass_on()
        self.woken()

    def pass_on(self) -> None:
        """Asks the ranks to save and end; srun passes the signal on to them."""
        # `poll` is avoided: it reaps the process, and this handler may interrupt a reap.
        if self.step is not None and self.step.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.step.pid, signal.SIGUSR1)


@dataclass
class Times:
    """Unix times of the last end, from which `recovery.jsonl` has its seconds."""

    failed_at: float | None = None
    noticed: float | None = None
    over: float | None = None
    probed: float | None = None

    def seconds(self, now: float) -> dict[str, float]:
        marks = {"detect": self.failed_at, "end": self.noticed, "probe": self.over}
        ends = (self.noticed, self.over, self.probed)
        found = {
            name: max(0.0, end - begin)
            for (name, begin), end in zip(marks.items(), ends, strict=True)
            if begin is not None and end is not None
        }
        return found if self.probed is None else found | {"decide": max(0.0, now - self.probed)}


def run(words: Sequence[str], signals: Signals) -> int:
    """Runs the job of this batch script with the overrides `words`; returns its exit code.

    Raises UserError, and SystemExit after the train command has said why it cannot work.
    """
    drop_failed_output()  # a full disk under the job's output ends no job
    allocation = Allocation.of(os.environ)
    _set_environment()
    keys = asked(train_command(os.environ), words, allocation.name, allocation.job)
    folder = private_folder(allocation.job)
    if folder is None:
        where = Path.cwd() / "logs" / allocation.job
        print_line(
            f"{where} is not a folder that belongs to you alone: remove it, or submit elsewhere"
        )
        return 1
    state = JobState.read(folder)
    if not state.nodes:  # of a first start
        state.steps_begun = len(starts_of(keys.run_dir / STARTS))
    may_give_up = bool(keys.spares) or keys.config is not None
    # Without them a job gives up no node; `sbatch --nodes=4-8` may get another number each time.
    if not state.nodes or not may_give_up:
        tasks = set(allocation.tasks.values())
        state.nodes, state.tasks = len(allocation.nodes), tasks.pop() if len(tasks) == 1 else 0
    elif state.tasks and (len(allocation.nodes) < state.nodes or keys.config is not None):
        # Slurm counts the tasks of the nodes that the job had before, if it has given up some.
        tasks_of = dict.fromkeys(allocation.nodes, state.tasks)
        allocation = replace(allocation, tasks=tasks_of, is_whole=False)
    needed = _needed(keys, allocation, state)
    if keys.config is not None and not state.starts:
        check_shrink(keys.config, keys.run_dir, needed, state.tasks)
    return Batch(allocation, keys, needed, state, folder, signals).run()


def train_command(environ: Mapping[str, str]) -> list[str]:
    """Returns the words of the command that trains, which each rank runs."""
    return environ.get(TRAIN, "").split() or [
        *environ.get("PARALLEL3D", "parallel3d").split(),
        "train",
    ]


def _set_environment() -> None:
    """Sets the variables that all steps inherit."""
    environ = os.environ
    cpus = environ.get("SLURM_CPUS_PER_TASK")
    if not environ.get("OMP_NUM_THREADS"):
        environ["OMP_NUM_THREADS"] = cpus or "1"
    if cpus:
        environ["SRUN_CPUS_PER_TASK"] = cpus  # since 22.05 srun ignores sbatch's number
    # Messages in the ranks' store are signed with this. A requeued job has a new one.
    if not environ.get(SECRET):
        environ[SECRET] = secrets.token_hex(16)


def _needed(keys: TrainKeys, allocation: Allocation, state: JobState) -> int:
    """Returns the number of nodes on which ranks run. Raises UserError for too many spares."""
    spares, total = keys.spares, state.nodes
    if not spares:
        return total
    if spares >= total:
        raise UserError(
            f"launch.spares={spares} leaves no node for ranks, as the job has "
            f"{count(total, 'node')}: it must be from 0 to {total - 1}, and the nearest is "
            f"launch.spares={total - 1}"
        )
    tasks = state.tasks
    if not tasks:
        raise UserError(
            f"launch.spares={spares} needs the same number of tasks on each node: submit with "
            "--ntasks-per-node"
        )
    if keys.ranks is not None and keys.ranks != (total - spares) * tasks:
        fits = [n for n in range(total) if (total - n) * tasks == keys.ranks]
        nearest = f"; the nearest is launch.spares={fits[0]}" if fits else ""
        sizes = " · ".join(f"{name}={size}" for name, size in keys.sizes.items() if size > 1)
        raise UserError(
            f"launch.spares={spares} leaves {total - spares} of {total} nodes with "
            f"{(total - spares) * tasks} tasks, but the layout ({sizes}) has {keys.ranks} ranks"
            f"{nearest}"
        )
    return total - spares


@dataclass
class Batch:
    """One job, from the start of its batch script to the end of that.

    Attributes:
        needed: number of nodes on which ranks run.
        may_release: whether Slurm lets the job give up nodes, as far as is known.
        used: the nodes of the last start.
        lines: lines of `recovery.jsonl` for which the run has no folder yet.
        silent: nodes that are thought lost since the last end.
        lingers: whether a part of an earlier step of the ranks may still hold nodes or GPUs.
        lost: nodes that did not answer before a requeue.
        stranded: those of them that the job could not give up.
    """

    allocation: Allocation
    keys: TrainKeys
    needed: int
    state: JobState
    folder: Path
    signals: Signals
    may_release: bool = True
    used: tuple[str, ...] = ()
    lines: list[RecoveryLine] = field(default_factory=list)
    silent: frozenset[str] = frozenset()
    lingers: bool = False
    lost: tuple[str, ...] = ()
    stranded: tuple[str, ...] = ()
    times: Times = field(default_factory=Times)
    guards: Guards | None = None

    def run(self) -> int:
        ended: StartEnd | None = None
        while True:
            # One that came while ranks were running is in `ended`, with what became of it.
            if self.signals.asked is not None and (ended is None or ended.asked is None):
                asked = f"{self.signals.asked} came while no rank was running"
                return self._requeue(f"{asked}; the job is queued again", 1)
            decision = self._next(ended)
            if decision is None:
                self._end_guards(0.0)
                continue
            if decision.action != "run":
                self._end_guards(0.0)
                return self._leave(decision)
            ended = self._start(decision)
            self.state.host = ""

    # Before a start

    @property
    def has_guards(self) -> bool:
        return self.keys.heartbeat_s > 0 and len(self.allocation.nodes) > 1

    def _next(self, ended: StartEnd | None) -> Decision | None:
        """Decides how to go on, and makes the job give up nodes that are lost.

        Returns None if a signal asks the job to stop before the nodes have answered.
        """
        self.state.see_checkpoints(self.keys.run_dir)
        inputs = self._inputs(ended)
        if ended is None:
            self.times.over = time.time()
        else:
            decided = of_end(inputs)
            if decided is not None:
                return self._taken(inputs, decided)
        inputs = replace(
            inputs,
            answers=self._answers(ended),
            states=self._states(),
            places=self._places(),
            now=time.time(),
        )
        if self.signals.asked is not None:
            return None
        self.times.probed = time.time()
        decision = decide(inputs)
        if decision.release and not self._release(decision.release):
            # Slurm will end the job when it misses the node; a requeue asks for others.
            inputs = replace(inputs, limits=self._limits())
            decision = decide(inputs)
        if decision.action == "requeue" and inputs.answers is not None:
            members = (node for node in self.allocation.nodes if node != self.allocation.host)
            self.lost = tuple(node for node in members if node not in inputs.answers)
            if self.lost and not (self.may_release and self._release(self.lost)):
                self.stranded = self.lost
        return self._taken(inputs, decision)

    def _inputs(self, ended: StartEnd | None) -> Inputs:
        now = time.time()
        found = nodes.read(self.keys.run_dir, now, self.keys.exclude_days, print_line)
        state = self.state
        return Inputs(
            start=state.starts + 1,
            now=now,
            batch_host=self.allocation.host,
            nodes=self.allocation.nodes,
            needed=self.needed,
            limits=self._limits(),
            used=self.used,
            ended=ended,
            previous=state.cause,
            history=merged(found, state.history),
            starts_in_row=state.in_row,
            replaced_in_row=state.replaced,
            requeued_for=state.requeued_for,
        )

    def _limits(self) -> Limits:
        return Limits(
            max_restarts=self.keys.max_restarts,
            spares=self.keys.spares,
            exclude_days=self.keys.exclude_days,
            may_release=self.may_release,
            smaller=self._smaller(),
        )

    def _smaller(self) -> tuple[SmallerLayout, ...]:
        """Returns the layouts for fewer nodes that `recovery.shrink` allows."""
        keys, tasks, begun = self.keys, self.state.tasks, self.state.starts > 0
        if keys.config is None or not tasks:
            return ()
        given = keys.config
        config = within(DISK_S, lambda: config_of_run(given, keys.run_dir, started=begun), None)
        return () if config is None else smaller_layouts(config, self.needed, tasks)

    def _answers(self, ended: StartEnd | None) -> Mapping[str, ProbeAnswer] | None:
        """Starts the guards of the next start, and returns their nodes' answers.

        Without guards the nodes are asked after a failure only, and a job of one node never.
        """
        if len(self.allocation.nodes) == 1:
            return None
        if not self.has_guards:
            return None if ended is None else self._alive()
        logs = self._logs(self.state.starts + 1)
        self.guards = Guards(
            self.allocation,
            self.state.starts + 1,
            self.keys.heartbeat_s,
            _self_test(os.environ, self.keys.run_dir, warm=ended is None and self.keys.spares > 0),
            logs,
            print_line,
        )
        self.signals.woken = self.guards.collector.wake
        limit_s = FIRST_ANSWER_S if ended is None else ANSWER_S
        found = self.guards.answers(self.silent, limit_s, lambda: self.signals.asked is not None)
        return {node: ProbeAnswer(answer.ok, answer.why) for node, answer in found.items()}

    def _alive(self) -> dict[str, ProbeAnswer]:
        """Returns the nodes on which Slurm can start a task."""
        steps = {
            node: subprocess.Popen(
                commands.on_node(os.environ, node, "true"),
                stdin=subprocess.DEVNULL,
                env=commands.environment_beside(os.environ),
            )
            for node in self.allocation.nodes
        }
        end_steps(steps.values(), 15.0)
        return {node: ProbeAnswer(ok=True) for node, step in steps.items() if step.returncode == 0}

    def _states(self) -> dict[str, str]:
        members = dict.fromkeys((*self.allocation.nodes, *self.used))
        return commands.states_of(list(members)) if len(members) > 1 else {}

    def _places(self) -> dict[str, str]:
        """Returns the places of nodes in the network if a spare may have to be chosen by them."""
        if not self.used or len(self.allocation.nodes) <= self.needed:
            return {}
        return commands.places_of(tuple(dict.fromkeys((*self.allocation.nodes, *self.used))))

    def _release(self, lost: Sequence[str]) -> bool:
        """Makes the job give up nodes; returns whether Slurm allowed it."""
        kept = self.allocation.without(lost)
        said = commands.release(self.allocation.job, kept.nodes)
        if said.code:
            self.may_release = False
            print_line(
                f"Slurm does not let the job give up {', '.join(lost)} ({said.reason}), and will "
                "end the job when it misses a node"
            )
            return False
        self.allocation = kept
        return True

    def _taken(self, inputs: Inputs, decision: Decision) -> Decision:
        """Keeps a decision: in the job's state, in the run's files, and on the screen."""
        state, now = self.state, time.time()
        if inputs.ended is not None:
            state.cause = inputs.ended.cause
        state.in_row, state.replaced = decision.starts_in_row, decision.replaced_in_row
        state.history = merged(state.history, decision.history)
        line = line_of(
            inputs,
            decision,
            failed_at=self.times.failed_at,
            seconds=self.times.seconds(now),
        )
        if inputs.ended is None:
            line = replace(line, cause=state.cut_off(os.environ))
        self.lines.append(line)
        state.host = self.allocation.host if decision.action == "run" else ""
        self.times = Times()
        self._write_files()
        is_smooth = decision.how == "first" and not decision.history and not decision.release
        answers = inputs.answers
        is_answered = answers is None or set(decision.nodes) <= answers.keys()
        if decision.action == "stop" or (
            decision.action == "run" and not (is_smooth and is_answered)
        ):
            print_line(f"run={self.keys.run}: {decision.sentence}")
        if decision.action == "run":
            if not is_answered:  # most nodes have no guard, and a late one must not judge
                self._end_guards(0.0)
            state.starts += 1
            with suppress(OSError):
                keep_failures(self.keys.run_dir)
        self._write_state()
        return decision

    def _write_files(self) -> None:
        """Writes into the run's folder what has waited for it; a start makes the folder."""
        run_dir, now = self.keys.run_dir, time.time()
        if not (self.lines or self.state.history) or not run_dir.is_dir():
            return
        for line in self.lines:
            recovery_log.append(run_dir, line, print_line)
        self.lines = []
        if self.state.history:
            nodes.add(run_dir, self.state.history, now, self.keys.exclude_days, print_line)
            self.state.history = {}

    def _write_state(self) -> None:
        try:
            self.state.write(self.folder)
        except OSError as error:
            print_line(
                f"{self.folder} cannot be written ({error.strerror}), so this job will not know "
                "after a requeue how often it has started"
            )

    def _logs(self, start: int) -> Path:
        logs = self.folder / str(start)
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{logs} cannot be made ({error.strerror}), so ranks cannot write their logs"
            ) from None
        return logs

    # A start

    def _start(self, decision: Decision) -> StartEnd:
        """Runs the ranks to their end, and returns what became of them."""
        number, keys = self.state.starts, self.keys
        logs, marker = self._logs(number), keys.run_dir / REQUEUE
        with suppress(OSError):
            marker.unlink()
        is_whole = self.allocation.is_whole and decision.nodes == self.allocation.nodes
        environ = dict(os.environ) if is_whole else commands.environment_on_some(os.environ)
        # A guard that comes up late, after nobody has waited for it, must not find these ranks.
        environ[START_VARIABLE] = f"{number}" if self.guards else f"{number} without guards"
        if self.guards is not None:
            environ[PROGRESS] = self.guards.folder
            self.guards.collector.watch(decision.nodes)
        own = [word for word in keys.words if not _sets_key_of(word, decision.words)]
        command = [*train_command(os.environ), *own, *decision.words]
        # With heartbeat_s=0 nobody knows what is left on a node that was given up.
        beside = self.lingers or not self.allocation.is_whole
        words = commands.of_ranks(
            self.allocation, decision.nodes, str(logs), command, beside=beside
        )
        self.used = decision.nodes
        step = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ
        )
        assert step.stderr is not None
        errors = StepErrors(step.stderr)
        self.signals.step = step
        if self.signals.asked is not None:
            self.signals.pass_on()
        verdict = self._watch(step)
        self.times.noticed = time.time()
        by_itself = self._end(step, verdict)
        self.times.over = time.time()
        self.signals.step = None
        if verdict is not None or step.returncode:
            self._repeat_others(logs)
        code = step.returncode if by_itself else 1
        tasks = ended_tasks_of(errors.join(LAST_ERRORS_S), verdict)
        return self._ended(code, tasks, verdict, marker)

    def _watch(self, step: subprocess.Popen[bytes]) -> Verdict | None:
        """Waits until the ranks have ended, or must be ended, which is the verdict."""
        while self.guards is None:
            with suppress(subprocess.TimeoutExpired):
                step.wait(POLL_S if self.lines else None)
                return None
            self._write_files()
        while step.poll() is None:
            self._write_files()
            verdict = self.guards.wait(1.0)
            if verdict is not None:
                return verdict
            self.guards.replace_ended()
            spares = self.guards.collector.dead_spares - self.silent
            if spares & set(self.allocation.nodes):
                self._give_up(spares & set(self.allocation.nodes))
        return self.guards.collector.verdict

    def _give_up(self, spares: frozenset[str] | set[str]) -> None:
        """Gives up silent spares before Slurm misses them and ends the job."""
        self.silent |= spares
        names = sorted(spares)
        why, now = "fell silent while it was a spare", time.time()
        entry = (Evidence(why, now, self.state.starts, decisive=True),)
        self.state.history = merged(self.state.history, dict.fromkeys(names, entry))
        self._write_files()
        self._write_state()
        if self._release([name for name in names if name != self.allocation.host]):
            print_line(
                f"run={self.keys.run}: {', '.join(names)} {why}; the job gives it up, and "
                "training goes on"
            )

    def _end(self, step: subprocess.Popen[bytes], verdict: Verdict | None) -> bool:
        """Ends what is left of a start; returns whether srun ended by itself."""
        if self.guards is not None:
            patience = 0.0 if verdict is None else RECORDS_S
            if verdict is not None and verdict.dead:
                patience = RECORDS_OF_DEAD_S
            self.silent = self.guards.end(patience)
            self.guards = None
            self.signals.woken = lambda: None
        # An srun of a lost node never ends.
        is_lost = bool(self.silent.intersection(self.used))
        with suppress(subprocess.TimeoutExpired):
            step.wait(LOST_LEAVE_S if is_lost else LEAVE_S)
        by_itself = step.poll() is not None
        end_steps([step], 0.0)
        by_itself = by_itself and step.returncode >= 0
        self.lingers = self.lingers or is_lost or not by_itself
        return by_itself

    def _end_guards(self, patience: float) -> None:
        if self.guards is not None:
            self.guards.end(patience)
            self.guards = None
            self.signals.woken = lambda: None

    def _repeat_others(self, logs: Path) -> None:
        """Prints what ranks other than the first have said."""
        left = SAID
        for path in sorted(logs.glob("rank-*.log")):
            with suppress(OSError):
                for line in _end_of(path).splitlines():
                    if line.startswith("parallel3d: ") and left:
                        print_line(line.removeprefix("parallel3d: "))
                        left -= 1
            if not left:
                return

    def _ended(
        self,
        code: int,
        tasks: Mapping[int, EndedTask],
        verdict: Verdict | None,
        marker: Path,
    ) -> StartEnd:
        cause = None
        if code or verdict is not None:
            cause = self._cause(tasks, verdict)
        reached = len(starts_of(self.keys.run_dir / STARTS)) > self.state.steps_begun
        if cause is not None:
            self.times.failed_at = cause.time
        elif verdict is not None:
            self.times.failed_at = verdict.failed_at
        asked = self.signals.asked
        if asked is None and code in (128 + signal.SIGUSR1, 128 + signal.SIGUSR2):
            asked = signal.Signals(code - 128).name
        return StartEnd(
            code=code,
            saved_and_asked=marker.is_file(),
            asked=asked,
            cause=cause,
            dead=() if verdict is None else verdict.dead,
            first=not reached,
        )

    def _cause(self, tasks: Mapping[int, EndedTask], verdict: Verdict | None) -> RankFailure | None:
        """Returns the failure that caused the others, from all that is known of the ranks."""
        run_dir = self.keys.run_dir
        none: list[RankFailure] = []
        found = within(DISK_S, lambda: failure.read_all(run_dir), none)
        known = {record.rank for record in found}
        failed_at = self.times.noticed or time.time()
        if verdict is not None:
            failed_at = verdict.failed_at
            error = (
                f"has sent no beat for {verdict.silent_s:.0f} s, and no step has ended for "
                f"{verdict.still_s:.0f} s"
            )
            found += [failure.of_node(node, error, failed_at) for node in verdict.dead]
        for launched, task in tasks.items():
            rank = rank_of_launch(run_dir / PLACEMENT_FILE, launched)
            if rank not in known:
                found.append(self._gone(rank, task, failed_at))
        return root_cause(found) if found else None

    def _gone(self, rank: int, task: EndedTask, failed_at: float) -> RankFailure:
        """Returns the failure of a rank whose process is away, and which has left no record."""
        ranks = sum(self.allocation.tasks.get(each, 1) for each in self.used)
        error = f"was killed by {task.signal.name}" if task.signal else "ended without a word"
        coordinates = failure.coordinates_of(self.keys.layout(ranks), rank)
        return RankFailure(rank, coordinates, task.nodes, "", error, failed_at, "killed")

    # The end

    def _leave(self, decision: Decision) -> int:
        if decision.action != "requeue":
            return decision.code
        return self._requeue(decision.sentence, decision.code, decision.exclude)

    def _requeue(self, sentence: str, code: int, avoided: Sequence[str] = ()) -> int:
        """Queues the job again, unless it was cancelled or Slurm queues it again itself.

        A job at its time limit is still ending at this point, and would not be queued again.
        Returns the exit code.
        """
        job, run = self.allocation.job, self.keys.run
        state, reason = commands.state_and_reason(job)
        if not state:
            before = sentence.removesuffix("; the job is queued again")
            print_line(
                f"run={run}: {before}, but squeue does not answer; scontrol requeue {job} queues "
                "the job again"
            )
        if state != "RUNNING" and reason != "TimeLimit":
            return code
        self.state.requeued_for = tuple(dict.fromkeys((*self.state.requeued_for, *avoided)))
        self._write_state()
        print_line(f"run={run}: {sentence}")
        if self.stranded and self._is_ended_by_slurm():
            return code
        if self.lost and not commands.can_change(job, self.allocation.name):
            self._wait_until_down()
        if avoided and not commands.can_avoid(job, avoided, self.state.nodes):
            print_line(
                f"Slurm has too few other nodes for this job to leave out {', '.join(avoided)}; "
                "the next start uses it if it answers"
            )
            avoided = ()
        self.signals.terminated = False
        said = commands.requeue(job)
        if said.code and not self.signals.terminated:
            print_line(f"scontrol requeue {job} failed: {said.reason}")
        elif avoided:
            self._exclude(avoided)
        return code

    def _wait_until_down(self) -> None:
        """Waits until Slurm has missed the lost nodes, which it would give this job again.

        Without accounting, Slurm changes a job no more that has given up a node, so that it cannot
        be told to leave out others.
        """
        print_line(f"the job waits until Slurm misses {', '.join(self.lost)}, to get other nodes")
        deadline = time.monotonic() + commands.missed_after()
        while self.signals.asked is None and time.monotonic() < deadline:
            states = commands.states_of(self.lost)
            if all("DOWN" in states.get(node, "DOWN") for node in self.lost):
                return
            time.sleep(2.0)

    def _is_ended_by_slurm(self) -> bool:
        """Waits until Slurm misses the lost nodes, ends this job and queues it again.

        If scontrol queues a job again that holds a dead node, Slurm never starts it: it finds
        BadConstraints once the node is down (tests/e2e/test_slurm_nodes.py). Returns False if Slurm
        does not miss the nodes, which are only slow then, or if a signal asks the job to stop.
        """
        print_line(f"Slurm queues the job again when it misses {', '.join(self.stranded)}")
        deadline = time.monotonic() + commands.missed_after()
        while time.monotonic() < deadline:
            if self.signals.asked is not None:  # also by the time limit
                state, reason = commands.state_and_reason(self.allocation.job)
                return state not in ("", "RUNNING") and reason != "TimeLimit"
            time.sleep(0.2)
        return False

    def _exclude(self, avoided: Sequence[str]) -> None:
        """Keeps nodes out of the next start, while Slurm ends this one.

        Slurm takes it from the moment at which it ends this script, and kills this process
        `KillWait` seconds later.
        """
        deadline = time.monotonic() + TERMINATED_S
        while not self.signals.terminated and time.monotonic() < deadline:
            time.sleep(0.05)
        said = commands.exclude(self.allocation.job, avoided)
        while said.code and time.monotonic() < deadline:
            time.sleep(0.5)
            said = commands.exclude(self.allocation.job, avoided)
        if said.code:
            print_line(
                f"Slurm does not leave out {', '.join(avoided)} ({said.reason}); the next start "
                "does not use it unless it must"
            )


def _end_of(log: Path) -> str:
    """Returns the end of a log, which may be very long. Raises OSError."""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
        return file.read().decode("utf-8", "replace")


def _sets_key_of(word: str, others: Sequence[str]) -> bool:
    """Returns whether an override gives a key that others give, too."""
    return word.lstrip("+").partition("=")[0] in {each.partition("=")[0] for each in others}


def _self_test(environ: Mapping[str, str], run_dir: Path, *, warm: bool) -> list[str]:
    """Returns the command of a node's self-test.

    The run's folder, or where it will be made, must be on each node. With `warm`, the test also
    imports torch on nodes without GPUs, so that ranks that start on a spare find it in the cache.
    """
    gpus = commands.gpus_of_each_node(environ)
    there = run_dir.absolute()
    folder = next(path for path in (there, *there.parents) if os.path.isdir(path))
    words = [sys.executable, "-m", "parallel3d.host.self_test", "--folder", str(folder)]
    words += ["--warm"] if warm else []
    return words if gpus is None else [*words, "--gpus", str(gpus)]
