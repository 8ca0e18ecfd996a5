"""Provides DistributedDataParallel for any module: `net = p3d.DistributedDataParallel(net)`."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import Group, GroupLike, group_of
from parallel3d.data_parallel.broadcast import broadcast_all
from parallel3d.data_parallel.gradient_mean import GradientMean
from parallel3d.data_parallel.reducer import CommHook
from parallel3d.private_names import (
    IGNORED_BY_DDP,
    current_graph_task_id,
    execution_engine,
    post_accumulate_grad_hooks,
    steps_in_backward,
    tree_leaves,
    tree_map_only,
)

PREFIX = "module."
_HOOK = "give a hook to register_comm_hook"
# Arguments of PyTorch's class: the default, which is accepted, and what to use instead.
NOT_TAKEN: dict[str, tuple[object, str]] = {
    "dim": (0, "give each rank its own part of the batch"),
    "init_sync": (True, "leave it out: every rank starts with the first rank's weights"),
    "check_reduction": (False, "leave it out: PyTorch ignores it too"),
    "static_graph": (
        False,
        "leave it out, and checkpoint layers with use_reentrant=False, which gives each parameter "
        "one gradient in a backward",
    ),
    "delay_all_reduce_named_params": (None, _HOOK),
    "param_to_hook_all_reduce": (None, _HOOK),
    "mixed_precision": (None, "run the forward under torch.autocast"),
    "device_mesh": (None, "give the mesh as process_group"),
    "skip_all_reduce_unused_params": (False, "find_unused_parameters=True"),
    "bucket_cap_mb_list": (None, "bucket_cap_mb, one size for all buckets"),
    "batched_grad_copy": (False, "gradient_as_bucket_view=True, which copies nothing"),
    "forward_sync_buffers": (None, "broadcast_buffers"),
    "lazy_bucket_allocation": (False, "wrap the module before its first forward"),
}
# Other names of PyTorch's class.
NOT_THERE = {
    "join": "give every rank the same number of batches, as DistributedSampler does",
    "_set_static_graph": NOT_TAKEN["static_graph"][1],
}


class DistributedDataParallel(nn.Module):
    """Replicates a module on the ranks of a group, which average the gradients in each backward.

    Every rank starts with the weights of the group's first rank. After each backward the `.grad` of
    every parameter is the mean over the ranks. Names of parameters, attributes and state dicts are
    those of the module itself. Parameters and buffers named in the module's
    `_ddp_params_and_buffers_to_ignore` are not synchronised.

    The constructor, forward (which broadcasts buffers) and backward are collective. Parameters must
    not be added or replaced afterwards.

    Args:
        module: the module to replicate, with all parameters on one device.
        device_ids: None, or the module's device, to which inputs are moved.
        output_device: None or the same device.
        broadcast_buffers: broadcast the first rank's buffers in every forward.
        process_group: a group of `parallel3d.init` (groups.dp), a ProcessGroup of PyTorch, a
            one-dimensional mesh, or None for all ranks.
        bucket_cap_mb: size in MiB at which a bucket closes. The default is 1 for the first bucket
            and 25 for the others (128 on an accelerator).
        find_unused_parameters: look in the graph for parameters that a backward will not reach, so
            that their buckets need not wait for its end. Without it, unused parameters are not an
            error either.
        gradient_as_bucket_view: keep gradients in the buckets instead of copying them out.
        others: arguments of PyTorch's class that are not here, with their defaults.

    Raises:
        ValueError: if an argument is not supported, if the ranks' modules differ (on every rank,
            with the first difference), if parameters are on several devices, if an optimizer steps
            in the backward, or if another wrapper has the same parameter and either of the two
            keeps gradients in buckets.
        RuntimeError: if there is no parameter to train; in a forward, if a parameter that was
            frozen when the module was wrapped is trained now; in a backward, if a parameter got a
            second gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        *,
        broadcast_buffers: bool | None = True,
        process_group: GroupLike = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        _check_others(others)
        self.group = _group_of(device_ids, process_group)
        self._ignored = frozenset(getattr(module, IGNORED_BY_DDP, ()))
        named = [(n, p) for n, p in module.named_parameters() if n not in self._ignored]
        buffers = [(n, b) for n, b in module.named_buffers() if n not in self._ignored]
        some = next(module.parameters(), None)
        verify_params_across_ranks(
            named, buffers, self.group, torch.device("cpu") if some is None else some.device
        )
        trained = [(name, p) for name, p in named if p.requires_grad]
        check_trainable(trained, module)
        check_shared(trained, gradient_as_bucket_view)
        self.device = trained[0][1].device
        self._inputs_to = _own_device(device_ids, self.device)
        if output_device is not None:
            _own_device([output_device], self.device, "output_device")
        broadcast_all([*(p.detach() for _, p in named), *(b for _, b in buffers)], 0, self.group)
        self.module = module
        self.broadcast_buffers = broadcast_buffers is not False  # None is PyTorch's default
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = self.require_forward_sync = True
        # The names below are private: a public one would hide an attribute of the module.
        self._frozen = {name: p for name, p in named if not p.requires_grad}
        self._names = [name for name, _ in trained]
        self._numbers = {p: number for number, (_, p) in enumerate(trained)}
        self._running = False  # whether a backward is running, or has raised an error
        self._enabled = True  # whether backwards average gradients now
        self._unused: set[int] | None = None
        self._mean: GradientMean | None = None
        if self.group.size > 1:
            self._mean = GradientMean(
                list(self._numbers), self.group, bucket_cap_mb, gradient_as_bucket_view
            )
            # `engine.BucketedDataParallel` explains why the reference is weak.
            mine = weakref.ref(self)
            for number, parameter in enumerate(self._numbers):
                parameter.register_post_accumulate_grad_hook(_Watch(mine, number))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Runs the module's forward on this rank's inputs."""
        if self._inputs_to is not None:
            inputs, named = tree_map_only(
                Tensor, lambda t: t.to(self._inputs_to, non_blocking=True), (inputs, named)
            )
        if self._mean is None:
            return self.module(*inputs, **named)
        if current_graph_task_id() < 0:
            self._running = False  # if it is true, the last backward raised an error
        syncs = torch.is_grad_enabled() and self.require_backward_grad_sync
        if syncs:
            self._check_frozen()
        if self.broadcast_buffers and self.require_forward_sync:
            buffers = self.module.named_buffers()
            broadcast_all([b for n, b in buffers if n not in self._ignored], 0, self.group)
        output = self.module(*inputs, **named)
        self.require_forward_sync = syncs
        if torch.is_grad_enabled():
            self._enabled = syncs
        if syncs:
            self._watch(output)
        return output

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was frozen when the module was wrapped, so its gradient would be this "
                    "rank's alone; wrap the module again"
                )

    def _watch(self, output: Any) -> None:
        """Makes the backward of an output begin the mean, even if it reaches no parameter."""
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        for tensor in tensors:
            tensor.register_hook(self._begin)
        if self.find_unused_parameters:
            unused = unused_parameters(tensors, self._numbers) if tensors else set()
            # After several forwards their backwards may come in any order.
            self._unused = unused if self._unused is None else unused & self._unused

    def _begin(self, _: Tensor | None = None) -> None:
        """Begins a backward, unless it is nested in a backward that is already running."""
        if self._running or not self._enabled:
            return
        assert self._mean is not None  # without it, there are no hooks
        self._running = True
        # The callback runs at the end of the outermost backward, not of a layer's recomputation.
        execution_engine.queue_callback(self._end)
        self._mean.begin(self._unused or ())
        self._unused = None

    def _arrived(self, number: int) -> None:
        if not self._enabled:
            return
        self._begin()
        assert self._mean is not None
        if self._mean.arrived(number) < 0:
            raise RuntimeError(
                f"{self._names[number]} got a second gradient in one backward; checkpoint layers "
                "with use_reentrant=False, which adds up the gradients of a parameter first"
            )

    def _end(self) -> None:
        self._running = False
        assert self._mean is not None
        self._mean.finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients in a `with` block; the next backward after it reduces them."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Lets `hook(state, bucket)` reduce each bucket's gradients.

        Like a hook of PyTorch's class, `hook` gets a `GradBucket` whose gradients are neither
        summed nor divided, and returns a future of a tensor of the same shape. A hook is registered
        once, before the first backward. A group of one rank ignores it.

        Raises:
            TypeError: if the hook is not callable; later, in a backward, if it returns no future.
            RuntimeError: for a second hook; later, in a backward, if the hook returned another
                shape.
        """
        if not callable(hook):
            raise TypeError(
                f"the communication hook must be callable; it is a {type(hook).__name__}"
            )
        if self._mean is None:
            return
        if self._mean.hook is not None:
            raise RuntimeError("a communication hook is already registered; only one is allowed")
        self._mean.hook = (state, hook)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's state dict, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a state dict into the module; its names may have PyTorch's prefix `module.`.

        Raises ValueError for `assign`, which would replace the parameters.
        """
        if assign:
            raise ValueError("assign=True replaces parameters; load the weights before wrapping")
        if state_dict and all(name.startswith(PREFIX) for name in state_dict):
            known = self.module.state_dict()
            if not any(name.startswith(PREFIX) for name in known):
                state_dict = {name[len(PREFIX) :]: v for name, v in state_dict.items()}
        return self.module.load_state_dict(state_dict, strict)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[prefix + PREFIX + name[len(prefix) :]] = state_dict.pop(name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_modules(memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the wrapper or, if there is none, of the module."""
        if name in NOT_THERE:
            raise AttributeError(f"{name} is not supported; {NOT_THERE[name]}")
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuses a copy, which would share the ranks' buckets."""
        raise TypeError(
            "a DistributedDataParallel cannot be copied or pickled; copy its .module, or save its "
            "state_dict()"
        )


@dataclass(frozen=True)
class _Watch:
    net: weakref.ref[DistributedDataParallel]
    number: int

    def __call__(self, _: Tensor) -> None:
        net = self.net()
        if net is not None:
            net._arrived(self.number)


def _check_others(others: Mapping[str, object]) -> None:
    for name, value in others.items():
        if name not in NOT_TAKEN:
            raise TypeError(f"DistributedDataParallel has no argument {name}")
        default, instead = NOT_TAKEN[name]
        if value != default:
            raise ValueError(f"{name}={value!r} is not supported; {instead}")


def _group_of(device_ids: Sequence[int | torch.device] | None, process_group: GroupLike) -> Group:
    """Returns the group that `process_group` names.

    Raises TypeError if `device_ids` is not a list of devices, and ValueError if this rank is not in
    the group, or if there is neither a group nor torch.distributed.
    """
    if device_ids is not None and not isinstance(device_ids, (list, tuple)):
        raise TypeError(
            "the second argument must be device_ids, a list of the module's own device, as in "
            f"PyTorch; it is a {type(device_ids).__name__}: give a group as process_group=groups.dp"
        )
    if process_group is None and not dist.is_initialized():
        raise ValueError(
            "torch.distributed is not initialised; call parallel3d.init() or "
            "torch.distributed.init_process_group() before the module is wrapped"
        )
    return group_of(process_group)


def _own_device(
    device_ids: Sequence[int | torch.device] | None, device: torch.device, key: str = "device_ids"
) -> torch.device | None:
    if not device_ids:
        return None
    named = device_ids[0]
    wanted = torch.device(device.type, named) if isinstance(named, int) else torch.device(named)
    if len(device_ids) > 1 or wanted != device:
        raise ValueError(
            f"{key}={list(device_ids)} must name the one device of the module, {device}, or be None"
        )
    return device


def unused_parameters(outputs: Iterable[Tensor], numbers: Mapping[nn.Parameter, int]) -> set[int]:
    """Returns the indices (values of `numbers`) of parameters on which no output depends."""
    left = dict(numbers)
    nodes: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(nodes)
    while nodes and left:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            left.pop(variable, None)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    for tensor in outputs:
        if isinstance(tensor, nn.Parameter):
            left.pop(tensor, None)
    return set(left.values())


def described(kind: str, name: str, tensor: Tensor) -> str:
    """Describes a parameter or a buffer; all ranks must have the same descriptions."""
    layout = "not known yet"
    if not is_lazy(tensor):
        layout = f"shape {list(tensor.shape)}, strides {list(tensor.stride())}"
    return f"{kind} {name} ({layout}, {tensor.dtype}, requires_grad={tensor.requires_grad})"


def verify_params_across_ranks(
    parameters: Sequence[tuple[str, nn.Parameter]],
    buffers: Sequence[tuple[str, Tensor]],
    group: Group,
    device: torch.device,
) -> None:
    """Raises the same ValueError on every rank if the modules of two ranks differ; collective."""
    mine = [described("parameter", *named) for named in parameters]
    mine += [described("buffer", *named) for named in buffers]
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(all_gather_json(digest, group.handle, device))) == 1:
        return
    first, *others = all_gather_json(mine, group.handle, device)
    for rank, theirs in zip(group.ranks[1:], others, strict=True):
        for a, b in zip_longest(first, theirs, fillvalue="nothing more"):
            if a != b:
                raise ValueError(
                    f"the ranks' modules differ: rank {group.ranks[0]} has {a}, rank {rank} has {b}"
                )


def check_trainable(trained: Sequence[tuple[str, nn.Parameter]], module: nn.Module) -> None:
    """Checks that the module can be wrapped; the ranks' modules must be known to agree.

    Raises RuntimeError if no parameter requires a gradient, and ValueError for any other obstacle.
    """
    if not trained:
        raise RuntimeError(
            "the module has no parameter that requires a gradient: there is nothing to reduce"
        )
    for name, parameter in trained:
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name} has no shape yet; run a forward pass before wrapping the module"
            )
        if hasattr(parameter, "placements"):
            raise ValueError(
                f"parameter {name} is a DTensor, made by fully_shard, and must not be wrapped: "
                "fully_shard averages gradients itself; give the module without it"
            )
        if steps_in_backward(parameter):
            raise ValueError(
                f"parameter {name} has an optimizer that steps in the backward "
                "(_apply_optimizer_in_backward), with this rank's gradient alone; step it after "
                "the backward instead"
            )
    devices = sorted({str(parameter.device) for _, parameter in trained})
    if len(devices) > 1:
        raise ValueError(
            f"the module's parameters are on {' and '.join(devices)}; they must be on one device"
        )
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise ValueError(
                f"{name} has sparse gradients, which cannot be reduced; set sparse=False"
            )


def check_shared(trained: Sequence[tuple[str, nn.Parameter]], as_views: bool) -> None:
    """Raises ValueError if two wrappers share a parameter and either keeps gradients in buckets."""
    for name, parameter in trained:
        for hook in (post_accumulate_grad_hooks(parameter) or {}).values():
            other = hook.net() if isinstance(hook, _Watch) else None
            # The wrapper that sends its bucket first would scale a gradient that the other wrapper
            # must still read.
            if other is not None and (as_views or other.gradient_as_bucket_view):
                raise ValueError(
                    f"parameter {name} is already in another DistributedDataParallel, which is "
                    "not allowed if either has gradient_as_bucket_view=True; the nearest is False "
                    "for both, or delete the other first"
                )
