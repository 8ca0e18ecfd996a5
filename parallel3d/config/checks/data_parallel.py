"""Cross-checks of data parallelism: what travels, in which order, and what is sharded."""

from __future__ import annotations

from parallel3d.config.schema import Config
from parallel3d.errors import UserError, closest


def check_data_parallel(config: Config, dp: int) -> None:
    """Hooks, bucket order and shards fit the engine of `zero`; raises UserError."""
    _check_hook(config)
    _check_fully_sharded(config, dp)
    _check_noise_scale(config, dp)


def _check_noise_scale(config: Config, dp: int) -> None:
    """Gradients of a part of the batch, and the exact sum, are seen."""
    asked = "train.noise_scale=true"
    if not config.train.noise_scale:
        return
    if config.zero > 1 and dp > 1:
        raise UserError(
            f"{asked} must see the gradients of one replica before they are summed, which zero="
            f"{config.zero} does not show; the nearest is zero=1."
        )
    if config.ddp.comm_hook == "powersgd":
        raise UserError(
            f"{asked} must see exact sums, and ddp.comm_hook=powersgd approximates them; the "
            "nearest is ddp.comm_hook=bf16."
        )
    if config.global_batch_size == config.micro_batch_size:
        raise UserError(
            f"{asked} must have two parts of a batch to compare, replicas or micro-batches, but "
            f"dp=1 and global_batch_size={config.global_batch_size} is one micro-batch; the "
            f"nearest is global_batch_size={2 * config.micro_batch_size}."
        )


def _check_fully_sharded(config: Config, dp: int) -> None:
    """What FSDP2 (zero=2 and 3) works with."""
    size = config.ddp.shard_size
    if config.zero > 1 and config.compile:
        raise UserError(
            f"compile=true compiles blocks whose parameters stay where they are, and zero="
            f"{config.zero} gathers and frees them; the nearest is zero=1, or compile=false."
        )
    if config.zero > 1 and config.ddp.bucket_order == "measured":
        raise UserError(
            f"ddp.bucket_order=measured orders gradient buckets, and zero={config.zero} has none; "
            "the nearest is ddp.bucket_order=model."
        )
    if config.zero < 2 and config.ddp.reduce_every_microbatch:
        raise UserError(
            f"ddp.reduce_every_microbatch=true is read by zero=2 and zero=3 alone, but "
            f"zero={config.zero}; the nearest is ddp.reduce_every_microbatch=null."
        )
    if size is None:
        return
    if config.zero < 2:
        raise UserError(
            f"ddp.shard_size={size} is read by zero=2 and zero=3 alone, but zero={config.zero}; "
            "the nearest is ddp.shard_size=null."
        )
    if dp > 1 and (size < 2 or dp % size):
        near = closest(size, lambda n: n > 1 and dp % n == 0, dp) or dp
        raise UserError(
            f"ddp.shard_size={size} must divide dp={dp} and be at least 2; the nearest is "
            f"ddp.shard_size={near}."
        )


def _check_hook(config: Config) -> None:
    ddp = config.ddp
    hook = f"ddp.comm_hook={ddp.comm_hook}"
    if ddp.comm_hook == "none":
        return
    if config.zero:
        raise UserError(
            f"{hook} changes how whole gradients are summed, and zero={config.zero} scatters "
            f"them; the nearest is zero=0, or ddp.comm_hook=none."
        )
    if ddp.hierarchical:
        raise UserError(
            f"{hook} and ddp.hierarchical=true are two ways to sum a bucket; the nearest is "
            "ddp.hierarchical=false, or ddp.comm_hook=none."
        )
    if ddp.comm_hook == "powersgd" and config.precision.name == "fp16":
        raise UserError(
            f"{hook} carries gradients over from step to step, and precision=fp16 changes their "
            "scale in between; the nearest is precision=bf16."
        )
