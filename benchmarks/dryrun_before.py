"""`python -m benchmarks.dryrun_before`: what each repair of the GPU path is worth, by dry runs.

Undoes them one at a time, and all together, in the code that runs, and dry-runs one step of
llama_1b on one H200 (sequence 4096, 8 sequences, bf16). Prints Markdown: launches, bytes and the
roofline's time, which sees passes over memory and GEMMs, not what many launches cost the host. No
GPU is needed; a few minutes of one core are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import OmegaConf
from torch import Tensor

from parallel3d import optim
from parallel3d.blueprint.sizes import loss_chunks
from parallel3d.commands.dryrun.command import find_facts
from parallel3d.config.schema import ClusterConfig, Config, ModelConfig, conf_dir
from parallel3d.device import fused
from parallel3d.models import attention
from parallel3d.models.layers import Norm
from parallel3d.optim import Optimizer
from parallel3d.parameters import gradients as parameters
from parallel3d.tensor_parallel import loss

Undo = Callable[[], Any]


@contextmanager
def norm_in_pieces() -> Iterator[None]:
    """A norm for each 32,768 elements, and a pass of its own that clips."""

    def sum_of_powers(grads: list[Tensor], device: torch.device, _: float = 2.0) -> Tensor:
        pieces = [piece for grad in grads for piece in grad.split(optim.NORM_PIECE)]
        if not pieces:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(torch._foreach_norm(pieces)).double().square().sum()

    plain = Optimizer.step

    def step(self: Optimizer, *args: Any) -> None:
        torch._foreach_mul_([s.grad for s in self.segments], 0.5)
        plain(self, *args)

    with (
        patch.object(optim, "sum_of_powers", sum_of_powers),
        patch.object(Optimizer, "step", step),
    ):
        yield


@contextmanager
def loss_in_small_chunks() -> Iterator[None]:
    """1,024 tokens of logits at a time, operator by operator in pieces of 64 MiB."""

    def chunks(*args: Any, **how: Any) -> Counter[int]:
        return loss_chunks(*args, **how | {"on_accelerator": False})

    plain = {name: getattr(loss, name) for name in LOSS}
    with ExitStack() as stack:
        stack.enter_context(patch.object(loss, "loss_chunks", chunks))
        stack.enter_context(patch.object(loss, "fuses", lambda device: False))
        for name, function in plain.items():
            stack.enter_context(patch.object(loss, name, function.function))
        yield


@contextmanager
def blocks_by_operators() -> Iterator[None]:
    """Norms, SwiGLU and the rotation as PyTorch's operators, one after the other."""
    plain = fused._Fused.__call__

    def call(self: Any, *args: Any) -> Any:
        return plain(self, *args) if self.__name__ in LOSS else self.function(*args)

    with patch.object(fused._Fused, "__call__", call):
        yield


@contextmanager
def sums_apart_from_norms() -> Iterator[None]:
    with patch.object(Norm, "is_fused_with_sum", lambda *_: False):
        yield


@contextmanager
def products_rounded_first() -> Iterator[None]:
    with patch.object(parameters, "supports_wide_addmm", lambda *_: False):
        yield


@contextmanager
def heads_repeated() -> Iterator[None]:
    with patch.object(attention, "kernel_shares_heads", lambda q: False):
        yield


LOSS = ("vocabulary_statistics", "logits_to_gradient")
UNDONE: dict[str, Undo] = {
    "the norm in 32-Ki pieces, clipping a pass of its own": norm_in_pieces,
    "the loss by operators, 1,024 tokens at a time": loss_in_small_chunks,
    "weight gradients rounded, then added": products_rounded_first,
    "norms, SwiGLU, rotary by operators": blocks_by_operators,
    "residual add apart from the norm": sums_apart_from_norms,
    "key-value heads repeated": heads_repeated,
}
PARTS = ("gemm_layers", "gemm_head", "attention", "blocks", "loss", "optimizer", "other")


def configuration() -> Config:
    def preset(group: str, name: str) -> dict[str, Any]:
        return OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{name}.yaml"))

    config = Config(
        micro_batch_size=8,
        global_batch_size=8,
        model=ModelConfig(**preset("model", "llama_1b")),
        cluster=ClusterConfig(**preset("cluster", "dgx_h200")),
    )
    config.precision.name = "bf16"
    return config


def row(name: str, undone: Sequence[Undo]) -> str:
    with ExitStack() as stack:
        for undo in undone:
            stack.enter_context(undo())
        facts = find_facts(configuration())
    parts = [f"{1e3 * facts['parts'][part]['seconds']:.1f}" for part in PARTS]
    moved, ms = facts["bytes"] / 1e9, 1e3 * facts["seconds"]
    cells = [name, f"{facts['launches']:,.0f}", f"{moved:.0f}", *parts, f"{ms:.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    head = ("undone", "launches", "GB", *PARTS, "ms in all")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    print(row("nothing", ()), flush=True)
    for name, undo in UNDONE.items():
        print(row(name, (undo,)), flush=True)
    print(row("all of these", tuple(UNDONE.values())), flush=True)


if __name__ == "__main__":
    main()
