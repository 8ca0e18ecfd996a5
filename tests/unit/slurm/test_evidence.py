"""Tests what the failure of a rank says about its node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel3d.blueprint.layout import Layout
from parallel3d.run.failure import RankFailure, from_exit, of_node
from parallel3d.slurm.evidence import NodeFinding, evidence_of, node_of

NODES = ("node1", "node2", "node3")
LAYOUT = Layout(tp=1, pp=1, dp=4)


def error(text: str, host: str = "node2", phase: str = "train step 12") -> RankFailure:
    return RankFailure(2, "dp 2", host, phase, text, 1.0)


def found(cause: RankFailure, previous: RankFailure | None = None) -> NodeFinding:
    return evidence_of(cause, NODES, previous)


def weight(text: str) -> tuple[str, str]:
    finding = found(error(text))
    return finding.weight, finding.what


@pytest.mark.parametrize(
    "text",
    [
        "AcceleratorError: CUDA error: an illegal memory access was encountered",
        "AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "RuntimeError: CUDA error: unspecified launch failure",
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "RuntimeError: CUDA error: no CUDA-capable device is detected",
        "RuntimeError: CUDA error: Invalid access of peer GPU memory over nvlink",
        "RuntimeError: HIP error: an illegal instruction was encountered",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(…)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "RuntimeError: Unable to determine the device handle for GPU: GPU is lost.",
    ],
)
def test_a_device_error_is_a_strike(text: str) -> None:
    assert weight(text) == ("strike", "a device error")


@pytest.mark.parametrize(
    "reason", ("unhandled cuda error", "unhandled system error", "internal error")
)
def test_an_error_of_nccl_is_a_strike(reason: str) -> None:
    text = f"in all_reduce 7 of dp: DistBackendError: NCCL error in: /p/NCCLUtils.cpp:77, {reason}"
    assert weight(text) == ("strike", "an error of NCCL")
    assert found(error(text)).is_collective


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out of memory"),
        ("AcceleratorError: CUDA error: out of memory", "out of memory"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED", "out of memory"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", "out of memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "out of memory"),
        ("RuntimeError: DataLoader worker: Bus error, out of shared memory", "out of memory"),
        (
            "DistBackendError: NCCL error: unhandled cuda error (Failed to CUDA calloc async 608 "
            "bytes)",
            "out of memory",
        ),
        ("OSError: [Errno 28] No space left on device: 'runs/a'", "a full or failing disk"),
        ("OSError: [Errno 122] Disk quota exceeded", "a full or failing disk"),
        ("OSError: [Errno 5] Input/output error", "a full or failing disk"),
        ("OSError: [Errno 116] Stale file handle", "a full or failing disk"),
        (
            "DistBackendError: NCCL error: unhandled system error: No space left on device",
            "a full or failing disk",
        ),
        ("JSONDecodeError: Expecting value: line 1 column 1 (char 0)", "bad data"),
        ("AcceleratorError: CUDA error: device-side assert triggered", ""),
        ("RuntimeError: CUDA error: no kernel image is available for execution", ""),
        ("RuntimeError: CUDA error: invalid configuration argument", ""),
        ("DistBackendError: NCCL error: invalid usage", ""),
        ("RuntimeError: Timed out waiting 1000ms for recv operation to complete", ""),
        ("KeyError: 'an error that no list has'", ""),
    ],
)
def test_what_other_nodes_would_have_too_is_never_a_strike(text: str, what: str) -> None:
    assert weight(text) == ("never", what)


def test_an_echo_is_never_a_strike() -> None:
    gone = "DistBackendError: NCCL error: remote process exited or there was a network error"
    assert weight(f"{gone}, unhandled system error")[0] == "never"


def test_a_rank_that_left_the_others_operations_is_never_a_strike() -> None:
    text = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert found(replace(error(text), diverged=True)).weight == "never"


@pytest.mark.parametrize(
    ("signal", "expected"),
    [
        (11, "strike"),
        (4, "strike"),
        (9, "never"),
        (7, "never"),
        (6, "never"),
        (15, "never"),
        (14, "never"),
    ],
)
def test_of_the_signals_only_those_of_broken_hardware_are_a_strike(
    signal: int, expected: str
) -> None:
    killed = replace(from_exit(LAYOUT, 1, -signal), host="node2")
    assert found(killed).weight == expected
    assert found(replace(from_exit(LAYOUT, 1, 1), host="node2")).weight == "never"


@pytest.mark.parametrize("kind", ("user", "decided"))
def test_a_decision_and_a_user_error_are_never_a_strike(kind: str) -> None:
    text = "RuntimeError: CUDA error: unspecified launch failure"
    assert found(replace(error(text), kind=kind)).weight == "never"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("is stopped (SIGSTOP): rank 0 waits in all_reduce 3", "strike"),
        ("does not answer: its process or its host is stopped or gone: rank 0 waits", "strike"),
        ("is gone: rank 0 waits in all_reduce 3", "never"),
        ("does not answer (its process is in state D): rank 0 waits in all_reduce 3", "never"),
        ("left out all_reduce; rank 5 (dp 1) on node1 is stopped (SIGSTOP)", "never"),
        ("is in all_reduce 3; a device or the network between them is stuck", "never"),
    ],
)
def test_of_the_hangs_only_a_process_that_is_stopped_is_a_strike(said: str, expected: str) -> None:
    hang = f"hang: rank 4 (pp 0, dp 1, tp 0) on node3 {said}"
    finding = found(replace(error(hang, host="node3"), kind="hang"))
    assert (finding.weight, finding.node) == (expected, "node3")


def test_a_node_that_was_called_dead_has_a_strike() -> None:
    finding = found(of_node("node3", "has sent no beat for 31 s", 1.0))
    assert (finding.weight, finding.node) == ("strike", "node3")


def test_a_host_is_a_node_with_or_without_its_domain() -> None:
    assert node_of("node2.cluster.org", NODES) == "node2"
    assert node_of("node2", ("node1.a", "node2.a")) == "node2.a"
    assert node_of("node2", ("node2.a", "node2.b")) is None
    assert node_of("node20", NODES) is None
    elsewhere = error("RuntimeError: CUDA error: unspecified launch failure", "login")
    assert found(elsewhere).node is None


LAUNCH = "RuntimeError: CUDA error: unspecified launch failure at 0x7f0012"


def test_the_same_error_at_the_same_step_of_another_node_is_never_a_strike() -> None:
    before = error(LAUNCH.replace("7f0012", "7fff00"), "node1")
    finding = found(error(LAUNCH), before)
    assert (finding.weight, finding.recurs) == ("never", True)
    assert found(error(LAUNCH), replace(before, phase="train step 13")).weight == "strike"
    assert found(error(LAUNCH), replace(before, error="KeyError: 1")).weight == "strike"
    assert found(error(LAUNCH), replace(before, host="node2.cluster.org")).weight == "strike"


def test_an_error_that_names_its_host_is_the_same_on_another() -> None:
    first = error("RuntimeError: no data on node1", "node1")
    assert found(error("RuntimeError: no data on node2"), first).recurs


@pytest.mark.parametrize(
    "text",
    [
        "DistBackendError: NCCL error: unhandled system error",
        "RuntimeError: Connection closed by peer",
        "RuntimeError: Timed out waiting 1000ms for recv",
    ],
)
def test_an_error_that_comes_from_elsewhere_does_not_recur(text: str) -> None:
    assert not found(error(text), error(text, "node1")).recurs
    boom = error("KeyError: 'boom'")
    assert found(boom, boom).recurs
    start = replace(boom, phase="rendezvous with the other ranks")
    assert not found(start, start).recurs
