"""Tokenizers: bytes, and tokenizer.json files run by Hugging Face's `tokenizers`.

A tokenizer.json defines tokens without roles; the files next to it name the end of a text, in three
formats.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.errors import UserError, nearest
from parallel3d.files import new_folder, parse_json, plain, read_bounded, write_durably

if TYPE_CHECKING:
    from parallel3d.config.schema import DataConfig


TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
GENERATION, CONFIG = "generation_config.json", "config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# Of processors, and a folder of templates by name.
PROCESSORS_TEMPLATE, MORE_TEMPLATES = "chat_template.json", "additional_chat_templates"
BESIDE = (
    *(TOKENIZER_CONFIG, SPECIAL_MAP, GENERATION, CHAT_TEMPLATE, PROCESSORS_TEMPLATE),
    f"{MORE_TEMPLATES}/*.jinja",
)
LARGEST_BESIDE = 64 << 20  # bytes; configurations that list every added token are long
# End-of-text tokens of widespread model families, for tokenizers without configuration.
USUAL_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>"),
    "<｜end▁of▁sentence｜>",
)


BYTE = "byte"
HOW = "byte, a tokenizer.json or a folder that holds one"
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # of a byte that no other token holds
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class ByteTokenizer:
    """Token i < 256 is the byte i; token 256 ends a document. Attributes as `FileTokenizer`'s."""

    def __init__(self) -> None:
        self.name = self.digest = BYTE
        self.vocab_size, self.eot = 257, 256
        self.ends = frozenset((self.eot,))
        # In training, a text follows the end of another; so it is in the files of an export.
        self.begin = self.prefix = [self.eot]

    def sizes(self) -> npt.NDArray[np.int64]:
        """Returns the bytes of text that each token stands for, (n,)."""
        return (np.arange(self.vocab_size) < self.eot).astype(np.int64)

    def encode(self, text: bytes) -> npt.NDArray[np.uint16]:
        """Returns the tokens of `text`, shape (len(text),), without an end-of-text token."""
        return np.frombuffer(text, dtype=np.uint8).astype("<u2")

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        """Returns the tokens of several documents."""
        return [self.encode(text.encode()) for text in texts]

    def encode_prompt(self, text: bytes) -> list[int]:
        """Returns the tokens of a prompt."""
        return list(text)

    def decode(self, tokens: npt.NDArray[np.integer] | Sequence[int]) -> str:
        """Returns readable text without end-of-text; invalid UTF-8 becomes U+FFFD."""
        tokens = np.asarray(tokens)
        return tokens[tokens < self.eot].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def files(self) -> dict[str, bytes]:
        """Returns file name → content of a folder for this tokenizer, for transformers."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        return {
            TOKENIZER: byte_tokenizer(),
            TOKENIZER_CONFIG: f"{json.dumps(config, indent=2)}\n".encode(),
        }


def open_tokenizer(name: str, key: str = "data.tokenizer") -> ByteTokenizer | FileTokenizer:
    """Opens the tokenizer "byte", a tokenizer.json, a folder with one, or one on the hub.

    `key` is the user's name for it in errors. Raises UserError.
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
    near = nearest_path(path) or BYTE
    raise UserError(f"{key}={show(name)} is not there: it must be {HOW}; the nearest is {near}")


def nearest_path(path: str | Path) -> str | None:
    """Returns the path in the same folder whose name is most like that of `path`; None if no name
    is, or the folder cannot be listed."""
    folder, name = os.path.split(path)
    try:
        close = nearest(name, os.listdir(folder or "."))
    except OSError:
        return None
    return close and os.path.join(folder, close)


# Tokenizers of tokenizer.json files

TOKENIZER = "tokenizer.json"
LARGEST = 1 << 30  # bytes
FEW = 1 << 16  # tokens that 16 bits can hold
PASSED_ON = (KeyboardInterrupt, SystemExit, MemoryError)  # not the fault of text or tokenizer


class Unencodable(UserError):
    """A text that the library cannot encode. `why`: the library's message in one line."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)  # all arguments, so that pickling works
        self.name, self.why = name, why

    def __str__(self) -> str:
        return (
            f"the tokenizer {show(self.name)} cannot encode a text ({self.why}): mend or remove "
            "the text, or choose another tokenizer"
        )


class Placed(NamedTuple):
    """Tokens of a text with their characters [begin, end); all int64 (n,)."""

    tokens: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


class FileTokenizer:
    """A tokenizer.json with the roles of its tokens.

    Attributes:
        name: as given by the user. vocab_size: the largest token + 1. eot: the token that ends a
            text, spelled `eot_text`. prefix: the tokens that the tokenizer puts before every
            text, as Llama's does. begin: the tokens before a prompt: prefix, else `eot`. ends: the
            tokens that end a generation, `eot` and those of generation_config.json. special: text →
            special token.
        folder: with configuration files, `beside` their contents by name; None for a tokenizer
            without one.
        digest: of the file and the end-of-text token, equal for tokenizers that encode alike.
    """

    def __init__(self, name: str, content: bytes, folder: Path | None, key: str) -> None:
        """Raises UserError for an invalid tokenizer, and for one without an end of text."""
        self.name, self.folder, self._content = name, folder, content
        try:
            inner = _opened(content)
            vocabulary: dict[str, int] = inner.get_vocab(with_added_tokens=True)
            added = inner.get_added_tokens_decoder()
            prefix = [] if inner.post_processor is None else _prefix(inner)
            # From here on it would only trim blanks from the places of tokens.
            inner.post_processor = None
        except BaseException as error:  # the library's panics are not Exceptions
            if isinstance(error, PASSED_ON):
                raise
            raise UserError(f"{key}={show(name)} is no {TOKENIZER} ({_words(error)})") from None
        if not vocabulary:
            raise UserError(f"{key}={show(name)} has no tokens")
        self.special: dict[str, int] = {
            token.content: number for number, token in added.items() if token.special
        }
        where = f"{key}={show(name)}"
        names = (TOKENIZER_CONFIG, SPECIAL_MAP, GENERATION, CONFIG) if folder is not None else ()
        self.beside = {file: read_json(folder, file, where) for file in names if folder}
        end = self._end_of_text(vocabulary, where)
        if end is None:
            raise UserError(
                f"{key}={show(name)} does not tell which token ends a text: write "
                f'{{"eos_token": "…"}} into a {TOKENIZER_CONFIG} beside a {TOKENIZER}'
            )
        # Special tokens spelled out in a document are text: they must not end it or begin a turn.
        inner.encode_special_tokens = True
        self._inner = inner
        self._twin: Any = None  # a copy that knows `_stand_ins`
        self._stand_ins: dict[str, str] = {}
        self.vocab_size = max(vocabulary.values()) + 1
        self.dtype = np.dtype("<u2" if self.vocab_size <= FEW else "<u4")
        self.eot, self.eot_text = vocabulary[end], end
        self.prefix: list[int] = prefix
        self.begin: list[int] = prefix or [self.eot]
        more = self._end_tokens(GENERATION)
        self.ends = frozenset((self.eot, *(n for n in more if 0 <= n < self.vocab_size)))
        facts = json.dumps([hashlib.blake2b(content).hexdigest(), self.eot]).encode()
        self.digest = hashlib.blake2b(facts, digest_size=16).hexdigest()

    @classmethod
    def read(cls, name: str, path: Path, key: str) -> FileTokenizer:
        """Reads a file; only a tokenizer.json has configuration files next to it."""
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

    def role(self, name: str) -> str | None:
        """Returns the token of a role such as eos_token, by the files of the folder."""
        for file in (TOKENIZER_CONFIG, SPECIAL_MAP):
            value = self.beside.get(file, {}).get(name)
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str) and token:
                return token
        return None

    def _end_of_text(self, vocabulary: Mapping[str, int], where: str) -> str | None:
        """Returns the token that ends a text; None if it is unknown. Raises UserError for one that
        does not exist."""
        named = self.role("eos_token")
        if named is not None and named not in vocabulary:
            raise UserError(
                f"{where}: {self.folder} calls {plain(named)} the end of a text, which is no token "
                f"of its {TOKENIZER}"
            )
        numbers = {number: token for token, number in vocabulary.items()}
        told = (numbers.get(n) for file in (GENERATION, CONFIG) for n in self._end_tokens(file)[:1])
        usual = (token for token in USUAL_ENDS if token in self.special)
        alone = list(self.special) if len(self.special) == 1 else []
        return next((end for end in (named, *told, *usual, *alone) if end is not None), None)

    def _end_tokens(self, file: str) -> list[int]:
        """Returns the tokens that end a generation, by a file beside the tokenizer."""
        found = self.beside.get(file, {}).get("eos_token_id")
        found = found if isinstance(found, list) else [found]
        return [number for number in found if type(number) is int]

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        """Returns a document's tokens, without an end-of-text; invalid UTF-8 becomes U+FFFD."""
        return self.encode_all([text.decode("utf-8", "replace")])[0]

    def encode_prompt(self, text: bytes) -> list[int]:
        """Returns a prompt's tokens; special tokens may be spelled out in it."""
        return self.place(text.decode("utf-8", "replace")).tokens.tolist()

    def place(self, text: str) -> Placed:
        """Returns the tokens, with places, of a text in which special tokens are meant as such.
        Raises Unencodable."""
        self._inner.encode_special_tokens = False
        try:
            return self._placed(self._inner, text)
        finally:
            self._inner.encode_special_tokens = True

    def place_spelled(self, text: str, stand_ins: Mapping[str, str]) -> Placed:
        """Returns tokens of a text in which special tokens are plain text, except stand-ins.

        Args:
            stand_ins: special token → the character that stands for it in `text`.
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
        """Returns an added token that is matched as `token` is, with another text."""
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
        """Returns the tokens of several documents, encoded on several cores. Raises Unencodable."""
        with self._breaks_off():
            made = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=self.dtype) for each in made]

    @contextmanager
    def _breaks_off(self) -> Iterator[None]:
        """Turns the library's errors into Unencodable."""
        try:
            yield
        except BaseException as error:  # the library's panics are not Exceptions
            if isinstance(error, PASSED_ON):
                raise
            raise Unencodable(self.name, _words(error)) from None

    def decode(self, tokens: npt.NDArray[np.integer] | Sequence[int]) -> str:
        """Returns readable text, without special and unknown tokens."""
        known = [int(token) for token in tokens if 0 <= token < self.vocab_size]
        return self._inner.decode(known, skip_special_tokens=True)

    def sizes(self) -> npt.NDArray[np.int64]:
        """Returns the bytes that each token adds to the text before it; special ones none; (n,)."""
        spelled = [self._inner.id_to_token(token) or "" for token in range(self.vocab_size)]
        decoder = json.loads(self._content).get("decoder") or {}
        kinds = {part.get("type") for part in (decoder.get("decoders") or [decoder])}
        if "ByteLevel" in kinds:  # a letter, one of the first 324 of Unicode, is a byte
            is_letters = [max(map(ord, text), default=0) < 324 for text in spelled]
            found = [
                len(text if letters else text.encode())
                for text, letters in zip(spelled, is_letters, strict=True)
            ]
        else:  # a word may be joined to the one before it, so it is decoded behind one
            word = int(self.encode(b"a")[-1])
            pairs = [[word, token] for token in range(self.vocab_size)]
            texts = self._inner.decode_batch(pairs, skip_special_tokens=True)
            first = len(self.decode([word]).encode())
            found = [len(text.encode()) - first for text in texts]
        of_bytes = [BYTE_TOKEN.fullmatch(text) is not None for text in spelled]
        sizes = np.where(of_bytes, 1, found)
        sizes[[*self.special.values(), self.eot]] = 0
        return sizes.astype(np.int64)

    def is_of_bytes(self) -> bool:
        """Returns whether its tokens are those of `byte_tokenizer`."""
        ours, own = json.loads(byte_tokenizer()), parse_json(self._content)
        return isinstance(own, dict) and all(own.get(key) == ours[key] for key in DECIDES)

    def files(self) -> dict[str, bytes]:
        """Returns file name → content of a folder for this tokenizer, also for transformers."""
        found = {TOKENIZER: self._content}
        folder, config = self.folder, dict(self.beside.get(TOKENIZER_CONFIG, {}))
        own = [] if folder is None else template_files(folder).values()
        for name in (SPECIAL_MAP, GENERATION, PROCESSORS_TEMPLATE, *own):
            if folder is not None and (folder / name).is_file():
                found[name] = read_bounded(folder / name, LARGEST_BESIDE)
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        if not config.get("eos_token"):
            config["eos_token"] = self.eot_text
        text = json.dumps(config, indent=2, ensure_ascii=False)
        return found | {TOKENIZER_CONFIG: f"{text}\n".encode()}

    def save(self, folder: Path) -> None:
        """Writes `files` to `folder`, whole or not at all, unless it exists. Raises OSError."""
        if folder.is_dir():
            return
        with new_folder(folder) as partial:
            for name, content in self.files().items():
                (partial / name).parent.mkdir(exist_ok=True)
                write_durably(partial / name, content)


def _opened(content: bytes) -> Any:
    """Returns the library's tokenizer, without truncation and padding."""
    from tokenizers import Tokenizer

    inner = Tokenizer.from_buffer(content)
    inner.no_truncation()
    inner.no_padding()
    return inner


def _words(error: BaseException) -> str:
    return plain(" ".join(str(error).split()) or type(error).__name__)


def _prefix(inner: Any) -> list[int]:
    """Returns the tokens that a tokenizer puts before every text."""
    bare = inner.encode("a", add_special_tokens=False).ids
    whole = inner.encode("a", add_special_tokens=True).ids
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at]
    return []


Tokenizer = ByteTokenizer | FileTokenizer


# The tokens with a role, by the files next to a tokenizer.json


def read_json(folder: Path, name: str, key: str) -> dict[str, Any]:
    """Reads an object from a tokenizer's folder; {} without the file. Raises UserError."""
    try:
        content = parse_json(read_bounded(folder / name, LARGEST_BESIDE))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {folder / name} cannot be read ({plain(str(error))})") from None
    if not isinstance(content, dict):
        raise UserError(f"{key}: {folder / name} must hold an object, not {type(content).__name__}")
    return content


def template_files(folder: Path) -> dict[str, str]:
    """Returns the files of a tokenizer's folder that are chat templates, by their names."""
    found = {"default": CHAT_TEMPLATE} if (folder / CHAT_TEMPLATE).is_file() else {}
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return found | {path.stem: f"{MORE_TEMPLATES}/{path.name}" for path in more}


# Tokenizers on the Hugging Face hub


SECONDS = 10  # timeout of the hub's first answer


def from_hub(name: str, key: str) -> FileTokenizer:
    """Opens the tokenizer `organisation/model` of the hub or its cache. Raises UserError."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=[TOKENIZER, *BESIDE], etag_timeout=SECONDS)
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{key}={show(name)} is no file or folder here, and the hub has not given it "
            f"({why}): give a tokenizer.json, or a folder that holds one"
        ) from None
    return FileTokenizer.read(name, Path(folder, TOKENIZER), key)


# A streaming decoder


CONTEXT = 6  # tokens before a new one that may change its spelling: blanks, joined words
HELD = 32  # tokens that may wait for a character to complete; more are an invalid character


class Decoding:
    """Decodes a prompt and what follows it, token by token, once characters are complete; the
    spelling of a token may depend on the tokens before."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # tokens whose text was returned

    def begin(self, prompt: bytes) -> str:
        """Returns the prompt; one of bytes may end inside a character that the tokens complete."""
        tokens = self._tokenizer.encode_prompt(prompt)
        if isinstance(self._tokenizer, ByteTokenizer):
            return "".join(map(self.add, tokens))
        self._tokens, self._shown = tokens, len(tokens)
        return prompt.decode("utf-8", "replace")

    def add(self, token: int) -> str:
        """Returns the text that this token completes, perhaps none."""
        self._tokens.append(token)
        text = self._new()
        if text.endswith("\ufffd") and len(self._tokens) - self._shown < HELD:
            return ""
        self._shown = len(self._tokens)
        return text

    def end(self) -> str:
        """Returns the rest; an incomplete character becomes U+FFFD."""
        text, self._shown = self._new(), len(self._tokens)
        return text

    def _new(self) -> str:
        """Returns the text not returned yet, spelled as it is after the text before."""
        first = max(0, self._shown - CONTEXT)
        before = self._tokenizer.decode(self._tokens[first : self._shown])
        return self._tokenizer.decode(self._tokens[first:])[len(before) :]


# The tokenizer in a run's folder, kept so that the folder can be copied elsewhere


FOLDER = "tokenizer"


def with_own_tokenizer(data: DataConfig, run_dir: Path) -> DataConfig:
    """Returns `data` with the tokenizer of the run in `run_dir`, if the run has one.

    Raises UserError if `data` names another tokenizer, with which the weights would be useless.
    """
    own = run_dir / FOLDER
    if not own.is_dir():
        return data
    if data.tokenizer is not None:
        there, here = open_tokenizer(str(own)), open_tokenizer(data.tokenizer)
        if there.digest != here.digest:
            raise UserError(
                f"data.tokenizer={show(data.tokenizer)} is another tokenizer than that of "
                f"run={run_dir.name}, which lies in {own}: leave data.tokenizer out, or choose "
                "another run"
            )
    return dataclasses.replace(data, tokenizer=str(own))


def tokenizer_of(data: DataConfig, run_dir: Path) -> Tokenizer:
    """Opens the tokenizer of a run with the configuration `data`. Raises UserError."""
    own = run_dir / FOLDER
    return open_tokenizer(str(own) if own.is_dir() else data.tokenizer or BYTE)


def keep_tokenizer(data: DataConfig, run_dir: Path, digest: str) -> None:
    """Saves the tokenizer of `data` to the run's folder; bytes need none. Raises OSError, and
    UserError if its digest is no longer the one with which the corpus was read."""
    tokenizer = open_tokenizer(data.tokenizer or BYTE)
    if tokenizer.digest != digest:
        raise UserError(
            f"data.tokenizer={show(data.tokenizer)} changed while the run was starting: start "
            "again when it is complete"
        )
    if not isinstance(tokenizer, ByteTokenizer):
        tokenizer.save(run_dir / FOLDER)


# Tokenizers made here: byte-level BPE with one special token, which precedes each text


END = "<|endoftext|>"
PRINTED = (range(33, 127), range(161, 173), range(174, 256))  # bytes that stand for themselves
DECIDES = ("added_tokens", "normalizer", "pre_tokenizer", "model")  # what decides on tokens


def byte_level(model: Any, words: bool) -> Any:
    """Returns the library's tokenizer of a BPE over bytes; `words`: letters of two words are not
    merged."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    inner.decoder = decoders.ByteLevel()
    return inner


def with_end(inner: Any) -> bytes:
    """Returns the tokenizer.json of a tokenizer, which now puts END before each text."""
    from tokenizers import processors

    inner.add_special_tokens([END])
    inner.post_processor = processors.TemplateProcessing(
        single=f"{END} $A",
        pair=f"{END} $A {END} $B",
        special_tokens=[(END, inner.token_to_id(END))],
    )
    return f"{inner.to_str(pretty=True)}\n".encode()


def byte_tokenizer() -> bytes:
    """Returns a tokenizer.json of bytes, 257 tokens, with an end-of-text before each text.

    Token i < 256 is byte i. No letters are merged; GPT-2's letters stand for unprintable bytes (A.
    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, its code).
    """
    from tokenizers import models

    vocabulary, more = {}, 256
    for byte in range(256):
        printed = any(byte in own for own in PRINTED)
        vocabulary[chr(byte if printed else more)] = byte
        more += not printed
    return with_end(byte_level(models.BPE(vocabulary | {END: 256}, []), words=False))
