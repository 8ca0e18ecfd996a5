"""The forward pass one token at a time: keys and values of what was read are kept.

Runs the very layers that were trained, on tensor-parallel ranks and through the stages of a
pipeline. One sequence, no gradients, no sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.exchange import transfer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.schema import Config
from parallel3d.models.attention import attend, kernel_shares_heads, repeated
from parallel3d.models.attention_kernel import choose_kernel
from parallel3d.models.ops import split_heads_rotary
from parallel3d.models.transformer import Attention, BuildContext, Stage, TransformerBlock
from parallel3d.parameters.pieces import Initializer, ShardSpec
from parallel3d.sizes.stages import layers_of_stages
from parallel3d.tensor_parallel.mappings import gather_from_vocabulary


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
