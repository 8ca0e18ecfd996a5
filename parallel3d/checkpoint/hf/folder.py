"""Writes and reads Hugging Face folders: safetensors, config.json, generation_config.json.

One file or tensor is processed at a time, so the whole model need not fit into memory. Pickle is
never used.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from parallel3d.checkpoint.hf.config import (
    EOS,
    NARROW,
    POSITIONS,
    TOKENS,
    TYPE,
    from_hf,
    hf_kind,
    kept_keys,
    to_hf,
    with_kept,
)
from parallel3d.checkpoint.hf.dequantize import SCALE, dequantized
from parallel3d.checkpoint.hf.experts import Place, mtp_layers, notices_of
from parallel3d.checkpoint.hf.families import FAMILIES
from parallel3d.checkpoint.hf.names import (
    BASE_PREFIX,
    EMBEDDINGS,
    HEAD,
    LAYER_PREFIX,
    HFTensor,
    hf_tensors,
    is_of_text,
    places,
    spellings,
)
from parallel3d.checkpoint.hf.quantization import QUANTIZED, Quantization, take_quantization
from parallel3d.checkpoint.hf.resplit import convolutions_apart
from parallel3d.checkpoint.hf.wrappers import (
    OTHERS,
    TEXT,
    WRAPPERS,
    Bytes,
    StoredTensor,
    extents_of,
    keep_others,
    kept_files,
    text_part,
    whole_config,
    whole_model,
)
from parallel3d.config.fields import check_fields
from parallel3d.data.tokenizer import CONFIG, GENERATION, read_json
from parallel3d.device.precision import COMPUTE
from parallel3d.errors import UserError
from parallel3d.experts.checks import check_experts
from parallel3d.files import new_folder, open_regular, plain
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from parallel3d.text import count

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # transformers also starts a new file at this size
# Masks and rotary tables in old checkpoints; our model computes them instead of loading them.
NO_WEIGHTS = re.compile(r"\.attn\.(bias|masked_bias)$|rotary_emb\.inv_freq$")
ADAPTER = "adapter_config.json"
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors$")
# Bytes, enough for some 140,000 tensors; a model with 94 layers of 128 experts has 36,946 tensors.
LARGEST_HEADER = 16 << 20
EXPERT = ".experts."
READ = ("F64", "F32", "F16", "BF16")  # types of tensors
POINTER = b"version https://git-lfs"  # start of a file whose content was not downloaded
LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,9})\.")

ReadTensors = Callable[[Iterable[str]], dict[str, Tensor]]


def export_hf(
    model: ModelConfig,
    read: ReadTensors,
    folder: Path,
    *,
    dtype: str,
    end_of_text: int | None,
    begin_of_text: int | None = None,
    ends: Callable[[Any], Any] | None = None,
    kept: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] | None = None,
    others: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes `model` as a folder for transformers' `from_pretrained`; returns the folder's files.

    Args:
        read: returns the full, unpadded tensors for names of our tensors; called once per file.
        folder: the new folder, which must be empty or missing. It appears complete or not at all.
        dtype: dtype of the weights in the files, a key of `COMPUTE`.
        end_of_text: token that separates documents, or None if it is unknown.
        begin_of_text: token that begins a prompt; None stands for `end_of_text`.
        ends: function that takes an `eos_token_id` or None, and returns the value to export, with
            all tokens at which generation stops. Without it, the value is exported unchanged.
        kept: `kept_keys` of the config.json from which the model was imported, or None if it was
            not imported.
        beside: additional files, file name → content, such as a tokenizer's. They override files of
            the same name.
        others: the folder that `keep_rest` wrote, or None if it wrote none.
        shard_bytes: size at which a new file of weights is started.

    Raises:
        UserError: if no format can express the model, a weight is not finite in `dtype`, the folder
            is not empty, or it cannot be written.
    """
    like = (kept or {}).get(TYPE)
    narrow = (kept or {}).get(NARROW, [])
    tensors = [
        dataclasses.replace(t, wide=t.wide and _in_layer(t.name) not in narrow)
        for t in hf_tensors(model, hf_kind(model, like))
    ]
    begin = end_of_text if begin_of_text is None else begin_of_text
    texts = _configs(model, dtype, end_of_text, begin, kept or {}, ends, others)
    texts |= {} if others is None else kept_files(others)
    texts |= dict(beside or {})
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"to={folder} exists and is not an empty folder: choose another to=")
    rest = {} if others is None else extents_of(others / OTHERS)
    names = {t.name: t.name for t in tensors}
    whole = None if others is None else whole_model(others)
    if whole is not None:
        kind = hf_kind(model, like)
        newer = any(name.startswith("model.") for name in rest)
        names = {name: spellings(name, kind, wrapped=True)[-1 if newer else 0] for name in names}
    shards = _shards(tensors, dtype, shard_bytes, extra=others is not None)
    try:
        with new_folder(folder) as partial:
            files: dict[str, str] = {}
            for name, members in shards.items():
                parts = read([part for tensor in members for part in tensor.parts])
                content = {names[t.name]: _written(t, parts, dtype) for t in members}
                save_file(content, partial / name, metadata={"format": "pt"})
                files |= dict.fromkeys(content, name)
            size = sum(prod(t.shape) * _dtype(t, dtype).itemsize for t in tensors)
            if others is not None:
                last = _shard_name(len(shards) + 1, len(shards) + 1)
                shutil.copyfile(others / OTHERS, partial / last)
                files |= dict.fromkeys(rest, last)
                size += sum(extent.end - extent.begin for extent in rest.values())
            if len({*files.values()}) > 1:
                texts[INDEX] = _json({"metadata": {"total_size": size}, "weight_map": files})
            for name, text in texts.items():
                (partial / name).parent.mkdir(exist_ok=True)
                (partial / name).write_bytes(text)
    except (OSError, SafetensorError) as error:  # for example, because the disk is full
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"to={folder} cannot be written: {reason}") from None
    return sorted(folder.iterdir())


def _dtype(tensor: HFTensor, dtype: str) -> torch.dtype:
    """Returns the dtype in which an export in `dtype` writes a tensor."""
    narrow = COMPUTE[dtype]
    return torch.promote_types(narrow, torch.float32) if tensor.wide else narrow


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _shards(
    tensors: list[HFTensor], dtype: str, shard_bytes: int, *, extra: bool = False
) -> dict[str, list[HFTensor]]:
    """Groups tensors by file, in order; only a file of one tensor may exceed `shard_bytes`.

    With `extra`, the file names leave room for one more file at the end.
    """
    groups: list[list[HFTensor]] = [[]]
    held = 0
    for tensor in tensors:
        size = prod(tensor.shape) * _dtype(tensor, dtype).itemsize
        if groups[-1] and held + size > shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += size
    count = len(groups) + extra
    if count == 1:
        return {WEIGHTS: groups[0]}
    return {_shard_name(number, count): group for number, group in enumerate(groups, 1)}


def _written(tensor: HFTensor, parts: dict[str, Tensor], dtype: str) -> Tensor:
    """Returns a tensor as it is written to the file; raises UserError unless it is finite."""
    if tensor.experts:
        whole = _joined([parts[name] for name in tensor.parts], tensor.experts)
    else:
        grouped = [parts[name].unflatten(0, (tensor.groups, -1)) for name in tensor.parts]
        whole = torch.cat(grouped, dim=1).flatten(0, 1)
        whole = _reordered(whole, tensor, back=True)
        whole = whole.t() if tensor.transposed else whole
        whole = whole.unsqueeze(1) if tensor.squeezed else whole
    made = whole.to(_dtype(tensor, dtype)).contiguous()
    if not all_finite(made):
        why = "NaN or inf"
        if all_finite(whole):
            largest = float(max(-whole.min(), whole.max()))
            why = f"{largest:g}, which {dtype} cannot hold: choose another dtype"
        raise UserError(f"{tensor.name} holds {why}")
    return made


def _joined(parts: Sequence[Tensor], experts: int) -> Tensor:
    """Returns the tensor of a layer's experts: (experts, inputs, rows of all parts in turns).

    `parts` are the matrices (rows, inputs) or the biases (rows,) of one expert after the other.
    """
    whole = torch.stack([*parts]).unflatten(0, (experts, -1)).transpose(1, 2).flatten(1, 2)
    return whole.transpose(1, 2) if whole.dim() == 3 else whole


def _reordered(whole: Tensor, tensor: HFTensor, *, back: bool) -> Tensor:
    """Reorders the rows of heads from pairs (2i, 2i + 1), as in the file, to (i, i + r/2).

    With `back`, reorders in the opposite direction. Without `tensor.pairs`, nothing is reordered.
    """
    if tensor.pairs is None:
        return whole
    size, turned = tensor.pairs
    theirs = torch.arange(turned).view(-1, 2).t().flatten()
    order = torch.cat([theirs, torch.arange(turned, size)])
    order = order.argsort() if back else order
    return whole.unflatten(0, (-1, size))[:, order].flatten(0, 1)


@dataclasses.dataclass(frozen=True)
class HFFolder:
    """Describes a Hugging Face folder whose config.json our model can express.

    Attributes:
        kind: the format, such as "llama" or "gpt2".
        keys: keys of our `model` section.
        untied: whether config.json ties the head to the embedding, but the files hold a head that
            differs from the embedding.
        kept: see `kept_keys`.
        mtp: number of layers of multi-token prediction that may follow the model's own layers.
        notices: sentences on what an import leaves out or keeps unchanged.
        wrapped: whether the model is the text part of a vision model.
        unread: keys of config.json that parallel3d does not read, with their values.
        alone: whether config.json is that of a vision model, but the weights are those of its text
            model alone.
        quantization: how the files hold quantized weights, or None if no weight is quantized.
    """

    kind: str
    keys: dict[str, Any]
    untied: bool
    kept: dict[str, Any]
    mtp: int = 0
    notices: tuple[str, ...] = ()
    wrapped: bool = False
    unread: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alone: bool = False
    quantization: Quantization | None = None


def read_hf_config(folder: Path) -> HFFolder:
    """Reads config.json. Raises UserError if it cannot be read or our model cannot express it."""
    config = read_json(folder, CONFIG, f"from={folder}")
    if not config:
        _refuse_other_readings(folder, [])
        raise UserError(
            f"from={folder} must be a folder with {CONFIG} and safetensors, written by "
            f"save_pretrained{_nearby(folder)}"
        )
    has_images = str(config.get(TYPE)) in WRAPPERS
    alone = has_images and _has_text_alone(folder)
    wrapped = has_images and not alone
    try:
        config, quantization = take_quantization(config, TEXT if has_images else None)
        config, more = text_part(config, alone=alone) if has_images else (config, {})
        kind, keys, unread = from_hf(config)
        if quantization is not None and FAMILIES[kind].joins_experts:
            quantization = dataclasses.replace(quantization, transposed=True)
        model = ModelConfig(**keys)
        check_fields(dataclasses.replace(Config(), model=model))
        check_experts(model)
        kept, family = kept_keys(config), FAMILIES[kind]
        kept.pop(NARROW, None)
        mtp, notices = mtp_layers(config, family), notices_of(config, family)
    except UserError as error:
        raise UserError(f"from={folder}: {plain(str(error))}") from None
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise UserError(  # for example, because a size is 0 or not a number
            f"from={folder}: {CONFIG} has impossible values ({plain(str(error))})"
        ) from None
    if alone:
        notices += (
            f"{CONFIG} describes a vision model, but the weights have the names of its text model "
            "alone, which is trained and exported without the rest",
        )
    beside = _types_beside(folder, family.others) if family.others else set()
    unchanged = "unchanged"
    if any(each.startswith("F8") for each in beside):
        unchanged += f", except that tensors {family.others}* in fp8 are written in bf16"
    if wrapped:
        notices += (
            "the folder holds a vision model: only its text model is trained, and an export writes "
            f"the other tensors back {unchanged}",
        )
    elif beside:
        notices += (
            f"the tensors {family.others}* are not trained, and an export writes them back "
            f"{unchanged}",
        )
    if quantization is not None:
        notices += (quantization.notice,)
    if family.delta is not None:
        kept |= _narrow(folder, model, kind)
    untied = keys["tie_embeddings"] and _has_own_head(folder, kind, wrapped, quantization)
    if untied:
        keys["tie_embeddings"] = False
    unread = more | unread
    return HFFolder(kind, keys, untied, kept, mtp, notices, wrapped, unread, alone, quantization)


def _nearby(folder: Path) -> str:
    """Returns what is there in place of a model's folder, or "", as the end of a sentence."""
    if not folder.exists():
        return f"; {folder} does not exist"
    if not folder.is_dir():
        parent = folder.parent
        whole = (parent / CONFIG).is_file()
        return f"; from={parent} is such a folder" if whole else f"; {folder.name} is a file"
    for pattern in ("*", "*/*"):  # such as snapshots/<commit> in the hub's cache
        found = sorted(path.parent for path in folder.glob(f"{pattern}/{CONFIG}"))
        if found:
            return f"; the nearest is from={plain(str(found[0]))}"
    if (folder.parent / CONFIG).is_file():
        return f"; the nearest is from={folder.parent}"
    if gguf := sorted(path.name for path in folder.glob("*.gguf")):
        return f"; {plain(gguf[0])} is of llama.cpp: give the folder from which it was converted"
    return "; the folder is empty" if not any(folder.iterdir()) else f"; there is no {CONFIG}"


def _has_text_alone(folder: Path) -> bool:
    """Returns whether the files hold layers of a text model, and no tensor of a vision model.

    A head may belong to either.
    """
    with ExitStack() as stack:
        names = {*_tensors(folder, stack)} - {HEAD}
    return any(LAYER.match(name) for name in names) and not any(map(is_of_text, names))


def _in_layer(name: str) -> str:
    """Returns the part of a tensor's name that is the same in all layers."""
    return name.partition(LAYER_PREFIX)[2].partition(".")[2]


def _narrow(folder: Path, model: ModelConfig, kind: str) -> dict[str, list[str]]:
    """Returns the key `NARROW` if any tensor has 16 bits in the files, but not in a run."""
    with ExitStack() as stack:
        where = _tensors(folder, stack)
        check_layers(model, len(where), f"from={folder}: {CONFIG}")
        wide = {_in_layer(tensor.name) for tensor in hf_tensors(model, kind) if tensor.wide}
        types: dict[str, set[str]] = {}
        for key in where:
            name = key.partition("layers.")[2].partition(".")[2]
            if name in wide:
                types.setdefault(name, set()).add(where[key].get_slice(key).get_dtype())
    narrow = sorted(name for name, found in types.items() if found <= {"BF16", "F16"})
    return {NARROW: narrow} if narrow else {}


def _types_beside(folder: Path, beside: str) -> set[str]:
    """Returns the types in the files of the tensors whose names begin with `beside`."""
    with ExitStack() as stack:
        where = _tensors(folder, stack)
        names = [name for name in where if name.startswith(beside)]
        return {where[name].get_slice(name).get_dtype() for name in names}


def _has_own_head(
    folder: Path, kind: str, wrapped: bool, quantization: Quantization | None
) -> bool:
    """Returns whether the files hold a head that differs from the embedding in any element."""
    with ExitStack() as stack:
        where = _tensors(folder, stack, quantization)
        names = spellings(EMBEDDINGS[kind], kind, wrapped=wrapped)
        embedding = next((k for k in names if k in where), None)
        head = next((k for k in spellings(HEAD, kind, wrapped=wrapped) if k in where), None)
        if head is None or embedding is None:
            return False
        keys = (head, embedding)
        shapes = [tuple(where[key].get_slice(key).get_shape()) for key in keys]
        if shapes[0] != shapes[1] or len(shapes[0]) != 2:
            raise UserError(
                f"from={folder}: {head} has shape {shapes[0]}, but {embedding}, to which "
                f"config.json ties it, has {shapes[1]}"
            )
        if any(where[key].get_slice(key).get_dtype() not in READ for key in keys):
            return True  # such types cannot be compared; `_match` refuses them
        weights, table = (where[key].get_tensor(key) for key in keys)
        return not bool((weights == table).all())


def keep_rest(folder: Path, source: HFFolder, to: Path) -> None:
    """Copies all parts of a vision model except its text model into the new folder `to`.

    For a text model, it copies the tensors that transformers leaves out, if there are any. These
    are written in bf16 if they are quantized, as an export has no quantization. See `keep_others`.
    Raises UserError if a file cannot be read or written.
    """
    beside = FAMILIES[source.kind].others
    if not source.wrapped and not beside:
        return
    with ExitStack() as stack:
        stored = _tensors(folder, stack)
        where = stored
        if source.quantization is not None:
            where = dequantized(folder, stored, source.quantization)
        if source.wrapped:
            names = [key for key in where if not is_of_text(key.removesuffix(SCALE))]
        else:
            names = [key for key in where if key.startswith(beside)]
        computed: dict[str, Bytes] = {}
        for key in names:
            quantized = where[key] is not stored.get(key)
            if quantized and beside and key.startswith(beside):
                computed[key] = _in_bf16(folder, where[key], key)
                continue
            is_fp8 = key.endswith(SCALE) or where[key].get_slice(key).get_dtype().startswith("F8")
            if quantized or is_fp8:
                raise UserError(
                    f"from={folder}: {plain(key)} is quantized, but only the tensors of the text "
                    f"model may be, because an export has no {QUANTIZED}"
                )
        if not names and not source.wrapped:
            return
        try:
            with new_folder(to) as partial:
                files, whole = _files(folder), source.wrapped
                keep_others(folder, files, names, partial, whole=whole, computed=computed)
        except (OSError, ValueError) as error:
            raise UserError(
                f"from={folder}: its files and tensors outside of the text model cannot be kept "
                f"({plain(str(error))})"
            ) from None


def _in_bf16(folder: Path, file: Any, key: str) -> Bytes:
    """Returns a quantized tensor as it is written, in bf16; it is read when its bytes are."""
    shape = list(file.get_slice(key).get_shape())

    def read() -> list[memoryview]:
        found = _finite(folder, file, Place(key), slice(None), torch.bfloat16)
        return [found.contiguous().view(torch.uint8).flatten().numpy().data]

    return Bytes(StoredTensor("BF16", shape, 0, torch.bfloat16.itemsize * prod(shape)), read)


def tensors_of(
    folder: Path,
    model: ModelConfig,
    kind: str,
    *,
    dtype: torch.dtype | None = None,
    wanted: Mapping[str, tuple[int, int]] | None = None,
    mtp: int = 0,
    wrapped: bool = False,
    quantization: Quantization | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, full tensor, or its wanted rows) for our tensors, one after the other.

    Args:
        kind: the folder's format.
        dtype: dtype of the tensors; None stands for the files' dtype, or fp32 if quantized.
        wanted: names of our tensors to yield, with the first of their rows and that behind the
            last; None stands for all tensors in full.
        mtp: number of layers of multi-token prediction that the files may hold, which are left out.
        wrapped: whether the model is the text part of a vision model, whose other tensors are left
            out.
        quantization: how the files hold quantized weights, if they do.

    Raises:
        UserError: before the first tensor, if there are no safetensors, or if a tensor is missing,
            unknown, not floating-point, or has the wrong shape; later, if a tensor is not finite.
    """
    with ExitStack() as stack:
        where = _tensors(folder, stack, quantization)
        check_layers(model, len(where), f"from={folder}: {CONFIG}")
        tensors = hf_tensors(model, kind)
        wanted_shapes = {
            key: t.shape for t in tensors for key in spellings(t.name, kind, wrapped=wrapped)
        }
        where = convolutions_apart(where, wanted_shapes)
        left_out = range(model.num_layers, model.num_layers + mtp)
        experts = model.num_experts
        keys = _match(folder, tensors, where, kind, left_out, experts, wrapped=wrapped)
        for tensor in tensors:
            asked = [part for part in tensor.parts if wanted is None or part in wanted]
            if not asked:
                continue
            place = keys[tensor.name]
            if tensor.experts:
                yield from _experts_at(folder, where[place.key], place, tensor, dtype, wanted)
                continue
            # Where rows keep their order, no other rows are read than a part of the model holds.
            if tensor.transposed or tensor.pairs is not None or wanted is None:
                whole = _finite(folder, where[place.key], place, slice(None), dtype)
                whole = whole.t() if tensor.transposed else whole
                whole = _reordered(whole, tensor, back=False)
                whole = whole.squeeze(1) if tensor.squeezed else whole
                heights = [rows // tensor.groups for rows in tensor.rows]
                grouped = whole.unflatten(0, (tensor.groups, -1)).split(heights, dim=1)
                for part, rows in zip(tensor.parts, grouped, strict=True):
                    if part in asked:
                        first, end = (None, None) if wanted is None else wanted[part]
                        yield part, rows.flatten(0, 1)[first:end].contiguous()
                continue
            for number, part in enumerate(tensor.parts):
                if part in asked:
                    pieces = [
                        _finite(folder, where[place.key], place, slice(*at), dtype)
                        for at in tensor.places_of(number, *wanted[part])
                    ]
                    rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                    yield part, (rows.squeeze(1) if tensor.squeezed else rows).contiguous()


def _experts_at(
    folder: Path,
    file: Any,
    place: Place,
    tensor: HFTensor,
    dtype: torch.dtype | None,
    wanted: Mapping[str, tuple[int, int]] | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields our tensors of `_joined` experts, and reads only the experts that have wanted ones."""
    each = len(tensor.parts) // tensor.experts
    for number in range(tensor.experts):
        mine = tensor.parts[number * each : (number + 1) * each]
        if wanted is not None and not any(part in wanted for part in mine):
            continue
        at = place._replace(expert=number)
        whole = _finite(folder, file, at, slice(None), dtype)
        whole = whole.t() if whole.dim() == 2 else whole
        for first, part in enumerate(mine):
            if wanted is None or part in wanted:
                begin, end = (None, None) if wanted is None else wanted[part]
                yield part, rows_of_part(whole, first, each)[begin:end].contiguous()


def rows_of_part(whole: Tensor, first: int, parts: int) -> Tensor:
    """Returns the rows of part `first` of an expert in `_joined` experts."""
    return whole[first::parts]


def _finite(
    folder: Path, file: Any, place: Place, rows: slice, dtype: torch.dtype | None
) -> Tensor:
    """Returns rows of a tensor in a file. Raises UserError unless they are finite in `dtype`."""
    found = _at(file, place, rows)
    made = found if dtype is None else found.to(dtype)
    if not all_finite(made):
        why = f"numbers too large for {made.dtype}" if all_finite(found) else "NaN or inf"
        raise UserError(f"from={folder}: {place.key} holds {why.replace('torch.', '')}")
    return made


def _at(file: Any, place: Place, rows: slice) -> Tensor:
    """Returns rows of the tensor at a place in a file; no other tensor joined to it is read."""
    whole = file.get_slice(place.key)
    if place.expert is None:
        return file.get_tensor(place.key) if rows == slice(None) else whole[(rows,)]
    one, shape = slice(place.expert, place.expert + 1), whole.get_shape()
    size = shape[1] // place.parts
    first, end, _ = rows.indices(size)
    at = slice(place.part * size + first, place.part * size + end)
    if len(shape) == 2:  # quantized tensors are not cut in their last dimension
        return whole[(one,)][0, at]
    return whole[one, at][0]


def all_finite(tensor: Tensor) -> bool:
    """Returns whether no element is NaN or infinite, without a mask of the tensor's size."""
    low, high = torch.aminmax(tensor)
    return bool(low.isfinite() and high.isfinite())


def dequantized_weights(folder: Path, quantization: Quantization) -> dict[str, Tensor]:
    """Returns all tensors of a folder by their names in the files, without quantization."""
    with ExitStack() as stack:
        where = _tensors(folder, stack, quantization)
        return {key: file.get_tensor(key) for key, file in where.items()}


def _tensors(
    folder: Path, stack: ExitStack, quantization: Quantization | None = None
) -> dict[str, Any]:
    """Opens the files with weights, and returns the file of each tensor.

    If several files hold a tensor, the last one counts, as in transformers. With `quantization`,
    quantized tensors are read as the numbers that they stand for.
    """
    files = [stack.enter_context(_open(path)) for path in _files(folder)]
    where = {key: file for file in files for key in file.keys()}  # noqa: SIM118
    return where if quantization is None else dequantized(folder, where, quantization)


def _files(folder: Path) -> list[Path]:
    """Returns model.safetensors if it exists, else the files that the index names.

    Raises UserError if there are neither.
    """
    # Only regular files count, because opening a pipe would wait for its writer.
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    paths = {path.name: path for path in found}
    _refuse_other_readings(folder, paths)
    if WEIGHTS in paths:
        return [paths[WEIGHTS]]
    if (folder / INDEX).exists():
        return _indexed(folder, paths)
    if pickles := sorted(path.name for path in folder.glob("*.bin")):
        raise UserError(
            f"from={folder} holds {pickles[0]}, which is a pickle and could run any code: "
            "parallel3d only reads safetensors; if you trust the folder, "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…) of transformers writes them"
        )
    if len(found) > 1:
        raise UserError(
            f"from={folder} holds {count(len(found), 'file')} of safetensors and no {INDEX}, "
            "which says what is in each: copy it from where the folder comes"
        )
    beside = ""
    if found:
        beside = f", but {found[0].name}: rename it if it holds the whole model"
    elif gguf := sorted(path.name for path in folder.glob("*.gguf")):
        beside = f", but {plain(gguf[0])} of llama.cpp: give the folder it was converted from"
    raise UserError(f"from={folder} holds no {WEIGHTS} and no {INDEX}{beside}")


def _refuse_other_readings(folder: Path, names: Iterable[str]) -> None:
    """Raises UserError if a file might make transformers use weights other than parallel3d's."""
    if (folder / ADAPTER).exists():
        merged = folder.absolute().with_name(f"{folder.absolute().name}-merged")
        base = read_json(folder, ADAPTER, f"from={folder}").get("base_model_name_or_path")
        whole = (folder / WEIGHTS).exists() or (folder / INDEX).exists()
        remedy = f", or remove {ADAPTER} if the weights beside it are merged" if whole else ""
        raise UserError(
            f"from={folder} holds {ADAPTER}, an adapter of {plain(str(base or 'another model'))}: "
            "merge it into the weights with peft, python -c 'from peft import "
            f'AutoPeftModelForCausalLM as M; M.from_pretrained("{plain(str(folder.absolute()))}")'
            f'.merge_and_unload().save_pretrained("{plain(str(merged))}")\', and give '
            f"from={plain(str(merged))}{remedy}"
        )
    shards = [name for name in names if DISTRIBUTED.match(name)]
    if shards:
        raise UserError(
            f"from={folder} holds {shards[0]}, and parallel3d cannot read distributed checkpoints "
            "written by transformers: save the model again with save_pretrained"
        )


def _indexed(folder: Path, paths: Mapping[str, Path]) -> list[Path]:
    weight_map = read_json(folder, INDEX, f"from={folder}").get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"from={folder}: {INDEX} has no weight_map")
    named = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in named if name not in paths]
    if missing:
        name = plain(missing[0])
        raise UserError(
            f"from={folder}: {name}, which {INDEX} names, is missing: download the folder again"
        )
    return [paths[name] for name in named]


def _open(path: Path) -> Any:
    try:
        with open_regular(path) as descriptor:
            start = os.pread(descriptor, len(POINTER), 0)
        if start == POINTER:
            raise ValueError("it is a pointer of Git LFS: run git lfs pull in its folder")
        header = int.from_bytes(start[:8], "little")
        if header > LARGEST_HEADER:  # reading such a header would take minutes
            raise ValueError(f"its header of {header:,} bytes is longer than {LARGEST_HEADER:,}")
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"from={path.parent}: {path.name} cannot be read ({plain(str(error))})"
        ) from None


def check_layers(model: ModelConfig, tensors: int, where: str) -> None:
    """Raises UserError if the model has more layers than there are tensors.

    The check comes first, because naming the tensors of an absurd number of layers takes long.
    """
    if model.num_layers > tensors:
        raise UserError(f"{where} has {model.num_layers} layers, but only {tensors} tensors exist")


def _match(
    folder: Path,
    tensors: list[HFTensor],
    where: dict[str, Any],
    kind: str,
    left_out: range,
    experts: int,
    *,
    wrapped: bool,
) -> dict[str, Place]:
    """Maps transformers' names to places in the files, whose names may lack the prefix.

    If the embedding is tied, it may have the name of the head. A layer may have all of its
    `experts` in one tensor. Raises UserError for tensors that are missing, unknown or unsuitable.
    Tensors of the layers `left_out` are ignored.
    """
    keys: dict[str, Place] = {}
    heads, beside = spellings(HEAD, kind, wrapped=wrapped), FAMILIES[kind].others
    tied = all(tensor.name != HEAD for tensor in tensors)
    for tensor in tensors:
        may_be = places(tensor.name, kind, wrapped=wrapped)
        may_be += [Place(k) for k in heads] if tied and tensor.name == EMBEDDINGS[kind] else []
        place = next((one for one in may_be if one.key in where), None)
        if place is None:
            why = _other_names(tensor.name, kind, where, wrapped=wrapped)
            raise UserError(f"from={folder}: there is no tensor {tensor.name}{why}")
        key, required = place.key, place.shape(tensor.shape, experts)
        there = where[key].get_slice(key)
        if tuple(there.get_shape()) != required:
            raise UserError(
                f"from={folder}: {key} has shape {tuple(there.get_shape())}, but config.json "
                f"requires {required}"
            )
        if there.get_dtype() not in READ:
            unless = ""
            if there.get_dtype() == "F8_E4M3":
                unless = f", unless {key}{SCALE} lies beside it and {QUANTIZED} of config.json "
                unless += "has quant_method=fp8"
            raise UserError(
                f"from={folder}: {key} is of type {there.get_dtype()}; it must be one of "
                f"{', '.join(READ)}{unless}"
            )
        keys[tensor.name] = place
    used = {place.key for place in keys.values()}
    _check_prefixes(folder, used)
    known = used | ({*heads} if tied else set())
    unknown = [
        k
        for k in where
        if k not in known
        and not NO_WEIGHTS.search(k)
        and (is_of_text(k) if wrapped else not (beside and k.startswith(beside)))
        and not ((layer := LAYER.match(k)) and int(layer[1]) in left_out)
    ]
    if unknown:
        raise UserError(
            f"from={folder}: our model has no place for the tensor {plain(sorted(unknown)[0])} "
            f"({len(unknown)} of {len(where)} tensors are unknown)"
        )
    return keys


def _other_names(name: str, kind: str, where: Iterable[str], *, wrapped: bool) -> str:
    """Returns which model has a missing tensor's name in the files, as the end of a sentence."""
    other = next((key for key in spellings(name, kind, wrapped=True) if key in where), None)
    if wrapped or other is None:
        return ""
    return (
        f", but {other}, as in a vision model: {CONFIG} must be that of the whole model, with "
        "text_config"
    )


def _check_prefixes(folder: Path, keys: Iterable[str]) -> None:
    """Raises UserError if some experts' names have the full model's prefix and others lack it.

    transformers would then join the two sets of experts separately, and read a different model.
    """
    experts = sorted(key for key in keys if EXPERT in key)
    bare = [key for key in experts if not BASE_PREFIX.match(key)]
    if 0 < len(bare) < len(experts):
        raise UserError(
            f"from={folder}: {bare[0]} lacks the prefix that other experts' names have, and "
            "transformers would mix up the experts: save the model again with save_pretrained"
        )


def _configs(
    model: ModelConfig,
    dtype: str,
    end: int | None,
    begin: int | None,
    kept: Mapping[str, Any],
    ends: Callable[[Any], Any] | None,
    others: Path | None,
) -> dict[str, bytes]:
    config = with_kept(to_hf(model, dtype, kept.get(TYPE), kept.get(POSITIONS, 0)), kept)
    tokens = {} if end is None else {"bos_token_id": begin, "eos_token_id": end}
    tokens |= {key: kept[key] for key in TOKENS if key in kept}
    if ends is not None:
        tokens[EOS] = ends(tokens.get(EOS))
    generation = {GENERATION: _json(tokens)} if tokens else {}
    content = config | tokens
    if others is not None and whole_model(others) is not None:
        content = whole_config(others, content, tokens.get(EOS))
    return {CONFIG: _json(content)} | generation


def _json(content: dict[str, Any]) -> bytes:
    return f"{json.dumps(content, indent=2, sort_keys=True)}\n".encode()
