"""Records the calls that training steps make of `fused` functions, on the simulated device.

    python -m benchmarks.compiled.calls large large.pt
    python -m benchmarks.compiled.calls uncalled names.json large.pt small.pt

`large`: models at their usual sizes but with fewer layers; tensors have no values. `small`: tiny
models with every option that has a fused function, with values. `uncalled`: lists the functions
that the files have no call of.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import parallel3d
from benchmarks.compiled.mixtures import RANKS, TOKENS, shapes
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample
from parallel3d.device import fused
from parallel3d.run_config import Config, check_config
from parallel3d.simulated_device import enable
from parallel3d.simulated_device.device import TYPE
from parallel3d.trainer import Trainer

COMMON = "precision=bf16 model.num_layers=2"
LARGE = {
    "llama_1b, 8 × 4,096": "model=llama_1b micro_batch_size=8 global_batch_size=8 "
    "model.seq_length=4096 optim.state=bf16",
    "llama3_8b, 1 × 8,192": "model=llama3_8b micro_batch_size=1 global_batch_size=1 "
    "model.seq_length=8192",
    "qwen3_8b, 1 × 8,192": "model=qwen3_8b micro_batch_size=1 global_batch_size=1 "
    "model.seq_length=8192 loss.label_smoothing=0.1",
    "olmoe_1b_7b, 4 × 4,096": "model=olmoe_1b_7b micro_batch_size=4 global_batch_size=4 "
    "model.seq_length=4096",
    "llama_1b with GeGLU, 8 × 4,096": "model=llama_1b micro_batch_size=8 global_batch_size=8 "
    "model.seq_length=4096 model.activation=geglu model.norm_position=both "
    "model.norm_zero_centered=true",
    "megatron_345m, 8 × 1,024": "model=megatron_345m model.dropout=0.1 micro_batch_size=8 "
    "global_batch_size=8",
}
TINY = "model=llama_tiny model.seq_length=24 model.vocab_size=300 micro_batch_size=2 "
SMALL = {
    "rotary, RMSNorm, SwiGLU": TINY + "global_batch_size=2 optim.state=bf16",
    "q/k norm, label smoothing": TINY + "global_batch_size=2 model.qk_norm=true "
    "loss.label_smoothing=0.1",
    "q/k norm over all heads": TINY + "global_batch_size=2 model.qk_norm=true "
    "model.qk_norm_width=full",
    "GeGLU, norms around 0, capped logits": TINY + "global_batch_size=2 model.activation=geglu "
    "model.norm_position=both model.norm_zero_centered=true model.qk_norm=true "
    "model.logit_cap=30 model.logit_scale=0.5",
    "experts": TINY + "global_batch_size=2 model.num_experts=8 model.expert_ffn_size=40",
    "dropout": TINY + "global_batch_size=2 model.dropout=0.1",
    "dropout within documents": TINY + "global_batch_size=2 model.dropout=0.1 "
    "data.document_mask=true",
}


@dataclass(frozen=True)
class Call:
    """A call of the `fused` function `name` of `module`; tensors of `large` cases are on meta."""

    case: str
    module: str
    name: str
    arguments: tuple[Any, ...]

    @property
    def key(self) -> str:
        """A text that is equal for calls with equal shapes."""
        shapes = [_shape(a) if isinstance(a, Tensor) else a for a in self.arguments]
        return f"{self.module}.{self.name}{shapes}"

    @property
    def function(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)

    @property
    def is_compiled(self) -> bool:
        """Returns whether a run would compile the function at this size."""
        least = fused.LEAST_ELEMENTS if self.function.least is None else self.function.least
        return max(a.numel() for a in self.arguments if isinstance(a, Tensor)) >= least


def fused_functions() -> set[str]:
    """Returns `module.name` of every function under `fused`, found in the code."""
    found = set()
    for module in pkgutil.walk_packages(parallel3d.__path__, "parallel3d."):
        source = importlib.util.find_spec(module.name).origin  # type: ignore[union-attr]
        if module.ispkg or source is None:
            continue
        if "device.fused import" not in Path(source).read_text(encoding="utf-8"):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, fused._Fused):
                plain = value.function
                found.add(f"{plain.__module__}.{plain.__name__}")
    return found


def uncalled(calls: Sequence[Call]) -> list[str]:
    """Returns functions under `fused` that are never called."""
    return sorted(fused_functions() - {f"{call.module}.{call.name}" for call in calls})


class Samples:
    """Returns random tokens, in documents of a few tokens if they are separated; all unmasked."""

    masks = False

    def __init__(self, config: Config) -> None:
        self.seq_length, self.vocab_size = config.model.seq_length, config.model.vocab_size

    def sample(self, i: int) -> Sample:
        tokens = np.random.default_rng(i).integers(self.vocab_size, size=self.seq_length + 1)
        return Sample(tokens.astype(np.int64), np.ones(self.seq_length, dtype=bool))


@contextmanager
def recorded(case: str, calls: dict[str, Call]) -> Iterator[None]:
    """Adds the calls inside the block to `calls`, those with equal shapes once."""
    plain = fused._Fused.__call__

    def call(self: Any, *arguments: Any) -> Any:
        key = Call(case, self.__module__, self.__name__, arguments).key
        if key not in calls:
            given = tuple(_copy(a) if isinstance(a, Tensor) else a for a in arguments)
            calls[key] = Call(case, self.__module__, self.__name__, given)
        return plain(self, *arguments)

    with patch.object(fused._Fused, "__call__", call):
        yield


def _shape(x: Tensor) -> tuple:
    return tuple(x.shape), x.stride(), x.dtype


def _copy(x: Tensor) -> Tensor:
    """Returns a copy on the CPU or on meta, with the same strides."""
    if x.device.type != TYPE:
        raise ValueError(f"a fused function is given a tensor on {x.device}")
    if torch.get_device_module(x.device).machine.data == "meta":
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach().cpu())


def configured(words: str) -> Config:
    """Returns the checked configuration of a case."""
    return check_config(parallel3d.compose(*COMMON.split(), *words.split()), own_samples=True)


def record(kind: str) -> list[Call]:
    """Records the calls of all cases of a kind, large or small; enables the simulated device in
    this process."""
    enable(data="meta" if kind == "large" else "cpu", checks_races=False)
    device = torch.device(TYPE, 0)
    torch.get_device_module(device).set_device(device)
    calls: dict[str, Call] = {}
    for case, words in (LARGE if kind == "large" else SMALL).items():
        config = configured(words)
        trainer = Trainer(config, ProcessGroups.single(), device, train_source=Samples(config))
        with recorded(case, calls):
            trainer.train_step()
        del trainer
    if kind == "large":
        calls |= {call.key: call for call in of_mixtures()}
    return list(calls.values())


def of_mixtures() -> list[Call]:
    """Returns the calls between the GEMMs of experts, for the sizes of all families at ep=1 and
    ep=8, where an exchange has as many slots as ranks."""
    found = []
    for name, (hidden, width, _, chosen) in shapes().items():
        rows = TOKENS * chosen
        inner, active = _empty(rows, 2 * width), _empty(rows, width)
        weights = _empty(rows, dtype=torch.float32)
        ops, choice = "parallel3d.models.ops", "parallel3d.experts.choice"
        found.append(Call(name, ops, "weighed_forward", (inner, weights, "swiglu")))
        found.append(Call(name, ops, "weighed_backward", (active, inner, weights, "swiglu")))
        for slots in {chosen, *RANKS} - {1}:
            places = _empty(TOKENS, slots, dtype=torch.int64)
            of_tokens = _empty(TOKENS * slots, hidden), places
            found.append(Call(f"{name}, {slots} slots", choice, "sum_of_slots", of_tokens))
    return found


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def load(path: str | Path) -> list[Call]:
    """Reads the file that `main` wrote."""
    return [Call(*call) for call in torch.load(path, weights_only=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("large", "small", "uncalled"))
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("files", nargs="*", help="for `uncalled`: files of calls")
    given = parser.parse_args()
    if given.kind == "uncalled":
        names = {name for file in given.files for name in uncalled(load(file))}
        given.path.write_text(json.dumps(sorted(names)), encoding="utf-8")
        return
    calls = record(given.kind)
    torch.save([(c.case, c.module, c.name, c.arguments) for c in calls], given.path)


if __name__ == "__main__":
    main()
