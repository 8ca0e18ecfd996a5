"""The tokenizer that a run keeps in its folder, so that it speaks wherever that is copied to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.config.fields import show
from parallel3d.data.tokenizer import BYTE, ByteTokenizer, Tokenizer, open_tokenizer
from parallel3d.errors import UserError

if TYPE_CHECKING:  # the configuration drags in omegaconf, which this file can do without
    from parallel3d.config.schema import DataConfig

FOLDER = "tokenizer"


def with_own_tokenizer(data: DataConfig, run_dir: Path) -> DataConfig:
    """`data` with the tokenizer that the run in `run_dir` keeps, if it keeps one.

    Raises UserError if `data` names another: what the weights have learned would mean nothing.
    """
    own = run_dir / FOLDER
    if not own.is_dir():
        return data
    if data.tokenizer is not None:
        there, here = open_tokenizer(str(own)), open_tokenizer(data.tokenizer)
        if there.digest != here.digest:
            raise UserError(
                f"data.tokenizer={show(data.tokenizer)} is another tokenizer than that of "
                f"run={run_dir.name}, which lies in {own}: leave data.tokenizer out, or choose "
                "another run"
            )
    return dataclasses.replace(data, tokenizer=str(own))


def tokenizer_of(data: DataConfig, run_dir: Path) -> Tokenizer:
    """The tokenizer of a run of which `data` is the configuration. Raises UserError."""
    own = run_dir / FOLDER
    return open_tokenizer(str(own) if own.is_dir() else data.tokenizer or BYTE)


def keep_tokenizer(data: DataConfig, run_dir: Path, digest: str) -> None:
    """Puts the tokenizer of `data`, which the corpus has read as the one of this digest, into the
    run's folder; bytes need none. Raises OSError, and UserError if it is another one by now."""
    tokenizer = open_tokenizer(data.tokenizer or BYTE)
    if tokenizer.digest != digest:
        raise UserError(
            f"data.tokenizer={show(data.tokenizer)} changed while the run was starting: start "
            "again when it is complete"
        )
    if not isinstance(tokenizer, ByteTokenizer):
        tokenizer.save(run_dir / FOLDER)
