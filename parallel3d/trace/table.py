"""Remembers traces of layers on disk, and records those that are missing.

A folder has the traces of models with equal layers, for one content of this package and one version
of torch, each in a file. A file is replaced as a whole; one that is damaged or not ours is left out
of account.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.files import is_ours, others_may_write, parse_json, read_bounded, replace_durably
from parallel3d.models.declared import KnownModel, LayerKind, layer_kinds
from parallel3d.models.keys import ModelConfig
from parallel3d.trace.child import RecordingProcess
from parallel3d.trace.layer_trace import LayerTrace
from parallel3d.trace.wanted import WantedTrace, digest_of, digest_of_layers
from parallel3d.versions import installed

LARGEST = 1 << 24  # bytes of a file that is read
UNUSED_S = 30 * 86400.0  # seconds after which the traces of another model or version are removed
Recorder = Callable[[Sequence[WantedTrace]], list[LayerTrace]]


class TraceTable:
    """The traces of one model.

    Args:
        folder: where traces are remembered; None: they are not.
        recorder: records traces that are not remembered.
    """

    def __init__(self, folder: Path | None, recorder: Recorder) -> None:
        self.folder = folder
        self.recorder = recorder
        self.known: dict[str, LayerTrace] = {}

    def traces(self, wanted: Sequence[WantedTrace]) -> list[LayerTrace]:
        """Returns the traces, of which those that are missing are recorded and remembered."""
        while missing := self._missing(wanted):
            for each, found in zip(missing, self.recorder(missing), strict=True):
                self.known[each.key] = self.known[each.key].with_more(found)
            self._remember(each.key for each in missing)
        return [self.known[each.key] for each in wanted]

    def _missing(self, wanted: Sequence[WantedTrace]) -> list[WantedTrace]:
        """Returns what must be recorded next, once for each trace.

        In most cases, a line through two numbers of sequences covers all others from two on.
        """
        asked: dict[str, WantedTrace] = {}
        for each in wanted:
            known, before = self._found(each.key), asked.get(each.key)
            sizes = {n for n in each.sizes if not known.covers(n, each.defers)}
            if sizes and before is not None:
                each = replace(before, defers=before.defers or each.defers)
                sizes.update(before.sizes)
            if sizes:
                asked[each.key] = replace(each, sizes=tuple(sorted(sizes)))
        return [self._next(each) for each in asked.values()]

    def _next(self, wanted: WantedTrace) -> WantedTrace:
        """Returns `wanted` with the sizes that are recorded next."""
        known = self.known[wanted.key]
        recorded = [n for n in known.exact if n > 1 and known.covers(n, wanted.defers)]
        several = [n for n in wanted.sizes if n > 1]
        if several and len(recorded) < 2:  # with two and no line, each is recorded
            several = [*(recorded or several)[:1], several[-1]]
        sizes = {*several, *(n for n in wanted.sizes if n == 1)}
        defers = wanted.defers or known.defers
        return replace(wanted, sizes=tuple(sorted(sizes)), defers=defers)

    def _found(self, key: str) -> LayerTrace:
        """Returns what is known or remembered of a trace."""
        if key not in self.known:
            self.known[key] = _read(self.folder, key)
        return self.known[key]

    def _remember(self, keys: Iterable[str]) -> None:
        if self.folder is None:
            return
        with contextlib.suppress(OSError):  # traces can be recorded again
            if not self.folder.is_dir():
                self.folder.mkdir(mode=0o700, parents=True)
                _remove_unused(self.folder.parent)
            for key in keys:
                content = json.dumps(self.known[key].as_json(), separators=(",", ":"))
                replace_durably(_path(self.folder, key), content.encode())


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


def _read(folder: Path | None, key: str) -> LayerTrace:
    """Returns a remembered trace; an empty one if there is none that can be trusted."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        if folder is not None:
            path = _path(folder, key)
            status = path.lstat()
            if is_ours(status, folder) and not others_may_write(status, folder):
                return LayerTrace.from_json(parse_json(read_bounded(path, LARGEST)))
    return LayerTrace({})


def _remove_unused(folder: Path) -> None:
    """Removes the traces of models and versions that were last added to a month ago."""
    for other in folder.iterdir():
        if time.time() - other.stat().st_mtime > UNUSED_S:
            shutil.rmtree(other, ignore_errors=True)


def trace_folder() -> Path | None:
    """Returns the folder of all remembered traces; None for a user without a home folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(cache) if cache else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "parallel3d" / "traces"


def table_of(model: ModelConfig) -> TraceTable:
    """Returns the table of a model's layers that this process shares."""
    return _table(_digest_of(model))


@functools.lru_cache(maxsize=8)
def _table(digest: str) -> TraceTable:
    folder = trace_folder()
    return TraceTable(None if folder is None else folder / digest, recording_process())


@functools.cache
def recording_process() -> RecordingProcess:
    """Returns the child process that all tables of this process share."""
    return RecordingProcess()


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
    of_layers = digest_of_layers(KnownModel.of(model))
    return digest_of([of_layers, _digest_of_package(), installed("torch")])[:32]


@functools.cache
def _digest_of_package() -> str:
    """Returns a digest of this package's source, which says what its layers do."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
