"""Tokenizers: bytes, in which every file is text, and those of Hugging Face's `tokenizers`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.data.text.file_tokenizer import TOKENIZER, FileTokenizer
from parallel3d.data.text.hub import from_hub
from parallel3d.errors import UserError, nearest

BYTE = "byte"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class Tokenizer(Protocol):
    """What text is cut into.

    name: "byte", or what the user gave. vocab_size: the largest token + 1. eot: the token that
    ends a document; `ends`: those that end what a model writes. begin: what a prompt begins with.
    digest: hex, equal for tokenizers that cut alike; "byte" for bytes.
    """

    name: str
    vocab_size: int
    eot: int
    ends: frozenset[int]
    begin: list[int]
    digest: str

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        """The tokens of a document, without an end-of-text; a special token that is spelled out in
        it is text like all other."""
        ...

    def encode_prompt(self, text: bytes) -> list[int]:
        """The tokens of what is typed to go on from; a special token may be spelled out in it."""
        ...

    def decode(self, tokens: npt.NDArray[np.integer]) -> str:
        """The text of tokens, to read; special ones are left out."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Token i < 256 is the byte i; token 256 ends a document."""

    name: str = BYTE
    vocab_size: int = 257
    eot: int = 256
    digest: str = BYTE

    @property
    def ends(self) -> frozenset[int]:
        """The end of a text alone."""
        return frozenset((self.eot,))

    @property
    def begin(self) -> list[int]:
        """A text begins behind the end of the one before it, as in training."""
        return [self.eot]

    def encode(self, text: bytes) -> npt.NDArray[np.uint16]:
        """The tokens of `text`, shape (len(text),), without an end-of-text token."""
        return np.frombuffer(text, dtype=np.uint8).astype("<u2")

    def encode_prompt(self, text: bytes) -> list[int]:
        """The same."""
        return list(text)

    def decode(self, tokens: npt.NDArray[np.integer]) -> str:
        """The text of `tokens`, to read; end-of-text is left out, broken UTF-8 becomes U+FFFD."""
        tokens = np.asarray(tokens)
        return tokens[tokens < self.eot].astype(np.uint8).tobytes().decode("utf-8", "replace")


def open_tokenizer(name: str, key: str = "data.tokenizer") -> ByteTokenizer | FileTokenizer:
    """The tokenizer "byte", a tokenizer.json, a folder that holds one, or a name on the hub.

    `key` is what the user typed it for. Raises UserError.
    """
    path = Path(os.path.expanduser(name))
    if name == BYTE:
        return ByteTokenizer()
    if path.is_dir():
        return FileTokenizer.read(name, path / TOKENIZER, key)
    if os.path.lexists(path):
        return FileTokenizer.read(name, path, key)
    if HUB_NAME.fullmatch(name) and path.suffix != ".json" and not path.parent.is_dir():
        return from_hub(name, key)
    raise UserError(f"{key}={show(name)} is not there: it must be {HOW}{_near(path)}")


HOW = "byte, a tokenizer.json or a folder that holds one"


def _near(path: Path) -> str:
    try:
        there = os.listdir(path.parent)
    except OSError:
        there = []
    close = nearest(path.name, [BYTE, *there])
    shown = BYTE if close == BYTE else close and str(path.parent / close)
    return f"; the nearest is {shown}" if close else f"; the nearest is {BYTE}"
