"""Measures parallel3d and the card, for rows of `benchmarks.gpu.card`.

Only torch, numpy and parallel3d's library are imported, because images for GPUs often have no other
packages.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parallel3d.blueprint.parameters import parameter_count
from parallel3d.build import Trainer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample
from parallel3d.device import accelerator
from parallel3d.models.flops import flops_per_token
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config, conf_dir


@dataclass(frozen=True)
class Size:
    """The amount of work: for a card, or just enough to run every line."""

    gemm: int
    steps: int
    warm_up: int
    sequences: int  # number of sequences in a step
    micro_batches: tuple[int, ...]  # micro-batches, tried from the largest on
    precision: str
    changes: dict[str, Any]  # changed keys of every model
    shard_layers: int | None  # number of layers of a shard; None: the layout's


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
MAX_GRAD_NORM = 1.0


SIMULATED = "simulated"
CONSTANTS = {"true": True, "false": False, "null": None}


def device_of(word: str) -> torch.device:
    """Returns `cpu` as it is, an accelerator with its index (the first without one).

    The device is not used yet; `simulated` starts the simulated device. Raises RuntimeError for
    what torch does not know or does not find here.
    """
    if word.partition(":")[0] == SIMULATED:
        from parallel3d.simulated_device import enable

        enable()
    device = torch.device(word)
    if not accelerator.is_accelerator(device):
        return device
    if not accelerator.module(device).is_available():
        raise RuntimeError(f"no {device.type.upper()} device here")
    return torch.device(device.type, device.index or 0)


def read_preset(path: Path) -> dict[str, Any]:
    """Returns a model's preset, which is flat: `key: value` per line, lists in brackets, which may
    have several lines, and comments. No YAML reader is needed."""
    values: dict[str, Any] = {}
    text = "\n".join(line.partition("#")[0] for line in path.read_text("utf-8").splitlines())
    for key, word in re.findall(r"^(\w+):\s*(\[[^\]]*\]|[^\n]*)", text, re.MULTILINE):
        if word.startswith("["):
            values[key] = [
                _constant(part.strip()) for part in word[1:-1].split(",") if part.strip()
            ]
        else:
            values[key] = _constant(word.strip())
    return values


def _constant(word: str) -> Any:
    if word in CONSTANTS:
        return CONSTANTS[word]
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def model_of(name: str, size: Size) -> ModelConfig:
    """Returns the model of 1b, 3b or a preset."""
    preset = "llama_1b" if name in ("1b", "3b") else name
    values = read_preset(conf_dir() / "model" / f"{preset}.yaml")
    if name == "3b":
        values |= LLAMA_3B | {"name": "llama_3b"}
    return ModelConfig(**(values | size.changes))


class RandomTokens:
    """A source of random tokens, which are made once."""

    def __init__(self, model: ModelConfig) -> None:
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(0, model.vocab_size, (64, model.seq_length + 1))
        self.mask = np.ones(model.seq_length, dtype=bool)
        self.masks, self.seq_length = False, model.seq_length

    def sample(self, i: int) -> Sample:
        return Sample(self.tokens[i % len(self.tokens)], self.mask)


def seconds_of(action: Callable[[], object], device: torch.device, size: Size) -> float:
    """Returns median seconds of `action` after a warm-up; on a GPU measured by events, for which
    the host waits at the end."""
    for _ in range(size.warm_up):
        action()
    if not accelerator.is_accelerator(device):
        times = []
        for _ in range(size.steps):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    accelerator.synchronize(device)
    event = accelerator.module(device).Event
    marks = [event(enable_timing=True) for _ in range(size.steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        action()
        mark.record()
    accelerator.synchronize(device)
    return statistics.median(1e-3 * a.elapsed_time(b) for a, b in pairwise(marks))


def peak_memory_gb(device: torch.device) -> float | None:
    """Returns the peak memory of tensors since the process began; None on a CPU."""
    if not accelerator.is_accelerator(device):
        return None
    return accelerator.module(device).max_memory_allocated(device) / 1e9


def first_that_fits(
    size: Size, device: torch.device, run: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    """Runs `run` with the largest micro-batch for which there is memory."""
    for micro_batch in size.micro_batches:
        try:
            return run(micro_batch) | {"micro_batch": micro_batch}
        except torch.OutOfMemoryError:
            pass  # the memory of the failed attempt is only released after this block
        gc.collect()
        if accelerator.is_accelerator(device):
            accelerator.module(device).empty_cache()
            accelerator.module(device).reset_peak_memory_stats(device)
    return {"failed": f"out of memory with micro-batches of {min(size.micro_batches)}"}


def speed(model: ModelConfig, size: Size, step_s: float, device: torch.device) -> dict[str, Any]:
    """Returns a model's figures; its shares of the datasheet and of the GEMM follow in the
    tables."""
    tokens = size.sequences * model.seq_length
    return {
        "parameters": parameter_count(model),
        "step_ms": 1e3 * step_s,
        "tokens_per_s": tokens / step_s,
        "model_tflops": 1e-12 * flops_per_token(model, model.seq_length) * tokens / step_s,
        "peak_memory_gb": peak_memory_gb(device),
    }


def gemm_row(size: Size, device: torch.device) -> dict[str, Any]:
    """Returns the median speed of a square product in bf16 (fp32 sums)."""
    a = torch.randn(size.gemm, size.gemm, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    many = dataclasses.replace(size, steps=5 * size.steps)
    seconds = seconds_of(lambda: torch.mm(a, a, out=out), device, many)
    return {"size": size.gemm, "tflops": 2e-12 * size.gemm**3 / seconds}


def trainer_of(
    model: ModelConfig,
    device: torch.device,
    micro_batch: int,
    sequences: int,
    precision: str,
    compiled: bool = False,
) -> Trainer:
    """Makes the whole model on one device, fed with random tokens; `sequences` make a step."""
    config = Config(micro_batch_size=micro_batch, global_batch_size=sequences)
    config.model, config.precision.name, config.compile = model, precision, compiled
    config.device, config.optim.clip_grad = device.type, MAX_GRAD_NORM
    source = RandomTokens(model)
    return Trainer(config, ProcessGroups.single(), device, train_source=source)


def model_row(name: str, size: Size, device: torch.device, compiled: bool) -> dict[str, Any]:
    """Measures parallel3d on the whole model; the breakdown in seconds per step."""
    model = model_of(name, size)

    def run(micro_batch: int) -> dict[str, Any]:
        trainer = trainer_of(model, device, micro_batch, size.sequences, size.precision, compiled)
        found = speed(model, size, seconds_of(trainer.train_step, device, size), device)
        return found | {"breakdown": {k: s for k, s in trainer.step_timer.means().items() if s}}

    return first_that_fits(size, device, run)


def fp8_row(size: Size, device: torch.device) -> dict[str, Any]:
    """Measures a 70B layer's largest GEMM at tp=8 in bf16 and in fp8, including the casts of both
    inputs."""
    capability = None
    if accelerator.is_accelerator(device):
        capability = getattr(accelerator.module(device), "get_device_capability", None)
    if capability is None:
        return {"skipped": "fp8 needs a GPU"}
    if capability(device) < (8, 9):
        return {"skipped": f"{accelerator.name(device)} has no fp8"}
    model = model_of("llama3_70b", size)
    tokens, inputs, outputs = model.seq_length, model.hidden_size, 2 * model.ffn_size // 8
    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)

    def cast(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes one scale for the tensor, from its own largest value."""
        scale = torch.finfo(torch.float8_e4m3fn).max / t.abs().amax().float().clamp(min=1e-12)
        return (t * scale).to(torch.float8_e4m3fn), scale.reciprocal()

    # compiled, because otherwise each operation is a pass over memory
    compiled = torch.compile(cast)

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
