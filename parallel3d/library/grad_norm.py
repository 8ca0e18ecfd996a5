"""Clips and sums the gradients of a model that is split over ranks, and compares its replicas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import SINGLE, Group, GroupLike, group_of
from parallel3d.device.accelerator import device_of_world
from parallel3d.errors import UserError
from parallel3d.optim.optimizer import norm_share
from parallel3d.parameters.copies import CopyGroups
from parallel3d.parameters.state import ParameterState, state_of
from parallel3d.private_names import backward_hooks, foreach_mul_, is_of_fsdp1
from parallel3d.tensor_parallel.layers import ShardedModule
from parallel3d.tensor_parallel.mappings import reduce_from_tensor_parallel

Part = TypeVar("Part", bound="nn.Module | nn.Parameter")

SAME = 1e-3  # maximum relative difference at which copies of a gradient count as equal
NOISE = 1e-5  # differences below this share of the whole norm count as rounding noise


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    groups: GroupLike | list[GroupLike] | tuple[GroupLike, ...] = (),
) -> Tensor:
    """Clips gradients by their norm over the whole model, like `torch.nn.utils.clip_grad_norm_`.

    Each parameter of the model counts once: shards of tensor-parallel layers and of PyTorch's
    DTensors (`fully_shard`) are summed over their ranks, the stages of a `Pipeline` are summed over
    its group, and only one copy of a replicated parameter counts. All ranks get the same norm, and
    scale their gradients by it. The gradients must be complete: averaged over the data-parallel
    ranks (`DistributedDataParallel`, `Pipeline(dp=…)`), and summed where `sum_gradients_over` is
    needed.

    The call is collective over the groups over which the parameters are split; it finds these
    groups from the parameters. Every rank passes its own part of the same parameters.

    Args:
        parameters: parameters, or a single one.
        max_norm: gradients are multiplied by min(1, max_norm / (norm + 1e-6)).
        norm_type: p of the p-norm, above 0, or inf.
        error_if_nonfinite: whether to raise RuntimeError, on every rank, if the norm is not finite.
        foreach: ignored, since the multi-tensor kernels are always used.
        groups: further groups over which *all* these parameters are split, such as those of your
            own pipeline or layers. A rank without parameters must pass them too.

    Returns:
        The norm before clipping, in float64 on the gradients' device.

    Raises:
        UserError: on every rank of the groups, if gradients that must be equal copies differ, or if
            the gradients are copies over one of `groups`. On this rank alone, if a parameter
            belongs to a `Trainer` or to FSDP1, which clip gradients themselves; if a gradient is
            sparse; if a number is invalid; or if there is no parameter although the world has
            several ranks, which would wait for this one.
        RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
    """
    if not float(norm_type) > 0:
        raise UserError(
            f"clip_grad_norm_(norm_type={norm_type}) must be above 0 or inf; the nearest is "
            "norm_type=2.0"
        )
    if not float(max_norm) >= 0:
        raise UserError(
            f"clip_grad_norm_(max_norm={max_norm}) must be at least 0; the nearest is max_norm=0"
        )
    given = groups if isinstance(groups, (list, tuple)) else (groups,)
    further = [g for g in dict.fromkeys(map(group_of, given)) if g.size > 1]
    gradients = [_Gradient.of(p) for p in _distinct(parameters, bool(further))]
    device = gradients[0].device if gradients else device_of_world()
    total = _Norm(float(norm_type), device).of(gradients, further)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is not finite, so they cannot be "
            "clipped; error_if_nonfinite=False scales them by it nevertheless"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for local in (g.local for g in gradients if g.local is not None):
        kinds.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), alike in kinds.items():
        foreach_mul_(alike, factor.to(device, torch.promote_types(dtype, torch.float32)))
    return total


def _distinct(parameters: Tensor | Iterable[Tensor], has_groups: bool) -> list[Tensor]:
    """Returns the distinct parameters; raises UserError if their gradients cannot be clipped."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not listed and not has_groups and dist.is_initialized() and dist.get_world_size() > 1:
        raise UserError(
            f"clip_grad_norm_ got no parameter on rank {dist.get_rank()}, but must know the groups "
            "of the others, which wait for it; give groups=groups.pp for a stage without "
            "parameters, and a new list or iterator in each call"
        )
    for parameter in listed:
        if state_of(parameter).main_grad is not None:
            raise UserError(
                "clip_grad_norm_ got parameters of a Trainer, which must clip their gradients "
                "itself; give optim.clip_grad instead"
            )
        if is_of_fsdp1(parameter):
            raise UserError(
                "clip_grad_norm_ got parameters of FullyShardedDataParallel (FSDP1), which must "
                "clip their gradients itself; call its clip_grad_norm_, or use fully_shard instead"
            )
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise UserError(
                "clip_grad_norm_ got a sparse gradient, but must get dense ones; give the "
                "embedding sparse=False instead"
            )
    return list(dict.fromkeys(listed))


@dataclass
class _Gradient:
    """Gradient of a parameter on this rank.

    Attributes:
        local: the tensor to scale; None if the parameter has no gradient here.
        whole: the tensor to measure, which is `local` with partial sums completed; None if the
            parameter has no gradient here.
        start: position of the first element of `whole` in the flattened parameter.
        groups: the groups over which the parameter is split, followed by the group of its pipeline.
        state: the parameter's state, which has its split over tensor-parallel ranks.
        device: the parameter's device.
    """

    local: Tensor | None
    whole: Tensor | None
    start: int
    groups: list[Group]
    state: ParameterState
    device: torch.device

    @classmethod
    def of(cls, parameter: Tensor) -> _Gradient:
        state, grad = state_of(parameter), parameter.grad
        shards = [] if state.spec is None or state.spec.replicated else [state.tp]
        start, whole, local = 0, grad, grad
        if hasattr(parameter, "placements"):
            # Importing DTensor takes a second, so it is not imported for a model without DTensors.
            from torch.distributed.tensor import DTensor, Replicate

            from parallel3d.private_names import local_shape_and_offset

            placed = parameter if grad is None else grad
            assert isinstance(placed, DTensor)
            if grad is not None:
                complete = [Replicate() if p.is_partial() else p for p in placed.placements]
                local = placed.to_local()
                placed = placed.redistribute(placements=complete)
                whole = placed.to_local()
            for dim, placement in enumerate(placed.placements):
                if not placement.is_replicate():
                    shards.append(group_of(placed.device_mesh.get_group(dim)))
            _, offset = local_shape_and_offset(placed.shape, placed.device_mesh, placed.placements)
            start = sum(i * stride for i, stride in zip(offset, placed.stride(), strict=True))
        groups = [*(group for group in shards if group.size > 1), state.pp]
        return cls(local, whole, start, groups, state, parameter.device)

    def runs(self) -> Iterable[tuple[Tensor, bool]]:
        """Yields (flat part of the gradient, whether this rank counts this part)."""
        if self.whole is None or not self.whole.numel():
            return
        flat, spec = self.whole.reshape(-1), self.state.spec
        if spec is None or spec.replicated:  # `_Norm` counts only one of several copies
            yield flat, True
            return
        groups = CopyGroups(tp=self.state.tp)
        for copies, first, end in groups.runs(spec, self.start, flat.numel()):
            yield flat[first:end], copies.is_first


class _Norm:
    """Computes a norm over all ranks from partial values in float64: sums of |g|^p, or maxima.

    Attributes:
        wrong: the largest value of copies that differ (0 if none differ), and 1 if gradients are
            copies over one of the user's groups, else 0.
    """

    def __init__(self, norm_type: float, device: torch.device) -> None:
        self.norm_type = norm_type
        self.device = device
        self.is_largest = math.isinf(norm_type)
        self.wrong = torch.zeros(2, dtype=torch.float64, device=device)

    def of(self, gradients: Sequence[_Gradient], given: Sequence[Group]) -> Tensor:
        """Returns the norm of all gradients, the same on every rank of every group."""
        known: dict[tuple[int, ...], Group] = {}  # distinct groups may have the same ranks
        alike: dict[tuple[tuple[Group, ...], Group], list[_Gradient]] = {}
        for gradient in gradients:
            *split, pipeline = (known.setdefault(g.ranks, g) for g in gradient.groups)
            alike.setdefault((tuple(split), pipeline), []).append(gradient)
        # All ranks of a group that splits tensors hold parts of the same tensors in the same order,
        # so their collectives match. The stages of a pipeline hold different tensors, so each stage
        # contributes one number afterwards. Replicated parameters come first, so that the later
        # collectives carry their errors to all ranks.
        splitting = dict.fromkeys(group for shards, _ in alike for group in shards)
        on_stages: dict[Group, list[Tensor]] = {}
        for (shards, pp), members in sorted(alike.items(), key=lambda item: item[0][0] != ()):
            value = self._share(members)
            for group in shards:
                value = self._combined(self._gathered(value, group))
            for group in splitting:
                if group not in shards:
                    value = self._copy(self._gathered(value, group))
            on_stages.setdefault(pp if pp.size > 1 else SINGLE, []).append(value)
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = self._combined(torch.stack([zero, *on_stages.pop(SINGLE, ())]))
        for pp in on_stages:
            total = self._copy(self._gathered(total, pp))
        for pp, values in on_stages.items():
            value = self._combined(torch.stack(values))
            value = self._combined(self._gathered(value, pp))
            total = self._combined(torch.stack([total, value]))
        further = [group for group in given if group.ranks not in known]
        for group in further:
            gathered = self._gathered(total, group)
            self.wrong[1] += (gathered == gathered[0]).all() & (gathered[0] > 0)
            total = self._combined(gathered)
        if splitting or on_stages or further:
            self._raise(total)
        return total if self.is_largest else total.pow(1 / self.norm_type)

    def _share(self, members: Iterable[_Gradient]) -> Tensor:
        runs = [run for member in members for run in member.runs()]
        counted = [flat for flat, counts in runs if counts]
        rest = [flat for flat, counts in runs if not counts]
        return norm_share(counted, rest, self.device, self.norm_type)

    def _gathered(self, value: Tensor, group: Group) -> Tensor:
        """Returns the values of all ranks, and updates `wrong` with the errors of all ranks."""
        mine = torch.cat((value.view(1), self.wrong)).view(1, 3)
        everyone = collectives.all_gather(mine, group)
        self.wrong = everyone[:, 1:].amax(0)
        return everyone[:, 0]

    def _combined(self, values: Tensor) -> Tensor:
        return values.amax() if self.is_largest else values.sum()

    def _copy(self, values: Tensor) -> Tensor:
        """Returns the first of several copies, or a non-finite value if any copy is not finite."""
        low, high = values.aminmax()
        differ = high - low > SAME * high  # False if a value is not finite
        self.wrong[0] = torch.maximum(self.wrong[0], torch.where(differ, high, 0.0))
        return torch.where(high.isfinite(), values[0], high)

    def _raise(self, total: Tensor) -> None:
        noise = NOISE if self.is_largest else NOISE**self.norm_type
        differ, equal = torch.stack((self.wrong[0] > noise * total, self.wrong[1] > 0)).tolist()
        if differ:
            raise UserError(
                "clip_grad_norm_ got parameters that every rank holds, whose gradients must be "
                "equal on all ranks and differ; call sum_gradients_over for modules between two "
                "tensor-parallel layers, or give groups= for parameters that differ from rank to "
                "rank"
            )
        if equal:
            raise UserError(
                "clip_grad_norm_(groups=…) must be groups over which all parameters are split, "
                "but one of them has equal gradients on all of its ranks; give no groups= for data "
                "parallelism and for the layers and pipelines of parallel3d"
            )


# Gradients of parameters that are replicated on tensor-parallel ranks.


@dataclass(frozen=True)
class _Sum:
    """Hook of a parameter that all-reduces its gradient over a group."""

    group: Group

    def __call__(self, grad: Tensor) -> Tensor:
        whole = grad.clone(memory_format=torch.contiguous_format)
        return reduce_from_tensor_parallel(whole, self.group)


def sum_gradients_over(module: Part, group: GroupLike = None) -> Part:
    """All-reduces the gradients of `module`'s parameters over `group` in every backward.

    A module needs this if its parameters are replicated, but its input contains only this rank's
    features. An example is a norm of queries and keys between a `ColumnParallelLinear` and a
    `RowParallelLinear`: without the sum, each rank has only the gradient from its own heads. A
    gradient is summed once per backward, before anything else, such as `DistributedDataParallel`,
    reads it.

    Call it once, before the first backward. Backwards are then collective over `group`, where None
    stands for all ranks.

    Args:
        module: a module, or one parameter, such as a factor that lies beside split layers.
        group: the ranks that hold copies of the parameters.

    Returns:
        `module`, so that a constructor may say `self.norm = sum_gradients_over(Norm(8), group)`.

    Raises:
        UserError: a parameter belongs to a tensor-parallel layer, is under `fully_shard` or is
            summed already, or no parameter requires a gradient. Nothing is changed then.
    """
    ranks = group_of(group)
    split: set[int] = set()
    named: list[tuple[str, nn.Parameter]]
    if isinstance(module, nn.Parameter):
        named = [("the parameter", module)] if module.requires_grad else []
    else:
        shards = (part for part in module.modules() if isinstance(part, ShardedModule))
        split = {id(p) for part in shards for p in part.parameters()}
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise UserError(
            "sum_gradients_over(module) must have a parameter that requires a gradient; pass the "
            "module that sits between the two parallel layers"
        )
    for name, parameter in named:
        if id(parameter) in split:
            raise UserError(
                f"sum_gradients_over: {name} belongs to a tensor-parallel layer, whose gradient is "
                "whole already; name the modules between the two layers alone"
            )
        if hasattr(parameter, "placements"):
            raise UserError(
                f"sum_gradients_over: {name} must not be under fully_shard, which ignores hooks "
                "of parameters; sum parameter.grad.to_local() over the group after the last "
                "backward instead"
            )
        if any(isinstance(hook, _Sum) for hook in (backward_hooks(parameter) or {}).values()):
            raise UserError(
                f"sum_gradients_over: {name} is summed over a group already; call it once for each "
                "module"
            )
    for _, parameter in named:
        state = state_of(parameter)
        state.is_partial = True
        if ranks.size > 1:
            state.unhook = parameter.register_hook(_Sum(ranks)).remove
    return module


def check_replicated(module: nn.Module, group: GroupLike = None, tolerance: float = 0.0) -> None:
    """Checks that replicated parameters are equal on all ranks of `group`.

    The call is collective over the group.

    Shards of tensor-parallel layers are skipped. If the gradients of a replicated parameter are
    only partial (see `sum_gradients_over`), its copies differ from the first optimizer step on.

    Args:
        module: the module.
        group: the group; None stands for all ranks.
        tolerance: allowed difference, relative to the largest value of the parameter.

    Raises:
        RuntimeError: on every rank, if a parameter differs. The message names the first such
            parameter and the difference.
    """
    ranks = group_of(group)
    found: tuple[str, float] | None = None
    device = torch.device("cpu")
    for name, parameter in _replicated_parameters(module):
        device, mine = parameter.device, parameter.detach()
        if hasattr(mine, "to_local"):  # under `fully_shard`, this rank compares only its own rows
            mine = mine.to_local()
        first = mine.clone(memory_format=torch.contiguous_format)
        collectives.broadcast(first, 0, ranks)
        off = float((mine - first).abs().max()) if first.numel() else 0.0
        if found is None and first.numel() and not off <= tolerance * float(first.abs().max()):
            found = (name, off)
    if ranks.size == 1:
        return
    for rank, theirs in zip(ranks.ranks, all_gather_json(found, ranks.handle, device), strict=True):
        if theirs:
            raise RuntimeError(
                f"parameter {theirs[0]} differs by {theirs[1]:.3g} between ranks {ranks.ranks[0]} "
                f"and {rank}, which must hold the same; if it lies between a "
                "ColumnParallelLinear and a RowParallelLinear, call sum_gradients_over for it"
            )


def _replicated_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, part in module.named_modules():
        specs = part.specs(part.group.index) if isinstance(part, ShardedModule) else {}
        for name, parameter in part.named_parameters(prefix, recurse=False):
            spec = specs.get(name.removeprefix(f"{prefix}."))
            if spec is None or spec.replicated:
                yield name, parameter
