"""Judges what the failure of a rank says about its node.

All lists of errors are here. Each is a list of what is known: an error that is in none of them says
nothing about the node. A node that is wrongly left out costs a spare, and one that is wrongly kept
costs a restart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from parallel3d.run.failure import TIMED_OUT, RankFailure

Weight = Literal["decisive", "strike", "never"]

# Errors that other nodes would have too, by their name in a sentence. These come first, as a device
# or NCCL may report them.
SHARED = {
    # A library of NVIDIA that cannot be initialized mostly lacks memory.
    "out of memory": re.compile(
        r"out of (shared )?memory|OutOfMemoryError|MemoryError|can(no|')t allocate memory"
        r"|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
        r"|insufficient memory|\[Errno 12\]|Failed to CUDA [mc]alloc",
        re.IGNORECASE,
    ),
    "a full or failing disk": re.compile(
        r"no space left on device|disk quota exceeded|input/output error|read-only file system"
        r"|stale file handle|transport endpoint|\[Errno (5|28|30|107|108|116|122)\]",
        re.IGNORECASE,
    ),
    "bad data": re.compile(
        r"JSONDecodeError|UnicodeDecodeError|ArrowInvalid|ZstdError|SafetensorError"
    ),
}
# A device-side assertion, an invalid argument or a missing kernel is a mistake in the program. An
# illegal address may be one too; it is then the same at the same step of another node.
DEVICE = re.compile(
    r"(CUDA|HIP) error: .*(uncorrectable|hardware|unspecified launch failure|illegal memory access"
    r"|illegal instruction|illegal address|misaligned address|invalid program counter"
    r"|busy or unavailable|no (CUDA|ROCm)-capable device|unknown error|launch timed out"
    r"|initialization error|system not yet initialized|over nvlink)"
    r"|fallen off the bus|GPU is lost|\bXid\b"
    r"|(CUBLAS|CUDNN|HIPBLAS|MIOPEN)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
    re.IGNORECASE,
)
# An invalid usage is a mistake in the program, and a remote error is an echo.
COLLECTIVE = re.compile(
    r"[NR]CCL error.*(unhandled (cuda|hip|system) error|internal error)"
    r"|nccl(UnhandledCuda|System|Internal)Error"
)
# Signals that a broken processor or memory causes. Others do not tell the node from something else:
# the kernel sends SIGKILL when memory runs out, and so does a user, a scheduler or our guard;
# SIGBUS comes from a full /dev/shm, or from a mapped file that its server cannot deliver; and gloo
# aborts (SIGABRT) a rank whose peer is at fault.
BROKEN = re.compile(r"was killed by (SIGSEGV|SIGILL)\b")
# A diagnosis of the watchdog begins with the rank at fault.
STOPPED = re.compile(
    r"hang: rank \d+ \([^)]*\) on \S+ "
    r"(is stopped \(SIGSTOP\)|does not answer: its process or its host)"
)
STEP = re.compile(r"\bstep \d+")  # in a phase, such as "train step 12"


@dataclass(frozen=True)
class NodeFinding:
    """Holds what a failure says about a node.

    Attributes:
        weight: "decisive" excludes the node at once, two strikes do, and "never" does not count.
        node: the node, by its name in Slurm; None if no node of the job is meant.
        what: the kind of failure, for a sentence; "" if it is of no known kind.
        is_collective: whether the failure was in a collective, where the rank that fails first need
            not be at fault.
        recurs: whether a new start would fail again in the same way.
    """

    weight: Weight
    node: str | None = None
    what: str = ""
    is_collective: bool = False
    recurs: bool = False


def evidence_of(
    cause: RankFailure, nodes: Iterable[str], previous: RankFailure | None = None
) -> NodeFinding:
    """Returns what the root cause of a start's end says about one of `nodes`.

    `previous` is the root cause of the start before. The same error at the same step on another
    node is not the node's; on the same node it may be.
    """
    names = list(nodes)
    found = _alone(cause, names)
    if previous is None or not is_same(cause, previous):
        return found
    hosts = (node_of(each.host, names) or each.host for each in (previous, cause))
    elsewhere = len({*hosts}) > 1
    if found.weight == "strike":
        if not elsewhere:
            return found
        found = replace(found, weight="never", what=f"{found.what} at the same step on two nodes")
    return replace(found, recurs=_will_recur(cause, found))


def _alone(cause: RankFailure, nodes: list[str]) -> NodeFinding:
    node = node_of(cause.host, nodes)
    if cause.kind == "node":
        # A node that does not answer now either is excluded for that.
        return NodeFinding("strike", node, "called dead")
    if cause.kind == "hang":
        is_stopped = STOPPED.match(cause.error) is not None
        return NodeFinding("strike" if is_stopped else "never", node, "a process that is stopped")
    if cause.kind == "killed":
        return NodeFinding("strike" if BROKEN.search(cause.error) else "never", node)
    if cause.kind != "error" or cause.diverged or cause.is_echo:
        return NodeFinding("never", node)
    for what, pattern in SHARED.items():
        if pattern.search(cause.error):
            return NodeFinding("never", node, what)
    if DEVICE.search(cause.error):
        return NodeFinding("strike", node, "a device error")
    if COLLECTIVE.search(cause.error):
        return NodeFinding("strike", node, "an error of NCCL", is_collective=True)
    return NodeFinding("never", node)


def node_of(host: str, nodes: Iterable[str]) -> str | None:
    """Returns the node that runs on `host`, whose name may have a domain; None if none fits."""
    names = list(nodes)
    if host in names:
        return host
    short = host.partition(".")[0]
    found = [name for name in names if name.partition(".")[0] == short]
    return found[0] if len(found) == 1 else None


def is_same(cause: RankFailure, previous: RankFailure) -> bool:
    """Returns whether two starts ended by the same error in the same phase."""
    return (
        cause.kind in ("error", "user", "killed")
        and (cause.kind, cause.phase) == (previous.kind, previous.phase)
        and _general(cause) == _general(previous)
    )


def _will_recur(cause: RankFailure, found: NodeFinding) -> bool:
    """Returns whether an error that has come twice in the same phase would come again.

    A signal comes from outside, and a time-out from another rank. An error outside of steps, as in
    the rendezvous, may be one of the network.
    """
    if cause.kind == "user":
        return True
    passing = found.is_collective or cause.is_echo or TIMED_OUT.search(cause.error) is not None
    return cause.kind == "error" and not passing and STEP.search(cause.phase) is not None


def _general(cause: RankFailure) -> str:
    """Returns an error without its addresses in memory and the name of its host."""
    text = re.sub(r"\b0x[0-9a-fA-F]+", "0x…", cause.error)
    return text.replace(cause.host, "…") if cause.host else text
