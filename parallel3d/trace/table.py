"""Remembers traces of layers on disk, and records those that are missing.

A file has the traces of one model, for one content of this package and one version of torch. It is
read at most once, replaced as a whole, and left out of account if it is damaged or not ours.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.files import is_ours, others_may_write, parse_json, read_bounded, replace_durably
from parallel3d.models.declared import LayerKind, layer_kinds
from parallel3d.models.keys import ModelConfig
from parallel3d.trace.layer_trace import LayerTrace
from parallel3d.trace.wanted import WantedTrace
from parallel3d.versions import installed

LARGEST = 256 << 20  # bytes of a file that is read
Recorder = Callable[[Sequence[WantedTrace]], list[LayerTrace]]


def record_here(wanted: Sequence[WantedTrace]) -> list[LayerTrace]:
    """Records traces in this process, which loads torch and enables the simulated device."""
    from parallel3d.trace.recorder import record  # imports torch

    return record(wanted)


class TraceTable:
    """The traces of one model.

    Args:
        path: the file in which traces are remembered; None: they are not.
        recorder: records traces that are not remembered.
    """

    def __init__(self, path: Path | None, recorder: Recorder = record_here) -> None:
        self.path = path
        self.recorder = recorder
        self.known: dict[str, LayerTrace] = {}
        self._read: dict[str, Any] | None = None  # traces of the file, as JSON

    def traces(self, wanted: Sequence[WantedTrace]) -> list[LayerTrace]:
        """Returns the traces, of which those that are missing are recorded and remembered."""
        missing = {
            (each.key, each.sequences): each
            for each in wanted
            if not self._found(each.key).covers(each.sequences)
        }
        # One line covers all numbers of sequences from two on, in most cases.
        while missing:
            first = {key: each for (key, _), each in reversed(missing.items())}
            for key, found in zip(first, self.recorder([*first.values()]), strict=True):
                self.known[key] = self._found(key).with_more(found)
            self._remember(first)
            missing = {
                (key, count): each
                for (key, count), each in missing.items()
                if not self.known[key].covers(count)
            }
        return [self.known[each.key] for each in wanted]

    def _found(self, key: str) -> LayerTrace:
        """Returns what is known or remembered of a trace."""
        if key not in self.known:
            if self._read is None:
                self._read = _read(self.path)
            self.known[key] = LayerTrace({})
            with contextlib.suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):
                self.known[key] = LayerTrace.from_json(self._read[key])
        return self.known[key]

    def _remember(self, keys: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        # Another process may have added traces since this one read the file.
        content = _read(self.path) | {key: self.known[key].as_json() for key in keys}
        with contextlib.suppress(OSError):  # traces can be recorded again
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_durably(self.path, json.dumps(content, separators=(",", ":")).encode())


def _read(path: Path | None) -> dict[str, Any]:
    """Returns the content of a file of traces; nothing if there is none that can be trusted."""
    if path is None:
        return {}
    try:
        status = path.lstat()
        if not is_ours(status, path.parent) or others_may_write(status, path.parent):
            return {}
        content = parse_json(read_bounded(path, LARGEST))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def trace_folder() -> Path | None:
    """Returns the folder of remembered traces; None for a user without a home folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(cache) if cache else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "parallel3d" / "traces"


def table_of(model: ModelConfig) -> TraceTable:
    """Returns the table of a model that this process shares."""
    return _table(_digest_of(model))


@functools.lru_cache(maxsize=8)
def _table(digest: str) -> TraceTable:
    folder = trace_folder()
    return TraceTable(None if folder is None else folder / f"{digest}.json")


def layer_traces(blueprint: Blueprint) -> dict[LayerKind, tuple[LayerTrace, LayerTrace]]:
    """Returns (trace without recomputation, trace with it) of each kind of layer in a run.

    A layer of the kind is one whose input has a gradient, if there is any.
    """
    model = blueprint.model
    kinds = [LayerKind.of(model, layer) for layer in range(model.num_layers)]
    last = {kind: model.num_layers - 1 - kinds[::-1].index(kind) for kind in layer_kinds(model)}
    wanted = [
        WantedTrace.of(blueprint, layer, recomputed)
        for layer in last.values()
        for recomputed in (False, True)
    ]
    found = table_of(model).traces(wanted)
    return dict(zip(last, zip(found[::2], found[1::2], strict=True), strict=True))


def _digest_of(model: ModelConfig) -> str:
    facts = asdict(model), _digest_of_package(), installed("torch")
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def _digest_of_package() -> str:
    """Returns a digest of this package's source, which says what its layers do."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
