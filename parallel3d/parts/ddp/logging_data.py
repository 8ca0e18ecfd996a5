"""What `_get_ddp_logging_data` tells, under PyTorch's names: arguments, buckets, steps, errors."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from parallel3d.parts.ddp.buckets import Bucket
    from parallel3d.parts.ddp.ddp import DistributedDataParallel
    from parallel3d.parts.ddp.reducer import Reducer

LoggingData = dict[str, int | str]
P = ParamSpec("P")
R = TypeVar("R")
NOT_SET = "N/A"  # PyTorch's word for a variable that the environment lacks
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
OF_BACKEND = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}
TYPES = {  # C++'s names, which PyTorch's class gives
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


class Record:
    """What has happened in the steps of a wrapper.

    Attributes:
        forwards: forwards with gradients, outside of `no_sync`.
        error: what was raised last, with its type.
        comm_hook: name of the communication hook.
        joins: it was in `join`, where ranks may run out of inputs.
        forward_at, backward_at, computed_at, comm_at, comm_ended_at: when, in the last step, the
            forward and the backward began, the backward's own work ended, the first bucket left,
            and the last mean was there; nanoseconds of `time.perf_counter_ns`.
        sums: of the durations over `backwards` backwards.
    """

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.error = self.comm_hook = ""
        self.joins = False
        self.forward_at = self.backward_at = self.computed_at = 0
        self.comm_at = self.comm_ended_at = 0
        self.sums: dict[str, int] = {}

    def forward(self) -> None:
        """A forward begins whose backward will be reduced."""
        self.forwards += 1
        self.forward_at = time.perf_counter_ns()

    def backward(self) -> None:
        """A backward begins."""
        self.backward_at = time.perf_counter_ns()

    def computed(self) -> None:
        """The backward's own work has ended."""
        self.computed_at = time.perf_counter_ns()

    def comm(self) -> None:
        """The first bucket leaves."""
        self.comm_at = time.perf_counter_ns()

    def comm_ended(self) -> None:
        """The parameters have the means."""
        self.comm_ended_at = time.perf_counter_ns()
        self.backwards += 1
        for name, duration in self.durations().items():
            self.sums[name] = self.sums.get(name, 0) + duration

    def durations(self) -> dict[str, int]:
        """Of the last step that was reduced."""
        return {
            "forward_compute_time": self.backward_at - self.forward_at,
            "backward_compute_time": self.computed_at - self.backward_at,
            "backward_comm_time": self.comm_ended_at - self.comm_at,
            "backward_compute_comm_overlap_time": max(0, self.computed_at - self.comm_at),
        }

    def times(self) -> LoggingData:
        """Nanoseconds: how long, on the mean how long, and since 1970 when."""
        if not self.backwards:
            return {}
        since_1970 = time.time_ns() - time.perf_counter_ns()
        return {
            **self.durations(),
            **{f"avg_{name}": total // self.backwards for name, total in self.sums.items()},
            "forward_compute_time_start": since_1970 + self.forward_at,
            "backward_compute_time_start": since_1970 + self.backward_at,
            "backward_compute_time_end": since_1970 + self.computed_at,
            "backward_comm_time_start": since_1970 + self.comm_at,
            "backward_comm_time_end": since_1970 + self.comm_ended_at,
        }


class _Recording(Protocol):
    step_record: Record


S = TypeVar("S", bound=_Recording)


def recorded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Notes in `self.step_record` what the method raises."""

    @functools.wraps(method)
    def noting(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.step_record.error = f"{type(error).__name__}: {error}"
            raise

    return noting


def logging_data(net: DistributedDataParallel) -> LoggingData:
    """All of it; what is not known, or not measured, is left out."""
    parameters = list(net.numbers)
    index = None if net.inputs_to is None else net.inputs_to.index
    record, reducer = net.step_record, net.reducer
    data: LoggingData = {
        "world_size": net.group.size,
        "rank": net.group.index,
        "module_name": type(net.module).__name__,
        "device_ids": "" if index is None else str(index),
        "output_device": -1 if index is None else index,
        "is_multi_device_module": 0,  # refused when the module is wrapped
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in net.module.modules())),
        "broadcast_buffers": int(net.broadcast_buffers),
        "find_unused_parameters": int(net.find_unused_parameters),
        "gradient_as_bucket_view": int(net.gradient_as_bucket_view),
        "dtypes": ", ".join(sorted({TYPES.get(p.dtype, str(p.dtype)) for p in parameters})),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
        "iteration": max(0, record.forwards - 1),
        **_environment(VARIABLES),
        **_backend(net.group.handle),
    }
    if net.static_graph:
        data["static_graph"] = 1
    if record.joins:
        data["join_uneven_inputs"] = 1
    if record.comm_hook:
        data["comm_hook"] = record.comm_hook
    if record.error:
        data |= {"has_error": 1, "error": record.error}
    return data if reducer is None else data | _of_steps(reducer, record)


def _environment(names: Iterable[str]) -> LoggingData:
    keys = {name: name.lower().replace("torch_nccl", "nccl") for name in names}
    return {key: os.environ.get(name, NOT_SET) for name, key in keys.items()}


def _backend(handle: dist.ProcessGroup | None) -> LoggingData:
    if handle is None:
        return {}
    name = dist.get_backend(handle)
    data: LoggingData = {"backend_name": name, **_environment(OF_BACKEND.get(name, ()))}
    if name == "gloo":
        options = getattr(handle._get_backend(torch.device("cpu")), "options", None)
        if options is not None:
            data["gloo_num_threads"] = options._threads
    return data


def _of_steps(reducer: Reducer, record: Record) -> LoggingData:
    data: LoggingData = {
        "bucket_cap_bytes": reducer.cap_bytes,
        "bucket_sizes": _joined(reducer.first_sizes),
    }
    if reducer.measured:
        members = (" ".join(map(str, bucket.members)) for bucket in reducer.buckets)
        data |= {
            "has_rebuilt_buckets": 1,
            "rebuilt_bucket_sizes": _joined(sizes_of(reducer.buckets)),
            "rebuilt_per_bucket_param_indices": _joined(members),
        }
    if reducer.reached is not None:
        silent = set(range(len(reducer.parameters))) - set(reducer.arrivals)
        data |= {
            "num_buckets_reduced": reducer.started,
            "unused_parameter_size": sum(reducer.parameters[n].nbytes for n in silent),
            "prev_iteration_grad_ready_order_indices": _joined(reducer.arrivals),
            "can_set_static_graph": int(reducer.graph_static),
        }
    return data | record.times()


def sizes_of(buckets: Iterable[Bucket]) -> list[int]:
    """Bytes of the gradients in each."""
    return [bucket.flat.nbytes for bucket in buckets]


def _joined(numbers: Iterable[Any]) -> str:
    return ", ".join(map(str, numbers))
