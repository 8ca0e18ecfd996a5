"""Tokenizes text as bytes, or by tokenizer.json files through Hugging Face's `tokenizers`.

A tokenizer.json defines tokens but not their roles; the files next to it name the token that ends a
text, in three formats.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.errors import UserError, nearest
from parallel3d.files import (
    new_folder,
    parse_json,
    plain,
    read_bounded,
    replace_durably,
    write_durably,
)

if TYPE_CHECKING:
    from parallel3d.data.keys import DataConfig


TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
GENERATION, CONFIG = "generation_config.json", "config.json"
EOS = "eos_token_id"
CHAT_TEMPLATE = "chat_template.jinja"
# The file with a processor's chat template, and the folder of named templates.
PROCESSORS_TEMPLATE, MORE_TEMPLATES = "chat_template.json", "additional_chat_templates"
BESIDE = (
    *(TOKENIZER_CONFIG, SPECIAL_MAP, ADDED, GENERATION, CHAT_TEMPLATE, PROCESSORS_TEMPLATE),
    f"{MORE_TEMPLATES}/*.jinja",
)
LARGEST_BESIDE = 64 << 20  # limit in bytes; configurations that list every added token are long
# End-of-text tokens of widespread model families, for tokenizers without configuration.
USUAL_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>"),
    *("<eod>", "<|eod|>", "<EOD>", "<｜end▁of▁sentence｜>"),
)
# Classes of transformers 5.23.0 that build a tokenizer from the vocabulary and merges of
# tokenizer.json and ignore its post-processor, which all other classes use.
WITHOUT_POST_PROCESSOR = ("GPTNeoXTokenizer",)


BYTE = "byte"
HOW = "byte, a tokenizer.json or a folder that holds one"
RARE = "\U00010380\U00012000"  # letters of two old scripts, which few tokenizers have
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # a single byte, in vocabularies with byte fallback
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class ByteTokenizer:
    """A tokenizer of bytes: token i < 256 is byte i, and token 256 ends a document.

    It has the attributes of `FileTokenizer`.
    """

    def __init__(self) -> None:
        self.name = self.digest = BYTE
        self.vocab_size = 257
        self.eot = 256
        self.ends = frozenset((self.eot,))
        # In training, each text follows an end-of-text token, so prompts do, too, even in an
        # export.
        self.begin = self.prefix = [self.eot]
        self.bos: list[int] = []

    def decides(self) -> dict[str, Any]:
        """Returns the parts of the exported tokenizer.json that determine a text's tokens."""
        own = json.loads(byte_tokenizer())
        return {key: own[key] for key in DECIDES}

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of each token by its spelling in `files`."""
        return _opened(byte_tokenizer()).get_vocab(with_added_tokens=True)

    def sizes(self) -> npt.NDArray[np.int64]:
        """Returns the number of text bytes in each token, int64 (n,)."""
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
        """Returns the text without end-of-text tokens; invalid UTF-8 becomes U+FFFD."""
        tokens = np.asarray(tokens)
        return tokens[tokens < self.eot].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def files(self) -> dict[str, bytes]:
        """Returns the contents of a tokenizer folder that transformers can load, by file name."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        return {
            TOKENIZER: byte_tokenizer(),
            TOKENIZER_CONFIG: f"{json.dumps(config, indent=2)}\n".encode(),
        }


def open_tokenizer(name: str, key: str = "data.tokenizer") -> ByteTokenizer | FileTokenizer:
    """Opens the tokenizer "byte", a tokenizer.json, a folder with one, or a tokenizer on the hub.

    `key` is the configuration key that errors name. Raises UserError.
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
    raise UserError(f"{key}={show(name)} does not exist: it must be {HOW}; the nearest is {near}")


def nearest_path(path: str | Path) -> str | None:
    """Returns the path in the same folder whose name is most similar to the name of `path`.

    Returns None if no name is similar, or if the folder cannot be listed.
    """
    folder, name = os.path.split(path)
    try:
        close = nearest(name, os.listdir(folder or "."))
    except OSError:
        return None
    return close and os.path.join(folder, close)


# Tokenizers of tokenizer.json files

TOKENIZER = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"


def converted(folder: Path) -> str:
    """Returns how to make a tokenizer.json of a folder's SentencePiece model, or "" without one."""
    if not (folder / SENTENCEPIECE).is_file():
        return ""
    code = f"import transformers as t; t.AutoTokenizer.from_pretrained({str(folder)!r})"
    words = ["python", "-c", f"{code}.save_pretrained({str(folder)!r})"]
    return f"; transformers makes one of its {SENTENCEPIECE}: {shlex.join(words)}"


LARGEST = 1 << 30  # bytes
FEW = 1 << 16  # vocabulary sizes up to this fit 16 bits
# errors for which neither the text nor the tokenizer is to blame
PASSED_ON = (KeyboardInterrupt, SystemExit, MemoryError)


class UnencodableText(UserError):
    """Raised for a text that the library cannot encode; `why` is the library's message."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)  # pickling needs all arguments here
        self.name = name
        self.why = why

    def __str__(self) -> str:
        return (
            f"the tokenizer {show(self.name)} cannot encode a text ({self.why}): fix or remove "
            "the text, or choose another tokenizer"
        )


class PlacedTokens(NamedTuple):
    """The tokens of a text, and the range [begin, end) of each one's characters; int64 (n,)."""

    tokens: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


class FileTokenizer:
    """A tokenizer.json with the roles of its tokens.

    Attributes:
        name: name given by the user.
        vocab_size: the largest token id + 1.
        eot: token that ends a text; `eot_text` is its spelling.
        bos: tokens put before every text, as with Llama; empty if the only such token
            is `eot`, which already ends the preceding document.
        prefix: tokens that the post-processor puts before a prompt with text; in a run's own
            tokenizer, the tokens that begin the run's documents.
        begin: tokens put before any prompt, even an empty one: `prefix`, or else `eot`.
        ends: tokens that end a generation: `eot`, those listed in generation_config.json or else in
            config.json, and those learned in a run.
        special: the special tokens by their texts.
        added: the added tokens, special or not, by their texts.
        roles: roles learned in a run; None for a tokenizer from elsewhere.
        folder: folder of the configuration files; None if the tokenizer has none.
        beside: contents of the configuration files by name.
        digest: digest of the tokenizer.json and the end-of-text token.
    """

    def __init__(self, name: str, content: bytes, folder: Path | None, key: str) -> None:
        """Parses `content`. Raises UserError if it is invalid or has no end-of-text token."""
        self.name = name
        self.folder = folder
        self._content = content
        try:
            inner = _opened(content)
            vocabulary: dict[str, int] = inner.get_vocab(with_added_tokens=True)
            added = inner.get_added_tokens_decoder()
            own_prefix, self._suffix = _around(inner)
            # From here on, the post-processor would only trim blanks from the offsets of tokens.
            inner.post_processor = None
        except BaseException as error:  # the library's panics are not Exceptions
            if isinstance(error, PASSED_ON):
                raise
            raise UserError(f"{key}={show(name)} is not a {TOKENIZER} ({_words(error)})") from None
        if not vocabulary:
            raise UserError(f"{key}={show(name)} has no tokens")
        _check_numbers(content, vocabulary, f"{key}={show(name)}")
        if getattr(inner.model, "dropout", None):
            raise UserError(
                f"{key}={show(name)} has dropout={inner.model.dropout:g}, which makes the tokens "
                f'of a text random: write "dropout": null into its {TOKENIZER}'
            )
        self.special: dict[str, int] = {
            token.content: number for number, token in added.items() if token.special
        }
        self.added: dict[str, int] = {token.content: number for number, token in added.items()}
        self._where = where = f"{key}={show(name)}"
        names = (TOKENIZER_CONFIG, SPECIAL_MAP, ADDED, GENERATION, CONFIG)
        self.beside = {file: read_json(folder, file, where) for file in names if folder is not None}
        end = self._end_of_text(vocabulary)
        # A special token spelled out in a document is plain text, so that it does not end the
        # document or begin a turn.
        inner.encode_special_tokens = True
        self._inner = inner
        self._twin: Any = None  # a copy with `_stand_ins` among its tokens
        self._stand_ins: dict[str, str] = {}
        self.vocab_size = max(vocabulary.values()) + 1
        self.dtype = np.dtype("<u2" if self.vocab_size <= FEW else "<u4")
        self.eot = vocabulary[end]
        self.eot_text = end
        made_by = str(self.beside.get(TOKENIZER_CONFIG, {}).get("tokenizer_class"))
        if made_by.removesuffix("Fast") in WITHOUT_POST_PROCESSOR:
            own_prefix = []
            self._suffix = []
        self._own_prefix = own_prefix
        self.bos: list[int] = [] if own_prefix == [self.eot] else own_prefix
        self.roles = None if folder is None else read_roles(folder, self.vocab_size, where)
        recorded = self.roles is not None and bool(self.bos)
        self.prefix: list[int] = list(self.roles.begin) if recorded and self.roles else own_prefix
        self.begin: list[int] = self.prefix or [self.eot]
        more = self._end_tokens(GENERATION) or self._end_tokens(CONFIG)
        learned = () if self.roles is None else self.roles.ends
        self.ends = frozenset((self.eot, *(n for n in more if 0 <= n < self.vocab_size), *learned))
        facts = json.dumps([hashlib.blake2b(content).hexdigest(), self.eot]).encode()
        self.digest = hashlib.blake2b(facts, digest_size=16).hexdigest()

    @classmethod
    def read(cls, name: str, path: Path, key: str) -> FileTokenizer:
        """Reads a tokenizer file, and the files next to it if its name is tokenizer.json."""
        try:
            content = read_bounded(path, LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{key}={show(name)} holds no {TOKENIZER}: give a folder with one, or byte"
                f"{converted(path.parent)}"
            ) from None
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"{key}={show(name)} cannot be read ({plain(str(why))})") from None
        return cls(name, content, path.parent if path.name == TOKENIZER else None, key)

    def role(self, name: str) -> str | None:
        """Returns the token of a role, such as eos_token, in the folder's files; None without one.

        special_tokens_map.json takes precedence over a tokenizer_config.json that does not list the
        added tokens, as in transformers. Raises UserError for a token that is not a string.
        """
        files = [TOKENIZER_CONFIG, SPECIAL_MAP]
        if "added_tokens_decoder" not in self.beside.get(TOKENIZER_CONFIG, {}):
            files.reverse()
        for file in files:
            value = self.beside.get(file, {}).get(name)
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str) and token:
                return token
            if value not in (None, "", {}):
                raise UserError(
                    f"{self._where}: {name} of its {file} is {show(value)}: it must be the text of "
                    f"a token; write it as text, or remove {name}"
                )
        return None

    def doubts(self) -> list[str]:
        """Returns sentences about doubtful points of the tokenizer.

        They concern contradictions between the folder's files, differences from transformers, and
        texts that the tokenizer does not represent faithfully.
        """
        config, sentences = self.beside.get(TOKENIZER_CONFIG, {}), []
        both = (("add_bos_token", self._own_prefix), ("add_eos_token", self._suffix))
        for key, found in both:
            said = config.get(key)
            if isinstance(said, bool) and said != bool(found):
                side = "before" if key == both[0][0] else "after"
                puts = self.spelled(found) if found else "nothing"
                sentences.append(
                    f"tokenizer {self.name}: {key}={str(said).lower()} in {TOKENIZER_CONFIG}, but "
                    f"{TOKENIZER} puts {puts} {side} a text: parallel3d follows {TOKENIZER}; "
                    "versions of transformers differ in this"
                )
        if self._suffix:
            sentences.append(
                f"tokenizer {self.name}: {TOKENIZER} puts {self.spelled(self._suffix)} after "
                "every text: parallel3d puts the end-of-text token after documents, and nothing "
                "after prompts"
            )
        if self.missing:
            shown = ", ".join(map(plain, self.missing[:5])) + (" …" if self.missing[5:] else "")
            sentences.append(
                f"tokenizer {self.name}: files next to its {TOKENIZER} name tokens that it lacks, "
                f"{shown}: they are plain text here, but transformers adds them"
            )
        if self._spells(self.eot_text, self.eot):
            sentences.append(
                f"tokenizer {self.name}: a text that spells out {plain(self.eot_text)} ends there, "
                "because the tokenizer turns it into that token even when it is plain text"
            )
        if not self._spells(RARE):
            sentences.append(
                f"tokenizer {self.name}: characters without a token are left out of texts, since "
                "the tokenizer has no token for unknown ones"
            )
        return sentences

    def _spells(self, text: str, token: int | None = None) -> bool:
        """Returns whether the tokens of a text include `token`; None stands for any token."""
        try:
            found = self.encode(text.encode())
        except UnencodableText:
            return token is None
        return bool(found.size) if token is None else token in found

    @cached_property
    def missing(self) -> list[str]:
        """The tokens that files of the folder name but tokenizer.json lacks."""
        named: list[Any] = list(self.beside.get(ADDED, {}))
        for file in (TOKENIZER_CONFIG, SPECIAL_MAP):
            for key, value in self.beside.get(file, {}).items():
                if key.endswith("_token") and not key.startswith("add_"):
                    named.append(value)
                elif key.endswith("special_tokens") or key == "added_tokens_decoder":
                    several = value.values() if isinstance(value, dict) else value
                    named += several if isinstance(several, Iterable) else ()
        texts = [one.get("content") if isinstance(one, dict) else one for one in named]
        known = self.vocabulary()
        return sorted({text for text in texts if isinstance(text, str) and text not in known})

    def spelled(self, tokens: Iterable[int]) -> str:
        """Returns tokens as words of a sentence, such as "<s> (1)"."""
        texts = ((token, self._inner.id_to_token(token)) for token in tokens)
        return " ".join(f"{plain(text or '?')} ({token})" for token, text in texts)

    def _end_of_text(self, vocabulary: Mapping[str, int]) -> str:
        """Finds the token that ends a text. Raises UserError if it is undefined or ambiguous."""
        named = self.role("eos_token")
        if named is not None and named not in vocabulary:
            raise UserError(
                f"{self._where}: the eos_token of {self.folder} is {plain(named)}, which must be "
                f"a token of its {TOKENIZER}"
            )
        numbers = {number: token for token, number in vocabulary.items()}
        told = [(f, n) for f in (GENERATION, CONFIG) for n in self._end_tokens(f)[:1]]
        if named is not None:
            return named
        for file, number in told:
            if number not in numbers:
                raise UserError(
                    f"{self._where}: {EOS} of its {file} is {number}, which must be a token "
                    f"of its {TOKENIZER}"
                )
            return numbers[number]
        usual = [token for token in USUAL_ENDS if token in self.special]
        if len(usual) == 1:
            return usual[0]
        has = "has no special token"
        if usual:
            has = f"has several usual ends of text, {' and '.join(map(plain, usual))}"
        elif self.special:
            shown = ", ".join(map(plain, list(self.special)[:5]))
            has = f"has the special tokens {shown}, none of them a known end of text"
        raise UserError(
            f"{self._where} does not define the token that ends a text: it {has}; write "
            f'{{"eos_token": "…"}} into a {TOKENIZER_CONFIG} next to a {TOKENIZER}, and give the '
            "folder"
        )

    def _end_tokens(self, file: str) -> list[int]:
        """Returns the tokens that end a generation according to a file next to the tokenizer.

        Raises UserError for values that are not numbers.
        """
        value = self.beside.get(file, {}).get(EOS)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(number) is not int for number in found):
            raise UserError(
                f"{self._where}: {EOS} of its {file} is {show(value)}: it must be a "
                "token's id, or a list of ids"
            )
        return found

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        """Returns a document's tokens, without the end-of-text token.

        Invalid UTF-8 becomes U+FFFD.
        """
        return self.encode_all([text.decode("utf-8", "replace")])[0]

    def encode_prompt(self, text: bytes) -> list[int]:
        """Returns a prompt's tokens; a special token spelled out in it counts as that token."""
        return self.place(text.decode("utf-8", "replace")).tokens.tolist()

    def place(self, text: str) -> PlacedTokens:
        """Returns the tokens of a text with their places; special tokens in the text count as such.

        Raises UnencodableText.
        """
        self._inner.encode_special_tokens = False
        try:
            return self._placed(self._inner, text)
        finally:
            self._inner.encode_special_tokens = True

    def place_spelled(self, text: str, stand_ins: Mapping[str, str]) -> PlacedTokens:
        """Returns the tokens of a text with their places; special tokens in it are plain text.

        Args:
            stand_ins: the character that represents each special token in `text`.
        """
        if self._stand_ins.items() - stand_ins.items() or self._twin is None:
            self._twin = _opened(self._content)
            self._stand_ins = {}
            self._twin.post_processor = None
            self._twin.encode_special_tokens = True
        new = [token for token in stand_ins if token not in self._stand_ins]
        if new:
            self._twin.add_tokens([self._like(token, stand_ins[token]) for token in new])
            self._stand_ins |= {token: stand_ins[token] for token in new}
        found = self._placed(self._twin, text)
        for token, character in self._stand_ins.items():
            found.tokens[found.tokens == self._twin.token_to_id(character)] = self.special[token]
        return found

    def _like(self, token: str, character: str) -> Any:
        """Returns an added token with the text `character` and the matching rules of `token`."""
        from tokenizers import AddedToken

        added = self._inner.get_added_tokens_decoder()[self.special[token]]
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        return AddedToken(
            character, special=False, **{flag: getattr(added, flag) for flag in flags}
        )

    def _placed(self, inner: Any, text: str) -> PlacedTokens:
        with self._breaks_off():
            made = inner.encode(text, add_special_tokens=False)
        places = np.array(made.offsets, np.int64).reshape(-1, 2)
        begins, ends = places[:, 0], places[:, 1]
        backwards = (np.diff(begins) < 0).any() or (begins > ends).any()
        if places.size and (backwards or not 0 < int(ends.max()) <= len(text)):
            raise UserError(
                f"the tokenizer {show(self.name)} does not tell which characters each token "
                "covers, so the tokens to train on are unknown: choose another tokenizer"
            )
        return PlacedTokens(np.array(made.ids, np.int64), begins, ends)

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        """Returns the tokens of documents, encoded on several cores. Raises UnencodableText."""
        with self._breaks_off():
            made = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=self.dtype) for each in made]

    @contextmanager
    def _breaks_off(self) -> Iterator[None]:
        """Turns the library's errors inside a `with` block into UnencodableText."""
        try:
            yield
        except BaseException as error:  # the library's panics are not Exceptions
            if isinstance(error, PASSED_ON):
                raise
            raise UnencodableText(self.name, _words(error)) from None

    def decode(self, tokens: npt.NDArray[np.integer] | Sequence[int]) -> str:
        """Returns readable text, without special and unknown tokens."""
        known = [int(token) for token in tokens if 0 <= token < self.vocab_size]
        return self._inner.decode(known, skip_special_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of each token by its spelling."""
        return self._inner.get_vocab(with_added_tokens=True)

    def sizes(self) -> npt.NDArray[np.int64]:
        """Returns the bytes that each token adds to a text, 0 for special ones; int64 (n,)."""
        spelled = [self._inner.id_to_token(token) or "" for token in range(self.vocab_size)]
        decoder = json.loads(self._content).get("decoder") or {}
        kinds = {part.get("type") for part in (decoder.get("decoders") or [decoder])}
        if "ByteLevel" in kinds:
            # Each byte is spelled as one of the first 324 characters of Unicode.
            is_letters = [max(map(ord, text), default=0) < 324 for text in spelled]
            found = [
                len(text if letters else text.encode())
                for text, letters in zip(spelled, is_letters, strict=True)
            ]
        else:  # decoding may depend on the word before, so each token is decoded after a word
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
        """Returns whether this tokenizer encodes like `byte_tokenizer`."""
        return self.decides() == ByteTokenizer().decides()

    def decides(self) -> dict[str, Any]:
        """Returns the parts of the file that determine a text's tokens."""
        own = parse_json(self._content)
        return {key: own.get(key) for key in DECIDES} if isinstance(own, dict) else {}

    def to_export(self) -> dict[str, bytes]:
        """Returns `files` for an export.

        The files make other programs begin prompts and end generations as parallel3d does.
        """
        found = self.files()
        if self.prefix != self._own_prefix:  # the run's documents begin without these tokens
            found[TOKENIZER] = _pretty(parse_json(self._content) | {"post_processor": None})
            # The lm-evaluation-harness begins an empty context with this token.
            bos = {"bos_token": self.eot_text}
            for name, more in ((TOKENIZER_CONFIG, {"add_bos_token": False}), (SPECIAL_MAP, {})):
                if name in found:
                    found[name] = _pretty(parse_json(found[name]) | bos | more)
        if GENERATION in found:
            generation = parse_json(found[GENERATION])
            ends = self.all_ends(generation.get(EOS))
            if ends != generation.get(EOS):
                found[GENERATION] = _pretty(generation | {EOS: ends})
        return found

    def all_ends(self, told: Any) -> int | list[int]:
        """Returns the eos_token_id `told` (`eot` if None), plus the ends learned in a run."""
        first = [self.eot] if told is None else told if isinstance(told, list) else [told]
        more = [] if self.roles is None else [n for n in self.roles.ends if n not in first]
        if more or told is None:
            return [*first, *more] if more else self.eot
        return told

    def files(self) -> dict[str, bytes]:
        """Returns the contents of a tokenizer folder that transformers can load, by file name."""
        found = {TOKENIZER: self._content}
        folder, config = self.folder, dict(self.beside.get(TOKENIZER_CONFIG, {}))
        own = [] if folder is None else template_files(folder).values()
        for name in (SPECIAL_MAP, GENERATION, PROCESSORS_TEMPLATE, *own):
            if folder is not None and (folder / name).is_file():
                found[name] = read_bounded(folder / name, LARGEST_BESIDE)
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        if not config.get("eos_token"):
            config["eos_token"] = self.eot_text
        return found | {TOKENIZER_CONFIG: _pretty(config)}

    def save(self, folder: Path, roles: Roles | None = None) -> None:
        """Writes `files` and the roles of a run to `folder` in one step, unless it exists.

        Raises OSError.
        """
        if folder.is_dir():
            return
        with new_folder(folder) as partial:
            for name, content in self.files().items():
                (partial / name).parent.mkdir(exist_ok=True)
                write_durably(partial / name, content)
            if roles is not None:
                write_durably(partial / ROLES, roles.content())


def _opened(content: bytes) -> Any:
    """Returns the library's tokenizer, without truncation and padding."""
    from tokenizers import Tokenizer

    inner = Tokenizer.from_buffer(content)
    inner.no_truncation()
    inner.no_padding()
    return inner


def _check_numbers(content: bytes, vocabulary: Mapping[str, int], where: str) -> None:
    """Raises UserError for ambiguous token ids.

    An id is ambiguous if the library gives an added token another id than the file, or if several
    tokens share it.
    """
    for added in json.loads(content).get("added_tokens") or ():
        number = vocabulary.get(added["content"])
        if number != added["id"]:
            raise UserError(
                f"{where} gives its added token {plain(added['content'])} the id {added['id']}, "
                f"but the tokenizers library gives it {number}: fix the ids, which must follow the "
                "vocabulary without a gap"
            )
    if len({*vocabulary.values()}) < len(vocabulary):
        numbers = Counter(vocabulary.values())
        twice = max(numbers, key=numbers.__getitem__)
        names = ", ".join(plain(token) for token, number in vocabulary.items() if number == twice)
        raise UserError(
            f"{where} gives the id {twice} to several tokens, {names}: give each an id of its own"
        )


def _pretty(content: Any) -> bytes:
    return f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode()


def _words(error: BaseException) -> str:
    return plain(" ".join(str(error).split()) or type(error).__name__)


def _around(inner: Any) -> tuple[list[int], list[int]]:
    """Returns the tokens that a tokenizer's post-processor puts before and after every text."""
    if inner.post_processor is None:
        return [], []
    bare = inner.encode("a", add_special_tokens=False).ids
    whole = inner.encode("a", add_special_tokens=True).ids
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    return [], []


Tokenizer = ByteTokenizer | FileTokenizer


# Files next to a tokenizer.json, which give tokens their roles


def read_json(folder: Path, name: str, key: str) -> dict[str, Any]:
    """Reads a JSON object from a tokenizer's folder; returns {} if the file is missing.

    Raises UserError; the error names `key`.
    """
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
    """Returns the files of chat templates in a tokenizer's folder, by the templates' names."""
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
            f"{key}={show(name)} is not a file or folder here, and the hub did not provide it "
            f"({why}): give a tokenizer.json, or a folder that holds one"
        ) from None
    return FileTokenizer.read(name, Path(folder, TOKENIZER), key)


# A streaming decoder


CONTEXT = 6  # number of preceding tokens that may change a token's spelling (blanks, joined words)
HELD = 32  # maximum number of tokens of an incomplete character; longer ones are invalid


class Decoding:
    """Decodes a prompt and the tokens after it one by one, holding back incomplete characters.

    The spelling of a token may depend on the tokens before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # number of tokens whose text was returned

    def begin(self, prompt: bytes) -> str:
        """Returns the prompt's text; with byte tokens, holds back an incomplete last character."""
        tokens = self._tokenizer.encode_prompt(prompt)
        if isinstance(self._tokenizer, ByteTokenizer):
            return "".join(map(self.add, tokens))
        self._tokens = tokens
        self._shown = len(tokens)
        return prompt.decode("utf-8", "replace")

    def add(self, token: int) -> str:
        """Returns the text that `token` completes, which may be empty."""
        self._tokens.append(token)
        text = self._new()
        if text.endswith("\ufffd") and len(self._tokens) - self._shown < HELD:
            return ""
        self._shown = len(self._tokens)
        return text

    def end(self) -> str:
        """Returns the remaining text; an incomplete character becomes U+FFFD."""
        text = self._new()
        self._shown = len(self._tokens)
        return text

    def _new(self) -> str:
        """Decodes the tokens not returned yet, in the context of the tokens before them."""
        first = max(0, self._shown - CONTEXT)
        before = self._tokenizer.decode(self._tokens[first : self._shown])
        return self._tokenizer.decode(self._tokens[first:])[len(before) :]


# The tokenizer in a run's folder, kept so that the folder can be copied elsewhere


FOLDER = "tokenizer"


ROLES = "roles.json"


class Roles(NamedTuple):
    """Roles of tokens that were learned from a run's text.

    Documents begin with the tokens `begin`; each token of `ends` ends documents or turns.
    """

    begin: tuple[int, ...]
    ends: tuple[int, ...]

    def content(self) -> bytes:
        return f"{json.dumps(self._asdict())}\n".encode()


NO_ROLES = Roles((), ())


def read_roles(folder: Path, vocab_size: int, where: str) -> Roles | None:
    """Reads the file ROLES of a run's tokenizer, or returns None without it. Raises UserError."""
    content = read_json(folder, ROLES, where)
    if not content:
        return None
    found = [content.get(name) for name in Roles._fields]
    for numbers in found:
        if not isinstance(numbers, list) or not all(
            type(number) is int and 0 <= number < vocab_size for number in numbers
        ):
            raise UserError(
                f"{where}: {folder / ROLES} must list ids of this tokenizer's tokens as begin and "
                "ends; remove the file to begin and end texts with the tokenizer's own tokens"
            )
    begin, ends = found
    return Roles(tuple(begin or ()), tuple(ends or ()))


def begun(tokens: Sequence[int], begin: Sequence[int]) -> list[int]:
    """Puts the tokens `begin` before a prompt's tokens, unless the prompt has them already."""
    given = list(tokens)
    return given if given[: len(begin)] == list(begin) else [*begin, *given]


def tokenizer_of(data: DataConfig, run_dir: Path) -> Tokenizer:
    """Opens the tokenizer of a run with the configuration `data`. Raises UserError."""
    own = run_dir / FOLDER
    return open_tokenizer(str(own) if own.is_dir() else data.tokenizer or BYTE)


def check_same_tokens(there: Tokenizer, here: Tokenizer, where: str) -> str | None:
    """Compares the configured tokenizer `here` with `there`, the tokenizer of the weights `where`.

    Returns None if they are equal, or a sentence if only ends, splits or additional tokens differ.
    Raises UserError if a token's id differs, as its embedding would belong to another text.
    """
    if there.digest == here.digest:
        return None
    known = there.vocabulary()
    given = here.vocabulary()
    moved = [token for token, number in known.items() if given.get(token) != number]
    if moved:
        first = min(moved, key=known.__getitem__)
        now = given.get(first)
        became = "missing" if now is None else f"{now}"
        raise UserError(
            f"data.tokenizer={show(here.name)} differs from the tokenizer of {where} in "
            f"{len(moved):,} of {len(known):,} tokens, such as {plain(first)}, which is "
            f"{known[first]} there and {became} here; leave data.tokenizer out, because "
            "the weights need their own tokenizer"
        )
    differs = []
    if more := len(given) - len(known):
        differs.append(f"has {more:,} more tokens, unknown to the weights")
    if there.eot != here.eot:
        differs.append(f"ends a text with token {here.eot} instead of {there.eot}")
    if not differs and there.decides() == here.decides():
        return None  # only the formatting of the files differs
    how = " and ".join(differs) or "splits text differently"
    return f"data.tokenizer={show(here.name)} has the tokens of {where}, but {how}"


def beyond_table(tokenizer: Tokenizer, vocab_size: int) -> dict[int, str]:
    """Returns the added tokens that are not below `vocab_size`, with their texts, in order."""
    added = tokenizer.added if isinstance(tokenizer, FileTokenizer) else {}
    return dict(sorted((n, text) for text, n in added.items() if n >= vocab_size))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Checks a tokenizer against a model with `vocab_size` tokens.

    Added tokens may lie beyond the model's table if no text needs them, as in Gemma 3 1B; then the
    result is a line about them, and reading a text that holds one is an error. Raises UserError for
    other tokens beyond the table.
    """
    if tokenizer.vocab_size <= vocab_size:
        return []
    beyond = beyond_table(tokenizer, vocab_size)
    others = {n for n in tokenizer.vocabulary().values() if n >= vocab_size} - beyond.keys()
    if others or not beyond.keys().isdisjoint((tokenizer.eot, *tokenizer.bos, *tokenizer.begin)):
        raise UserError(
            f"model.vocab_size={vocab_size} must be at least {tokenizer.vocab_size} for the tokens "
            f"of data.tokenizer={show(tokenizer.name)}; the nearest is "
            f"model.vocab_size={tokenizer.vocab_size}, or the tokenizer of the model's own folder"
        )
    shown = ", ".join(f"{plain(text)} ({n})" for n, text in list(beyond.items())[:5])
    more = " …" if len(beyond) > 5 else ""
    return [
        f"tokenizer {tokenizer.name}: {shown}{more} beyond model.vocab_size={vocab_size}: a text "
        "or a chat template that holds one of them is refused"
    ]


def check_tokens(tokens: Iterable[int], tokenizer: Tokenizer, vocab_size: int, where: str) -> None:
    """Raises UserError for a token that is not below `vocab_size`; the error names `where`."""
    odd = next((int(token) for token in tokens if token >= vocab_size), None)
    if odd is not None:
        text = beyond_table(tokenizer, vocab_size).get(odd, "")
        raise UserError(
            f"{where} has the token {plain(text)} ({odd}), which lies beyond "
            f"model.vocab_size={vocab_size}, so the model has no embedding for it: remove it "
            "from the text or the chat template; a model that is trained from its start may have "
            f"model.vocab_size={tokenizer.vocab_size}"
        )


def keep_tokenizer(
    data: DataConfig,
    run_dir: Path,
    digest: str,
    learned: Roles = NO_ROLES,
    is_begun: bool = False,
) -> list[str]:
    """Saves the tokenizer of `data` and the roles of its tokens to the run's folder.

    The byte tokenizer is not saved. Returns sentences about the roles.

    Args:
        digest: digest of the tokenizer that has read the corpus.
        learned: roles learned from the corpus.
        is_begun: whether the weights come from an import or from `init_from`. If they do, and no
            tokens begin the documents, prompts begin as in the earlier training.

    Raises OSError, and UserError if the tokenizer has changed.
    """
    tokenizer = open_tokenizer(data.tokenizer or BYTE)
    if tokenizer.digest != digest:
        raise UserError(
            f"data.tokenizer={show(data.tokenizer)} changed while the run was starting: start "
            "again when it is complete"
        )
    if isinstance(tokenizer, ByteTokenizer):
        return []
    folder = run_dir / FOLDER
    known = read_roles(folder, tokenizer.vocab_size, f"run={run_dir.name}")
    begin = learned.begin or (tuple(tokenizer.prefix) if is_begun else ())
    if known is not None:
        begin = learned.begin or known.begin
    before = () if known is None else known.ends
    roles = Roles(begin, tuple(sorted({*tokenizer.ends, *before, *learned.ends})))
    sentences = _of_roles(tokenizer, learned, roles)
    if not folder.is_dir():
        tokenizer.save(folder, roles)
        return [*tokenizer.doubts(), *sentences]
    if roles != known:
        replace_durably(folder / ROLES, roles.content())
    return sentences


def _of_roles(tokenizer: FileTokenizer, learned: Roles, roles: Roles) -> list[str]:
    """Returns sentences about unusual beginnings and ends of documents."""
    sentences = []
    if tokenizer.bos:
        begin = tokenizer.spelled(tokenizer.bos)
        puts = f"{begin}, which the tokenizer puts before every text"
        if learned.begin:
            sentences.append(f"documents begin with {puts}; so do prompts of generate and eval")
        elif roles.begin:
            sentences.append(
                f"no document begins with {puts}, but prompts do, as the weights were "
                "trained with it"
            )
        else:
            sentences.append(
                f"no document begins with {puts}: prompts of generate, eval and an export begin "
                "without it, too"
            )
    if others := [end for end in learned.ends if end != tokenizer.eot]:
        sentences.append(
            f"texts or turns end with {tokenizer.spelled(others)} besides the tokenizer's "
            f"end-of-text token {tokenizer.spelled([tokenizer.eot])}: generate and exports stop at "
            "each of them"
        )
    return sentences


# Tokenizers built here: byte-level BPE with one special token, which precedes each text


END = "<|endoftext|>"
PRINTED = (range(33, 127), range(161, 173), range(174, 256))  # bytes that stand for themselves
# The parts of a tokenizer.json that determine the tokens of a text.
DECIDES = ("added_tokens", "normalizer", "pre_tokenizer", "model")


def byte_level(model: Any, words: bool) -> Any:
    """Returns the library's tokenizer for a byte-level BPE; `words` forbids merges across words."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    inner.decoder = decoders.ByteLevel()
    return inner


def with_end(inner: Any) -> bytes:
    """Makes a tokenizer put END before each text, and returns its tokenizer.json."""
    from tokenizers import processors

    inner.add_special_tokens([END])
    inner.post_processor = processors.TemplateProcessing(
        single=f"{END} $A",
        pair=f"{END} $A {END} $B",
        special_tokens=[(END, inner.token_to_id(END))],
    )
    return f"{inner.to_str(pretty=True)}\n".encode()


def byte_tokenizer() -> bytes:
    """Returns the tokenizer.json of 257 byte tokens, with an end-of-text token before each text.

    Token i < 256 is byte i, and no tokens are merged. Unprintable bytes are spelled with letters as
    in GPT-2's code (A. Radford et al., "Language Models are Unsupervised Multitask Learners",
    2019).
    """
    from tokenizers import models

    vocabulary, more = {}, 256
    for byte in range(256):
        printed = any(byte in own for own in PRINTED)
        vocabulary[chr(byte if printed else more)] = byte
        if not printed:
            more += 1
    return with_end(byte_level(models.BPE(vocabulary | {END: 256}, []), words=False))
