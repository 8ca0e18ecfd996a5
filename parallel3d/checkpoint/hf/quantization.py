"""Reads quantization_config of config.json, which says how the files hold quantized weights.

This module neither imports torch nor opens files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.config.fields import show
from parallel3d.errors import UserError, nearest_hint
from parallel3d.files import plain

QUANTIZED = "quantization_config"
METHOD, BLOCK, SCHEME = "quant_method", "weight_block_size", "activation_scheme"
FP8, MXFP4 = "fp8", "mxfp4"
_USUAL_BLOCK = [128, 128]
_LARGEST = 1 << 20  # rows or columns of a block; beyond 64 bits torch would fail
# Method → its keys with the values that are read, the default first. None of these keys changes a
# weight. For keys without values, null and any list of names are read: a tensor's own type and the
# scales beside it say whether it is quantized.
_KEYS: dict[str, dict[str, tuple[Any, ...]]] = {
    FP8: {
        SCHEME: ("dynamic", "static"),
        "fmt": (None, "e4m3", "float8_e4m3fn"),
        "scale_fmt": (None, "float", "ue8m0"),
        "expert_dtype": (None, "fp8"),
        "dequantize": (False, True),
        "weight_per_tensor": (False,),
        "act_per_tensor": (False, True),
        "modules_to_not_convert": (),
        "ignored_layers": (),
        "modules_to_convert": (),
    },
    MXFP4: {"dequantize": (False, True), "modules_to_not_convert": ()},
}
_READ = "fp8 in blocks (weight_scale_inv) and mxfp4 (experts in …_blocks and …_scales) are read"


@dataclass(frozen=True)
class Quantization:
    """Describes how a folder holds quantized weights.

    Attributes:
        method: "fp8" or "mxfp4".
        block: rows and columns that share a scale in fp8, or None if a tensor has one scale.
        static: whether the files hold scales of activations as well, which are left out.
        transposed: whether the family has the transpose of each matrix that is in MXFP4.
    """

    method: str
    block: tuple[int, int] | None = None
    static: bool = False
    transposed: bool = False

    @property
    def notice(self) -> str:
        """Returns the sentence that an import prints."""
        where = "tensor" if self.block is None else f"block of {self.block[0]} × {self.block[1]}"
        where = "32 weights in a row" if self.method == MXFP4 else where
        return (
            f"{QUANTIZED} of config.json has {METHOD}={self.method}: each {where} is multiplied by "
            "its scale in fp32 and then rounded once; the run and its exports are not quantized"
        )


def take_quantization(
    config: Mapping[str, Any], text: str | None = None
) -> tuple[dict[str, Any], Quantization | None]:
    """Returns config.json without quantization_config, and what this object says.

    The object may also stand in `text`, the object of a vision model's text model. Raises UserError
    for a method, key or value that is not read.
    """
    left = dict(config)
    found = left.pop(QUANTIZED, None)
    inner = None if text is None else left.get(text)
    if text is not None and isinstance(inner, dict):
        own = inner.get(QUANTIZED)
        left[text] = {key: value for key, value in inner.items() if key != QUANTIZED}
        if None not in (found, own) and found != own:
            raise UserError(f"config.json and its {text} have different objects {QUANTIZED}")
        found = own if found is None else found
    return left, None if found is None else _read(found)


def _read(content: Any) -> Quantization:
    if not isinstance(content, dict):
        raise UserError(f"config.json has {QUANTIZED}={show(content)}: it must be an object")
    method = content.get(METHOD)
    if method not in (FP8, MXFP4):
        hint = nearest_hint(str(method), _KEYS) or "; the nearest is the folder before quantization"
        raise _error(METHOD, method, f"{_READ}{hint}")
    known = _KEYS[method]
    for key, value in content.items():
        if key == METHOD or (key == BLOCK and method == FP8):
            continue
        if key not in known:
            names = [METHOD, *([BLOCK] if method == FP8 else []), *known]
            hint = nearest_hint(key, names) or f"; the nearest is a folder without {plain(key)}"
            raise _error(key, value, f"of {method}, {', '.join(names)} are read{hint}")
        allowed = known[key]
        if allowed and not any(type(value) is type(one) and value == one for one in allowed):
            choices = [show(one) for one in allowed]
            hint = nearest_hint(str(value), choices)
            raise _error(key, value, f"it must be {' or '.join(choices)}{hint}")
        is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if not allowed and value is not None and not is_list:
            raise _error(key, value, "it must be a list of names")
    if method == MXFP4:
        return Quantization(method)
    block = content.get(BLOCK, _USUAL_BLOCK)
    if block is not None and not (
        isinstance(block, list)
        and len(block) == 2
        and all(type(n) is int and 0 < n <= _LARGEST for n in block)
    ):
        must = f"it must be two whole numbers from 1 to {_LARGEST:,}, such as [128,128], or null"
        raise _error(BLOCK, block, must)
    size = None if block is None else (block[0], block[1])
    return Quantization(method, size, content.get(SCHEME) == "static")


def _error(key: str, value: Any, why: str) -> UserError:
    shown = plain(show(value))
    shown = shown if len(shown) <= 100 else f"{shown[:100]}…"
    return UserError(f"config.json has {QUANTIZED}.{plain(key)}={shown}, which is not read: {why}")
