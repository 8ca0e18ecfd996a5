"""Hugging Face folders, written and read: safetensors, config.json, generation_config.json.

Tensors go one file at a time and are never all in memory at once: `read` is asked for a few logical
tensors, `tensors_of` yields them one after the other. Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from parallel3d.checkpoint.hf.config import from_hf, generation_config, hf_kind, to_hf
from parallel3d.checkpoint.hf.names import HFTensor, hf_tensors
from parallel3d.config.fields import check_fields
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.errors import UserError
from parallel3d.files.durable import flush_folder
from parallel3d.files.reading import parse_json, plain, read_bounded

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
GENERATION = "generation_config.json"
SHARD_BYTES = 5 * 10**9  # where transformers starts a new file as well
# What old checkpoints hold beside weights: masks and rotary tables, which we compute.
NO_WEIGHTS = re.compile(r"\.attn\.(bias|masked_bias)$|rotary_emb\.inv_freq$")
LARGEST_JSON = 64 << 20  # bytes
BASE_PREFIX = re.compile(r"^(model|transformer)\.")

Read = Callable[[Iterable[str]], dict[str, Tensor]]


def export_hf(
    model: ModelConfig,
    read: Read,
    folder: Path,
    *,
    dtype: str,
    end_of_text: int,
    begin_of_text: int | None = None,
    beside: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write `model` as a folder that transformers' `from_pretrained` opens. Returns its files.

    Args:
        read: logical names → full, unpadded tensors; asked for the parts of one file at a time.
        folder: made here; it must not exist, or be empty. It appears whole or not at all.
        dtype: of the weights in the files, a key of `DTYPES`.
        end_of_text: parts documents; begin_of_text: begins a prompt, None: the same token.
        beside: more files, by name, such as a tokenizer's; they win over ours.

    Raises:
        UserError: a model that neither format can express, a folder that is not empty, a disk
            that is full.
    """
    tensors = hf_tensors(model, hf_kind(model))
    begin = end_of_text if begin_of_text is None else begin_of_text
    texts = _configs(model, dtype, end_of_text, begin) | dict(beside or {})
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"to={folder} exists and is not an empty folder: choose another")
    shards = _shards(tensors, torch.finfo(DTYPES[dtype]).bits // 8, shard_bytes)
    made = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name[:100]}.", dir=folder.parent))
        partial = made / "partial"  # with the mode that the folder is to have
        partial.mkdir()
        files = {}
        for name, members in shards.items():
            parts = read([part for tensor in members for part in tensor.parts])
            content = {t.name: _joined(t, parts).to(DTYPES[dtype]).contiguous() for t in members}
            save_file(content, partial / name, metadata={"format": "pt"})
            files |= dict.fromkeys(content, name)
        if len(shards) > 1:
            size = sum(prod(t.shape) for t in tensors) * torch.finfo(DTYPES[dtype]).bits // 8
            texts[INDEX] = _json({"metadata": {"total_size": size}, "weight_map": files})
        for name, text in texts.items():
            (partial / name).write_bytes(text)
        for path in partial.iterdir():
            flush_folder(path)
        flush_folder(partial)
        partial.rename(folder)  # an empty folder of that name is replaced
        flush_folder(folder.parent)
    except (OSError, SafetensorError) as error:  # a full disk, as Python and safetensors say it
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"to={folder} cannot be written: {reason}") from None
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
    return sorted(folder.iterdir())


def _shards(tensors: list[HFTensor], itemsize: int, shard_bytes: int) -> dict[str, list[HFTensor]]:
    """File name → its tensors, in order; a file passes `shard_bytes` only for a single tensor."""
    groups: list[list[HFTensor]] = [[]]
    held = 0
    for tensor in tensors:
        size = prod(tensor.shape) * itemsize
        if groups[-1] and held + size > shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += size
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _joined(tensor: HFTensor, parts: dict[str, Tensor]) -> Tensor:
    """One tensor of the file from our parts; the shape is checked."""
    whole = torch.cat([parts[name] for name in tensor.parts])
    whole = whole.t() if tensor.transposed else whole
    if tuple(whole.shape) != tensor.shape:
        raise ValueError(f"{tensor.name} has shape {tuple(whole.shape)}, not {tensor.shape}")
    return whole


def read_hf_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """The format of a Hugging Face folder and the keys of our `model` section that it gives.

    Raises UserError for a folder without a readable config.json, or with one that we cannot run.
    """
    path = folder / CONFIG
    try:
        config = parse_json(read_bounded(path, LARGEST_JSON))
    except OSError as error:
        raise UserError(
            f"from={folder} must be a folder with config.json and safetensors, as "
            f"save_pretrained writes it: {path.name}: {error.strerror}"
        ) from None
    except ValueError as error:
        raise UserError(f"from={folder}: {path.name} is not JSON ({plain(str(error))})") from None
    if not isinstance(config, dict):
        raise UserError(f"from={folder}: {path.name} is not a JSON object")
    try:
        kind, keys = from_hf(config)
        check_fields(dataclasses.replace(Config(), model=ModelConfig(**keys)))
        return kind, keys
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise UserError(  # a size that is no number, or 0
            f"from={folder}: {path.name} has values that make no sense ({plain(str(error))})"
        ) from None
    except UserError as error:
        raise UserError(f"from={folder}: {plain(str(error))}") from None


def tensors_of(folder: Path, model: ModelConfig, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Our logical tensors one by one, (name, full tensor), in the type that the files hold.

    Raises:
        UserError: no safetensors, a tensor that is missing, of another shape, unknown or no
            floating-point number. All of it is found before the first tensor is yielded.
    """
    with ExitStack() as stack:
        files = {name: stack.enter_context(_open(path)) for name, path in _files(folder).items()}
        where = {key: file for file in files.values() for key in file.keys()}  # noqa: SIM118
        check_layers(model, len(where), f"from={folder}: {CONFIG}")
        tensors = hf_tensors(model, kind)
        shapes = {part: None for tensor in tensors for part in tensor.parts}
        keys = _match(folder, tensors, where, tied=model.tie_embeddings)
        for tensor in tensors:
            whole = where[keys[tensor.name]].get_tensor(keys[tensor.name])
            whole = whole.t() if tensor.transposed else whole
            for part, rows in zip(tensor.parts, whole.chunk(len(tensor.parts)), strict=True):
                shapes.pop(part)
                yield part, rows.contiguous()
    if shapes:
        raise ValueError(f"no tensor holds {', '.join(shapes)}")


def _files(folder: Path) -> dict[str, Path]:
    """The safetensors files of a folder by name; raises UserError if there are none."""
    # What is no file is passed over: opening a pipe would wait for its writer.
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    paths = {path.name: path for path in found}
    if (folder / INDEX).exists():
        try:
            index = parse_json(read_bounded(folder / INDEX, LARGEST_JSON))
            named = sorted({str(name) for name in index["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            why = plain(repr(error))
            raise UserError(f"from={folder}: {INDEX} cannot be read ({why})") from None
        missing = [name for name in named if name not in paths]
        if missing:
            name = plain(missing[0])
            raise UserError(f"from={folder}: {name}, which {INDEX} names, is not there")
        return {name: paths[name] for name in named}
    if WEIGHTS in paths:
        return {WEIGHTS: paths[WEIGHTS]}
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise UserError(
            f"from={folder} holds {pickles[0]}, which is a pickle and could run anything: "
            "parallel3d reads safetensors alone; save the model anew with save_pretrained"
        )
    raise UserError(f"from={folder} holds no {WEIGHTS} and no {INDEX}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"from={path.parent}: {path.name} cannot be read ({plain(str(error))})"
        ) from None


def check_layers(model: ModelConfig, tensors: int, where: str) -> None:
    """Before names are made for every layer of somebody's configuration: each has a tensor.

    Raises UserError; `tensors` are those of the files, `where` the configuration is.
    """
    if model.num_layers > tensors:
        raise UserError(f"{where} has {model.num_layers} layers, and there are {tensors} tensors")


def _match(
    folder: Path, tensors: list[HFTensor], where: dict[str, Any], *, tied: bool
) -> dict[str, str]:
    """transformers' name → the key in the files, every shape and type checked.

    Keys of a bare `LlamaModel` or `GPT2Model`, as the first GPT-2 was published, have no prefix.
    """
    keys = {}
    for tensor in tensors:
        bare = BASE_PREFIX.sub("", tensor.name)
        key = next((k for k in (tensor.name, bare) if k in where), None)
        if key is None:
            raise UserError(f"from={folder}: there is no tensor {tensor.name}")
        there = where[key].get_slice(key)
        if tuple(there.get_shape()) != tensor.shape:
            raise UserError(
                f"from={folder}: {key} has shape {tuple(there.get_shape())}, but by config.json "
                f"it must be {tensor.shape}"
            )
        if there.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise UserError(
                f"from={folder}: {key} is of type {there.get_dtype()}; it must be one of F64, "
                "F32, F16, BF16"
            )
        keys[tensor.name] = key
    known = set(keys.values()) | ({"lm_head.weight"} if tied else set())
    unknown = [k for k in where if k not in known and not NO_WEIGHTS.search(k)]
    if unknown:
        raise UserError(
            f"from={folder}: our model has no place for the tensor {plain(sorted(unknown)[0])} "
            f"({len(unknown)} of {len(where)} tensors are unknown)"
        )
    return keys


def _configs(model: ModelConfig, dtype: str, end: int, begin: int) -> dict[str, bytes]:
    contents = {CONFIG: to_hf(model, dtype, end), GENERATION: generation_config(end)}
    return {name: _json(content | {"bos_token_id": begin}) for name, content in contents.items()}


def _json(content: dict[str, Any]) -> bytes:
    return f"{json.dumps(content, indent=2, sort_keys=True)}\n".encode()
