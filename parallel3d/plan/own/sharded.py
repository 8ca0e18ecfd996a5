"""What FSDP2 holds beside the shards, by moment of a step (`data_parallel/fully_sharded.py`).

Its last all-gather's buffer lives until the next one; the input of its last reduce-scatter too.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.schema import Config
from parallel3d.plan.own.layer import WIDE
from parallel3d.sizes.transfer import ACTIVATION_BYTES

Extra = dict[str, dict[str, float]]  # moment → kind of memory → bytes


@dataclass(frozen=True)
class Parameters:
    """Elements of a rank: of one layer, of the largest product, and all; of what is no layer."""

    layer: int
    ends: int
    table: int
    all: int


def added(extra: Extra, name: str, begun: bool) -> dict[str, float]:
    """What FSDP2 adds at a moment: what it always does, and behind the step's first backward."""
    found: dict[str, float] = {}
    behind = begun or name in ("reduction", "later", "ends")
    for key in (name, "begun" if behind else ""):
        for kind, nbytes in extra.get(key, {}).items():
            found[kind] = found.get(kind, 0.0) + nbytes
    return found


def sharded(config: Config, parameters: Parameters, layers: int, first: bool) -> Extra:
    """Of a stage of `layers`, the `first` one or not: what it adds at each moment."""
    item, one, ends = ACTIVATION_BYTES[config.precision.name], parameters.layer, parameters.ends
    model, tp, dp = config.model, config.tp, config.dp or 1
    down = item * model.hidden_size * model.ffn_size // tp
    up = down * (2 if model.activation == "swiglu" else 1)
    cast = float(item * parameters.table)  # the table's gradient, until its reduction
    every, once = config.ddp.reduces_every_microbatch(config.zero), config.num_microbatches == 1
    sums, reduced = float(WIDE * one), float(WIDE * (ends or one))
    found: dict[str, dict[str, float]] = {}
    if every:
        found["begun"] = {"buffers": reduced}
    elif not once:
        found["begun"] = {"gradients": float(WIDE * parameters.all)}
    if config.zero == 2:
        whole, own = float(item * (parameters.all - one)), float(item * one)
        gathered = 0.0
    else:
        whole, own = float(item * ends), float(item * one)
        gathered = own
    ahead = gathered if layers > 1 else 0.0
    late = gathered if layers > 2 else 0.0
    before = reduced if every else 0.0  # counted behind the first backward, and free by then
    head = whole + own - gathered
    wide = item * one if every or once else 0.0  # of the layer, before they are widened
    last = float(item * one) if config.zero == 3 or once else 0.0
    found["forward"] = {"parameters": whole + own, "buffers": last}
    found["head"] = {"parameters": head, "buffers": last, "activations": 2 * cast}
    found["cast"] = {"parameters": head, "buffers": last, "activations": 3 * cast}
    both = first and model.tie_embeddings and cast > 0  # one table: its gradients meet at the end
    cast = 0.0 if both else cast
    for name, products in (("backward", down), ("products", down + up)):
        found[name] = {
            "parameters": whole + own,
            "buffers": ahead + products,
            "activations": cast,
        }
    found["reduction"] = {
        "parameters": whole,
        "buffers": ahead + wide + sums - before,
        "activations": cast,
    }
    found["made"] = {"parameters": whole + own, "buffers": ahead + item * one, "activations": cast}
    if layers > 1:
        found["later"] = {
            "parameters": whole + gathered,
            "buffers": late + wide + (sums if every or once else 0.0) - before,
            "activations": cast,
        }
    if config.zero == 2 and not once:  # the last micro-batch has freed what is reduced
        return found
    table = item * model.hidden_size * model.padded_vocab_size / tp
    scattered = 0.0 if first else reduced / dp
    found["ends"] = {
        "parameters": 0.0 if once else head,
        "buffers": (scattered + reduced if ends else 0.0) - before,
        "activations": cast + (1 + both) * first * table,
    }
    return found
