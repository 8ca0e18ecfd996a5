"""A tokenizer.json, run by Hugging Face's `tokenizers`, with the roles that the files beside it
give to its tokens."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.data.text.special_tokens import (
    CHAT_TEMPLATE,
    GENERATION,
    LARGEST_BESIDE,
    SPECIAL_MAP,
    TOKENIZER_CONFIG,
    end_of_text,
    ends_of_generation,
    read_json,
)
from parallel3d.errors import UserError
from parallel3d.files.durable import flush_folder, write_durably
from parallel3d.files.reading import plain, read_bounded

TOKENIZER = "tokenizer.json"
LARGEST = 1 << 30  # bytes
FEW = 1 << 16  # the most tokens that 16 bits tell apart
PASSED_ON = (KeyboardInterrupt, SystemExit, MemoryError)  # that are no fault of a text or tokenizer


class Unencodable(UserError):
    """The library breaks off on a text. `why`: what it says, in one line."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)  # all that it is made of, to go from process to process
        self.name, self.why = name, why

    def __str__(self) -> str:
        return (
            f"the tokenizer {show(self.name)} cannot encode a text ({self.why}): mend or remove "
            "the text, or choose another tokenizer"
        )


class Placed(NamedTuple):
    """Tokens of a text, and the characters [begin, end) that each stands for; all int64 (n,)."""

    tokens: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


class FileTokenizer:
    """A tokenizer.json. `digest` is of that file and of the token that ends a text.

    Attributes:
        name: what the user gave. vocab_size: the largest token + 1. eot: the token that ends a
            text, `eot_text` as it is spelled. begin: the tokens that a prompt begins with: what
            the tokenizer itself puts before a text, such as Llama's, else `eot`. ends: the tokens
            that end what a model writes, `eot` and those of a generation_config.json. special:
            the special tokens by their text.
        folder: where the files beside it lie; None if it came without.
    """

    def __init__(self, name: str, content: bytes, folder: Path | None, key: str) -> None:
        """Raises UserError for what is no tokenizer, and for one without an end of text."""
        self.name, self.folder, self._content = name, folder, content
        try:
            inner = _opened(content)
            vocabulary: dict[str, int] = inner.get_vocab(with_added_tokens=True)
            added = inner.get_added_tokens_decoder()
            prefix = [] if inner.post_processor is None else _prefix(inner)
            # All that it would do from here on is to cut blanks off the places of tokens.
            inner.post_processor = None
        except BaseException as error:  # a panic of the library is no Exception
            if isinstance(error, PASSED_ON):
                raise
            raise UserError(f"{key}={show(name)} is no {TOKENIZER} ({_words(error)})") from None
        if not vocabulary:
            raise UserError(f"{key}={show(name)} has no tokens")
        special = {token.content: number for number, token in added.items() if token.special}
        end = end_of_text(folder, vocabulary, special, f"{key}={show(name)}")
        if end is None:
            raise UserError(
                f"{key}={show(name)} does not tell which token ends a text: write "
                f'{{"eos_token": "…"}} into a {TOKENIZER_CONFIG} beside a {TOKENIZER}'
            )
        # What a document spells out is text: it must not be able to end itself, or to begin a turn.
        inner.encode_special_tokens = True
        self._inner = inner
        self._twin: Any = None  # a copy, which knows `_stand_ins`
        self._stand_ins: dict[str, str] = {}
        self.vocab_size = max(vocabulary.values()) + 1
        self.dtype = np.dtype("<u2" if self.vocab_size <= FEW else "<u4")
        self.eot, self.eot_text = vocabulary[end], end
        self.special: dict[str, int] = special
        self.begin: list[int] = prefix or [self.eot]
        more = ends_of_generation(folder, f"{key}={show(name)}") if folder is not None else []
        self.ends = frozenset((self.eot, *(n for n in more if n < self.vocab_size)))
        facts = json.dumps([hashlib.blake2b(content).hexdigest(), self.eot]).encode()
        self.digest = hashlib.blake2b(facts, digest_size=16).hexdigest()

    @classmethod
    def read(cls, name: str, path: Path, key: str) -> FileTokenizer:
        """The tokenizer of a file; files beside it tell of it if it is called tokenizer.json."""
        try:
            content = read_bounded(path, LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{key}={show(name)} holds no {TOKENIZER}: give a folder that does, or byte"
            ) from None
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"{key}={show(name)} cannot be read ({plain(str(why))})") from None
        return cls(name, content, path.parent if path.name == TOKENIZER else None, key)

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        """The tokens of a document, without an end-of-text; broken UTF-8 is read as U+FFFD."""
        return self.encode_all([text.decode("utf-8", "replace")])[0]

    def encode_prompt(self, text: bytes) -> list[int]:
        """The tokens of what is typed to go on from; special ones may be spelled out in it."""
        return self.encode_marked(text.decode("utf-8", "replace"))

    def encode_marked(self, text: str) -> list[int]:
        """The tokens of a text whose special tokens are meant."""
        return self.place(text).tokens.tolist()

    def place(self, text: str) -> Placed:
        """The same, and what each of them stands for. Raises Unencodable."""
        self._inner.encode_special_tokens = False
        try:
            return self._placed(self._inner, text)
        finally:
            self._inner.encode_special_tokens = True

    def place_spelled(self, text: str, stand_ins: Mapping[str, str]) -> Placed:
        """The same of a text in which all special tokens are spelled out, but those that are meant
        are written as one character each.

        Args:
            stand_ins: special token → the character, which a new copy of the tokenizer learns.
        """
        if self._stand_ins.items() - stand_ins.items() or self._twin is None:
            self._twin, self._stand_ins = _opened(self._content), {}
            self._twin.post_processor, self._twin.encode_special_tokens = None, True
        new = [token for token in stand_ins if token not in self._stand_ins]
        if new:
            self._twin.add_tokens([self._like(token, stand_ins[token]) for token in new])
            self._stand_ins |= {token: stand_ins[token] for token in new}
        found = self._placed(self._twin, text)
        for token, character in self._stand_ins.items():
            found.tokens[found.tokens == self._twin.token_to_id(character)] = self.special[token]
        return found

    def _like(self, token: str, character: str) -> Any:
        """An added token that is matched as `token` is, but as text of its own."""
        from tokenizers import AddedToken

        added = self._inner.get_added_tokens_decoder()[self.special[token]]
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        return AddedToken(
            character, special=False, **{flag: getattr(added, flag) for flag in flags}
        )

    def _placed(self, inner: Any, text: str) -> Placed:
        with self._breaks_off():
            made = inner.encode(text, add_special_tokens=False)
        places = np.array(made.offsets, np.int64).reshape(-1, 2)
        begins, ends = places[:, 0], places[:, 1]
        backwards = (np.diff(begins) < 0).any() or (begins > ends).any()
        if places.size and (backwards or not 0 < int(ends.max()) <= len(text)):
            raise UserError(
                f"the tokenizer {show(self.name)} does not tell which characters its tokens stand "
                "for, and so not which of them are learned: choose another tokenizer"
            )
        return Placed(np.array(made.ids, np.int64), begins, ends)

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        """The tokens of each of several documents, on as many cores as the library takes.

        Raises Unencodable; which of them it is, `encode` of each tells.
        """
        with self._breaks_off():
            made = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=self.dtype) for each in made]

    @contextmanager
    def _breaks_off(self) -> Iterator[None]:
        """Turns what the library raises inside into Unencodable."""
        try:
            yield
        except BaseException as error:  # a panic of the library is no Exception
            if isinstance(error, PASSED_ON):
                raise
            raise Unencodable(self.name, _words(error)) from None

    def decode(self, tokens: npt.NDArray[np.integer] | Sequence[int]) -> str:
        """The text of tokens, to read; special ones and what is no token are left out."""
        known = [int(token) for token in tokens if 0 <= token < self.vocab_size]
        return self._inner.decode(known, skip_special_tokens=True)

    def files(self) -> dict[str, bytes]:
        """File name → content of a folder that makes this tokenizer again, for transformers too."""
        found = {TOKENIZER: self._content}
        folder, key = self.folder, f"tokenizer {self.name}"
        config: dict[str, Any] = read_json(folder, TOKENIZER_CONFIG, key) if folder else {}
        for name in (SPECIAL_MAP, GENERATION, CHAT_TEMPLATE):
            if folder is not None and (folder / name).is_file():
                found[name] = read_bounded(folder / name, LARGEST_BESIDE)
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        if not config.get("eos_token"):
            config["eos_token"] = self.eot_text
        text = json.dumps(config, indent=2, ensure_ascii=False)
        return found | {TOKENIZER_CONFIG: f"{text}\n".encode()}

    def save(self, folder: Path) -> None:
        """Makes `folder` with `files`, whole or not at all; one that is there stays. OSError."""
        if folder.is_dir():
            return
        partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
        partial.mkdir(parents=True)
        try:
            for name, content in self.files().items():
                write_durably(partial / name, content)
            flush_folder(partial)
            os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        flush_folder(folder.parent)


def _opened(content: bytes) -> Any:
    """The library's tokenizer of a tokenizer.json, for texts of any length."""
    from tokenizers import Tokenizer

    inner = Tokenizer.from_buffer(content)
    inner.no_truncation()
    inner.no_padding()
    return inner


def _words(error: BaseException) -> str:
    return plain(" ".join(str(error).split()) or type(error).__name__)


def _prefix(inner: Any) -> list[int]:
    """The tokens that a tokenizer puts before every text; [] if it puts none."""
    bare = inner.encode("a", add_special_tokens=False).ids
    whole = inner.encode("a", add_special_tokens=True).ids
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at]
    return []
