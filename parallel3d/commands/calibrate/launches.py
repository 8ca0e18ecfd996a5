"""What a step costs beside its kernels: Python, autograd, the pipeline's actions.

Told from whole steps of models so small that nothing else takes time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.calibrate.timing import clock_of
from parallel3d.config.checks.whole import check_config
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.data.sampler import Sample
from parallel3d.device import accelerator
from parallel3d.plan.measured.machine import COLLECTIVES, SHARED, CalibrationSource, MeasuredMachine
from parallel3d.plan.measured.steps import step_parts
from parallel3d.plan.measured.tables import Table
from parallel3d.trainer import Trainer

SHAPES = ((1, 1), (6, 1), (1, 6), (6, 6))  # layers, micro-batches
TINY = {"hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 64, "seq_length": 16}
FORWARD = 0.35  # of a layer's launches; a backward has about twice as many nodes
LEAST = 1e-7
STEPS, ROUNDS = 6, 4


@dataclasses.dataclass(frozen=True)
class Same:
    """Samples that cost nothing to make."""

    length: int

    def sample(self, i: int) -> Sample:
        tokens = (np.arange(self.length + 1) + i) % 256
        return Sample(tokens, np.ones(self.length, dtype=bool))


def launches(
    config: Config,
    device: torch.device,
    made: CalibrationSource,
    tables: Mapping[str, Table],
    tell: Callable[[str], None],
) -> dict[str, float]:
    """Seconds of a layer's forward and backward, of an action and of a step, kernels left out."""
    none = dict.fromkeys(("forward", "backward", "action", "step"), LEAST)
    empty = {f"launch.{name}": value for name, value in none.items()}
    rest = {"rank_gb": 1.0, "memory_gb": 1.0, "peak_tflops": 1.0}
    one = Table(((1, 2), (64, 128)), (LEAST,) * 4)
    collectives = {name + way: one for name in COLLECTIVES for way in ("", SHARED)}
    alone = Table(((1,),), (1.0,))
    more = {"together.gemm": alone, "together.move": alone, "threads": alone}
    machine = MeasuredMachine(
        dataclasses.replace(made, count=1), {**tables, **collectives, **more}, {**empty, **rest}
    )
    measured, kernels = [], []
    for layers, count in SHAPES:
        tell(f"steps of {layers} layers and {count} micro-batches")
        one_config = tiny(config, layers, count)
        measured.append(_step(one_config, device))
        kernels.append(step_parts(one_config, machine).total)
    terms = np.array([[layers * count, 2 * count, 1] for layers, count in SHAPES], dtype=float)
    left = np.array(measured) - (0.0 if accelerator.is_accelerator(device) else np.array(kernels))
    # by relative errors: a step of many launches may not drown the others
    layer, action, step = np.linalg.lstsq(
        terms / np.array(measured)[:, None], left / np.array(measured), rcond=None
    )[0]
    layer, action, step = (max(float(v), LEAST) for v in (layer, action, step))
    return {
        "launch.forward": FORWARD * layer,
        "launch.backward": (1 - FORWARD) * layer,
        "launch.action": action,
        "launch.step": step,
    }


def tiny(config: Config, layers: int, microbatches: int) -> Config:
    """A model of the same kind with next to nothing in it, on one rank."""
    model = config.model
    sizes = TINY | {"num_layers": layers, "num_query_groups": None, "head_dim": None}
    kept = ("norm", "position_embedding", "activation", "bias", "tie_embeddings")
    kinds = {name: getattr(model, name) for name in kept}
    return check_config(
        Config(
            micro_batch_size=1,
            global_batch_size=microbatches,
            dp=1,
            device=config.device,
            model=ModelConfig(**sizes, **kinds),
            optim=config.optim,
            precision=config.precision,
            launch=config.launch,
        ),
        1,
        own_samples=True,
    )


def _step(config: Config, device: torch.device) -> float:
    """Seconds of a step on this rank alone, the best of some runs of some."""
    groups = ProcessGroups.single()
    source = Same(config.model.seq_length)
    trainer = Trainer(config, groups, device, train_source=source)
    clock, found = clock_of(device), []
    for _ in range(ROUNDS):
        trainer.train_step()
        accelerator.synchronize(device)
        begun = clock()
        for _ in range(STEPS):
            trainer.train_step()
        accelerator.synchronize(device)
        found.append((clock() - begun) / STEPS)
        time.sleep(0)
    return min(found)
