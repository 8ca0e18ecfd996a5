"""Keys of the device and of number formats."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.conflicts import Conflict, NoneOf, OneOf
from parallel3d.config.values import (
    FREE,
    key,
)


@dataclass
class DeviceKeys:
    """Where and how a rank computes."""

    device: str = key(
        "auto",
        "where to compute; auto: on GPUs (CUDA or ROCm), one per rank, and on the CPU only where "
        "nothing asks for a GPU; "
        "simulated: an accelerator simulated on the CPU, which finds races and host waits: for "
        "tests, slow",
        choices=("auto", "cpu", "cuda", "simulated"),
        resume=FREE,
    )
    compile: bool = key(
        False,
        "compile the layers by TorchInductor: faster steps after a slower first one; needs a C++ "
        "compiler on CPU, Triton on CUDA",
        resume=FREE,
    )
    deterministic: bool = key(
        False,
        "on GPUs, kernels that add in a fixed order: slower, but the same layout then gives the "
        "same bits, as it always does on CPU",
        resume=FREE,
    )


@dataclass
class PrecisionConfig:
    """Number formats: `precision=fp32`. Master weights and gradients are never below fp32."""

    name: str = key(
        "fp32",
        "compute type",
        choices=("fp64", "fp32", "tf32", "bf16", "fp16"),
    )
    lm_cross_entropy: str = key(
        "fp32",
        "type in which the training loss is computed: fp32, or, with precision=fp16, fp16, which "
        "rounds each logit, exponential, sum and loss to fp16; held-out losses are fp32",
        choices=("fp32", "fp16"),
    )
    loss_scale: float | None = key(
        None,
        "fp16: a fixed loss scale; null: a dynamic one",
        above=0,
        tried=(1024.0,),
    )
    initial_loss_scale: float = key(65536.0, "fp16: the dynamic scale at the start", above=0)
    min_loss_scale: float = key(1.0, "fp16: floor of the dynamic scale", above=0)
    loss_scale_growth: float = key(2.0, "fp16: factor after a window without overflow", above=1)
    loss_scale_backoff: float = key(0.5, "fp16: factor after an overflow", above=0, below=1)
    loss_scale_window: int = key(
        1000,
        "fp16: steps in a row without overflow before the scale grows",
        minimum=1,
    )
    loss_scale_hysteresis: int = key(
        2,
        "fp16: overflows in a row before the scale backs off",
        minimum=1,
    )


NO_TF32 = Conflict(
    {"precision.name": OneOf("tf32"), "device": OneOf("cpu")},
    "{precision.name} is a mode of a GPU's tensor cores, and this run computes on the CPU",
    (("precision.name", "fp32"),),
)
CONFLICTS = (
    NO_TF32,
    *(
        Conflict(
            {key: NoneOf(off), "precision.name": NoneOf("fp16")},
            f"{{{key}}} is only for precision=fp16, not {{precision.name}}",
            ((key, off), ("precision.name", "fp16")),
        )
        for key, off in (("precision.lm_cross_entropy", "fp32"), ("precision.loss_scale", None))
    ),
)
