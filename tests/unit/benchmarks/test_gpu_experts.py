"""Tests benchmarks/gpu/experts.py: its lines at a tiny size, and how their results are judged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import commands as gpu_commands
from benchmarks.gpu import experts as gpu_experts
from benchmarks.gpu import experts_beside as beside
from benchmarks.gpu import mixtures
from benchmarks.gpu import tasks as gpu_tasks
from benchmarks.gpu.experts_beside import OURS, in_turns, side_by_side
from benchmarks.gpu.mixtures import MIXTURES
from benchmarks.gpu.process import ROOT
from benchmarks.gpu.tasks import Given, Row
from benchmarks.peers.mixtures import Missing
from parallel3d.blueprint.parameters import parameter_count
from tests.e2e.ready import run_command, run_module

pytestmark = pytest.mark.more

NAMES = list(gpu_experts.LINES)
BY_COMMAND = [name for name, line in gpu_experts.LINES.items() if line.by_command]


def given(folder: Path, size: str = "tiny") -> Given:
    return Given(torch.device("cpu"), size, folder, {})


def rows(folder: Path) -> dict[str, Row]:
    return json.loads((folder / "gpu.json").read_text())["sections"][0]["rows"]


@pytest.mark.slow
def test_every_line_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_commands, "parallel3d", run_command)
    words = ["--size", "tiny", "--device", "cpu", "--in-process", "--only", *NAMES]
    words += ["--json", str(tmp_path / "gpu.json"), "--folder", str(tmp_path / "runs")]
    assert gpu_experts.main(words) == 0
    found = rows(tmp_path)
    assert list(found) == NAMES
    for name in MIXTURES:
        assert found[name]["verdict"] == "PASS" and found[name]["load"] > 1.0
        assert "seconds_off" in found[f"{name} dryrun"]
        assert found[f"{name} host syncs"]["skipped"] == "cpu cannot count them"
        assert found[f"{name} balanced"]["trainers"].keys() == {OURS, "balanced"}
        row = found[f"{name} side by side"]
        if find_spec("transformers") is not None:
            assert row["verdict"] == "PASS", row
            ours, theirs = (
                row["trainers"][trainer]["losses"] for trainer in (OURS, "transformers")
            )
            assert theirs == pytest.approx(ours, rel=5e-3)
    if find_spec("transformers") is not None:
        assert "| olmoe side by side | 1 | transformers |" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_every_line_on_the_simulated_device(tmp_path: Path) -> None:
    """Runs in a process of its own, because it changes torch."""
    words = ["--size", "tiny", "--device", "simulated", "--in-process", "--only", *NAMES]
    words += ["--json", str(tmp_path / "gpu.json"), "--folder", str(tmp_path / "runs")]
    done = run_module("benchmarks.gpu.experts", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(tmp_path)
    for name in MIXTURES:
        assert found[f"{name} host syncs"]["syncs"] == 1
        assert "skipped" in found[f"{name} side by side"]
        assert found[name]["verdict"] == "PASS" and "peak_bytes_off" in found[f"{name} dryrun"]


@pytest.mark.parametrize("name", BY_COMMAND)
def test_the_configurations_of_full_size_are_valid(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from parallel3d.cli.overrides import compose
    from parallel3d.commands.options import CommandConfig

    seen: list[Any] = []

    def run(*words: str) -> None:
        seen.append(compose(*words[1:], world_size=1, schema=CommandConfig))
        raise gpu_commands.RunFailed

    monkeypatch.setattr(gpu_commands, "run", run)
    monkeypatch.setattr(mixtures, "command_line_missing", lambda: None)
    with pytest.raises(gpu_commands.RunFailed):
        gpu_experts.LINES[name].run(given(tmp_path, "full"))
    (config,) = seen
    mixture = MIXTURES[name.removesuffix(" dryrun")]
    model = mixture.model(given(tmp_path, "full"))
    for key in ("num_layers", "num_experts", "experts_per_token", "expert_size", "seq_length"):
        assert getattr(config.model, key) == getattr(model, key), key
    assert parameter_count(config.model) == parameter_count(model)
    assert (config.micro_batch_size, config.global_batch_size) == mixture.batch(
        given(tmp_path, "full")
    )
    assert config.precision.name == "bf16" and config.moe.routing == "model"


@pytest.mark.parametrize(("name", "billions"), [("olmoe", 2.72), ("qwen3 shard", 1.75)])
def test_the_models_fit_a_card_of_80_gb(name: str, billions: float, tmp_path: Path) -> None:
    model = MIXTURES[name].model(given(tmp_path, "full"))
    assert parameter_count(model) / 1e9 == pytest.approx(billions, rel=0.01)
    assert 18 * parameter_count(model) < 50e9


class Card:
    """A device that is timed: `times` are the seconds of a step of each trainer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
        self.losses: dict[str, tuple[float, ...]] = dict.fromkeys(times, (5.0, 4.0, 3.0))
        made: list[str] = []

        def maker(name: str) -> Any:
            def make(*_: Any) -> Any:
                made.append(name)
                values: Iterator[float] = iter(self.losses[name])
                return lambda: next(values)

            return make

        class Trainer:
            def full_parameters(self) -> dict[str, Any]:
                return {"a": None}

            def __init__(self, *_: Any) -> None:
                self.step = maker(OURS)()

            def train_step(self) -> Any:
                return type("Result", (), {"loss": self.step()})

        monkeypatch.setattr(beside, "trainer_of", Trainer)
        monkeypatch.setattr(beside, "_titan", maker("torchtitan"))
        monkeypatch.setattr(beside, "_transformers", maker("transformers"))
        monkeypatch.setattr(beside, "seconds_of", lambda *_: times[made[-1]])
        monkeypatch.setattr(Given, "is_timed", property(lambda given: True))


@pytest.mark.parametrize(
    ("titan", "transformers", "verdict"),
    [(1.21, 1.51, "PASS"), (1.19, 1.51, "DIFFERS"), (1.21, 1.49, "DIFFERS")],
)
def test_peers_must_take_longer(
    titan: float, transformers: float, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Card(monkeypatch, {OURS: 1.0, "torchtitan": titan, "transformers": transformers})
    row = side_by_side(given(tmp_path), "olmoe")
    assert row["verdict"] == verdict
    assert row["trainers"]["torchtitan"]["rounds"] == [titan] * beside.ROUNDS


@pytest.mark.parametrize("losses", [(5.2, 4.0, 3.0), (5.0, 5.0, 5.0), (float("nan"), 4.0, 3.0)])
def test_peers_must_begin_with_our_loss_and_learn(
    losses: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch, {OURS: 1.0, "torchtitan": 2.0, "transformers": 2.0})
    card.losses["torchtitan"] = losses
    assert side_by_side(given(tmp_path), "olmoe")["verdict"] == "DIFFERS"


def test_a_trainer_out_of_memory_gets_smaller_micro_batches_and_a_missing_one_is_named(
    tmp_path: Path,
) -> None:
    tried: list[int] = []

    def large(micro_batch: int) -> Any:
        tried.append(micro_batch)
        if micro_batch > 1:
            raise torch.OutOfMemoryError
        return lambda: 1.0

    def missing(micro_batch: int) -> Any:
        raise Missing("not here")

    makers = {OURS: lambda micro_batch: lambda: 1.0, "large": large, "missing": missing}
    mixture = mixtures.Mixture("olmoe_1b_7b", 4, 8, 0.4)
    card = given(tmp_path, "full")
    found, absent = in_turns(makers, card, mixture)
    assert tried == [4, 2, 1, 1] and absent == {"missing": "not here"}
    assert (found["large"]["micro_batch"], found[OURS]["micro_batch"]) == (1, 4)


@pytest.mark.parametrize("kind", ["all alike", "half without rows", "all of one expert"])
def test_rows_of_experts_add_up(kind: str) -> None:
    counts = mixtures.counts_of(kind, mixtures.FULL)
    assert sum(counts) == mixtures.FULL.rows and len(counts) == mixtures.FULL.experts
    assert counts.count(0) == {"all alike": 0, "half without rows": 32}.get(kind, 63)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("grouped_matmul", lambda out, sound, args: 1.02 * sound(*args), "rows"),
        ("add_products", lambda out, sound, args: (sound(*args), args[0].mul_(1.001)), "weight"),
        ("add_products", lambda out, sound, args: (sound(*args), args[0][1].add_(1e-6)), "without"),
    ],
)
def test_a_wrong_product_is_named(
    name: str, change: Any, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = torch.ops.parallel3d
    sound = {n: getattr(operators, n) for n in ("grouped_matmul", "add_products", "wide_linear")}

    class Wrong:
        def __getattr__(self, asked: str) -> Any:
            if asked != name:
                return sound[asked]
            return lambda *args: change(None, sound[name], args)

    monkeypatch.setattr(torch.ops, "parallel3d", Wrong(), raising=False)
    row = mixtures.products(given(tmp_path))
    assert row["verdict"] == "DIFFERS" and named in row["found"], row["found"]


def test_the_calls_fit_a_quarter_of_an_hour_and_are_on_the_page() -> None:
    bench, page = gpu_experts.BENCH, (ROOT / "benchmarks/gpu/README.md").read_text(encoding="utf-8")
    assert "|---|---|---|---|\n" + "\n".join(bench.page_rows()) + "\n\n" in page
    seconds = [gpu_tasks.call_seconds(names, bench.tasks) for names in bench.calls]
    assert max(seconds) <= gpu_tasks.CALL_S and sum(seconds) <= 900
    assert [name for names in bench.calls for name in names] == NAMES
