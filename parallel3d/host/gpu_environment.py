"""Environment variables of a rank on NVIDIA GPUs that have better values than their defaults.

Whatever the user has set stays as it is. No torch here: its allocator and CUDA read them once, when
they start.
"""

from __future__ import annotations

from collections.abc import Mapping

from parallel3d.config.checks.groups import parse_nccl_env
from parallel3d.config.schema import Config
from parallel3d.host.devices import CPU, PRETEND, compute_capability, is_nvidia_build

# The first name is the one that torch ≥ 2.9 reads; the others are older and still obeyed.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Collectives and messages that NCCL's flight recorder keeps. A step of 32 layers with tp and 16
# micro-batches has some 5,000 (ten a layer and micro-batch), so that this is a few steps; torch's
# own 2,000 are less than one. At about a kilobyte each they take 20 MB of host memory.
RECORDED = 20_000
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = 10  # compute capability


def gpu_environment(config: Config, device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set for ranks on `device` ("auto", "cuda", …); none for what is no GPU."""
    if device in (CPU, PRETEND) or not is_nvidia_build():
        return {}
    given = {*environ, *parse_nccl_env(config.cluster.nccl_env)}
    wanted = {}
    if not given.intersection(ALLOCATOR):
        # Segments that grow instead of blocks of fixed sizes: what a run frees in one shape it can
        # use in another, where micro-batches, buckets and gathered layers take turns.
        wanted[ALLOCATOR[0]] = "expandable_segments:True"
    if not given.intersection(RECORDER):
        wanted[RECORDER[0]] = str(RECORDED)
    if CONNECTIONS not in given and _needs_order(config):
        wanted[CONNECTIONS] = "1"
    return wanted


def _needs_order(config: Config) -> bool:
    """Whether kernels must start in the order in which they were queued.

    The backward of a split linear layer queues the exchange of one product and then computes the
    other, which hides it, if the exchange gets its multiprocessors first. Over several hardware
    queues a GPU before Blackwell may start the larger kernel first and leave none. With zero ≥ 2
    whole layers are gathered and scattered beside the computation, on streams that one queue would
    string together.
    """
    if config.tp == 1 or config.zero >= 2:
        return False
    capability = compute_capability()
    return capability is None or capability < BLACKWELL
