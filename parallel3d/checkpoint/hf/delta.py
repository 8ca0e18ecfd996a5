"""Maps the keys of config.json for layers with a gated DeltaNet to ours.

transformers calls these layers linear attention. This module neither imports torch nor opens files.
"""

from __future__ import annotations

from typing import Any

from parallel3d.checkpoint.hf.families import DeltaNames, Family
from parallel3d.checkpoint.hf.layers import (
    LAST,
    SWITCH,
    THEIR_FULL,
    TYPES,
    WINDOW,
    pattern_of,
    words_of,
)
from parallel3d.checkpoint.hf.read_keys import Keys
from parallel3d.errors import UserError
from parallel3d.models.dialect import FULL, FULL_NOPE, GATED_DELTANET
from parallel3d.models.keys import ModelConfig
from parallel3d.text import count

THEIRS = "linear_attention"
INTERVAL = "full_attention_interval"
PERIOD = 4  # every fourth layer attends
NEGATIVE, TAPS = "linear_allow_neg_eigval", "linear_conv_kernel_dim"
# transformers' key → ours.
SIZES = {
    "linear_num_key_heads": "delta_key_heads",
    "linear_num_value_heads": "delta_value_heads",
    "linear_key_head_dim": "delta_key_size",
    "linear_value_head_dim": "delta_value_size",
}


def read_delta(keys: Keys, family: Family, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns our keys of the layer types, and of the layers with a gated DeltaNet.

    `sizes` are our keys of the model's size. Raises UserError for values that transformers refuses
    or our model cannot express.
    """
    names, layers = family.delta, sizes["num_layers"]
    assert names is not None
    keys.require(SWITCH, (False,), False)
    keys.require(WINDOW, (None,), None)
    keys.take(LAST, None)
    words = _read_words(keys, names, layers)
    found: dict[str, Any] = {TYPES: pattern_of(words)}
    taps = keys.get(TAPS, 4, int)
    given = _read_sizes(keys, names, sizes)
    negative = names.negative is not None and keys.get(NEGATIVE, names.negative, bool)
    if GATED_DELTANET not in words:
        return found
    for key, value in {TAPS: taps, **given}.items():
        if value < 1:
            raise keys.error(key, value, "it must be at least 1")
    heads, shared = given["linear_num_value_heads"], given["linear_num_key_heads"]
    if heads % shared:
        raise keys.error(
            "linear_num_value_heads",
            heads,
            f"it must be a multiple of linear_num_key_heads={shared}",
        )
    found |= {ours: given[theirs] for theirs, ours in SIZES.items()}
    found |= {"delta_convolution": taps, "delta_negative": negative}
    if names.norm_eps is not None:
        found["delta_norm_eps"] = names.norm_eps
    if names.norm_position != family.norm_position:
        found["delta_norm_position"] = names.norm_position
    return found


def without_positions(kinds: dict[str, Any]) -> dict[str, Any]:
    """Returns our keys of the layer types if no layer has rotary positions."""
    words = [FULL_NOPE if word == FULL else word for word in kinds[TYPES] or [FULL]]
    return kinds | {TYPES: words}


def _read_words(keys: Keys, names: DeltaNames, layers: int) -> list[str]:
    """Returns our word for the type of each layer."""
    interval = PERIOD
    if names.sizes is not None:  # of Qwen; OLMo Hybrid has no such key
        interval = keys.get(INTERVAL, PERIOD, int, null=None)
    types = keys.get(TYPES, None, list)
    if types is None:
        if interval is None or interval < 1:
            raise keys.error(INTERVAL, interval, "it must be at least 1")
        types = [THEIRS if (layer + 1) % interval else THEIR_FULL for layer in range(layers)]
        if names.both_kinds and layers and THEIR_FULL not in types:
            types[-1] = THEIR_FULL
    for layer_type in types:
        Keys({TYPES: layer_type}).require(TYPES, (THEIR_FULL, THEIRS), None)
    if len(types) != layers:
        raise UserError(
            f"config.json has layer_types for {count(len(types), 'layer')}, but "
            f"num_hidden_layers={layers}"
        )
    if names.both_kinds and len({*types}) < 2:
        raise keys.error(TYPES, types, f"it must have both {THEIRS} and {THEIR_FULL}")
    return [GATED_DELTANET if layer_type == THEIRS else FULL for layer_type in types]


def _read_sizes(keys: Keys, names: DeltaNames, sizes: dict[str, Any]) -> dict[str, int]:
    """Returns the values of the keys in `SIZES`."""
    if names.sizes is not None:
        return {key: keys.get(key, default, int) for key, default in names.sizes.items()}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    found = {key: keys.get(key, heads, int, null=heads) for key in [*SIZES][:2]}
    usual = int(0.75 * hidden / max(1, found["linear_num_key_heads"]))
    width = keys.get("linear_key_head_dim", usual, int, null=usual)
    found["linear_key_head_dim"] = width
    value = keys.get("linear_value_head_dim", 2 * width, int, null=2 * width)
    return found | {"linear_value_head_dim": value}


def written_delta(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the keys of config.json for a model's layer types and its gated DeltaNets."""
    names, words = family.delta, words_of(model)
    assert names is not None
    types = [THEIRS if word == GATED_DELTANET else THEIR_FULL for word in words]
    found: dict[str, Any] = {TYPES: types}
    if GATED_DELTANET in words:
        for (theirs, _), value in zip(SIZES.items(), _sizes(model), strict=True):
            found[theirs] = value
        found[TAPS] = model.delta_convolution
        if names.negative is not None:
            found[NEGATIVE] = model.delta_negative
    return found


def _sizes(model: ModelConfig) -> tuple[int, ...]:
    return (model.key_heads, model.value_heads, *model.delta_sizes)


def wanted_delta(model: ModelConfig, family: Family) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Returns (key, the model's value, allowed values) for the keys that the family restricts."""
    names, words = family.delta, words_of(model)
    assert names is not None
    full = FULL_NOPE if family.may_lack_positions and FULL_NOPE in words else FULL
    allowed = [word if word == GATED_DELTANET else full for word in words]
    if names.both_kinds and len({*allowed}) < 2:
        other = full if GATED_DELTANET in allowed else GATED_DELTANET
        allowed = [*allowed[:-1], other]
    found: list[tuple[str, Any, tuple[Any, ...]]] = [
        (TYPES, pattern_of(words), (pattern_of(allowed),))
    ]
    if GATED_DELTANET not in words:
        return found
    if names.negative is None:
        found.append(("delta_negative", model.delta_negative, (False,)))
    eps = model.delta_norm_eps or model.norm_eps
    found.append(("delta_norm_eps", eps, (names.norm_eps or model.norm_eps,)))
    position = model.delta_norm_position or model.norm_position
    found.append(("delta_norm_position", position, (names.norm_position,)))
    return found
