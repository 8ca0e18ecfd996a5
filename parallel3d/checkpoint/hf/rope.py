"""Maps the keys of config.json for rotary positions to ours: base, scaling, share of a head.

This module neither imports torch nor opens files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from parallel3d.checkpoint.hf.families import Family
from parallel3d.checkpoint.hf.layers import THEIR_FULL, THEIR_SLIDING
from parallel3d.checkpoint.hf.read_keys import Keys
from parallel3d.errors import UserError
from parallel3d.models.dialect import LINEAR, LLAMA3, LONGROPE, YARN
from parallel3d.models.keys import ModelConfig

THETA, KIND, OLD_KIND = "rope_theta", "rope_type", "type"
POSITIONS = "max_position_embeddings"
NEW, OLD = "rope_parameters", "rope_scaling"
ORIGINAL = "original_max_position_embeddings"
PART, ROTARY_DIM = "partial_rotary_factor", "rotary_dim"
BETA = "llama_4_scaling_beta"
SECTIONS, INTERLEAVED = "mrope_section", "mrope_interleaved"
OF_LLAMA3 = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    ORIGINAL: "rope_original_length",
}
OF_YARN = {
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "truncate": "rope_truncate",
}
OF_LONGROPE = {"short_factor": "rope_short_factors", "long_factor": "rope_long_factors"}
ATTENTION = "attention_factor"


def read_rope(
    keys: Keys, family: Family, positions: int, width: int, slides: bool
) -> dict[str, Any]:
    """Returns our keys for base, scaling and rotated share, with transformers' precedence.

    If `rope_scaling` exists, it replaces all of `rope_parameters`. A base inside either object
    overrides the top-level base, but a top-level `original_max_position_embeddings` overrides the
    inner one, whose default is the number of positions. Families with a separate base for layers
    with a window have `rope_parameters` for each kind of layer, and `rope_scaling` adds to those of
    full layers. The result is empty if no layer has positions.

    Args:
        positions: maximum sequence length.
        width: size of a head.
        slides: whether any layer has a window.
    """
    old = keys.get(OLD, None, dict)
    given = keys.has(NEW)
    new = keys.get(NEW, None, dict)
    is_open = given and new is None and not old and not keys.has(THETA)
    if family.may_lack_positions and is_open:
        raise UserError(
            f"config.json has {NEW}=null without {THETA}, which transformers takes for "
            f"{THETA}={family.base:g} and others for no positions: add {THETA}, which may be null "
            "for no positions"
        )
    if family.local_base is not None:
        return _read_by_kind(keys, family, old, new, positions, width, slides)
    content: dict[str, Any] = old or (dict(family.rope) if new is None else new)
    for key, value in content.items():
        if isinstance(value, dict):
            raise UserError(
                f"config.json has separate rope_parameters for {key}, which our model cannot "
                "express: all layers must have the same rope_parameters"
            )
    rope = Keys(content, "the object rope_parameters of config.json")
    null: dict[str, Any] = {"null": None} if family.may_lack_positions else {}
    top = keys.get(THETA, family.base, float, **null)
    if null and content.get(THETA, top) is None:
        return {}
    if family.multimodal:
        _read_sections(rope)
    found = _read(keys, rope, family, positions, width, top)
    if family.has_temperature:
        beta = rope.get(BETA, None, float)
        if beta is None:
            raise rope.error(BETA, None, "it must be a number")
        found["query_temperature"] = float(beta)
        rope.get(POSITIONS, 0, int)  # the key is accepted, but has no effect
        if beta and "rope_original_length" not in found:
            found["rope_original_length"] = rope.get(ORIGINAL, None, int)
            if found["rope_original_length"] is None:
                raise rope.error(ORIGINAL, None, "it must be a whole number")
    if family.has_temperature:
        rope.take(ORIGINAL, None)  # read above, unless the scaling's own reader has read it
    keys.include(NEW, rope)
    return found


def _read_sections(rope: Keys) -> None:
    """Raises UserError unless the shares of time, height and width have their known form.

    All three positions of a token of text are the same, so that the shares have no effect.
    """
    shares = rope.get(SECTIONS, None, list)
    if shares is not None and not (
        len(shares) == 3 and all(type(share) is int and share >= 0 for share in shares)
    ):
        raise rope.error(SECTIONS, shares, "it must be three whole numbers of at least 0")
    rope.require(INTERLEAVED, (True,), True)


def kept_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object rope_parameters with its keys for images and videos alone, if any."""
    content = config.get(OLD) or config.get(NEW)
    if not isinstance(content, dict):
        return {}
    found = {key: content[key] for key in (SECTIONS, INTERLEAVED) if key in content}
    return {NEW: found} if found else {}


def _read_by_kind(
    keys: Keys,
    family: Family,
    old: Mapping[str, Any] | None,
    new: Mapping[str, Any] | None,
    positions: int,
    width: int,
    slides: bool,
) -> dict[str, Any]:
    by_kind = Keys(new or {}, "the object rope_parameters of config.json")
    # transformers uses the top-level base for full layers only; for the base of layers with a
    # window, a family has another key or none.
    bases = {THEIR_FULL: keys.get(THETA, family.base, float), THEIR_SLIDING: family.local_base}
    if family.local_key:
        bases[THEIR_SLIDING] = keys.get(family.local_key, family.local_base, float)
    found: dict[str, dict[str, Any]] = {}
    for kind, base in bases.items():
        content = by_kind.get(kind, {KIND: "default"}, dict, null={KIND: "default"})
        if kind == THEIR_FULL:
            content = {**content, **(old or {})}
        rope = Keys(content, f"the object rope_parameters.{kind} of config.json")
        # transformers reads this key at the top level only, so that it would have no effect here.
        rope.require("truncate", (True,), True)
        found[kind] = _read(keys, rope, family, positions, width, base)
        keys.include(f"{NEW}.{kind}", rope)
    keys.include(NEW, by_kind)
    full, sliding = found[THEIR_FULL], found[THEIR_SLIDING]
    if not slides or sliding == full:
        return full
    if sliding.keys() != {"rotary_base"}:
        raise UserError(
            f"config.json has a RoPE scaling for {THEIR_SLIDING} that differs from that for "
            f"{THEIR_FULL}, which our model cannot express: {KIND} of {THEIR_SLIDING} must be "
            "default"
        )
    return full | {"sliding_rotary_base": sliding["rotary_base"]}


def _read(
    keys: Keys, rope: Keys, family: Family, positions: int, width: int, top: float | None
) -> dict[str, Any]:
    """Returns our keys for one set of rope_parameters; `top` is the base if the set has none."""
    old_name = rope.get(OLD_KIND, "default", str)
    names = (*family.scalings, *family.rope_names)
    kind = rope.require(KIND, names, old_name)
    kind = family.rope_names.get(kind, kind)
    found = {"rotary_base": float(rope.get(THETA, top, float))}
    if family.rotary is None:
        for place in (rope, keys):
            place.require(PART, (1.0,), 1.0)
        turned = width
    else:
        found["rotary_percent"] = _rotary_percent(keys, rope, family, width)
        turned = int(width * found["rotary_percent"])
    if kind == "default":
        keys.get(ORIGINAL, 0, int)  # the key is accepted, but has no effect
        return found
    return found | _SCALINGS[kind](keys, rope, family, positions, turned)


def _rotary_percent(keys: Keys, rope: Keys, family: Family, width: int) -> float:
    """Returns the share of a head that RoPE rotates.

    partial_rotary_factor in `rope` takes precedence, then the same key at the top level, then
    MiniMax's rotary_dim, then the family's default.
    """
    share = family.rotary
    if family.has_rotary_dim:
        rotated = keys.get(ROTARY_DIM, None, int)
        share = share if rotated is None else rotated / width
    share = float(rope.get(PART, keys.get(PART, share, float), float))
    if int(width * share) % 2:
        raise keys.error(PART, share, f"it must rotate an even number of the {width} dimensions")
    return share


def _original(keys: Keys, rope: Keys, family: Family, positions: int) -> int:
    """Returns the sequence length of the model's original training."""
    inside = rope.get(ORIGINAL, positions, int)
    if family.local_base is not None:  # for these families, the top-level key has no effect
        keys.get(ORIGINAL, 0, int)
        return int(inside)
    if family.original is not None:
        inside = family.original
    return int(keys.get(ORIGINAL, inside, int))


def _factor(rope: Keys, kind: str, positions: int | None = None, original: int = 1) -> float:
    """Returns the scaling factor.

    If config.json has none, the factor is `positions` / `original`. Without `positions`, a missing
    factor raises UserError.
    """
    if positions is None:
        if not rope.has("factor"):
            raise UserError(f"config.json has rope_type={kind} without factor")
        found = rope.get("factor", 1.0, float)
    else:
        found = rope.get("factor", None, float)
        found = positions / max(1, original) if found is None else found
    if found < 1:
        raise rope.error("factor", found, "it must be at least 1")
    return float(found)


def _linear(keys: Keys, rope: Keys, family: Family, positions: int, turned: int) -> dict[str, Any]:
    keys.get(ORIGINAL, 0, int)  # the key is accepted, but has no effect
    return {"rope_scaling": LINEAR, "rope_scaling_factor": _factor(rope, "linear")}


def _llama3(keys: Keys, rope: Keys, family: Family, positions: int, turned: int) -> dict[str, Any]:
    values: dict[str, Any] = {ORIGINAL: _original(keys, rope, family, positions)}
    for theirs in ("factor", "low_freq_factor", "high_freq_factor"):
        if not rope.has(theirs):
            raise UserError(f"config.json has rope_type=llama3 without {theirs}")
        values[theirs] = float(rope.get(theirs, 0.0, float))
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    if low >= high:
        raise UserError(
            f"config.json has rope_type=llama3 with low_freq_factor={low:g}, which must be below "
            f"high_freq_factor={high:g}"
        )
    return {ours: values[theirs] for theirs, ours in OF_LLAMA3.items()}


def _yarn(keys: Keys, rope: Keys, family: Family, positions: int, turned: int) -> dict[str, Any]:
    original = _original(keys, rope, family, positions)
    if not rope.has("factor"):
        raise UserError("config.json has rope_type=yarn without factor")
    factor = _factor(rope, "yarn", positions, original)
    given = rope.get(ATTENTION, None, float)
    one, all_dims = (rope.get(key, None, float) for key in ("mscale", "mscale_all_dim"))
    if given is None and one and all_dims:
        given = _length(factor, one) / _length(factor, all_dims)
    return {
        "rope_scaling": YARN,
        "rope_scaling_factor": factor,
        "rope_original_length": original,
        "rope_attention_factor": None if given is None else float(given),
        "rope_beta_fast": float(rope.get("beta_fast", None, float) or 32.0),
        "rope_beta_slow": float(rope.get("beta_slow", None, float) or 1.0),
        "rope_truncate": rope.get("truncate", True, bool),
    }


def _length(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(
    keys: Keys, rope: Keys, family: Family, positions: int, turned: int
) -> dict[str, Any]:
    original = _original(keys, rope, family, positions)
    factor = _factor(rope, "longrope", positions, original)
    found: dict[str, Any] = {
        "rope_scaling": LONGROPE,
        "rope_scaling_factor": factor,
        "rope_original_length": original,
        "rope_attention_factor": rope.get(ATTENTION, None, float),
    }
    if original < 2 and found["rope_attention_factor"] is None:
        raise rope.error(ORIGINAL, original, "it must be at least 2")
    if original > 1 and found["rope_attention_factor"] == longrope_attention(factor, original):
        found["rope_attention_factor"] = None  # an export writes the default, too
    for theirs, ours in OF_LONGROPE.items():
        factors = rope.get(theirs, [], list)
        if len(factors) != turned // 2 or not all(_is_positive(one) for one in factors):
            raise rope.error(
                theirs,
                factors,
                f"it must be {turned // 2} numbers above 0, one for each pair of dimensions",
            )
        found[ours] = [float(one) for one in factors]
    return found


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


_SCALINGS = {LINEAR: _linear, LLAMA3: _llama3, YARN: _yarn, LONGROPE: _longrope}


def written_rope(model: ModelConfig, family: Family, positions: int) -> dict[str, Any]:
    """Returns the keys of config.json for rotary positions, for old and new transformers.

    `positions` is the value of max_position_embeddings, unless the result has another one.
    """
    if family.may_lack_positions and not model.ropes:
        return {THETA: None, NEW: {THETA: None, KIND: "default"}}
    scaling = _written_scaling(model)
    base = {THETA: model.rotary_base}
    keys: dict[str, Any] = dict(base)
    if scaling[KIND] != "default":  # the form of transformers before version 5
        keys[OLD] = dict(scaling)
    if scaling[KIND] == LONGROPE:
        keys[ORIGINAL] = model.rope_original_length  # versions before 5 read it here only
    if family.local_base is not None:
        local = base | scaling
        if model.sliding_rotary_base is not None:
            local = {THETA: model.sliding_rotary_base, KIND: "default"}
        if family.local_key:
            keys[family.local_key] = local[THETA]
        return keys | {NEW: {THEIR_FULL: base | scaling, THEIR_SLIDING: local}}
    if family.rotary is not None:
        scaling = scaling | {PART: model.rotary_percent}
        keys[PART] = model.rotary_percent
    if family.has_rotary_dim:
        keys[ROTARY_DIM] = int(model.head_size * model.rotary_percent)
    if family.original is not None:
        keys.setdefault(ORIGINAL, positions)
        if scaling[KIND] == LONGROPE:
            keys |= _as_phi3(model, positions)
    if family.has_temperature:
        scaling = scaling | {BETA: model.query_temperature, ORIGINAL: model.rope_original_length}
        if OLD in keys:  # rope_scaling replaces rope_parameters, so it needs all keys
            keys[OLD] = base | scaling
    return keys | {NEW: base | scaling}


def unlike_before_5(model: ModelConfig, family: Family) -> str | None:
    """Returns a sentence if transformers before 5 reads an export's positions differently, or None.

    These versions never scale the positions of layers with a window, and OLMo 3 has one base for
    all layers in them.
    """
    if family.local_base is None or model.sliding_window is None:
        return None
    base = model.sliding_rotary_base
    if base is None:
        same = not _is_scaled(model)
    else:
        same = bool(family.local_key) or base == model.rotary_base
    if same:
        return None
    return (
        "transformers before 5 reads other rotary positions in layers with a window, namely "
        f"rope_theta={model.rotary_base:g} without scaling: open the folder with transformers 5"
    )


def _as_phi3(model: ModelConfig, positions: int) -> dict[str, Any]:
    """Returns the keys of Phi-3's LongRoPE as all versions of transformers read them, if possible.

    Versions before 5 take no more than three keys in rope_scaling. The attention factor then
    follows from the maximum length over the original one. A model with another attention factor has
    further keys, which these versions refuse.
    """
    original, factor = model.rope_original_length, model.rope_scaling_factor
    whole = round(factor * original)
    if math.isclose(whole, factor * original) and whole >= model.seq_length:
        positions = whole
    found: dict[str, Any] = {POSITIONS: positions}
    if original < 2:  # has no default
        return found
    usual = longrope_attention(max(1.0, positions / original), original)
    if math.isclose(_attention_of(model), usual, rel_tol=1e-9):
        lists = {theirs: getattr(model, ours) for theirs, ours in OF_LONGROPE.items()}
        found[OLD] = {OLD_KIND: LONGROPE, **lists}
    return found


def _attention_of(model: ModelConfig) -> float:
    if model.rope_attention_factor is not None:
        return model.rope_attention_factor
    return longrope_attention(model.rope_scaling_factor, model.rope_original_length)


def longrope_attention(factor: float, original: int) -> float:
    """Returns LongRoPE's default of the attention factor."""
    return math.sqrt(1.0 + math.log(factor) / math.log(original))


def _is_scaled(model: ModelConfig) -> bool:
    """Returns whether the model scales positions in any layer."""
    in_yarn = model.rope_scaling == YARN and model.rope_attention_factor is not None
    return model.rope_scaling_factor != 1 or model.rope_scaling == LONGROPE or in_yarn


def _written_scaling(model: ModelConfig) -> dict[str, Any]:
    if not _is_scaled(model):
        return {KIND: "default"}
    kind = model.rope_scaling
    if kind == LLAMA3:
        return {KIND: kind} | {theirs: getattr(model, ours) for theirs, ours in OF_LLAMA3.items()}
    found: dict[str, Any] = {KIND: kind, "factor": model.rope_scaling_factor}
    if kind == LINEAR:
        return found
    found[ORIGINAL] = model.rope_original_length
    if kind == LONGROPE:  # versions before 5 have another default
        found[ATTENTION] = _attention_of(model)
    elif model.rope_attention_factor is not None:
        found[ATTENTION] = model.rope_attention_factor
    more = OF_YARN if kind == YARN else OF_LONGROPE
    return found | {theirs: getattr(model, ours) for theirs, ours in more.items()}


def wanted_rope(model: ModelConfig, family: Family) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Returns (key, the model's value, allowed values) for the keys that the family restricts."""
    found: list[tuple[str, Any, tuple[Any, ...]]] = []
    if family.rotary is None:
        found.append(("rotary_percent", model.rotary_percent, (1.0,)))
    if not family.has_temperature:
        found.append(("query_temperature", model.query_temperature, (0.0,)))
    if _is_scaled(model):
        known = tuple(kind for kind in family.scalings if kind != "default")
        found.append(("rope_scaling", model.rope_scaling, known))
        if family.local_base is not None and model.rope_scaling == YARN:
            found.append(("rope_truncate", model.rope_truncate, (True,)))
    return found
