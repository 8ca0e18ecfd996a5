"""One decoder-only transformer that spells GPT, Llama and what lies between, by configuration.

Free of parallelism but for the layers it is made of: a block reads as in the papers, and what is
split, gathered and reduced is the business of `tensor_parallel`. Hidden states are
(batch, sequence, hidden); under sequence parallelism the stream between blocks holds sequence/tp.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.config import LossConfig, ModelConfig
from parallel3d.models.attention import causal_attention
from parallel3d.models.dropout import Dropout
from parallel3d.models.layers import Norm, rotary_tables
from parallel3d.models.ops import swiglu
from parallel3d.models.recompute import recomputed
from parallel3d.tensor_parallel.cross_entropy import Objective
from parallel3d.tensor_parallel.embedding import VocabParallelEmbedding, word_table
from parallel3d.tensor_parallel.head_loss import HeadLoss
from parallel3d.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel_linear,
)
from parallel3d.tensor_parallel.mappings import gather_heads, rows_of_replicated
from parallel3d.tensor_parallel.overlap import IN_ONE, Overlap
from parallel3d.tensor_parallel.parameters import (
    WORD_TABLE,
    Initializer,
    ParameterSpec,
    Piece,
)
from parallel3d.topology.process_groups import Group

# Blocks of one compiled graph: enough that what a graph costs to enter (0.4 ms measured) does not
# count, few enough that a deep stage compiles in seconds.
GRAPH_BLOCKS = 8


@dataclass(frozen=True)
class BuildContext:
    """What every layer needs beside its shape: who shares it and its initial values."""

    init: Initializer
    tp: Group
    sp: bool
    recompute: str = "none"  # see `recompute.py`
    loss: LossConfig = field(default_factory=LossConfig)
    overlap: Overlap = IN_ONE  # of the layers' communication under sequence parallelism
    gather_qk: bool = False  # see `Attention.project`

    @property
    def sequence_parallel(self) -> bool:
        return self.sp and self.tp.size > 1

    @property
    def split(self) -> dict[str, Any]:
        """What every split linear layer takes."""
        sp = self.sequence_parallel
        return {"group": self.tp, "sp": sp, "init": self.init, "overlap": self.overlap}

    def dropout(self, site: str, model: ModelConfig) -> Dropout:
        """Of the residual stream: whole, or this rank's part of the sequence."""
        first = model.seq_length // self.tp.size * self.tp.index if self.sequence_parallel else 0
        return Dropout(self.init.seed, site, model.dropout, first_position=first)


class Attention(nn.Module):
    """Causal self-attention with grouped queries; whole heads per tensor-parallel rank."""

    def __init__(self, layer: int, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.heads = model.num_attention_heads // ctx.tp.size
        # Fewer key-value heads than ranks: each head on as many ranks as its query heads take.
        copies = max(1, ctx.tp.size // model.kv_heads)
        self.kv_heads = model.kv_heads * copies // ctx.tp.size
        self.recompute = ctx.recompute == "selective"
        self.tp, self.gathers = ctx.tp, ctx.gather_qk and ctx.tp.size > 1
        prefix = f"layers.{layer}.attention"
        self.dropout = None
        if model.dropout:
            first, site = self.heads * ctx.tp.index, f"{prefix}.probabilities"
            self.dropout = Dropout(ctx.init.seed, site, model.dropout, first_head=first)
        kv_rows = model.kv_heads * model.head_dim
        q_rows = model.num_attention_heads * model.head_dim
        split = ctx.split | {"bias": model.bias}
        self.qkv = ColumnParallelLinear(
            prefix,
            {"q": q_rows, "k": kv_rows, "v": kv_rows},
            model.hidden_size,
            std=model.init_std,
            copies={"k": copies, "v": copies},
            **split,
        )
        self.out = RowParallelLinear(
            f"{prefix}.out", q_rows, model.hidden_size, std=output_std(model), **split
        )

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, samples: Tensor | None
    ) -> Tensor:
        shape = (self.heads, self.kv_heads, self.head_dim)
        inner = (self.project(x), *shape, rotary, self.dropout, samples)
        if self.recompute:
            return self.out(recomputed(causal_attention, *inner))
        return self.out(causal_attention(*inner))

    def project(self, x: Tensor) -> Tensor:
        """q, k and v of this rank's heads, side by side.

        With `tensor_parallel.attention=gather_qk` every rank first gathers q and k of all heads,
        as where scores are computed from whole matrices, and takes those of its own from there.
        """
        qkv = self.qkv(x)
        if not self.gathers:
            return qkv
        v_size = self.kv_heads * self.head_dim
        qk, v = qkv.split((qkv.shape[-1] - v_size, v_size), dim=-1)
        return torch.cat((gather_heads(qk, self.tp)[self.tp.index], v), dim=-1)


class MLP(nn.Module):
    """Two GEMMs with a non-linearity; SwiGLU's gate and up share the first."""

    def __init__(self, layer: int, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.activation = model.activation
        prefix, ffn = f"layers.{layer}.mlp", model.ffn_size
        names = ("gate", "up") if self.activation == "swiglu" else ("up",)
        split = ctx.split | {"bias": model.bias}
        self.up = ColumnParallelLinear(
            prefix, dict.fromkeys(names, ffn), model.hidden_size, std=model.init_std, **split
        )
        self.down = RowParallelLinear(
            f"{prefix}.down", ffn, model.hidden_size, std=output_std(model), **split
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.activation == "swiglu":
            x = swiglu(x)
        elif self.activation == "gelu":
            x = F.gelu(x)
        elif self.activation == "gelu_tanh":
            x = F.gelu(x, approximate="tanh")
        else:
            x = F.relu(x)
        return self.down(x)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, layer: int, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.input_norm = Norm(f"layers.{layer}.input_norm", model, ctx.init)
        self.attention = Attention(layer, model, ctx)
        self.mlp_norm = Norm(f"layers.{layer}.mlp_norm", model, ctx.init)
        self.mlp = MLP(layer, model, ctx)
        self.attention_dropout = ctx.dropout(f"layers.{layer}.attention", model)
        self.mlp_dropout = ctx.dropout(f"layers.{layer}.mlp", model)
        self.recompute = ctx.recompute == "full"

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        samples: Tensor | None = None,
    ) -> Tensor:
        """Dropout for `samples`, (b,) numbers in the run; None: without it."""
        if self.recompute:
            return recomputed(self.layer, x, rotary, samples)
        return self.layer(x, rotary, samples)

    def layer(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, samples: Tensor | None
    ) -> Tensor:
        attended = self.attention(self.input_norm(x), rotary, samples)
        x = x + self.attention_dropout(attended, samples)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), samples)


def _run_blocks(
    blocks: list[Block],
    x: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    samples: Tensor | None = None,
) -> Tensor:
    for block in blocks:
        x = block(x, rotary, samples)
    return x


class Embedding(nn.Module):
    """Word embedding plus, for GPT, the learned positions."""

    def __init__(self, model: ModelConfig, ctx: BuildContext, uses: int) -> None:
        super().__init__()
        self.tp, self.sp = ctx.tp, ctx.sequence_parallel
        replicated = model.embedding == "replicated"
        table = _word_table(model, ctx, WORD_TABLE, uses=uses)
        self.word = VocabParallelEmbedding(table, group=ctx.tp, sp=ctx.sp, replicated=replicated)
        self.position = None
        if model.position_embedding == "learned":
            shape = (model.max_positions, model.hidden_size)
            piece = Piece("embedding.position.weight", shape, (0, 0), shape, std=model.init_std)
            self.position = ctx.init.parameter(ParameterSpec(shape, (piece,), replicated=True))
        self.dropout = ctx.dropout("embedding", model)

    def forward(self, tokens: Tensor, samples: Tensor | None = None) -> Tensor:
        x = self.word(tokens)
        if self.position is not None:
            first = x.shape[1] * self.tp.index if self.sp else 0
            x = x + self.position[first : first + x.shape[1]]
        return self.dropout(x, samples)


class Head(nn.Module):
    """Final norm, logits split over the vocabulary, and the loss."""

    def __init__(
        self, model: ModelConfig, ctx: BuildContext, tied_table: nn.Parameter | None
    ) -> None:
        super().__init__()
        self.tp, self.sp, self.model = ctx.tp, ctx.sequence_parallel, model
        self.norm = Norm("final_norm", model, ctx.init)
        if tied_table is not None:
            self.table = tied_table
        elif model.tie_embeddings:
            self.table = _word_table(model, ctx, WORD_TABLE, tied_copy=True)
        else:
            self.table = _word_table(model, ctx, "head.weight", replicated=False)
        loss = ctx.loss
        self.loss = HeadLoss(
            Objective(model.vocab_size, loss.label_smoothing, loss.z_loss),
            model.padded_vocab_size,
            group=ctx.tp,
            sp=ctx.sp,
            gather_logits=not model.parallel_output,
            chunk_tokens=loss.chunk_tokens,
        )

    def rows(self) -> Tensor:
        """(padded vocabulary / tp, hidden): this rank's rows of the table."""
        if self.model.tie_embeddings and self.model.embedding == "replicated":
            return rows_of_replicated(self.table, self.tp, partial=self.sp)
        return self.table

    def logits(self, x: Tensor) -> Tensor:
        """(b, s or s/tp, hidden) → (b, s, padded vocabulary / tp)."""
        return column_parallel_linear(self.norm(x), self.rows(), None, self.tp, self.sp)

    def forward(
        self, x: Tensor, labels: Tensor, loss_mask: Tensor, loss_scale: Tensor | None
    ) -> Tensor:
        """The sum of the unmasked losses in fp32 or better; see `Stage.forward`."""
        x, rows = self.norm(x), self.rows()
        if loss_scale is None:
            return self.loss.evaluate(x, rows, labels, loss_mask)
        return self.loss.train(x, rows, labels, loss_mask, loss_scale)


class Stage(nn.Module):
    """A contiguous run of layers; the first stage embeds, the last one has head and loss.

    Args:
        layers: global layer numbers of this stage.
        first, last: whether it holds the embedding, the head. Both: the whole model.

    `before_use(part)` is called before the forward reads the parameters of "embedding", "layers.3"
    or "head": whoever shards parameters makes them whole there.
    """

    def __init__(
        self, model: ModelConfig, layers: range, first: bool, last: bool, ctx: BuildContext
    ) -> None:
        super().__init__()
        self.first, self.last, self.drops = first, last, model.dropout > 0
        self.before_use: Callable[[str], None] = lambda part: None
        self.run_blocks = _run_blocks
        uses = 2 if first and last and model.tie_embeddings else 1
        self.embedding = Embedding(model, ctx, uses) if first else None
        self.layers = nn.ModuleDict({str(i): Block(i, model, ctx) for i in layers})
        self.head = None
        if last:
            shared = first and model.tie_embeddings
            table = self.embedding.word.weight if shared else None
            self.head = Head(model, ctx, table)
        self.rotary = None
        if model.position_embedding == "rope":
            self.rotary = rotary_tables(model, ctx.init.dtype, ctx.init.device)

    def compile_blocks(self) -> None:
        """From here on the blocks run, forward and backward, as compiled graphs.

        Groups of equal size share their code. Gradients of the linear layers go to their buckets
        (see `tensor_parallel.linear_ops`), never to `.grad`.
        """
        own_code = {}  # models of other shapes in this process are not counted as recompilations
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # newer than 2.11
            own_code["isolate_recompiles"] = True
        self.run_blocks = torch.compile(_run_blocks, fullgraph=True, dynamic=False, **own_code)

    def forward(
        self,
        hidden: Tensor | None,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        samples: Tensor | None = None,
        loss_scale: Tensor | None = None,
    ) -> Tensor:
        """Hidden states for the next stage or, on the last, the sum of the unmasked losses.

        Args:
            hidden: (b, s, h), or (b, s/tp, h) under sequence parallelism; None on the first stage.
            tokens, labels: (b, s) ids; loss_mask: (b, s) bool. Read by the ends alone.
            samples: (b,) numbers of the samples in the run, for dropout.
            loss_scale: scalar, the gradient that the sum of the losses will be given in the
                backward; None: evaluation, without gradients or dropout.
        """
        if loss_scale is None or not self.drops:
            samples = None
        x = hidden
        if self.first:
            self.before_use("embedding")
            x = self.embedding(tokens, samples)
        blocks, names = list(self.layers.values()), list(self.layers)
        for i in range(0, len(blocks), GRAPH_BLOCKS):
            for name in names[i : i + GRAPH_BLOCKS]:
                self.before_use(f"layers.{name}")
            x = self.run_blocks(blocks[i : i + GRAPH_BLOCKS], x, self.rotary, samples)
        if not self.last:
            return x
        self.before_use("head")
        return self.head(x, labels, loss_mask, loss_scale)


def _word_table(
    model: ModelConfig,
    ctx: BuildContext,
    name: str,
    *,
    replicated: bool | None = None,
    tied_copy: bool = False,
    uses: int = 1,
) -> nn.Parameter:
    if replicated is None:
        replicated = model.embedding == "replicated"
    return word_table(
        model.vocab_size,
        model.padded_vocab_size,
        model.hidden_size,
        name=name,
        std=model.init_std,
        group=ctx.tp,
        replicated=replicated,
        init=ctx.init,
        tied_copy=tied_copy,
        uses=uses,
    )


def output_std(model: ModelConfig) -> float:
    """Init of the layers that write into the residual stream (Radford et al. 2019 §2.3)."""
    return model.init_std / math.sqrt(2 * model.num_layers)
