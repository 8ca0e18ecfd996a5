"""The tokenizer of a run that goes to a Hugging Face folder, or comes from one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.hf.config import TOKENS, kept_keys
from parallel3d.checkpoint.manifest import Manifest
from parallel3d.config.schema import Config, DataConfig
from parallel3d.data.corpus import check_vocabulary
from parallel3d.data.text.byte_files import are_bytes, byte_files
from parallel3d.data.text.file_tokenizer import TOKENIZER, FileTokenizer
from parallel3d.data.text.run_tokenizer import tokenizer_of
from parallel3d.data.text.special_tokens import read_json
from parallel3d.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from parallel3d.files.durable import write_durably

BYTES = "its tokenizer is bytes, of which 256 ends a text"
NO_TOKENIZER = "without a tokenizer, as the folder that it was imported from"
# In the folder of an imported run: what `kept_keys` found, and which tokenizer that is about.
BESIDE, OWNER = "huggingface.json", "tokenizer"


def tokenizer_to_export(manifest: Manifest, run_dir: Path) -> Tokenizer | None:
    """The tokenizer of a run with this checkpoint; None for a model that was imported without one,
    of which nobody has named one since. Raises UserError if it is gone."""
    said: Any = manifest.config.get("data", {}).get("tokenizer")
    said = said if isinstance(said, str) else None
    found = tokenizer_of(DataConfig(tokenizer=said), run_dir)
    kept = _read_beside(run_dir)
    unknown = said is None and isinstance(found, ByteTokenizer) and OWNER in kept
    return None if unknown and kept[OWNER] is None else found


def keep_beside(
    run_dir: Path, kept: Mapping[str, Any], tokenizer: Tokenizer | None, *, own: bool
) -> None:
    """Writes what `kept_keys` found into the run's folder; `own`: the folder's own tokenizer, or
    none, is the run's, and not another that was named. Raises OSError."""
    about = {OWNER: None if tokenizer is None else tokenizer.digest} if own else {}
    write_durably(run_dir / BESIDE, f"{json.dumps({**kept, **about}, indent=2)}\n".encode())


def kept_beside(run_dir: Path, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What `keep_beside` wrote; special tokens only of this tokenizer. Raises UserError."""
    content = _read_beside(run_dir)
    kept = kept_keys(content)
    same = OWNER in content and content[OWNER] == (None if tokenizer is None else tokenizer.digest)
    return {key: value for key, value in kept.items() if same or key not in TOKENS}


def _read_beside(run_dir: Path) -> dict[str, Any]:
    """{} for a run that was not imported."""
    return read_json(run_dir, BESIDE, f"run={run_dir.name}")


def files_beside(tokenizer: Tokenizer) -> dict[str, bytes]:
    """What makes this tokenizer again, for transformers too: file name → content."""
    return tokenizer.files() if isinstance(tokenizer, FileTokenizer) else byte_files()


def tokenizer_to_import(folder: Path, config: Config) -> Tokenizer | None:
    """The one that the folder has, or that `config` names in its place; None if there is none.

    Raises UserError for one that cannot be used, or that has more tokens than the model.
    """
    found: Tokenizer
    if config.data.tokenizer is not None:
        found = open_tokenizer(config.data.tokenizer)
    elif (folder / TOKENIZER).is_file():
        read = FileTokenizer.read(str(folder), folder / TOKENIZER, "from")
        found = ByteTokenizer() if are_bytes(read.files()[TOKENIZER]) else read
    else:
        return None
    check_vocabulary(found.vocab_size, config.model.vocab_size, found.name)
    return found


def kept_in_run(tokenizer: Tokenizer | None, folder: Path) -> str:
    """What is said of an imported tokenizer."""
    if isinstance(tokenizer, FileTokenizer):
        return f"its tokenizer ({tokenizer.vocab_size:,} tokens) is the run's own"
    if tokenizer is not None:
        return "its tokens are bytes"
    return (
        f"{folder} has no {TOKENIZER}: the run's tokens are bytes, unless data.tokenizer=… names "
        "the tokenizer of the model"
    )
