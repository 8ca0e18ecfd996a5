"""Describes published runs of other software, as the planner's engine prices them.

The engine (`parallel3d/estimate/fitted_cost.py`) knows what parallel3d does. A `PublishedRun` adds
what only other systems do: plain attention, CUDA graphs, casts to fp8, latent attention, other ways
to send tokens to their experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.published_ops import Experts, Op, Widths, layer_ops
from parallel3d.blueprint.dispatch import share_sent
from parallel3d.estimate.fitted_cost import (
    ENGINE,
    FAMILIES,
    FILE,
    Constants,
    ElementwiseBytes,
    Number,
    PricedProduct,
    StepWork,
    attention_flops,
    attention_rate,
    load,
    move,
)

# "recent" means Megatron Core and NeMo of 2025, fitted only to runs of models with experts.
ENGINES = ("megatron", "deepspeed", "nanotron", "fsdp", "recent")
MEMBERS = {**FAMILIES, "engine": ENGINES}

# Ways to send a token to its experts: one copy to each rank that has any of them; one copy to each
# node that has any of them, and from there to the ranks; one copy for each expert.
COPIES = ("rank", "node", "expert")
RESIDUALS = ("attention.residual", "mlp.residual")
EXPERTS = "mlp.experts."  # prefix of the names of the experts' operations
PASSES = ("mlp.dispatch", "mlp.combine")


@dataclass(frozen=True, kw_only=True)
class PublishedRun(StepWork):
    """The sizes of published runs, with an element per run; flags are 0 or 1."""

    memory_bytes: Number
    ffn: Number  # width of the MLP of a layer without experts
    gated: Number  # flag: three matrices in the MLP instead of two
    expert_ffn: Number
    shared_ffn: Number
    sliding: Number  # share of layers with a window
    engine: Number  # index into ENGINES
    recompute_end: Number  # flag: the last operations of a layer are recomputed too
    flash: Number
    dropout: Number
    parallel_block: Number  # flag: attention and MLP share a norm and tp collectives
    scatter_gather: Number  # Megatron's scatter_gather_tensors_in_pipeline
    graph: Number  # flag: kernels are launched as one graph
    compiled: Number  # flag: element-wise operations are fused
    fp8: Number
    copies: Number  # index into COPIES
    # Multi-head latent attention (DeepSeek-V2): widths of the latents and of the parts of a head, 0
    # in rows without latents. With latents, `head_size` is the mean width of a query and a value.
    q_latent: Number
    kv_latent: Number
    value_size: Number
    rope_size: Number

    @cached_property
    def ops(self) -> list[Op]:
        """Returns the operations of a layer of this kind on one tensor-parallel rank."""
        heads = self.head_widths
        ffn = self.ffn / self.tp
        widths = Widths(self.hidden, heads.queries, heads.keys, ffn, self.gated, self.share)
        if not self.has_experts:
            return self._with_latents(layer_ops(widths))
        sizes = self.experts, self.active_experts, self.ep, self.expert_ffn
        return self._with_latents(layer_ops(widths, Experts(*sizes, self.shared_ffn / self.tp)))

    @cached_property
    def layer_products(self) -> list[PricedProduct]:
        return [
            PricedProduct(
                *(op.name, op.inputs, op.outputs, op.split, op.rows, op.matrices),
                again=self._repeats(op),
                of_experts=op.name.startswith(EXPERTS),
            )
            for op in self.ops
            if op.kind == "gemm"
        ]

    def _repeats(self, op: Op) -> Any:
        """Returns 1 in rows that recompute the operation in the backward, and 0 in all others."""
        flags = (getattr(self, f"recompute_{part}") for part in op.parts or ("end",))
        return reduce(np.maximum, flags)

    def _with_latents(self, ops: Sequence[Op]) -> list[Op]:
        """Returns `ops` with the projections of latent attention in the rows that use it."""
        latent = self.q_latent > 0
        if not np.any(latent):
            return [*ops]
        query = 2 * self.head_size - self.value_size
        narrow = self.q_latent + self.kv_latent + self.rope_size
        heads = self.heads / self.tp
        keys_values = query - self.rope_size + self.value_size
        up = Op("attention.q_up", "gemm", self.q_latent, heads * query * latent, ("layer",))
        wide = heads * keys_values * latent
        found = []
        for op in ops:
            if op.name == "attention.qkv":
                op = op._replace(outputs=np.where(latent, narrow, op.outputs))
                more = up._replace(name="attention.kv_up", inputs=self.kv_latent, outputs=wide)
                found += [op, up, more]
                continue
            if op.name == "attention.out":
                inputs = np.where(latent, heads * self.value_size, op.inputs)
                op = op._replace(inputs=inputs)
            found.append(op)
        return found

    def _is_recent(self, factor: float) -> Any:
        """Returns `factor` in rows with the engine "recent", and 1 in all others."""
        return np.where(self.engine == ENGINES.index("recent"), factor, 1.0)

    def software(self, c: Constants, key: str) -> Any:
        values = np.array([c[f"engine.{name}.{key}"] for name in ENGINES])
        return values[np.asarray(self.engine, dtype=int)]

    def rate(self, c: Constants) -> Any:
        return super().rate(c) * self._is_recent(c["recent.gemm"])

    def attention_forward(self, c: Constants) -> Any:
        """Returns the seconds of attention's forward, as a mean over layers."""
        sliding = self.attention_on(c, np.minimum(self.seq, self.window))
        full = self.attention_on(c, self.seq)
        return np.where(self.sliding == 1, sliding, full + self.sliding * (sliding - full))

    def attention_on(self, c: Constants, keys: Number) -> Any:
        """Returns the seconds of attention's forward.

        Plain kernels compute and write all scores, once in the forward and twice in the backward.
        """
        ramp = 1 + c["attention.plain_ramp"] / self.head_size
        plain = attention_flops(self, keys) / (attention_rate(self, c) * c["attention.plain"])
        scores = self.micro_batch * self.heads / self.tp * self.seq / self.cp * keys
        written = scores * c["attention.score_bytes"] * np.where(self.dropout > 0, 1.0, 0.7)
        plain = plain * ramp + move(self, c, written)
        return np.where(self.flash > 0, super().attention_on(c, keys), plain)

    @property
    def attention_backward(self) -> Any:
        return np.where(self.flash > 0, super().attention_backward, 2.0)

    def moved(self, c: Constants) -> ElementwiseBytes:
        """Returns the bytes per token of a backward that moves twice as much as the forward."""
        each = [self._moved(op, c) for op in self.ops if op.kind == "elementwise"]
        again = (self._repeats(op) for op in self.ops if op.kind == "elementwise")
        forward = sum(each)
        repeated = sum(flag * of for flag, of in zip(again, each, strict=True))
        return ElementwiseBytes(forward, 2 * forward, repeated)

    def _moved(self, op: Op, c: Constants) -> Any:
        """Returns the bytes per token of an operation; residual sums also move dropout's masks."""
        masks = self.dropout * op.outputs * (op.name in RESIDUALS)
        factor = np.where(self.compiled > 0, c["memory.compiled"], 1.0)
        loaded = self.load if op.name.startswith(EXPERTS) else 1.0
        if op.name in PASSES:
            loaded = self.load_of_tokens
        return loaded * self.item * (op.inputs + op.outputs + masks) * c["memory.width"] * factor

    def casts(self, of: PricedProduct, c: Constants, rows: Any) -> tuple[Any, Any]:
        """Returns the seconds of casts to fp8.

        Operands are cast before the all-gather, and weights once per step.
        """
        share = self.share if of.split == "column" else 1.0
        each = c["fp8.cast_bytes"] * self._is_recent(c["recent.cast"])
        cast = move(self, c, rows * of.inputs / share * each) * self.fp8
        weights = move(self, c, 3 * of.numel / self.microbatches) * self.fp8
        return cast + weights, cast

    @property
    def head_slowdown(self) -> Any:
        """Returns the slowdown of a head that stays in 16 bits."""
        return 1 + self.fp8 * (self.peak / self.peak_attention - 1)

    @property
    def exchanges(self) -> Any:
        again = sum(self._repeats(op) for op in self.ops if op.name in PASSES)
        return 2 + self.backward * (2 + again)

    def shown_tensor_parallel(self, c: Constants) -> Any:
        return super().shown_tensor_parallel(c) * (1 - self.parallel_block / 2)

    @property
    def message_share(self) -> Any:
        cut = np.maximum(self.scatter_gather, self.sequence_parallel)
        return np.where(cut > 0, self.tp, 1.0)

    @cached_property
    def load_of_tokens(self) -> Any:
        return np.where(self.copies == COPIES.index("expert"), self.load, super().load_of_tokens)

    def copies_sent(self, inside: Any, nodes: Any) -> tuple[Any, Any]:
        here, away = super().copies_sent(inside, nodes)
        by_expert = self.copies == COPIES.index("expert")
        each = self.active_experts / self.ep
        here = np.where(by_expert, each * (inside - 1), here)
        away = np.where(by_expert, each * (self.ep - inside), away)
        many = np.maximum(nodes, 2)
        to_node = share_sent(self.experts, self.active_experts, many)
        to_node = np.where(nodes > 1, to_node, 1.0)
        by_node = self.copies == COPIES.index("node")
        here = np.where(by_node, self.share_sent * nodes * (inside - 1), here)
        return here, np.where(by_node, to_node * (nodes - 1), away)

    def host_of_layer(self, c: Constants) -> Any:
        return super().host_of_layer(c) * np.where(self.graph > 0, 0.02, 1.0)

    def host_of_batch(self, c: Constants) -> Any:
        return super().host_of_batch(c) * np.where(self.graph > 0, 0.1, 1.0)


# One number for each row.
ROW_FIELDS = [f.name for f in fields(PublishedRun) if f.name not in ("ranks", "kinds", "products")]


# The constants of other software, and of fields that only published runs have.
OTHERS = Path(__file__).with_name("published_constants.json")
_OTHERS = ("memory.", "recent.", "fp8.", "attention.plain", "attention.score_bytes")


def is_of_others(name: str) -> bool:
    """Returns whether a constant has no meaning for parallel3d's own runs."""
    if name.startswith("engine."):
        return not name.startswith(f"engine.{ENGINE}.")
    return name.startswith(_OTHERS) and name != "memory.rate"


def load_all() -> Constants:
    """Reads the constants of the planner and those of other software."""
    return Constants({**load().values, **json.loads(OTHERS.read_text())["constants"]})


def write_constants(values: Mapping[str, float], **more: Any) -> None:
    """Replaces constants, and `ranges` (of the planner) and `seen` if they are given."""
    kept = {name: float(f"{value:.5g}") for name, value in values.items()}
    for file, others, key in ((FILE, False, "ranges"), (OTHERS, True, "seen")):
        content = json.loads(file.read_text())
        mine = {name: kept[name] for name in kept if is_of_others(name) is others}
        content["constants"] = dict(sorted((content["constants"] | mine).items()))
        if key in more:
            content[key] = more[key]
        file.write_text(json.dumps(content, indent=1) + "\n")
