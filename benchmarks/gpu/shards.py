"""Measures one rank's share of a model that needs many cards, on one card and without
communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.rows import RandomTokens, Size, model_of, peak_memory_gb, seconds_of
from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.device import accelerator
from parallel3d.models.flops import layer_flops
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.run.keys import LaunchConfig
from parallel3d.run_config import Config

SHARDS = {"llama3_70b": Layout(tp=8, pp=10), "gpt3_175b": Layout(tp=8, pp=16)}


def shard_row(name: str, size: Size, device: torch.device) -> dict[str, Any]:
    """Measures a middle stage of one rank: forward and backward of one micro-batch, by layer."""
    model, layout = model_of(name, size), SHARDS[name]
    if size.shard_layers is not None:
        model.num_layers = size.shard_layers * layout.pp
    config = Config(tp=layout.tp, pp=layout.pp, sp=True, micro_batch_size=1)
    config.global_batch_size, config.model = layout.pp, model
    config.precision.name, config.device = size.precision, device.type
    config.launch.shared_memory = False
    with fake_groups(layout, layout.pp // 2 * layout.tp, device) as groups:
        trainer = Trainer(config, groups, device, train_source=RandomTokens(model))
        return {"layout": f"tp {layout.tp}, pp {layout.pp}"} | _time_layers(trainer, size)


def _time_layers(trainer: Trainer, size: Size) -> dict[str, Any]:
    model, device, layers = trainer.config.model, trainer.device, len(trainer.stages[0].blocks)
    state_gb = None
    if accelerator.is_accelerator(device):
        state_gb = accelerator.module(device).memory_allocated(device) / 1e9
    shape = trainer.executor.sends[0].shape
    x = torch.randn(shape, device=device, dtype=trainer.dtype, requires_grad=True)
    grad = torch.randn_like(x)

    def forward() -> torch.Tensor:
        return trainer.stages[0](x, None, None, None, LayerInputs())

    with torch.no_grad():
        forward_s = seconds_of(forward, device, size)
    both_s = seconds_of(lambda: forward().backward(grad), device, size)
    # Model FLOPs of this rank's layers, without the head, divided by tp.
    attention = 2 * model.num_attention_heads * model.head_size * model.seq_length
    tokens = model.seq_length * trainer.config.micro_batch_size
    # The MFU counts attention in full, whereas `layer_flops` has the causal half.
    flops = 3 * (layer_flops(model) + attention) * tokens / trainer.config.tp
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
def fake_groups(layout: Layout, rank: int, device: torch.device) -> Iterator[ProcessGroups]:
    """Makes this process one rank of a world without other ranks, by PyTorch's `fake` backend.

    Nothing is summed, and nothing waits for a rank. Some operations still take a device's time: an
    all-gather copies this rank's part to every place of its output, a reduce-scatter its own part
    to the output (see `_own_part_of_reductions`).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # The backend is given by name, because it does not list every device.
    backend = ",".join(f"{kind}:fake" for kind in dict.fromkeys(("cpu", device.type)))
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        with _own_part_of_reductions():
            # Groups are made one by one, as on a CPU, because there is no communicator to split.
            groups = ProcessGroups.create(layout, "cpu", launch=LaunchConfig(shared_memory=False))
            yield groups
            groups.close()
    finally:
        dist.destroy_process_group()


@contextmanager
def _own_part_of_reductions() -> Iterator[None]:
    """Makes the output of each reduce-scatter this rank's part of the input.

    The backend of torch 2.13 copies it; an older one leaves the output as it was allocated, so it
    is copied here. Such memory may be zeros or NaN, and a GEMM that reads those toggles fewer bits,
    draws less power and clocks higher: its time would be too short.
    """
    # names since torch 2.13, and earlier ones
    names = ("reduce_scatter_single", "reduce_scatter_tensor")
    given = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    out = torch.full((1,), torch.nan)
    next(iter(given.values()))(out, torch.ones(dist.get_world_size()))
    if not out.isnan().any():
        yield
        return

    def filled(call: Callable[..., object]) -> Callable[..., object]:
        def reduce_scatter(
            out: torch.Tensor, tensor: torch.Tensor, *rest: Any, **more: Any
        ) -> object:
            group = more.get("group")
            parts = tensor.reshape(dist.get_world_size(group), *out.shape)
            out.copy_(parts[dist.get_rank(group)])
            return call(out, tensor, *rest, **more)

        return reduce_scatter

    for name, call in given.items():
        setattr(dist, name, filled(call))
    try:
        yield
    finally:
        for name, call in given.items():
            setattr(dist, name, call)
