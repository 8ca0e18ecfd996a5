"""Compares how a tokenizer and transformers encode prompts, if transformers is installed."""

from __future__ import annotations

import random
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from parallel3d.data.tokenizer import TOKENIZER_CONFIG, FileTokenizer
from parallel3d.files import plain

TRANSFORMERS = "transformers"
# Classes of transformers that use tokenizer.json unchanged; other classes rebuild a tokenizer from
# parts of the file.
AS_IT_IS = ("PreTrainedTokenizer", "TokenizersBackend")
COUNT = 200  # number of compared texts
PIECES = (
    *("the", "def f(x):", "Hello", "wörld", "漢字", "😀", "1234", "3.14", "don't", "I'm", "a_b"),
    *(" ", "  ", "\n", "\n\n", "\t", ".", ", ", "!?", "(", ")", "e\u0301", "\u00a0", "ß", "Ω"),
)


def texts() -> list[str]:
    """Returns `COUNT` texts of words, numbers, spaces and punctuation in several scripts.

    Each call returns the same texts.
    """
    rng = random.Random(0)
    return ["".join(rng.choices(PIECES, k=rng.randint(0, 12))) for _ in range(COUNT)]


def unlike_theirs(tokenizer: FileTokenizer, folder: Path) -> str | None:
    """Returns a warning if transformers encodes prompts differently with the tokenizer in `folder`.

    Returns None if both give the same tokens, or if transformers is not installed. Importing
    transformers takes seconds, so the comparison is skipped if the tokenizer's class uses
    tokenizer.json unchanged.
    """
    made_by = str(tokenizer.beside.get(TOKENIZER_CONFIG, {}).get("tokenizer_class", AS_IT_IS[0]))
    if made_by.removesuffix("Fast") in AS_IT_IS or tokenizer.folder is None:
        return None
    try:
        name = f"{TRANSFORMERS} {version(TRANSFORMERS)}"
    except PackageNotFoundError:
        return None
    import transformers

    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            found = [list(theirs(text)["input_ids"]) for text in texts()]
    except Exception as error:  # any kind of error is possible, because the folder is untrusted
        why = " ".join(str(error).split())[:200] or type(error).__name__
        return f"{name} cannot load the tokenizer of {folder} ({plain(why)})"
    ours = [[*tokenizer.prefix, *tokenizer.encode_prompt(text.encode())] for text in texts()]
    odd = [k for k, (one, other) in enumerate(zip(ours, found, strict=True)) if one != other]
    if not odd:
        return None
    first = min(odd, key=lambda k: len(texts()[k]))
    return (
        f"{name} and parallel3d tokenize {len(odd)} of {COUNT} texts differently with the "
        f"tokenizer of {folder} (a {plain(made_by)}): for {texts()[first]!r}, {name} gives "
        f"{found[first][:8]}, but tokenizer.json, which parallel3d follows, gives {ours[first][:8]}"
    )
