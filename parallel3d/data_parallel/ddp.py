"""Provides DistributedDataParallel for any module: `net = p3d.DistributedDataParallel(net)`."""

from __future__ import annotations

import copy
import hashlib
import json
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from parallel3d.blueprint.buckets import MIB
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import Group, GroupLike, group_of
from parallel3d.data_parallel.averager import GradientAverager, check_shared
from parallel3d.data_parallel.reducer import CommHook
from parallel3d.data_parallel.transport import (
    MESSAGE_BYTES,
    BufferSync,
    SharedTransport,
    broadcast_all,
)
from parallel3d.private_names import (
    IGNORED_BY_DDP,
    current_graph_task_id,
    is_joining,
    steps_in_backward,
    tables_of,
    tree_leaves,
    tree_map_only,
)

PREFIX = "module."
NOT_COPIED = (  # `copy.deepcopy` and pickle leave these attributes out
    "group",
    "averager",
    "buffer_sync",
    "frozen",
    "numbers",
    "contents",
    "device_mesh",
)


class DistributedDataParallel(nn.Module, Joinable):
    """Replicates a module on the ranks of a group, which average the gradients in each backward.

    Every rank starts with the weights of the group's first rank. After each backward the `.grad` of
    every parameter is the mean over the ranks. Names of parameters, attributes and state dicts are
    those of the module itself. Arguments and their order are those of
    `torch.nn.parallel.DistributedDataParallel`; arguments that are not listed below must have their
    defaults. Parameters and buffers named in the module's `_ddp_params_and_buffers_to_ignore` are
    not synchronised.

    The constructor, forward (which broadcasts buffers) and backward are collective. Parameters must
    not be added or replaced afterwards. `copy.deepcopy` is not collective, and neither is pickling,
    which requires the group of all ranks. A copy has no communication hook, and its first forward
    with gradients is its first collective call.

    Args:
        module: the module to replicate, with all parameters on one device.
        device_ids: None, or the module's device, to which inputs are moved.
        output_device: None or the same device.
        broadcast_buffers: broadcast the first rank's buffers now and in every forward.
        forward_sync_buffers: broadcast them in every forward; overrides `broadcast_buffers`.
        process_group: a group of `parallel3d.init` (groups.dp), a ProcessGroup of PyTorch, a
            one-dimensional mesh, or None for all ranks.
        device_mesh: a one-dimensional mesh, in place of `process_group`.
        check_reduction: ignored, as in PyTorch.
        init_sync: verify that the ranks' modules agree, and broadcast the first rank's values.
        bucket_cap_mb: size in MiB at which a bucket closes. The default is 1 for the first bucket
            and 25 for the others (128 on an accelerator, 1 in shared memory).
        find_unused_parameters: look in the graph for parameters that a backward will not reach, so
            that their buckets need not wait for its end. Without it, unused parameters are not an
            error either.
        gradient_as_bucket_view: keep gradients in the buckets instead of copying them out.
        static_graph: promise that every backward reaches each parameter the same number of times.
        bucket_cap_mb_list: a size for each bucket, in place of `bucket_cap_mb`; the last one also
            applies to further buckets.
        overlap: start reductions during the backward; if False, all start at its end.

    Raises:
        ValueError: if the ranks' modules differ (on every rank, with the first difference), if
            parameters are on several devices, if an optimizer steps in the backward, or if another
            wrapper has the same parameter and either of the two keeps gradients in buckets.
        RuntimeError: if there is no parameter to train; in a forward, if a trained parameter was
            frozen when the module was wrapped, or was added or replaced since; in a backward, on
            every rank, if a parameter got a second gradient or, with static_graph, a different
            number of gradients than in the first backward.
    """

    broadcast_bucket_size = MESSAGE_BYTES

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: GroupLike = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: None = None,
        param_to_hook_all_reduce: None = None,
        mixed_precision: None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        _check_defaults(
            dim=(dim, 0),
            delay_all_reduce_named_params=(delay_all_reduce_named_params, None),
            param_to_hook_all_reduce=(param_to_hook_all_reduce, None),
            mixed_precision=(mixed_precision, None),
            skip_all_reduce_unused_params=(skip_all_reduce_unused_params, False),
            batched_grad_copy=(batched_grad_copy, False),
            lazy_bucket_allocation=(lazy_bucket_allocation, False),
        )
        _check_caps(bucket_cap_mb_list)
        _warn_of_deprecated(broadcast_buffers, forward_sync_buffers, check_reduction)
        self.group = _group_of(device_ids, process_group, device_mesh)
        self.parameters_to_ignore = frozenset(getattr(module, IGNORED_BY_DDP, ()))
        some = next(module.parameters(), None)
        if init_sync:
            device = torch.device("cpu") if some is None else some.device
            verify_params_across_ranks(module, self.group, device, self.parameters_to_ignore)
        named = left(module.named_parameters(), self.parameters_to_ignore)
        trained = [(name, p) for name, p in named if p.requires_grad]
        check_trainable(trained, module)
        check_shared(trained, gradient_as_bucket_view)
        self.device = trained[0][1].device
        self.inputs_to = _own_device(device_ids, self.device)
        if output_device is not None:
            _own_device([output_device], self.device, "output_device")
        wanted = broadcast_buffers is None or broadcast_buffers
        if init_sync:
            sent = [p.detach() for _, p in named]
            if wanted or forward_sync_buffers is not None:
                sent += [b for _, b in left(module.named_buffers(), self.parameters_to_ignore)]
            broadcast_all(sent, 0, self.group)
        self.module = module
        self.broadcast_buffers = wanted if forward_sync_buffers is None else forward_sync_buffers
        self._bucket_cap_mb = list(bucket_cap_mb_list) if bucket_cap_mb_list else bucket_cap_mb
        self._overlap = overlap
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = self.require_forward_sync = True
        self.by_initial_size = True  # see `join`
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._reset_state()
        if self.group.size > 1:
            self._open()

    def _reset_state(self) -> None:
        """Initialises the state that is neither copied nor pickled; not collective."""
        named = left(self.module.named_parameters(), self.parameters_to_ignore)
        self.frozen = [p for _, p in named if not p.requires_grad]
        self._trained = [name for name, p in named if p.requires_grad]
        self.numbers = {p: i for i, p in enumerate(p for _, p in named if p.requires_grad)}
        self.contents = Contents(self.module)
        self.buffer_sync: BufferSync | None = None
        self.averager: GradientAverager | None = None

    def _open(self) -> GradientAverager:
        self.buffer_sync = BufferSync(
            self.module, self.group, self.device, self.parameters_to_ignore
        )
        self.averager = GradientAverager(
            self._trained,
            list(self.numbers),
            self.group,
            bucket_cap_mb=self._bucket_cap_mb,
            as_views=self.gradient_as_bucket_view,
            static=self.static_graph,
            measure=self.static_graph or not self.find_unused_parameters,
            overlap=self._overlap,
        )
        return self.averager

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Runs the module's forward on this rank's inputs."""
        if self.inputs_to is not None:
            inputs, named = tree_map_only(
                Tensor, lambda t: t.to(self.inputs_to, non_blocking=True), (inputs, named)
            )
        if self.averager is None and self.group.size > 1 and torch.is_grad_enabled():
            self._open()  # this module is a copy
        if self.averager is None:
            return self.module(*inputs, **named)
        self._before_forward(self.averager)
        output = self.module(*inputs, **named)
        self._after_forward(self.averager, output)
        return output

    def _before_forward(self, averager: GradientAverager) -> None:
        if averager.running and current_graph_task_id() < 0:
            averager.running = False  # the last backward raised
        if not averager.began:
            check_optimizers(list(zip(averager.names, averager.parameters, strict=True)))
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._check_contents()
        joining = is_joining(self)
        if joining:
            self._notify_join(averager)
        if self.will_sync_buffers():
            if joining:
                self.sync_buffers_joined(joined=False)
            else:
                assert self.buffer_sync is not None  # implied by `will_sync_buffers`
                self.buffer_sync.from_first()
        if joining:
            any_of(self.group, self.require_backward_grad_sync, self.device)

    def _check_contents(self) -> None:
        # Dynamo would trace the comparison and guard on its result.
        if torch.compiler.is_compiling():
            return
        if not self.contents.changed() and not any(p.requires_grad for p in self.frozen):
            return
        for name, parameter in left(self.module.named_parameters(), self.parameters_to_ignore):
            # `functional_call` puts plain tensors in place of parameters for one forward.
            trained = isinstance(parameter, nn.Parameter) and parameter.requires_grad
            if trained and parameter not in self.numbers:
                raise RuntimeError(
                    f"{name} was frozen when the module was wrapped, or was added or replaced "
                    "since, so its gradient would be this rank's alone; wrap the module again"
                )

    def _after_forward(self, averager: GradientAverager, output: Any) -> None:
        self.require_forward_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if not torch.is_grad_enabled():
            return
        averager.enabled = self.require_backward_grad_sync
        if not averager.enabled:
            return
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        for tensor in tensors:
            tensor.register_hook(averager.output_hook)
        # Shared memory sums all buckets at the end of the backward anyway.
        overlaps = not isinstance(averager.transport, SharedTransport)
        if self.find_unused_parameters and not self.static_graph and overlaps:
            unused = unused_parameters(tensors, self.numbers) if tensors else set()
            # After several forwards their backwards may come in any order.
            averager.unused = unused if averager.unused is None else unused & averager.unused

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
        once, before the first backward.

        Raises:
            TypeError: if the hook is not callable; later, in a backward, if it returns no future.
            RuntimeError: for a second hook, or for a hook after the first backward; later, in a
                backward, on every rank, if the hook returned another shape.
        """
        if not callable(hook):
            raise TypeError(
                f"the communication hook must be callable; it is a {type(hook).__name__}"
            )
        averager = self._open() if self.averager is None else self.averager
        averager.use(state, hook)

    @property
    def forward_sync_buffers(self) -> bool:
        return self.broadcast_buffers

    def will_sync_buffers(self) -> bool:
        """Returns whether the next forward broadcasts the first rank's buffers."""
        wanted = self.require_forward_sync and self.broadcast_buffers
        return wanted and self.group.size > 1 and bool(self.buffer_sync and self.buffer_sync.places)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Lets ranks have different numbers of inputs in a `with` block, then makes models equal.

        Args:
            divide_by_initial_world_size: divide the sums by the number of all ranks or, if False,
                by the number of ranks that still have inputs.
            enable: give False if all ranks have the same number of inputs.
            throw_on_early_termination: raise RuntimeError on all ranks when a rank has no more
                inputs.
        """
        if self.group.size == 1:
            return nullcontext()
        if self.averager is None:
            self._open()  # this module is a copy
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return DDPJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        return self.group.handle

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self.group.handle

    def _notify_join(self, averager: GradientAverager) -> None:
        work = Join.notify_join_context(self)
        active = self.group.size
        if work is not None:
            work.wait()
            active = int(work.result()[0].item())
        averager.scale = 1.0 / (self.group.size if self.by_initial_size else active)

    def sync_buffers_joined(self, joined: bool) -> None:
        """Broadcasts the buffers of the highest rank that still has inputs; collective."""
        source = highest(self.group, -1 if joined else self.group.index, self.device)
        assert self.buffer_sync is not None  # callers check `will_sync_buffers`
        broadcast_all(self.buffer_sync.current(), source, self.group)

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
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self._state(), memo) | {"group": self.group})
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle; raises RuntimeError unless the group contains all ranks."""
        if self.group.size != (dist.get_world_size() if dist.is_initialized() else 1):
            raise RuntimeError(
                f"a DistributedDataParallel over {self.group.size} of {dist.get_world_size()} "
                "ranks cannot be pickled, as it holds their group; pickle its .module, or wrap "
                "with the group of all ranks"
            )
        return self._state()

    def _state(self) -> dict[str, Any]:
        return {key: v for key, v in self.__dict__.items() if key not in NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the wrapper; its first forward with gradients is the first collective call."""
        super().__setstate__(state)
        self.__dict__.setdefault("group", group_of(None))
        self._reset_state()
        self.device = next(iter(self.numbers)).device  # the device to which the module was loaded
        self.inputs_to = None if self.inputs_to is None else self.device

    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    )

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        caps = self._bucket_cap_mb
        return [int(cap * MIB) for cap in caps] if isinstance(caps, list) else []

    def _set_static_graph(self) -> None:
        if self.averager is not None:
            self.averager.set_static()
        self.static_graph = True


def _group_of(
    device_ids: Sequence[int | torch.device] | None,
    process_group: GroupLike,
    device_mesh: DeviceMesh | None,
) -> Group:
    """Returns the group that `process_group` or `device_mesh` names.

    Raises RuntimeError, like PyTorch's class, for both a group and a mesh, and for a mesh of
    several dimensions. Raises TypeError if `device_ids` is not a list of devices, and ValueError if
    this rank is not in the group, or if there is neither a group nor torch.distributed.
    """
    if device_ids is not None and not isinstance(device_ids, (list, tuple)):
        raise TypeError(
            "the second argument must be device_ids, a list of the module's own device, as in "
            f"PyTorch; it is a {type(device_ids).__name__}: give a group as process_group=groups.dp"
        )
    if device_mesh is not None:
        if process_group is not None:
            raise RuntimeError(
                "Cannot specify both process_group and device_mesh arguments. Give one of them"
            )
        if device_mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {device_mesh}; give one dimension of it"
            )
        process_group = device_mesh
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


def _check_defaults(**given: tuple[object, object]) -> None:
    for name, (value, default) in given.items():
        if value != default:
            raise ValueError(f"{name}={value!r} is not supported; the nearest is {name}={default}")


def _warn_of_deprecated(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None, check_reduction: bool
) -> None:
    """Warns of deprecated arguments in the same cases as PyTorch's class."""
    if check_reduction:
        warnings.warn("check_reduction is deprecated and ignored", FutureWarning, stacklevel=3)
    if broadcast_buffers is not None:
        sentence = "give forward_sync_buffers, with which init_sync always sends buffers, too"
        if forward_sync_buffers is not None:
            sentence = "only forward_sync_buffers counts"
        sentence = f"broadcast_buffers is deprecated: {sentence}"
        warnings.warn(sentence, FutureWarning, stacklevel=3)


def _check_caps(bucket_cap_mb_list: Sequence[float] | None) -> None:
    for cap in bucket_cap_mb_list or ():
        if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap >= 0:
            raise ValueError(
                f"bucket_cap_mb_list={bucket_cap_mb_list!r} must hold numbers of MiB, none below "
                f"0; {cap!r} is not one"
            )


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


T = TypeVar("T", bound=Tensor)


def left(named: Iterable[tuple[str, T]], ignored: Set[str]) -> list[tuple[str, T]]:
    return [(name, tensor) for name, tensor in named if name not in ignored]


def described(module: nn.Module, ignored: Set[str]) -> list[str]:
    """Describes each parameter and buffer, in order; all ranks must have the same descriptions."""
    parameters = left(module.named_parameters(), ignored)
    named: list[tuple[str, Tensor]] = [(f"parameter {name}", p) for name, p in parameters]
    named += [(f"buffer {name}", b) for name, b in left(module.named_buffers(), ignored)]
    lines = []
    for name, tensor in named:
        layout = "not known yet"
        if not is_lazy(tensor):
            layout = f"shape {list(tensor.shape)}, strides {list(tensor.stride())}"
        trained = f"requires_grad={tensor.requires_grad}"
        lines.append(f"{name} ({layout}, {tensor.dtype}, {trained})")
    return lines


def verify_params_across_ranks(
    module: nn.Module, group: Group, device: torch.device, ignored: Set[str] = frozenset()
) -> None:
    """Raises the same ValueError on every rank if the modules of two ranks differ; collective."""
    mine = described(module, ignored)
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


def check_optimizers(trained: Sequence[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in trained:
        if steps_in_backward(parameter):
            raise ValueError(
                f"parameter {name} has an optimizer that steps in the backward "
                "(_apply_optimizer_in_backward), with this rank's gradient alone; step it after "
                "the backward instead"
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
    check_optimizers(trained)
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


class Contents:
    """Records the parameters and submodules of `module`, to notice changes."""

    def __init__(self, module: nn.Module) -> None:
        # The dicts are kept, because walking the tree in each forward would take six times as long.
        self._places = [d for m in module.modules() for d in tables_of(m)]
        self._there = self._now()

    def changed(self) -> bool:
        now = self._now()
        return len(now) != len(self._there) or not all(map(operator.is_, self._there, now))

    def _now(self) -> list[nn.Parameter | nn.Module | None]:
        return list(chain.from_iterable(d.values() for d in self._places))


class DDPJoinHook(JoinHook):
    """Takes part in the other ranks' steps when this rank has no more inputs (`join`)."""

    def __init__(self, net: DistributedDataParallel, by_initial_size: bool) -> None:
        super().__init__()
        self.net = net
        net.by_initial_size = by_initial_size

    def main_hook(self) -> None:
        net = self.net
        if net.will_sync_buffers():
            net.sync_buffers_joined(joined=True)
        synced = any_of(net.group, False, net.device)
        net.require_forward_sync = synced
        if synced:
            assert net.averager is not None  # `join` opens it
            net.averager.take_part()

    def post_hook(self, is_last_joiner: bool) -> None:
        net = self.net
        source = highest(net.group, net.group.index if is_last_joiner else -1, net.device)
        tensors = [p.detach() for p in net.module.parameters()]
        broadcast_all([*tensors, *net.module.buffers()], source, net.group)


def highest(group: Group, value: int, device: torch.device) -> int:
    number = torch.tensor([value], device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX, group=group.handle)
    return int(number)


def any_of(group: Group, value: bool, device: torch.device) -> bool:
    return highest(group, int(value), device) > 0
