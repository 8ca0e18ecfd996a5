"""Computes the gated delta rule in chunks, in plain operations (Yang et al. 2024, 2412.06464).

For each value head, with a state S (key width, value width), a token does

    S ← e^g · S;  S ← S + k ⊗ β · (v − Sᵀk);  o = Sᵀq

where g ≤ 0 is the logarithm of the decay. A chunk of C tokens acts on the state before it as
S ← M·S + S', so only the states at the starts of chunks depend on each other; the rest is computed
for all chunks at once. With γ the sums of g from the start of the chunk, and the products of the
tokens of a chunk as matrices:

    T = (I + tril₋₁(β · KKᵀ ⊙ decay))⁻¹, decay_ij = e^{γi − γj}
    U = T·βV;  W = T·β(e^γ · K);  K̃ = e^{γC − γ} · K
    M = e^{γC} · I − K̃ᵀW;  S' = K̃ᵀU
    O = (e^γ · Q)·S + tril(QKᵀ ⊙ decay)·(U − W·S)

Every decay is the exponential of a difference that is at most 0. Where a document begins, all
decays across the bound are exactly 0, so the state is dropped.

The backward keeps the inputs and a few states, and computes the rest again. The scan of states
backwards is dS ← Mᵀ·dS + (e^γ · Q)ᵀdO − WᵀAᵀdO, where A is the decayed QKᵀ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.context_parallel.attention import ONE_RANK, ContextParallel
from parallel3d.context_parallel.documents import Pieces
from parallel3d.context_parallel.states import gradients_after, states_before
from parallel3d.device.fused import operator, registered
from parallel3d.models.declared import DELTA_CHUNK as CHUNK
from parallel3d.models.fla_kernel import rule_by_fla

# A part of a sequence has about so many numbers of k and v, for each sequence of a micro-batch. All
# temporary tensors together have about 19 times the bytes of these in fp32.
AT_ONCE = 1 << 23
LEAST_CHUNKS = 4  # of a part


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    begins: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Returns the output (b, s, value heads, dv) in the dtype of v, and the state after the tokens.

    Value head j reads key head ⌊j · key heads / value heads⌋. Everything is computed in fp32 or
    better, like the state.

    Args:
        q, k: (b, s, key heads, dk), after their norms and the scale of q.
        v: (b, s, value heads, dv).
        g, beta: (b, s, value heads), the logarithm of the decay and the rate of writing.
        state: (b, value heads, dk, dv), the state before the tokens; None: zero.
        begins: (b, s) bool, whether a document begins with the token; None: none does.
        chunk: number of tokens of a chunk.
    """
    if state is None:
        wide = torch.promote_types(q.dtype, torch.float32)
        state = q.new_zeros(len(q), v.shape[2], q.shape[3], v.shape[3], dtype=wide)
    return _Rule.apply(q, k, v, g, beta, state, begins, chunk)


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        begins: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        out, starts, after = Parts(q, k, v, g, beta, begins, chunk).output(state)
        ctx.save_for_backward(q, k, v, g, beta, begins, *starts)
        ctx.chunk = chunk
        return out, after.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, begins, *starts = ctx.saved_tensors
        parts = Parts(q, k, v, g, beta, begins, ctx.chunk)
        return *parts.gradients(grad, grad_state, starts), None, None


def delta_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    begins: Tensor | None = None,
    cp: ContextParallel = ONE_RANK,
    pieces: Pieces | None = None,
    cuts: Tensor | None = None,
) -> Tensor:
    """Returns the output of `delta_rule` for sequences that begin here, without their states.

    With `pieces` the arguments are this rank's pieces (b · p, tokens of a piece, …), whose states
    come from the ranks that hold earlier pieces. The call is collective over `cp` then.

    `cuts`: where documents and rows begin (`cuts_of`), for the kernel of flash-linear-attention;
    None: the operators of torch.
    """
    if cuts is not None and pieces is None:
        return rule_by_fla(q, k, v, g, beta, None, cuts.tolist())[0]
    of_pieces = (None, None) if pieces is None else (pieces.order, pieces.own)
    return _output(q, k, v, g, beta, cp.handle, begins, *of_pieces, cuts)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    handle: Tensor,
    begins: Tensor | None,
    order: Tensor | None,
    own: Tensor | None,
    cuts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output, the states before the parts of each piece, and the M of each piece."""
    of = Parts(q, k, v, g, beta, begins)
    if order is None or own is None:
        out, starts, _ = of.output(of.no_state())
        return out, of.stacked(starts[1:]), of.stacked([])
    move, add = of.transition()
    state = states_before(move, add, Pieces(order, own), registered(handle).group)
    if cuts is not None:
        given = within_document(state, begins)
        out = rule_by_fla(q, k, v, g, beta, given, cuts.tolist())[0].detach()
        return out, of.stacked([state]), move
    out, starts, _ = of.output(state)
    return out, of.stacked(starts), move


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    out: Tensor,
    states: Tensor,
    move: Tensor,
    handle: Tensor,
    begins: Tensor | None,
    order: Tensor | None,
    own: Tensor | None,
    cuts: Tensor | None,
) -> tuple[Tensor, ...]:
    of, starts = Parts(q, k, v, g, beta, begins), states.unbind()
    if order is None or own is None:
        none = of.no_state()
        return of.gradients(grad, none, [none, *starts])[:-1]
    add, group = of.gradient_before(grad), registered(handle).group
    of_state = gradients_after(move, add, Pieces(order, own), group)
    if cuts is None:
        return of.gradients(grad, of_state, starts)[:-1]
    leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
    with torch.enable_grad():
        given = within_document(starts[0], begins)
        q, k, v, g, beta = leaves
        out, after = rule_by_fla(q, k, v, g, beta, given, cuts.tolist())
    assert after is not None  # a state was given
    return torch.autograd.grad((out, after), leaves, (grad, of_state))


def within_document(state: Tensor, begins: Tensor | None) -> Tensor:
    """Returns the states before pieces, but 0 where a document begins with the piece."""
    if begins is None:
        return state
    return state.masked_fill(begins[:, 0, None, None, None], 0.0)


def _forward_shape(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *where: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    _, _, own, cuts = where[1:]
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, heads, dk, dv = len(v), v.shape[2], k.shape[3], v.shape[3]
    parts, pieces = len(spans_of(v, dk)), own is not None
    kept = (1 if cuts is not None else parts) if pieces else parts - 1
    states = v.new_empty(kept, rows, heads, dk, dv, dtype=wide)
    move = v.new_empty(*(rows, heads, dk, dk) if pieces else (0, rows, heads, dk, dv), dtype=wide)
    return v.new_empty(v.shape), states, move


def _backward_shape(grad: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in given[:5])


def spans_of(v: Tensor, dk: int) -> list[slice]:
    """Returns the parts of a sequence that are computed one after another."""
    _, length, heads, dv = v.shape
    part = max(LEAST_CHUNKS, AT_ONCE // (heads * (dk + dv)) // CHUNK) * CHUNK
    return [slice(first, first + part) for first in range(0, length, part)]


class Parts:
    """Computes with a part of the tokens at a time, so that temporary memory has a limit.

    Arguments are as in `delta_rule`.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        begins: Tensor | None = None,
        chunk: int = CHUNK,
    ) -> None:
        self.inputs = q, k, v, g, beta
        self.begins = begins
        self.chunk = chunk
        self.spans = spans_of(v, k.shape[3])
        self.only: RuleChunks | None = None  # the only part, which two passes share

    def chunks(self, span: slice) -> RuleChunks:
        """Returns the chunks of a part."""
        if self.only is not None:
            return self.only
        q, k, v, g, beta = (x[:, span] for x in self.inputs)
        begins = None if self.begins is None else self.begins[:, span]
        made = RuleChunks(q, k, v, g, beta, begins, self.chunk)
        if len(self.spans) == 1:
            self.only = made
        return made

    def no_state(self) -> Tensor:
        """Returns the state before the first token of a sequence."""
        q, _, v, *_ = self.inputs
        wide = torch.promote_types(q.dtype, torch.float32)
        return v.new_zeros(len(v), v.shape[2], q.shape[3], v.shape[3], dtype=wide)

    def stacked(self, states: list[Tensor]) -> Tensor:
        """Returns states as one tensor, whose first dimension is their number."""
        return torch.stack(states) if states else self.no_state()[None, :][:0].clone()

    def transition(self) -> tuple[Tensor, Tensor]:
        """Returns M (b, heads, dk, dk) and S' (b, heads, dk, dv): the tokens do S ← M·S + S'."""
        first, *others = self.spans
        move, add = self.chunks(first).transition()
        for span in others:
            of_part, added = self.chunks(span).transition()
            move, add = of_part @ move, of_part @ add + added
        return move, add

    def output(self, state: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """Returns the output, the states before the parts, and the state after the last.

        `state`: the state before the first token.
        """
        outs, starts = [], []
        for span in self.spans:
            starts.append(state)
            of = self.chunks(span)
            states = of.states(state)
            outs.append(of.output(states))
            state = states[-1].view_as(state).clone()
            del of, states
        return torch.cat(outs, dim=1), starts, state

    def gradient_before(self, grad: Tensor) -> Tensor:
        """Returns the gradient of the state before the tokens if that after them is 0."""
        of_state = self.no_state()
        for span in reversed(self.spans):
            of_state = self.chunks(span).gradient_before(grad[:, span], of_state)
        return of_state

    def gradients(
        self, grad: Tensor, grad_state: Tensor, starts: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of q, k, v, g, beta and the state before the tokens.

        `starts`: the states before the parts.
        """
        found = []
        for span, state in zip(self.spans[::-1], starts[::-1], strict=True):
            of = self.chunks(span)
            *of_part, grad_state = of.gradients(grad[:, span], grad_state, of.states(state))
            found.append(of_part)
            del of
        return *(torch.cat(parts[::-1], dim=1) for parts in zip(*found, strict=True)), grad_state


class RuleChunks:
    """The chunks of some tokens, and what each does whatever the state before it is.

    Arguments are as in `delta_rule`. All tensors within have (chunks, b · value heads) before their
    other dimensions, which are (tokens of a chunk, width) but for the states.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        begins: Tensor | None = None,
        chunk: int = CHUNK,
    ) -> None:
        self.inputs = q, k, v, g, beta
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.batch, self.length, self.heads = v.shape[:3]
        self.times = self.heads // k.shape[2]
        self.chunk = chunk
        self.k = k = self._in_chunks(k, self.times)
        self.v = v = self._in_chunks(v)
        gamma = self._in_chunks(g.unsqueeze(-1)).cumsum(dim=-2)
        self.beta = beta = self._in_chunks(beta.unsqueeze(-1))
        places = torch.arange(chunk, device=k.device)
        seen = places.unsqueeze(1) >= places
        end = gamma[..., -1:, :]
        if begins is None:
            self.decay = (gamma - gamma.mT).masked_fill(~seen, -torch.inf).exp_()
            self.since = gamma.exp()
            self.until = (end - gamma).exp_()
        else:
            number = self._in_chunks(begins[..., None, None], self.heads).cumsum(dim=-2)
            apart = ~seen | (number != number.mT)
            self.decay = (gamma - gamma.mT).masked_fill(apart, -torch.inf).exp_()
            self.since = gamma.masked_fill(number > 0, -torch.inf).exp_()
            later = number != number[..., -1:, :]
            self.until = (end - gamma).masked_fill(later, -torch.inf).exp_()
        self.whole = self.since[..., -1:, :]
        self.q = self._in_chunks(q, self.times)
        self.k_since = self.since * k
        self.k_until = self.until * k
        self.products = k @ k.mT * self.decay
        # The solver reads neither the diagonal, which stands for 1, nor what is above it.
        self.lower = beta * self.products
        given = beta * torch.cat((v, self.k_since), dim=-1)
        self.solved = torch.linalg.solve_triangular(
            self.lower, given, upper=False, unitriangular=True
        )
        self.u, self.w = self.solved.split((v.shape[-1], k.shape[-1]), dim=-1)
        added, moved = (self.k_until.mT @ self.solved).split((v.shape[-1], k.shape[-1]), dim=-1)
        self.added = added
        self.moves = torch.diag_embed(self.whole.expand(*k.shape[:2], 1, k.shape[-1]).squeeze(-2))
        self.moves = self.moves - moved

    def _in_chunks(self, x: Tensor, times: int = 1) -> Tensor:
        """Returns (b, s, heads, width) as chunks, with each head `times` times."""
        padding = -self.length % self.chunk
        x = F.pad(x.to(self.wide), (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, self.chunk))
        x = x.permute(1, 0, 3, 2, 4)
        if times > 1:
            x = x.unsqueeze(3).expand(-1, -1, -1, times, -1, -1)
        return x.reshape(len(x), self.batch * self.heads, self.chunk, -1)

    def _of_tokens(self, x: Tensor, like: Tensor, times: int = 1) -> Tensor:
        """Returns chunks as (b, s, heads, width) in the dtype of `like`; repeated heads add up."""
        x = x.unflatten(1, (self.batch, self.heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
        x = x[:, : self.length]
        if times > 1:
            x = x.unflatten(2, (-1, times)).sum(dim=3)
        return x.to(like.dtype).contiguous()

    def transition(self) -> tuple[Tensor, Tensor]:
        """Returns M (b, heads, dk, dk) and S' (b, heads, dk, dv): the tokens do S ← M·S + S'."""
        dk, dv = self.k.shape[-1], self.v.shape[-1]
        move, add = self.moves[0], self.added[0]
        for c in range(1, len(self.moves)):
            both = self.moves[c] @ torch.cat((move, add), dim=-1)
            move, add = both.split((dk, dv), dim=-1)
            add = add + self.added[c]
        of_heads = self.batch, self.heads, dk
        # The two are parts of one product, which `move` would keep whole for the backward.
        return move.reshape(*of_heads, dk).contiguous(), add.reshape(*of_heads, dv)

    def states(self, state: Tensor) -> Tensor:
        """Returns the state before each chunk and after the last, given the one before the first.

        The result is (chunks + 1, b · heads, dk, dv).
        """
        found = [state.to(self.wide).flatten(0, 1)]
        for move, add in zip(self.moves, self.added, strict=True):
            found.append(torch.baddbmm(add, move, found[-1]))
        return torch.stack(found)

    def output(self, states: Tensor) -> Tensor:
        """Returns the output of all tokens (b, s, heads, dv)."""
        before = states[:-1]
        written = self.u - self.w @ before
        found = (self.since * self.q) @ before + self._scores() @ written
        return self._of_tokens(found, self.inputs[2])

    def _scores(self) -> Tensor:
        """Returns the decayed QKᵀ."""
        return self.q @ self.k.mT * self.decay

    def entering(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradient of O by chunks, and what it adds to those of the states before."""
        grad = self._in_chunks(grad)
        of_scores = self._scores().mT @ grad
        return grad, (self.since * self.q).mT @ grad - self.w.mT @ of_scores

    def before(self, added: Tensor, grad_state: Tensor) -> Tensor:
        """Returns the gradient of the states that `states` returns.

        Args:
            added: what each chunk adds (`entering`).
            grad_state: (b, heads, dk, dv), the gradient of the last state.
        """
        found = [grad_state.to(self.wide).flatten(0, 1)]
        for c in reversed(range(len(added))):
            found.append(torch.baddbmm(added[c], self.moves[c].mT, found[-1]))
        return torch.stack(found[::-1])

    def gradient_before(self, grad: Tensor, grad_state: Tensor) -> Tensor:
        """Returns the gradient of the state before the tokens, as in `gradients`."""
        _, added = self.entering(grad)
        return self.before(added, grad_state)[0].view_as(grad_state)

    def gradients(self, grad: Tensor, grad_state: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of q, k, v, g, beta and the state before the tokens."""
        grad, added = self.entering(grad)
        of_states = self.before(added, grad_state)
        after, first = of_states[1:], of_states[0]
        return *self._of_inputs(grad, after, states[:-1]), first.view_as(grad_state)

    def _of_inputs(self, grad: Tensor, after: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of q, k, v, g and beta.

        Args:
            grad: gradient of the output, by chunks.
            after: gradient of the state after each chunk.
            before: the state before each chunk.
        """
        q, k, v, beta, decay = self.q, self.k, self.v, self.beta, self.decay
        written = self.u - self.w @ before
        scores = self._scores()
        of_written = scores.mT @ grad + self.k_until @ after
        # O = (e^γ Q)·S + A·V', with A the scores
        of_q_since = grad @ before.mT
        of_scores = grad @ written.mT * decay  # of QKᵀ
        of_q = self.since * of_q_since + of_scores @ k
        of_k = of_scores.mT @ q
        # S_out = e^{γC}·S + K̃ᵀV'
        of_k_until = written @ after.mT
        of_k = of_k + self.until * of_k_until
        # V' = U − W·S, and (U | W) solves the triangular system
        of_solved = torch.cat((of_written, -of_written @ before.mT), dim=-1)
        of_given = torch.linalg.solve_triangular(
            self.lower.mT, of_solved, upper=True, unitriangular=True
        )
        of_v_given, of_k_given = of_given.split((v.shape[-1], k.shape[-1]), dim=-1)
        of_lower = -(of_given @ self.solved.mT).tril(-1)
        of_beta = (of_lower * self.products).sum(-1, keepdim=True)
        of_beta = of_beta + (of_v_given * v).sum(-1, keepdim=True)
        of_k_since = (of_k_given * self.k_since).sum(-1, keepdim=True)
        of_beta = of_beta + of_k_since
        of_products = beta * of_lower * decay  # of KKᵀ
        of_k = of_k + of_products @ k + of_products.mT @ k + self.since * beta * of_k_given
        # Each decay is e to a difference of two γ.
        pairs = of_lower * self.lower + of_scores * (q @ k.mT)
        of_gamma = pairs.sum(-1, keepdim=True) - pairs.sum(-2).unsqueeze(-1)
        of_gamma = of_gamma + beta * of_k_since
        of_gamma = of_gamma + (of_q_since * self.since * q).sum(-1, keepdim=True)
        of_until = (of_k_until * self.k_until).sum(-1, keepdim=True)
        of_gamma = of_gamma - of_until
        of_end = of_until.sum(-2, keepdim=True)
        of_end = of_end + self.whole * (after * before).sum((-1, -2)).unsqueeze(-1).unsqueeze(-1)
        of_gamma[..., -1:, :] += of_end
        of_g = of_gamma.flip(-2).cumsum(-2).flip(-2)
        given_q, given_k, given_v, given_g, given_beta = self.inputs
        return (
            self._of_tokens(of_q, given_q, self.times),
            self._of_tokens(of_k, given_k, self.times),
            self._of_tokens(beta * of_v_given, given_v),
            self._of_tokens(of_g, given_g.unsqueeze(-1)).squeeze(-1),
            self._of_tokens(of_beta, given_beta.unsqueeze(-1)).squeeze(-1),
        )


_output = operator(
    "delta_rule",
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta",
    "Tensor handle, Tensor? begins, Tensor? order, Tensor? own, Tensor? cuts",
    _forward,
    _forward_shape,
    _backward,
    _backward_shape,
    kept="Tensor out, Tensor state, Tensor move",
    is_pure=True,
)
