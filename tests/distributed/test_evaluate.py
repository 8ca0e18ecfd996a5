"""Tests that `parallel3d eval` gives the log-likelihoods of transformers on the same model, under
any layout."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.checkpoint.manifest import list_checkpoints
from parallel3d.checkpoint.storage import read_full
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.checkpoint.command import checkpoint
from parallel3d.commands.evaluate.command import Request, score_requests
from parallel3d.commands.evaluate.rows import Likelihood
from parallel3d.commands.from_run import EVAL, of_run
from parallel3d.commands.generate import load_newest
from parallel3d.commands.options import CommandConfig
from parallel3d.models.decoding import blank_stage
from parallel3d.resolve import blueprint_of
from parallel3d.run.directory import load_config
from tests.distributed.pool import Pool
from tests.huggingface import GROUPED, save_model
from tests.reference.model import ReferenceModel

pytestmark = pytest.mark.nightly

LAYOUTS = ((1, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 1, 2))
TOKENS = 300
KINDS = {
    "llama": {"hidden_size": 24, "max_position_embeddings": 24, **GROUPED},
    "gpt2": {"n_embd": 24, "n_positions": 24},
    "mistral": {
        **{"hidden_size": 24, "max_position_embeddings": 24, "sliding_window": 7},
        **GROUPED,
    },
}


def requests(seed: int) -> list[Request]:
    """Returns rows of three choices, of all lengths up to the window of 24, the longest first."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda least, most: int(torch.randint(least, most + 1, (), generator=generator))  # noqa: E731
    found = []
    for row in range(7):
        for choice in range(3):
            length = 25 if row == 3 else draw(3, 25)
            tokens = torch.randint(0, TOKENS, (length,), generator=generator).tolist()
            found.append(Request(row, choice, tokens, draw(1, length - 1)))
    return sorted(found, key=lambda r: -len(r.tokens))


def scored(
    layouts: list[tuple[int, ...]], runs: str, batch_tokens: int
) -> list[dict[tuple[int, int], Likelihood]]:
    found = []
    for sizes in layouts:
        layout = Layout(*sizes)
        groups = ProcessGroups.create(layout, "cpu", timeout_s=300)
        dims = {dim: layout.size(dim) for dim in ("tp", "pp", "dp", "cp")}
        typed = CommandConfig(runs_dir=runs, run="mine", **dims)
        typed.eval.batch_tokens = batch_tokens
        config = of_run(EVAL, typed)
        stage = blank_stage(blueprint_of(config), groups, torch.device("cpu"))
        load_newest(Path(runs, "mine"), config.eval, stage, groups)
        found.append(
            score_requests(requests(4), stage, groups, batch_tokens, config.model.hidden_size)
        )
        groups.close()
    return found


def judged(logits: torch.Tensor, request: Request) -> Likelihood:
    """Returns the likelihood of a request from its logits (s, vocabulary)."""
    labels = torch.tensor(request.tokens[request.first :])
    scored = logits[request.first - 1 :]
    found = scored.log_softmax(-1).gather(1, labels[:, None]).sum()
    return Likelihood(float(found), len(labels), bool((scored.argmax(-1) == labels).all()))


def by_transformers(model: torch.nn.Module, request: Request) -> Likelihood:
    with torch.no_grad():
        logits = model(torch.tensor([request.tokens[:-1]])).logits[0].float()
    return judged(logits, request)


def by_the_reference(run: Path, request: Request) -> Likelihood:
    weights = read_full(list_checkpoints(run)[0])
    model = ReferenceModel(load_config(run).model).double()
    model.load_state_dict({name.partition("/")[2]: values for name, values in weights.items()})
    with torch.no_grad():
        return judged(model(torch.tensor([request.tokens[:-1]]))[0], request)


@pytest.mark.parametrize(
    ("kind", "precision"), [("llama", "fp64"), ("gpt2", "fp32"), ("mistral", "fp64")]
)
def test_likelihoods_equal_those_of_another_program(
    kind: str, precision: str, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares with transformers, which computes norms in fp32, and in fp64 with the tests'
    reference."""
    monkeypatch.chdir(tmp_path)
    model = save_model(tmp_path / "hf", kind, vocab_size=TOKENS, **KINDS[kind]).eval()
    words = ["from=hf", "run=mine", "prove=false", f"precision={precision}"]
    assert checkpoint(["import", *words]) == 0
    run, asked = tmp_path / "runs/mine", requests(4)
    expected = [({(r.row, r.choice): by_transformers(model, r) for r in asked}, 1e-5)]
    if precision == "fp64":
        expected.append(({(r.row, r.choice): by_the_reference(run, r) for r in asked}, 1e-11))
    for world in (1, 2, 4):
        layouts = [sizes for sizes in LAYOUTS if math.prod(sizes) == world]
        for rank in pool.run(world, scored, layouts, str(tmp_path / "runs"), 60):
            for sizes, found in zip(layouts, rank, strict=True):
                for wanted, within in expected:
                    assert found.keys() == wanted.keys(), sizes
                    for key, one in found.items():
                        near = pytest.approx(wanted[key].total, abs=within * one.tokens)
                        assert one.total == near, (sizes, key)
                        assert one[1:] == wanted[key][1:], (sizes, key)
