"""Which tokens a tokenizer's folder calls the end and the beginning of a text.

A tokenizer.json has tokens and no roles: those stand in the files beside it, in three formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from parallel3d.errors import UserError
from parallel3d.files.reading import parse_json, plain, read_bounded

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
