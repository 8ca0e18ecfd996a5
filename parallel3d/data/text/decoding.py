"""Tokens to text one by one: nothing is shown of a character before all of it is there."""

from __future__ import annotations

import codecs
from typing import Protocol

from parallel3d.data.text.file_tokenizer import FileTokenizer
from parallel3d.data.tokenizer import Tokenizer

CONTEXT = 6  # tokens before a new one that may change how it is spelled: blanks, joined words
HELD = 32  # tokens that may wait for the end of a character; more are no character


class Decoding(Protocol):
    """A prompt, then tokens, as text."""

    def begin(self, prompt: bytes) -> str:
        """The prompt, as far as it is whole."""
        ...

    def add(self, token: int) -> str:
        """What has become whole by this token, perhaps nothing."""
        ...

    def end(self) -> str:
        """What is left; what is no character is U+FFFD."""
        ...


def decoding_of(tokenizer: Tokenizer) -> Decoding:
    """The text of a prompt and the tokens behind it."""
    return FileDecoding(tokenizer) if isinstance(tokenizer, FileTokenizer) else ByteDecoding()


class ByteDecoding:
    """Bytes are tokens: a prompt may end inside a character that the tokens complete."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def begin(self, prompt: bytes) -> str:
        return self._decoder.decode(prompt)

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class FileDecoding:
    """Pieces of words and of characters; how one is spelled may depend on those before it."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # tokens whose text is out

    def begin(self, prompt: bytes) -> str:
        self._tokens = list(self._tokenizer.encode_prompt(prompt))
        self._shown = len(self._tokens)
        return prompt.decode("utf-8", "replace")

    def add(self, token: int) -> str:
        self._tokens.append(token)
        text = self._new()
        if text.endswith("\ufffd") and len(self._tokens) - self._shown < HELD:
            return ""
        self._shown = len(self._tokens)
        return text

    def end(self) -> str:
        text, self._shown = self._new(), len(self._tokens)
        return text

    def _new(self) -> str:
        """The text of what is not out yet, spelled as it is behind what is."""
        first = max(0, self._shown - CONTEXT)
        before = self._tokenizer.decode(self._tokens[first : self._shown])
        return self._tokenizer.decode(self._tokens[first:])[len(before) :]
