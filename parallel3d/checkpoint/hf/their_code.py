"""Finds out from the code of transformers whether its models use a key of config.json.

The code is read as text; nothing of transformers is imported.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.hf.read_keys import listed
from parallel3d.errors import UserError

# Files that compute with the configuration of any model.
SHARED = ("masking_utils.py", "modeling_rope_utils.py", "activations.py")


def check_unread(where: str, kind: str, unread: Mapping[str, Any], why: str, remedy: str) -> None:
    """Raises UserError for unread keys if no comparison of logits is made.

    Keys that the code of transformers does not mention are allowed, because they have no effect.

    Args:
        where: the folder's key and value, such as "from=llama".
        kind: the format, such as "llama".
        unread: keys of config.json that parallel3d does not read, with their values.
        why: why no comparison is made.
        remedy: what to do, as the end of the sentence.
    """
    left = {key: unread[key] for key in _mentioned(kind, unread)}
    if left:
        raise UserError(
            f"{where}: config.json has {listed(left)}, which parallel3d does not read and which "
            f"may change the model, and {why}; {remedy}"
        )


def _mentioned(kind: str, names: Iterable[str]) -> list[str]:
    """Returns those of the keys that the code of a model of transformers mentions.

    Without transformers, all keys are returned.
    """
    code = _code_of(kind)
    return [name for name in names if code is None or _is_mentioned(name, code)]


def _is_mentioned(name: str, code: Mapping[str, str]) -> bool:
    """Returns whether code reads a key of its configuration, or has its name as text."""
    last = re.escape(name.rpartition(".")[2])
    return any(
        re.search(rf"{owner}\.{last}\b|[\"']{last}[\"']", text) for text, owner in code.items()
    )


def _code_of(kind: str) -> dict[str, str] | None:
    """Returns the code of a format's model and configuration; None if it is not at hand.

    Each text comes with the name that a configuration has in it.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    root, name = Path(spec.origin).parent, kind.removesuffix("_text")
    files = {root / "models" / name / f"configuration_{name}.py": "self"}
    files[root / "configuration_utils.py"] = "self"
    files |= dict.fromkeys((root / "models" / name / f"modeling_{name}.py",), "config")
    files |= dict.fromkeys((root / shared for shared in SHARED), "config")
    if not all(file.is_file() for file in files):
        return None
    return {file.read_text(encoding="utf-8"): owner for file, owner in files.items()}
