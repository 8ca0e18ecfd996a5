"""Seconds of a kernel on a GPU: what it computes, or what it reads and writes, whichever is longer.

A datasheet's peaks are never reached. How much of them is attainable is assumed here, in one place
and the same for all GPUs, until a card has measured it.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.fields import show
from parallel3d.config.schema import Config
from parallel3d.errors import UserError
from parallel3d.metrics.peak import TERA, Peak, datasheet_peak

# Of the dense peak, by H200 in bf16 (989.4 TFLOP/s). A square GEMM of 8192 measures 785 there; the
# layers' GEMMs are smaller and thinner, those of a head over a vocabulary run in chunks of tokens.
GEMM_LAYERS = 690 / 989.4
GEMM_HEAD = 580 / 989.4
# Flash attention, of the FLOPs really computed. H100, forward, without a mask, 4k tokens (Shah et
# al. 2024, figure 5): heads of 64: 321 (FlashAttention-2) and 408 TFLOP/s (cuDNN), of 128: 368 and
# 609; backward and causal are slower.
ATTENTION_NARROW = 300 / 989.4  # heads up to 64
ATTENTION_WIDE = 450 / 989.4
NARROW = 64
# H200: 4.0 of 4.8 TB/s, as long element-wise kernels get them.
BANDWIDTH = 4.0 / 4.8

SHARES = {"gemm_layers": GEMM_LAYERS, "gemm_head": GEMM_HEAD}


@dataclass(frozen=True)
class Gpu:
    """One GPU of the cluster.

    Attributes:
        peak: in the run's compute type, for MFU. peaks: FLOP/s by type (`metrics.peak`'s names).
        bandwidth: B/s of its memory. memory: bytes.
    """

    name: str
    peak: Peak
    peaks: dict[str, float]
    bandwidth: float
    memory: float

    def seconds(self, kind: str, flops: float, nbytes: float, dtype: str, head_dim: int) -> float:
        """Of one kernel: `kind` is gemm_layers, gemm_head, attention, or anything else."""
        moving = nbytes / (self.bandwidth * BANDWIDTH)
        if not flops:
            return moving
        share = SHARES.get(kind, ATTENTION_NARROW if head_dim <= NARROW else ATTENTION_WIDE)
        return max(moving, flops / (self.peaks.get(dtype, self.peak.flops) * share))


def gpu_of(config: Config) -> Gpu:
    """The cluster's GPU.

    Raises:
        UserError: the cluster does not say which GPU it has, or the datasheets do not know it.
    """
    cluster, precision = config.cluster, config.precision.name
    told = {
        "cluster.gpu": cluster.gpu,
        "cluster.gpu_memory_gb": cluster.gpu_memory_gb,
        "cluster.gpu_memory_gb_per_s": cluster.gpu_memory_gb_per_s,
    }
    missing = [name for name, value in told.items() if value is None]
    if missing:
        raise UserError(
            f"cluster={cluster.name} does not say what its GPUs are; the nearest is "
            f"cluster=dgx_h100, or {' '.join(f'{name}=…' for name in missing)}."
        )
    own = config.launch.peak_tflops
    known = {t: datasheet_peak(cluster.gpu, t) for t in ("fp64", "fp32", "tf32", "bf16", "fp16")}
    peak = known[precision] if own is None else Peak(own * TERA, "launch.peak_tflops")
    if peak is None:
        raise UserError(
            f"cluster.gpu={show(cluster.gpu)} has no {precision} in the datasheets known here; "
            "give launch.peak_tflops, its dense peak."
        )
    peaks = {name: found.flops for name, found in known.items() if found is not None}
    if own is not None:
        peaks[precision] = peak.flops
    return Gpu(
        cluster.gpu, peak, peaks, 1e9 * cluster.gpu_memory_gb_per_s, 1e9 * cluster.gpu_memory_gb
    )
