"""Tests that traces are recorded once, survive on disk, and are recorded anew if they do not."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel3d.models.keys import ModelConfig
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config
from parallel3d.trace import table
from parallel3d.trace.child import RecordingProcess
from parallel3d.trace.layer_trace import (
    LayerRecord,
    LayerTrace,
    Line,
    PassRecord,
    RecordedEvents,
    highest,
)
from parallel3d.trace.table import TraceTable
from parallel3d.trace.wanted import WantedTrace


def wanted(
    sequences: int = 1, layer: int = 1, recomputed: bool = False, load: float = 1.0, **keys: Any
) -> WantedTrace:
    config = Config(model=ModelConfig(**{"num_layers": 4} | keys.pop("model", {})))
    config.micro_batch_size = sequences
    for key, value in keys.items():
        *sections, last = key.split(".")
        setattr(functools.reduce(getattr, sections, config), last, value)
    return WantedTrace.of(replace(blueprint_of(config), load=load), layer, recomputed)


def record_of(size: float, defers: bool = False) -> LayerRecord:
    numbers = Line(0, 8), Line(4, 0), Line(4, 0), Line(size, 0)
    product = RecordedEvents(2, "product", False, (1, "bfloat16"), numbers)
    empty = PassRecord((), (), (), Line(0, 0))
    one = PassRecord((product,), (Line(5, 0),), (), Line(0, 0))
    return LayerRecord(one, empty, empty, empty, (), (Line(1, size),), (), defers)


class Recorder:
    """Records numbers of sequences instead of layers."""

    def __init__(self, is_linear: bool = True) -> None:
        self.is_linear = is_linear
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, wanted: Sequence[WantedTrace]) -> list[LayerTrace]:
        self.asked += [each.sizes for each in wanted]
        return [self._trace(each.sizes, each.defers) for each in wanted]

    def _trace(self, sizes: Sequence[int], defers: bool) -> LayerTrace:
        exact = {n: record_of(n, defers) for n in sizes}
        if len([n for n in sizes if n > 1]) > 1 and self.is_linear:
            return LayerTrace(exact, record_of(7.0, defers))
        return LayerTrace(exact)


def test_a_line_through_two_numbers_of_sequences_covers_all_others(tmp_path: Path) -> None:
    recorder = Recorder()
    table = TraceTable(tmp_path / "traces" / "one", recorder)
    table.traces([wanted(n) for n in (1, 2, 3, 8, 1)])
    assert recorder.asked == [(1, 2, 8)]
    table.traces([wanted(n) for n in (1, 16)])
    assert len(recorder.asked) == 1


def test_a_second_number_of_sequences_is_recorded_with_the_first(tmp_path: Path) -> None:
    recorder = Recorder()
    TraceTable(tmp_path, recorder).traces([wanted(4)])
    (trace,) = TraceTable(tmp_path, recorder).traces([wanted(2)])
    assert recorder.asked == [(4,), (2, 4)]
    assert [trace.at(n).kept for n in (2, 4, 8)] == [(5.0,), (17.0,), (57.0,)]


def test_a_line_through_several_sequences_does_not_cover_one() -> None:
    recorder = Recorder()
    some = TraceTable(None, recorder)
    for sequences in (4, 1, 1, 2, 8):
        some.traces([wanted(sequences)])
    assert recorder.asked == [(4,), (1,), (2, 4)]


def test_without_a_line_each_number_of_sequences_is_recorded() -> None:
    recorder = Recorder(is_linear=False)
    (trace, *_) = TraceTable(None, recorder).traces([wanted(n) for n in (1, 2, 3, 5)])
    assert recorder.asked == [(1, 2, 5), (3,)]
    assert trace.at(3).kept == (10.0,)
    with pytest.raises(ValueError, match="nothing is recorded for 4"):
        trace.at(4)


def test_deferred_gradients_of_weights_are_recorded_once_they_are_wanted(tmp_path: Path) -> None:
    whole, split = ({}, {"pp": 2, "schedule.name": "zb_h1"})
    recorder = Recorder()
    for keys, count in ((whole, 1), (split, 2), (whole, 2), (split, 2)):
        (trace,) = TraceTable(tmp_path, recorder).traces([wanted(4, **keys)])
        assert len(recorder.asked) == count
    assert trace.covers(4, defers=True)
    # Once some are known, so are those of other numbers of sequences.
    (trace,) = TraceTable(tmp_path, recorder).traces([wanted(8, **whole)])
    assert trace.covers(16, defers=True)


def test_another_process_finds_the_same_traces_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "one"
    mine = [wanted(n, recomputed=again) for n in (1, 4) for again in (False, True)]
    made = TraceTable(path, Recorder()).traces(mine)
    later = Recorder()
    assert TraceTable(path, later).traces(mine) == made
    assert later.asked == []


@pytest.mark.parametrize("content", ["", "[1]", "{}", "[[[1, [2]]], null]", "[" * 9999])
def test_damaged_files_are_recorded_anew(content: str, tmp_path: Path) -> None:
    path, recorder = tmp_path / f"{wanted().key}.json", Recorder()
    path.write_text(content)
    TraceTable(tmp_path, recorder).traces([wanted()])
    assert recorder.asked == [(1,)]
    assert len(json.loads(path.read_text())) == 2


def test_files_that_others_may_write_are_not_read(tmp_path: Path) -> None:
    recorder = Recorder()
    TraceTable(tmp_path, Recorder()).traces([wanted()])
    (tmp_path / f"{wanted().key}.json").chmod(0o666)
    TraceTable(tmp_path, recorder).traces([wanted()])
    assert recorder.asked == [(1,)]


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (trace,) = TraceTable(tmp_path / "file" / "one", Recorder()).traces([wanted()])
    assert trace.covers(1)


def test_a_new_folder_removes_those_that_are_unused_for_a_month(tmp_path: Path) -> None:
    for name, days in (("old", 31), ("recent", 29)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trace.json").write_text("")
        then = time.time() - days * 86400
        os.utime(tmp_path / name, (then, then))
    TraceTable(tmp_path / "new", Recorder()).traces([wanted()])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "recent"]


WINDOWS = {"layer_types": ["sliding", "full"], "sliding_window": 8}
EXPERTS = {"num_experts": 4}
# A model of another size, with the same layers.
HEADS: dict[str, Any] = {
    "name": "other", "num_layers": 6, "vocab_size": 99, "tie_embeddings": False, "logit_cap": 30.0,
}  # fmt: skip
DIFFERENT: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"tp": 2, "sp": True},
    {"cp": 2},
    {"cp": 2, "context_parallel.style": "ring"},
    {"recompute": "full", "recomputed": True},
    {"recompute": "attention", "recomputed": True},
    {"zero": 2, "dp": 2},
    {"precision.name": "bf16"},
    {"model": {"ffn_hidden_size": 71}},
    {"layer": 0, "model": WINDOWS},
    {"layer": 1, "model": WINDOWS},
    {"optim.freeze": ["layers.1.attention.*"]},
    {"optim.freeze": ["embedding.*", "layers.0.*"]},
    {"model": EXPERTS},
    {"model": EXPERTS, "moe.aux_loss": 0.01},
    {"model": EXPERTS, "moe.z_loss": 0.01},
    {"model": EXPERTS, "dp": 4, "ep": 2},
    {"model": EXPERTS, "dp": 4, "ep": 2, "load": 1.5},
    {"model": EXPERTS, "dp": 4, "ep": 2, "moe.dispatch": "all_to_all"},
    {"model": EXPERTS, "dp": 4, "ep": 4},
]
SAME: list[dict[str, Any]] = [
    {"pp": 2},
    {"pp": 2, "schedule.name": "zb_h1"},
    {"dp": 4},
    {"zero": 1},
    {"recompute": "full"},
    {"layer": 3},
    {"model": HEADS},
    {"sequences": 3},
    {"seed": 7},
    {"load": 1.5},
    {"context_parallel.style": "ring"},
    {"moe.dispatch": "gather"},
    {"optim.freeze": ["layers.2.*"]},
]


def test_what_changes_a_layer_is_another_trace() -> None:
    found: dict[str, dict[str, Any]] = {}
    for keys in DIFFERENT:
        key = wanted(**keys).key
        assert key not in found, (keys, found[key])
        found[key] = keys


@pytest.mark.parametrize("keys", SAME, ids=str)
def test_what_does_not_change_a_layer_is_the_same_trace(keys: dict[str, Any]) -> None:
    assert wanted(**keys).key == wanted().key


def test_layers_with_the_same_frozen_parts_have_the_same_trace() -> None:
    frozen: list[dict[str, Any]] = [{"optim.freeze": [f"layers.{i}.mlp.*"]} for i in (1, 2)]
    first, second = (wanted(layer=i, **keys).key for i, keys in enumerate(frozen, 1))
    assert first == second != wanted().key


def test_another_layer_package_or_torch_has_traces_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {table.table_of(ModelConfig(ffn_hidden_size=n)).folder for n in (71, 72)}
    assert table.table_of(ModelConfig(ffn_hidden_size=71, **HEADS)).folder in found
    for name, other in (("_digest_of_package", lambda: ""), ("installed", lambda _: "0")):
        with monkeypatch.context() as patched:
            patched.setattr(table, name, other)
            found.add(table.table_of(ModelConfig(ffn_hidden_size=71)).folder)
    assert len(found) == 4


def test_each_kind_has_a_trace_of_its_last_layer_without_and_with_recomputation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def numbered(every: Sequence[WantedTrace]) -> list[LayerTrace]:
        records = (record_of(each.layer + 10 * each.recomputed) for each in every)
        return [LayerTrace({1: record}) for record in records]

    made = TraceTable(None, numbered)
    monkeypatch.setattr(table, "table_of", lambda _: made)
    found = table.layer_traces(wanted(recompute="full", model=WINDOWS).blueprint)
    kept = {kind.window: [trace.at(1).kept for trace in pair] for kind, pair in found.items()}
    assert kept == {8: [(3,), (13,)], None: [(4,), (14,)]}


def test_a_line_goes_through_the_two_sizes_that_are_recorded() -> None:
    assert [Line.through(2, 5, 4, 9).at(n) for n in (2, 3, 4, 8)] == [5, 7, 9, 17]
    assert [Line.through(3, 7, 8, 17).at(n) for n in (2, 3, 4, 8)] == [5, 7, 9, 17]


def test_a_repeated_forward_is_apart_and_the_peak_is_that_of_the_highest_line() -> None:
    waits = [RecordedEvents(n, "wait", again, (), ()) for n, again in ((2, False), (3, True))]
    both = PassRecord(tuple(waits), (Line(9, 0), Line(0, 4)), (), Line(1, 1))
    none = PassRecord((), (), (), Line(0, 0))
    passes = LayerRecord(none, both, none, none, (), (), (), False).at(3)
    assert (passes.backward.waits, passes.repeated.waits) == (2, 3)
    assert (passes.backward.peak, passes.backward.live, passes.repeated.peak) == (12, 4, 0)


def test_the_highest_lines_have_the_same_maximum_everywhere() -> None:
    lines = [Line(a, b) for a in range(-9, 10, 3) for b in range(-2, 3) if a + 4 * b < 11]
    few = highest(lines)
    assert len(few) < len(lines)
    for n in range(2, 40):
        assert max(line.at(n) for line in few) == max(line.at(n) for line in lines)
    assert highest([]) == ()


def test_a_recording_process_that_ends_is_named_with_its_status_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recording = RecordingProcess()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended with status 1"):
        recording([])
    monkeypatch.undo()
    recording.child = subprocess.Popen(["/bin/true"], stdin=subprocess.PIPE)
    recording.child.wait()
    assert recording([]) == []
    recording.close()
