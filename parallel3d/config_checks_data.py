"""Cross-checks of data parallelism: what travels, in which order, and what is sharded."""

from __future__ import annotations

from parallel3d.config import Config
from parallel3d.errors import UserError


def check_data_parallel(config: Config) -> None:
    """Hooks fit the ways in which gradients are summed; raises UserError."""
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
