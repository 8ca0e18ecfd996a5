"""Tests a checkpoint on the disk: complete or absent, every damage detected, nothing unpickled."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from parallel3d.checkpoint import saver as saver_module
from parallel3d.checkpoint.keys import CheckpointConfig
from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    DamagedCheckpoint,
    FileDigest,
    Manifest,
    list_checkpoints,
    read_manifest,
    step_folder,
    step_of,
    write_manifest,
)
from parallel3d.checkpoint.saver import (
    Save,
    Saver,
    SaveResult,
    expired,
    remove_leftovers,
)
from parallel3d.checkpoint.storage import (
    Chunk,
    TensorChunks,
    read_full,
    read_state,
    verify_checkpoint,
    write_state,
)

KINDS = ("parameter", "exp_avg")
DATA = {"fingerprint": "f", "train_tokens": 9}
SHAPES = {"w": (9, 7), "v": (5,), "table": (6, 4)}
ROWS = {"w": (4, 9), "v": (5, 5), "table": (1, 6)}  # end of the rows of rank 0, and of rank 1


def full(name: str, kind: str, step: int) -> torch.Tensor:
    """Returns a whole tensor of a step."""
    number = sorted(SHAPES).index(name) * 2 + KINDS.index(kind)
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(SHAPES[name], generator=generator)


def state(step: int, rank: int) -> dict[str, TensorChunks]:
    """Returns the rows that one of two ranks holds."""
    tensors = {}
    for name, shape in SHAPES.items():
        first, end = ((0, ROWS[name][0]), ROWS[name])[rank]
        if first == end:
            continue
        for kind in KINDS:
            values = full(name, kind, step)[first:end].contiguous()
            box = Chunk((first, *(0 for _ in shape[1:])), tuple(values.shape))
            tensors[f"{kind}/{name}"] = TensorChunks(shape, values.dtype, [(box, values)])
    return tensors


def facts(step: int) -> Manifest:
    progress = {"steps": step, "consumed_samples": 4 * step, "updates": step}
    progress |= {"loss_scale": 1.0, "good_steps": 0, "overflows": 0}
    return Manifest(step, progress, {"tp": 2}, DATA, "", {}, ())


def make(run_dir: Path, step: int) -> Path:
    """Writes a checkpoint of two ranks, in one process."""
    folder = run_dir / CHECKPOINTS / step_folder(step)
    folder.mkdir(parents=True)
    files = [write_state(folder / f"rank-{r:05d}.safetensors", state(step, r)) for r in (0, 1)]
    write_manifest(folder, dataclasses.replace(facts(step), files=tuple(files)))
    return folder


def load(folder: Path) -> None:
    """Reads everything into place, like a run before its first step, and compares."""
    wanted = {}
    for name, shape in SHAPES.items():
        for kind in KINDS:
            values = torch.full(shape, torch.nan)
            box = Chunk((0,) * len(shape), shape)
            wanted[f"{kind}/{name}"] = TensorChunks(shape, values.dtype, [(box, values)])
    step = read_state(folder, wanted).step
    for key, tensor in wanted.items():
        kind, _, name = key.partition("/")
        assert torch.equal(tensor.chunks[0][1], full(name, kind, step)), key


def one_rank(run_dir: Path, **settings: object) -> Saver:
    return Saver(run_dir, CheckpointConfig(**settings), 0, 1, "session", timeout_s=5)


def whole(step: int) -> dict[str, TensorChunks]:
    """Returns the state of a single rank, which holds everything."""
    tensors = state(step, 0)
    for key, tensor in state(step, 1).items():
        tensors.setdefault(key, dataclasses.replace(tensor, chunks=[])).chunks.extend(tensor.chunks)
    return tensors


ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES.values())
EXPECTED = {(kind,): ELEMENTS for kind in KINDS}


def save(saver: Saver, step: int, *, background: bool = False) -> SaveResult:
    save = Save(step, step, whole(step), facts(step), EXPECTED)
    saver.start(save, background=background)
    return saver.join()


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / CHECKPOINTS).iterdir())


def test_a_checkpoint_reads_back_and_any_safetensors_reader_opens_it(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    load(folder)
    assert verify_checkpoint(folder).progress["steps"] == 3
    assert torch.equal(read_full(folder)["parameter/w"], full("w", "parameter", 3))
    with safe_open(folder / "rank-00001.safetensors", framework="pt") as file:
        box = file.get_tensor("exp_avg/w/4,0")
    assert torch.equal(box, full("w", "exp_avg", 3)[4:])


# Damages: each changes one of two checkpoints, `folder` or its twin `other`.


def flip(folder: Path, other: Path, draw: random.Random) -> None:
    path = draw.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def truncate(folder: Path, other: Path, draw: random.Random) -> None:
    path = draw.choice(sorted(folder.iterdir()))
    os.truncate(path, draw.randrange(path.stat().st_size))


def lengthen(folder: Path, other: Path, draw: random.Random) -> None:
    path = draw.choice(sorted(folder.iterdir()))
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, 40)))


def zero_a_stretch(folder: Path, other: Path, draw: random.Random) -> None:
    path = draw.choice(sorted(folder.glob("*.safetensors")))
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content) - 8)
    content[start : start + 8] = bytes(8) if any(content[start : start + 8]) else b"\1" * 8
    path.write_bytes(content)


def lose(folder: Path, other: Path, draw: random.Random) -> None:
    draw.choice(sorted(folder.iterdir())).unlink()


def swap_ranks(folder: Path, other: Path, draw: random.Random) -> None:
    a, b = sorted(folder.glob("*.safetensors"))
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)


def swap_steps(folder: Path, other: Path, draw: random.Random) -> None:
    """Replaces a file, or all files, by those in another step's checkpoint."""
    if draw.random() < 0.3:
        shutil.rmtree(folder)
        shutil.copytree(other, folder)
        return
    path = draw.choice(sorted(folder.glob("*.safetensors")))
    shutil.copy(other / path.name, path)


def swap_boxes(folder: Path, other: Path, draw: random.Random) -> None:
    """Swaps two chunks of one size inside a file."""
    path = draw.choice(sorted(folder.glob("*.safetensors")))
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    ends = [v["data_offsets"] for k, v in header.items() if k != "__metadata__"]
    pairs = [(a, b) for a in ends for b in ends if a < b and a[1] - a[0] == b[1] - b[0]]
    (a, b), (c, d) = draw.choice(pairs)
    body = bytearray(content[start:])
    body[a:b], body[c:d] = body[c:d], body[a:b]
    path.write_bytes(content[:start] + body)


def add(folder: Path, other: Path, draw: random.Random) -> None:
    (folder / draw.choice((".metadata", "rank-00002.safetensors", "x.pt"))).write_bytes(b"x")


DAMAGES: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    *(flip, flip, flip, flip, truncate, truncate, lengthen, zero_a_stretch, lose),
    *(swap_ranks, swap_steps, swap_boxes, add),
)


@pytest.mark.slow
def test_a_thousand_random_damages_are_a_thousand_refusals(tmp_path: Path) -> None:
    """The read that fills the parameters finds the damage, before a step could be taken."""
    good, other = make(tmp_path / "a", 3), make(tmp_path / "b", 4)
    load(good)
    draw, undetected = random.Random(11), []
    bad = tmp_path / "bad" / good.name
    for number in range(1000):
        damage = draw.choice(DAMAGES)
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        damage(bad, other, draw)
        try:
            load(bad)
        except DamagedCheckpoint:
            continue
        undetected.append(f"{number}: {damage.__name__}")
    assert not undetected


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_planted_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    """Adds the pickle as a file of its own, as DCP's metadata, and as a rank's file with matching
    digests."""
    ran = tmp_path / "ran"
    payload = pickle.dumps(Payload(ran))
    for number, name in enumerate((".metadata", "data.pkl", "__0_0.distcp")):
        folder = make(tmp_path / str(number), 3)
        (folder / name).write_bytes(payload)
        with pytest.raises(DamagedCheckpoint, match="holds unexpected files"):
            load(folder)
    folder = make(tmp_path / "fitting", 3)
    manifest = read_manifest(folder)
    (path,) = folder.glob("manifest-*")
    path.unlink()
    content = len(payload).to_bytes(8, "little") + payload
    (folder / "rank-00001.safetensors").write_bytes(content)
    digest = FileDigest("rank-00001.safetensors", len(content), hashlib.sha256(content).hexdigest())
    write_manifest(folder, dataclasses.replace(manifest, files=(manifest.files[0], digest)))
    with pytest.raises(DamagedCheckpoint, match="is not a checkpoint file written by parallel3d"):
        load(folder)
    assert not ran.exists()


def test_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    manifest = read_manifest(folder)
    (path,) = folder.glob("manifest-*")
    path.unlink()
    outside = FileDigest("../../secret", 1, "0" * 64)
    write_manifest(folder, dataclasses.replace(manifest, files=(*manifest.files, outside)))
    with pytest.raises(DamagedCheckpoint, match="secret"):
        load(folder)


def test_save_is_private_named_by_its_step_and_the_newest(tmp_path: Path) -> None:
    saver = one_rank(tmp_path)
    assert save(saver, 3, background=True) == SaveResult()
    assert save(saver, 6) == SaveResult()
    assert names(tmp_path) == ["latest", step_folder(3), step_folder(6)]
    assert (tmp_path / CHECKPOINTS / "latest").read_text() == f"{step_folder(6)}\n"
    for folder in list_checkpoints(tmp_path):
        load(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / CHECKPOINTS).stat().st_mode) == 0o700


def test_kept_are_the_last_few_and_every_nth(tmp_path: Path) -> None:
    settings = CheckpointConfig(keep=2, keep_every=30)
    paths = [Path(step_folder(step)) for step in range(100, 0, -10)]
    gone = {int(p.name[5:]) for p in expired(paths, settings)}
    assert set(range(10, 101, 10)) - gone == {30, 60, 90, 100}
    never = CheckpointConfig(every=0, keep=2, keep_every=30)
    assert expired(paths, never) == expired(paths, settings)
    saver = one_rank(tmp_path, keep=1, keep_every=4)
    for step in range(2, 11, 2):
        assert save(saver, step) == SaveResult()
    assert names(tmp_path) == ["latest", *(step_folder(step) for step in (4, 8, 10))]


def test_with_saves_by_time_the_first_from_each_multiple_is_kept() -> None:
    """Every save removes what has expired, so the rule is applied again and again."""
    there: list[int] = []

    def save_at(settings: CheckpointConfig, steps: Iterable[int]) -> list[int]:
        for step in steps:
            there.insert(0, step)
            gone = {step_of(p) for p in expired([Path(step_folder(s)) for s in there], settings)}
            there[:] = [step for step in there if step not in gone]
        return there

    by_time = CheckpointConfig(every="10min", keep=1, keep_every=100)
    steps = (40, 95, 105, 130, 180, 310, 320, 400, 410, 999)
    assert save_at(by_time, steps) == [999, 400, 310, 105]
    # They stay when the run goes on with saves by steps.
    by_steps = CheckpointConfig(every=50, keep=1, keep_every=100)
    assert save_at(by_steps, range(1050, 1301, 50)) == [1300, 1200, 1100, 999, 400, 310, 105]


@pytest.mark.parametrize("place", ["write", "fsync", "manifest", "rename"])
def test_a_full_disk_leaves_the_old_checkpoint_and_no_torn_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    saver = one_rank(tmp_path)
    assert save(saver, 3) == SaveResult()

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if place == "manifest":
        monkeypatch.setattr(saver_module, "write_manifest", full_disk)
    else:
        monkeypatch.setattr(os, place, full_disk)
    background = place != "fsync"
    failed = save(saver, 6, background=background)
    assert failed == SaveResult("No space left on device (rank 0)")
    monkeypatch.undo()
    assert names(tmp_path) == ["latest", step_folder(3)]
    load(list_checkpoints(tmp_path)[0])
    assert save(saver, 9) == SaveResult()
    assert names(tmp_path) == ["latest", step_folder(3), step_folder(9)]


def test_a_save_with_missing_elements_makes_no_checkpoint(tmp_path: Path) -> None:
    saver = one_rank(tmp_path)
    saver.start(Save(3, 1, state(3, 0), facts(3), EXPECTED), background=False)
    outcome = saver.join()
    assert outcome.is_bug and f"not {ELEMENTS}" in (outcome.problem or "").partition("\n")[0]
    assert names(tmp_path) == []


def test_a_save_that_lacks_state_of_a_parameter_makes_no_checkpoint(tmp_path: Path) -> None:
    lacking = {key: tensor for key, tensor in whole(1).items() if key != "exp_avg/w"}
    saver = one_rank(tmp_path)
    saver.start(Save(1, 1, lacking, facts(1), EXPECTED), background=False)
    problem = saver.join().problem
    assert problem is not None and "the ranks wrote" in problem
    assert names(tmp_path) == []


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    make(tmp_path, 3)
    folder = tmp_path / CHECKPOINTS
    for name in (".saving-00000006-old", ".removed-step-00000001"):
        (folder / name).mkdir()
        (folder / name / "rank-00000.safetensors").write_bytes(b"half")
    (folder / ".latest-old").write_text("step-00000006\n")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [step_folder(3)]
    remove_leftovers(tmp_path / "no run")
