"""Reading single keys of a config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallel3d.config.fields import show
from parallel3d.errors import UserError


def reader(config: dict[str, Any]) -> Callable[[str, Any], Any]:
    """Reads a key; null and a missing key both stand for transformers' default."""

    def get(key: str, default: Any) -> Any:
        value = config.get(key)
        return default if value is None else value

    return get


def require(must: dict[str, tuple[Any, tuple[Any, ...]]]) -> None:
    """Key → its value and those that our model can express; raises UserError for another."""
    for key, (value, allowed) in must.items():
        if value not in allowed:
            choices = " or ".join(show(choice) for choice in allowed)
            raise UserError(
                f"config.json has {key}={show(value)}, which our model cannot express: it must "
                f"be {choices}"
            )
