"""Gives access to private names of other packages, under names of parallel3d.

Any release may remove a private name or change its meaning. So parallel3d takes such names only
from here, and a missing one raises UserError at its first use. tests/unit/test_private_names.py
checks both, and also checks with the installed versions that each name still does what is needed.
The names were looked up in torch 2.11, 2.13 and 2.15, hydra-core 1.3.8 and fsspec 2026.9.

A package is imported at the first use of one of its names. The line

    from parallel3d.private_names import foreach_copy_

binds a name once, so that calls cost no more than calls of torch's own function.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from parallel3d.errors import UserError
from parallel3d.versions import installed, parts, tried, within

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    import torch
    from torch import Tensor, nn
    from torch._C._distributed_c10d import Backend as Backend
    from torch.distributed import ProcessGroup

# Maps our name to the package's "module:path". A path that ends in "()" leads to a descriptor, and
# its __get__ is returned, which reads the attribute of a given object.
NAMES = {
    # Multi-tensor and fused kernels.
    "foreach_add_": "torch:_foreach_add_",
    "foreach_copy_": "torch:_foreach_copy_",
    "foreach_div_": "torch:_foreach_div_",
    "foreach_lerp_": "torch:_foreach_lerp_",
    "foreach_mul_": "torch:_foreach_mul_",
    "foreach_norm": "torch:_foreach_norm",
    "fused_adamw_": "torch:_fused_adamw_",
    "fused_sgd_": "torch:_fused_sgd_",
    # Operators; the test calls them with the arguments that parallel3d gives.
    "flash_forward": "torch:ops.aten._flash_attention_forward",
    "flash_backward": "torch:ops.aten._flash_attention_backward",
    "cpu_flash_forward": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "cpu_flash_backward": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "math_attention": "torch:ops.aten._scaled_dot_product_attention_math",
    "aten_foreach_copy_": "torch:ops.aten._foreach_copy_",
    "aten_fused_sgd_": "torch:ops.aten._fused_sgd_",
    "to_copy": "torch:ops.aten._to_copy",
    "local_scalar_dense": "torch:ops.aten._local_scalar_dense",
    "fused_gru_cell": "torch:ops.aten._thnn_fused_gru_cell",
    "fused_gru_cell_backward": "torch:ops.aten._thnn_fused_gru_cell_backward",
    "fused_lstm_cell": "torch:ops.aten._thnn_fused_lstm_cell",
    "fused_lstm_cell_backward": "torch:ops.aten._thnn_fused_lstm_cell_backward_impl",
    "functional_collectives": "torch:ops._c10d_functional",
    # Autograd.
    "backward_hooks": "torch:Tensor._backward_hooks()",
    "post_accumulate_grad_hooks": "torch:Tensor._post_accumulate_grad_hooks()",
    "current_graph_task_id": "torch:_C._current_graph_task_id",
    "top_saved_tensors_hooks": "torch:_C._autograd._top_saved_tensors_default_hooks",
    "execution_engine": "torch:autograd.Variable._execution_engine",
    "version_of": "torch:Tensor._version()",
    "unsafe_preserve_version_counter": "torch:autograd._unsafe_preserve_version_counter",
    # Tensors.
    "DispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "storage_address": "torch:UntypedStorage._cdata()",
    "make_wrapper_subclass": "torch:Tensor._make_wrapper_subclass",
    "disabled_torch_function": "torch:_C._disabled_torch_function_impl",
    "DisabledDispatch": "torch:_C._DisableTorchDispatch",
    "includes_meta": "torch:_C._meta_in_tls_dispatch_include",
    "include_meta": "torch:_C._set_meta_in_tls_dispatch_include",
    "TensorBase": "torch:_C.TensorBase",
    "Future": "torch:_C.Future",
    "is_dense": "torch._prims_common:is_non_overlapping_and_dense_or_false",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "tree_map_only": "torch.utils._pytree:tree_map_only",
    "local_shape_and_offset": (
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset"
    ),
    # torch.distributed.
    "abort_process_group": "torch.distributed.distributed_c10d:_abort_process_group",
    "default_store": "torch.distributed.distributed_c10d:_get_default_store",
    "world_state": "torch.distributed.distributed_c10d:_world",
    "GlooOptions": "torch.distributed:ProcessGroupGloo._Options",
    "root_of_mesh": "torch.distributed.device_mesh:DeviceMesh._get_root_mesh",
    "self_recording_backends": "torch.distributed.distributed_c10d:_FR_SELF_RECORDING_BACKENDS",
    # Compilers.
    "compile_fx": "torch._inductor.compile_fx:compile_fx",
    "compile_fx_inner": "torch._inductor.compile_fx:compile_fx_inner",
    "inductor_cache": "torch._inductor.runtime.runtime_utils:cache_dir",
    "RecompileLimit": "torch._dynamo.exc:FailOnRecompileLimitHit",
    "DynamoError": "torch._dynamo.exc:TorchDynamoException",
    "has_triton": "torch.utils._triton:has_triton",
    # The simulated device.
    "setup_python_backend": (
        "torch.utils.backend_registration:_setup_privateuseone_for_python_backend"
    ),
    "sanitizer": "torch.cuda._sanitizer:",
    "TensorsAccessed": "torch.cuda._sanitizer:_TensorsAccessed",
    "handle_kernel_launch": "torch.cuda._sanitizer:EventHandler._handle_kernel_launch",
    # Hydra.
    "hydra_arguments": "hydra._internal.utils:get_args_parser",
    "HydraFiles": "hydra._internal.core_plugins.file_config_source:FileConfigSource",
    "hydra_sources": "hydra._internal.sources_registry:SourcesRegistry",
}
# The first version of the package that has the name; with older versions, the name is None.
SINCE = {"self_recording_backends": "2.15"}
# First part of a module's name → name of its package.
PACKAGES = {"torch": "torch", "hydra": "hydra-core"}

# Private methods of other packages' classes that parallel3d's subclasses override.
OVERRIDDEN = {
    "torch.nn.Module": ("_apply", "_load_from_state_dict", "_save_to_state_dict"),
    "torch.distributed.ProcessGroup": (
        "_allgather_base",
        "_device_types",
        "_get_backend",
        "_reduce_scatter_base",
        "_set_group_desc",
        "_set_group_name",
        "_set_sequence_number_for_group",  # only up to torch 2.14
    ),
    "torch.cuda._sanitizer.StreamSynchronizations": ("_state_wait_for_other",),
}

# Names of operators, as schemas spell them.
WITHOUT_A_KERNEL = ("_unsafe_view", "_reshape_alias")
OVERWRITING = ("_foreach_copy_", "_foreach_zero_")
OF_UNKNOWN_SIZE = ("_local_scalar_dense", "_unique2")
OF_MANY_TENSORS = ("_foreach_", "_fused_adam")  # prefixes of names
FOREACH_NORM = "_foreach_norm"

# An attribute of users' modules that PyTorch's DDP reads too.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
# The name of the innermost Python frame in a thread that runs a backward.
BACKWARD_FRAME = "_engine_run_backward"


def __getattr__(ours: str) -> Any:
    if ours not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {ours!r}")
    found = globals()[ours] = find(NAMES[ours], SINCE.get(ours))
    return found


def find(place: str, since: str | None = None) -> Any:
    """Returns the object at "module:name"; None before version `since`. Raises UserError."""
    module, _, path = place.partition(":")
    package = PACKAGES[module.partition(".")[0]]
    version = installed(package) or ""
    if since is not None and parts(version) < parts(since):
        return None
    try:
        found: Any = import_module(module)
        for name in path.removesuffix("()").split(".") if path else ():
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise missing(package, place.replace(":", ".").strip(".")) from error
    return found.__get__ if path.endswith("()") else found


def missing(package: str, name: str) -> UserError:
    return UserError(
        f"{package} {installed(package)} has no {name.removesuffix('()')}, which parallel3d uses; "
        f"it was tried with {tried(package)}: pip install '{package}{within(package)}'"
    )


# The functions below read attributes that an object only gets when it is created.


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the module's own dictionaries of parameters and of submodules."""
    return module._parameters, module._modules


def schema_of(operator: Any) -> Any:
    """Returns the schema of an operator's overload, with its name, arguments and aliases."""
    return operator._schema


def steps_in_backward(parameter: nn.Parameter) -> bool:
    """Returns whether `_apply_optimizer_in_backward` gave the parameter an optimizer."""
    return hasattr(parameter, "_in_backward_optimizers")


def is_of_fsdp1(parameter: Tensor) -> bool:
    """Returns whether FSDP1 holds the parameter, with or without use_orig_params."""
    if not hasattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel"):
        return False
    flat, mark = _marks_of_fsdp1()
    return isinstance(parameter, flat) or hasattr(parameter, mark)


@functools.cache
def _marks_of_fsdp1() -> tuple[type, str]:
    flat = find("torch.distributed.fsdp._flat_param:FlatParameter")
    return flat, find("torch.distributed.fsdp._common_utils:FSDP_FLATTENED")


def path_in(files: Any, address: str) -> str:
    """Returns an address without its protocol, as a path in fsspec's file system `files`."""
    return files._strip_protocol(address)


def backend_for(group: ProcessGroup, device: torch.device) -> Backend:
    """Returns the group's backend for tensors on `device`."""
    return group._get_backend(device)


def set_devices(options: Any, devices: list[Any]) -> None:
    """Sets the network devices in the options of a gloo group."""
    options._devices = devices


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Sets the time limit in the options of a process group of any backend."""
    options._timeout = timeout


def memory_history(device_module: Any) -> tuple[Callable[..., None], Callable[..., None]] | None:
    """Returns functions that record the allocator's history and write it to a file.

    The first function starts and stops the recording. Returns None if the device's module has no
    `memory`.
    """
    memory = getattr(device_module, "memory", None)
    if memory is None:
        return None
    try:
        return memory._record_memory_history, memory._dump_snapshot
    except AttributeError as error:
        raise missing("torch", f"{memory.__name__}.{error.name}") from error


def simulated_backend_is_a_group(name: str, group: type) -> None:
    """Lets torch.distributed use a backend in Python whose groups are ProcessGroups themselves.

    Such groups have no C++ backend. Torch since 2.15 would install a hook on that backend to record
    operations, and torch since 2.14 would split a group with it.
    """
    recording = find(NAMES["self_recording_backends"], SINCE["self_recording_backends"])
    if recording is not None:
        recording.add(name)
    c10d = find("torch.distributed.distributed_c10d:")
    plain = find("torch.distributed.distributed_c10d:_get_split_source")

    def split_source(*args: Any) -> Any:
        source = plain(*args)
        return None if isinstance(source, group) else source

    c10d._get_split_source = split_source


def flight_records() -> list[str]:
    """Returns the flight recorder's records as JSON, one for each kind of process group.

    Up to torch 2.14, NCCL's groups have a record of their own, which only builds with NCCL can
    read. Since torch 2.15, they are in the common record under the name of their backend.
    """
    every = {"includeCollectives": True, "onlyActive": False}
    dumps = []
    if find("torch.distributed:is_nccl_available")():
        dumps.append(find("torch._C._distributed_c10d:_dump_nccl_trace_json")(**every))
    dump = find("torch._C._distributed_c10d:_dump_fr_trace_json")
    if parts(installed("torch") or "") >= (2, 15):
        dumps += [dump(**every, backend=name) for name in ("nccl", "nccl2", "nccl-lazy")]
    else:
        dumps.append(dump(**every))
    return [text.decode() if isinstance(text, bytes) else text for text in dumps]
