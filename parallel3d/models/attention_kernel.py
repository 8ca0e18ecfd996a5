"""The attention kernel of a run: `attention_kernel`, tried on the device before training."""

from __future__ import annotations

import warnings

import torch
import torch.nn.attention as registry

from parallel3d.config.attention import AUTO, FLASH, HALF_PRECISION, MATH, PACKAGES
from parallel3d.config.schema import Config
from parallel3d.device import accelerator
from parallel3d.device.precision import compute_dtype
from parallel3d.errors import UserError
from parallel3d.host.gpu_environment import BLACKWELL
from parallel3d.models.attention import causal_attention
from parallel3d.models.attention_backends import NOT_CUDNN

# Key-value heads from which on cuDNN's kernel is said to be right on B200s, of compute capability
# 10.0: https://github.com/pytorch/pytorch/issues/193893, open, found in generation.
LEAST_KV_HEADS = 8
TRIED_TOKENS = 128


def choose_kernel(config: Config, device: torch.device) -> str:
    """The kernel that attention is to be given on `device`.

    A value that was asked for is run once, forward and backward, with the heads and the type of
    this rank. Raises UserError where that fails: on every rank alike, and not in the first step.
    """
    asked = config.attention_kernel
    if asked == AUTO:
        return NOT_CUDNN if avoids_cudnn(config, device) else AUTO
    kernel = asked
    if asked in PACKAGES:
        kernel = FLASH
        if accelerator.has_values(device):  # a dry run has no use for the package
            _activate(asked)
    if kernel != MATH:  # which takes everything
        _try(config, device, kernel)
    return kernel


def avoids_cudnn(config: Config, device: torch.device) -> bool:
    """Whether `auto` leaves out cuDNN, which PyTorch would prefer.

    Tensor parallelism divides the key-value heads: without this a layout could change the model.
    """
    if config.attention_kernel != AUTO or device.type != "cuda" or torch.version.hip is not None:
        return False
    half = config.precision.name in HALF_PRECISION  # cuDNN has no attention for other types
    if not half or _kv_heads(config) >= LEAST_KV_HEADS:
        return False
    return accelerator.module(device).get_device_capability(device)[0] == BLACKWELL


def _kv_heads(config: Config) -> int:
    """Of a tensor-parallel rank."""
    return max(1, config.model.kv_heads // config.tp)


def _activate(asked: str) -> None:
    """Has torch's flash attention be the package's, for the rest of the process.

    Raises UserError where torch has no registry, does not offer the package or cannot load it.
    """
    name, module = PACKAGES[asked]
    reason = None
    if not hasattr(registry, "activate_flash_attention_impl"):
        reason = f"torch {torch.__version__} cannot take flash attention from another package"
    elif name not in registry.list_flash_attention_impls():
        offered = ", ".join(registry.list_flash_attention_impls()) or "none"
        reason = f"torch {torch.__version__} offers {offered}, not {name}"
    elif registry.current_flash_attention_impl() != name:
        try:
            registry.activate_flash_attention_impl(name)
        except (ImportError, RuntimeError) as error:
            reason = f"{module} cannot be used here ({_first_line(error)})"
    if reason is not None:
        raise UserError(
            f"attention_kernel={asked}: {reason}; the nearest is attention_kernel=flash, which "
            "torch brings along."
        )


def _try(config: Config, device: torch.device, kernel: str) -> None:
    model, dtype = config.model, compute_dtype(config.precision)
    heads, kv_heads = model.num_attention_heads // config.tp, _kv_heads(config)
    tokens, width = min(model.seq_length, TRIED_TOKENS), (heads + 2 * kv_heads) * model.head_size
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # PyTorch says of every kernel why not, in many lines
            qkv = torch.zeros(1, tokens, width, dtype=dtype, device=device, requires_grad=True)
            shape = (heads, kv_heads, model.head_size)
            causal_attention(qkv, *shape, None, kernel=kernel).sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        raise UserError(
            f"attention_kernel={config.attention_kernel} has no kernel for heads of "
            f"{model.head_size} in {str(dtype).removeprefix('torch.')} on this "
            f"{accelerator.name(device)} ({_first_line(error)}); the nearest is "
            "attention_kernel=auto, which takes the fastest that there is."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
