"""What stands beside a corpus: `<prefix>.json` and the tokenizer's files, `<prefix>.tokenizer/`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from parallel3d.errors import UserError
from parallel3d.files.reading import parse_json, plain, read_bounded

LARGEST = 1 << 20  # bytes


class CorpusFacts(NamedTuple):
    """tokenizer: its digest; "byte" for bytes. tokenizer_file: beside the corpus, None for bytes.
    digest: blake2b-16 of the .bin."""

    tokenizer: str
    tokenizer_file: str | None
    vocab_size: int
    eot: int
    documents: int
    tokens: int
    digest: str


def _read(path: str) -> bytes:
    return read_bounded(Path(path), LARGEST)


def facts_beside(
    prefix: str | os.PathLike[str], read: Callable[[str], bytes] = _read
) -> CorpusFacts | None:
    """What `<prefix>.json` says; None if there is none: the pair was made elsewhere. UserError.

    `read`: a file's content by its name, an OSError or a ValueError if it cannot be had.
    """
    path = f"{os.fspath(prefix)}.json"
    try:
        content = parse_json(read(path))
        facts = CorpusFacts(**{name: content[name] for name in CorpusFacts._fields})
        texts = (facts.tokenizer, facts.tokenizer_file or "", facts.digest)
        numbers = (facts.vocab_size, facts.eot, facts.documents, facts.tokens)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("it has no digests")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("it has no counts")
        beside = Path(facts.tokenizer_file or "")
        if beside.is_absolute() or ".." in beside.parts:
            raise ValueError("its tokenizer does not lie beside it")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({plain(str(error))}): tokenize the corpus again"
        ) from None
    return facts


def tokenizer_beside(prefix: str | os.PathLike[str], facts: CorpusFacts) -> str:
    """What to give `open_tokenizer` for the tokenizer of the corpus at `prefix`."""
    if facts.tokenizer_file is None:
        return "byte"
    return str(Path(os.fspath(prefix)).parent / facts.tokenizer_file)
