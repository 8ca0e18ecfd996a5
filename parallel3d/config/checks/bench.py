"""What `bench ddp` needs beside the checks of every bench."""

from __future__ import annotations

from parallel3d.config.schema import Config
from parallel3d.errors import UserError


def check_bench_ddp(app: str, config: Config) -> None:
    """Replicas alone, where that is the command. Raises UserError for another dimension."""
    for key in ("tp", "pp", "cp") if app == "bench ddp" else ():
        if getattr(config, key) != 1:
            raise UserError(
                f"{key}={getattr(config, key)} must be 1: bench ddp measures replicas alone; the "
                f"nearest is {key}=1"
            )
