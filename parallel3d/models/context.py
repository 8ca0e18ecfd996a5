"""What every part of the model is built with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parallel3d.comm.group import Group
from parallel3d.config.attention import AUTO
from parallel3d.config.recompute import parts_of
from parallel3d.config.schema import Config, LossConfig, ModelConfig
from parallel3d.models.attention_kernel import choose_kernel
from parallel3d.models.dropout import Dropout
from parallel3d.parameters.pieces import Initializer


@dataclass(frozen=True)
class BuildContext:
    """What every layer needs beside its shape: who shares it and its initial values."""

    init: Initializer
    tp: Group
    sp: bool
    recompute: frozenset[str] = frozenset()  # parts of a layer: see `recompute.py`
    recompute_layers: tuple[int, ...] = ()  # of each stage, or one for all; (): all layers
    loss: LossConfig = field(default_factory=LossConfig)
    half_loss: bool = False  # see `cross_entropy.Objective`
    chunks: int = 1  # pieces in which sequence parallelism communicates
    gather_qk: bool = False  # see `Attention.project`
    attention_kernel: str = AUTO  # see `attention_backends`

    @classmethod
    def of_run(cls, config: Config, init: Initializer, tp: Group) -> BuildContext:
        """What the configuration of a run says."""
        return cls(
            init,
            tp,
            config.sp,
            parts_of(config.recompute),
            tuple(config.recompute_layers or ()),
            config.loss,
            config.precision.lm_cross_entropy == "fp16",
            config.tensor_parallel.chunks,
            gather_qk=config.tensor_parallel.attention == "gather_qk",
            attention_kernel=choose_kernel(config, init.device),
        )

    @property
    def sequence_parallel(self) -> bool:
        return self.sp and self.tp.size > 1

    @property
    def split(self) -> dict[str, Any]:
        """What every split linear layer takes."""
        sp = self.sequence_parallel
        common = {"group": self.tp, "sp": sp, "init": self.init, "chunks": self.chunks}
        return common | {"recomputed": bool(self.recompute)}

    def dropout(self, site: str, model: ModelConfig) -> Dropout:
        """Of the residual stream: whole, or this rank's part of the sequence."""
        first = model.seq_length // self.tp.size * self.tp.index if self.sequence_parallel else 0
        return Dropout(self.init.seed, site, model.dropout, first_position=first)
