"""Maps the types of Hugging Face models' attention layers to ours.

Layers may have a sliding window, and may lack rotary positions. This module neither imports torch
nor opens files.
"""

from __future__ import annotations

from typing import Any

from parallel3d.checkpoint.hf.families import Family
from parallel3d.checkpoint.hf.read_keys import Keys
from parallel3d.errors import UserError
from parallel3d.models.dialect import FULL, FULL_NOPE, LAYER_TYPES, SLIDING, SLIDING_NOPE
from parallel3d.models.keys import ModelConfig
from parallel3d.text import count

THEIR_FULL, THEIR_SLIDING = "full_attention", "sliding_attention"
TYPES, WINDOW, SWITCH, LAST = (
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
)
# In no_rope_layers, despite its name, 1 means that a layer has positions.
ROTATED, INTERVAL = "no_rope_layers", "no_rope_layer_interval"
# (has a window, has positions) → our layer type.
WORDS = {
    (False, True): FULL,
    (True, True): SLIDING,
    (False, False): FULL_NOPE,
    (True, False): SLIDING_NOPE,
}


def pattern_of(words: list[str]) -> list[str]:
    """Returns the shortest `model.layer_types` whose repetition gives the layer types `words`.

    The result is [] if all layers are full.
    """
    count = len(words)
    for period in range(1, count + 1):
        if all(words[layer] == words[layer % period] for layer in range(period, count)):
            return [] if words[:period] == [FULL] else words[:period]
    return []


def words_of(model: ModelConfig) -> list[str]:
    """Returns the layer type of every layer of the model."""
    return [model.layer_type(layer) for layer in range(model.num_layers)]


def read_layers(keys: Keys, family: Family, layers: int, positions: int) -> dict[str, Any]:
    """Returns our keys `layer_types` and `sliding_window` for a config.json.

    Raises UserError for values that transformers refuses or our model cannot express. `positions`
    is the maximum sequence length.
    """
    windows = family.windows
    types = _read_types(keys, layers)
    if windows is None:
        keys.require(SWITCH, (False,), False)
        keys.require(WINDOW, (None,), None)
        keys.take(LAST, None)  # without windows, no version of transformers reads it
        slides = types or [False] * layers
        if any(slides):
            raise keys.error(TYPES, THEIR_SLIDING, f"it must be {THEIR_FULL}")
        return {}
    size = keys.get(WINDOW, windows.size, int, null=None)
    if not windows.switch:
        keys.require(SWITCH, (False,), False)
    elif not keys.get(SWITCH, False, bool):
        size = None
    rotated = [True] * layers
    if windows.rule == "unrotated":
        rotated = _read_rotated(keys, windows.period, layers)
    usual = _usual(keys, family, layers, size, rotated)
    slides = usual if types is None else types
    if not windows.by_layer and slides != usual:
        word = THEIR_SLIDING if any(usual) else THEIR_FULL
        given = [THEIR_SLIDING if each else THEIR_FULL for each in slides]
        raise keys.error(TYPES, given, f"with {WINDOW}={size} every layer must be {word}")
    if any(slides) and size is None:
        off = " and use_sliding_window must be true" if windows.switch else ""
        raise UserError(
            f"config.json has {THEIR_SLIDING} layers: {WINDOW} must be a whole number{off}"
        )
    if windows.nope and size is not None:
        rotated = slides
    if not windows.by_layer and size is not None and size >= positions:
        slides = [False] * layers  # the window has no effect, as no sequence is longer
    words = [WORDS[kind] for kind in zip(slides, rotated, strict=True)]
    return {TYPES: pattern_of(words), WINDOW: size if any(slides) else None}


def _read_types(keys: Keys, layers: int) -> list[bool] | None:
    """Returns which layers have a window in layer_types, or None if config.json lacks this key."""
    kinds = keys.get("attn_type_list", None, list)  # MiniMax's key; 1 is full attention
    if kinds is not None and any(one != 1 for one in kinds):
        raise keys.error("attn_type_list", kinds, "every entry must be 1")
    types = keys.get(TYPES, None, list)
    if types is None:
        return None
    for layer_type in types:
        Keys({TYPES: layer_type}).require(TYPES, (THEIR_FULL, THEIR_SLIDING), None)
    if len(types) != layers:
        raise UserError(
            f"config.json has layer_types for {count(len(types), 'layer')}, but "
            f"num_hidden_layers={layers}"
        )
    return [layer_type == THEIR_SLIDING for layer_type in types]


def _read_rotated(keys: Keys, period: int, layers: int) -> list[bool]:
    """Returns which layers have rotary positions."""
    listed = keys.get(ROTATED, None, list)
    interval = keys.get(INTERVAL, period, int)
    if listed is None:
        if interval < 1:
            raise keys.error(INTERVAL, interval, "it must be at least 1")
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(listed) < layers or any(type(one) is not int or one not in (0, 1) for one in listed):
        raise keys.error(ROTATED, listed, f"it must have 0 or 1 for each of the {layers} layers")
    return [one == 1 for one in listed[:layers]]


def _usual(
    keys: Keys, family: Family, layers: int, size: int | None, rotated: list[bool]
) -> list[bool]:
    """Returns which layers have a window if config.json has no layer_types."""
    windows = family.windows
    assert windows is not None
    every = range(layers)
    if windows.rule in ("late", "early"):
        last = keys.get(LAST, windows.last, int)
        if size is None:
            return [False] * layers
        if windows.rule == "late":
            return [layer >= last for layer in every]
        return [layer < last and layer % 2 == 0 for layer in every]
    if size is None:
        keys.take(LAST, None)
    if windows.rule == "period":
        period = windows.period
        if windows.nope and size is None:
            keys.take(windows.period_key, period)  # transformers writes 0 here, which is ignored
            return [False] * layers
        if windows.period_key:
            period = _read_period(keys, windows.period_key, period)
        return [(layer + 1) % period != 0 for layer in every]
    if windows.rule == "unrotated":
        return [size is not None and not has_positions for has_positions in rotated]
    return [size is not None] * layers


def _read_period(keys: Keys, key: str, usual: int) -> int:
    """Returns the period that a key gives as a number or, for EXAONE, as text such as LLLG."""
    value = keys.take(key, usual)
    if isinstance(value, str) and value[-1:] == "G" and set(value[:-1]) == {"L"}:
        return len(value)
    if type(value) is int and value >= 1:
        return value
    raise keys.error(key, value, "it must be a whole number of at least 1")


def written_layers(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the keys of config.json for a model's layer types."""
    windows = family.windows
    if windows is None:
        return {}
    words = words_of(model)
    slides = [word in (SLIDING, SLIDING_NOPE) for word in words]
    size = model.sliding_window if any(slides) else None
    found: dict[str, Any] = {SWITCH: any(slides)} if windows.switch else {}
    if not windows.by_layer:
        return found | {WINDOW: size}
    if windows.rule == "unrotated":
        found[ROTATED] = [int(word in (FULL, SLIDING)) for word in words]
    if windows.rule == "period":
        # Without a window size, transformers fails to build a mask, or applies RoPE to full layers.
        if size is None and (not windows.nope or FULL_NOPE in words):
            size = windows.size
    elif not any(slides):
        return found if windows.switch else found | {WINDOW: None}
    types = [THEIR_SLIDING if slides_here else THEIR_FULL for slides_here in slides]
    return found | {WINDOW: size, TYPES: types}


def wanted_layers(model: ModelConfig, family: Family) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Returns (key, the model's value, allowed values) for our keys of the layer types."""
    windows, words = family.windows, words_of(model)
    kinds, given = set(words), pattern_of(words)
    words = [word if word in LAYER_TYPES else FULL for word in words]  # no format has other mixers
    found: list[tuple[str, Any, tuple[Any, ...]]] = []
    if windows is None:
        allowed: tuple[Any, ...] = ([],)
    elif windows.rule == "unrotated":
        allowed = (pattern_of(words),)
    elif windows.nope:
        hybrid = pattern_of([{FULL: FULL_NOPE, SLIDING_NOPE: SLIDING}.get(w, w) for w in words])
        allowed = ([],) if kinds == {FULL} else (hybrid,)
    elif windows.by_layer:
        full = {FULL_NOPE: FULL, SLIDING_NOPE: SLIDING}
        allowed = (pattern_of([full.get(word, word) for word in words]),)
    else:
        allowed = ([], [SLIDING])
    found.append((TYPES, given, allowed))
    if family.local_base is None and kinds & {SLIDING}:
        found.append(("sliding_rotary_base", model.sliding_rotary_base, (None,)))
    return found
