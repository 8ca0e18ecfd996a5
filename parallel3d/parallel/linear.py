"""Provides tensor-parallel layers with PyTorch's constructors (Shoeybi et al. 2019 §3).

Each rank holds its shard of the weights; state dicts hold the full tensors. So a checkpoint loads
into `nn.Linear` and `nn.Embedding`, and into any number of ranks. Reading a state dict gathers the
shards: it is collective over the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.group import Group, GroupLike, group_of
from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.errors import UserError
from parallel3d.parameters.sharding import Initializer, ParameterSpec, ShardSpec, state_of
from parallel3d.tensor_parallel.embedding import look_up
from parallel3d.tensor_parallel.linear_ops import ColumnNode, row_node
from parallel3d.tensor_parallel.mappings import gather_from_vocabulary, reduce_from_tensor_parallel


class ShardedModule(nn.Module):
    """Holds this rank's shards of parameters; its state dict holds the full tensors.

    Args:
        whole: PyTorch's freshly initialised layer, whose values are sharded.
        dims: parameter name → the dimension that is split, None for one that every rank holds.
        seed: None keeps the values of `whole`; a number draws values that depend on (seed, name,
            place) alone.
    """

    def __init__(
        self,
        whole: nn.Module,
        dims: Mapping[str, int | None],
        group: Group,
        seed: int | None,
        name: str,
        std: float,
    ) -> None:
        super().__init__()
        self.group = group
        self.shards: dict[str, ShardSpec] = {}
        for key, full in whole.named_parameters():
            shape, start, dim = list(full.shape), [0] * full.dim(), dims[key]
            if dim is not None:
                shape[dim] //= group.size
                start[dim] = shape[dim] * group.index
            draws = std if full.dim() > 1 else 0.0
            shard = ShardSpec(
                f"{name}.{key}", tuple(full.shape), tuple(start), tuple(shape), std=draws
            )
            spec = ParameterSpec(tuple(shape), (shard,), dim is None or group.size == 1)
            if seed is None:
                local = shard.of_full(full.detach()).clone(memory_format=torch.contiguous_format)
            else:
                local = Initializer(seed, full.dtype, full.device).values(spec)
            self.shards[key] = shard
            self.register_parameter(key, nn.Parameter(local))

    def __setattr__(self, name: str, value: Any) -> None:
        """Does what every module does; FSDP2 goes past `register_parameter` where none is here."""
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Marks the parameter: `assign=True` and FSDP2 bring new ones."""
        super().register_parameter(name, param)
        self._mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()  # copies of parameters have no attributes

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._mark()  # off the meta device they are new
        return self

    def _mark(self) -> None:
        for key, parameter in self._parameters.items():
            if parameter is not None:
                shard = self.shards[key]
                whole = shard.shape == shard.full_shape
                state = state_of(parameter)
                state.tp, state.spec = self.group, ParameterSpec(shard.shape, (shard,), whole)

    def _take_shards_of(self, whole: nn.Module) -> Self:
        """Takes this rank's shards of the parameters of `whole`, on its device; not collective."""
        for key, full in whole.named_parameters():
            local = self.shards[key].of_full(full.detach())
            local = local.clone(memory_format=torch.contiguous_format)
            self.register_parameter(key, nn.Parameter(local, full.requires_grad))
        return self.train(whole.training)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for key, parameter in self.named_parameters(recurse=False):
            local = parameter if keep_vars else parameter.detach()
            destination[prefix + key] = _gathered(local, self.shards[key], self.group)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *more: Any) -> None:
        """Takes this rank's shard of each full tensor; reports wrong shapes."""
        mine = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        error_msgs: list[str] = more[-1]
        for key, parameter in self.named_parameters(recurse=False):
            shard, value = self.shards[key], mine.get(prefix + key)
            if value is None:
                continue
            if tuple(value.shape) == shard.full_shape:
                mine[prefix + key] = shard.of_full(value)
            else:
                mine[prefix + key] = parameter.detach()
                error_msgs.append(
                    f"{prefix}{key} has shape {tuple(value.shape)}, but must have that of the "
                    f"whole tensor, {shard.full_shape}, whatever the number of ranks."
                )
        super()._load_from_state_dict(mine, prefix, *more)


def _gathered(local: Tensor, shard: ShardSpec, group: Group) -> Tensor:
    if shard.shape == shard.full_shape:
        return local
    sizes = zip(shard.shape, shard.full_shape, strict=True)
    dim = next(i for i, (mine, whole) in enumerate(sizes) if mine != whole)
    parts = collectives.all_gather(local.detach().unsqueeze(0), group)
    return torch.cat(parts.unbind(0), dim=dim)


def _check(layer: str, key: str, value: int, group: Group) -> None:
    if not isinstance(value, int) or value < 1 or value % group.size:
        near = max(group.size, round(value / group.size) * group.size)
        raise UserError(
            f"{layer}({key}={value}) must be a multiple of the {group.size} ranks that it is split "
            f"over; the nearest is {key}={near}"
        )


def _check_name(layer: str, seed: int | None, name: str) -> None:
    if seed is not None and not name:
        raise UserError(
            f"{layer}(seed={seed}) must have a name as well, by which its weights are told from "
            "those of other layers; give name='mlp.up' or the like"
        )


def _shape_of(linear: nn.Linear, group: GroupLike) -> tuple[int, int, GroupLike, bool]:
    return linear.in_features, linear.out_features, group, linear.bias is not None


def _kind_of(weight: Tensor) -> dict[str, Any]:
    """Returns constructor arguments for a layer without memory or random numbers."""
    return {"device": "meta", "dtype": weight.dtype}


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns all in the type of autocast, if it is on: the autograd nodes ignore autocast."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class ColumnParallelLinear(ShardedModule):
    """Splits the output features of an `nn.Linear` over `group`.

    Args:
        group: `groups.tp`, a group of torch.distributed, or None for all ranks.
        gather_output: every rank gets all features instead of its own.
        seed, name, std: weights are normal with `std` and depend on (seed, name) alone, biases are
            zero. Without a seed `nn.Linear` draws them from PyTorch's generator, which must have
            the same state on all ranks; they are then equal for every size of the group.

    Shapes: (…, in_features), alike on all ranks → (…, out_features / group's size).

    Raises:
        UserError: out_features that do not divide; a seed without a name.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike = None,
        bias: bool = True,
        *,
        gather_output: bool = False,
        seed: int | None = None,
        name: str = "",
        std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        ranks = group_of(group)
        _check("ColumnParallelLinear", "out_features", out_features, ranks)
        _check_name("ColumnParallelLinear", seed, name)
        whole = nn.Linear(in_features, out_features, bias, device, dtype)
        super().__init__(whole, {"weight": 0, "bias": 0}, ranks, seed, name, std)
        if not bias:
            self.register_parameter("bias", None)
        self.in_features, self.out_features = in_features, out_features
        self.gather_output = gather_output

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, group: GroupLike = None, *, gather_output: bool = False
    ) -> Self:
        """Returns this rank's shard of a layer that is equal on all ranks."""
        layer = cls(
            *_shape_of(linear, group), gather_output=gather_output, **_kind_of(linear.weight)
        )
        return layer._take_shards_of(linear)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        y = ColumnNode.apply(*_cast(x, self.weight, self.bias), self.group, None)
        return gather_from_vocabulary(y, self.group) if self.gather_output else y

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, of which 1/{self.group.size} is here"


class RowParallelLinear(ShardedModule):
    """Splits the input features of an `nn.Linear` over `group` and all-reduces the results.

    Every rank holds the bias, which is added after the sum. Arguments as of `ColumnParallelLinear`,
    whose output is the usual input.

    Shapes: (…, in_features / group's size), this rank's → (…, out_features), alike on all ranks.

    Raises:
        UserError: in_features that do not divide; a seed without a name; an input that has not this
            rank's number of features.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike = None,
        bias: bool = True,
        *,
        seed: int | None = None,
        name: str = "",
        std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        ranks = group_of(group)
        _check("RowParallelLinear", "in_features", in_features, ranks)
        _check_name("RowParallelLinear", seed, name)
        whole = nn.Linear(in_features, out_features, bias, device, dtype)
        super().__init__(whole, {"weight": 1, "bias": None}, ranks, seed, name, std)
        if not bias:
            self.register_parameter("bias", None)
        self.in_features, self.out_features = in_features, out_features

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: GroupLike = None) -> Self:
        """Returns this rank's shard of a layer that is equal on all ranks."""
        return cls(*_shape_of(linear, group), **_kind_of(linear.weight))._take_shards_of(linear)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if x.shape[-1] != self.weight.shape[1]:
            raise UserError(
                f"RowParallelLinear({self.in_features}, {self.out_features}) got {x.shape[-1]} "
                f"features, but must get this rank's {self.weight.shape[1]}, as a "
                "ColumnParallelLinear of the same group makes them"
            )
        x, weight, bias = _cast(x, self.weight, self.bias)
        y = row_node(x, weight, self.group, None)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, of which 1/{self.group.size} is here"


class VocabParallelEmbedding(ShardedModule):
    """Splits the rows of an `nn.Embedding` over `group` and all-reduces the results.

    Arguments as of `ColumnParallelLinear`. Shapes: (…) int64, alike on all ranks → (…, dim).

    Raises:
        UserError: num_embeddings that do not divide; a seed without a name.
        IndexError: on every rank, an id outside of the table. On an accelerator the check would
            make the host wait: such ids give zeros there.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: GroupLike = None,
        *,
        seed: int | None = None,
        name: str = "",
        std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        ranks = group_of(group)
        _check("VocabParallelEmbedding", "num_embeddings", num_embeddings, ranks)
        _check_name("VocabParallelEmbedding", seed, name)
        whole = nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype)
        super().__init__(whole, {"weight": 0}, ranks, seed, name, std)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, group: GroupLike = None) -> Self:
        """Returns this rank's rows of a table that is equal on all ranks.

        Raises UserError for padding_idx, max_norm, scale_grad_by_freq and sparse.
        """
        for key in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            value = getattr(embedding, key)
            if value is not None and value is not False:
                raise UserError(
                    f"VocabParallelEmbedding.from_embedding: {key}={value} is not built here; give "
                    f"an embedding without {key}"
                )
        rows, width = embedding.weight.shape
        return cls(rows, width, group, **_kind_of(embedding.weight))._take_shards_of(embedding)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.numel() and not is_on_accelerator(ids):
            low, high = ids.aminmax()
            if low < 0 or high >= self.num_embeddings:
                bad = int(low if low < 0 else high)
                raise IndexError(f"id {bad} must be in 0 … {self.num_embeddings - 1}")
        rows = self.weight.shape[0]
        partial = look_up(ids.unsqueeze(-1) - rows * self.group.index, self.weight, False)
        return reduce_from_tensor_parallel(partial, self.group).squeeze(-2)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, of which 1/{self.group.size} is here"
