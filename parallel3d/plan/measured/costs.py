"""Seconds of a layer, of the ends and of a step's end on a measured machine, for one rank alone.

The list follows the code: models/transformer.py, tensor_parallel/linear_nodes.py and head_loss.py,
pipeline/executor.py, data_parallel/, optim/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from parallel3d.config.recompute import parts_of
from parallel3d.config.schema import Config
from parallel3d.plan.measured.machine import SHARED, MeasuredMachine
from parallel3d.sizes.local_shapes import stage_parameters
from parallel3d.sizes.recompute import collectives_again

ITEM = {"fp64": 8, "fp32": 4, "tf32": 4}  # bytes; the others have 2
WIDE = 4  # of gradients and masters
FEW = 64  # bytes of a sum of a few numbers
STATISTICS = 12  # bytes a token that each rank brings to the loss


class Pass(NamedTuple):
    """Seconds: of products, and of everything else."""

    products: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.rest

    def plus(self, other: Pass, times: float = 1.0) -> Pass:
        return Pass(self.products + times * other.products, self.rest + times * other.rest)


class Passes(NamedTuple):
    """Of one micro-batch: forward, the gradient of the input, that of the weights."""

    forward: Pass
    input: Pass
    weight: Pass

    def plus(self, other: Passes, times: float = 1.0) -> Passes:
        return Passes(*(a.plus(b, times) for a, b in zip(self, other, strict=True)))


NOTHING = Passes(Pass(), Pass(), Pass())


@dataclass(frozen=True)
class MeasuredCosts:
    """What a rank of the layout of `config` takes; `config` is checked, its dp filled in."""

    config: Config
    machine: MeasuredMachine

    @property
    def rows(self) -> int:
        return self.config.micro_batch_size * self.config.model.seq_length

    @property
    def message(self) -> int:
        """Bytes of a micro-batch's hidden states."""
        item = ITEM.get(self.config.precision.name, 2)
        return self.rows * self.config.model.hidden_size * item

    def collective(self, name: str, ranks: int, bytes: float) -> float:
        """Seconds of one; of work, where the ranks of the run share cores."""
        if ranks == 1:
            return 0.0
        world = self.config.tp * self.config.pp * (self.config.dp or 1)
        shares = self.machine.shares and world > self.machine.made.count
        return self.machine[name + SHARED * shares](ranks, max(bytes, FEW))

    def hop(self) -> float:
        """A message to the next stage."""
        share = self.config.tp if self.config.sp else 1
        return self.collective("send_recv", 2, self.message / share) if self.config.pp > 1 else 0.0

    def _tensor(self, sums: int, gathers: int, scatters: int) -> float:
        """Collectives of a micro-batch's hidden states over tp: so many sums or, under sequence
        parallelism, so many gathers and scatters instead."""
        names = {"all_reduce": sums}
        if self.config.sp:
            names = {"all_gather": gathers, "reduce_scatter": scatters}
        tp = self.config.tp
        return sum(n * self.collective(name, tp, self.message) for name, n in names.items())

    def layer(self) -> Passes:
        """One transformer layer without recomputation."""
        model, m, tp = self.config.model, self.machine, self.config.tp
        h, width = model.hidden_size, model.head_size
        heads = model.num_attention_heads // tp
        kv = max(model.kv_heads // tp, 1)
        ffn = model.ffn_size // tp
        up = ffn * (2 if model.activation == "swiglu" else 1)
        products = (((heads + 2 * kv) * width, h), (h, heads * width), (up, h), (h, ffn))
        forward, input, weight = (
            sum(m[f"gemm.{part}"](self.rows, *sides) for sides in products)
            for part in ("forward", "input", "weight")
        )
        biases = sum(out for out, _ in products) if model.bias else 0
        back = self.attend("backward") + self.around("backward") + self._tensor(2, 4, 2)
        back += m["bias"](self.rows * biases)
        back += self._launched("backward", input + weight + back)
        ahead = self.attend("forward") + self.around("forward") + self._tensor(2, 2, 2)
        ahead += self._launched("forward", forward + ahead)
        return Passes(Pass(forward, ahead), Pass(input, back), Pass(weight, 0.0))

    def _launched(self, way: str, kernels: float) -> float:
        """What launches add: on a CPU themselves, on a GPU what its kernels do not hide."""
        seconds = self.machine.numbers[f"launch.{way}"]
        return seconds if self.machine.shares else max(0.0, seconds - kernels)

    def attend(self, way: str) -> float:
        """Splitting heads, rotating, attention."""
        model = self.config.model
        name = "rotary" if model.position_embedding == "rope" else "attention"
        heads = self.config.micro_batch_size * model.num_attention_heads // self.config.tp
        return self.machine[f"{name}.{way}"](heads, model.seq_length, model.head_size)

    def around(self, way: str) -> float:
        """Norms and residuals on whole tokens, the activation on this rank's part."""
        joined = 2 * self.machine["add"](self._own_rows * self.config.model.hidden_size)
        return self.norms(way) + joined + self.activation(way)  # backward: gradients of both ways

    @property
    def _own_rows(self) -> int:
        return self.rows // (self.config.tp if self.config.sp else 1)

    def norms(self, way: str) -> float:
        """Both of a layer."""
        model = self.config.model
        return 2 * self.machine[f"{model.norm}.{way}"](self._own_rows, model.hidden_size)

    def activation(self, way: str) -> float:
        model = self.config.model
        kind = "gelu" if model.activation.startswith("gelu") else model.activation
        return self.machine[f"{kind}.{way}"](self.rows * model.ffn_size // self.config.tp)

    def again(self) -> Pass:
        """What a layer's backward computes once more."""
        model, tp, parts = self.config.model, self.config.tp, parts_of(self.config.recompute)
        gemm, h, ffn = self.machine["gemm.forward"], model.hidden_size, model.ffn_size // tp
        if "layer" in parts:  # up to the last product, whose input is what is wanted
            last = Pass(-gemm(self.rows, h, ffn), -self._tensor(1, 0, 1))
            return self.layer().forward.plus(last)
        up = gemm(self.rows, ffn * (2 if model.activation == "swiglu" else 1), h)
        rest = self.norms("forward") * ("norm" in parts)
        rest += self.attend("forward") * ("attention" in parts)
        rest += self.activation("forward") * bool(parts & {"activation", "mlp"})
        rest += self._tensor(*collectives_again(parts))
        return Pass(up * ("mlp" in parts), rest)

    def embedding(self) -> Passes:
        """The look-up and its gradient."""
        size = self.rows * self.config.model.hidden_size
        ahead, back = (self.machine[f"embedding.{way}"](size) for way in ("forward", "backward"))
        ahead, back = ahead + self._tensor(1, 0, 1), back + self._tensor(0, 1, 0)
        return Passes(Pass(0.0, ahead), Pass(0.0, back), Pass())

    def head(self) -> Passes:
        """The final norm, logits, the loss and both gradients, all of it in the forward."""
        model, m, tp = self.config.model, self.machine, self.config.tp
        columns, h = model.padded_vocab_size // tp, model.hidden_size
        products = sum(
            m[f"gemm.{p}"](self.rows, columns, h) for p in ("forward", "input", "weight")
        )
        rest = m["loss"](self.rows, columns) + m[f"{model.norm}.forward"](self.rows, h)
        rest += self.collective("all_gather", tp, STATISTICS * tp * self.rows) + self._tensor(
            1, 1, 1
        )
        back = Pass(0.0, m[f"{model.norm}.backward"](self.rows, h))
        return Passes(Pass(products, rest), back, Pass())

    def elements(self, layers: range, first: bool, last: bool, both: bool) -> int:
        """Of one stage, on a tensor rank; `both`: its rank has the other end's table as well."""
        parts = stage_parameters(
            self.config.model, self.config.tp, layers, first, last, borrows_table=both
        )
        return sum(p.numel for p in parts)

    def gradients(self, elements: int) -> float:
        """Sums over dp at the end of a step; under zero the parts, and parameters gathered."""
        bytes, dp = WIDE * elements, self.config.dp or 1
        if not self.config.zero:
            return self.collective("all_reduce", dp, bytes)
        item = ITEM.get(self.config.precision.name, 2) * elements
        found = self.collective("reduce_scatter", dp, bytes)
        gathers = 1.0
        if self.config.zero > 1:  # parameters before use, gradients behind it
            gathers = 2.0 * self.config.num_microbatches if self.config.zero > 2 else 1.0
            if self.config.ddp.reduces_every_microbatch(self.config.zero):
                found *= self.config.num_microbatches
        return found + gathers * self.collective("all_gather", dp, item)

    def tied(self) -> float:
        """The tied table's gradient between the first stage and the last."""
        model = self.config.model
        if not model.tie_embeddings or self.config.pp == 1:
            return 0.0
        table = model.padded_vocab_size * model.hidden_size // self.config.tp
        return self.collective("all_reduce", 2, WIDE * table)

    def update(self, elements: int) -> float:
        """Gradients cleared and clipped, the optimizer."""
        name = self.config.optim.name
        return self.machine[name](elements / ((self.config.dp or 1) if self.config.zero else 1))

    def fixed(self) -> float:
        """What every step costs: the sums of a few numbers, the host's own."""
        dp, world = self.config.dp or 1, self.config.tp * self.config.pp * (self.config.dp or 1)
        few = self.collective("all_reduce", dp, FEW) + self.collective("all_reduce", world, FEW)
        return few + self.machine.numbers["launch.step"]
