"""Takes the tokenizer that a run keeps in its folder, and refuses another one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from parallel3d.config.fields import show
from parallel3d.data.keys import DataConfig
from parallel3d.data.tokenizer import FOLDER, FileTokenizer, Tokenizer, open_tokenizer
from parallel3d.errors import UserError


def with_own_tokenizer(data: DataConfig, run_dir: Path) -> DataConfig:
    """Returns `data` with the tokenizer of the run in `run_dir`, if the run has one.

    Raises UserError if `data` names another tokenizer, for which the weights are useless.
    """
    own = run_dir / FOLDER
    if not own.is_dir():
        return data
    if data.tokenizer is not None:
        there, here = open_tokenizer(str(own)), open_tokenizer(data.tokenizer)
        if there.digest != here.digest:
            raise UserError(
                f"data.tokenizer={show(data.tokenizer)} differs from the tokenizer of "
                f"run={run_dir.name}, which is in {own}: leave data.tokenizer out, or choose "
                "another run"
            )
        if data.name == "chat" and _has_another_template(there, here):
            raise UserError(
                f"data.tokenizer={show(data.tokenizer)} has another chat template than "
                f"run={run_dir.name}, whose tokenizer is in {own}: leave data.tokenizer out, or "
                "choose another run"
            )
    return dataclasses.replace(data, tokenizer=str(own))


def _has_another_template(there: Tokenizer, here: Tokenizer) -> bool:
    """Returns whether two tokenizers have chat templates that differ."""
    from parallel3d.data.chat_template import templates_of  # few runs need it

    if not (isinstance(there, FileTokenizer) and isinstance(here, FileTokenizer)):
        return False
    try:
        return templates_of(there) != templates_of(here)
    except UserError:  # one of them has none
        return False
