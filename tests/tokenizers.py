"""Makes small tokenizers in a moment."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
TEXT = ("def encode(text): return [ord(c) for c in text]\n", "héllo wörld, 漢字 and 😀 " * 3)


@functools.cache
def trained(vocab_size: int = 320, special: tuple[str, ...] = (END,)) -> str:
    """Returns the content of a byte-level tokenizer.json with that many tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator([text * 5 for text in TEXT], trainer)
    return inner.to_str()


def panicking() -> str:
    """Returns the content of a tokenizer.json whose pattern fails on 40 times "a" and a "b"."""
    facts = json.loads(trained())
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    steps = [pattern | {"invert": False}, facts["pre_tokenizer"]]
    return json.dumps(facts | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}})


PANIC = "a" * 40 + "b"


def folder(path: Path, content: str | None = None, **config: object) -> Path:
    """Makes a folder with a tokenizer.json and, if values are given, a tokenizer_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(content or trained(), encoding="utf-8")
    if config:
        (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def lines(texts: Iterable[str]) -> bytes:
    """Writes the texts as jsonl."""
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
