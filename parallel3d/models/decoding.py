"""Decodes one sequence, one token at a time, with a KV cache.

It works on tensor-parallel ranks and through the stages of a pipeline, without sequence
parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.blueprint.dispatch import GATHER
from parallel3d.comm.exchange import transfer
from parallel3d.context_parallel.attention import ONE_RANK
from parallel3d.context_parallel.document_attention import repeated
from parallel3d.context_parallel.documents import whole_samples
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.device.precision import master_dtype
from parallel3d.models.attention import (
    attend,
    attend_split,
    choose_kernel,
    kernel_shares_heads,
)
from parallel3d.models.embedding_and_head import Embedding
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext
from parallel3d.models.ops import split_heads
from parallel3d.models.rotary import rows_read
from parallel3d.models.transformer import Attention, Stage, TransformerBlock
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
        self.caches: dict[str, Tensor] = {}
        for name, block in stage.blocks.items():
            attention = block.attention
            length = min(self.window, attention.options.window or self.window)
            # Keys and values: (1, key-value heads, seq_length or window, head_dim) each.
            of_token = attention.kv_heads, length, attention.head_dim
            self.caches[name] = example.new_zeros(2, 1, *of_token)
        self.start = 0  # index of the window's first token
        self.cached = 0  # number of tokens in the caches, beginning at `start`

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
        for name, block in self.stage.blocks.items():
            x = self._block(block, self.caches[name], x)
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

    def _block(self, block: TransformerBlock, cache: Tensor, x: Tensor) -> Tensor:
        attention, inputs = block.attention, block.with_route(LayerInputs())
        normed = x if block.input_norm is None else block.input_norm(x)
        inner = self._attend(attention, cache, attention.qkv(normed))
        x = x + block.added_by_attention(attention.out(inner), inputs)
        normed = x if block.mlp_norm is None else block.mlp_norm(x)
        y = block.mlp(normed, nn.Identity(), inputs)
        return x + block.added_by_mlp(y, inputs)

    def _attend(self, attention: Attention, cache: Tensor, qkv: Tensor) -> Tensor:
        """Returns the attention of n new tokens, (1, n, …), over them and all cached tokens.

        The keys and values of the new tokens are cached too. Either the cache is empty at first,
        or n is 1 and no mask is needed. A sliding layer caches only the keys of its window:
        position p is at index p modulo the window.
        """
        first, end = self.cached, self.cached + qkv.shape[1]
        if attention.qk_norm is not None:
            qkv = attention.qk_norm(qkv)
        rotary, options = None, replace(attention.options, cp=ONE_RANK)
        if options.rope is not None:
            cos, sin = self.stage.rotary[options.rope]
            rows = rows_read(end, None, self.stage.switches[options.rope])
            rotary = cos[rows][first:], sin[rows][first:]
        heads = attention.heads
        q, k, v = split_heads(qkv, (heads, attention.kv_heads, attention.head_dim), rotary)
        if self.stage.temperature is not None:
            q = q * self.stage.temperature[first:end]
        _cache(cache, torch.stack((k, v)), end)
        if first == 0 and options.window is not None:
            split = SequenceSplit(end, window=options.window)
            samples = LayerInputs(documents=whole_samples(1, self.device, split))
            y = attend_split(q, k, v, samples, options)
            return y.transpose(1, 2).flatten(2)
        k, v = cache[:, :, :, :end]
        if not kernel_shares_heads(q):
            k, v = repeated(k, heads), repeated(v, heads)
        y = attend(q, k, v, is_causal=first == 0, kernel=options.kernel, scale=options.scale)
        return y.transpose(1, 2).flatten(2)


def _cache(cache: Tensor, new: Tensor, end: int) -> None:
    """Writes keys and values into a ring buffer that keeps the latest positions.

    `new`, (2, 1, heads, n, head_dim), holds the keys and values of the n positions before `end`.
    """
    size = cache.shape[3]
    new = new[:, :, :, -size:]
    first = (end - new.shape[3]) % size
    begin, rest = new.tensor_split((size - first,), dim=3)
    cache[:, :, :, first : first + begin.shape[3]] = begin
    cache[:, :, :, : rest.shape[3]] = rest
