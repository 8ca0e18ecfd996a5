"""Bytes of one layer, and of the head, for one micro-batch: line by line what the code keeps.

Each sum names tensors in the order in which `models/transformer.py` and `tensor_parallel/` make
them on an accelerator. `parallel3d dryrun` plays that code; `benchmarks/plan_dryrun.py` compares.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from parallel3d.config.schema import Config, ModelConfig
from parallel3d.sizes.loss_chunks import loss_chunk_counts
from parallel3d.sizes.run_schedule import sends_slices
from parallel3d.sizes.transfer import ACTIVATION_BYTES

WIDE = 4  # bytes of statistics and sums: fp32
_OF_TOKEN = 17  # bytes of a token's ids, labels and mask on the device


class Tensors(NamedTuple):
    """Bytes on one rank of what a micro-batch passes through in a layer.

    Attributes:
        whole: hidden states of all tokens; stream: what stands between blocks, 1/tp of them under
            sequence parallelism.
        qkv, attended, up, inner: the four GEMMs' other ends.
        sums: attention's log-sum-exp. norm: what a norm keeps beside its input.
        head_norms: what norms of q and k keep.
        copies: 1 where a sequence is not contiguous to collectives (sp, micro-batches of several).
        sp: 0 or 1. sent: a message to the next stage.
    """

    whole: float
    stream: float
    qkv: float
    attended: float
    up: float
    inner: float
    sums: float
    norm: float
    head_norms: float
    copies: int
    sp: int
    sent: float


def tensors(config: Config) -> Tensors:
    """Of the configuration's model, layout and micro-batch."""
    model, tp, b = config.model, config.tp, config.micro_batch_size
    item, rows = ACTIVATION_BYTES[config.precision.name], b * model.seq_length
    sp = int(config.sp and tp > 1)
    share = tp if sp else 1
    queries = model.num_attention_heads * model.head_size / tp
    keys = max(model.kv_heads / tp, 1) * model.head_size
    inner = item * rows * model.ffn_size / tp
    qkv = item * rows * (queries + 2 * keys)
    heads = (queries + keys) / model.head_size
    stream = item * rows * model.hidden_size / share
    slices = tp if sends_slices(config, on_accelerator=config.device != "cpu") else 1
    return Tensors(
        whole=item * rows * model.hidden_size,
        stream=stream,
        qkv=qkv,
        attended=item * rows * queries,
        up=inner * (2 if model.activation == "swiglu" else 1),
        inner=inner,
        sums=WIDE * rows * model.num_attention_heads / tp,
        norm=WIDE * rows / share * (2 if model.norm == "layernorm" else 1),
        head_norms=qkv + WIDE * rows * heads if model.qk_norm else 0.0,
        copies=int(sp and b > 1),
        sp=sp,
        # A part of a single sequence is a view, which keeps the whole.
        sent=stream / slices if b > 1 else stream,
    )


class LayerBytes(NamedTuple):
    """Bytes of one layer and micro-batch.

    Attributes:
        kept: from its forward to its backward.
        put_off: of weight gradients that wait, from I to W (`parameters/gradients.py`).
        forward, backward, halved: beside all that is kept, at the fullest moment of the stage's
            last layer: in the forward, in the backward that comes to it first, and in its half I.
        again: what recomputation makes before that backward.
    """

    kept: float
    put_off: float
    forward: float
    backward: float
    halved: float
    again: float


def layer_bytes(t: Tensors, parts: Collection[str]) -> LayerBytes:
    """With what `recompute` names made again."""
    norms = 2 * (t.stream + t.norm)  # their results and statistics
    attention = t.attended + t.sums + t.head_norms  # made again from the projection
    activation, mlp = t.inner * bool({"activation", "mlp"} & {*parts}), t.up * ("mlp" in parts)
    whole = 2 * t.stream + norms + t.qkv + attention + t.up + t.inner
    kept = whole - norms * ("norm" in parts) - attention * ("attention" in parts)
    kept -= activation + mlp
    put_off = 2 * t.stream + t.qkv + t.attended + t.up + t.inner + 2 * t.whole
    scattered = t.whole * (1 + t.copies) + t.stream * (1 + t.copies) if t.sp else t.whole
    gathered = t.whole * (1 + t.copies) if t.sp else 0.0
    # attention's result, the last GEMM's with its reduction, then the sum with the stream
    ending = t.stream + max(activation + scattered, (t.stream if t.sp else t.whole) + t.stream)
    if "layer" in parts:
        inside = 3 * t.stream + max(gathered + t.up, t.up + t.inner, t.inner + scattered)
        forward = max(inside, ending + t.stream + t.inner)
        kept, again = t.stream, whole - t.stream
    else:
        forward = max(ending, t.stream + activation + mlp)
        again = activation + mlp + norms / 2 * ({"norm", "mlp"} <= {*parts})
    received = t.stream
    first = max(
        (t.whole + max(t.inner, t.copies * t.whole, t.copies * t.stream)) * t.sp,
        t.inner,
        t.up,
        (t.stream * t.copies + (2 + t.copies) * t.whole + t.stream) * t.sp - t.inner,
    )
    kept_whole = t.whole if t.sp else 0.0
    halved = max(first, kept_whole + t.inner + t.up)
    return LayerBytes(kept, put_off, forward, received + first, received + halved, again)


class HeadBytes(NamedTuple):
    """Bytes of the last stage's end for one micro-batch.

    Attributes:
        kept: from the forward, which makes the gradients, to the backward.
        states: hidden states and their gradient at the fullest moment of the forward.
        logits: at that moment, with their statistics.
    """

    kept: float
    states: float
    logits: float


def head_bytes(config: Config, t: Tensors) -> HeadBytes:
    """`tensor_parallel/head_loss.py`: the last chunk's logits stand beside the gradient."""
    model, tp = config.model, config.tp
    item, rows = ACTIVATION_BYTES[config.precision.name], config.micro_batch_size * model.seq_length
    columns = model.padded_vocab_size // (tp if model.parallel_output else 1)
    chunk = max(
        loss_chunk_counts(
            rows, columns, config.loss.chunk_tokens, item=item,
            on_accelerator=config.device != "cpu",
        )
    )  # fmt: skip
    statistics = chunk * (25 + 24 * tp)
    reduced = t.stream if t.sp else 0.0
    kept = t.stream + t.norm + t.stream  # the norm's input and the gradient of it
    states = t.stream + t.norm + t.stream + t.sp * t.whole + t.whole + t.copies * t.whole
    return HeadBytes(kept, states, item * chunk * columns + statistics + reduced)


def rotary_bytes(model: ModelConfig) -> float:
    """cos and sin of one stage, fp32."""
    if model.position_embedding != "rope":
        return 0.0
    rotated = int(model.head_size * model.rotary_percent) // 2
    return 2.0 * WIDE * model.seq_length * rotated


def batch_bytes(config: Config) -> float:
    """A micro-batch of the data, on ranks that read it."""
    return float(_OF_TOKEN * config.micro_batch_size * config.model.seq_length)
