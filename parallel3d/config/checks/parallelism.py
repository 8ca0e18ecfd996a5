"""Cross-checks of rank placement, process groups and data parallelism."""

from __future__ import annotations

import re

from parallel3d.config.fields import show
from parallel3d.config.schema import Config
from parallel3d.errors import UserError, closest, nearest

GROUP_KINDS = ("tp", "cp", "dp", "pp", "embedding")
# Fields of ncclConfig_t and their ranges.
NCCL_LIMITS = {"min_ctas": (1, 32), "max_ctas": (1, 32), "cga_cluster_size": (0, 8)}


def check_groups(config: Config) -> None:
    """Checks placement, rank file and NCCL settings; raises UserError."""
    if config.placement == "file" and config.rank_file is None:
        raise UserError(
            "placement=file needs rank_file=…, a file with a line `rank host local_index` for each "
            "rank; the nearest is placement=default."
        )
    if config.rank_file is not None and config.placement != "file":
        raise UserError(
            f"rank_file={show(config.rank_file)} is read with placement=file alone, but "
            f"placement={show(config.placement)}; the nearest is placement=file."
        )
    for kind in config.launch.nccl_high_priority:
        _check_kind("launch.nccl_high_priority", kind, kind)
    parse_nccl_settings(config.launch.nccl_settings)
    parse_nccl_env(config.cluster.nccl_env)


def _check_kind(key: str, item: str, kind: str) -> None:
    if kind not in GROUP_KINDS:
        raise UserError(
            f"{key}={show(item)} must name a kind of group, one of {', '.join(GROUP_KINDS)}; the "
            f"nearest is {nearest(kind, GROUP_KINDS) or 'dp'}."
        )


def parse_nccl_settings(settings: list[str]) -> list[tuple[str, str, int]]:
    """Returns (kind of group, field of ncclConfig_t, value) of each `dp.max_ctas:8`. Raises
    UserError."""
    key = "launch.nccl_settings"
    parsed = []
    for item in settings:
        match = re.fullmatch(r"(\w+)\.(\w+):(-?\d+)", item)
        if match is None:
            raise UserError(
                f"{key}={show(item)} must be a kind of group, a setting and a number; the nearest "
                f"is {key}=[dp.max_ctas:8]."
            )
        kind, name, value = match[1], match[2], int(match[3])
        _check_kind(key, item, kind)
        if name not in NCCL_LIMITS:
            close = nearest(name, NCCL_LIMITS) or "max_ctas"
            raise UserError(
                f"{key}={show(item)} must set one of {', '.join(NCCL_LIMITS)}; the nearest is "
                f"{key}=[{kind}.{close}:{value}]."
            )
        low, high = NCCL_LIMITS[name]
        if not low <= value <= high:
            near = min(max(value, low), high)
            raise UserError(
                f"{key}={show(item)} must be {low} to {high}; the nearest is "
                f"{key}=[{kind}.{name}:{near}]."
            )
        parsed.append((kind, name, value))
    return parsed


def parse_nccl_env(settings: list[str]) -> dict[str, str]:
    """Returns values by variable of each `NCCL_CROSS_NIC:0`; a value may contain colons.

    Also accepts torch's TORCH_NCCL_… and TORCH_FR_…. Raises UserError for other text.
    """
    variables = {}
    for item in settings:
        match = re.fullmatch(r"((?:NCCL|TORCH_NCCL|TORCH_FR)_[A-Z0-9_]+):(.+)", item)
        if match is None:
            raise UserError(
                f"cluster.nccl_env={show(item)} must be a variable of NCCL and its value; the "
                "nearest is cluster.nccl_env=[NCCL_CROSS_NIC:0]."
            )
        variables[match[1]] = match[2]
    return variables


# Data parallelism


def check_data_parallel(config: Config, dp: int) -> None:
    """Checks hooks, bucket order and shards against `zero`; raises UserError."""
    _check_hook(config)
    _check_fully_sharded(config, dp * config.cp)
    _check_noise_scale(config, dp)


def _check_noise_scale(config: Config, dp: int) -> None:
    """Raises UserError unless gradients of a part of the batch and exact sums are available."""
    asked = "train.noise_scale=true"
    if not config.train.noise_scale:
        return
    if config.zero > 1 and dp * config.cp > 1:
        raise UserError(
            f"{asked} must see the gradients of one replica before they are summed, which zero="
            f"{config.zero} does not show; the nearest is zero=1."
        )
    if config.optim.freeze:
        raise UserError(
            f"{asked} must see the gradients of what is trained alone, and the buckets hold those "
            f"of optim.freeze={show(config.optim.freeze)} too; the nearest is "
            "train.noise_scale=false."
        )
    if config.ddp.comm_hook == "powersgd":
        raise UserError(
            f"{asked} must see exact sums, and ddp.comm_hook=powersgd approximates them; the "
            "nearest is ddp.comm_hook=bf16."
        )
    if (least := min(config.batch_sizes.sizes)) == config.micro_batch_size:
        it, near = f"global_batch_size={least}", f"global_batch_size={2 * least}"
        if config.train.batch_schedule is not None:
            it = f"a batch of {least} in train.batch_schedule"
            near = f"one of {2 * least} there"
        raise UserError(
            f"{asked} must have two parts of a batch to compare, replicas or micro-batches, but "
            f"dp=1 and {it} is one micro-batch; the nearest is {near}."
        )


def _check_fully_sharded(config: Config, ranks: int) -> None:
    """Raises UserError for what FSDP2 (zero=2 and 3) does not support; `ranks`: dp · cp."""
    size = config.ddp.shard_size
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
    if ranks > 1 and (size < 2 or ranks % size):
        near = closest(size, lambda n: n > 1 and ranks % n == 0, ranks) or ranks
        of = f"dp={ranks}" if config.cp == 1 else f"dp · cp = {ranks}"
        raise UserError(
            f"ddp.shard_size={size} must divide {of} and be at least 2; the nearest is "
            f"ddp.shard_size={near}."
        )


def _check_hook(config: Config) -> None:
    ddp = config.ddp
    if ddp.hierarchical and config.zero:
        near = ", or ddp.shard_size, which shards inside a part of dp" if config.zero > 1 else ""
        raise UserError(
            f"ddp.hierarchical=true changes how whole gradients are summed, and zero={config.zero} "
            f"scatters them; the nearest is zero=0{near}."
        )
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
            "scale in between; the nearest is precision=bf16, or ddp.comm_hook=bf16."
        )
