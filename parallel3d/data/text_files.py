"""Tokenizer files and facts next to a corpus, and the token cache of tokenized texts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.data import cache
from parallel3d.data.cache import Report
from parallel3d.data.indexed import IndexedCorpus, IndexedWriter, token_type
from parallel3d.data.sources import Document
from parallel3d.data.tokenizer import FileTokenizer, Unencodable
from parallel3d.data.tokens import MAKE_ANEW, File, Proof, WatchedFile, prove, whole_digest
from parallel3d.errors import UserError
from parallel3d.files import parse_json, plain, read_bounded, replace_durably

END, END_TOKEN = "<|endoftext|>", 256
PRINTED = (range(33, 127), range(161, 173), range(174, 256))  # bytes that stand for themselves


def byte_tokenizer() -> str:
    """Returns a tokenizer.json of bytes, 257 tokens, with an end-of-text before each text.

    Token i < 256 is byte i. No letters are merged; GPT-2's letters stand for unprintable bytes (A.
    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, its code).
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level |= {"use_regex": False}
    special = {"SpecialToken": {"id": END, "type_id": 0}}
    end: dict[str, Any] = {"id": END_TOKEN, "content": END, "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                *(special, {"Sequence": {"id": "A", "type_id": 0}}),
                *(special, {"Sequence": {"id": "B", "type_id": 0}}),
            ],
            "special_tokens": {END: {"id": END, "ids": [END_TOKEN], "tokens": [END]}},
        },
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_letters())} | {END: END_TOKEN},
            "merges": [],
        },
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _letters() -> list[str]:
    """Returns the letter of each byte; unprintable ones have letters from U+0100 on."""
    letters, more = [], 256
    for byte in range(256):
        printed = any(byte in own for own in PRINTED)
        letters.append(chr(byte if printed else more))
        more += not printed
    return letters


def byte_files() -> dict[str, bytes]:
    """Returns file name → content of a byte tokenizer's folder for transformers."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    return {
        "tokenizer.json": byte_tokenizer().encode(),
        "tokenizer_config.json": f"{json.dumps(config, indent=2)}\n".encode(),
    }


def are_bytes(content: bytes) -> bool:
    """Returns whether a tokenizer.json is `byte_tokenizer`'s."""
    return content == byte_tokenizer().encode()


# Files of a corpus: `<prefix>.json` and the tokenizer's files, `<prefix>.tokenizer/`


LARGEST = 1 << 20  # bytes


class CorpusFacts(NamedTuple):
    """tokenizer: its digest; "byte" for bytes. tokenizer_file: relative to the corpus, None for
    bytes. digest: blake2b-16 of the .bin."""

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
    """Reads `<prefix>.json`; None without one, as for pairs of other programs. Raises UserError.

    `read`: a file's content by name; raises OSError or ValueError.
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
    """Returns the name by which `open_tokenizer` opens the corpus's tokenizer."""
    if facts.tokenizer_file is None:
        return "byte"
    return str(Path(os.fspath(prefix)).parent / facts.tokenizer_file)


# The token cache of a text with a tokenizer.json: a pair `<key>.bin`, `<key>.idx` with a document
# for each file, and `<key>.json`, written last, with their digests


LARGEST_DOCUMENT = 1 << 30  # bytes: a tokenizer holds a document several times over
BATCH = 4 << 20  # bytes of text tokenized at a time


class CachedPair(NamedTuple):
    """A pair in the cache, and the digest of its tokens."""

    pair: IndexedCorpus
    digest: str
    files: tuple[WatchedFile, ...]


def cached_pair(
    folder: Path, documents: Sequence[Document], tokenizer: FileTokenizer, report: Report
) -> CachedPair:
    """Returns the packed tokens of `documents` from `folder`, as `cache.cached_tokens` does."""
    key = cache.cache_key(documents, tokenizer)
    return kept_pair(folder, key, lambda path: _build(path, documents, tokenizer, report), report)


def kept_pair(
    folder: Path, key: str, build: Callable[[Path], IndexedWriter], report: Report
) -> CachedPair:
    """Returns the pair `key` in `folder`; `build`, given its path, writes it if it is missing."""
    path = folder / f"{key}.json"

    def make() -> None:
        path.unlink(missing_ok=True)
        writer = build(path)
        facts = {"digest": writer.digest, "tokens": writer.tokens}
        facts["documents"] = writer.documents
        with open(path.with_suffix(".idx"), "rb") as index:
            facts["index"] = whole_digest(index)
        replace_durably(path, json.dumps(facts).encode())

    load = lambda: _load(path, report)  # noqa: E731
    return cache.load_or_build(path, load, make, report, leftovers=".{}.*.partial")


def _load(path: Path, report: Report) -> CachedPair | None:
    """Opens the pair of `path`; None if there is none of ours that is intact."""
    files = [path.with_suffix(end) for end in (".bin", ".idx", ".json")]
    if not path.exists():
        return None
    try:
        if not all(cache.is_trusted(file.lstat(), path.parent) for file in files):
            report(f"the token cache {path} is not taken: others than you may write it")
            return None
        facts = parse_json(read_bounded(path, 1 << 20))
        pair = IndexedCorpus.open(path.with_suffix(""))
        digests = facts["digest"], facts.get("index")  # older caches have no digest of the index
        named = tuple(zip((pair.tokens.file, pair.index.lengths.file), digests, strict=True))
        if len(pair) == facts["tokens"] and all(prove(*one) != Proof.CHANGED for one in named):
            return CachedPair(pair, digests[0], tuple(_watched(*one) for one in named))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    report(f"the token cache {path} is damaged")
    return None


def _watched(file: File, digest: str | None) -> WatchedFile:
    return WatchedFile(file, lambda: prove(file, digest), MAKE_ANEW)


def _build(
    path: Path, documents: Sequence[Document], tokenizer: FileTokenizer, report: Report
) -> IndexedWriter:
    size = f"{len(documents)} documents, {sum(d.size for d in documents) / 1e6:.1f} MB"
    report(f"building the token cache: {size} of text through {tokenizer.name}")
    dtype = token_type(tokenizer.vocab_size)
    with IndexedWriter(path.with_suffix(""), dtype, replace=True) as writer:
        for some, texts in _batches(documents):
            for tokens in _encoded(tokenizer, some, texts):
                writer.add(np.append(tokens, tokens.dtype.type(tokenizer.eot)))
    return writer


def _encoded(
    tokenizer: FileTokenizer, documents: list[Document], texts: list[str]
) -> list[npt.NDArray[np.integer]]:
    """Tokenizes documents' texts. Raises UserError with the document's name."""
    try:
        return tokenizer.encode_all(texts)
    except Unencodable as error:
        if len(texts) > 1:
            pairs = zip(documents, texts, strict=True)
            return [_encoded(tokenizer, [each], [text])[0] for each, text in pairs]
        raise UserError(
            f"data file {documents[0].path} cannot be encoded by data.tokenizer={tokenizer.name} "
            f"({error.why}): remove or mend it, or give another tokenizer"
        ) from None


def _batches(documents: Sequence[Document]) -> Iterator[tuple[list[Document], list[str]]]:
    """Yields some documents at a time, in order, with their texts. Raises UserError."""
    some: list[Document] = []
    texts: list[str] = []
    held = 0
    for document in documents:
        if document.size > LARGEST_DOCUMENT:
            raise UserError(
                f"data file {document.path} has {document.size:,} bytes, and a document has at "
                f"most {LARGEST_DOCUMENT:,}: cut it, or give data.tokenizer=byte"
            )
        if held and held + document.size > BATCH:
            yield some, texts
            some, texts, held = [], [], 0
        content = b"".join(block for block in cache.blocks_of(document) if block)
        texts.append(content.decode("utf-8", "replace"))
        some.append(document)
        held += document.size
    if texts:
        yield some, texts
