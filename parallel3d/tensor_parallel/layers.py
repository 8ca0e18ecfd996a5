"""Linear layers that are split over a tensor-parallel group (Shoeybi et al. 2019, §3).

Their constructors take the arguments of `nn.Linear` first. Each rank holds its shard of the
weights, but state dicts hold full tensors, which load into `nn.Linear` and on any number of ranks.
`state_dict()` gathers the shards, so it is collective over the group.

With sequence parallelism (Korthikanti et al. 2022, §4.2.2) the all-reduces become reduce-scatters
and all-gathers of the same total volume, and the activations between blocks are split.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel3d.comm import collectives
from parallel3d.comm.group import Group, GroupLike, group_of, mesh_of_group
from parallel3d.device.fused import register
from parallel3d.errors import UserError, closest
from parallel3d.parameters.declaration import Dimension, Held, column_parallel, row_parallel
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ParameterSpec, ShardSpec
from parallel3d.parameters.state import state_of
from parallel3d.private_names import tables_of
from parallel3d.tensor_parallel import linear_ops
from parallel3d.tensor_parallel.linear_ops import linear_node
from parallel3d.tensor_parallel.mappings import (
    copy_to_replicas,
    copy_to_tensor_parallel,
    gather_from_vocabulary,
)


class ShardedModule(nn.Module):
    """Holds this rank's shards of parameters; its state dict holds the full tensors.

    In the state dict the matrices that share a parameter (such as q, k and v) are stacked by rows.
    """

    gathers_state = True  # see `sharded_state_dict`

    # Name of a parameter → the full tensors of which it holds this rank's part.
    held: Held

    def __init__(self, group: GroupLike, name: str) -> None:
        super().__init__()
        self.group = group_of(group)
        self.name = name
        self.handle: Tensor | None = None

    def make_handle(self) -> None:
        """Registers this layer, so that an operator in compiled code finds it by `handle`."""
        self.handle = register(self)

    def check_divides(self, key: str, value: int, ranks: int) -> None:
        """Raises UserError unless `value` is a positive multiple of `ranks`."""
        if not isinstance(value, int) or value < 1 or value % ranks:
            near = max(ranks, round(value / ranks) * ranks)
            raise UserError(
                f"{type(self).__name__}({key}={value}) must be a multiple of the {ranks} ranks "
                f"that it is split over; the nearest is {key}={near}"
            )

    def check_sequence(self, x: Tensor, dims: int, parts: int) -> None:
        """Raises UserError unless x has `dims` dimensions, the second a multiple of `parts`."""
        if x.dim() != dims or x.shape[1] % parts:
            raise UserError(
                f"{type(self).__name__} got an input of shape {tuple(x.shape)}, but with "
                f"sequence_parallel=True it must have {dims} dimensions, of which the second is "
                f"the sequence, a multiple of {parts}; pad the sequence, or give "
                "sequence_parallel=False instead"
            )

    def initializer(
        self, seed: int | None, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> Initializer | None:
        """Returns the initializer for a seed, or None without a seed.

        Raises:
            UserError: there is a seed, but the layer has no name.
        """
        if seed is None:
            return None
        if not self.name:
            raise UserError(
                f"{type(self).__name__}(seed={seed}) must have a name as well, which tells its "
                "weights from those of other layers; give name='mlp.up' or the like"
            )
        place = torch.get_default_device() if device is None else torch.device(device)
        return Initializer(seed, dtype or torch.get_default_dtype(), place)

    def __setattr__(self, name: str, value: Any) -> None:
        """Changes nothing; without this definition, FSDP2 would bypass `register_parameter`."""
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a parameter and sets its spec, also if `assign=True` or FSDP2 replaces it."""
        super().register_parameter(name, param)
        self._describe()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._describe()  # copies of parameters have no attributes

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._describe()  # leaving the meta device creates new parameters
        return self

    def _describe(self) -> None:
        parameters, _ = tables_of(self)
        for key, spec in self.specs(self.group.index).items():
            parameter = parameters.get(key)
            if parameter is not None:
                state = state_of(parameter)
                state.tp = self.group
                state.spec = spec

    def specs(self, index: int) -> dict[str, ParameterSpec]:
        """Returns the specs of rank `index` by parameter name."""
        ranks = self.group.size
        return {key: ParameterSpec.of(tensors, ranks, index) for key, tensors in self.held.items()}

    def register_shards(self, values: Initializer | nn.Module) -> None:
        """Registers this rank's parameters, which `values` draws or contains as full parameters."""
        for key, spec in self.specs(self.group.index).items():
            if isinstance(values, Initializer):
                self.register_parameter(key, values.parameter(spec))
            else:
                full = values.get_parameter(key)
                local = nn.Parameter(_local(spec, full.detach()), full.requires_grad)
                self.register_parameter(key, local)

    def take_shards_of(self, whole: nn.Module) -> Self:
        """Takes this rank's shards from the full parameters of `whole`; not collective."""
        self.register_shards(whole)
        return self.train(whole.training)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        # The inherited function saves buffers that a user has added.
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key, spec in self.specs(self.group.index).items():
            parameter = self.get_parameter(key)
            # Under `fully_shard` all modules save DTensors.
            if self.gathers_state and not hasattr(parameter, "placements"):
                destination[prefix + key] = self._full(key, parameter, keep_vars)
            else:
                local = parameter if keep_vars else parameter.detach()
                destination[prefix + key] = dtensor_of(local, spec, self.group)

    def _full(self, key: str, parameter: nn.Parameter, keep_vars: bool) -> Tensor:
        local, spec = parameter.detach(), self.specs(0)[key]
        if tuple(local.shape) == _full_shape(spec):
            return parameter if keep_vars else local
        parts = [local]
        if not spec.replicated:
            parts = list(collectives.all_gather(local.unsqueeze(0), self.group).unbind(0))
        matrices: dict[str, Tensor] = {}
        for index, part in enumerate(parts):
            for shard in self.specs(index)[key].shards:
                if shard.name not in matrices:
                    matrices[shard.name] = part.new_empty(shard.full_shape)
                shard.of_full(matrices[shard.name]).copy_(shard.of_local(part))
        return torch.cat(list(matrices.values()))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *more: Any) -> None:
        """Loads this rank's shard of each full tensor, and reports wrong shapes."""
        mine = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        error_msgs: list[str] = more[-1]
        for key, spec in self.specs(self.group.index).items():
            value, wanted = mine.get(prefix + key), _full_shape(self.specs(0)[key])
            if value is None:
                continue
            if tuple(value.shape) == wanted:
                parameter = self.get_parameter(key)
                if hasattr(value, "placements"):
                    mine[prefix + key] = own_shard(value, parameter, spec)
                else:
                    mine[prefix + key] = _local(spec, value)
            else:
                mine[prefix + key] = self.get_parameter(key).detach()
                error_msgs.append(
                    f"{prefix}{key} has shape {tuple(value.shape)}, but must have that of the "
                    f"whole tensor, {wanted}, whatever the number of ranks."
                )
        super()._load_from_state_dict(mine, prefix, *more)


def _full_shape(spec: ParameterSpec) -> tuple[int, ...]:
    """Returns the shape of a parameter's full matrices when they are stacked by rows."""
    return sum(shard.full_shape[0] for shard in spec.shards), *spec.shards[0].full_shape[1:]


def _local(spec: ParameterSpec, full: Tensor) -> Tensor:
    """Returns a rank's shard of a parameter, given its full matrices stacked by rows."""
    local, row = full.new_zeros(spec.shape), 0
    for shard in spec.shards:
        matrix = full.narrow(0, row, shard.full_shape[0])
        shard.of_local(local).copy_(shard.of_full(matrix))
        row += len(matrix)
    return local


def _like(linear: nn.Linear, group: GroupLike) -> dict[str, Any]:
    """Returns arguments for a layer of the same shape on the meta device."""
    return {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "group": group,
        "bias": linear.bias is not None,
        "device": "meta",
        "dtype": linear.weight.dtype,
    }


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Casts the tensors as autocast would, because autocast does not affect our autograd nodes."""
    kind = x.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _sequence_chunks(sequence_parallel: bool, group: Group, chunks: int) -> int | None:
    return chunks if sequence_parallel and group.size > 1 else None


class ColumnParallelLinear(ShardedModule):
    """Splits the output features of an `nn.Linear` over `group`.

    One GEMM may serve several matrices (q, k and v; gate and up). Each matrix is split on its own,
    so that every rank holds whole heads, or matching halves of gate and up. The attribute `sizes`
    has the number of this rank's features of each matrix.

    Args:
        out_features: number of features, or matrix name → number; the results are concatenated.
        group: `groups.tp`, a group of torch.distributed, or None for all ranks.
        gather_output: whether every rank gets all features instead of only its own.
        sequence_parallel: whether the input is this rank's part of the sequence and is gathered.
        chunks: number of pieces in which the sequence is gathered (see `linear_ops.gather_linear`).
        recomputed: whether a recomputation of x in the backward stops before this GEMM.
        tp_replicas: matrix name → number of consecutive ranks that hold the same rows of it (for
            key-value heads if there are fewer than ranks).
        sum_partial_gradients: whether the backward sums the gradients of these rows. If not, they
            stay partial until `optim.all_reduce_shared_kv_grads` sums those of all layers.
        seed, name, std: weights are normal with `std` and depend only on (seed, name); biases are
            zero. Without a seed `nn.Linear` draws both from PyTorch's generator, which must have
            the same state on all ranks; both are then equal for every size of the group.
        init: draws the weights instead of `seed`, in its own dtype and on its own device.
        held: the tensors of `weight` and `bias` as a model declares them (see `of`), instead of
            name, std and tp_replicas.

    Shapes: (…, in_features), equal on all ranks → (…, Σ out_features / tp); with sequence
    parallelism (b, s/tp, in_features) → (b, s, Σ out_features / tp).

    Raises:
        UserError: out_features cannot be split evenly, or a seed has no name.
    """

    split = "column"
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        group: GroupLike = None,
        bias: bool = True,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        chunks: int = 1,
        recomputed: bool = True,
        tp_replicas: Mapping[str, int] = MappingProxyType({}),
        sum_partial_gradients: bool = True,
        seed: int | None = None,
        name: str = "",
        std: float = 0.02,
        init: Initializer | None = None,
        held: Held | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, name)
        named = out_features if isinstance(out_features, Mapping) else {"": out_features}
        self.matrices: dict[str, int] = dict(named)
        self.tp_replicas = dict(tp_replicas)
        rows = {matrix: self._rows(matrix, rows) for matrix, rows in self.matrices.items()}
        if gather_output and len(self.matrices) > 1:
            raise UserError(
                "ColumnParallelLinear(gather_output=True) must have one matrix, not "
                f"{', '.join(self.matrices)}, each split over the ranks; give "
                "gather_output=False instead"
            )
        inputs = Dimension("inputs", in_features)
        own = {f"{name}.{matrix}" if matrix else name: dim for matrix, dim in rows.items()}
        self.held = held or column_parallel(own, inputs, std, bias)
        ranks = self.group.size
        self.sizes = [tensor.local_shape(ranks)[0] for tensor in self.held["weight"]]
        self.in_features = in_features
        self.out_features = sum(self.matrices.values())
        self.gather_output = gather_output
        self.recomputed = recomputed
        self.sums_shared = sum_partial_gradients and max(tp_replicas.values(), default=1) > 1
        self.sp = _sequence_chunks(sequence_parallel, self.group, chunks)
        init = init or self.initializer(seed, device, dtype)
        self.register_shards(init or nn.Linear(in_features, self.out_features, bias, device, dtype))
        if "bias" not in self.held:
            self.register_parameter("bias", None)

    def _rows(self, matrix: str, rows: int) -> Dimension:
        size, shared = self.group.size, self.tp_replicas.get(matrix, 1)
        if shared < 1 or size % shared:
            near = closest(shared, lambda n: size % n == 0, size)
            raise UserError(
                f"ColumnParallelLinear(tp_replicas[{matrix}]={shared}) must divide the {size} "
                f"ranks of the group; the nearest is {near}"
            )
        key = f"out_features[{matrix}]" if matrix else "out_features"
        self.check_divides(key, rows, size // shared)
        return Dimension(matrix, rows, heads=size // shared if shared > 1 else 0)

    @classmethod
    def of(cls, held: Held, **options: Any) -> Self:
        """Returns the layer of a declared weight and bias; `options` are the other arguments."""
        weights, ranks = held["weight"], group_of(options.get("group")).size
        rows = {tensor.name: tensor.shape[0] for tensor in weights}
        options["tp_replicas"] = {tensor.name: tensor.copies(ranks) for tensor in weights}
        return cls(weights[0].shape[1], rows, bias="bias" in held, held=held, **options)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, group: GroupLike = None, *, gather_output: bool = False
    ) -> Self:
        """Returns this rank's shard of a layer that is equal on all ranks."""
        return cls(**_like(linear, group), gather_output=gather_output).take_shards_of(linear)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if self.sp is not None:
            self.check_sequence(x, 3, self.sp)
        if self.handle is not None and torch.compiler.is_compiling():
            gather = 1 if self.sp is None else self.group.size
            return linear_ops.compiled(self, x, self.weight.shape[0], gather, 1)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.sums_shared:
            specs = self.specs(self.group.index)
            weight = copy_to_replicas(weight, specs["weight"], self.group)
            if bias is not None:
                bias = copy_to_replicas(bias, specs["bias"], self.group)
        operands = _cast(x, weight, bias)
        y = linear_node("column", *operands, self.group, self.sp, self.recomputed)
        return gather_from_vocabulary(y, self.group) if self.gather_output else y

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, 1/{self.group.size} of it here"


class RowParallelLinear(ShardedModule):
    """Splits the input features of an `nn.Linear` over `group` and all-reduces the results.

    Every rank holds the bias, which is added after the sum. The usual input is the output of a
    `ColumnParallelLinear`. The arguments that are not listed here are those of that class.

    Args:
        sequence_parallel: whether the results are reduce-scattered along the sequence.
        chunks: number of pieces in which the sequence is reduce-scattered.
        sum_partial_gradients: whether the backward all-reduces the gradient of the bias under
            sequence parallelism, where each rank only has its own tokens' part. If not,
            `optim.all_reduce_layernorm_grads` does so for all layers at once.

    Shapes: this rank's (…, in_features / tp) → (…, out_features), equal on all ranks; with
    sequence parallelism (b, s, in_features / tp) → (b, s/tp, out_features).

    Raises:
        UserError: in_features or the sequence cannot be split evenly, a seed has no name, or an
            input does not have this rank's number of features.
    """

    split = "row"
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike = None,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        chunks: int = 1,
        recomputed: bool = True,
        sum_partial_gradients: bool = True,
        seed: int | None = None,
        name: str = "",
        std: float = 0.02,
        init: Initializer | None = None,
        held: Held | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, name)
        self.check_divides("in_features", in_features, self.group.size)
        dims = Dimension("inputs", in_features), Dimension("outputs", out_features)
        self.held = held or row_parallel(name, *dims, std, bias)
        self.in_features = in_features
        self.out_features = out_features
        self.recomputed = recomputed
        self.sp = _sequence_chunks(sequence_parallel, self.group, chunks)
        self.sums_bias = sum_partial_gradients and self.sp is not None
        init = init or self.initializer(seed, device, dtype)
        self.register_shards(init or nn.Linear(in_features, out_features, bias, device, dtype))
        if "bias" not in self.held:
            self.register_parameter("bias", None)

    @classmethod
    def of(cls, held: Held, **options: Any) -> Self:
        """Returns the layer of a declared weight and bias; `options` are the other arguments."""
        outputs, inputs = held["weight"][0].shape
        return cls(inputs, outputs, bias="bias" in held, held=held, **options)

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: GroupLike = None) -> Self:
        """Returns this rank's shard of a layer that is equal on all ranks."""
        return cls(**_like(linear, group)).take_shards_of(linear)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if x.shape[-1] != self.weight.shape[1]:
            raise UserError(
                f"RowParallelLinear({self.in_features}, {self.out_features}) got {x.shape[-1]} "
                f"features, but must get this rank's {self.weight.shape[1]}, the "
                "output of a ColumnParallelLinear of the same group"
            )
        if self.sp is not None:
            self.check_sequence(x, 3, self.group.size * self.sp)
        if self.handle is not None and torch.compiler.is_compiling():
            scatter = 1 if self.sp is None else self.group.size
            y = linear_ops.compiled(self, x, self.out_features, 1, scatter)
            bias: Tensor | None = self.bias
        else:
            x, weight, bias = _cast(x, self.weight, self.bias)
            y = linear_node("row", x, weight, None, self.group, self.sp, self.recomputed)
        if bias is None:
            return y
        return y + (copy_to_tensor_parallel(bias, self.group) if self.sums_bias else bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, 1/{self.group.size} of it here"


# These functions convert between shards and PyTorch's DTensors.


def _only_shard(spec: ParameterSpec) -> ShardSpec:
    if len(spec.shards) != 1 or spec.shards[0].shape != spec.shape:
        names = " and ".join(shard.name or "matrix" for shard in spec.shards)
        raise UserError(
            f"a parameter that holds {names} cannot be a DTensor, which must have one matrix "
            "without padding; give each matrix a layer of its own, or use full_state_dict instead"
        )
    return spec.shards[0]


def _split_dim(shard: ShardSpec) -> int | None:
    """Returns the dimension that is split over ranks, or None if the shard is the whole tensor."""
    sizes = zip(shard.shape, shard.full_shape, strict=True)
    return next((i for i, (mine, whole) in enumerate(sizes) if mine != whole), None)


def dtensor_of(local: Tensor, spec: ParameterSpec, tp: Group) -> Tensor:
    """Returns a shard as a DTensor of the whole shape that uses the same memory; not collective.

    After `fully_shard`, `local` is a DTensor already, over a mesh of dp ranks that share the shard.
    The result's mesh then has tp before dp. With dp first, rows that both dimensions split would
    need PyTorch's private strided placement.
    """
    # This is imported only here, because the import of DTensor takes a second.
    from torch.distributed.tensor import DTensor, Placement, Shard

    if spec.replicated or tp.handle is None:
        return local
    shard = _only_shard(spec)
    dim = _split_dim(shard)
    if dim is None:
        return local
    placements: list[Placement] = [Shard(dim)]
    device_type = local.device.type
    if isinstance(local, DTensor):
        inner = local.device_mesh
        mine = tp.ranks[tp.index]
        grid = torch.stack([inner.mesh + (rank - mine) for rank in tp.ranks])
        handles = [tp.handle, *inner.get_all_groups()]
        names = tuple(handle.group_name for handle in handles)  # see `mesh_of_group`
        mesh = DeviceMesh.from_group(handles, device_type, grid, mesh_dim_names=names)
        placements += local.placements
        local = local.to_local()
    else:
        mesh = mesh_of_group(tp, device_type)
    stride = torch.empty(shard.full_shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shard.full_shape), stride=stride
    )


def own_shard(value: Tensor, parameter: Tensor, spec: ParameterSpec) -> Tensor:
    """Returns the local part of a DTensor from `dtensor_of`, in the form of `parameter`.

    Raises UserError if the DTensor is split in another way.
    """
    from torch.distributed.tensor import DTensor

    assert isinstance(value, DTensor)
    local = value.to_local()
    here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.shape != here.shape:
        raise UserError(
            f"{spec.shards[0].name} has a DTensor of local shape {tuple(local.shape)}, but must "
            f"have {tuple(here.shape)} as in sharded_state_dict of this module; give the whole "
            "tensor instead"
        )
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
