"""Keeps what a run has from a Hugging Face folder and a later export writes again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.hf.config import TOKENS, kept_keys
from parallel3d.checkpoint.hf.folder import keep_rest
from parallel3d.checkpoint.init_from import Source
from parallel3d.checkpoint.manifest import Manifest
from parallel3d.checkpoint.runs import KEPT_FILE, KEPT_FOLDER
from parallel3d.data.keys import DataConfig
from parallel3d.data.tokenizer import (
    TOKENIZER,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    check_same_tokens,
    check_vocabulary,
    open_tokenizer,
    read_json,
    tokenizer_of,
)
from parallel3d.errors import print_line
from parallel3d.files import new_folder, read_bounded, write_durably

LARGEST_KEPT = 1 << 20  # maximum size of `KEPT_FILE` in bytes
OWNER = "tokenizer"  # key of the tokenizer's digest in `KEPT_FILE`


def write_kept(
    run_dir: Path, kept: Mapping[str, Any], tokenizer: Tokenizer | None, *, own: bool
) -> None:
    """Writes `kept`, the result of `kept_keys`, into the run's folder.

    If `own` is true, `tokenizer` is that of the Hugging Face folder, or None if it has none. Then
    the digest of the tokenizer, or None, is written as well.
    """
    about = {OWNER: None if tokenizer is None else tokenizer.digest} if own else {}
    write_durably(run_dir / KEPT_FILE, f"{json.dumps({**kept, **about}, indent=2)}\n".encode())


def read_kept(run_dir: Path, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the keys that `write_kept` wrote.

    Keys of special tokens are left out unless they belong to `tokenizer`. Raises UserError if the
    file is damaged.
    """
    content = _read_kept(run_dir)
    kept = kept_keys(content)
    same = OWNER in content and content[OWNER] == (None if tokenizer is None else tokenizer.digest)
    return {key: value for key, value in kept.items() if same or key not in TOKENS}


def keep_keys(source: Source, data: DataConfig, vocab_size: int, run_dir: Path) -> None:
    """Writes the source's `kept_keys` and other files into a run that starts from it.

    Only rank 0 calls this function. `data` and `vocab_size` are those of the run.
    """
    old = source.folder.absolute().parents[1]
    there = old / KEPT_FILE
    if source.hf is not None:
        own = data.tokenizer in (None, source.tokenizer)
        tokenizer = tokenizer_to_import(source.folder, data.tokenizer, vocab_size)
        write_kept(run_dir, source.hf.kept, tokenizer, own=own)
        keep_rest(source.folder, source.hf, run_dir / KEPT_FOLDER)
    elif there.is_file():
        write_durably(run_dir / KEPT_FILE, read_bounded(there, LARGEST_KEPT))
        if (old / KEPT_FOLDER).is_dir():
            with new_folder(run_dir / KEPT_FOLDER) as partial:
                shutil.copytree(old / KEPT_FOLDER, partial, dirs_exist_ok=True)


def _read_kept(run_dir: Path) -> dict[str, Any]:
    return read_json(run_dir, KEPT_FILE, f"run={run_dir.name}")


def tokenizer_to_export(manifest: Manifest, run_dir: Path) -> Tokenizer | None:
    """Returns a run's tokenizer, or None if the run was imported without a tokenizer.

    Raises UserError if the tokenizer cannot be read.
    """
    configured: Any = manifest.config.get("data", {}).get("tokenizer")
    configured = configured if isinstance(configured, str) else None
    found = tokenizer_of(DataConfig(tokenizer=configured), run_dir)
    kept = _read_kept(run_dir)
    unknown = configured is None and isinstance(found, ByteTokenizer) and OWNER in kept
    return None if unknown and kept[OWNER] is None else found


def tokenizer_to_import(folder: Path, given: str | None, vocab_size: int) -> Tokenizer | None:
    """Returns the tokenizer that an import uses: `given`, else the folder's, else None.

    Raises UserError if the tokenizer does not fit a vocabulary of `vocab_size` tokens, or if it
    numbers a token differently from the folder's tokenizer.
    """
    found: Tokenizer
    if given is not None:
        found = open_tokenizer(given)
        if (own := _own_tokenizer(folder)) is not None:
            differs = check_same_tokens(own, found, str(folder))
            if differs is not None:
                print_line(differs)
    elif (own := _own_tokenizer(folder)) is not None:
        found = own
    else:
        return None
    for line in check_vocabulary(found, vocab_size):
        print_line(line)
    return found


def _own_tokenizer(folder: Path) -> Tokenizer | None:
    """Returns the tokenizer in a Hugging Face folder, or None if it has none.

    Raises UserError if it cannot be read.
    """
    if not (folder / TOKENIZER).is_file():
        return None
    read = FileTokenizer.read(str(folder), folder / TOKENIZER, "from")
    return ByteTokenizer() if read.is_of_bytes() else read
