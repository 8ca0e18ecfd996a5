"""Tests checkpoints and Hugging Face folders written by an attacker: one sentence, soon, with
bounded memory.

These checkpoints verify: their digests match. Their content is nonsense, or too large.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parallel3d.checkpoint import storage
from parallel3d.checkpoint.hf.config import from_hf
from parallel3d.checkpoint.hf.folder import export_hf, read_hf_config, tensors_of
from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    DamagedCheckpoint,
    FileDigest,
    list_checkpoints,
    read_manifest,
)
from parallel3d.commands.checkpoint.command import checkpoint
from parallel3d.errors import UserError
from parallel3d.files import parse_json, plain
from parallel3d.models.keys import ModelConfig
from tests.pace import in_cpu_time
from tests.unit.checkpoint.test_files import load, make

LIMIT_S = 5.0  # limit of CPU seconds
# limit of memory for one refusal; parsing 200,000 nested lists alone takes tens of MB
LIMIT_MB = 400
DEEP = 200_000
NESTED = "[" * DEEP + "]" * DEEP


@pytest.fixture(autouse=True)
def bounds() -> Iterator[None]:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert in_cpu_time(time.process_time() - start, LIMIT_S)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < LIMIT_MB << 10, f"{grown >> 10} MB"


def replant(folder: Path, change: Callable[[dict], Any]) -> None:
    """Rewrites a checkpoint's manifest with changes, under the name of its digest."""
    (path,) = folder.glob("manifest-*")
    content = json.loads(path.read_text())
    path.unlink()
    content = change(content) or content
    text = (content if isinstance(content, str) else json.dumps(content)).encode()
    (folder / f"manifest-{hashlib.sha256(text).hexdigest()}.json").write_bytes(text)


def put(*keys: str, value: object) -> Callable[[dict], None]:
    def change(content: dict) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def take(*keys: str) -> Callable[[dict], None]:
    def change(content: dict) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


MANIFESTS: dict[str, Callable[[dict], Any]] = {
    "nested": lambda _: NESTED,
    "nested in a value": lambda c: json.dumps(c)[:-1] + f', "config": {NESTED}}}',
    "a list": lambda _: "[]",
    "null": lambda _: "null",
    "torn": lambda c: json.dumps(c)[:100],
    "not UTF-8": lambda _: "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
    "of a later version": put("version", value=2),
    "no step": take("step"),
    "step of another kind": put("step", value="3"),
    "no progress": take("progress"),
    "progress without samples": take("progress", "consumed_samples"),
    "progress without a scale": take("progress", "loss_scale"),
    "progress is a list": put("progress", value=[1]),
    "progress in words": put("progress", "updates", value="3"),
    "progress not finite": put("progress", "loss_scale", value=float("nan")),
    "progress backwards": put("progress", "consumed_samples", value=-1),
    "thaws of the future": put("progress", "thaws", value=[[99, ["layers.*"]]]),
    "thaws of numbers": put("progress", "thaws", value=[[1, [2]]]),
    "thaws in words": put("progress", "thaws", value="ab"),
    "progress of another step": put("progress", "steps", value=4),
    "progress beyond integers": put("progress", "consumed_samples", value=10**30),
    "config is a list": put("config", value=[]),
    "config.model null": put("config", "model", value=None),
    "data without tokens": put("data", value={"fingerprint": "f"}),
    "data in numbers": put("data", value={"fingerprint": 1, "train_tokens": 1}),
    "data with marks in a list": put("data", "files", value=[]),
    "files null": put("files", value=None),
    "a file's name a number": lambda c: c["files"][0].update(name=7),
    "a file's size in words": lambda c: c["files"][0].update(size="1"),
    "a file's digest null": lambda c: c["files"][0].update(header=None),
    "a file with \x1b[31mmore": lambda c: c["files"][0].update({"\x1b[31mred": 1}),
    "a key more": put("\x1b[31mred", value=1),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_nonsensical_manifest_with_a_valid_digest_is_refused(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path, 3)
    replant(folder, MANIFESTS[name])
    with pytest.raises(DamagedCheckpoint) as refused:
        load(folder)
    sentence = str(refused.value)
    assert sentence.isprintable() and len(sentence) < 500, sentence


def test_manifest_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    (path,) = folder.glob("manifest-*")
    os.truncate(path, 1 << 30)
    with pytest.raises(DamagedCheckpoint, match="more than"):
        read_manifest(folder)


def plant(folder: Path, change: Callable[[dict, dict], Any]) -> None:
    """Changes the header of rank 0's file (the chunks and their descriptions), with matching
    digests."""
    path = folder / "rank-00000.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    ours = json.loads(header["__metadata__"]["parallel3d"])
    text = change(header, ours)
    if text is None:
        header["__metadata__"]["parallel3d"] = json.dumps(ours)
        text = json.dumps(header)
    new = len(text.encode()).to_bytes(8, "little") + text.encode()
    path.write_bytes(new + content[start:])
    digest = FileDigest(path.name, path.stat().st_size, hashlib.sha256(new).hexdigest())

    def listed(manifest: dict) -> None:
        manifest["files"][0] = dataclasses.asdict(digest)

    replant(folder, listed)


def huge(header: dict, ours: dict) -> None:
    ours["full_shapes"]["parameter/v"] = [10**13]


def endless(header: dict, ours: dict) -> None:
    ours["full_shapes"]["parameter/w"] = [10**30, 7]


def empty(header: dict, ours: dict) -> None:
    name = "parameter/none"
    header[f"{name}/0"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header |= {k: header.pop(k) for k in [k for k in header if k not in (f"{name}/0",)]}
    ours["full_shapes"][name] = [0]
    ours["sha256"][f"{name}/0"] = hashlib.sha256(b"").hexdigest()


def infinite(header: dict, ours: dict) -> str:
    return json.dumps(header).replace('"shape": [', '"shape": [1e999, ', 1)


HEADERS: dict[str, Callable[[dict, dict], Any]] = {
    "shape 10^13": huge,
    "shape 10^30": endless,
    "shape 0": empty,
    "shape infinite": infinite,
    "nested": lambda header, ours: NESTED,
    "a list": lambda header, ours: "[]",
    "no types": lambda header, ours: header["parameter/v/0"].update(dtype={}),
    "words of nothing": lambda header, ours: ours.clear(),
}


@pytest.mark.parametrize("name", HEADERS)
def test_impossible_tensors_with_valid_digests_are_refused(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path, 3)
    plant(folder, HEADERS[name])
    for look in (load, storage.read_full, storage.verify_checkpoint):
        with pytest.raises(DamagedCheckpoint) as refused:
            look(folder)
        assert str(refused.value).isprintable()


def test_export_refuses_a_nonsensical_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make(tmp_path / "runs" / "mine", 3)
    (tmp_path / "runs" / "mine" / "config.yaml").touch()
    whole = dataclasses.asdict(ModelConfig())
    for model in (
        {},
        {"num_layers": 10**9},
        whole | {"num_layers": 10**9},
        whole | {"num_layers": "\x1b[31m"},
        whole | {"hidden_size": -1},
        whole | {"norm": [NESTED[:10]]},
        whole | {"of no": "model"},
    ):
        replant(folder, put("config", value={"model": model, "precision": {"name": "fp32"}}))
        with pytest.raises(UserError) as refused:
            checkpoint(["export", "run=mine", "to=there"])
        assert str(refused.value).isprintable(), refused.value
    for config in ({}, {"model": whole}, {"model": whole, "precision": {}}):
        replant(folder, put("config", value=config))
        with pytest.raises(UserError, match="has no model that this version of parallel3d knows"):
            checkpoint(["export", "run=mine", "to=there"])


def test_branch_refuses_a_nonsensical_configuration(tmp_path: Path) -> None:
    folder = make(tmp_path / "mine", 3)
    (tmp_path / "mine" / "config.yaml").touch()
    for config in ({"seed": "${oc.env:HOME}"}, {"tp": "\x1b[31m"}, {"of no": "key"}):
        replant(folder, put("config", value=config))
        with pytest.raises(UserError, match="run=mine step=3 has a configuration that") as refused:
            checkpoint(["branch", "mine", "run=new", f"runs_dir={tmp_path}"])
        assert str(refused.value).isprintable() and "HOME" not in str(refused.value)
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    for path in list(folder.iterdir()):
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(DamagedCheckpoint, match=r"not a regular file|has 0 bytes"):
            load(folder)
        path.unlink()
        path.write_bytes(content)
    load(folder)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match="not a regular file"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"holds no model\.safetensors"):
        next(tensors_of(tmp_path, ModelConfig(), "gpt2"))
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(UserError, match="not a regular file"):
        next(tensors_of(tmp_path, ModelConfig(), "gpt2"))


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 61}


@pytest.mark.parametrize(
    "config",
    [
        NESTED,
        "[]",
        "7",
        json.dumps(GPT2 | {"n_layer": "\x1b[31m2"}),
        json.dumps(GPT2 | {"n_layer": -1}),
        json.dumps(GPT2 | {"n_embd": [32]}),
        json.dumps(GPT2 | {"n_embd": None, "n_inner": {"a": 1}}),
        json.dumps(GPT2 | {"layer_norm_epsilon": float("nan")}),
        json.dumps(GPT2 | {"initializer_range": 10**400}),
        json.dumps(GPT2 | {"tie_word_embeddings": "\x1b]0;"}),
        json.dumps(GPT2 | {"model_type": ["gpt2"]}),
        json.dumps(GPT2 | {"model_type": "\x1b[31m"}),
        json.dumps({"model_type": "llama", "num_attention_heads": 0}),
        json.dumps({"model_type": "llama", "rope_scaling": [1]}),
    ],
)
def test_a_nonsensical_hf_configuration_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError) as refused:
        read_hf_config(tmp_path)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 700


@pytest.mark.parametrize(
    "index", ["[]", '{"weight_map": []}', '{"weight_map": {"a": ["b"]}}', NESTED, "null"]
)
def test_invalid_hf_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"index\.json"):
        next(tensors_of(tmp_path, ModelConfig(), "gpt2"))


@pytest.mark.parametrize("layers", [10**12, 0, -1])
@pytest.mark.parametrize(
    "kind", ["llama", "qwen3_moe", "gemma3_text", "smollm3", "gpt2", "olmo_hybrid"]
)
def test_no_list_is_made_of_very_many_layers_or_of_none(kind: str, layers: int) -> None:
    key = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    with pytest.raises(UserError, match=f"has {key}={layers}, .*: it must be from 1 to 4096"):
        from_hf({"model_type": kind, key: layers})


def test_the_number_of_hf_layers_is_bounded_by_the_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | {"n_layer": 4096}))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    found = read_hf_config(tmp_path)
    with pytest.raises(UserError, match="4096 layers, but only 1 tensors exist"):
        next(tensors_of(tmp_path, dataclasses.replace(ModelConfig(), **found.keys), found.kind))


def test_export_touches_no_folder_of_the_users_and_flushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thesis = tmp_path / ".mine.partial" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=9)
    flushed, fsync = [], os.fsync

    def noted(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)

    def read(names: Any) -> dict[str, torch.Tensor]:
        from parallel3d.models.declared import full_shapes_of

        return {n: torch.zeros(full_shapes_of(model)[n]) for n in names}

    (tmp_path / "mine").mkdir()  # an empty folder may exist
    paths = export_hf(model, read, tmp_path / "mine", dtype="fp32", end_of_text=8)
    assert thesis.read_text() == "years of work"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine.partial", "mine"]
    names = [Path(path).name for path in flushed]
    assert {path.name for path in paths} <= set(names)
    made, parent = names[-2:]  # the folder before its rename, and its final place
    assert re.fullmatch(r"\.mine\.\w+\.partial", made) and parent == tmp_path.name
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(UserError, match=r"to=.*other cannot be written: full"):
        export_hf(model, read, tmp_path / "other", dtype="fp32", end_of_text=8)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine.partial", "mine"]


def test_text_of_a_manifest_is_escaped_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    red = "\x1b[31mred\x07"
    for number, change in enumerate(
        (put("config", "tp", value=red), put(red, value=1), put("versions", red, value=red))
    ):
        run_dir = tmp_path / f"run{number}{red}"
        folder = make(run_dir, 3)
        (run_dir / "config.yaml").touch()
        replant(folder, change)
    (folder / red).touch()
    shown = folder.with_name(f"damaged-{red}")
    make(tmp_path / "other", 3).rename(shown)
    assert checkpoint(["ls", f"runs_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 5 and "red" in out
    assert all(line.isprintable() for line in out.splitlines())
    assert checkpoint(["verify", f"runs_dir={tmp_path}", f"run={run_dir.name}"]) == 1
    assert capsys.readouterr().out.strip().isprintable()
    assert list_checkpoints(run_dir) == [run_dir / CHECKPOINTS / "step-00000003"]


def test_plain_json_and_its_maximum_depth() -> None:
    assert plain("a – ß\t\x1b") == "a – ß\\t\\x1b"
    assert len(plain("x" * 10**6)) == 401
    assert parse_json(b'{"a": [{"b": [1]}]}') == {"a": [{"b": [1]}]}
    for text in (b"[" * 51 + b"]" * 51, NESTED.encode(), b"\xff", b"[", b""):
        with pytest.raises(ValueError):
            parse_json(text)
