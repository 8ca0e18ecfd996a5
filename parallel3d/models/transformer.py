"""The MLP of a block."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.comm.exchange import transfer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.data.documents import Documents
from parallel3d.models.attention import (
    attend,
    causal_attention,
    choose_kernel,
    kernel_shares_heads,
    repeated,
)
from parallel3d.models.dropout import Dropout
from parallel3d.models.embedding_and_head import Embedding, Head
from parallel3d.models.layers import BuildContext, Norm, QKNorm, output_std, rotary_tables
from parallel3d.models.ops import Rotary, split_heads_rotary, swiglu
from parallel3d.models.recompute import (
    checkpoint_up_to_linear,
    recomputed,
    shared_inductor,
    without_inplace_reuse,
)
from parallel3d.parameters.sharding import Initializer, ShardSpec
from parallel3d.schedules.orders import StageAssignment
from parallel3d.sizes.balance import layers_of_stages
from parallel3d.sizes.model import recomputing
from parallel3d.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from parallel3d.tensor_parallel.mappings import gather_from_vocabulary, gather_heads


class MLP(nn.Module):
    """Two GEMMs with a non-linearity; SwiGLU's gate and up share the first."""

    def __init__(self, layer: int, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.activation, self.recompute = model.activation, ctx.recompute
        prefix, ffn = f"layers.{layer}.mlp", model.ffn_size
        names = ("gate", "up") if self.activation == "swiglu" else ("up",)
        split = ctx.split | {"bias": model.bias}
        self.up = ColumnParallelLinear(
            prefix, dict.fromkeys(names, ffn), model.hidden_size, std=model.init_std, **split
        )
        self.down = RowParallelLinear(
            f"{prefix}.down", ffn, model.hidden_size, std=output_std(model), **split
        )

    def forward(self, x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """Of norm(x)."""
        if {"mlp", "norm"} <= self.recompute:
            return checkpoint_up_to_linear(self.down, lambda x: self.inner(norm(x)), x, again=True)
        if "mlp" in self.recompute:
            return checkpoint_up_to_linear(self.down, self.inner, norm(x), again=True)
        x = checkpoint_up_to_linear(self.up, norm, x, again="norm" in self.recompute)
        return checkpoint_up_to_linear(
            self.down, self.activate, x, again="activation" in self.recompute
        )

    def inner(self, x: Tensor) -> Tensor:
        return self.activate(self.up(x))

    def activate(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            return swiglu(x)
        if self.activation == "relu":
            return F.relu(x)
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")


# One decoder-only transformer that spells GPT, Llama and what lies between, by configuration.
#
# Free of parallelism but for the layers it is made of: a block reads as in the papers, and what is
# split, gathered and reduced is the business of `tensor_parallel`. Hidden states are
# (batch, sequence, hidden); under sequence parallelism the stream between blocks holds sequence/tp.


# Blocks of one compiled graph: enough that what a graph costs to enter (0.4 ms measured) does not
# count, few enough that a deep stage compiles in seconds.
GRAPH_BLOCKS = 8


class Attention(nn.Module):
    """Causal self-attention with grouped queries; whole heads per tensor-parallel rank."""

    def __init__(self, layer: int, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.head_dim = model.head_size
        self.heads = model.num_attention_heads // ctx.tp.size
        # Fewer key-value heads than ranks: each head on as many ranks as its query heads take.
        replicas = max(1, ctx.tp.size // model.kv_heads)
        self.kv_heads = model.kv_heads * replicas // ctx.tp.size
        self.recompute, self.kernel = ctx.recompute, ctx.attention_kernel
        self.tp, self.gathers = ctx.tp, ctx.gather_qk and ctx.tp.size > 1
        prefix = f"layers.{layer}.attention"
        self.dropout = None
        if model.dropout:
            first, site = self.heads * ctx.tp.index, f"{prefix}.probabilities"
            self.dropout = Dropout(ctx.init.seed, site, model.dropout, first_head=first)
        kv_rows = model.kv_heads * model.head_size
        q_rows = model.num_attention_heads * model.head_size
        self.qkv = ColumnParallelLinear(
            prefix,
            {"q": q_rows, "k": kv_rows, "v": kv_rows},
            model.hidden_size,
            std=model.init_std,
            tp_replicas={"k": replicas, "v": replicas},
            bias=model.qkv_bias,
            **ctx.split,
        )
        heads = (self.heads, self.kv_heads)
        self.qk_norm = QKNorm(prefix, model, heads, ctx) if model.qk_norm else None
        self.out = RowParallelLinear(
            f"{prefix}.out",
            q_rows,
            model.hidden_size,
            std=output_std(model),
            bias=model.out_bias,
            **ctx.split,
        )

    def forward(
        self,
        x: Tensor,
        norm: Callable[[Tensor], Tensor],
        rotary: Rotary | None,
        samples: Tensor | None,
        documents: Documents | None,
    ) -> Tensor:
        """Of norm(x)."""
        inner = (self.project(x, norm), rotary, samples, documents)
        return checkpoint_up_to_linear(
            self.out, self.attend, *inner, again="attention" in self.recompute
        )

    def attend(
        self,
        qkv: Tensor,
        rotary: Rotary | None,
        samples: Tensor | None,
        documents: Documents | None,
    ) -> Tensor:
        """Between the projections."""
        if self.qk_norm is not None:
            qkv = self.qk_norm(qkv)
        shape = (self.heads, self.kv_heads, self.head_dim)
        inputs = (rotary, self.dropout, samples, documents, self.kernel)
        return causal_attention(qkv, *shape, *inputs)

    def project(self, x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """q, k and v of this rank's heads, side by side, of norm(x).

        With `tensor_parallel.attention=gather_qk` every rank first gathers q and k of all heads,
        as where scores are computed from whole matrices, and takes those of its own from there.
        """
        qkv = checkpoint_up_to_linear(self.qkv, norm, x, again="norm" in self.recompute)
        if not self.gathers:
            return qkv
        v_size = self.kv_heads * self.head_dim
        qk, v = qkv.split((qkv.shape[-1] - v_size, v_size), dim=-1)
        return torch.cat((gather_heads(qk, self.tp)[self.tp.index], v), dim=-1)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, layer: int, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.input_norm = Norm(f"layers.{layer}.input_norm", model, ctx.init)
        self.attention = Attention(layer, model, ctx)
        self.mlp_norm = Norm(f"layers.{layer}.mlp_norm", model, ctx.init)
        self.mlp = MLP(layer, model, ctx)
        self.attention_dropout = ctx.dropout(f"layers.{layer}.attention", model)
        self.mlp_dropout = ctx.dropout(f"layers.{layer}.mlp", model)
        self.recompute = "layer" in ctx.recompute
        self.keeps_norms = "norm" not in ctx.recompute

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None,
        samples: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Dropout for `samples`, (b,) numbers in the run; None: without it."""
        if self.recompute:
            return recomputed(self.layer, x, rotary, samples, documents)
        return self.layer(x, rotary, samples, documents)

    def layer(
        self, x: Tensor, rotary: Rotary | None, samples: Tensor | None, documents: Documents | None
    ) -> Tensor:
        x, norm = self._sum_and_norm(x, None, self.input_norm)
        attended = self.attention(x, norm, rotary, samples, documents)
        attended = self.attention_dropout(attended, samples)
        x, norm = self._sum_and_norm(x, attended, self.mlp_norm)
        return x + self.mlp_dropout(self.mlp(x, norm), samples)

    def _sum_and_norm(
        self, x: Tensor, y: Tensor | None, norm: Norm
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """x + y (x where y is None), and the norm as a function of it.

        Where one kernel makes both the function only hands out what is there. Not where the norm
        is made again in the backward: then its result must not be kept, and comes from the sum.
        """
        if self.keeps_norms and norm.is_fused_with_sum(x):
            x, normed = norm.add(x, y)
            return x, lambda _: normed
        return x if y is None else x + y, norm


def _run_blocks(
    blocks: list[TransformerBlock],
    x: Tensor,
    rotary: Rotary | None,
    samples: Tensor | None = None,
    documents: Documents | None = None,
) -> Tensor:
    for block in blocks:
        x = block(x, rotary, samples, documents)
    return x


class Stage(nn.Module):
    """A contiguous run of layers; the first stage embeds, the last one has head and loss.

    Args:
        layers: global layer numbers of this stage.
        first, last: whether it holds the embedding, the head. Both: the whole model.
        beside: on the rank that holds both ends in two stages (a V), the first of them for the
            last: the last reads its word table where they are tied.
        first_and_last_share_rank: both ends are on this rank.
        recomputed: how many of its layers recompute, the first ones; None: all.

    `pre_forward(part)` is called before the forward reads the parameters of "embedding", "layers.3"
    or "head": whoever shards parameters makes them whole there.
    """

    def __init__(
        self,
        model: ModelConfig,
        layers: range,
        first: bool,
        last: bool,
        ctx: BuildContext,
        beside: Stage | None = None,
        first_and_last_share_rank: bool = False,
        recomputed: int | None = None,
    ) -> None:
        super().__init__()
        first_and_last_share_rank |= first and last
        self.first, self.last, self.drops = first, last, model.dropout > 0
        self.pre_forward: Callable[[str], None] = lambda part: None
        self.run_blocks = _run_blocks
        # Local name of the word table that first and last rank of a pipeline both hold.
        self.tied_table: str | None = None
        if model.tie_embeddings and (first or last) and not first_and_last_share_rank:
            self.tied_table = "embedding.word.weight" if first else "head.table"
        uses = 2 if first_and_last_share_rank and model.tie_embeddings else 1
        self.embedding = Embedding(model, ctx, uses) if first else None
        count = len(layers) if recomputed is None else recomputed
        keeping = replace(ctx, recompute=frozenset())
        self.layers = nn.ModuleDict(
            {
                str(i): TransformerBlock(i, model, ctx if i in layers[:count] else keeping)
                for i in layers
            }
        )
        self.head = None
        if last:
            owner = (beside or self).embedding
            shared = owner is not None and model.tie_embeddings
            self.head = Head(model, ctx, owner.word.weight if shared else None)
        self.rotary = None
        if model.position_embedding == "rope":
            self.rotary = rotary_tables(model, ctx.init.dtype, ctx.init.device)

    def forward(
        self,
        hidden: Tensor | None,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        samples: Tensor | None = None,
        documents: Documents | None = None,
        loss_scale: Tensor | None = None,
    ) -> Tensor:
        """Hidden states for the next stage or, on the last, the sum of the unmasked losses.

        Args:
            hidden: (b, s, h), or (b, s/tp, h) under sequence parallelism; None on the first stage.
            tokens, labels: (b, s) ids; loss_mask: (b, s) bool. Read by the ends alone.
            samples: (b,) numbers of the samples in the run, for dropout.
            documents: attention and positions are within each; None: a sample is one.
            loss_scale: scalar, the gradient that the sum of the losses will be given in the
                backward; None: evaluation, without gradients or dropout.
        """
        if loss_scale is None or not self.drops:
            samples = None
        x, rotary, positions = hidden, self.rotary, None
        if documents is not None:
            positions = documents.positions()
            if rotary is not None:
                rotary = tuple(table[positions] for table in rotary)
        if self.first:
            self.pre_forward("embedding")
            x = self.embedding(tokens, samples, positions)
        blocks, names = list(self.layers.values()), list(self.layers)
        for i in range(0, len(blocks), GRAPH_BLOCKS):
            for name in names[i : i + GRAPH_BLOCKS]:
                self.pre_forward(f"layers.{name}")
            x = self.run_blocks(blocks[i : i + GRAPH_BLOCKS], x, rotary, samples, documents)
        if not self.last:
            return x
        self.pre_forward("head")
        return self.head(x, labels, loss_mask, loss_scale)


def stages_of_rank(
    model: ModelConfig,
    layers: Sequence[range],
    placement: StageAssignment,
    rank: int,
    ctx: BuildContext,
) -> list[Stage]:
    """The stages that `rank` of a pipeline holds, in the order of the model.

    Each has layers of its own numbers, and so its own initial values.

    Args:
        layers: global layer numbers of every stage of the pipeline.
    """
    held = [placement.stage(rank, chunk) for chunk in range(placement.chunks)]
    last = placement.stages - 1
    first_and_last_share_rank = 0 in held and last in held
    stages: list[Stage] = []
    for stage in held:
        beside = stages[0] if stage == last and first_and_last_share_rank and stages else None
        recomputed = recomputing(ctx.recompute_layers, stage, len(layers[stage]))
        ends = stage == 0, stage == last
        stages.append(
            Stage(model, layers[stage], *ends, ctx, beside, first_and_last_share_rank, recomputed)
        )
    return stages


def compile_blocks(stages: Sequence[Stage], saves_operands: bool) -> None:
    """From here on the blocks run, forward and backward, as compiled graphs.

    Groups of equal size share their code. Gradients of the linear layers go to their buckets (see
    `tensor_parallel.linear_ops`), never to `.grad`.

    Args:
        saves_operands: weight gradients may be put off (see `shared_inductor`).
    """
    own_code = {}  # models of other shapes in this process are not counted as recompilations
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # newer than 2.11
        own_code["isolate_recompiles"] = True
    backend = without_inplace_reuse if saves_operands else shared_inductor
    compiled = torch.compile(
        _run_blocks, backend=backend, fullgraph=True, dynamic=False, **own_code
    )
    for stage in stages:
        stage.run_blocks = compiled


# The forward pass one token at a time: keys and values of what was read are kept.
#
# Runs the very layers that were trained, on tensor-parallel ranks and through the stages of a
# pipeline. One sequence, no gradients, no sequence parallelism.


class Blank(Initializer):
    """Makes parameters whose values come from elsewhere: drawing them would be for nothing."""

    def fill(self, piece: ShardSpec, out: Tensor) -> None:
        pass


def blank_stage(config: Config, groups: ProcessGroups, device: torch.device) -> Stage:
    """This rank's part of the model in fp32 (fp64 for a run of that precision), all zero."""
    dtype = torch.float64 if config.precision.name == "fp64" else torch.float32
    init, kernel = Blank(config.seed, dtype, device), choose_kernel(config, device)
    context = BuildContext(init, groups.tp, sp=False, attention_kernel=kernel)
    layers = layers_of_stages(config)[groups.pp.index]
    return Stage(config.model, layers, groups.is_first_stage, groups.is_last_stage, context)


@dataclass
class _Cache:
    """Keys and values of one attention layer: (1, key-value heads, seq_length, head_dim)."""

    keys: Tensor
    values: Tensor


class Decoder:
    """Reads a sequence and gives the logits of what comes next; collective over tp × pp.

    At most `seq_length` tokens are in view, as in training.
    """

    def __init__(self, config: Config, groups: ProcessGroups, stage: Stage) -> None:
        self.model, self.groups, self.stage = config.model, groups, stage
        self.window = self.model.seq_length
        example = next(stage.parameters())
        self.device, self.dtype = example.device, example.dtype
        self.caches = {name: self._empty_cache(b.attention) for name, b in stage.layers.items()}
        self.start = 0  # first token in view
        self.read = 0  # tokens in the caches, from `start` on

    def _empty_cache(self, attention: Attention) -> _Cache:
        shape = (1, attention.kv_heads, self.window, attention.head_dim)
        keys, values = torch.zeros((2, *shape), dtype=self.dtype, device=self.device)
        return _Cache(keys, values)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor | None:
        """Logits (vocab_size,) of the token after `tokens`, on the last stage; None elsewhere.

        Call it with the whole sequence so far: only what is new since the last call is read. When
        the window is full, the latter half of it is read anew, from position 0 on.
        """
        start = self._in_view(len(tokens))
        if start != self.start or len(tokens) - start - self.read != 1:
            self.start, self.read = start, 0
        view = tokens[start:]
        new = torch.tensor([view[self.read :]], device=self.device)
        x = self._embed(new) if self.stage.first else self._receive(new.shape[1])
        for name, block in self.stage.layers.items():
            x = self._block(block, self.caches[name], x)
        self.read = len(view)
        if not self.stage.last:
            transfer(dist.isend, x.contiguous(), self._neighbour(1), self.groups.pp.handle)
            return None
        logits = gather_from_vocabulary(self.stage.head.logits(x[:, -1:]), self.groups.tp)
        return logits[0, 0, : self.model.vocab_size]

    def _in_view(self, length: int) -> int:
        """First token in view: it moves on by half a window whenever the window is full."""
        half = max(1, self.window // 2)
        return 0 if length <= self.window else -(-(length - self.window) // half) * half

    def _embed(self, tokens: Tensor) -> Tensor:
        embedding = self.stage.embedding
        x = embedding.word(tokens)
        if embedding.position is None:
            return x
        return x + embedding.position[self.read : self.read + tokens.shape[1]]

    def _receive(self, length: int) -> Tensor:
        shape = (1, length, self.model.hidden_size)
        x = torch.empty(shape, dtype=self.dtype, device=self.device)
        transfer(dist.irecv, x, self._neighbour(-1), self.groups.pp.handle)
        return x

    def _neighbour(self, step: int) -> int:
        return self.groups.pp.ranks[self.groups.pp.index + step]

    def _block(self, block: TransformerBlock, cache: _Cache, x: Tensor) -> Tensor:
        """`Block.layer` with the attention over the cache."""
        attention = block.attention
        inner = self._attend(attention, cache, attention.qkv(block.input_norm(x)))
        x = x + attention.out(inner)
        return x + block.mlp(x, block.mlp_norm)

    def _attend(self, attention: Attention, cache: _Cache, qkv: Tensor) -> Tensor:
        """`causal_attention` of new tokens (1, n, …) over all that were read, kept in `cache`.

        Either the cache is empty or n is 1: then every new token sees what it may see.
        """
        first, end = self.read, self.read + qkv.shape[1]
        if attention.qk_norm is not None:
            qkv = attention.qk_norm(qkv)
        heads, kv_heads, width = attention.heads, attention.kv_heads, attention.head_dim
        if self.stage.rotary is not None:
            rotary = tuple(table[first:end] for table in self.stage.rotary)
            q, k, v = split_heads_rotary(qkv, heads, kv_heads, width, rotary)
        else:
            parts = qkv.unflatten(-1, (-1, width)).split((heads, kv_heads, kv_heads), dim=2)
            q, k, v = (t.transpose(1, 2) for t in parts)
        cache.keys[:, :, first:end], cache.values[:, :, first:end] = k, v
        k, v = cache.keys[:, :, :end], cache.values[:, :, :end]
        if not kernel_shares_heads(q):
            k, v = repeated(k, heads), repeated(v, heads)
        y = attend(q, k, v, is_causal=first == 0, kernel=attention.kernel)
        return y.transpose(1, 2).flatten(2)
