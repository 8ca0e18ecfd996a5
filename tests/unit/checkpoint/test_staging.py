"""Tests copies of a save's chunks: where they are, when they are made, and on which device's
stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from parallel3d.checkpoint import saver as staging
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.checkpoint.keys import CheckpointConfig
from parallel3d.checkpoint.saver import Saver, Staging
from parallel3d.checkpoint.storage import Chunk, TensorChunks
from parallel3d.device import accelerator
from parallel3d.loop.keys import TrainConfig
from parallel3d.run_config import Config

GPU = torch.device("cuda:3")


def state_of(*shapes: tuple[int, ...]) -> staging.State:
    """Returns a tensor for each shape, in one chunk that begins at its row 5."""
    state = {}
    for i, shape in enumerate(shapes):
        values = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1000 * i
        rest = (0,) * (len(shape) - 1)
        tensor = TensorChunks((shape[0] + 5, *shape[1:]), values.dtype)
        tensor.chunks.append((Chunk((5, *rest), shape), values))
        state[f"parameter/{i}"] = tensor
    return state


def assembled(tensor: TensorChunks) -> Tensor:
    whole = torch.full(tensor.full_shape, torch.nan)
    for box, values in tensor.chunks:
        rows = slice(box.offsets[0], box.offsets[0] + box.sizes[0])
        assert whole[rows].isnan().all() and values.shape == box.sizes
        whole[rows] = values
    return whole


def test_boxes_are_copied_whole_into_slabs_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLAB", 1024)
    shapes = ((100,), (3,), (40, 16), (7, 5), (1, 300), (250,))  # chunks from 12 to 2,560 bytes
    kept, state = Staging(), state_of(*shapes)
    kept.prepare(state)
    slabs = [slab.data_ptr() for slab in kept.slabs]
    # A row of 1,200 bytes does not fit into a slab of 1,024; all others do.
    assert sorted(slab.numel() for slab in kept.slabs)[-1] == 1216
    assert all(slab.numel() <= 1024 for slab in kept.slabs if slab.numel() != 1216)
    for _ in range(2):
        copied = kept.copy(state)
        for name, tensor in state.items():
            assert torch.equal(
                assembled(copied[name]).nan_to_num(-1), assembled(tensor).nan_to_num(-1)
            )
            assert copied[name].full_shape == tensor.full_shape
        for tensor in state.values():
            tensor.chunks[0][1].add_(1)  # training continues, but the copy stays until the next one
    assert [slab.data_ptr() for slab in kept.slabs] == slabs
    used = [values for tensor in copied.values() for _, values in tensor.chunks]
    starts = sorted((values.data_ptr(), values.data_ptr() + values.nbytes) for values in used)
    assert all(end <= start for (_, end), (start, _) in pairwise(starts))


def test_slabs_waste_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLAB", 1024)
    sizes = [640, 320, 64, 640, 384, 512, 512] * 5
    kept = Staging()
    places = [place for *_, place in kept.prepare(state_of(*((size // 4,) for size in sizes)))]
    assert [slab.numel() for slab in kept.slabs] == [1024] * 15
    starts = sorted((place.data_ptr(), place.nbytes) for place in places)
    slabs = {slab.data_ptr() for slab in kept.slabs}
    ends = {start + size for start, size in starts}
    assert all(start in slabs or start in ends for start, _ in starts)


def test_nothing_to_save_is_nothing_to_copy() -> None:
    assert Staging().copy({}) == {}
    assert staging.device_of({}) == torch.device("cpu")


class Gpu:
    """A GPU's module that records the calls of its streams, in order, and their thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.current = {threading.get_ident(): GPU}  # the current device of each thread
        monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
        monkeypatch.setattr(accelerator, "module", lambda device: self)
        monkeypatch.setattr(staging, "device_of", lambda state: GPU)
        monkeypatch.setattr("parallel3d.checkpoint.saver.device_of", lambda state: GPU)
        plain = torch.empty

        def empty(*sizes: int, pin_memory: bool = False, dtype: torch.dtype) -> Tensor:
            self.said.append("pinned" if pin_memory else "pageable")
            return plain(*sizes, dtype=dtype)

        monkeypatch.setattr(torch, "empty", empty)

    def set_device(self, device: torch.device) -> None:
        self.current[threading.get_ident()] = device

    def current_stream(self, device: torch.device) -> str:
        return "compute"

    def Event(self) -> SimpleNamespace:
        return SimpleNamespace(record=lambda stream: self.said.append(f"event on {stream}"))

    def Stream(self, device: torch.device) -> SimpleNamespace:
        self.said.append("new stream")
        return SimpleNamespace(
            device=device,
            wait_event=lambda event: self.said.append("wait for the event"),
            synchronize=lambda: self.said.append("synchronize"),
        )

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        # On exit, `torch.cuda.stream` makes the thread's device current: 0 if none was set.
        assert self.current.get(threading.get_ident()) == stream.device
        self.said.append("copies")
        yield


def test_on_a_gpu_copies_wait_for_the_step_and_end_before_files_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, kept, state = Gpu(monkeypatch), Staging(), state_of((4, 4))
    kept.prepare(state)
    for _ in range(2):
        copied = kept.copy(state, kept.now(state))
    assert torch.equal(copied["parameter/0"].chunks[0][1], state["parameter/0"].chunks[0][1])
    a_copy = ["wait for the event", "copies", "synchronize"]
    first = ["pinned", "event on compute", "new stream", *a_copy]
    assert gpu.said == [*first, "event on compute", *a_copy]


def test_if_a_copy_fails_no_other_copy_is_still_running(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, kept = Gpu(monkeypatch), Staging()
    state = state_of((4, 4), (2,))
    ready = kept.now(state)

    def fail(self: Tensor, *_: object, **__: object) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr(Tensor, "copy_", fail)
    with pytest.raises(RuntimeError, match="out of something"):
        kept.copy(state, ready)
    assert gpu.said[-1] == "synchronize"


def test_the_savers_thread_takes_the_ranks_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    gpu = Gpu(monkeypatch)
    saver = Saver(tmp_path, CheckpointConfig(), 0, 1, "session", timeout_s=5)
    monkeypatch.setattr(saver, "_work", lambda save, copy: copy(save.state))
    save = SimpleNamespace(step=3, state=state_of((4, 4)), copied=threading.Event())
    saver.start(save, background=True)
    thread = saver.thread
    thread.join()
    assert gpu.current[thread.ident] == GPU  # otherwise `Gpu.stream` has raised
    assert gpu.said[0] == "event on compute" and gpu.said[-1] == "synchronize"
    with pytest.raises(RuntimeError, match="a save is in flight"):
        saver.start(SimpleNamespace(step=4, state={}), background=False)


@pytest.mark.parametrize(
    ("every", "steps", "done", "expected"),
    [
        (500, 20, 0, False),  # the only save of a smoke run is at its end and not copied
        (500, 501, 0, True),
        (10, 20, 9, True),
        (10, 20, 10, False),
        (0, 20, 0, False),
    ],
)
def test_slabs_are_reserved_at_the_start_if_a_save_will_be_copied(
    every: int, steps: int, done: int, expected: bool
) -> None:
    config = Config(train=TrainConfig(steps=steps), checkpoint=CheckpointConfig(every=every))
    checkpoints = Checkpoints(config, None, None, print)
    assert checkpoints._copies_ahead(done) is expected
