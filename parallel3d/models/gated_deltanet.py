"""Mixes tokens by gated DeltaNet (Yang et al. 2025, 2412.06464), as in Qwen3-Next and Qwen3.5.

Each value head has a matrix of key width × value width as its state, which a token decays, corrects
and reads (`delta_rule`). Before, q, k and v pass a short convolution; after it, a norm of each head
is multiplied by SiLU(z). Tensor parallelism divides the value heads, and the key heads that they
share, so no rank needs another's states.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.comm.group import SINGLE, Group
from parallel3d.config.values import AUTO, FLA, HEADS
from parallel3d.context_parallel.attention import ContextParallel, to_share, to_tokens
from parallel3d.context_parallel.documents import AttentionBlocks, Documents, Pieces, SequenceShard
from parallel3d.context_parallel.states import tokens_before
from parallel3d.device.fused import fused
from parallel3d.models.checkpointing import checkpoint_up_to_linear
from parallel3d.models.convolution import causal_convolution
from parallel3d.models.declared import DELTA_CHUNK, LayerKind
from parallel3d.models.delta_rule import delta_output, delta_rule
from parallel3d.models.fla_kernel import cuts_of
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext
from parallel3d.models.rotary import Positions
from parallel3d.parameters.declaration import Held, part_of
from parallel3d.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

LENGTH_EPS = 1e-6  # is added to the squared lengths of q and k


class GatedDeltaNet(nn.Module):
    """Computes out(w · RMS(rule(q, k, v)) · SiLU(z)), where q, k and v are convolved.

    The decay, the rates, the lengths of q and k, the states and the norm are in fp32 or better.
    """

    def __init__(
        self, layer: int, kind: LayerKind, held: Held, model: ModelConfig, ctx: BuildContext
    ) -> None:
        super().__init__()
        self.repeats = ctx.repeats
        self.cp = ContextParallel(ctx.cp)
        self.states = ctx.cp_states
        self.kernel = ctx.delta_kernel
        self.key_size, self.value_size = model.delta_sizes
        self.inner = ColumnParallelLinear.of(part_of(held, "inner"), **ctx.linear_arguments)
        self.conv = Convolution(part_of(held, "conv"), ctx)
        self.rates = Rates(part_of(held, "rates"), model, ctx)
        self.norm = GatedNorm(part_of(held, "norm"), model, ctx)
        self.out = RowParallelLinear.of(part_of(held, "out"), **ctx.linear_arguments)

    @property
    def kind(self) -> Hashable:
        """Returns what distinguishes layers of this mixer whose compiled code differs."""
        return "gated_deltanet", tuple(self.inner.sizes)

    def forward(self, x: Tensor, norm: Callable[[Tensor], Tensor], inputs: LayerInputs) -> Tensor:
        projected = checkpoint_up_to_linear(self.inner, norm, x, again=self.repeats.norm)
        again = self.repeats.attention
        return checkpoint_up_to_linear(self.out, self.mix, projected, inputs, again=again)

    def mix(self, projected: Tensor, inputs: LayerInputs) -> Tensor:
        """Returns what `out` multiplies, (b, s, width), given the result of `inner`."""
        documents = inputs.documents
        z, b, a, convolved = self.parts(projected)
        if documents is not None and documents.shard is not None:
            y = self.mixed_across(b, a, convolved, documents)
            return self.norm(y, z)
        places = begins = None
        if documents is not None and not documents.are_samples:
            places = documents.positions()
            begins = places == 0
        q, k, v = self.heads(convolved, places, self.conv.weight)
        g, beta = self.rates(a, b)
        cuts = self.cuts(None if documents is None else documents.blocks, q)
        return self.norm(delta_output(q, k, v, g, beta, begins, cuts=cuts), z)

    def cuts(
        self, blocks: AttentionBlocks | None, q: Tensor, tokens: int | None = None
    ) -> Tensor | None:
        """Returns where documents begin, for the kernel of fla; None for torch's operators.

        `q` has rows of the rule, and `blocks` the segments of samples of `tokens` tokens each;
        None: a row is a sample.
        """
        if self.kernel != FLA:
            return None
        rows, length = q.shape[:2]
        if blocks is None:
            return torch.arange(0, rows * length + 1, length)
        return cuts_of(blocks, tokens or length, length)

    def mixed_across(self, b: Tensor, a: Tensor, convolved: Tensor, documents: Documents) -> Tensor:
        """Returns the heads' output (b, s, heads, width) for this rank's tokens of sequences."""
        shard = documents.shard
        assert shard is not None and shard.pieces is not None  # made when the batch was read
        if self.sends_less_by_heads(convolved, shard.pieces):
            return self.mixed_by_heads(b, a, convolved, documents, shard)
        return self.mixed_by_chain(b, a, convolved, documents, shard)

    def sends_less_by_heads(self, convolved: Tensor, pieces: Pieces) -> bool:
        """Returns whether each rank gets all tokens of some heads (`context_parallel.states`)."""
        size, (*_, heads, values, queries, keys) = self.cp.group.size, self.inner.sizes
        if keys // self.key_size % size:
            return False
        if self.states != AUTO:
            return self.states == HEADS
        item, few = convolved.itemsize, self.conv.weight.shape[1] - 1
        of_states = heads * self.key_size * (self.key_size + self.value_size) * max(4, item)
        of_piece = of_states + few * convolved.shape[2] * item
        of_token = (2 * heads + 2 * values + queries + keys) * item
        return convolved.shape[1] * of_token < size * pieces.number * of_piece

    def mixed_by_chain(
        self, b: Tensor, a: Tensor, convolved: Tensor, documents: Documents, shard: SequenceShard
    ) -> Tensor:
        """Computes all heads of this rank's pieces of the sequences.

        The convolution reads the tokens before each piece, and the rule the state before it.
        """
        pieces = shard.pieces
        assert pieces is not None
        before = tokens_before(convolved, self.conv.weight.shape[1] - 1, self.cp, pieces)
        places = pieces.cut(documents.positions())
        x = torch.cat((before, pieces.cut(convolved)), dim=1)
        q, k, v = self.heads(x, places, self.conv.weight)
        g, beta = (pieces.cut(rate) for rate in self.rates(a, b))
        cuts = self.cuts(shard.blocks, q, convolved.shape[1])
        y = delta_output(q, k, v, g, beta, places == 0, self.cp, pieces, cuts)
        return pieces.joined(y)

    def mixed_by_heads(
        self, b: Tensor, a: Tensor, convolved: Tensor, documents: Documents, shard: SequenceShard
    ) -> Tensor:
        """Computes some of the heads for the whole sequences, all of whose tokens arrive here."""
        group, sizes = self.cp.group, self.inner.sizes[1:]
        parts = torch.cat((b, a, convolved), dim=-1).split(sizes, dim=-1)
        shares = torch.cat([x.unflatten(-1, (group.size, -1)) for x in parts], dim=-1)
        whole = to_share(shares.transpose(1, 2), self.cp, shard).squeeze(1)
        rates = [n // group.size for n in sizes[:2]]
        b, a, convolved = whole.split((*rates, whole.shape[-1] - sum(rates)), dim=-1)
        weights = self.conv.weight.split(sizes[2:])
        weight = torch.cat([x.chunk(group.size)[group.index] for x in weights])
        starts = documents.starts
        places = torch.arange(starts.shape[1], device=starts.device) - starts
        q, k, v = self.heads(convolved, places, weight)
        g, beta = self.rates(a, b, group)
        y = delta_output(q, k, v, g, beta, places == 0, cuts=self.cuts(documents.blocks, q))
        return to_tokens(y.transpose(1, 2), self.cp, shard).transpose(1, 2)

    def parts(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns z, b, a, and the channels of v, q and k, which the convolution reads."""
        z, b, a, *convolved = self.inner.sizes
        first, second, third, rest = projected.split((z, b, a, sum(convolved)), dim=-1)
        return first, second, third, rest

    def heads(
        self, x: Tensor, places: Tensor | None, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v (b, s, heads, width) of the rule for the last tokens of x.

        Arguments are as in `causal_convolution`; x may have a part of the heads.
        """
        share = self.conv.weight.shape[0] // weight.shape[0]
        values, queries, keys = (n // share for n in self.inner.sizes[3:])
        parts = causal_convolution(x, weight, places, (values, queries, keys))
        v, q, k = (
            part.unflatten(-1, (-1, size))
            for part, size in zip(
                parts, (self.value_size, self.key_size, self.key_size), strict=True
            )
        )
        return with_length(q, self.key_size**-0.5), with_length(k, 1.0), v

    def decoding(self, length: int, like: Tensor) -> DeltaState:
        """Returns the state in which the layer decodes one sequence."""
        return DeltaState(self)


class DeltaState:
    """Keeps what a layer needs of decoded tokens: the states of heads, and the last tokens.

    Its size does not depend on the number of tokens.
    """

    def __init__(self, mixer: GatedDeltaNet) -> None:
        self.mixer = mixer
        self.matrices: Tensor | None = None  # (1, value heads, key width, value width)
        self.last: Tensor | None = None  # what the convolution reads before the next token

    def step(self, x: Tensor, first: int, positions: Positions) -> Tensor:
        mixer, few = self.mixer, self.mixer.conv.weight.shape[1] - 1
        z, b, a, convolved = mixer.parts(mixer.inner(x))
        if first == 0:
            self.matrices = self.last = None
        if self.last is not None:
            convolved = torch.cat((self.last, convolved), dim=1)
        self.last = convolved[:, max(0, convolved.shape[1] - few) :]
        places = torch.arange(first, first + x.shape[1], device=x.device)
        q, k, v = mixer.heads(convolved, places, mixer.conv.weight)
        g, beta = mixer.rates(a, b)
        chunk = min(DELTA_CHUNK, x.shape[1])
        y, self.matrices = delta_rule(q, k, v, g, beta, self.matrices, chunk=chunk)
        return mixer.out(mixer.norm(y, z))


class Convolution(nn.Module):
    """Holds the taps of this rank's channels of v, q and k."""

    def __init__(self, held: Held, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = ctx.parameter(held["weight"])


class Rates(nn.Module):
    """Computes the decay and the learning rate of the states of this rank's value heads.

    The logarithm of the decay is g = −exp(A_log) · softplus(a + dt_bias), and the rate is σ(b), or
    2σ(b) with `model.delta_negative`.
    """

    def __init__(self, held: Held, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.A_log, self.dt_bias = (ctx.parameter(held[name]) for name in ("A_log", "dt_bias"))
        self.times = 2.0 if model.delta_negative else 1.0

    def forward(self, a: Tensor, b: Tensor, share: Group = SINGLE) -> tuple[Tensor, Tensor]:
        """Returns g and β, (b, s, value heads), in fp32 or better.

        `a` and `b` may be those of a part of the heads, which the ranks of `share` divide.
        """
        wide = torch.promote_types(a.dtype, torch.float32)
        log, bias = (x.chunk(share.size)[share.index] for x in (self.A_log, self.dt_bias))
        g = -log.exp() * F.softplus(a.to(wide) + bias)
        beta = b.to(wide).sigmoid()
        return g, beta if self.times == 1.0 else self.times * beta


class GatedNorm(nn.Module):
    """Computes w · RMS(y) · SiLU(z) for each head, with one weight w for all heads.

    Every tp rank holds the weight. A rank's gradient covers only its own heads, so the gradients
    are summed over tp with or without sequence parallelism (`FullTensor.of_heads`).
    """

    def __init__(self, held: Held, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = ctx.parameter(held["weight"])
        self.eps = model.delta_norm_eps or model.norm_eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Returns (b, s, heads · width) in the dtype of z, given y (b, s, heads, width)."""
        if not torch.compiler.is_compiling():
            return _GatedNorm.apply(y, z, self.weight, self.eps)
        return _gated(y, z, self.weight, self.eps)[0]


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        found, scale = gated_norm_forward(y, z, weight, eps)
        ctx.save_for_backward(y, z, weight, scale)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *gated_norm_backward(grad, *ctx.saved_tensors), None


@fused
def gated_norm_forward(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _gated(y, z, weight, eps)


def _gated(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the result, and the scale of each head, 1 / sqrt(mean square)."""
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    gate = F.silu(z.to(wide.dtype)).view(wide.shape)
    return (wide * scale * weight * gate).to(z.dtype).flatten(2), scale


@fused
def gated_norm_backward(
    grad: Tensor, y: Tensor, z: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad, gate = (x.to(scale.dtype).view(y.shape) for x in (grad, z))
    normed, sigmoid = y * scale, torch.sigmoid(gate)
    of_gate = grad * normed * weight * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    grad = grad * gate * sigmoid  # of the norm
    weighted = grad * normed
    of_weight = weighted.flatten(0, -2).sum(0)
    along = (weighted * weight).mean(-1, keepdim=True)
    of_y = (grad * weight - normed * along) * scale
    return of_y.to(y.dtype), of_gate.to(z.dtype).flatten(2), of_weight.to(weight.dtype)


def with_length(x: Tensor, length: float) -> Tensor:
    """Returns length · x / √(Σx² + ε) over the last dimension."""
    if not torch.compiler.is_compiling():
        return _WithLength.apply(x, length)
    return _of_length(x, length)[0]


class _WithLength(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, length: float) -> Tensor:
        found, scale = length_forward(x, length)
        ctx.save_for_backward(found, scale)  # the rule keeps the result anyway
        ctx.length = length
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        return length_backward(grad, y, scale, ctx.length), None


@fused
def length_forward(x: Tensor, length: float) -> tuple[Tensor, Tensor]:
    return _of_length(x, length)


def _of_length(x: Tensor, length: float) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) + LENGTH_EPS) * length
    return (wide * scale).to(x.dtype), scale


@fused
def length_backward(grad: Tensor, y: Tensor, scale: Tensor, length: float) -> Tensor:
    """Returns the gradient of x: with y = scale · x it is scale · (grad − y·(y·grad) / length²)."""
    along = (y.to(scale.dtype) * grad).sum(-1, keepdim=True) / length**2
    return ((grad - y * along) * scale).to(y.dtype)
