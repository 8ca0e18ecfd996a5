"""DistributedDataParallel for any module of PyTorch's: `net = p3d.DistributedDataParallel(net)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.utils._pytree import tree_leaves, tree_map_only

from parallel3d.comm.group import Group
from parallel3d.parts.ddp.agreement import check_agreement, check_optimizers, check_trainable
from parallel3d.parts.ddp.buffer_sync import BufferSync
from parallel3d.parts.ddp.group import group_of, own_device
from parallel3d.parts.ddp.hooks import Hook
from parallel3d.parts.ddp.packing import broadcast_all
from parallel3d.parts.ddp.reducer import Reducer, check_shared
from parallel3d.parts.ddp.transport import SharedTransport
from parallel3d.parts.ddp.uneven import DDPJoinHook, any_of, highest
from parallel3d.parts.ddp.unused import unreached

PREFIX = "module."


class DistributedDataParallel(nn.Module, Joinable):
    """Replicas of a module on the ranks of a group, which train as one on all of their inputs.

    Every rank starts with the weights of the first one. After each backward the `.grad` of every
    parameter is the mean over the ranks; the rest of a script (loss, optimizer, clipping) stays as
    it was. Names of parameters, attributes and state dicts are those of the module itself. The
    arguments are those of `torch.nn.parallel.DistributedDataParallel` and mean the same.

    Constructor, forward (which makes the buffers those of the first rank) and backward are
    collective. Parameters are neither added nor replaced afterwards.

    Args:
        module: with all parameters on one device.
        process_group: a group of `parallel3d.init` (groups.dp), a ProcessGroup of PyTorch's, or
            None for its default one.
        device_ids: None, or the one device to which inputs are moved, the module's own.
        broadcast_buffers: buffers are made those of the first rank, now and in every forward.
        init_sync: check that the ranks' modules agree, and send the first rank's values.
        bucket_cap_mb: a bucket closes with the parameter that makes it so large, in MiB. None: the
            first one at 1 MiB, the others at 25 (on an accelerator 128, in shared memory 1).
        find_unused_parameters: look in the graph for what a backward will not reach, so that its
            buckets need not wait for the end of it. Without, an unused parameter is no error.
        gradient_as_bucket_view: gradients stay in the buckets and are not copied out.
        static_graph: every backward reaches the same parameters, each as often as in the first.
        overlap: start buckets during the backward; else all at its end.

    Raises:
        ValueError: on every rank alike, modules that differ, with the first difference; parameters
            on several devices; one whose optimizer steps in the backward; one that another wrapper
            has too, if either keeps gradients in buckets.
        RuntimeError: no parameter to train; from a backward, on every rank alike: a parameter got
            a second gradient in it, or with static_graph another number of them than in the first.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | Group | None = None,
        *,
        device_ids: Sequence[int | torch.device] | None = None,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self.group = group_of(process_group)
        some = next(module.parameters(), None)
        meeting = torch.device("cpu") if some is None else some.device
        if init_sync:
            check_agreement(module, self.group, meeting)
        named = list(module.named_parameters())
        trained = [(name, p) for name, p in named if p.requires_grad]
        check_trainable(trained, module)
        check_shared(trained, gradient_as_bucket_view)
        self.device = trained[0][1].device
        self.inputs_to = own_device(device_ids, self.device)
        if init_sync:
            sent = [p.detach() for _, p in named]
            if broadcast_buffers:
                sent += list(module.buffers())
            broadcast_all(sent, 0, self.group)
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = self.require_forward_sync = True
        self.by_initial_size = True  # see `join`
        self.frozen = [(name, p) for name, p in named if not p.requires_grad]
        self.numbers = {p: i for i, (_, p) in enumerate(trained)}
        self.buffer_sync = BufferSync(module, self.group, self.device)
        self._reducer_options = {
            "names": [name for name, _ in trained],
            "parameters": [p for _, p in trained],
            "group": self.group,
            "bucket_cap_mb": bucket_cap_mb,
            "as_views": gradient_as_bucket_view,
            "static": static_graph,
            "measure": static_graph or not find_unused_parameters,
            "overlap": overlap,
        }
        self.reducer = Reducer(**self._reducer_options) if self.group.size > 1 else None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's own forward on this rank's inputs."""
        if self.inputs_to is not None:
            inputs, named = tree_map_only(
                Tensor, lambda t: t.to(self.inputs_to, non_blocking=True), (inputs, named)
            )
        if self.reducer is None:
            return self.module(*inputs, **named)
        self._before_forward(self.reducer)
        output = self.module(*inputs, **named)
        self._after_forward(self.reducer, output)
        return output

    def _before_forward(self, reducer: Reducer) -> None:
        if reducer.running and torch._C._current_graph_task_id() < 0:
            reducer.running = False  # the last backward raised
        if not reducer.began:
            check_optimizers(list(zip(reducer.names, reducer.parameters, strict=True)))
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was frozen when the module was wrapped and requires a gradient now; "
                    "wrap the module again"
                )
        joining = self._join_config.enable
        if joining:
            self._say_that_inputs_are_left(reducer)
        if self.will_sync_buffers():
            if joining:
                self.sync_buffers_joined(joined=False)
            else:
                self.buffer_sync.from_first()
        if joining:
            any_of(self.group, self.require_backward_grad_sync, self.device)

    def _after_forward(self, reducer: Reducer, output: Any) -> None:
        self.require_forward_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if not torch.is_grad_enabled():
            return
        reducer.enabled = self.require_backward_grad_sync
        if not reducer.enabled:
            return
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        for tensor in tensors:
            tensor.register_hook(reducer.output_hook)
        hidden = not isinstance(reducer.transport, SharedTransport)  # else all is at the end
        if self.find_unused_parameters and not self.static_graph and hidden:
            unused = unreached(tensors, self.numbers) if tensors else set()
            # After several forwards it is not known whose backward comes first.
            reducer.unused = unused if reducer.unused is None else unused & reducer.unused

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards of forwards inside add up gradients on each rank alone; the first one after it
        takes the mean of all of that."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Lets `hook(state, bucket)` decide what becomes of each bucket's gradients.

        As in PyTorch: it gets a `GradBucket` that is neither summed nor divided, and returns a
        future of a tensor of the same shape. Once, and before the first backward.

        Raises:
            TypeError: no callable; later, from a backward, a hook that returns no future.
            RuntimeError: the second hook, or too late; from a backward, on every rank alike, a hook
                that returned another shape.
        """
        if not callable(hook):
            raise TypeError(
                f"the communication hook must be callable; it is a {type(hook).__name__}"
            )
        if self.reducer is None:
            self.reducer = Reducer(**self._reducer_options)
        self.reducer.use(state, hook)

    def will_sync_buffers(self) -> bool:
        """Whether the next forward takes the first rank's buffers."""
        wanted = self.require_forward_sync and self.broadcast_buffers
        return wanted and self.group.size > 1 and bool(self.buffer_sync.places)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Inside it ranks may have different numbers of inputs; all end with one model.

        Args:
            divide_by_initial_world_size: the mean is over all ranks; else over those with inputs.
            enable: False where inputs are known to be even.
            throw_on_early_termination: raise RuntimeError on all ranks when one runs out.
        """
        if self.group.size == 1:
            return nullcontext()
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For `torch.distributed.algorithms.Join` over several things at once."""
        return DDPJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        return self.group.handle

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """PyTorch's; None for a group of one."""
        return self.group.handle

    def _say_that_inputs_are_left(self, reducer: Reducer) -> None:
        work = Join.notify_join_context(self)
        active = self.group.size
        if work is not None:
            work.wait()
            active = int(work.result()[0].item())
        reducer.scale = 1.0 / (self.group.size if self.by_initial_size else active)

    def sync_buffers_joined(self, joined: bool) -> None:
        """All ranks take the buffers of the last one that still has inputs; collective."""
        source = highest(self.group, -1 if joined else self.group.index, self.device)
        broadcast_all(self.buffer_sync.current(), source, self.group)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module: no name is longer for being wrapped."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Into the module; also from PyTorch's DistributedDataParallel, whose names begin with
        `module.`.

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
        """As a part of another module, which loads each of its parts."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[prefix + PREFIX + name[len(prefix) :]] = state_dict.pop(name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The module's, under its own names."""
        return self.module.named_modules(memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        """What this lacks, the module may have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> None:
        raise TypeError(
            "a DistributedDataParallel holds groups of processes; copy or pickle its .module"
        )
