"""Tensor-parallel layers with the constructors of PyTorch's (Shoeybi et al. 2019 §3).

Each rank holds its part of the weights; the state dict holds the whole ones. So a checkpoint of a
model made of them is one of the same model made of `nn.Linear` and `nn.Embedding`, and loads into
any number of ranks. Whoever reads a state dict calls every rank of the group: it is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.process_groups import Group
from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.errors import UserError
from parallel3d.parallel.groups import group_of
from parallel3d.parameters.sharding import Initializer, ParameterSpec, ShardSpec
from parallel3d.tensor_parallel.embedding import look_up
from parallel3d.tensor_parallel.linear_ops import ColumnNode, row_node
from parallel3d.tensor_parallel.mappings import (
    gather_from_vocabulary,
    reduce_from_tensor_parallel,
)

GroupLike = Group | dist.ProcessGroup | None


class ShardedModule(nn.Module):
    """Parameters that are boxes of logical ones; state dicts of the logical ones.

    Args:
        whole: PyTorch's layer, freshly drawn: of its values this rank keeps its own.
        dims: parameter name → the dimension that is split, None for one that every rank holds.
        seed: None keeps the values of `whole`; else those of this project's layers are drawn, which
            depend on (seed, name, place) alone.
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
        self.pieces: dict[str, ShardSpec] = {}
        for key, full in whole.named_parameters():
            shape, start, dim = list(full.shape), [0] * full.dim(), dims[key]
            if dim is not None:
                shape[dim] //= group.size
                start[dim] = shape[dim] * group.index
            draws = std if full.dim() > 1 else 0.0
            piece = ShardSpec(
                f"{name}.{key}", tuple(full.shape), tuple(start), tuple(shape), std=draws
            )
            spec = ParameterSpec(tuple(shape), (piece,), dim is None or group.size == 1)
            if seed is None:
                local = piece.of_full(full.detach()).clone(memory_format=torch.contiguous_format)
            else:
                local = Initializer(seed, full.dtype, full.device).values(spec)
            self.register_parameter(key, nn.Parameter(local))
            self.pieces[key] = piece

    def _take_from(self, whole: nn.Module) -> Self:
        """With this rank's part of the values of `whole`, on its device; not collective."""
        for key, full in whole.named_parameters():
            local = self.pieces[key].of_full(full.detach())
            local = local.clone(memory_format=torch.contiguous_format)
            self.register_parameter(key, nn.Parameter(local, full.requires_grad))
        return self.train(whole.training)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Collective over the group: the weights are gathered."""
        for key, parameter in self.named_parameters(recurse=False):
            local = parameter if keep_vars else parameter.detach()
            destination[prefix + key] = _gathered(local, self.pieces[key], self.group)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *more: Any) -> None:
        """Takes this rank's part of each logical tensor; one of another shape is an error."""
        mine = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        error_msgs: list[str] = more[-1]
        for key, parameter in self.named_parameters(recurse=False):
            piece, value = self.pieces[key], mine.get(prefix + key)
            if value is None:
                continue
            if tuple(value.shape) == piece.full_shape:
                mine[prefix + key] = piece.of_full(value)
            else:
                mine[prefix + key] = parameter.detach()
                error_msgs.append(
                    f"{prefix}{key} has shape {tuple(value.shape)}, but must have that of the "
                    f"whole tensor, {piece.full_shape}, whatever the number of ranks."
                )
        super()._load_from_state_dict(mine, prefix, *more)


def _gathered(local: Tensor, piece: ShardSpec, group: Group) -> Tensor:
    """The logical tensor of which every rank holds a part along one dimension."""
    if piece.shape == piece.full_shape:
        return local
    sizes = zip(piece.shape, piece.full_shape, strict=True)
    dim = next(i for i, (mine, whole) in enumerate(sizes) if mine != whole)
    parts = collectives.all_gather(local.detach().unsqueeze(0), group)
    return torch.cat(parts.unbind(0), dim=dim)


def _check(layer: str, key: str, value: int, group: Group) -> None:
    """Raises UserError, alike on every rank, for a size that the group cannot split."""
    if not isinstance(value, int) or value < 1 or value % group.size:
        near = max(group.size, round(value / group.size) * group.size)
        raise UserError(
            f"{layer}({key}={value}) must be a multiple of the {group.size} ranks that it is split "
            f"over; the nearest is {key}={near}"
        )


def _named(layer: str, seed: int | None, name: str) -> None:
    if seed is not None and not name:
        raise UserError(
            f"{layer}(seed={seed}) must have a name as well, by which its weights are told from "
            "those of other layers; give name='mlp.up' or the like"
        )


def _shape_of(linear: nn.Linear, group: GroupLike) -> tuple[int, int, GroupLike, bool]:
    return linear.in_features, linear.out_features, group, linear.bias is not None


def _kind_of(weight: Tensor) -> dict[str, Any]:
    """For a layer whose values come later: without memory, and no generator moves."""
    return {"device": "meta", "dtype": weight.dtype}


def _cast(x: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    """All in the type that autocast asks for, where it is on: the nodes do not look for it."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return [x, *parameters]
    dtype = torch.get_autocast_dtype(kind)
    return [None if t is None else t.to(dtype) for t in (x, *parameters)]


class ColumnParallelLinear(ShardedModule):
    """`nn.Linear` whose output features are split over `group`.

    Args:
        group: `groups.tp`, a group of torch.distributed, or None for all ranks.
        gather_output: every rank gets all features instead of its own.
        seed, name, std: weights as this project draws them, by (seed, name), normal with `std`, and
            biases of zero. Without a seed they are those that `nn.Linear` draws of PyTorch's
            generator, which must stand alike on all ranks: equal for every size of the group.

    Shapes: (…, in_features), alike on all ranks → (…, out_features / group's size).

    Raises:
        UserError: out_features that do not divide; a seed without a name.
    """

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
        _named("ColumnParallelLinear", seed, name)
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
        """This rank's part of a layer that is there, whose values are alike on all ranks."""
        layer = cls(
            *_shape_of(linear, group), gather_output=gather_output, **_kind_of(linear.weight)
        )
        return layer._take_from(linear)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        y = ColumnNode.apply(*_cast(x, self.weight, self.bias), self.group, None)
        return gather_from_vocabulary(y, self.group) if self.gather_output else y

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, of which 1/{self.group.size} is here"


class RowParallelLinear(ShardedModule):
    """`nn.Linear` whose input features are split over `group`; the results are added up.

    The bias is added once, after the sum, and every rank holds it. Arguments as of
    `ColumnParallelLinear`, behind whose features it usually stands.

    Shapes: (…, in_features / group's size), this rank's → (…, out_features), alike on all ranks.

    Raises:
        UserError: in_features that do not divide; a seed without a name; an input that has not this
            rank's number of features.
    """

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
        _named("RowParallelLinear", seed, name)
        whole = nn.Linear(in_features, out_features, bias, device, dtype)
        super().__init__(whole, {"weight": 1, "bias": None}, ranks, seed, name, std)
        if not bias:
            self.register_parameter("bias", None)
        self.in_features, self.out_features = in_features, out_features

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: GroupLike = None) -> Self:
        """This rank's part of a layer that is there, whose values are alike on all ranks."""
        return cls(*_shape_of(linear, group), **_kind_of(linear.weight))._take_from(linear)

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
    """`nn.Embedding` whose rows are split over `group`; the ranks' results are added up.

    Arguments as of `ColumnParallelLinear`. Shapes: (…) int64, alike on all ranks → (…, dim).

    Raises:
        UserError: num_embeddings that do not divide; a seed without a name.
        IndexError: on every rank, an id outside of the table (not on an accelerator, which would
            have to be waited for: such ids give zeros there).
    """

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
        _named("VocabParallelEmbedding", seed, name)
        whole = nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype)
        super().__init__(whole, {"weight": 0}, ranks, seed, name, std)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, group: GroupLike = None) -> Self:
        """This rank's rows of a table that is there, whose values are alike on all ranks.

        Raises UserError for what this class has not: padding_idx, max_norm, scale_grad_by_freq,
        sparse.
        """
        for key in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            value = getattr(embedding, key)
            if value is not None and value is not False:
                raise UserError(
                    f"VocabParallelEmbedding.from_embedding: {key}={value} is not built here; give "
                    f"an embedding without {key}"
                )
        rows, width = embedding.weight.shape
        return cls(rows, width, group, **_kind_of(embedding.weight))._take_from(embedding)

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
