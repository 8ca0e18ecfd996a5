"""Which tokens a tokenizer's folder calls the end and the beginning of a text.

A tokenizer.json has tokens and no roles: those stand in the files beside it, in three formats.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.errors import UserError, nearest
from parallel3d.files import flush_folder, parse_json, plain, read_bounded, write_durably

if TYPE_CHECKING:
    from parallel3d.config.schema import DataConfig


TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
GENERATION, MODEL = "generation_config.json", "config.json"
CHAT_TEMPLATE = "chat_template.jinja"
BESIDE = (TOKENIZER_CONFIG, SPECIAL_MAP, GENERATION, CHAT_TEMPLATE)
LARGEST_BESIDE = 64 << 20  # bytes; configurations that list every added token are long
# Of files that tell nothing: what the widespread families end a text with.
USUAL_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>"),
    "<｜end▁of▁sentence｜>",
)


def read_json(folder: Path, name: str, key: str) -> dict[str, Any]:
    """An object of a file beside the tokenizer; {} if there is none. Raises UserError."""
    try:
        content = parse_json(read_bounded(folder / name, LARGEST_BESIDE))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {folder / name} cannot be read ({plain(str(error))})") from None
    if not isinstance(content, dict):
        raise UserError(f"{key}: {folder / name} must hold an object, not {type(content).__name__}")
    return content


def end_of_text(
    folder: Path | None, vocabulary: Mapping[str, int], special: Iterable[str], key: str
) -> str | None:
    """The token that ends a text; None if nothing tells which.

    Args:
        folder: with the files that tell; None if the tokenizer came without.
        vocabulary: token → number. special: the tokenizer's special tokens.

    Raises:
        UserError: a file that cannot be read, or that names a token which is not there.
    """
    if folder is not None:
        named = role("eos_token", folder, key)
        if named is not None:
            if named not in vocabulary:
                raise UserError(
                    f"{key}: {folder} calls {plain(named)} the end of a text, which is no token of "
                    "its tokenizer.json"
                )
            return named
        numbers = {number: token for token, number in vocabulary.items()}
        for name in (GENERATION, MODEL):
            number = read_json(folder, name, key).get("eos_token_id")
            number = number[0] if isinstance(number, list) and number else number
            if type(number) is int and number in numbers:
                return numbers[number]
    known = list(special)
    ends = [token for token in USUAL_ENDS if token in known]
    return ends[0] if ends else known[0] if len(known) == 1 else None


def ends_of_generation(folder: Path, key: str) -> list[int]:
    """The tokens that end what a model writes, by its generation_config.json. UserError."""
    found = read_json(folder, GENERATION, key).get("eos_token_id")
    found = found if isinstance(found, list) else [found]
    return [number for number in found if type(number) is int and number >= 0]


def role(name: str, folder: Path, key: str) -> str | None:
    """The token of a role such as eos_token, as the files beside the tokenizer spell it."""
    for file in (TOKENIZER_CONFIG, SPECIAL_MAP):
        said = read_json(folder, file, key).get(name)
        token = said.get("content") if isinstance(said, dict) else said
        if isinstance(token, str) and token:
            return token
    return None


# Tokens to text one by one: nothing is shown of a character before all of it is there.


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


# A tokenizer.json, run by Hugging Face's `tokenizers`, with the roles that the files beside it
# give to its tokens.


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


# A tokenizer by its name on Hugging Face's hub, where there is a network.


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


# The tokenizer that a run keeps in its folder, so that it speaks wherever that is copied to.


FOLDER = "tokenizer"


def with_own_tokenizer(data: DataConfig, run_dir: Path) -> DataConfig:
    """`data` with the tokenizer that the run in `run_dir` keeps, if it keeps one.

    Raises UserError if `data` names another: what the weights have learned would mean nothing.
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
    """The tokenizer of a run of which `data` is the configuration. Raises UserError."""
    own = run_dir / FOLDER
    return open_tokenizer(str(own) if own.is_dir() else data.tokenizer or BYTE)


def keep_tokenizer(data: DataConfig, run_dir: Path, digest: str) -> None:
    """Puts the tokenizer of `data`, which the corpus has read as the one of this digest, into the
    run's folder; bytes need none. Raises OSError, and UserError if it is another one by now."""
    tokenizer = open_tokenizer(data.tokenizer or BYTE)
    if tokenizer.digest != digest:
        raise UserError(
            f"data.tokenizer={show(data.tokenizer)} changed while the run was starting: start "
            "again when it is complete"
        )
    if not isinstance(tokenizer, ByteTokenizer):
        tokenizer.save(run_dir / FOLDER)


# Tokenizers: bytes, in which every file is text, and those of Hugging Face's `tokenizers`.


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
