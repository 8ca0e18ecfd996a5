"""Reads config.json key by key, and collects the keys that parallel3d does not understand."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from parallel3d.config.fields import show
from parallel3d.errors import UserError
from parallel3d.files import plain

SHOWN = 100  # maximum number of characters of a refused value in a message
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
}
_REFUSED = object()


class Keys:
    """Reads keys of config.json or of an object in it; `finish` returns those that were not read.

    A key that is not read may change the model's results, or not: only a comparison with
    transformers can tell.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        where: str = "config.json",
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Takes the keys of `content`.

        Args:
            where: name of the content in messages.
            aliases: other name → key. If both are present, the value of the other name is used, as
                in transformers.
        """
        self.where = where
        self._left = dict(content)
        self._doubtful: dict[str, Any] = {}
        for alias, key in (aliases or {}).items():
            if alias in self._left:
                self._left[key] = self._left.pop(alias)

    def get(self, key: str, default: Any, kind: type, *, null: Any = _REFUSED) -> Any:
        """Returns the value of `key`, or `default` if the key is absent.

        Raises UserError if the value is not of type `kind`; a whole number may stand for a float.
        For null, the method returns the argument `null`. Without this argument, null is only
        allowed if `default` is None; the result is then None.
        """
        value = self._left.pop(key, _REFUSED)
        if value is _REFUSED:
            return default
        if value is None and (null is not _REFUSED or default is None):
            return default if null is _REFUSED else null
        if type(value) is kind or (kind is float and type(value) is int):
            return value
        raise self.error(key, value, f"it must be {WORDS[kind]}")

    def require(self, key: str, allowed: tuple[Any, ...], default: Any, why: str = "") -> Any:
        """Returns the value of `key`, or `default` if the key is absent.

        Raises UserError unless `allowed` contains the value. `why` ends the message.
        """
        value = self.take(key, default)
        if value not in allowed:
            choices = " or ".join(show(choice) for choice in allowed)
            raise self.error(key, value, f"it must be {choices}{why}")
        return value

    def take(self, key: str, default: Any) -> Any:
        """Returns the value of `key`, of any type, or `default` if the key is absent."""
        return self._left.pop(key, default)

    def has(self, key: str) -> bool:
        return key in self._left

    def expect(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Takes a key that most models ignore; with another value it counts as not read."""
        if (value := self.take(key, allowed[0])) not in allowed:
            self._doubtful[key] = value

    def include(self, name: str, inner: Keys) -> None:
        """Counts the keys that were not read in the object `name` as not read here."""
        self._doubtful |= {f"{name}.{key}": value for key, value in inner.finish().items()}

    def finish(self, about: Collection[str] = ()) -> dict[str, Any]:
        """Returns the keys that were not read, with their values.

        `about` names keys that describe the file and not the model.
        """
        return self._doubtful | {k: v for k, v in self._left.items() if k not in about}

    def error(self, key: str, value: Any, must: str) -> UserError:
        return UserError(
            f"{self.where} has {key}={_brief(value)}, which our model cannot express: {must}"
        )


def listed(unread: Mapping[str, Any]) -> str:
    """Returns keys with their values for a sentence, which is cut off if they are many."""
    return plain(", ".join(f"{key}={_brief(value)}" for key, value in unread.items()))


def _brief(value: Any) -> str:
    text = show(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
