"""Reads the text model of a vision model's folder, and keeps the other parts for an export.

A `…ForConditionalGeneration` folder holds a text model of a known family, an image encoder, and a
projector between them. A run trains the text model. The other tensors, the rest of config.json and
the processor's files are copied into the run's folder byte for byte, so that an export can write
the whole vision model even if the imported folder is gone. This module does not import torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from parallel3d.checkpoint.hf.config import ABOUT, EXPECTED, FIXED, TOKENS, TYPE
from parallel3d.checkpoint.hf.families import (
    FAMILIES,
    GEMMA3,
    LLAMA,
    MISTRAL,
    QWEN3_5,
    QWEN3_5_MOE,
)
from parallel3d.checkpoint.hf.quantization import QUANTIZED
from parallel3d.checkpoint.hf.read_keys import Keys
from parallel3d.data.tokenizer import CHAT_TEMPLATE, CONFIG, LARGEST_BESIDE, PROCESSORS_TEMPLATE
from parallel3d.errors import UserError
from parallel3d.files import (
    new_file,
    open_regular,
    parse_json,
    read_bounded,
    read_into,
    write_all,
    write_durably,
)

TEXT, VISION, TIED = "text_config", "vision_config", "tie_word_embeddings"
OTHERS = "others.safetensors"
PROCESSOR_FILES = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *(CHAT_TEMPLATE, PROCESSORS_TEMPLATE),
)
PIECE = 16 << 20  # number of bytes that are copied at a time
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Wrapper:
    """Describes a class of vision models, which wrap a text model.

    Attributes:
        text: model_type of the text model if text_config has none.
        tied: default of tie_word_embeddings, which ties the head to the text model's embedding.
        images: keys of the encoder, the projector and the tokens of images.
    """

    text: str
    tied: bool
    images: str


_QWEN3_5_IMAGES = (
    "image_token_id video_token_id vision_start_token_id vision_end_token_id language_model_only"
)
_PROJECTED = "image_token_index projector_hidden_act vision_feature_layer multimodal_projector_bias"
# model_type of the whole model → its class.
WRAPPERS = {
    "gemma3": Wrapper(
        GEMMA3,
        tied=True,
        images="boi_token_index eoi_token_index image_token_index mm_tokens_per_image",
    ),
    "mistral3": Wrapper(MISTRAL, tied=True, images=f"{_PROJECTED} spatial_merge_size"),
    "llava": Wrapper(
        LLAMA,
        tied=False,
        images=f"{_PROJECTED} image_seq_length vision_feature_select_strategy "
        # The class of transformers 4.36 wrote these two, and no class computes with them.
        "ignore_index vocab_size",
    ),
    "qwen3_5": Wrapper(QWEN3_5, tied=False, images=_QWEN3_5_IMAGES),
    "qwen3_5_moe": Wrapper(QWEN3_5_MOE, tied=False, images=_QWEN3_5_IMAGES),
}


class TextPart(NamedTuple):
    """What a vision model's config.json says of its text model.

    Attributes:
        config: the config of the text model, with special tokens from the top level.
        unread: keys of the top level that parallel3d does not read, with their values.
    """

    config: dict[str, Any]
    unread: dict[str, Any]


def text_part(config: Mapping[str, Any], *, alone: bool = False) -> TextPart:
    """Returns the text model of a vision model's config.json.

    With `alone`, the text model is used without the vision model, so that keys of the latter's
    class have no effect. Raises UserError for keys with values that our model cannot express.
    """
    wrapper = WRAPPERS[config[TYPE]]
    keys = Keys(config)
    for key, allowed in EXPECTED.items():
        keys.expect(key, allowed)
    for key, allowed in FIXED.items():
        keys.require(key, allowed, allowed[0])
    text = keys.get(TEXT, None, dict)
    if text is None:
        raise UserError(f"config.json has model_type={config[TYPE]} without {TEXT}")
    kind = text.get(TYPE, wrapper.text)
    for scale in FAMILIES[kind].scales if kind in FAMILIES and not alone else ():
        # Classes of vision models ignore these scales, so only neutral values are allowed.
        if scale.ours in ("logit_scale", "logit_cap"):
            neutral = None if scale.may_be_off else 1.0
            Keys(text, TEXT).require(scale.theirs, (neutral,), scale.usual)
    tokens = {key: config[key] for key in TOKENS if key in config}
    tied = {TIED: keys.get(TIED, wrapper.tied, bool)}
    about = {*ABOUT, *TOKENS, TYPE, VISION, "initializer_range", *wrapper.images.split()}
    part = {TYPE: wrapper.text, **text, **tokens, **({} if alone else tied)}
    return TextPart(part, keys.finish(about))


def whole_model(kept: Path) -> str | None:
    """Returns the model_type of the vision model in the folder `kept`, or None if it has none."""
    if not (kept / CONFIG).is_file():
        return None
    kind = str(parse_json(read_bounded(kept / CONFIG, LARGEST_BESIDE)).get(TYPE))
    return kind if kind in WRAPPERS else None


def whole_config(kept: Path, text: Mapping[str, Any], ends: Any) -> dict[str, Any]:
    """Returns the config.json of the imported folder with `text` as its text model.

    Args:
        kept: the folder that `keep_others` wrote.
        text: config of the text model, with its special tokens.
        ends: the new top-level `eos_token_id`, if the imported config.json has this key.
    """
    config: dict[str, Any] = parse_json(read_bounded(kept / CONFIG, LARGEST_BESIDE))
    inner = {key: value for key, value in text.items() if key != "architectures"}
    found = config | {TEXT: inner, TIED: text[TIED]}
    found.pop(QUANTIZED, None)
    found |= {key: text[key] for key in ("dtype", "torch_dtype")}
    return found | ({"eos_token_id": ends} if "eos_token_id" in config else {})


class StoredTensor(NamedTuple):
    """Describes a tensor in a file: its dtype, its shape, and where its bytes begin and end."""

    dtype: str
    shape: list[int]
    begin: int
    end: int


def extents_of(path: Path) -> dict[str, StoredTensor]:
    """Returns each tensor's place in a safetensors file, which `safe_open` must have checked."""
    with open_regular(path) as descriptor:
        size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        header = bytearray(size)
        read_into(descriptor, memoryview(header), 8)
    content = parse_json(bytes(header))
    content.pop(_METADATA, None)
    return {
        name: StoredTensor(e["dtype"], e["shape"], *(8 + size + at for at in e["data_offsets"]))
        for name, e in content.items()
    }


class Bytes(NamedTuple):
    """A tensor to write: its form, and a function that returns its bytes in pieces."""

    form: StoredTensor
    read: Callable[[], Iterable[memoryview]]


def keep_others(
    folder: Path,
    files: Sequence[Path],
    names: Collection[str],
    to: Path,
    *,
    whole: bool,
    computed: Mapping[str, Bytes],
) -> None:
    """Writes the tensors `names` into the folder `to`.

    `files` are the files with the weights; if several hold a tensor, the last file counts. The
    tensors in `computed` are not those of the files. With `whole`, the folder holds a vision model,
    whose config.json and processor's files are written, too. Raises OSError, and raises ValueError
    for a .json file that is not valid JSON.
    """
    for name in (CONFIG, *PROCESSOR_FILES) if whole else ():
        if (folder / name).is_file():
            content = read_bounded(folder / name, LARGEST_BESIDE)
            if name.endswith(".json"):
                parse_json(content)
            write_durably(to / name, content)
    where = {
        name: Bytes(extent, partial(_pieces, path, extent))
        for path in files
        for name, extent in extents_of(path).items()
    }
    found = {name: computed.get(name) or where[name] for name in sorted(names)}
    at, header = 0, {}
    for name, (form, _) in found.items():
        end = at + form.end - form.begin
        header[name] = {"dtype": form.dtype, "shape": form.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps({_METADATA: {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with new_file(to / OTHERS) as target:
        write_all(target, memoryview(len(text).to_bytes(8, "little") + text))
        for _, read in found.values():
            for piece in read():
                write_all(target, piece)
        os.fsync(target)


def _pieces(path: Path, extent: StoredTensor) -> Iterator[memoryview]:
    """Yields the bytes of a tensor in pieces."""
    with open_regular(path) as descriptor:
        for at in range(extent.begin, extent.end, PIECE):
            view = memoryview(bytearray(min(PIECE, extent.end - at)))
            read_into(descriptor, view, at)
            yield view


def kept_files(kept: Path) -> dict[str, bytes]:
    """Returns the content of each of the processor's files that `keep_others` wrote."""
    present = [name for name in PROCESSOR_FILES if (kept / name).is_file()]
    return {name: read_bounded(kept / name, LARGEST_BESIDE) for name in present}
