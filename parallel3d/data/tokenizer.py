"""The byte tokenizer: every file is text in it, nothing is trained and nothing is unknown."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ByteTokenizer:
    """Token i < 256 is the byte i; token 256 ends a document."""

    name: str = "byte"
    vocab_size: int = 257
    eot: int = 256

    def encode(self, text: bytes) -> npt.NDArray[np.uint16]:
        """The tokens of `text`, shape (len(text),), without an end-of-text token."""
        return np.frombuffer(text, dtype=np.uint8).astype("<u2")

    def decode(self, tokens: npt.NDArray[np.integer]) -> str:
        """The text of `tokens`, to read; end-of-text is left out, broken UTF-8 becomes U+FFFD."""
        return tokens[tokens != self.eot].astype(np.uint8).tobytes().decode("utf-8", "replace")
