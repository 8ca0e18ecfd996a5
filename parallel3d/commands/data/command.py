"""Parses `parallel3d data tokenize|train-tokenizer|show key=value …` and runs the verb."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel3d.commands.verbs import Verb, choose, parse, refusing, whole_number
from parallel3d.config.fields import show as shown
from parallel3d.data.inputs import KINDS, PACKED
from parallel3d.errors import UserError, nearest_hint

DATA = "data"
SMALLEST, LARGEST = 257, 1 << 24  # tokens of a trained tokenizer: 256 bytes and an end of text
INPUT = {
    "input": "files, folders, globs or addresses that fsspec knows, joined by commas: jsonl, "
    f"parquet, or text, a file a document; {' and '.join(PACKED)} are unpacked",
    "text_key": "key of jsonl, or column of parquet, that holds the text (text)",
    "format": f"of all of input: {', '.join(KINDS)} (by the files' names)",
}
VERBS = {
    "tokenize": Verb(
        "make a corpus of text, a pair of files as Megatron's; started again after a kill it goes "
        "on, and its bytes depend on neither that nor the workers",
        {
            "input": INPUT["input"],
            "to": "prefix of the corpus, as in corpora/web, which makes corpora/web.bin and .idx",
            "tokenizer": "byte, a tokenizer.json, a folder with one, or a name on the hub (byte)",
            "workers": "processes that make tokens (as many as there are cores)",
            "text_key": INPUT["text_key"],
            "format": INPUT["format"],
            "bad": "largest share of rows that may hold no document; they are left out (0.01)",
        },
        ("input", "to"),
        "parallel3d data tokenize input='dump/*.jsonl.zst' tokenizer=my/tokenizer.json "
        "to=corpora/web\n"
        "parallel3d data tokenize input=rows.parquet text_key=content to=corpora/rows workers=8",
    ),
    "train-tokenizer": Verb(
        "train a byte-level BPE tokenizer on text",
        {
            "input": INPUT["input"],
            "vocab_size": f"tokens to make, {SMALLEST} or more",
            "to": "file to make, NAME.json, or a folder to make with a tokenizer.json",
            "text_key": INPUT["text_key"],
            "format": INPUT["format"],
        },
        ("input", "vocab_size", "to"),
        "parallel3d data train-tokenizer input=book.txt vocab_size=8192 to=tok.json",
    ),
    "show": Verb(
        "show a corpus: documents, tokens, lengths, the first ones as text; reads every byte and "
        "proves it; exit code 1 if one is not as it was made",
        {
            "prefix": "of the corpus, without .bin and .idx",
            "tokenizer": "to read it with (the one that lies beside)",
            "documents": "how many of the first to show as text (3)",
        },
        ("prefix",),
        "parallel3d data show corpora/web\nparallel3d data show corpora/web documents=10",
        names=("prefix",),
    ),
}


def data(arguments: Sequence[str]) -> int:
    """Runs one `parallel3d data …` line; returns its exit code. Raises UserError."""
    name = choose(DATA, VERBS, arguments)
    if name is None:
        return 0
    command = f"{DATA} {name}"
    given, _ = parse(command, VERBS[name], arguments[1:])
    with refusing(command):
        return _run(name, given)


def _run(name: str, given: Mapping[str, str]) -> int:
    from parallel3d.commands.data import verbs

    if name == "show":
        count = whole_number("documents", given)
        return verbs.show(given["prefix"], given.get("tokenizer"), 3 if count is None else count)
    kind, text_key = given.get("format"), given.get("text_key", "text")
    if kind is not None and kind not in KINDS:
        hint = nearest_hint(kind, KINDS, "format=")
        raise UserError(f"format={shown(kind)} must be one of {', '.join(KINDS)}{hint}")
    to = Path(os.path.expanduser(given["to"]))
    if name == "train-tokenizer":
        vocab_size = whole_number("vocab_size", given, SMALLEST, LARGEST) or SMALLEST
        return verbs.train(given["input"], kind, text_key, vocab_size, to)
    workers = whole_number("workers", given, 1, 4096) or len(os.sched_getaffinity(0))
    tokenizer, bad = given.get("tokenizer", "byte"), share("bad", given.get("bad", "0.01"))
    return verbs.tokenize_corpus(given["input"], kind, text_key, tokenizer, to, workers, bad)


def share(key: str, text: str) -> float:
    """Returns a number from 0 to 1. Raises UserError for other text."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        near = 0 if number < 0 else 1 if number > 1 else 0.01
        raise UserError(
            f"{key}={shown(text)} must be a number of at least 0 and at most 1; the nearest is "
            f"{key}={near}"
        )
    return number
