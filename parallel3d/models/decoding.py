"""Decodes one sequence, one token at a time, with a state of each layer, such as a KV cache.

It works on tensor-parallel ranks and through the stages of a pipeline, without sequence
parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.blueprint.dispatch import GATHER
from parallel3d.comm.exchange import transfer
from parallel3d.device.precision import master_dtype
from parallel3d.models.attention import choose_kernel
from parallel3d.models.embedding_and_head import Embedding
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs, LayerState
from parallel3d.models.layers import BuildContext
from parallel3d.models.rotary import Positions, rows_read
from parallel3d.models.transformer import Stage, TransformerBlock
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ShardSpec
from parallel3d.tensor_parallel.mappings import gather_from_vocabulary

if TYPE_CHECKING:
    from parallel3d.comm.process_groups import ProcessGroups


class BlankInitializer(Initializer):
    """Creates parameters without drawing their values, which are loaded later."""

    def fill(self, shard: ShardSpec, out: Tensor) -> None:
        pass


def blank_stage(blueprint: Blueprint, groups: ProcessGroups, device: torch.device) -> Stage:
    """Creates this rank's stage, whose parameters are all 0, in the dtype of the master weights."""
    init = BlankInitializer(0, master_dtype(blueprint.precision), device)
    context = BuildContext(
        init,
        groups.tp,
        sp=False,
        attention_kernel=choose_kernel(blueprint, device),
        cp=groups.cp,
        cp_style=blueprint.layer.cp_style,
        cp_states=blueprint.layer.cp_states,
        ep=groups.ep,
        dispatch=GATHER,  # every rank of ep has equally many tokens
    )
    [stage] = blueprint.stages_of(groups.pp.index)
    return Stage(blueprint.model, stage, context)


class Decoder:
    """Computes the logits of the next token with a KV cache; collective over tp and pp."""

    def __init__(self, model: ModelConfig, groups: ProcessGroups, stage: Stage) -> None:
        self.model = model
        self.groups = groups
        self.stage = stage
        self.window = self.model.seq_length
        example = next(stage.parameters())
        self.device = example.device
        self.dtype = example.dtype
        self.states: dict[str, LayerState] = {
            name: block.attention.decoding(self.window, example)
            for name, block in stage.blocks.items()
            if block.attention is not None
        }
        self.start = 0  # index of the window's first token
        self.cached = 0  # number of tokens in the states, beginning at `start`

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor | None:
        """Returns the logits of the token after `tokens` on the last stage, and None elsewhere.

        The logits are (vocab_size,). `tokens` is the whole sequence so far; the keys and values of
        earlier tokens are cached. When the window of `seq_length` tokens is full, its second half
        is recomputed, beginning at position 0.
        """
        start = self._window_start(len(tokens))
        switch = self.stage.switch
        # Keys of a document that becomes longer than the switch are rotated in another way.
        switched = switch is not None and self.cached <= switch < len(tokens) - start
        if switched or start != self.start or len(tokens) - start - self.cached != 1:
            self.start = start
            self.cached = 0
        window = tokens[start:]
        new = torch.tensor([window[self.cached :]], device=self.device)
        if self.stage.embedding is not None:
            x = self._embed(self.stage.embedding, new)
        else:
            shape = (1, new.shape[1], self.model.hidden_size)
            x = torch.empty(shape, dtype=self.dtype, device=self.device)
            self._exchange(dist.irecv, x, -1)
        positions = self._positions(self.cached, len(window))
        for name, block in self.stage.blocks.items():
            x = self._block(block, self.states.get(name), x, positions)
        self.cached = len(window)
        if self.stage.head is None:
            self._exchange(dist.isend, x.contiguous(), 1)
            return None
        logits = gather_from_vocabulary(self.stage.head.logits(x[:, -1:]), self.groups.tp)
        return logits[0, 0, : self.model.vocab_size]

    def _window_start(self, length: int) -> int:
        """Returns the index of the window's first token; a full window moves by half its length."""
        half = max(1, self.window // 2)
        return 0 if length <= self.window else -(-(length - self.window) // half) * half

    def _embed(self, embedding: Embedding, tokens: Tensor) -> Tensor:
        x = embedding.of_words(tokens)
        if embedding.position is None:
            return x
        return x + embedding.position[self.cached : self.cached + tokens.shape[1]]

    def _exchange(self, call: Callable, x: Tensor, offset: int) -> None:
        """Sends x to the next stage (offset 1) or receives it from the previous one (-1)."""
        pp = self.groups.pp
        assert pp.handle is not None  # there is another stage
        transfer(call, x, pp.ranks[pp.index + offset], pp.handle)

    def _positions(self, first: int, end: int) -> Positions:
        """Returns the positions of the tokens from `first` to `end`."""
        stage, rotary = self.stage, []
        for (cos, sin), switch in zip(stage.rotary, stage.switches, strict=True):
            rows = rows_read(end, None, switch)
            rotary.append((cos[rows][first:], sin[rows][first:]))
        temperature = stage.temperature
        return Positions(tuple(rotary), None if temperature is None else temperature[first:end])

    def _block(
        self, block: TransformerBlock, state: LayerState | None, x: Tensor, positions: Positions
    ) -> Tensor:
        inputs = block.with_route(LayerInputs())
        if state is not None:
            normed = x if block.input_norm is None else block.input_norm(x)
            x = x + block.added_by_attention(state.step(normed, self.cached, positions), inputs)
        if block.mlp is None:
            return x
        normed = x if block.mlp_norm is None else block.mlp_norm(x)
        y = block.mlp(normed, nn.Identity(), inputs)
        return x + block.added_by_mlp(y, inputs)
