"""The rows of `benchmarks.gpu` that are parallel3d's own, and the card's."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from parallel3d.config import Config, ModelConfig, conf_dir
from parallel3d.data.sampler import Sample
from parallel3d.metrics.flops import flops_per_token, matmul_parameters, parameter_count
from parallel3d.topology.layout import Layout
from parallel3d.topology.process_groups import ProcessGroups
from parallel3d.trainer import Trainer


@dataclass(frozen=True)
class Size:
    """How much of everything: what is asked of a card, or just enough to run every line."""

    gemm: int
    steps: int
    warm_up: int
    sequences: int  # of a step
    micro_batches: tuple[int, ...]  # tried from the largest on
    precision: str
    changes: dict[str, Any]  # of every model
    shard_layers: int | None  # layers of a shard; None: the layout's


SIZES = {
    "full": Size(8192, 10, 3, 8, (8, 4, 2, 1), "bf16", {}, None),
    "tiny": Size(
        64, 2, 1, 2, (2, 1), "bf16",
        {"hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 8, "num_layers": 2,
         "ffn_hidden_size": 96, "seq_length": 32, "vocab_size": 128},
        1,
    ),
}  # fmt: skip
# Llama 3.2 3B: https://huggingface.co/meta-llama/Llama-3.2-3B, config.json.
LLAMA_3B = {"num_layers": 28, "hidden_size": 3072, "num_attention_heads": 24}
SHARDS = {"llama3_70b": Layout(tp=8, pp=10), "gpt3_175b": Layout(tp=8, pp=16)}
MAX_GRAD_NORM = 1.0


def model_of(name: str, size: Size) -> ModelConfig:
    """1b, 3b or a preset."""
    preset = "llama_1b" if name in ("1b", "3b") else name
    values = OmegaConf.to_container(OmegaConf.load(conf_dir() / "model" / f"{preset}.yaml"))
    if name == "3b":
        values |= LLAMA_3B | {"name": "llama_3b"}
    return ModelConfig(**(values | size.changes))


class RandomTokens:
    """Samples of tokens that nobody has learned, made once."""

    def __init__(self, model: ModelConfig) -> None:
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(0, model.vocab_size, (64, model.seq_length + 1))
        self.mask = np.ones(model.seq_length, dtype=bool)
        self.masks, self.seq_length = False, model.seq_length

    def sample(self, i: int) -> Sample:
        return Sample(self.tokens[i % len(self.tokens)], self.mask)


def seconds_of(action: Callable[[], object], device: torch.device, size: Size) -> float:
    """Median seconds of `action` after a warm-up; on CUDA by events, waited for at the end."""
    for _ in range(size.warm_up):
        action()
    if device.type != "cuda":
        times = []
        for _ in range(size.steps):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    torch.cuda.synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(size.steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        action()
        mark.record()
    torch.cuda.synchronize(device)
    return statistics.median(1e-3 * a.elapsed_time(b) for a, b in pairwise(marks))


def peak_memory_gb(device: torch.device) -> float | None:
    """Most memory that tensors took since the process began; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None


def first_that_fits(
    size: Size, device: torch.device, run: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    """`run` with the largest micro-batch for which there is memory."""
    for micro_batch in size.micro_batches:
        try:
            return run(micro_batch) | {"micro_batch": micro_batch}
        except torch.OutOfMemoryError:
            pass  # what it holds is only let go of after this block
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return {"failed": f"out of memory with micro-batches of {min(size.micro_batches)}"}


def speed(model: ModelConfig, size: Size, step_s: float, device: torch.device) -> dict[str, Any]:
    """A model's figures; MFU follows from the GEMM's row."""
    tokens = size.sequences * model.seq_length
    return {
        "parameters": parameter_count(model),
        "step_ms": 1e3 * step_s,
        "tokens_per_s": tokens / step_s,
        "model_tflops": 1e-12 * flops_per_token(model, model.seq_length) * tokens / step_s,
        "peak_memory_gb": peak_memory_gb(device),
    }


def gemm_row(size: Size, device: torch.device) -> dict[str, Any]:
    """The median speed of a square product in bf16 (fp32 sums)."""
    a = torch.randn(size.gemm, size.gemm, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    many = dataclasses.replace(size, steps=5 * size.steps)
    seconds = seconds_of(lambda: torch.mm(a, a, out=out), device, many)
    return {"size": size.gemm, "tflops": 2e-12 * size.gemm**3 / seconds}


def model_row(name: str, size: Size, device: torch.device, compiled: bool) -> dict[str, Any]:
    """parallel3d on the whole model; the breakdown in seconds a step."""
    model = model_of(name, size)

    def run(micro_batch: int) -> dict[str, Any]:
        config = Config(micro_batch_size=micro_batch, global_batch_size=size.sequences)
        config.model, config.precision.name, config.compile = model, size.precision, compiled
        config.device, config.optim.clip_grad = device.type, MAX_GRAD_NORM
        source = RandomTokens(model)
        trainer = Trainer(config, ProcessGroups.single(), device, train_source=source)
        found = speed(model, size, seconds_of(trainer.train_step, device, size), device)
        return found | {"breakdown": {k: s for k, s in trainer.clock.means().items() if s}}

    return first_that_fits(size, device, run)


def shard_row(name: str, size: Size, device: torch.device) -> dict[str, Any]:
    """A middle stage of one rank: forward and backward of one micro-batch, by layer."""
    model, layout = model_of(name, size), SHARDS[name]
    if size.shard_layers is not None:
        model.num_layers = size.shard_layers * layout.pp
    config = Config(tp=layout.tp, pp=layout.pp, sp=True, micro_batch_size=1)
    config.global_batch_size, config.model = layout.pp, model
    config.precision.name, config.device = size.precision, device.type
    config.launch.shared_memory = False
    with fake_groups(layout, layout.pp // 2 * layout.tp) as groups:
        trainer = Trainer(config, groups, device, train_source=RandomTokens(model))
        return {"layout": f"tp {layout.tp}, pp {layout.pp}"} | _time_layers(trainer, size)


def _time_layers(trainer: Trainer, size: Size) -> dict[str, Any]:
    model, device, layers = trainer.config.model, trainer.device, len(trainer.stage.layers)
    state_gb = torch.cuda.memory_allocated(device) / 1e9 if device.type == "cuda" else None
    shape = trainer.executor.hidden_shape
    x = torch.randn(shape, device=device, dtype=trainer.dtype, requires_grad=True)
    grad = torch.randn_like(x)

    def forward() -> torch.Tensor:
        return trainer.stage(x, None, None, None)

    with torch.no_grad():
        forward_s = seconds_of(forward, device, size)
    both_s = seconds_of(lambda: forward().backward(grad), device, size)
    # Model FLOPs of a layer on this rank: those of all layers, without the head, by tp.
    weights = matmul_parameters(model) - model.hidden_size * model.vocab_size
    attention = 12 * model.num_attention_heads * model.head_dim * model.seq_length
    tokens = model.seq_length * trainer.config.micro_batch_size
    flops = (6 * weights / model.num_layers + attention) * tokens / trainer.config.tp
    return {
        "layers": layers,
        "parameters": sum(p.numel() for p in trainer.parameters.values()),
        "layer_forward_ms": 1e3 * forward_s / layers,
        "layer_backward_ms": 1e3 * (both_s - forward_s) / layers,
        "model_tflops": 1e-12 * flops * layers / both_s,
        "state_gb": state_gb,
        "peak_memory_gb": peak_memory_gb(device),
    }


@contextmanager
def fake_groups(layout: Layout, rank: int) -> Iterator[ProcessGroups]:
    """One rank of a world in which nobody else is: collectives return at once, unsummed."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        groups = ProcessGroups.create(layout, "fake")
        yield groups
        groups.close()
    finally:
        dist.destroy_process_group()


def fp8_row(size: Size, device: torch.device) -> dict[str, Any]:
    """A 70B layer's largest GEMM at tp=8 in bf16 and in fp8, the casts of both inputs included."""
    if device.type != "cuda":
        return {"skipped": "fp8 needs a GPU"}
    if torch.cuda.get_device_capability(device) < (8, 9):
        return {"skipped": f"{torch.cuda.get_device_name(device)} has no fp8"}
    model = model_of("llama3_70b", size)
    tokens, inputs, outputs = model.seq_length, model.hidden_size, 2 * model.ffn_size // 8
    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)

    def cast(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One scale for the tensor, from its own largest value."""
        scale = torch.finfo(torch.float8_e4m3fn).max / t.abs().amax().float().clamp(min=1e-12)
        return (t * scale).to(torch.float8_e4m3fn), scale.reciprocal()

    compiled = torch.compile(cast)  # else a pass over memory for each operation

    def fp8() -> torch.Tensor:
        (a, scale_a), (b, scale_b) = compiled(x), compiled(weight)
        return torch._scaled_mm(
            a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    in_bf16 = seconds_of(lambda: x @ weight.t(), device, size)
    in_fp8 = seconds_of(fp8, device, size)
    return {
        "shape": [tokens, inputs, outputs],
        "bf16_ms": 1e3 * in_bf16,
        "fp8_ms": 1e3 * in_fp8,
        "gain": in_bf16 / in_fp8,
    }
