"""One decoder-only transformer that spells GPT, Llama and what lies between, by configuration.

Free of parallelism but for the layers it is made of: a block reads as in the papers, and what is
split, gathered and reduced is the business of `tensor_parallel`. Hidden states are
(batch, sequence, hidden); under sequence parallelism the stream between blocks holds sequence/tp.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from parallel3d.config.schema import ModelConfig
from parallel3d.data.documents import Documents
from parallel3d.models.attention import causal_attention
from parallel3d.models.compilation import keeping_inductor, shared_inductor
from parallel3d.models.context import BuildContext
from parallel3d.models.dropout import Dropout
from parallel3d.models.ends import Embedding, Head
from parallel3d.models.layers import Norm, output_std, rotary_tables
from parallel3d.models.mlp import MLP
from parallel3d.models.ops import Rotary
from parallel3d.models.qk_norm import QKNorm
from parallel3d.models.recompute import checkpoint_up_to_linear, recomputed
from parallel3d.schedules.placement import StageAssignment
from parallel3d.sizes.recompute import recomputing
from parallel3d.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from parallel3d.tensor_parallel.mappings import gather_heads

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
        copies = max(1, ctx.tp.size // model.kv_heads)
        self.kv_heads = model.kv_heads * copies // ctx.tp.size
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
            copies={"k": copies, "v": copies},
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
        ends_meet: both ends are on this rank.
        recomputed: how many of its layers recompute, the first ones; None: all.

    `before_use(part)` is called before the forward reads the parameters of "embedding", "layers.3"
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
        ends_meet: bool = False,
        recomputed: int | None = None,
    ) -> None:
        super().__init__()
        ends_meet |= first and last
        self.first, self.last, self.drops = first, last, model.dropout > 0
        self.before_use: Callable[[str], None] = lambda part: None
        self.run_blocks = _run_blocks
        # Local name of the word table that first and last rank of a pipeline both hold.
        self.tied_table: str | None = None
        if model.tie_embeddings and (first or last) and not ends_meet:
            self.tied_table = "embedding.word.weight" if first else "head.table"
        uses = 2 if ends_meet and model.tie_embeddings else 1
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
            self.before_use("embedding")
            x = self.embedding(tokens, samples, positions)
        blocks, names = list(self.layers.values()), list(self.layers)
        for i in range(0, len(blocks), GRAPH_BLOCKS):
            for name in names[i : i + GRAPH_BLOCKS]:
                self.before_use(f"layers.{name}")
            x = self.run_blocks(blocks[i : i + GRAPH_BLOCKS], x, rotary, samples, documents)
        if not self.last:
            return x
        self.before_use("head")
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
    ends_meet = 0 in held and last in held
    stages: list[Stage] = []
    for stage in held:
        beside = stages[0] if stage == last and ends_meet and stages else None
        recomputed = recomputing(ctx.recompute_layers, stage, len(layers[stage]))
        ends = stage == 0, stage == last
        stages.append(Stage(model, layers[stage], *ends, ctx, beside, ends_meet, recomputed))
    return stages


def compile_blocks(stages: Sequence[Stage], keeps_operands: bool) -> None:
    """From here on the blocks run, forward and backward, as compiled graphs.

    Groups of equal size share their code. Gradients of the linear layers go to their buckets (see
    `tensor_parallel.linear_ops`), never to `.grad`.

    Args:
        keeps_operands: weight gradients may be put off (see `shared_inductor`).
    """
    own_code = {}  # models of other shapes in this process are not counted as recompilations
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # newer than 2.11
        own_code["isolate_recompiles"] = True
    backend = keeping_inductor if keeps_operands else shared_inductor
    compiled = torch.compile(
        _run_blocks, backend=backend, fullgraph=True, dynamic=False, **own_code
    )
    for stage in stages:
        stage.run_blocks = compiled
