"""Keys of the optimizer and of its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from parallel3d.config.conflicts import Conflict, OneOf, exclusive
from parallel3d.config.values import (
    REFUSED,
    key,
)

OWN = "own"  # the name of an optimizer that a script brings
MULTIPLIERS = ("lr_mult", "wd_mult")  # these are the names in Megatron-LM's parameter groups


class Treatment(NamedTuple):
    """Factors of a parameter's learning rate and weight decay, and whether it is frozen."""

    lr_mult: float = 1.0
    wd_mult: float = 1.0
    frozen: bool = False


@dataclass
class OptimConfig:
    """The optimizer and its learning-rate schedule: `optim=adamw`, `optim=sgd` or `optim=muon`."""

    name: str = key(
        "adamw",
        "optimizer; muon steps the matrices of the layers, and AdamW the rest; own: the one that a "
        "script gives fit(optimizer=…)",
        choices=("adamw", "sgd", "muon", OWN),
        resume=REFUSED,
    )
    lr: float = key(1e-3, "peak learning rate", above=0)
    min_lr: float = key(0.0, "floor of the schedule", minimum=0)
    lr_decay_style: str = key(
        "cosine",
        "shape after the warm-up",
        choices=("constant", "linear", "cosine", "inverse-square-root", "wsd"),
    )
    lr_decay_steps: int | None = key(
        None,
        "step at which min_lr is reached; null: train.steps",
        minimum=1,
    )
    lr_warmup_fraction: float = key(
        0.0,
        "share of lr_decay_steps spent warming up",
        minimum=0,
        below=1,
        tried=(0.1,),
    )
    lr_warmup_steps: int = key(
        0,
        "steps spent warming up, instead of the fraction",
        minimum=0,
        tried=(2,),
    )
    wsd_decay_fraction: float = key(
        0.2,
        "wsd: share of lr_decay_steps spent in the final decay",
        above=0,
        maximum=1,
    )
    wsd_decay_steps: int | None = key(
        None,
        "wsd: steps of the final decay, instead of the share",
        minimum=1,
        tried=(2,),
    )
    wsd_decay_style: str = key(
        "linear",
        "wsd: shape of the final decay; minus_sqrt is 1-sqrt (Hägele et al. 2024)",
        choices=("linear", "cosine", "exponential", "minus_sqrt"),
    )
    weight_decay: float = key(
        0.1,
        "decoupled for adamw and muon, L2 for sgd; never on biases and norms",
        minimum=0,
    )
    beta1: float = key(0.9, "adamw: first moment", minimum=0, below=1)
    beta2: float = key(0.95, "adamw: second moment", minimum=0, below=1)
    eps: float = key(1e-8, "adamw: epsilon", above=0)
    momentum: float = key(
        0.0,
        "sgd, muon: momentum, for muon Nesterov's",
        minimum=0,
        below=1,
        resume=REFUSED,
        tried=(0.9,),
    )
    muon_scale: str = key(
        "match_rms_adamw",
        "muon: factor of an orthogonal update (m, n): match_rms_adamw 0.2·sqrt(max(m, n)), for "
        "AdamW's learning rate and decay (Liu et al. 2025); original sqrt(max(1, m / n))",
        choices=("match_rms_adamw", "original"),
    )
    muon_dtype: str = key(
        "auto",
        "muon: type in which Newton-Schulz computes and its matrices are sent; auto: bf16 with "
        "half precision, else as fp32; fp32: the type of the master weights (fp64 in fp64 runs)",
        choices=("auto", "bf16", "fp32"),
    )
    state: str = key(
        "fp32",
        "type of moments and momentum: that of the master weights, or bf16, rounded stochastically",
        choices=("fp32", "bf16"),
    )
    ema_decay: float | None = key(
        None,
        "decay per step of an average of the weights, such as 0.999, which is evaluated too; null: "
        "none",
        above=0,
        below=1,
        tried=(0.99,),
    )
    freeze: list[str] | None = key(
        None,
        "parameters that are not trained, by patterns of their names in safetensors: "
        "[embedding.*,layers.0.*]",
        tried=(["embedding.*"],),
    )
    groups: Any = key(
        None,
        "factors of learning rate and weight decay by patterns of names; the first that matches "
        "counts: {embedding.*:{lr_mult:0.1,wd_mult:0}}",
        holds=dict[str, dict[str, float]],
        tried=({"embedding.*": {"lr_mult": 0.1}},),
    )
    clip_grad: float = key(
        1.0,
        "largest global gradient norm; 0 does not clip (the norm is still logged)",
        minimum=0,
    )

    def treatment(self, name: str) -> Treatment:
        """Returns the treatment of a full tensor.

        The factors are those of the first pattern in `groups` that matches its name, or 1.
        """
        frozen = any(fnmatchcase(name, pattern) for pattern in self.freeze or ())
        for pattern, factors in (self.groups or {}).items():
            if fnmatchcase(name, str(pattern)):
                lr_mult, wd_mult = (float(factors.get(key, 1.0)) for key in MULTIPLIERS)
                return Treatment(lr_mult, wd_mult, frozen)
        return Treatment(frozen=frozen)


@dataclass
class TriedOptimConfig(OptimConfig):
    """The section of a script's own optimizer, with what a trial found, for the planner.

    Attributes:
        kept: bytes of an element of each state; None: those of the master weight.
        temporary: the most elements that a step has besides, by elements of the flat part it is at.
        carried: those of them that are left of the part before, by its elements.
    """

    kept: tuple[int | None, ...] = ()
    temporary: float = 0.0
    carried: float = 0.0


WARM_UPS = ("optim.lr_warmup_fraction", "optim.lr_warmup_steps")  # at most one is given
CONFLICTS = (
    *exclusive(*WARM_UPS, unset=0),
    Conflict(
        {"optim.name": OneOf("muon"), "optim.momentum": OneOf(0.0)},
        "{optim.name} needs a momentum above 0, but {optim.momentum}",
        (("optim.momentum", 0.95),),
    ),
)
