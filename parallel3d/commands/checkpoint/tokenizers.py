"""The tokenizer of a run that goes to a Hugging Face folder, or comes from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallel3d.checkpoint.manifest import Manifest
from parallel3d.config.schema import Config, DataConfig
from parallel3d.data.corpus import check_vocabulary
from parallel3d.data.text.byte_files import are_bytes, byte_files
from parallel3d.data.text.file_tokenizer import TOKENIZER, FileTokenizer
from parallel3d.data.text.run_tokenizer import tokenizer_of
from parallel3d.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer

BYTES = "its tokenizer is bytes, of which 256 ends a text"


def tokenizer_to_export(manifest: Manifest, run_dir: Path) -> Tokenizer:
    """The tokenizer of a run with this checkpoint. Raises UserError if it is gone."""
    said: Any = manifest.config.get("data", {}).get("tokenizer")
    return tokenizer_of(DataConfig(tokenizer=said if isinstance(said, str) else None), run_dir)


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
