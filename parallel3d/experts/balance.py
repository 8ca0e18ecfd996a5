"""Load balancing of experts: auxiliary loss, z-loss, token counts, and the update of router biases.

All of these are functions of the global batch and its sequences, so they are equal in every layout
and for every micro-batch size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.device.accelerator import moved
from parallel3d.experts.keys import ExpertsConfig


@dataclass(frozen=True)
class Balance:
    """Data from which a layer computes the balancing losses of a micro-batch of b samples.

    Attributes:
        samples: (b,) int64, each sample's index in the run.
        positions: (b, n) int64, the positions in each sample of this rank's n tokens; None: 0, 1,
            2, …
        used: (b, n) bool, false where a token is padding; None: there is no padding.
        lengths: (b,) float64, the number of tokens in each whole sample, without padding.
        aux_scale, z_scale: scalars by which the auxiliary loss of a sequence and the z-loss of a
            token are multiplied in the loss that the backward differentiates; None: the loss is not
            used.
        sequence: the groups over which the tokens of a sequence are split.
        watch: an observer that sees every choice of experts and may replace it; None: no observer.
    """

    samples: Tensor
    positions: Tensor | None
    used: Tensor | None
    lengths: Tensor
    aux_scale: Tensor | None = None
    z_scale: Tensor | None = None
    sequence: tuple[Group, ...] = ()
    watch: Watch | None = None

    def at(self, index: int, ranks: int, tokens: int) -> Balance:
        """Returns the data for part `index` of `ranks`, with `tokens` tokens of each sample."""
        if ranks == 1:
            return self
        positions = self.positions
        if positions is None:
            every = torch.arange(ranks * tokens, device=self.samples.device)
            positions = every.expand(len(self.samples), -1)
        positions = positions.chunk(ranks, dim=1)[index]
        used = None if self.used is None else self.used.chunk(ranks, dim=1)[index]
        return replace(self, positions=positions, used=used)


class Watch(Protocol):
    """Observes the choice of experts in all layers, so that verify can compare and replay it."""

    def chosen(self, layer: int, balance: Balance, experts: Tensor, margins: Tensor) -> Tensor:
        """Returns the experts that the tokens of a micro-batch are to use.

        Args:
            experts: (n, k), the experts that the router chose.
            margins: (n,), how close each token's choice was, as computed by `margins_of`.
        """
        ...


class Tally:
    """Statistics of one layer, summed over the step so far.

    The sums stay on the layer's device, in float64 so that counts are exact.

    Attributes:
        values: the number of tokens of each expert, followed by the sums of the sequences'
            auxiliary losses, of the tokens' z-losses, and of the entropies of the tokens' scores.
    """

    MORE = 3

    def __init__(self, experts: int, device: torch.device) -> None:
        self.experts = experts
        self.values = torch.zeros(experts + self.MORE, dtype=torch.float64, device=device)

    def add(self, losses: BalanceLosses) -> None:
        sums = torch.stack((losses.aux, losses.z, losses.entropy)).detach()
        self.values += torch.cat((losses.chosen, sums)).double()

    def take(self) -> Tensor:
        """Returns the sums and resets them to zero."""
        values = self.values
        self.values = torch.zeros_like(values)
        return values


@dataclass(frozen=True)
class BalanceLosses:
    """Balancing losses of one layer for this rank's tokens of a micro-batch.

    Attributes:
        aux: differentiable scalar, this rank's part of the auxiliary loss, summed over the samples.
            The loss of a sequence of T tokens is Σ_e f_e · P_e, where f_e = experts / (k·T) · the
            number of its tokens that chose e, and P_e is the mean over all T tokens of the score of
            e, with each token's scores normalised to a sum of 1 (DeepSeek-V3 report, equations 17
            to 20). It is zero if the auxiliary loss is not used.
        z: differentiable scalar, Σ over tokens of logsumexp(logits)² (Zoph et al. 2022, ST-MoE,
            equation 5).
        entropy: scalar without a gradient, the sum over tokens of the entropy of their scores.
        chosen: (experts,), the number of this rank's tokens that chose each expert.
        counts: (b, experts), the number of tokens in each whole sequence that chose each expert;
            None if the auxiliary loss is not used.
    """

    aux: Tensor
    z: Tensor
    entropy: Tensor
    chosen: Tensor
    counts: Tensor | None

    @classmethod
    def of(
        cls,
        logits: Tensor,
        scores: Tensor,
        experts: Tensor,
        balance: Balance,
        counts: Tensor | None,
    ) -> BalanceLosses:
        """Computes the losses of n = b · s tokens; padding contributes nothing.

        Args:
            logits, scores: (n, experts), for all experts of the layer.
            experts: (n, k), the experts that each token chose.
            counts: the attribute `counts` if an earlier forward computed it; None: it is computed
                here if the auxiliary loss is used, which is collective over `balance.sequence`.
        """
        samples = len(balance.lengths)
        chosen = torch.zeros_like(scores, dtype=torch.int64).scatter_(-1, experts, 1)
        normed = scores / scores.sum(-1, keepdim=True)
        z = logits.logsumexp(-1).square()
        if balance.used is not None:
            used = balance.used.flatten()
            chosen = chosen * used.unsqueeze(-1)
            normed = normed * used.unsqueeze(-1)
            z = z * used
        entropy = -torch.special.xlogy(normed.detach(), normed.detach()).sum()
        here = chosen.unflatten(0, (samples, -1)).sum(1)
        aux = z.new_zeros(())
        if balance.aux_scale is not None:
            if counts is None:
                counts = here.clone()
                for group in balance.sequence:
                    counts = collectives.all_reduce(counts, group)
            lengths = balance.lengths.clamp(min=1).to(scores.dtype).unsqueeze(-1)
            frequency = counts * scores.shape[-1] / (experts.shape[-1] * lengths)
            mean = normed.unflatten(0, (samples, -1)).sum(1) / lengths
            aux = (frequency * mean).sum()
        return cls(aux, z.sum(), entropy, here.sum(0), counts)

    def through(self, x: Tensor, balance: Balance) -> Tensor:
        """Returns x, whose backward also adds the gradients of the losses that are used."""
        for loss, scale in ((self.aux, balance.aux_scale), (self.z, balance.z_scale)):
            if scale is not None:
                x = _WithLoss.apply(x, loss, scale)
        return x


class _WithLoss(torch.autograd.Function):
    """Returns x unchanged; the backward differentiates scale · loss as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.scale.to(ctx.dtype), None


class ExpertFigures(NamedTuple):
    """Statistics of the layers with experts in one step, equal on every rank.

    The keys of each dictionary are the numbers of the layers in the model.

    Attributes:
        counts: number of tokens of each expert.
        aux: mean auxiliary loss per sequence.
        z: mean z-loss per token.
        entropy: mean entropy of a token's scores, in nats.
        bias: the router's lowest and highest bias before the step; empty if the model's routers
            have no biases.
    """

    counts: dict[int, list[int]]
    aux: dict[int, float]
    z: dict[int, float]
    entropy: dict[int, float]
    bias: dict[int, tuple[float, float]]

    def row(self) -> dict[str, dict[str, float]]:
        """Returns the statistics for a line of metrics.jsonl: name → layer → value.

        `load` is the number of tokens of the fullest expert divided by the mean over the experts,
        `unused` the number of experts without a token, and `bias` the highest bias minus the
        lowest.
        """
        found: dict[str, dict[str, float]] = {
            "load": {str(n): round(max(c) * len(c) / max(1, sum(c)), 4) for n, c in self.layers},
            "unused": {str(n): c.count(0) for n, c in self.layers},
        }
        for name in ("entropy", "aux", "z"):
            values: dict[int, float] = getattr(self, name)
            if any(values.values()):
                found[name] = {str(layer): float(f"{v:.6g}") for layer, v in values.items()}
        if self.bias:
            found["bias"] = {str(n): float(f"{b - a:.6g}") for n, (a, b) in self.bias.items()}
        return found

    @property
    def layers(self) -> list[tuple[int, list[int]]]:
        """Pairs of a layer's number and the token counts of its experts."""
        return list(self.counts.items())


class BalancedRouter(Protocol):
    """The attributes of a router that load balancing needs."""

    name: str
    bias: Tensor | None
    tally: Tally


class BalanceOfRun:
    """Scales a run's balancing losses, and updates the routers' biases after each step.

    Args:
        settings: coefficients of the losses, and the amount by which a step changes the biases.
        routers: this rank's routers, by the number of their layer.
        layers: the numbers of all layers with experts.
        experts, chosen: the number of experts in a layer, and the number that each token uses.
        sequence: the groups over which the tokens of a sequence are split.
        has_biases: whether the model's routers have biases.
        is_first: whether this rank reports the biases of its pipeline stage to the other ranks.
        fixed: full names of biases that `update` leaves as they are.
    """

    def __init__(
        self,
        settings: ExpertsConfig,
        routers: Mapping[int, BalancedRouter],
        layers: Sequence[int],
        experts: int,
        chosen: int,
        sequence: Sequence[Group],
        *,
        has_biases: bool,
        is_first: bool,
        fixed: Collection[str] = (),
    ) -> None:
        self.settings = settings
        self.routers = routers
        self.layers = list(layers)
        self.experts = experts
        self.chosen = chosen
        self.sequence = tuple(group for group in sequence if group.size > 1)
        self.has_biases = has_biases
        self.is_first = is_first
        # At a rate of 0 an addition would still turn −0 into 0, so that such biases are fixed too.
        rate = settings.bias_update_rate
        self.updated = {n: b for n, b in self.states.items() if rate and n not in fixed}
        self.watch: Watch | None = None

    @property
    def states(self) -> dict[str, Tensor]:
        """The biases of this rank's routers by full name, which are saved with the parameters."""
        return {_bias_name(r): r.bias for r in self.routers.values() if r.bias is not None}

    @property
    def needs_routed_tokens(self) -> bool:
        """Whether `scaled` needs the number of tokens in the global batch, without padding."""
        return self.settings.z_loss > 0

    def scaled(self, balance: Balance, loss_scale: float, batch: int, routed: Tensor) -> Balance:
        """Returns a micro-batch's `Balance` with the scales of the losses filled in.

        Args:
            loss_scale: the factor by which all gradients are multiplied.
            batch: the number of sequences in the global batch.
            routed: scalar, the number of tokens in the global batch over all ranks, without
                padding; it is only used if `needs_routed_tokens`.
        """
        aux, z = self.settings.aux_loss, self.settings.z_loss
        like = balance.lengths
        return replace(
            balance,
            aux_scale=like.new_full((), aux * loss_scale / batch) if aux else None,
            z_scale=z * loss_scale / routed.clamp(min=1.0) if z else None,
            sequence=self.sequence,
            watch=self.watch,
        )

    def take(self, like: Tensor) -> Tensor:
        """Returns this rank's part of all layers' sums since the last call, as a float64 vector."""
        width = self.experts + Tally.MORE
        shares = like.new_zeros(len(self.layers), width + 2)
        for layer, router in self.routers.items():
            own = shares[self.layers.index(layer)]
            own[:width] = router.tally.take()
            if router.bias is not None and self.is_first:
                own[width:] = torch.stack(router.bias.aminmax()).double()
        return shares.flatten()

    def figures(self, totals: Sequence[float], batch: int) -> ExpertFigures:
        """Returns the statistics of a step from `totals`, `take`'s results summed over ranks."""
        width = self.experts + Tally.MORE + 2
        rows = {n: totals[i * width : (i + 1) * width] for i, n in enumerate(self.layers)}
        counts = {layer: [round(n) for n in row[: self.experts]] for layer, row in rows.items()}
        tokens = {layer: max(1.0, sum(n) / self.chosen) for layer, n in counts.items()}
        return ExpertFigures(
            counts=counts,
            aux={layer: row[-5] / batch for layer, row in rows.items()},
            z={layer: row[-4] / tokens[layer] for layer, row in rows.items()},
            entropy={layer: row[-3] / tokens[layer] for layer, row in rows.items()},
            bias={n: (row[-2], row[-1]) for n, row in rows.items() if self.has_biases},
        )

    def update(self, figures: ExpertFigures) -> None:
        """Updates the biases of this rank's routers after a step with finite gradients."""
        for layer, router in self.routers.items():
            if (bias := self.updated.get(_bias_name(router))) is not None:
                counts = moved(torch.tensor(figures.counts[layer]), bias.device)
                bias.copy_(updated_bias(bias, counts, self.settings.bias_update_rate))


def _bias_name(router: BalancedRouter) -> str:
    return f"{router.name}.bias"


def updated_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Returns the bias after a step (Wang et al. 2024, arXiv:2408.15664, algorithm 1).

    `counts`: (experts,), the number of tokens of the global batch that chose each expert. The bias
    of an expert with fewer tokens than the mean rises by `rate`, and that of an expert with more
    tokens falls by `rate`.
    """
    counts = counts.double()
    # Both sides are multiplied by the number of experts, because the mean may be fractional.
    direction = torch.sign(counts.sum() - counts * counts.numel())
    return bias + rate * direction.to(bias.dtype)
