"""Saves and loads a script's training state (model, optimizer, step) under any split of the model.

The trainer's saver writes the files, which have the format of the trainer's checkpoints
(`checkpoint.storage`). Nothing is pickled or unpickled.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.checkpoint.keys import CheckpointConfig
from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    COUNTS,
    PARAMETER,
    Manifest,
    list_checkpoints,
    read_manifest,
    read_together,
    reason,
    step_folder,
    step_of,
)
from parallel3d.checkpoint.saver import Save, Saver
from parallel3d.checkpoint.storage import DTYPES, TensorChunks, read_state, stored_shapes
from parallel3d.comm.exchange import all_gather_json
from parallel3d.device.accelerator import device_of_words
from parallel3d.errors import UserError, nearest_hint
from parallel3d.library.state_dicts import sharded_state_dict
from parallel3d.metrics.provenance import versions
from parallel3d.parameters.segments import Chunk
from parallel3d.parameters.state import state_of
from parallel3d.tensor_parallel.layers import dtensor_of

T = TypeVar("T")
# Settings of an optimizer that are not restored, since the script itself chooses them.
IMPLEMENTATION = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
TIMEOUT_S = 1800.0  # time for which rank 0 waits for the files of the others
# Values that JSON lacks are saved as a dict with one of these keys.
PAIRS = "parallel3d.pairs"  # a dict with keys that are not texts, such as MultiStepLR's milestones
FLOAT = "parallel3d.float"  # inf, -inf or nan, such as ReduceLROnPlateau's best value
HeldTensor = tuple[str, tuple[int, ...], Chunk, Tensor]  # name, full shape, chunk, values


class _Parts(NamedTuple):
    """The parts of a state dict that a script gave.

    Attributes:
        others: every other value: the state dict of a scheduler, or a value itself.
    """

    net: nn.Module
    optimizer: torch.optim.Optimizer | None
    others: dict[str, Any]


def save(
    state_dict: Mapping[str, Any], *, checkpoint_id: str | os.PathLike[str], step: int
) -> Path:
    """Writes a checkpoint of `state_dict` into the folder `checkpoint_id`.

    Every rank writes its shards, but only one of several equal copies is written. The new folder
    `checkpoint_id/checkpoints/step-…` appears when all of it is on disk. All hosts must share this
    file system. The call is collective over the world.

    Args:
        state_dict: what to save, under names of your own: one module, at most one optimizer of its
            parameters, and further values that the script needs to resume. These are numbers,
            texts, lists and dicts, or have a `state_dict()` of these, such as a learning-rate
            scheduler; rank 0's are saved. The module is a plain one, one with tensor-parallel
            layers, a `Pipeline`, one under `fully_shard`, or a combination of these. It must not
            contain a `Pipeline` among other modules.
        checkpoint_id: the run's folder.
        step: number of optimizer steps done.

    Returns:
        The new folder.

    Raises:
        UserError: on every rank, if the step exists already, if a state is not a tensor or has a
            type that a checkpoint cannot hold, or if the parts of the ranks do not exactly make up
            a tensor.
        OSError: on every rank, if a file could not be written. Nothing is left behind then.
    """
    held, facts, extra = _together(lambda: _to_save(_parts_of("save", state_dict), step))
    chunks = [[name, shape, chunk.offsets, chunk.sizes] for name, shape, chunk, _ in held]
    everyone = _share({"chunks": chunks, "facts": facts})
    own = _own_chunks(held, [theirs["chunks"] for theirs in everyone])
    script = {"optimizer": _merged([theirs["facts"] for theirs in everyone]), "extra": extra}
    folder = Path(checkpoint_id)
    final = folder / CHECKPOINTS / step_folder(step)
    session = _on_first_rank(lambda: _new_session(folder, final))
    progress = {**dict.fromkeys(COUNTS, 0), "steps": step, "updates": step, "loss_scale": 1.0}
    manifest = Manifest(step, progress, {"script": script}, {}, "", versions(), ())
    keep_all = CheckpointConfig(keep=sys.maxsize)
    saver = Saver(folder, keep_all, _rank(), len(everyone), session, TIMEOUT_S)
    saver.start(Save(step, 0, own, manifest, expected=None), background=False)
    outcome = saver.join()
    for note in outcome.notes:
        warnings.warn(note, stacklevel=2)
    problem, is_bug = _share([outcome.problem, outcome.is_bug])[0]  # rank 0 knows of all ranks
    if problem is not None:
        raise RuntimeError(problem) if is_bug else OSError(problem)
    return final


def load(
    state_dict: dict[str, Any], *, checkpoint_id: str | os.PathLike[str], step: int | None = None
) -> int | None:
    """Loads a checkpoint that `save` wrote into `state_dict`, under any split of the model.

    The module, the optimizer and objects with a `load_state_dict` are filled in place, and other
    values are replaced in the dict. Every rank reads the chunks that it needs, and verifies them.
    The call is collective over the world.

    Args:
        state_dict: the same model with other values; the optimizer must have the same parameter
            groups. What the checkpoint has beyond the names of this dict is not read.
        checkpoint_id: the run's folder.
        step: step of the checkpoint; None stands for the newest.

    Returns:
        The step, or None if `step` is None and the folder has no checkpoint.

    Raises:
        UserError: on every rank, if there is no such step, if model, parameter groups or names
            differ from the saved ones, or if a file is damaged.
        TrainingFailure: on every rank, if a rank could not read the files.
    """
    folder = Path(checkpoint_id)
    net, optimizer, others = _together(lambda: _parts_to_load(state_dict, step))
    path = _chosen(folder, step)
    if path is None:
        return None
    stored, why = read_together(lambda: (read_manifest(path), stored_shapes(path)), _share)
    if stored is None:
        raise UserError(f"load({folder}): {why}; give another step")
    manifest, shapes = stored
    wanted = [n for n, value in sharded_state_dict(net).items() if isinstance(value, Tensor)]
    _check_names(path, wanted, shapes)
    saved, extra = _script_of(manifest, path)
    found = _together(lambda: _others_of(extra, others, path))
    if optimizer is not None:
        _together(lambda: _check_groups(optimizer, net, saved, path))
    # All checks come before this: a refusal leaves the module as it was.
    chunks, moments = _together(lambda: _to_fill(path, net, optimizer, shapes))
    with torch.no_grad():
        filled, why = read_together(lambda: read_state(path, chunks), _share)
    if filled is None:
        raise UserError(f"load({folder}): {why}; give another step")
    if optimizer is not None:
        _restore(optimizer, net, moments, saved)
    for name in others:
        if hasattr(state_dict[name], "load_state_dict"):
            state_dict[name].load_state_dict(found[name])
        else:
            state_dict[name] = found[name]
    return manifest.step


def _parts_of(call: str, state_dict: Mapping[str, Any]) -> _Parts:
    if not isinstance(state_dict, Mapping):
        raise UserError(
            f"{call}({type(state_dict).__name__}, …) must get a dict first, as in "
            f'{call}({{"model": net, "optimizer": optimizer}}, checkpoint_id="runs/mine")'
        )
    nets = [name for name, value in state_dict.items() if isinstance(value, nn.Module)]
    optimizers = [n for n, v in state_dict.items() if isinstance(v, torch.optim.Optimizer)]
    if len(nets) != 1 or len(optimizers) > 1:
        raise UserError(
            f"{call}: the state dict has {len(nets)} modules and {len(optimizers)} optimizers, but "
            "must have one module and at most one optimizer; put several into an nn.ModuleDict, "
            "with one optimizer of all their parameters"
        )
    others = {}
    for name, value in state_dict.items():
        if name not in (*nets, *optimizers):
            others[name] = value.state_dict() if hasattr(value, "state_dict") else value
    optimizer = state_dict[optimizers[0]] if optimizers else None
    return _Parts(state_dict[nets[0]], optimizer, others)


def _parts_to_load(state_dict: Mapping[str, Any], step: int | None) -> _Parts:
    if step is not None:
        _check_step("load", step, "or give step=None for the newest")
    return _parts_of("load", state_dict)


def _check_step(call: str, step: int, remedy: str) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UserError(f"{call}(step={step!r}) must be a whole number from 0 on; {remedy}")


# The state to save.


def _to_save(parts: _Parts, step: int) -> tuple[list[HeldTensor], dict[str, Any], dict[str, Any]]:
    """Returns this rank's chunks, named kind/name, the optimizer's other state, and other values.

    The last two are JSON.
    """
    net, optimizer, others = parts
    _check_step("save", step, "give the steps done")
    others = {name: _as_json(value) for name, value in others.items()}
    for name, value in others.items():
        _check_json(f"save: {name}", value)
    tensors: dict[str, Tensor] = {}
    for name, value in sharded_state_dict(net).items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"save: {name} is a {type(value).__name__}, but must be a tensor; keep it in a "
                "buffer, or give it under a name of its own instead"
            )
        tensors[f"{PARAMETER}/{name}"] = value
    facts: dict[str, Any] = {"groups": [], "group_of": {}, "values": {}}
    if optimizer is None:
        return _held(tensors), facts, others
    for group in optimizer.param_groups:
        kept = {key: _plain(v) for key, v in group.items() if key not in IMPLEMENTATION}
        _check_json("save(optimizer=…): its parameter groups", kept)
        facts["groups"].append(kept)
    for name, parameter, index in _named(net, optimizer):
        facts["group_of"][name] = index
        for kind, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                found = _plain(value)
                _check_json(f"save: the optimizer's {kind} of {name}", found)
                facts["values"][f"{kind}/{name}"] = [found, isinstance(value, Tensor)]
            elif value.shape == parameter.shape:
                tensors[f"{kind}/{name}"] = _shown(value, parameter)
            else:
                raise UserError(
                    f"save: the optimizer's {kind} of {name} has shape {tuple(value.shape)}, but "
                    f"must have that of the parameter, {tuple(parameter.shape)}; use an optimizer "
                    "such as AdamW or SGD instead"
                )
    return _held(tensors), facts, others


def _named(
    net: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yields each parameter with its name and the number of its group, in the optimizer's order."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise UserError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                    "in the module; all its parameters must belong to the module: give the module "
                    "that holds all of them"
                )
            yield names[parameter], parameter, index


def _shown(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns a tensor of the optimizer in the form that its parameter has in a state dict."""
    state = state_of(parameter)
    return value if state.spec is None else dtensor_of(value, state.spec, state.tp)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _check_json(what: str, value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{what} must be JSON, that is numbers, texts, lists and dicts ({error}); give tensors "
            "as buffers of the module instead"
        ) from None


def _as_json(value: Any) -> Any:
    """Returns a value with dicts and numbers that JSON has; `_from_json` reverses this."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _as_json(each) for key, each in value.items()}
        return {PAIRS: [[key, _as_json(each)] for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(float(value))}
    return value


def _from_json(value: Any, before: Any) -> Any:
    """Returns a saved value; tuples and Counters are those of `before`, the value to replace."""
    if isinstance(value, dict):
        if value.keys() == {FLOAT}:
            return float(value[FLOAT])
        pairs = value[PAIRS] if value.keys() == {PAIRS} else value.items()
        known = before if isinstance(before, dict) else {}
        # A tuple is a list in JSON, and cannot be a key there.
        named = [(tuple(key) if isinstance(key, list) else key, each) for key, each in pairs]
        found = {key: _from_json(each, known.get(key)) for key, each in named}
        return Counter(found) if isinstance(before, Counter) else found
    if isinstance(value, list):
        places = before if isinstance(before, (list, tuple)) else ()
        items = [_from_json(*both) for both in zip_longest(value, places[: len(value)])]
        return tuple(items) if isinstance(before, tuple) else items
    return value


def _held(tensors: Mapping[str, Tensor]) -> list[HeldTensor]:
    """Returns this rank's part of each tensor, as a view of its memory.

    A tensor without dimensions counts as a tensor of shape (1,). Parts without elements are left
    out.
    """
    found: list[HeldTensor] = []
    for name, value in tensors.items():
        local, shape = value.detach(), tuple(value.shape)
        offsets = (0,) * len(shape)
        if hasattr(local, "placements"):
            from torch.distributed.tensor import DTensor

            from parallel3d.private_names import local_shape_and_offset

            assert isinstance(local, DTensor)
            _, offsets = local_shape_and_offset(local.shape, local.device_mesh, local.placements)
            local = local.to_local()
        if local.dtype not in DTYPES.values():
            raise UserError(
                f"{name} has type {local.dtype}, but must have one that a checkpoint can hold; "
                "convert it, or make it a buffer with persistent=False instead"
            )
        if not shape:
            local, shape, offsets = local.view(1), (1,), (0,)
        if local.numel():
            found.append((name, shape, Chunk(tuple(offsets), tuple(local.shape)), local))
    return found


def _own_chunks(held: list[HeldTensor], everyone: list[list[list[Any]]]) -> dict[str, TensorChunks]:
    """Returns the chunks that this rank writes; only one rank writes a chunk that several hold.

    Raises UserError if the chunks of all ranks do not exactly make up the tensors.
    """
    holders: dict[tuple[str, Chunk], list[int]] = {}
    shapes: dict[str, list[int]] = {}
    for rank, theirs in enumerate(everyone):
        for name, shape, offsets, sizes in theirs:
            if shapes.setdefault(name, shape) != shape:
                raise UserError(
                    f"save: {name} has shape {shape} on rank {rank}, but must have "
                    f"{shapes[name]} as on another rank; give every rank the same model"
                )
            chunk = Chunk(tuple(offsets), tuple(sizes))
            holders.setdefault((name, chunk), []).append(rank)
    elements: dict[str, int] = {}
    for name, chunk in holders:
        elements[name] = elements.get(name, 0) + chunk.elements
    for name, count in elements.items():
        if count != math.prod(shapes[name]):
            raise UserError(
                f"save: the ranks hold {count} different elements of {name}, but must hold "
                f"{math.prod(shapes[name])} of shape {shapes[name]}; split it in the same way on "
                "every rank"
            )
    own: dict[str, TensorChunks] = {}
    for name, shape, chunk, local in held:
        ranks = holders[name, chunk]
        if ranks[zlib.crc32(name.encode()) % len(ranks)] == _rank():
            own[name] = TensorChunks(shape, local.dtype, [(chunk, local)])
    return own


def _merged(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the optimizer's facts of all ranks, which may have different stages."""
    merged: dict[str, Any] = {"groups": everyone[0]["groups"], "group_of": {}, "values": {}}
    for rank, theirs in enumerate(everyone):
        if theirs["groups"] != merged["groups"]:
            raise UserError(
                f"save: the optimizer's parameter groups on rank {rank} must be those of rank 0; "
                "give every rank the same groups with the same settings, if need be empty ones"
            )
        for key in ("group_of", "values"):
            merged[key] |= theirs[key]
    return merged


# The folder of a checkpoint.


def _new_session(folder: Path, final: Path) -> str:
    """Returns a name for this save. Raises UserError if the step is saved already."""
    if final.exists():
        raise UserError(
            f"save: {final} is there already, but must be new; give another step or folder, or "
            "remove it"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return secrets.token_hex(6)


def _chosen(folder: Path, step: int | None) -> Path | None:
    """Returns the checkpoint to load, which rank 0 chooses, or None if there is no checkpoint."""

    def choose() -> str | None:
        names = [path.name for path in list_checkpoints(folder)]
        if step is None:
            return names[0] if names else None
        if step_folder(step) not in names:
            steps = [step_of(Path(name)) for name in names]
            close = f"; the nearest is step={min(steps, key=lambda s: abs(s - step))}"
            raise UserError(
                f"load(step={step}) must be a checkpoint in {folder / CHECKPOINTS}"
                f"{close if steps else ', which has none; give step=None to begin without'}"
            )
        return step_folder(step)

    name = _on_first_rank(choose)
    return None if name is None else folder / CHECKPOINTS / name


# The state to load.


Moments = dict[nn.Parameter, dict[str, Any]]  # optimizer states with the parameter's shape, by kind


def _check_names(path: Path, here: list[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError, on every rank, if the model and the checkpoint have different names."""
    of_all = {name for theirs in _share(here) for name in theirs}
    there = {n.partition("/")[2] for n in shapes if n.partition("/")[0] == PARAMETER}
    for missing in sorted(of_all - there):
        raise UserError(
            f"{path} does not belong to this model: {missing} is missing"
            f"{nearest_hint(missing, there)}"
        )
    for more in sorted(there - of_all):
        raise UserError(
            f"{path} has {more}, which this model must have too{nearest_hint(more, of_all)}"
        )


def _to_fill(
    path: Path,
    net: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, TensorChunks], Moments]:
    """Returns the chunks to fill from the checkpoint, and the optimizer's tensors by parameter."""
    kinds: dict[str, list[str]] = {}
    for stored in shapes:
        kind, _, name = stored.partition("/")
        kinds.setdefault(name, []).append(kind)
    state = {f"{PARAMETER}/{name}": value for name, value in sharded_state_dict(net).items()}
    state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    moments: Moments = {}
    for name, parameter, _ in () if optimizer is None else _named(net, optimizer):
        for kind in kinds.get(name, []):
            if kind != PARAMETER:
                value = torch.zeros_like(parameter, requires_grad=False)
                moments.setdefault(parameter, {})[kind] = value
                state[f"{kind}/{name}"] = _shown(value, parameter)
    chunks = {}
    for name, full_shape, chunk, local in _held(state):
        if full_shape != shapes[name]:
            raise UserError(
                f"{path} has {name} of shape {shapes[name]}, but must have it of shape "
                f"{full_shape}; give a module of the sizes that were saved"
            )
        chunks[name] = TensorChunks(full_shape, local.dtype, [(chunk, local)])
    return chunks, moments


def _script_of(manifest: Manifest, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the optimizer's facts and `extra`. Raises UserError if `save` did not write them."""
    try:
        script = manifest.config["script"]
        saved = script["optimizer"]
        optimizer = {
            "groups": [{**group} for group in saved["groups"]],
            "group_of": {**saved["group_of"]},
            "values": {key: (value, kind) for key, (value, kind) in saved["values"].items()},
        }
        return optimizer, {**script["extra"]}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            f"{path} must be a checkpoint of parallel3d.save; give its folder instead"
        ) from None


def _others_of(extra: Mapping[str, Any], others: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns the saved values in place of `others`. Raises UserError if one is missing."""
    for name in others:
        if name not in extra:
            raise UserError(
                f"{path} has no {name}, which this state dict has{nearest_hint(name, extra)}"
            )
    try:
        return {name: _from_json(extra[name], before) for name, before in others.items()}
    except (TypeError, ValueError):
        raise UserError(
            f"{path} must be a checkpoint of parallel3d.save; give its folder instead"
        ) from None


def _check_groups(
    optimizer: torch.optim.Optimizer, net: nn.Module, saved: Mapping[str, Any], path: Path
) -> None:
    groups, group_of = saved["groups"], saved["group_of"]
    if len(groups) != len(optimizer.param_groups):
        raise UserError(
            f"{path} was saved from an optimizer with {len(groups)} parameter groups, but this "
            f"optimizer has {len(optimizer.param_groups)}; create it with the groups of the saved "
            "one"
        )
    for name, _, index in _named(net, optimizer):
        if group_of.get(name) != index:
            raise UserError(
                f"{path}: {name} was in parameter group {group_of.get(name)} when it was saved, "
                f"but is in group {index} of this optimizer; create the optimizer with the groups "
                "of the saved one"
            )


def _restore(
    optimizer: torch.optim.Optimizer, net: nn.Module, moments: Moments, saved: Mapping[str, Any]
) -> None:
    """Restores the optimizer's state and the settings of its groups."""
    values: dict[str, dict[str, Any]] = {}
    for key, (value, is_tensor) in saved["values"].items():
        kind, _, name = key.partition("/")
        values.setdefault(name, {})[kind] = torch.tensor(value) if is_tensor else value
    content = optimizer.state_dict()
    content["state"] = {}
    for number, (name, parameter, _) in enumerate(_named(net, optimizer)):
        if state := moments.get(parameter, {}) | values.get(name, {}):
            content["state"][number] = state
    for group, kept in zip(content["param_groups"], saved["groups"], strict=True):
        for key, value in kept.items():
            if key in IMPLEMENTATION:
                continue
            before = group.get(key)
            if isinstance(before, tuple):
                value = tuple(value)
            group[key] = torch.full_like(before, value) if isinstance(before, Tensor) else value
    optimizer.load_state_dict(content)


# Agreement of the ranks.


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _share(value: Any) -> list[Any]:
    """Returns the JSON values of all ranks. The call is collective over the world."""
    if not dist.is_initialized():
        return all_gather_json(value, None, torch.device("cpu"))
    return all_gather_json(value, dist.group.WORLD, device_of_words())


def _together(call: Callable[[], T]) -> T:
    """Returns the result of `call`; raises an error of any rank on all ranks. Collective."""
    result, problem = None, None
    try:
        result = call()
    except (UserError, OSError) as error:
        is_users = isinstance(error, UserError)
        problem = [is_users, reason(error) if isinstance(error, OSError) else str(error)]
    if first := next(filter(None, _share(problem)), None):
        is_users, sentence = first
        raise UserError(sentence) if is_users else OSError(sentence)
    return cast(T, result)


def _on_first_rank(call: Callable[[], Any]) -> Any:
    """Runs `call` on rank 0; on every rank, returns its JSON result or raises its error."""
    return _share(_together(lambda: call() if _rank() == 0 else None))[0]
