"""The tasks of `benchmarks.gpu_first` that compare values of a card with plain forms.

All have the shapes of the 1B model, in bf16, and are compared with float64 or fp32. On a CPU a
fused function is its plain form, so only the comparison is tested there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile, supported_activities

from benchmarks.gpu.rows import model_of, seconds_of, trainer_of
from benchmarks.gpu.tasks import Given, Row, judged
from parallel3d.config.values import AUTO
from parallel3d.context_parallel import attention, document_attention
from parallel3d.data.loader import documents_of
from parallel3d.data.sampler import Sample
from parallel3d.device import fused
from parallel3d.experts.rows import sum_of_slots
from parallel3d.models import dropout, layers, ops
from parallel3d.models import dropout as dropped_attention
from parallel3d.models.attention import attend
from parallel3d.parameters import gradients
from parallel3d.tensor_parallel import loss

# The largest relative errors, in norms: |found − exact| / |exact|.
ROUNDED = 1e-2  # results stored in bf16
WIDE = 1e-5  # results stored in fp32, from the same bf16 numbers
SUMMED = 1e-4  # sums of a GEMM in fp32; rounded to bf16 on the way it would be 1.6e-3
ATTENDED = 1.5e-2  # probabilities are rounded to bf16 before they are multiplied by v
# Tolerances of losses and gradient norms after five steps of AdamW, by precision.
LOSSES_OFF = {"fp32": (1e-4, 1e-3), "bf16": (1e-2, 1e-2)}


@dataclass(frozen=True)
class Shapes:
    """Sizes of the 1B model, except for the batch; small ones for a CPU."""

    batch: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    tokens: int  # tokens of a chunk of the loss
    chosen: int  # experts of a token, in OLMoE
    expert_width: int

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def projected(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


FULL = Shapes(2, 4096, 32, 8, 64, 8192, 128256, 2048, 8, 1024)
TINY = Shapes(2, 64, 4, 2, 16, 96, 301, 64, 2, 24)


def plain(function: Any) -> Callable[..., Any]:
    """Returns the operators of a function under `fused`, without its kernel."""
    return function.function


@dataclass(frozen=True)
class Comparison:
    """A function under `fused` with its arguments, and the tolerance of its results."""

    function: Any
    arguments: tuple[Any, ...]
    limit: float = ROUNDED
    has_zeros: bool = False  # whether the zeros of the first result must agree, too

    def copied(self, wide: bool = False) -> list[Any]:
        """Returns new copies of the arguments, as the function may write into them; `wide`: numbers
        in float64."""

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            is_wide = wide and value.is_floating_point()
            return value.double() if is_wide else value.clone()

        return [copy(value) for value in self.arguments]

    def results(self, function: Callable[..., Any], arguments: list[Any]) -> list[Tensor]:
        """Returns the function's results, and its arguments, into which it may have written."""
        found = function(*arguments)
        parts = found if isinstance(found, tuple) else (found,)
        return [value for value in (*parts, *arguments) if isinstance(value, Tensor)]


def relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Returns the largest of some errors; infinite if one is not finite or has another shape."""
    worst = 0.0
    for one, other in zip(found, exact, strict=True):
        if one.shape != other.shape:
            return math.inf
        wide = other.double()
        off = float((one.double() - wide).norm() / wide.norm().clamp_min(1e-30))
        worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst


def error_of(comparison: Comparison) -> float:
    """Returns the error of the function as it runs here, against its plain form in float64.

    It is infinite if the function returns another dtype than the plain form in bf16, or zeros at
    other places.
    """
    function = comparison.function
    found = comparison.results(function, comparison.copied())
    plain = comparison.results(function.function, comparison.copied())
    exact = comparison.results(function.function, comparison.copied(wide=True))
    if [value.dtype for value in found] != [value.dtype for value in plain]:
        return math.inf
    if comparison.has_zeros and not torch.equal(found[0] == 0, plain[0] == 0):
        return math.inf
    return relative_error(found, exact)


def _random(device: torch.device) -> Callable[..., Tensor]:
    torch.manual_seed(1)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    return random


def comparisons(device: torch.device, shapes: Shapes) -> Iterator[tuple[str, Comparison]]:
    """Yields every function that is one kernel on a card; each is made when it is needed, as they
    are large."""
    random = _random(device)
    batch, sequence, hidden = shapes.batch, shapes.sequence, shapes.hidden
    heads = (shapes.heads, shapes.kv_heads, shapes.head_dim)

    x, grad = random(batch, sequence, hidden), random(batch, sequence, hidden)
    weight = random(hidden)
    scale = plain(ops.rms_norm_forward)(x, weight, 1e-5, 0.0)[1]
    yield "rms_norm", Comparison(ops.rms_norm_forward, (x, weight, 1e-5, 0.0))
    yield "rms_norm backward", Comparison(ops.rms_norm_backward, (grad, x, weight, scale, 0.0))
    yield "add_rms_norm", Comparison(ops.add_rms_norm_forward, (x, grad, weight, 1e-5, 0.0))
    of_total = (random(batch, sequence, hidden), grad, x, weight, scale, 0.0)
    yield "add_rms_norm backward", Comparison(ops.add_rms_norm_backward, of_total)

    gate_up, of_ffn = random(batch, sequence, 2 * shapes.ffn), random(batch, sequence, shapes.ffn)
    yield "swiglu", Comparison(ops.swiglu_forward, (gate_up,))
    yield "swiglu backward", Comparison(ops.swiglu_backward, (of_ffn, gate_up))
    yield "geglu", Comparison(ops.geglu_forward, (gate_up,))
    yield "geglu backward", Comparison(ops.geglu_backward, (of_ffn, gate_up))
    del gate_up, of_ffn

    slots = (batch * sequence, shapes.chosen)
    rows = slots[0] * slots[1]
    inner, of_active = random(rows, 2 * shapes.expert_width), random(rows, shapes.expert_width)
    scores = torch.rand(rows, device=device)
    yield "weighed SwiGLU", Comparison(ops.weighed_forward, (inner, scores, "swiglu"))
    of_weighed = (of_active, inner, scores, "swiglu")
    yield "weighed SwiGLU backward", Comparison(ops.weighed_backward, of_weighed)
    del inner, of_active
    here = torch.ones(slots, dtype=torch.bool, device=device)
    here[::5, 0] = False  # an expert of another rank
    count = int(here.sum())
    order = torch.full(slots, count, device=device)
    order[here] = torch.randperm(count, device=device)
    yield "sum of slots", Comparison(sum_of_slots, (random(count, hidden), order))

    qkv = random(batch, sequence, shapes.projected)
    angle = random(sequence, 1, shapes.head_dim // 2, dtype=torch.float32)
    turn = (angle.cos(), angle.sin())
    parts = [random(batch, sequence, n, shapes.head_dim) for n in (heads[0], heads[1], heads[1])]
    yield "split_heads", Comparison(ops.split_heads_forward, (qkv, *turn, heads))
    yield "split_heads backward", Comparison(ops.split_heads_backward, (*parts, *turn))

    weights = random(shapes.head_dim), random(shapes.head_dim)
    scales = plain(layers.norm_heads_forward)(qkv, *weights, heads, 1e-5, 0.0)[1:]
    yield "norm_heads", Comparison(layers.norm_heads_forward, (qkv, *weights, heads, 1e-5, 0.0))
    of_heads = (random(*qkv.shape), qkv, *weights, *scales, heads, 0.0)
    yield "norm_heads backward", Comparison(layers.norm_heads_backward, of_heads)

    site, samples = torch.tensor(12345), torch.arange(batch, device=device)
    starts, places = dropout.starts_of_keys(samples, site), torch.arange(sequence, device=device)
    of_rows = (starts, (shapes.heads, sequence), 0, places)
    yield "dropout's keys", Comparison(dropout.row_keys, of_rows, limit=0.0)
    keys = plain(dropout.row_keys)(starts, (sequence,), 0, places)
    yield "dropout", Comparison(dropout.drop, (x, *keys, 0.1), has_zeros=True)

    few = 4
    scores = random(1, few, sequence, sequence)
    queries = places.to(torch.int32)[None]
    keys = plain(dropout.row_keys)(starts[:1], (few, sequence), 0, places)
    seen = (queries, None, *keys, 0.1, None, None)  # neither sinks nor a cap
    softmax, backward = (
        dropped_attention.dropped_softmax,
        dropped_attention.dropped_softmax_backward,
    )
    yield "dropped softmax", Comparison(softmax, (scores, *seen), has_zeros=True)
    yield (
        "dropped softmax backward",
        Comparison(backward, (random(*scores.shape), scores, *seen), has_zeros=True),
    )
    del scores

    tokens, columns = shapes.tokens, shapes.vocabulary
    logits = random(tokens, columns)
    target = torch.randint(columns - 7, (tokens, 1), device=device)
    inside = torch.rand(tokens, device=device) > 0.1
    statistics = loss.vocabulary_statistics
    for real in (columns, columns - 7):  # without and with padding after the vocabulary
        name = "" if real == columns else ", padded"
        arguments = (logits, target, inside, real, True, 1.0, None)
        yield f"loss's statistics{name}", Comparison(statistics, arguments, limit=WIDE)
        maximum, total = plain(statistics)(*arguments)[:2]
        log_sum = (maximum + total.log()).unsqueeze(1)
        one = torch.full_like(log_sum, 1 / tokens)
        columns_of = (log_sum, one, -one, target, 1e-6 * one, real, 1.0, None)
        yield (
            f"loss's gradient{name}",
            Comparison(loss.logits_to_gradient, (logits, *columns_of)),
        )


def kernels(given: Given) -> Row:
    """Compares every fused function, forward and backward, with its plain form in float64."""
    shapes = TINY if given.is_tiny else FULL
    rows: dict[str, Row] = {}
    with every_size_fused(), _fallbacks() as fallbacks:
        for name, comparison in comparisons(given.device, shapes):
            rows[name] = {"error": error_of(comparison), "limit": comparison.limit}
            arguments = comparison.copied()
            rows[name] |= _cost(given, comparison, arguments)
    bad = [name for name, row in rows.items() if not row["error"] <= row["limit"]]
    worst = max(rows, key=lambda name: rows[name]["error"])
    found = f"{len(rows)} functions, the largest error {rows[worst]['error']:.1e} ({worst})"
    if bad:
        found = "too far off: " + ", ".join(f"{name} {rows[name]['error']:.1e}" for name in bad)
    if fallbacks:
        found += "; not compiled: " + "; ".join(fallbacks)
    return judged(not bad and not fallbacks, found, {"functions": rows, "fallbacks": fallbacks})


def _cost(given: Given, comparison: Comparison, arguments: list[Any]) -> Row:
    """Returns time, kernels of the device, and the bandwidth by the bytes that are read and
    returned once."""
    call = lambda: comparison.function(*arguments)  # noqa: E731
    tensors = comparison.results(comparison.function, arguments)
    moved = sum(t.numel() * t.element_size() for t in tensors)
    ms = 1e3 * seconds_of(call, given.device, given.steps())
    return {"ms": ms, "gb_per_s": 1e-6 * moved / ms, "kernels": len(device_kernels(call))}


@contextmanager
def every_size_fused() -> Iterator[None]:
    """Compiles small calls of fused functions to kernels inside the block, like large ones."""
    least, fused.LEAST_ELEMENTS = fused.LEAST_ELEMENTS, 0
    try:
        yield
    finally:
        fused.LEAST_ELEMENTS = least


@contextmanager
def _fallbacks() -> Iterator[list[str]]:
    """Collects the warnings of `fused` inside the block: functions that the compiler refused."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Kept(logging.WARNING)
    fused.log.addHandler(handler)
    try:
        yield said
    finally:
        fused.log.removeHandler(handler)


def device_kernels(action: Callable[[], object]) -> list[tuple[str, float]]:
    """Returns (name, µs) of the kernels that ran on the device, in order; nothing if the profiler
    sees none."""
    action()
    with profile(activities=list(supported_activities())) as trace:
        action()
    events = [e for e in trace.events() if e.device_type != DeviceType.CPU]
    return [(e.name, e.time_range.elapsed_us()) for e in events if not e.name.startswith("Mem")]


def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes causal attention with its scores written out; heads of k and v are repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def value_and_gradients(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], parts: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Calls attention like the trainer: q, k, v and the gradient are stored as (b, s, heads, d)."""
    *inputs, grad = (part.to(dtype).transpose(1, 2) for part in parts)
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = run(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def attention_values(given: Given) -> Row:
    """Calls scaled_dot_product_attention like the trainer, by every kernel, and compares it with
    the formula."""
    if given.is_tiny:
        cases = [(4, 4, 64, 16), (4, 2, 64, 16)]
    else:
        # The last length has a half block, which cuDNN once computed wrongly.
        cases = [(32, 32, 4096, 64), (32, 8, 4096, 64), (24, 24, 4096, 128), (24, 8, 4096, 128)]
        cases += [(32, 8, 2112, 64)]
    rows: Row = {}
    for heads, kv_heads, length, width in cases:
        random = _random(given.device)
        parts = [random(1, length, n, width) for n in (heads, kv_heads, kv_heads, heads)]
        exact = value_and_gradients(by_formula, parts, torch.float32)
        errors = rows[f"heads {heads}/{kv_heads}, s {length}, d {width}"] = {}
        for name, kernel in attention_kernels(given).items():
            try:
                with nullcontext() if kernel is None else sdpa_kernel(kernel):
                    made = value_and_gradients(_attend, parts, torch.bfloat16)
            except RuntimeError:
                if kernel is None:
                    raise
                continue  # this kernel does not take the shape, or does not exist
            errors[name] = relative_error(made, exact)
        del exact
    off = [f"{case}: {k} {e:.1e}" for case, by in rows.items() for k, e in by.items()
           if not e <= ATTENDED]  # fmt: skip
    largest = max(error for by in rows.values() for error in by.values())
    ran = ", ".join(dict.fromkeys(name for by in rows.values() for name in by))
    found = "too far off: " + "; ".join(off) if off else f"{ran}: the largest error {largest:.1e}"
    return judged(not off, found, {"errors": rows})


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, is_causal=True)


def attention_kernels(given: Given) -> dict[str, SDPBackend | None]:
    """Returns the kernels that may be asked for by name; None: PyTorch's choice."""
    kernels: dict[str, SDPBackend | None] = {"default": None, "flash": SDPBackend.FLASH_ATTENTION}
    if given.on_accelerator:
        kernels["cudnn"] = SDPBackend.CUDNN_ATTENTION
        kernels["efficient"] = SDPBackend.EFFICIENT_ATTENTION
    return kernels


def document_values(given: Given) -> Row:
    """Compares attention within documents, forward and backward, with the formula for each
    document."""
    heads, kv_heads, length, width = (4, 2, 64, 16) if given.is_tiny else (32, 8, 4096, 64)
    random, rows = _random(given.device), 2
    parts = [random(rows, length, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    # Documents of one token, of odd lengths, and a long one.
    cuts = [0, 1, length // 8 + 3, length // 2, length]
    starts = np.repeat(cuts[:-1], np.diff(cuts))
    sample = Sample(np.zeros(length + 1, dtype=np.int64), np.ones(length, dtype=bool), starts)
    documents = documents_of([sample] * rows, range(rows), given.device)

    def within(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.attend_within(q, k, v, documents)

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        alone = [by_formula(*(x[:, :, i:j] for x in (q, k, v))) for i, j in pairwise(cuts)]
        return torch.cat(alone, 2)

    found = value_and_gradients(within, parts, torch.bfloat16)
    error = relative_error(found, value_and_gradients(one_by_one, parts, torch.float32))
    q = parts[0].transpose(1, 2)
    by_one = document_attention.uses_varlen_kernel(q, AUTO)
    how = "the kernel for sequences of any length" if by_one else "a call a document"
    figures = {"error": error, "all_in_one": by_one}
    is_right = error <= ATTENDED and (by_one or not given.is_timed)
    return judged(is_right, f"{how}, error {error:.1e}", figures)


def weight_gradient(given: Given) -> Row:
    """Adds a bf16 product to an fp32 gradient like the trainer, compares it with float64, and its
    time with that of a product and a sum."""
    tokens, rows, columns = (64, 32, 48) if given.is_tiny else (8192, 2048, 8192)
    random = _random(given.device)
    grad, x = random(tokens, rows), random(tokens, columns)
    start = random(rows, columns, dtype=torch.float32)
    exact = start.double() + grad.double().t() @ x.double()

    def two_steps(out: Tensor) -> None:
        out.add_(grad.t() @ x)

    def as_trained(out: Tensor) -> None:
        gradients.add_matmul(out, grad, x)

    figures: Row = {"by_gemm": gradients.supports_wide_addmm(given.device, grad.dtype, start.dtype)}
    for name, add in (("trainer", as_trained), ("two_steps", two_steps)):
        out = start.clone()
        add(out)
        figures[f"{name}_error"] = relative_error([out], [exact])
        figures[f"{name}_ms"] = 1e3 * seconds_of(lambda: add(out), given.device, given.steps())  # noqa: B023
    how = "by the GEMM" if figures["by_gemm"] else "a product and a sum"
    found = f"{how}: error {figures['trainer_error']:.1e} ({figures['trainer_ms']:.3f} ms), "
    found += f"two steps: {figures['two_steps_error']:.1e} ({figures['two_steps_ms']:.3f} ms)"
    if not given.on_accelerator:
        return judged(figures["trainer_error"] <= ROUNDED, found, figures)
    is_right = figures["by_gemm"] and figures["trainer_error"] <= SUMMED
    fast = not given.is_timed or figures["trainer_ms"] < figures["two_steps_ms"]
    return judged(is_right and fast, found, figures)


def losses(given: Given, precision: str, name: str = "llama_tiny") -> Row:
    """Runs five steps of a small preset on the device and on the CPU."""
    runs = []
    with every_size_fused(), _fallbacks() as fallbacks:
        for device in (given.device, torch.device("cpu")):
            model = model_of(name, given.steps())
            trainer = trainer_of(model, device, 2, 4, precision)
            runs.append([trainer.train_step() for _ in range(5)])
    off = {
        key: max(_relative(getattr(a, key), getattr(b, key)) for a, b in zip(*runs, strict=True))
        for key in ("loss", "grad_norm")
    }
    here, cpu = ([(step.loss, step.grad_norm) for step in steps] for steps in runs)
    found = f"loss off by {off['loss']:.1e}, gradient norm by {off['grad_norm']:.1e} at most"
    if fallbacks:
        found += "; not compiled: " + "; ".join(fallbacks)
    of_loss, of_norm = LOSSES_OFF[precision]
    is_near = off["loss"] <= of_loss and off["grad_norm"] <= of_norm and not fallbacks
    return judged(is_near, found, {"off": off, "here": here, "cpu": cpu})


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-30) if math.isfinite(a) else math.inf
