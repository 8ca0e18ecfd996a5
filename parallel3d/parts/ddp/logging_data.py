"""What `_get_ddp_logging_data` tells, under PyTorch's names: arguments, buckets, steps, errors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from parallel3d.parts.ddp.step_record import DDPStepRecord, sizes_of

if TYPE_CHECKING:
    from parallel3d.parts.ddp.ddp import DistributedDataParallel
    from parallel3d.parts.ddp.reducer import DDPReducer

LoggingData = dict[str, int | str]
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


def _of_steps(reducer: DDPReducer, record: DDPStepRecord) -> LoggingData:
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


def _joined(numbers: Iterable[Any]) -> str:
    return ", ".join(map(str, numbers))
