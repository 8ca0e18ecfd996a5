"""What a checkpoint saves of one rank: slices of parameters with their optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.process_groups import Group, ProcessGroups
from parallel3d.config.schema import OptimConfig
from parallel3d.device.accelerator import is_accelerator
from parallel3d.parameters.sharding import ParameterSpec, Segment, SegmentPart


@dataclass(frozen=True)
class ParameterSlice:
    """A run of one local parameter's elements, with all that its optimizer knows of them.

    Attributes:
        name: local parameter name; spec: the boxes of logical tensors that the parameter holds.
        start: first element of the slice in the flattened local parameter.
        values: flat live views of equal length, fp32 or better: "parameter" (the master) and the
            optimizer's "exp_avg" and "exp_avg_sq", or "momentum".
        replica: (this rank's number, how many) among the ranks that hold these very elements with
            equal bits.
    """

    name: str
    spec: ParameterSpec
    start: int
    values: dict[str, Tensor]
    replica: tuple[int, int]


def parameter_slices(
    optimizer: Optimizer, groups: ProcessGroups, replicas: tuple[int, int], tied: bool
) -> list[ParameterSlice]:
    """Everything that this rank steps, in no particular order.

    Args:
        replicas: (number, count) among the dp ranks that step the same elements.
        tied: first and last stage of a pipeline both hold the word table.
    """
    found = []
    for group in optimizer.groups:
        state = zip(*group.state.values(), strict=True) if group.state else [()] * len(group.steps)
        for segment, moments in zip(group.segments, state, strict=True):
            values = dict(zip(("parameter", *group.state), (segment.master, *moments), strict=True))
            for part, offset in _with_offsets(segment.parts):
                for first, end, copies in part.spec.runs(part.start, part.numel):
                    views = {k: v[offset + first : offset + end] for k, v in values.items()}
                    replica = _replica(part.spec, copies, groups, replicas, tied)
                    start = part.start + first
                    found.append(ParameterSlice(part.name, part.spec, start, views, replica))
    return found


def _with_offsets(parts: list[SegmentPart]) -> Iterator[tuple[SegmentPart, int]]:
    offset = 0
    for part in parts:
        yield part, offset
        offset += part.numel


def _replica(
    spec: ParameterSpec, copies: int, groups: ProcessGroups, replicas: tuple[int, int], tied: bool
) -> tuple[int, int]:
    number, count = replicas
    if spec.replicated:
        copies = groups.tp.size
    number, count = number * copies + groups.tp.index % copies, count * copies
    if tied and spec.is_word_embedding:
        number, count = number * 2 + int(spec.tied_lm_head), count * 2
    return number, count


# AdamW and SGD on flat segments of parameters, with global-norm clipping.


NORM_PIECE = 1 << 15  # elements whose squares a CPU adds in the gradients' own type


@dataclass
class FlatGroup:
    """Segments that are stepped alike, with their optimizer state: flat tensors side by side.

    `state` holds, by name, AdamW's two running means or SGD's momentum buffer (nothing without
    momentum); `steps` is the kernels' own count, a scalar for each segment.
    """

    weight_decay: float
    segments: list[Segment]
    state: dict[str, list[Tensor]]
    steps: list[Tensor]

    @classmethod
    def of(cls, segments: list[Segment], weight_decay: float, names: tuple[str, ...]) -> FlatGroup:
        masters = [s.master for s in segments]
        state = {name: [torch.zeros_like(m) for m in masters] for name in names}
        steps = [torch.zeros((), dtype=torch.float32, device=m.device) for m in masters]
        return cls(weight_decay, segments, state, steps)

    @property
    def masters(self) -> list[Tensor]:
        return [s.master for s in self.segments]

    @property
    def grads(self) -> list[Tensor]:
        return [s.grad for s in self.segments]


class Optimizer:
    """Steps the parameters of one rank.

    Each segment is one flat tensor to PyTorch's fused kernels: the update is elementwise, so the
    result is the same and a step is a handful of calls. The kernels are called directly:
    `torch.optim`'s classes bring in the compiler, a second of start-up on every rank.

    Args:
        segments: what this rank steps; their masters are updated.
        tp: decides which rank counts replicated parameters in the norm (see `counts_in_norm`).

    Attributes:
        updates: steps taken so far; skipped ones do not count.
    """

    def __init__(self, optim: OptimConfig, segments: list[Segment], tp: Group) -> None:
        self.optim, self.tp, self.segments = optim, tp, segments
        names = ("exp_avg", "exp_avg_sq") if optim.name == "adamw" else ("momentum",)
        if optim.name == "sgd" and optim.momentum == 0:
            names = ()
        kinds = [(True, optim.weight_decay), (False, 0.0)]
        alike = [([s for s in segments if s.decays is d], decay) for d, decay in kinds]
        self.groups = [FlatGroup.of(some, decay, names) for some, decay in alike if some]
        self.updates = 0

    @property
    def device(self) -> torch.device:
        """Where the segments are; a CPU for none."""
        return self.segments[0].grad.device if self.segments else torch.device("cpu")

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm, each distinct parameter once, float64.

        Not finite if any gradient here is not, also of a parameter that another rank counts.
        """
        counted, rest = [], []
        for segment in self.segments:
            counts = counts_in_norm(segment, self.tp)
            for run, copies in segment.runs():
                first = self.tp.index % copies == 0  # of the ranks that share the run
                (counted if counts and first else rest).append(segment.grad[run])
        device = self.device
        # 0 · inf and 0 · NaN are NaN
        return sum_of_squares(counted, device) + 0.0 * sum_of_squares(rest, device)

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: float, loss_scale: float = 1.0) -> None:
        """Unscales and clips by the global norm, then updates the masters.

        The clip factor is min(1, clip_grad / (norm + 1e-6)), as in torch.nn.utils.

        Args:
            grad_norm: without the loss scale. loss_scale: that the gradients still carry.
        """
        factor = 1.0 / loss_scale
        if self.optim.clip_grad > 0:
            factor *= min(1.0, self.optim.clip_grad / (grad_norm + 1e-6))
        divisor = None
        if factor != 1.0:
            divisor = self._divisor(factor)
            if divisor is None:
                torch._foreach_mul_([s.grad for s in self.segments], factor)
        for group in self.groups:
            if self.optim.name == "adamw":
                self._adamw(group, learning_rate, divisor)
            else:
                self._sgd(group, learning_rate, divisor)
        self.updates += 1

    def _divisor(self, factor: float) -> Tensor | None:
        """1 / factor for the kernels to divide fp32 gradients by; None: multiply them beforehand.

        An accelerator reads and writes each gradient once less so. The division errs as the product
        does, by a rounding of its scalar (none for a loss scale alone, a power of two) and its own.
        A CPU multiplies, to the bits that it always had, and fp64 too: the kernels read fp32.
        """
        fp32 = all(s.grad.dtype == torch.float32 for s in self.segments)
        if not (self.segments and fp32 and is_accelerator(self.device)):
            return None
        # Filled by a kernel: a number copied from the host would be waited for.
        return torch.full((), 1.0 / factor, dtype=torch.float32, device=self.device)

    def restore(self, updates: int) -> None:
        """Goes on after so many updates; the state itself was written into `groups`."""
        self.updates = updates
        for group in self.groups:
            for step in group.steps:
                step.fill_(updates)

    def _adamw(self, group: FlatGroup, learning_rate: float, divisor: Tensor | None) -> None:
        """Loshchilov and Hutter 2019, algorithm 2."""
        torch._foreach_add_(group.steps, 1)
        torch._fused_adamw_(
            group.masters,
            group.grads,
            *group.state.values(),
            [],
            group.steps,
            lr=learning_rate,
            beta1=self.optim.beta1,
            beta2=self.optim.beta2,
            weight_decay=group.weight_decay,
            eps=self.optim.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )

    def _sgd(self, group: FlatGroup, learning_rate: float, divisor: Tensor | None) -> None:
        """With momentum as torch.optim.SGD has it: the buffer starts as the first gradient."""
        torch._fused_sgd_(
            group.masters,
            group.grads,
            *(group.state.values() if group.state else ([],)),
            weight_decay=group.weight_decay,
            momentum=self.optim.momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=self.updates == 0,
            grad_scale=divisor,
        )


def sum_of_squares(grads: list[Tensor], device: torch.device) -> Tensor:
    """Float64 scalar on `device`, where the gradients are; 0 of nothing."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    if not is_accelerator(device):
        # In pieces: an fp32 sum over a whole bucket drops its small terms (3e-5 of the norm).
        # Accelerators add in a tree anyway, where each piece would cost the host a call.
        grads = [piece for grad in grads for piece in grad.split(NORM_PIECE)]
    return torch.stack(torch._foreach_norm(grads)).double().square().sum()


def counts_in_norm(segment: Segment, tp: Group) -> bool:
    """Sharded parameters count on every rank, replicated ones on tp rank 0, a tied copy never."""
    return not segment.tied_lm_head and (not segment.replicated or tp.index == 0)


@torch.no_grad()
def all_reduce_layernorm_grads(segments: list[Segment], tp: Group) -> None:
    """Adds, under sequence parallelism, the gradients of replicated parameters over tp.

    Norms, biases after row-parallel layers and positions saw this rank's tokens alone
    (Korthikanti et al. 2022 §4.2.2). One all-reduce for all of them.
    """
    partial = [s.grad for s in segments if s.replicated]
    if tp.size == 1 or not partial:
        return
    flat = collectives.all_reduce(torch.cat(partial), tp)
    for grad, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
        grad.copy_(total)


@torch.no_grad()
def all_reduce_shared_kv_grads(segments: list[Segment], tp: Group) -> None:
    """Adds the gradients of what several tp ranks in a row hold (`Piece.copies`), over those ranks:
    key-value heads of which there are fewer than ranks, norms of heads.

    One all-reduce over tp of a buffer with a place for each part: what other parts' ranks add
    there is zero, so that no group is needed for each part, and all copies get the same bits.
    """
    shared: dict[int, list[Tensor]] = {}
    for segment in segments:
        for run, copies in segment.runs():
            if copies > 1:
                shared.setdefault(copies, []).append(segment.grad[run])
    if not shared:
        return
    sizes = {copies: sum(g.numel() for g in grads) for copies, grads in shared.items()}
    rooms = [tp.size // copies * size for copies, size in sizes.items()]
    flat = next(iter(shared.values()))[0].new_zeros(sum(rooms))
    mine = {
        copies: places.view(-1, sizes[copies])[tp.index // copies]
        for copies, places in zip(sizes, flat.split(rooms), strict=True)
    }
    for copies, grads in shared.items():
        torch.cat(grads, out=mine[copies])
    collectives.all_reduce(flat, tp)
    for copies, grads in shared.items():
        for grad, total in zip(grads, mine[copies].split([g.numel() for g in grads]), strict=True):
            grad.copy_(total)


@torch.no_grad()
def all_reduce_embedding_grads(table_grad: Tensor | None, embedding: Group) -> None:
    """Adds the two gradients of a tied table that first and last stage hold (Megatron-LM's tie)."""
    if table_grad is not None and embedding.size > 1:
        met = torch.zeros(1, dtype=torch.float64, device=table_grad.device)
        collectives.all_reduce_few(met, embedding)  # waiting, told from the sum
        collectives.all_reduce(table_grad, embedding)
