"""Tests the commands on a run's checkpoints: they are listed, verified, compared, exchanged, and
generate text."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from parallel3d.checkpoint.init_from import begun_from
from parallel3d.checkpoint.storage import read_full
from parallel3d.commands.checkpoint import new_runs
from parallel3d.commands.checkpoint.command import checkpoint
from parallel3d.commands.checkpoint.compare import KINDS
from parallel3d.errors import UserError
from parallel3d.run_config import Config
from tests.e2e.command import PARALLEL3D, TINY, Ended, Shell
from tests.e2e.forked import run_forked
from tests.e2e.here import answer
from tests.e2e.watched import Watched

pytestmark = pytest.mark.nightly

LLAMA = ("model=llama_tiny", *TINY, "model.num_query_groups=2", "model.ffn_hidden_size=48")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Trains a run `mine` of a small Llama, on two ranks, with checkpoints of steps 10 and 20."""
    shell = Shell(tmp_path_factory.mktemp("trained"), tmp_path_factory.mktemp("scratch"))
    words = ("tp=2", "train.steps=20", "checkpoint.every=10", "optim.lr=0.01")
    words += ("optim.ema_decay=0.9",)
    words = ("run=mine", *LLAMA, *words, *shell.text(), "checkpoint.async=false")
    ended = run_forked(shell, "train", *words, ranks=2)
    assert ended.code == 0, ended
    yield shell
    shell.end_all()


@pytest.fixture
def runs(trained: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies the trained runs into the current directory, where tests damage them."""
    shutil.copytree(trained.cwd / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@contextmanager
def at_once(
    shell: Shell, *words: str, **environ: str
) -> Iterator[tuple[Callable[[], Ended], Watched]]:
    """Starts a command next to others of `shell`, in its own processes; returns a function that
    awaits it."""
    other = Shell(shell.cwd, shell.scratch, environ)
    started = time.monotonic()
    with Watched(other) as watched:
        process = other.start(*PARALLEL3D, *words)
        try:
            yield lambda: other.finish(process, started), watched
        finally:
            other.end_all()


def newest(runs: Path) -> Path:
    return runs / "mine" / "checkpoints" / "step-00000020"


def flip_a_bit(folder: Path) -> None:
    """Damages the first tensor of a file, which is a parameter."""
    file = max(folder.glob("rank-*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[8 + int.from_bytes(content[:8], "little") + 5] ^= 1
    file.write_bytes(content)


def test_ls_shows_steps_layout_loss_and_damage(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoint(["ls", "run=mine"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    steps = [json.loads(s) for s in (runs / "mine/metrics.jsonl").read_text().splitlines()]
    loss = {s["step"]: f"{s['loss']:.4f}" for s in steps if "loss" in s}
    assert cells[0] == ["run", "step", "age", "size", "layout", "loss", "state"]
    for row, step, state in ((cells[1], 20, "whole, newest"), (cells[2], 10, "whole")):
        assert (row[0], row[1], row[5]) == ("mine", str(step), loss[step])
        assert row[4] == "tp=2 pp=1 dp=1"
        assert row[6] == state

    file = next(newest(runs).glob("rank-*"))
    file.write_bytes(file.read_bytes()[:-1])
    next((runs / "mine/checkpoints/step-00000010").glob("manifest-*")).unlink()
    assert checkpoint(["ls"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "damaged: " in out[1]
    assert file.name in out[1]
    assert "damaged: " in out[2]
    assert "manifest" in out[2]


def test_verify_reads_every_byte(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint(["verify", "run=mine"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in out] == ["step-00000020  whole", "step-00000010  whole"]
    flip_a_bit(newest(runs))
    assert checkpoint(["ls"]) == 0  # a quick check: sizes are right
    assert "damaged" not in capsys.readouterr().out
    assert checkpoint(["verify", "run=mine"]) == 1
    assert "step-00000020  damaged: " in capsys.readouterr().out
    assert checkpoint(["verify", "run=mine", "step=10"]) == 0


def test_a_new_run_does_not_take_the_name_of_its_source(runs: Path) -> None:
    with pytest.raises(UserError, match="run=mine is the run itself"):
        checkpoint(["branch", "mine@10", "run=mine"])
    with pytest.raises(UserError, match="to=mine is the run itself"):
        checkpoint(["average", "run=mine", "last=2", "to=mine"])


def test_diff_names_what_differs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(runs / "mine", runs / "twin")
    assert checkpoint(["diff", "mine", "twin@20"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "equal"
    assert checkpoint(["diff", "mine@10", "mine@20"]) == 1
    out = capsys.readouterr().out
    for kind in ("parameter", "ema"):
        assert f"{kind}: 21 tensors in both, 0 of them equal" in out
    assert "progress: steps is 10 in a, 20 in b" in out
    folders = [runs / "mine/checkpoints" / f"step-{step:08d}" for step in (10, 20)]
    a, b = (read_full(folder)["parameter/head.weight"] for folder in folders)
    row = next(line.split() for line in out.splitlines() if line.startswith("parameter/head.wei"))
    assert row[1] == f"{float((a - b).abs().max()):.3g}"
    assert row[2] == f"{float((a - b).abs().max() / max(a.abs().max(), b.abs().max())):.3g}"
    flip_a_bit(newest(runs))
    with pytest.raises(UserError, match="run=mine step=20 is damaged"):
        checkpoint(["diff", "mine", "twin"])


def test_export_and_import_give_the_same_weights(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoint(["export", "run=mine", "to=hf", "step=10"]) == 0
    said = capsys.readouterr().err
    assert "step 10 of mine" in said
    assert "its tokens are bytes" in said
    assert checkpoint(["import", "from=hf", "run=back", "model.seq_length=16", "optim=sgd"]) == 0
    assert capsys.readouterr().out == "parallel3d train run=back\n"
    before = read_full(runs / "mine/checkpoints/step-00000010")
    after = read_full(runs / "back/checkpoints/step-00000000")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert checkpoint(["verify", "run=back"]) == 0

    with pytest.raises(UserError, match="run=back exists"):
        checkpoint(["import", "from=hf", "run=back"])
    with pytest.raises(UserError, match=r"model\.hidden_size=64: hf gives model\.hidden_size=32"):
        checkpoint(["import", "from=hf", "run=other", "model.hidden_size=64"])
    with pytest.raises(UserError, match=r"no checkpoint at step=11; the nearest is step=10"):
        checkpoint(["export", "run=mine", "to=more", "step=11"])
    flip_a_bit(newest(runs))
    with pytest.raises(UserError, match="step=20 is damaged"):
        checkpoint(["export", "run=mine", "to=more"])
    assert sorted(p.name for p in runs.iterdir()) == ["back", "mine"]
    assert sorted(p.name for p in runs.parent.iterdir()) == ["hf", "runs"]


def test_average_is_the_mean_of_the_last_weights(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in (runs / "mine").rglob("*") if path.is_file()}
    assert checkpoint(["average", "run=mine", "last=2"]) == 0
    assert "of run=mine at steps 10, 20" in capsys.readouterr().err
    assert checkpoint(["average", "run=mine", "steps=[20]", "to=one"]) == 0
    folders = [runs / "mine/checkpoints" / f"step-{step:08d}" for step in (10, 20)]
    a, b = (read_full(folder) for folder in folders)
    mean = read_full(runs / "mine-average/checkpoints/step-00000000", KINDS)
    one = read_full(runs / "one/checkpoints/step-00000000")
    assert a.keys() == one.keys() == mean.keys()  # only weights
    for name, early in a.items():
        exact = (early.double() + b[name].double()) / 2
        assert torch.equal(mean[name], exact.float())
        assert torch.equal(one[name], b[name])
    with patch.object(new_runs, "_chosen", lambda *_: [folders[0], folders[1], folders[1]]):
        assert checkpoint(["average", "run=mine", "last=2", "to=twice"]) == 0  # a planted bug
    twice = read_full(runs / "twice/checkpoints/step-00000000")
    assert not any(torch.equal(twice[name], mean[name]) for name in twice)
    assert checkpoint(["verify", "run=mine-average"]) == 0
    assert checkpoint(["export", "run=mine-average", "to=hf"]) == 0
    config = Config(init_from="mine-average", init_optimizer=True)
    with pytest.raises(UserError, match="step 0 of run mine-average has no optimizer state"):
        begun_from(config, lambda key: False)
    assert before == {path: path.read_bytes() for path in before}
    for words, sentence in {
        "last=3": "last=3 must be at most 2, .* the nearest is last=2",
        "last=2 steps=[10]": "either last=… or steps=…",
        "steps=[10,15]": "no checkpoint at step=15; the nearest is",
        "last=2 to=one": "run=one exists",
        "last=2 to=a/b": "run=a/b",
    }.items():
        with pytest.raises(UserError, match=sentence):
            checkpoint(["average", "run=mine", *words.split()])
    flip_a_bit(newest(runs))
    with pytest.raises(UserError, match="run=mine step=20 is damaged"):
        checkpoint(["average", "run=mine", "last=2", "to=more"])
    assert sorted(p.name for p in runs.iterdir()) == ["mine", "mine-average", "one", "twice"]


def test_an_imported_run_trains_under_another_layout(
    trained: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that import prints works unchanged; its first loss is the exported model's."""
    monkeypatch.chdir(trained.cwd)
    assert checkpoint(["export", "run=mine", "to=hf"]) == 0
    sizes = [word for word in TINY if not word.startswith(("model.", "train."))]
    words = (*trained.text(), *sizes, "optim.lr=1e-9", "train.steps=2", "train.eval_every=0")
    assert checkpoint(["import", "from=hf", "run=on", *words, "train.eval_batches=0"]) == 0
    command = capsys.readouterr().out.split()
    assert command[:2] == ["parallel3d", "train"]
    evaluated = run_forked(
        trained, "train", "run=on", "train.eval_only=true", "train.eval_batches=1"
    )
    assert evaluated.code == 0 and "eval 0/2" in evaluated.err + evaluated.out, evaluated
    ended = run_forked(trained, *command[1:])  # one process, while mine had tp=2
    assert ended.code == 0, ended
    assert "resumes at step 1" in ended.err + ended.out

    def losses(run: str) -> dict[int, float]:
        lines = (trained.cwd / "runs" / run / "metrics.jsonl").read_text().splitlines()
        return {s["step"]: s["loss"] for s in map(json.loads, lines) if "loss" in s}

    # Twenty steps reduced the loss far below its start; the imported model begins at its end.
    mine, on = losses("mine"), losses("on")
    assert mine[20] < mine[1] - 1
    assert on[1] == pytest.approx(mine[20], abs=0.5)


def test_a_byte_tokenizer_is_exported_for_transformers(
    trained: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers reads the byte tokenizer as we do and continues in the same way; a second import
    has bytes again.

    The exported average of the weights gives another text than the weights.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(trained.cwd)
    assert checkpoint(["export", "run=mine", "to=bytes", "weights=ema"]) == 0
    assert "the average of mine's weights" in capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained("bytes")
    every = bytes(range(256)).decode("latin-1")
    for text in ("12 böt\n\n  tles 漢 😀\r\n", every, f"{every} {every}"):
        assert tokenizer(text)["input_ids"] == [256, *text.encode()]
        assert tokenizer.decode(list(text.encode()), skip_special_tokens=True) == text
    words = ("run=mine", "prompt=12 bot", "generate.max_tokens=20", "generate.temperature=0")
    ours = run_forked(trained, "generate", *words, "device=cpu", "generate.weights=ema")
    assert ours.errors == ["parallel3d: run=mine, step 20, weights=ema, seed=1234"]
    model = AutoModelForCausalLM.from_pretrained("bytes")
    prompt = tokenizer("12 bot", return_tensors="pt")
    made = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(made[0], skip_special_tokens=True) == ours.out.removesuffix("\n")
    assert checkpoint(["import", "from=bytes", "run=bytes"]) == 0
    assert "the run's tokens are bytes" in capsys.readouterr().err
    assert not (trained.cwd / "runs" / "bytes" / "tokenizer").exists()
    shutil.rmtree(trained.cwd / "runs" / "bytes")
    shutil.rmtree("bytes")


def test_generate_writes_the_same_text_under_every_layout(trained: Shell) -> None:
    words = ("run=mine", "prompt=12 bot", "generate.max_tokens=30", "device=cpu")
    before = trained.snapshot()
    # Variables of a machine with several hosts do not apply to ranks of one.
    elsewhere = {"GLOO_SOCKET_IFNAME": "eth0"}
    with at_once(trained, "generate", *words, "tp=2", "pp=2", **elsewhere) as (other, watched):
        one = run_forked(trained, "generate", *words)
        four = other()
    assert one.code == 0, one
    assert one.out.startswith("12 bot")
    assert len(one.out.encode()) > 20
    assert one.errors == ["parallel3d: run=mine, step 20, seed=1234"]
    assert (four.code, four.out) == (0, one.out), four
    assert watched.seen and watched.elsewhere == []  # all listeners are on the loopback
    assert trained.snapshot() == before  # looking at a run leaves nothing in it
    assert list(trained.scratch.iterdir()) == []


def test_experts_divided_over_ranks_generate_the_same_text(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    shell = Shell(tmp_path_factory.mktemp("experts"), tmp_path_factory.mktemp("scratch"))
    model = ("model=moe_tiny", "model.num_layers=2", "model.seq_length=64", "device=cpu")
    train = ("train.steps=6", "checkpoint.every=6", "global_batch_size=8", "checkpoint.async=false")
    ended = run_forked(shell, "train", "run=moe", *model, *train)
    assert ended.code == 0, ended
    words = ("run=moe", "prompt=12 bot", "generate.max_tokens=20", "device=cpu")
    one = run_forked(shell, "generate", *words)
    for layout in (("tp=2",), ("tp=2", "ep=1"), ("pp=2",)):
        with at_once(shell, "generate", *words, *layout) as (other, _):
            two = other()
        assert (two.code, two.out) == (0, one.out), two
    with at_once(shell, "generate", *words, "tp=2", "ep=3") as (other, _):
        refused = other()
    assert refused.code == 2 and "ep=3" in refused.errors[-1], refused
    shell.end_all()


def test_generate_skips_a_damaged_checkpoint(trained: Shell, runs: Path) -> None:
    flip_a_bit(newest(runs))
    words = ("run=mine", f"runs_dir={runs}", "generate.max_tokens=3", "device=cpu")
    with at_once(trained, "generate", *words, "generate.step=20") as (other, _):
        ended = run_forked(trained, "generate", *words)
        refused = other()
    assert ended.code == 0, ended
    assert "step-00000020" in ended.errors[0]
    assert ended.errors[-1] == "parallel3d: run=mine, step 10, seed=1234"
    assert refused.code == 2
    assert "no intact checkpoint" in refused.errors[-1]


def test_generate_refuses_invalid_arguments(
    trained: Shell, runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        ended = answer(trained, capfd, "generate", "device=cpu", f"runs_dir={runs}", *words)
        assert (ended.code, ended.out, len(ended.errors)) == (2, "", 1), ended
        return ended.errors[0]

    assert "nearest is run=mine" in refused("run=mime")
    shutil.rmtree(runs / "mine" / "checkpoints")
    assert "no checkpoint" in refused("run=mine")
