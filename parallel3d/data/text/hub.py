"""A tokenizer by its name on Hugging Face's hub, where there is a network."""

from __future__ import annotations

from pathlib import Path

from parallel3d.config.fields import show
from parallel3d.data.text.file_tokenizer import TOKENIZER, FileTokenizer
from parallel3d.data.text.special_tokens import BESIDE
from parallel3d.errors import UserError

SECONDS = 10  # that the hub may take to say that it is there


def from_hub(name: str, key: str) -> FileTokenizer:
    """The tokenizer `organisation/model` of the hub, or of its cache here. Raises UserError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    found: Path | None = None
    for file in (TOKENIZER, *BESIDE):
        try:
            path = hf_hub_download(name, file, etag_timeout=SECONDS)
        except EntryNotFoundError:
            continue
        except Exception as error:
            if file != TOKENIZER:  # a cache that was filled by hand may lack what is not needed
                continue
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"{key}={show(name)} is no file or folder here, and the hub has not given it "
                f"({why}): give a tokenizer.json, or a folder that holds one"
            ) from None
        found = Path(path) if file == TOKENIZER else found
    if found is None:
        raise UserError(f"{key}={show(name)}: the hub has no {TOKENIZER} of it, give one that has")
    return FileTokenizer.read(name, found, key)
