"""AdamW, SGD and Muon on flat shards, gradient clipping, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from parallel3d.device.accelerator import is_accelerator
from parallel3d.optim.thaws import Thaw, thawed_at
from parallel3d.parameters.rounding import Piece, pieces_of, store_rounded
from parallel3d.parameters.segments import ParameterSpan, Segment
from parallel3d.parameters.spec import Kind, ShardSpec
from parallel3d.private_names import (
    foreach_add_,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm,
    fused_adamw_,
    fused_sgd_,
)

if TYPE_CHECKING:
    from parallel3d.optim.keys import OptimConfig, Treatment

EMA = "ema"  # name of the state that averages the master weights, in their dtype
NORM_PIECE = 1 << 15  # number of elements whose squares a CPU adds in the gradients' own dtype


MOMENTS, MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum",)  # states of AdamW, of SGD and Muon
STATES = (*MOMENTS, *MOMENTUM)


def kept_states(optim: OptimConfig) -> tuple[tuple[str, ...], ...]:
    """Returns the names of a trained parameter's states, for each kind of step of the optimizer.

    With Muon, the first are those of AdamW's parameters, and the second those of the matrices. Only
    a trial tells those of a script's own optimizer (`own.OwnOptimizer.kept`).
    """
    if optim.name == "own":
        return ((),)
    if optim.name == "sgd":
        return (MOMENTUM if optim.momentum else (),)
    return (MOMENTS, MOMENTUM) if optim.name == "muon" else (MOMENTS,)


@dataclass
class FlatGroup:
    """Segments with equal treatment, and their optimizer state.

    `state` holds, by name, AdamW's two moments or the momentum of SGD or Muon, and with
    `optim.ema_decay` the average of the weights. `steps` are the step counts that the fused kernels
    read, a scalar per segment. Frozen tensors that share a parameter with trained ones form groups
    without a state.
    """

    treated: Treatment
    weight_decay: float
    segments: list[Segment]
    state: dict[str, list[Tensor]]
    steps: list[Tensor]

    @classmethod
    def of(
        cls,
        treated: Treatment,
        weight_decay: float,
        segments: list[Segment],
        names: tuple[str, ...],
        dtype: torch.dtype | None,
    ) -> FlatGroup:
        """Creates a group with zero states in `dtype`, or in the masters' dtype if it is None."""
        masters = [s.master for s in segments]
        state = {name: [torch.zeros_like(m, dtype=dtype) for m in masters] for name in names}
        steps = [torch.zeros((), dtype=torch.float32, device=m.device) for m in masters]
        return cls(treated, weight_decay * treated.wd_mult, segments, state, steps)

    def by_updates(self, count: Callable[[ShardSpec], int]) -> FlatGroup:
        """Returns a group on the same memory, cut where the number of updates so far changes.

        `count` returns this number for a full tensor. The average of the weights, which needs no
        number, is left out.
        """
        kinds = [name for name in self.state if name != EMA]
        state: dict[str, list[Tensor]] = {name: [] for name in kinds}
        found = replace(self, segments=[], state=state, steps=[])
        for i, segment in enumerate(self.segments):
            first = 0
            for updates, run in segment.by_kind(count):
                own = slice(first, first + run.master.numel())
                first = own.stop
                found.segments.append(run)
                found.steps.append(torch.full_like(self.steps[i], updates))
                for name in kinds:
                    state[name].append(self.state[name][i][own])
        return found

    @property
    def masters(self) -> list[Tensor]:
        return [s.master for s in self.segments]

    @property
    def grads(self) -> list[Tensor]:
        return [s.grad for s in self.segments]


class MatrixUpdates(Protocol):
    """Makes the updates of some parameters from their momentum (`muon.Muon`)."""

    def takes(self, shard: ShardSpec) -> bool:
        """Returns whether this object makes the updates of a full tensor."""
        ...

    def orthogonalize(self, segments: Iterable[Segment]) -> None:
        """Makes the updates in the gradients of these segments orthogonal, in place; collective."""
        ...


class Optimizer:
    """Steps the parameters of one rank by PyTorch's fused kernels on flat tensors.

    The kernels are called directly: `torch.optim`'s classes import the compiler, which adds a
    second to every rank's start.

    Args:
        muon: with `optim.name=muon`, makes the updates of the matrices that it takes, while AdamW
            steps all other parameters. It is None for other optimizers.

    Attributes:
        segments: the trained segments.
        stepped: the trained groups, whose segments are cut where the parameters' own updates differ
            in number.
        updates: number of steps so far; skipped steps do not count.
        thaws: until when parameters were frozen in earlier sessions of the run.
    """

    def __init__(
        self,
        optim: OptimConfig,
        segments: list[Segment],
        seed: int = 0,
        muon: MatrixUpdates | None = None,
    ) -> None:
        self.optim = optim
        self.muon = muon
        names, *of_matrices = kept_states(optim)
        dtype = torch.bfloat16 if optim.state == "bf16" else None
        self.groups: list[FlatGroup] = []
        self.segments: list[Segment] = []
        by_treatment = _split(segments, lambda shard: optim.treatment(shard.name))
        for treated, some in by_treatment.items():
            self.segments += [] if treated.frozen else some
            by_shape = _split(some, muon.takes) if muon is not None else {False: some}
            hidden, rest = by_shape.get(True, []), by_shape.get(False, [])
            kinds = [(True, optim.weight_decay), (False, 0.0)]
            parts = [(decay, [s for s in rest if s.spec.decays is d], names) for d, decay in kinds]
            parts += [(optim.weight_decay, hidden, states) for states in of_matrices]
            for decay, members, states in parts:
                if treated.frozen:
                    states = ()
                if members:
                    self.groups.append(FlatGroup.of(treated, decay, members, states, dtype))
        self.trained = [group for group in self.groups if not group.treated.frozen]
        self.seed = seed
        self.pieces: dict[int, list[Piece]] = {}
        self.restore(0)
        self.start_ema()

    @property
    def device(self) -> torch.device:
        return self.segments[0].grad.device if self.segments else torch.device("cpu")

    @torch.no_grad()
    def squared_norm(self, summed_in: torch.dtype | None = None) -> Tensor:
        """Returns this rank's share of the squared gradient norm, a scalar in float64.

        Only one of the ranks that hold a parameter counts it. The share is not finite if any
        gradient on this rank is not, even one that another rank counts, or if the squares overflow
        in `summed_in`. If that is None, they are summed in fp32, or fp64 for fp64 gradients.
        """
        counted: list[Tensor] = []
        rest: list[Tensor] = []
        for segment in self.segments:
            for copies, run in segment.by_copies():
                grads = counted if copies.is_first else rest
                grads.append(run.grad)
        return norm_share(counted, rest, self.device, summed_in=summed_in)

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: float, loss_scale: float = 1.0) -> None:
        """Unscales the gradients and clips them by their global norm, then updates the masters.

        The clip factor is min(1, clip_grad / (norm + 1e-6)), as in torch.nn.utils.

        Args:
            grad_norm: the global norm of the unscaled gradients.
            loss_scale: the factor by which the given gradients are still scaled.
        """
        factor = 1.0 / loss_scale
        if self.optim.clip_grad > 0:
            factor *= min(1.0, self.optim.clip_grad / (grad_norm + 1e-6))
        divisor = None
        if factor != 1.0 and self.segments:
            divisor = self._divisor(factor)
            if divisor is None:
                foreach_mul_([s.grad for s in self.segments], factor)
        self._update(learning_rate, divisor)
        if self.optim.ema_decay is not None:
            for group in self.trained:
                foreach_lerp_(group.state[EMA], group.masters, 1.0 - self.optim.ema_decay)
        self.updates += 1

    def _update(self, learning_rate: float, divisor: Tensor | None) -> None:
        """Updates the masters by their gradients, which `divisor` still divides."""
        for group in self.stepped:
            rate = learning_rate * group.treated.lr_mult
            foreach_add_(group.steps, 1)
            for some in self._rounded_pieces(group) if self.pieces else (group,):
                if self.muon is not None and "momentum" in group.state:
                    self._nesterov(some, divisor)
                elif self.optim.name == "sgd":
                    self._sgd(some, rate, divisor)
                else:
                    self._adamw(some, rate, divisor)
        if self.muon is not None:
            self.step_hidden(self.muon, learning_rate)

    def _rounded_pieces(self, group: FlatGroup) -> Iterator[FlatGroup]:
        """Yields a group piece by piece, with states converted to the masters' dtype.

        When the caller has stepped a piece, its states are rounded and stored.
        """
        for i, segment in enumerate(group.segments):
            stored = {name: s[i] for name, s in group.state.items() if name != EMA}
            for piece in self.pieces[id(segment)]:
                here = slice(piece.start, piece.end)
                master = segment.master[here]
                inside = replace(segment, master=master, grad=segment.grad[here])
                state = {name: [s[here].to(master.dtype)] for name, s in stored.items()}
                yield replace(group, segments=[inside], state=state, steps=[group.steps[i]])
                bits = piece.random_bits(self.updates)
                for half, name in enumerate(stored):
                    # The caller holds this dict until the next piece is made, so the state is
                    # removed from it to free its memory.
                    store_rounded(stored[name][here], state.pop(name)[0], bits, half)
                del bits

    @torch.no_grad()
    def start_ema(self) -> None:
        """Starts the average of the weights at the current weights, if `optim.ema_decay` is set.

        Frozen weights need none, because they are their own average.
        """
        if self.optim.ema_decay is not None:
            for group in self.trained:
                group.state[EMA] = [master.clone() for master in group.masters]

    @torch.no_grad()
    def swap_ema(self) -> None:
        """Exchanges the master weights and their average without changing a bit of either."""
        for group in self.trained:
            for master, average in zip(group.masters, group.state[EMA], strict=True):
                weights = master.clone()
                master.copy_(average)
                average.copy_(weights)

    def _divisor(self, factor: float) -> Tensor | None:
        """Returns 1 / factor, if the kernels can divide the gradients by it, else None.

        On accelerators the kernels divide, which saves one read and write of each gradient. On CPUs
        the caller multiplies the gradients by `factor` first. It does so for fp64 gradients too,
        because the kernels read the divisor as fp32.
        """
        fp32 = all(s.grad.dtype == torch.float32 for s in self.segments)
        if not (self.segments and fp32 and is_accelerator(self.device)):
            return None
        # A kernel fills the tensor, because copying a number to the device would block the host.
        return torch.full((), 1.0 / factor, dtype=torch.float32, device=self.device)

    @property
    def kept(self) -> tuple[tuple[str, ...], ...]:
        """Returns the names of the states, as `kept_states` does."""
        return kept_states(self.optim)

    def progress(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps beside the states and the number of updates."""
        return {}

    def refusal(self, progress: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
        """Returns why this optimizer cannot go on from a checkpoint, or None if it can.

        `config`: the configuration of the checkpoint.
        """
        return None

    def restore(
        self,
        updates: int,
        thaws: Sequence[Thaw] = (),
        progress: Mapping[str, Any] | None = None,
    ) -> None:
        """Sets the numbers of updates; the caller has written the state into `groups`.

        Args:
            progress: that of the checkpoint, or None before the first update.
            updates: number of updates of the run.
            thaws: until when parameters were frozen. The bias corrections of their moments, which
                began at zero then, count only the updates since.
        """
        self.updates, self.thaws = updates, tuple(thaws)

        def count(shard: ShardSpec) -> int:
            return updates - thawed_at(shard.name, self.thaws)

        for group in self.trained:
            for step in group.steps:
                step.fill_(updates)
        self.stepped = [
            group.by_updates(count) if thaws and "exp_avg" in group.state else group
            for group in self.trained
        ]
        if self.optim.state == "bf16":
            # The pieces in which bf16 states are rounded, by the `id` of their segment.
            stepped = [s for group in self.stepped if group.state for s in group.segments]
            self.pieces = {id(s): pieces_of(s, self.seed) for s in stepped}

    def _adamw(self, group: FlatGroup, learning_rate: float, divisor: Tensor | None) -> None:
        """Steps by AdamW (Loshchilov and Hutter 2019, algorithm 2)."""
        fused_adamw_(
            group.masters,
            group.grads,
            group.state["exp_avg"],
            group.state["exp_avg_sq"],
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
        """Steps by SGD; the momentum buffer starts as the first gradient, as in torch.optim.SGD."""
        fused_sgd_(
            group.masters,
            group.grads,
            group.state.get("momentum", []),
            weight_decay=group.weight_decay,
            momentum=self.optim.momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=self.updates == 0 and self.optim.momentum > 0,
            grad_scale=divisor,
        )

    def _nesterov(self, group: FlatGroup, divisor: Tensor | None) -> None:
        """Updates Muon's momentum, and replaces the gradients by updates to be orthogonalised."""
        beta = self.optim.momentum
        if divisor is not None:
            foreach_div_(group.grads, divisor)
        foreach_lerp_(group.state["momentum"], group.grads, 1 - beta)
        foreach_lerp_(group.grads, group.state["momentum"], beta)

    def step_hidden(self, muon: MatrixUpdates, learning_rate: float) -> None:
        """Steps hidden matrices by their orthogonal updates, with decoupled decay; collective."""
        groups = [group for group in self.trained if "momentum" in group.state]
        muon.orthogonalize([s for group in groups for s in group.segments])
        for group in groups:
            rate = learning_rate * group.treated.lr_mult
            foreach_mul_(group.masters, 1 - rate * group.weight_decay)
            foreach_add_(group.masters, group.grads, alpha=-rate)


def _split(
    segments: list[Segment], kind_of: Callable[[ShardSpec], Kind]
) -> dict[Kind, list[Segment]]:
    """Returns the segments by kind; segments are cut where the kind of their shards changes."""
    found: dict[Kind, list[Segment]] = {}
    for segment in segments:
        for kind, run in segment.by_kind(kind_of):
            found.setdefault(kind, []).append(run)
    return found


def trained_spans(spans: list[ParameterSpan], optim: OptimConfig) -> list[ParameterSpan]:
    """Returns the spans, with frozen tensors cut out."""
    if not optim.freeze:
        return spans

    def is_frozen(shard: ShardSpec) -> bool:
        return optim.treatment(shard.name).frozen

    apart = [pair for span in spans for pair in span.by_kind(is_frozen)]
    return [span for frozen, span in apart if not frozen]


def norm_share(
    counted: list[Tensor],
    rest: list[Tensor],
    device: torch.device,
    norm_type: float = 2.0,
    summed_in: torch.dtype | None = None,
) -> Tensor:
    """Returns Σ |g|^norm_type, or max |g| for inf, over the gradients in `counted`, in float64.

    The result is not finite if any gradient is not, even one in `rest`, which another rank counts.
    """
    # 0 · inf and 0 · NaN are NaN, so `rest` changes the result only if it is not finite.
    own, others = (sum_of_powers(grads, device, norm_type, summed_in) for grads in (counted, rest))
    return own + 0.0 * others


def sum_of_powers(
    grads: list[Tensor],
    device: torch.device,
    norm_type: float = 2.0,
    summed_in: torch.dtype | None = None,
) -> Tensor:
    """Returns Σ |g|^norm_type, or max |g| for inf, over these gradients, a scalar in float64.

    `summed_in`: dtype of the sums inside a gradient. None stands for fp32 if the gradient has half
    precision, and for the gradient's own dtype otherwise.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    if not is_accelerator(device):
        # A CPU sums in pieces, because an fp32 sum over a whole bucket loses its small terms (3e-5
        # of the norm). Accelerators add in a tree, and each piece would cost the host a call.
        grads = [piece for grad in grads for piece in grad.split(NORM_PIECE)]
    half = [g for g in grads if g.dtype.itemsize < 4]
    wide = [g for g in grads if g.dtype.itemsize >= 4]
    norms = [*foreach_norm(wide, norm_type, dtype=summed_in)] if wide else []
    if half:
        norms += foreach_norm(half, norm_type, dtype=summed_in or torch.float32)
    all_norms = torch.stack(norms).double()
    return all_norms.amax() if math.isinf(norm_type) else all_norms.pow(norm_type).sum()


# The learning rate of each step.


def learning_rate(optim: OptimConfig, train_steps: int, step: float) -> float:
    """Returns the learning rate of `step`, counted from 1.

    The step is a fraction if a run was resumed with another batch size (`Length.place`). A linear
    warm-up reaches `lr` at its last step. After it, `optim.lr_decay_style` decides:

    * constant: the rate stays at `lr`;
    * linear or cosine (Loshchilov and Hutter 2016): it falls to `min_lr` at `lr_decay_steps`;
    * inverse-square-root: it is lr · √(warm-up steps / step), but not below `min_lr`;
    * wsd (Hu et al. 2024, MiniCPM §4.1): it stays at `lr`, then falls in `wsd_decay_style` over the
      last `wsd_decay_steps`, or `wsd_decay_fraction`, of the decay steps.

    From `lr_decay_steps` on, all styles but constant have `min_lr`.
    """
    end = optim.lr_decay_steps or train_steps
    warmup = optim.lr_warmup_steps or round(optim.lr_warmup_fraction * end)
    if step <= warmup:
        return optim.lr * step / warmup
    if optim.lr_decay_style == "constant":
        return optim.lr
    if optim.lr_decay_style == "inverse-square-root" and step <= end:
        return max(optim.min_lr, optim.lr * math.sqrt(max(warmup, 1) / step))
    start, shape = warmup, optim.lr_decay_style
    if shape == "wsd":
        last = optim.wsd_decay_steps or round(optim.wsd_decay_fraction * end)
        start, shape = max(warmup, end - last), optim.wsd_decay_style
    if step <= start:
        return optim.lr
    if step >= end:
        return optim.min_lr
    done = (step - start) / (end - start)
    left = 1 - done
    if shape == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    elif shape == "exponential":  # as in Megatron-LM: 2 · 2^-done - 1
        left = 2 * 0.5**done - 1
    elif shape == "minus_sqrt":
        left = 1 - math.sqrt(done)
    return optim.min_lr + (optim.lr - optim.min_lr) * left
