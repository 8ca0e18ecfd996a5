"""Cross-checks of the tensor-parallel engine's own settings; part of `check_config`."""

from __future__ import annotations

from parallel3d.config.schema import Config
from parallel3d.errors import UserError, closest


def check_chunks(config: Config) -> None:
    """Pieces of the sequence are equal, and there is a sequence to cut.

    Raises:
        UserError: pieces without sequence parallelism, or that do not come out even.
    """
    chunks, local = config.tensor_parallel.chunks, config.model.seq_length // config.tp
    if chunks > 1 and not config.sp:
        raise UserError(
            f"tensor_parallel.chunks={chunks} needs sp=true, as it cuts what sequence parallelism "
            "gathers and scatters; without sp the nearest is tensor_parallel.chunks=1."
        )
    if config.sp and local % chunks:
        close = closest(chunks, lambda n: local % n == 0, local) or 1
        raise UserError(
            f"tensor_parallel.chunks={chunks} must divide model.seq_length / tp = {local}; the "
            f"nearest is tensor_parallel.chunks={close}."
        )


def check_attention(config: Config) -> None:
    """Gathered heads are an eager path; raises UserError."""
    if config.tensor_parallel.attention == "gather_qk" and config.compile:
        raise UserError(
            "tensor_parallel.attention=gather_qk is for comparison and is not compiled; the "
            "nearest is tensor_parallel.attention=heads, or compile=false."
        )
