"""The decoder-only transformer (GPT, Llama, Qwen3, …) and its pipeline stages.

Tensor parallelism is inside the layers of the blocks (`tensor_parallel`). Hidden states are (batch,
sequence, hidden); under sequence parallelism the residual stream has sequence/tp tokens per rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.context_parallel.attention import ContextParallel
from parallel3d.context_parallel.documents import whole_samples
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.models import declared
from parallel3d.models.architecture import StageModule
from parallel3d.models.attention import AttentionOptions, causal_attention, rotated_heads
from parallel3d.models.checkpointing import (
    checkpoint_up_to_linear,
    recomputed,
    shared_inductor,
    without_inplace_reuse,
)
from parallel3d.models.declared import LayerKind, heads_of
from parallel3d.models.dropout import Dropout
from parallel3d.models.embedding_and_head import Embedding, Head
from parallel3d.models.experts import MixtureOfExperts
from parallel3d.models.full_norm import norm_of_heads
from parallel3d.models.key_value_cache import KeyValueCache
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs, LayerState
from parallel3d.models.layers import BuildContext, Norm
from parallel3d.models.mlp import MLP
from parallel3d.models.ops import Heads, sigmoid_gated
from parallel3d.models.repeats import NOTHING
from parallel3d.models.rotary import (
    Positions,
    rope_switch,
    rotary_tables,
    rows_read,
    temperatures,
)
from parallel3d.parameters.declaration import Held, named, part_of
from parallel3d.parameters.state import state_of
from parallel3d.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from parallel3d.tensor_parallel.mappings import gather_heads

# Number of blocks in a compiled graph: enough to make the cost of entering a graph (0.4 ms
# measured) negligible, and few enough to compile a deep stage in seconds.
GRAPH_BLOCKS = 8
# Number of different graphs of a stage. With more, each block is a graph of its own, because a
# compilation takes seconds.
MOST_GRAPHS = 4
# Number of times that Dynamo may compile a graph: with gradients and without, with and without
# documents, for the lengths of a batch. Beyond its limit, Dynamo ends the run.
VARIANTS = 8


class Attention(nn.Module):
    """Computes causal self-attention with grouped queries.

    Each tensor-parallel rank computes whole heads. With `model.attention_gate` the output of the
    heads is multiplied by σ(gate), where the gate is projected from the same input as q, k and v.
    """

    def __init__(
        self, layer: int, kind: LayerKind, held: Held, model: ModelConfig, ctx: BuildContext
    ) -> None:
        super().__init__()
        self.head_dim = kind.head_size
        queries, keys = (dim.local(ctx.tp.size) for dim in heads_of(kind))
        self.heads = queries // kind.head_size
        self.kv_heads = keys // kind.head_size
        self.repeats = ctx.repeats
        self.tp = ctx.tp
        self.gathers = ctx.gather_qk and ctx.tp.size > 1
        self.gate_size = queries if model.attention_gate else 0
        self.sinks = ctx.parameter(held["sinks"]) if "sinks" in held else None
        keeps = ctx.cp_style == "gather" and ctx.repeats.mixer
        cp = ContextParallel(ctx.cp, ctx.cp_style, keeps)
        dropout = None
        if model.dropout:
            first = self.heads * ctx.tp.index + cp.first_head(self.heads)
            site = f"layers.{layer}.attention.probabilities"
            dropout = Dropout(ctx.init.seed, site, model.dropout, first_head=first)
        rope = None if kind.rope is None else model.ropes.index(kind.rope)
        self.options = AttentionOptions(
            ctx.attention_kernel,
            cp,
            model.attention_scale,
            kind.window,
            rope,
            dropout,
            model.attention_logit_cap,
        )
        self.qkv = ColumnParallelLinear.of(part_of(held, "qkv"), **ctx.linear_arguments)
        self.head_norm = norm_of_heads(part_of(held, "head_norm"), model, self.shape, ctx)
        self.out = RowParallelLinear.of(part_of(held, "out"), **ctx.linear_arguments)

    def forward(self, x: Tensor, norm: Callable[[Tensor], Tensor], inputs: LayerInputs) -> Tensor:
        projected, again = self.project(x, norm), self.repeats.attention
        return checkpoint_up_to_linear(self.out, self.attend, projected, inputs, again=again)

    def attend(self, projected: Tensor, inputs: LayerInputs) -> Tensor:
        qkv, gate = self.parts(projected)
        y = causal_attention(qkv, self.shape, inputs, self.options, self.sinks)
        return y if gate is None else sigmoid_gated(y, gate)

    def parts(self, projected: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns q, k and v, concatenated, with norms of heads, and the gate if there is one."""
        qkv, gate = projected, None
        if self.gate_size:
            rest = projected.shape[-1] - self.gate_size
            gate, qkv = projected.split((self.gate_size, rest), dim=-1)
            if self.head_norm is None and self.options.rope is not None:
                # The backward needs no q, k and v before their rotation, but a view of the gate
                # would keep them.
                gate = gate.contiguous()
        return (qkv if self.head_norm is None else self.head_norm(qkv)), gate

    @property
    def shape(self) -> Heads:
        return self.heads, self.kv_heads, self.head_dim

    @property
    def kind(self) -> Hashable:
        """Returns what distinguishes layers of attention whose compiled code differs."""
        return self.shape, self.options.window, self.options.rope

    def cached_heads(
        self, x: Tensor, positions: Positions
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Returns q, k and v of x by heads, as `KeyValueCache` keeps them, and the gate."""
        qkv, gate = self.parts(self.qkv(x))
        return rotated_heads(qkv, self.shape, positions, self.options.rope), gate

    def output(self, y: Tensor, gate: Tensor | None) -> Tensor:
        """Returns the layer's output, given that of its heads, (b, heads, s, head_dim)."""
        y = y.transpose(1, 2).flatten(2)
        return self.out(y if gate is None else sigmoid_gated(y, gate))

    def decoding(self, length: int, like: Tensor) -> KeyValueCache:
        """Returns the state in which the layer decodes one sequence of up to `length` tokens."""
        return KeyValueCache(self, length, like)

    def project(self, x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the gate, q, k and v of this rank's heads, concatenated, from norm(x).

        With `tensor_parallel.attention=gather_qk` the ranks first all-gather q and k of all heads.
        """
        qkv = checkpoint_up_to_linear(self.qkv, norm, x, again=self.repeats.norm)
        if not self.gathers:
            return qkv
        v_size = self.kv_heads * self.head_dim
        qk_size = qkv.shape[-1] - self.gate_size - v_size
        gate, qk, v = qkv.split((self.gate_size, qk_size, v_size), dim=-1)
        return torch.cat((gate, gather_heads(qk, self.tp)[self.tp.index], v), dim=-1)


class MixerModule(Protocol):
    """What a layer calls of its mixer; `declared.MIXERS` lists the classes."""

    kind: Hashable  # what distinguishes layers of this mixer whose compiled code differs

    def __call__(self, x: Tensor, norm: Callable[[Tensor], Tensor], inputs: LayerInputs) -> Tensor:
        """Returns the output for norm(x), which is added to the residual stream."""

    def decoding(self, length: int, like: Tensor) -> LayerState:
        """Returns the state in which the layer decodes one sequence of up to `length` tokens."""


def mixer_class(name: str) -> Callable[..., MixerModule]:
    """Returns the class of a mixer's modules."""
    module, _, of = declared.MIXERS[name].module.partition(":")
    found: Callable[..., MixerModule] = getattr(import_module(f"parallel3d.{module}"), of)
    return found


class TransformerBlock(nn.Module):
    """Computes x + attention(norm(x)), then x + mlp(norm(x)).

    Another mixer may take the place of attention, and either half may be absent.
    `model.norm_position` may move the norms, as in x + norm(attention(x)), or place norms both
    before and after attention and MLP.
    """

    def __init__(self, layer: int, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        kind = LayerKind.of(model, layer)
        if kind.norm_position == "after":
            ctx = replace(ctx, repeats=ctx.repeats.without_norms)

        held = named(f"layers.{layer}", declared.layer(model, kind))

        def norm(name: str) -> Norm | None:
            return Norm(part_of(held, name), model, ctx) if name in kind.norms else None

        self.input_norm = norm("input_norm")
        self.attention: MixerModule | None = None
        if kind.mixer is not None:
            mixer = mixer_class(kind.mixer)
            self.attention = mixer(layer, kind, part_of(held, "attention"), model, ctx)
        self.attention_output_norm = norm("attention_output_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp: MLP | MixtureOfExperts | None = None
        if kind.experts:
            self.mlp = MixtureOfExperts(layer, part_of(held, "mlp"), model, ctx)
        elif kind.mlp is not None:
            self.mlp = MLP(part_of(held, "mlp"), model, ctx)
        self.mlp_output_norm = norm("mlp_output_norm")
        self.residual_scale = model.residual_scale
        self.attention_dropout = ctx.dropout(f"layers.{layer}.attention", model)
        self.mlp_dropout = ctx.dropout(f"layers.{layer}.mlp", model)
        self.repeats = ctx.repeats
        self._run: RunBlock = TransformerBlock.run
        self._run_attention: RunAttention = TransformerBlock.attended

    def use_compiled(self, code: CompiledBlocks) -> None:
        """Runs compiled code from now on; in a layer with experts, only that of its attention."""
        if isinstance(self.mlp, MixtureOfExperts):
            self._run_attention = code.attention
        else:
            self._run = code.block

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        return self._run(self, x, inputs)

    def run(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        inputs = self.with_route(inputs)
        if self.repeats.layer:
            return recomputed(self.layer, x, inputs)
        return self.layer(x, inputs)

    def with_route(self, inputs: LayerInputs) -> LayerInputs:
        """Adds a new route to `inputs` if this layer has experts."""
        if isinstance(self.mlp, MixtureOfExperts):
            return replace(inputs, route=self.mlp.new_route())
        return inputs

    def layer(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        x, attended = self._run_attention(self, x, inputs)
        x, norm = self._sum_and_norm(x, attended, self.mlp_norm)
        if self.mlp is None:
            return x
        return x + self.added_by_mlp(self.mlp(x, norm, inputs), inputs)

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """Returns what distinguishes blocks whose compiled code differs: first their attention."""
        mixer = None if self.attention is None else self.attention.kind
        experts = isinstance(self.mlp, MixtureOfExperts)
        return mixer, self.mlp is None, experts, self.repeats

    def added_by_attention(self, y: Tensor, inputs: LayerInputs) -> Tensor:
        """Returns attention's output `y` after its norm, dropout and scaling, to be added to x."""
        if self.attention_output_norm is not None:
            y = self.attention_output_norm(y)
        return self._scaled(self.attention_dropout(y, inputs))

    def added_by_mlp(self, y: Tensor, inputs: LayerInputs) -> Tensor:
        if self.mlp_output_norm is not None:
            y = self.mlp_output_norm(y)
        return self._scaled(self.mlp_dropout(y, inputs))

    def _scaled(self, y: Tensor) -> Tensor:
        return y if self.residual_scale == 1.0 else y * self.residual_scale

    def attended(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """Returns x, and the output of attention that is to be added to it, or None without one.

        The caller must use the returned x: with a fused norm it is a result of the norm's kernel,
        whose backward adds the gradients of both of its results.
        """
        if self.attention is None:
            return x, None
        x, norm = self._sum_and_norm(x, None, self.input_norm)
        return x, self.added_by_attention(self.attention(x, norm, inputs), inputs)

    def _sum_and_norm(
        self, x: Tensor, y: Tensor | None, norm: Norm | None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Returns x + y (x if y is None), and a function that returns the norm of this sum.

        If `norm` is None, the function returns the sum itself. A fused kernel computes both at
        once, unless the norm is recomputed: its result must not be kept then.
        """
        if norm is None:
            return x if y is None else x + y, lambda x: x
        if not self.repeats.norm and norm.is_fused_with_sum(x):
            x, normed = norm.add(x, y)
            return x, lambda _: normed
        return x if y is None else x + y, norm


def graph_size(kinds: Sequence[Hashable], pattern: Sequence[Hashable]) -> int:
    """Returns the number of blocks in each compiled graph of a stage.

    A graph has whole periods of the pattern, so that graphs are equal and share their code. If
    there is no period and the graphs would be many, each block is a graph.

    Args:
        kinds: the kind of each block; blocks of a kind share their code.
        pattern: the kind of each block's attention.
    """
    lengths = range(1, len(pattern) + 1)
    period = next((n for n in lengths if pattern[n:] == pattern[: len(pattern) - n]), 1)
    size = GRAPH_BLOCKS // period * period or GRAPH_BLOCKS
    graphs = {tuple(kinds[i : i + size]) for i in range(0, len(kinds), size)}
    return size if len(graphs) <= MOST_GRAPHS else 1


RunBlock = Callable[[TransformerBlock, Tensor, LayerInputs], Tensor]
RunBlocks = Callable[[list[TransformerBlock], Tensor, LayerInputs], Tensor]
RunAttention = Callable[[TransformerBlock, Tensor, LayerInputs], tuple[Tensor, Tensor | None]]


def _run_blocks(blocks: list[TransformerBlock], x: Tensor, inputs: LayerInputs) -> Tensor:
    for block in blocks:
        x = block(x, inputs)
    return x


@dataclass(frozen=True)
class CompiledBlocks:
    """Compiled code of several blocks in one graph, of one block, and of a block's attention."""

    blocks: RunBlocks
    block: RunBlock
    attention: RunAttention


class Stage(StageModule):
    """Runs contiguous layers, and also the embedding on the first stage, or the head on the last.

    Args:
        held: the stage's layers, and what is done with them. A stage that is the first and the last
            is the whole model.
        first_stage: the first stage, if this stage is the last one and is on the same rank (a V
            schedule), so that a tied head can read the word embedding; otherwise None.

    Attributes:
        tied_table: local name of the word embedding if another rank holds it too, else None.
        compiled: whether the blocks are compiled.
    """

    def __init__(
        self,
        model: ModelConfig,
        held: StageBlueprint,
        ctx: BuildContext,
        first_stage: Stage | None = None,
        first_and_last_share_rank: bool = False,
    ) -> None:
        super().__init__()
        first, last = held.first, held.last
        first_and_last_share_rank |= first and last
        self.first = first
        self.last = last
        self.reads_batch = first or last
        self.uses_dropout = model.dropout > 0
        self.gathers = ctx.gathers
        self.offload = ctx.offload
        self.offloaded = held.offloaded
        self.without_backward = held.without_backward
        self.compiled = False
        self._run_blocks: RunBlocks = _run_blocks
        self._around_graph: Callable[[str], AbstractContextManager[object]] | None = None
        self.tied_table: str | None = None
        tied = any(table.tied for table in declared.head(model)["table"])
        if tied and (first or last) and not first_and_last_share_rank:
            self.tied_table = "embedding.word.weight" if first else "head.table"
        uses = 2 if first_and_last_share_rank and tied else 1
        self.embedding = Embedding(model, ctx, uses, self.tied_table is not None) if first else None
        recomputed, without = held.layers[: held.recomputed], replace(ctx, repeats=NOTHING)
        self.layers = nn.ModuleDict(
            {
                str(i): TransformerBlock(i, model, ctx if i in recomputed else without)
                for i in held.layers
            }
        )
        self.head = None
        if last:
            owner = (first_stage or self).embedding if tied else None
            self.head = Head(model, ctx, None if owner is None else owner.word.weight)
        of_init = ctx.init.dtype, ctx.init.device
        # Every stage has a table for each kind of rotary positions in the model.
        self.rotary = tuple(rotary_tables(model, rope, *of_init) for rope in model.ropes)
        self.switches = tuple(rope_switch(model, rope) for rope in model.ropes)
        self.temperature = temperatures(model, *of_init)
        self.window = model.sliding_window
        self.needs_documents = model.attention_reads_documents
        self.hands_states = declared.hands_states(model)
        kinds = [block.kind for block in self.blocks.values()]
        self.graph_blocks = graph_size(kinds, [kind[0] for kind in kinds])
        self.divided = ctx.tp.size if ctx.sequence_parallel else 1
        self.device = ctx.init.device

    @property
    def blocks(self) -> dict[str, TransformerBlock]:
        # `nn.ModuleDict` is not generic, so type checkers do not know the type of its values.
        return {name: cast(TransformerBlock, block) for name, block in self.layers.items()}

    @property
    def switch(self) -> int | None:
        """The length up to which documents have other rotary positions, or None without such."""
        return next((switch for switch in self.switches if switch is not None), None)

    def use_compiled(self, code: CompiledBlocks) -> None:
        """Runs compiled code from now on."""
        self.compiled = True
        blocks = self.blocks.values()
        is_sharded = any(state_of(p).compute_dtype is not None for p in self.parameters())
        if is_sharded or any(isinstance(block.mlp, MixtureOfExperts) for block in blocks):
            for block in blocks:  # each block is then compiled separately
                block.use_compiled(code)
        else:
            self._run_blocks = code.blocks
        for layer in self.modules():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                layer.make_handle()

    @contextmanager
    def graphs_within(
        self, around: Callable[[str], AbstractContextManager[object]]
    ) -> Iterator[None]:
        """Runs each graph of layers in `around(its name)`, during a `with` block."""
        self._around_graph = around
        try:
            yield
        finally:
            self._around_graph = None

    def graphs(self) -> list[slice]:
        """Returns the places of the blocks of each graph.

        Offloaded layers are moved one at a time, so each of them is a graph of its own.
        """
        count, begin = len(self.layers), max(self.offloaded, self.without_backward)
        cuts = [*range(self.offloaded), *range(self.offloaded, begin, self.graph_blocks)]
        cuts += range(begin, count, self.graph_blocks)
        return [slice(*ends) for ends in zip(cuts, [*cuts[1:], count], strict=False)]

    def with_positions(self, inputs: LayerInputs, batch: int, length: int) -> LayerInputs:
        """Adds the positions of `batch` samples of `length` tokens to `inputs`.

        Attention with a window, sinks or a cap needs documents: if there are none, each sample is
        one document.
        """
        rotary, temperature, documents = self.rotary, self.temperature, inputs.documents
        if rotary or temperature is not None:
            rows = {
                switch: rows_read(length, documents, switch) for switch in {None, *self.switches}
            }
            tables = zip(rotary, self.switches, strict=True)
            rotary = tuple((cos[rows[switch]], sin[rows[switch]]) for (cos, sin), switch in tables)
            temperature = None if temperature is None else temperature[rows[None]]
        if temperature is not None and documents is not None:
            temperature = temperature.unsqueeze(1)  # the same factor for all heads
        if documents is None and self.needs_documents:
            split = SequenceSplit(length, window=self.window)
            documents = whole_samples(batch, self.device, split)
        return replace(inputs, positions=Positions(rotary, temperature), documents=documents)

    def forward(
        self,
        hidden: Tensor | None,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        inputs: LayerInputs,
        loss_scale: Tensor | None = None,
    ) -> Tensor:
        """Returns hidden states or, on the last stage, the sum of the unmasked losses.

        Args:
            hidden: (b, s, h), or (b, s/tp, h) under sequence parallelism; None on the first stage.
            tokens, labels: (b, s) ids; under context parallelism only those of this rank's tokens,
                as in `hidden`. Only the first and the last stage read them.
            loss_mask: (b, s) bool; only the last stage reads it.
            inputs: the further properties of the tokens, without positions.
            loss_scale: scalar, the gradient of the summed losses with which the backward begins, or
                None for an evaluation, without gradients or dropout.
        """
        if loss_scale is None:  # tokens of an evaluation between two steps are not counted either
            inputs = replace(inputs, samples=None, balance=None)
        elif not self.uses_dropout:
            inputs = replace(inputs, samples=None)
        x = hidden
        if self.embedding is not None:
            self.gathers.wait_for("embedding")
            x = self.embedding(tokens, inputs)
        assert x is not None  # only the first stage has no hidden states
        batch, length, _ = x.shape
        inputs = self.with_positions(inputs, batch, length * self.divided)
        blocks = list(self.blocks.items())
        shared = inputs.positions, inputs.samples, inputs.documents
        for part in self.graphs():
            i, end = part.start, part.stop
            graph = blocks[part]
            for name, _ in graph:
                self.gathers.wait_for(f"layers.{name}")
            frozen = i < self.without_backward
            if self.compiled and not frozen and not x.requires_grad:
                # The weight is not an input of a linear layer's operator. So the operator would
                # have no backward if its input needed no gradient.
                x = x.detach().requires_grad_(torch.is_grad_enabled())
            last, stays = end == len(blocks), i >= self.offloaded
            with (
                torch.no_grad() if frozen else nullcontext(),
                self.offload.layer(graph[0][1], shared, stays=stays, is_last=last)
                if self.offload is not None
                else nullcontext(),
                nullcontext()
                if self._around_graph is None
                else self._around_graph(name_of_graph([name for name, _ in graph])),
            ):
                x = self._run_blocks([block for _, block in graph], x, inputs)
        if self.head is None:
            return x
        self.gathers.wait_for("head")
        return self.head(x, labels, loss_mask, loss_scale)


def stages_of_rank(
    model: ModelConfig, held: Sequence[StageBlueprint], ctx: BuildContext
) -> list[Stage]:
    """Creates the stages that a rank of a pipeline holds, by chunk."""
    share_rank = any(stage.first for stage in held) and any(stage.last for stage in held)
    stages: list[Stage] = []
    for one in held:
        first_stage = stages[0] if one.last and share_rank and stages else None
        stages.append(Stage(model, one, ctx, first_stage, share_rank))
    return stages


def name_of_graph(layers: Sequence[str]) -> str:
    """Returns the name of a graph of layers, such as layers.0-7."""
    first, last = layers[0], layers[-1]
    return f"layers.{first}" if first == last else f"layers.{first}-{last}"


def compile_blocks(stages: Sequence[Stage], saves_operands: bool) -> None:
    """Compiles the forward and backward of the blocks, in groups that share their code.

    Blocks that FSDP2 shards are compiled one by one, inside its hooks, which gather and free them.
    In a block with experts only the attention is compiled: the experts' row counts change with
    every micro-batch, and their choice must not be recomputed. Gradients of the linear layers go to
    their buckets (see `tensor_parallel.linear_ops`); only under FSDP2 do they go to `.grad`.

    Dynamo's limit on the compilations of a function is set to what these stages need.

    Args:
        saves_operands: whether weight gradients may be deferred (see `shared_inductor`).
    """
    options: dict[str, Any] = {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch after 2.11
        # With this option models of other shapes in this process do not count as recompilations.
        options["isolate_recompiles"] = True
        options["recompile_limit"] = VARIANTS * different_graphs(stages)
    backend = without_inplace_reuse if saves_operands else shared_inductor
    # The annotation is needed, because the overloads of `torch.compile` differ between versions.
    torch_compile: Callable[..., Callable[..., Any]] = torch.compile
    how = {"backend": backend, "fullgraph": True, "dynamic": False, **options}
    code = CompiledBlocks(
        torch_compile(_run_blocks, **how),
        torch_compile(TransformerBlock.run, **how),
        torch_compile(TransformerBlock.attended, **how),
    )
    for stage in stages:
        stage.use_compiled(code)


def different_graphs(stages: Sequence[Stage]) -> int:
    """Returns how many different graphs the blocks of these stages are compiled as."""
    found = set()
    for stage in stages:
        kinds = [block.kind for block in stage.blocks.values()]
        found |= {tuple(kinds[part]) for part in stage.graphs()}
        found |= {(kind,) for kind in kinds}  # with FSDP2 or experts, blocks are compiled alone
    return len(found)
