"""The embedding, and the LM head with its loss."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from parallel3d.device.capping import scaled_and_capped
from parallel3d.models import declared
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext, Norm
from parallel3d.parameters.declaration import part_of
from parallel3d.parameters.spec import ParameterSpec
from parallel3d.parameters.state import spec_of, state_of
from parallel3d.tensor_parallel.embedding import (
    VocabParallelEmbedding,
    look_up,
)
from parallel3d.tensor_parallel.linear_ops import linear_node
from parallel3d.tensor_parallel.loss import HeadLoss, Objective
from parallel3d.tensor_parallel.mappings import rows_of_replicated


class Embedding(nn.Module):
    """Computes the word embedding plus, with learned positions (GPT), the position embedding.

    Args:
        uses: how many times a forward reads the table: 2 if a tied head on this rank reads it too.
        tied: whether the last stage, on another rank, holds a copy of the table.
    """

    def __init__(self, model: ModelConfig, ctx: BuildContext, uses: int, tied: bool) -> None:
        super().__init__()
        self.tp = ctx.tp
        self.sp = ctx.sequence_parallel
        held = declared.embedding(model)
        self.word = VocabParallelEmbedding.of(
            part_of(held, "word"),
            group=ctx.tp,
            sequence_parallel=ctx.sp,
            sum_partial_gradients=False,
            uses=uses,
            init=ctx.init,
        )
        state_of(self.word.weight).spec = replace(spec_of(self.word.weight), tied=tied)
        self.position = ctx.parameter(held["position"]) if "position" in held else None
        self.scale = model.embedding_scale
        self.dropout = ctx.dropout("embedding", model)

    def of_words(self, tokens: Tensor) -> Tensor:
        """Returns the word embedding of the tokens, times `model.embedding_scale`.

        The scale is rounded to the dtype of the embedding.
        """
        x = self.word(tokens)
        if self.scale == 1.0:
            return x
        return x * torch.tensor(self.scale, dtype=x.dtype).item()

    def forward(self, tokens: Tensor, inputs: LayerInputs) -> Tensor:
        """Embeds tokens (b, s); positions are counted within documents, or within samples."""
        x, documents = self.of_words(tokens), inputs.documents
        if self.position is not None:
            first = x.shape[1] * self.tp.index if self.sp else 0
            mine = slice(first, first + x.shape[1])
            if documents is None:
                x = x + self.position[mine]
            else:
                # If each rank computes the whole gradient, all must get equal bits. Under sequence
                # parallelism a sum over tp makes the gradients equal anyway.
                deterministic = self.tp.size > 1 and not self.sp
                x = x + look_up(documents.positions()[:, mine], self.position, deterministic)
        return self.dropout(x, inputs)


class Head(nn.Module):
    """Computes the final norm, logits split over the vocabulary, and the loss.

    Args:
        tied_table: the word embedding, if it is on this rank and the head reads it, or None if the
            head has a table of its own.
    """

    def __init__(
        self, model: ModelConfig, ctx: BuildContext, tied_table: nn.Parameter | None
    ) -> None:
        super().__init__()
        self.tp = ctx.tp
        self.sp = ctx.sequence_parallel
        self.model = model
        held = declared.head(model)
        self.norm = Norm(part_of(held, "norm"), model, ctx)
        if tied_table is None:
            spec = ParameterSpec.of(held["table"], ctx.tp.size, ctx.tp.index)
            tied_table = ctx.init.parameter(replace(spec, tied=held["table"][0].tied))
        self.table = tied_table
        self.is_whole = held["table"][0].split is None
        loss = ctx.loss
        self.loss = HeadLoss(
            Objective(
                model.vocab_size,
                loss.label_smoothing,
                loss.z_loss,
                ctx.half_loss,
                model.logit_scale,
                model.logit_cap,
            ),
            group=ctx.tp,
            sp=ctx.sp,
            gather_logits=not model.parallel_output,
            chunk_tokens=loss.chunk_tokens,
        )

    def rows(self) -> Tensor:
        if self.is_whole:
            return rows_of_replicated(self.table, self.tp, partial_sums=self.sp)
        return self.table

    def logits(self, x: Tensor) -> Tensor:
        """Returns logits: (b, s or s/tp, hidden) → (b, s, padded vocabulary / tp)."""
        sp = 1 if self.sp else None
        products = linear_node("column", self.norm(x), self.rows(), None, self.tp, sp)
        return scaled_and_capped(products, self.model.logit_scale, self.model.logit_cap)

    def forward(
        self, x: Tensor, labels: Tensor, loss_mask: Tensor, loss_scale: Tensor | None
    ) -> Tensor:
        x, rows = self.norm(x), self.rows()
        if loss_scale is None:
            return self.loss.evaluate(x, rows, labels, loss_mask)
        return self.loss.train(x, rows, labels, loss_mask, loss_scale)
