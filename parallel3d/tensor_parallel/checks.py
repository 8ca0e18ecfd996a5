"""Checks that tensor parallelism splits the model evenly."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from parallel3d.config.fields import check_conflicts
from parallel3d.errors import UserError, closest, nearest_multiple
from parallel3d.models.declared import MIXERS, layer_kinds
from parallel3d.models.keys import ModelConfig
from parallel3d.tensor_parallel.keys import NEEDS_SP

PADDED = "the rows of the padded vocabulary"


WITH_SP = "(as sp=true) model.seq_length"


def _tp_dividends(model: ModelConfig, *, cp: int, sp: bool) -> dict[str, int]:
    """Returns the sizes that tp must divide, keyed by their names in messages.

    The widths of MLPs and shared experts are among them only if the model has a layer with one.
    Under context parallelism, the sequence length is not among them, because it is padded
    (`Config.padded_seq_length`).
    """
    every = _numbers_of_heads(model, shared=False)
    sizes = {key: math.gcd(*numbers) for key, numbers in every.items()}
    sizes["model.hidden_size"] = model.hidden_size
    experts = len(model.expert_layers)
    if experts < model.num_layers:
        sizes["model.ffn_hidden_size"] = model.ffn_size
    if experts and model.shared_expert_size:
        sizes["model.shared_expert_size"] = model.shared_expert_size
    sizes[PADDED] = model.padded_vocab_size
    if sp and cp == 1:
        sizes[WITH_SP] = model.seq_length
    return sizes


def _tp_splits(model: ModelConfig, sizes: Collection[int]) -> Callable[[int], bool]:
    """Returns a function that checks whether a tensor-parallel size splits this model evenly.

    `sizes` are the sizes that the tensor-parallel size must divide.
    """
    common = math.gcd(*sizes)
    return lambda tp: common % tp == 0 and not _unsplit_shared_heads(model, tp)


def _numbers_of_heads(model: ModelConfig, shared: bool) -> dict[str, set[int]]:
    """Returns the numbers of heads of mixers by the key that gives them.

    `shared`: whether to count the heads that others share, such as key-value heads.
    """
    found: dict[str, set[int]] = {}
    for kind in layer_kinds(model):
        if kind.mixer is not None:
            key = f"model.{MIXERS[kind.mixer].keys_of_heads[shared]}"
            found.setdefault(key, set()).add(kind.kv_heads if shared else kind.heads)
    return found


def _unsplit_shared_heads(model: ModelConfig, tp: int) -> list[str]:
    """Returns the keys of shared heads whose number neither tp divides nor divides tp."""
    every = _numbers_of_heads(model, shared=True)
    return [key for key, numbers in every.items() if any(n % tp and tp % n for n in numbers)]


def check_tensor_parallel(model: ModelConfig, chunks: int, *, tp: int, cp: int, sp: bool) -> None:
    """Raises UserError unless tp, sp and `tensor_parallel.chunks` split the model evenly."""
    sizes = _tp_dividends(model, cp=cp, sp=sp)
    wrong = [f"{name}={size}" for name, size in sizes.items() if size % tp]
    values = model.in_effect
    for key in _unsplit_shared_heads(model, tp):
        wrong.append(f"{key}={values[key.removeprefix('model.')]} (or be a multiple of it)")
    if wrong:
        fits = _tp_splits(model, sizes.values())
        close = closest(tp, fits, min(sizes.values())) or 1  # tp=1 divides everything
        other = {
            WITH_SP: f", or model.seq_length={nearest_multiple(model.seq_length, tp)}",
            PADDED: f", or model.vocab_multiple={math.lcm(model.vocab_multiple, tp)}",
        }
        near = other.get(wrong[0].rpartition("=")[0], "") if len(wrong) == 1 else ""
        raise UserError(
            f"tp={tp} must divide {' and '.join(wrong)}; the nearest that fits this model is "
            f"tp={close}{near}."
        )
    values = {"tensor_parallel.chunks": chunks, "sp": sp}
    check_conflicts((NEEDS_SP,), values.__getitem__)
    local = model.seq_length // tp
    if sp and tp > 1 and cp == 1 and local % chunks:
        near = f"tensor_parallel.chunks={closest(chunks, lambda n: local % n == 0, local) or 1}"
        raise UserError(
            f"tensor_parallel.chunks={chunks} must divide model.seq_length / tp = {local}; the "
            f"nearest is {near}."
        )
