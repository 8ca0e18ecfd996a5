"""Compares mixtures of experts with transformers: logits, gradients, and tensors there and back."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network
import transformers

from parallel3d.checkpoint.hf.folder import export_hf, read_hf_config
from parallel3d.checkpoint.storage import read_full
from parallel3d.commands.checkpoint.command import checkpoint
from parallel3d.commands.from_run import GENERATE, config_from_run
from parallel3d.commands.options import CommandConfig
from parallel3d.errors import UserError
from parallel3d.experts.router import Router, RouterSettings, scores_of
from parallel3d.models.declared import states_of
from parallel3d.models.transformer import Stage
from tests.huggingface import EXPERTS, compare_gradients, filled, logits_of, read, save_model

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 32, "max_position_embeddings": 24, "bos_token_id": 60, "eos_token_id": 60}
WITH_BIAS = ("dots1", "glm4_moe", "minimax_m2")


def gap(values: Tensor, chosen: int) -> float:
    """Returns the smallest distance of the last chosen value to the best of the others."""
    best = values.sort(-1, descending=True).values
    return float((best[..., chosen - 1] - best[..., chosen]).min())


def watch_margins(stage: Stage) -> list[float]:
    """Returns a list that gets the margin of each router's choices in a forward."""
    margins: list[float] = []

    def hook(router: Router, given: tuple[Any, ...]) -> None:
        settings: RouterSettings = router.settings
        bias = None if router.logit_bias is None else router.logit_bias.detach()
        logits = F.linear(given[0].detach(), router.weight.detach(), bias)
        values = scores_of(logits.flatten(0, -2), settings)
        values = values if router.bias is None else values + router.bias
        if settings.top_groups < settings.groups:
            grouped = values.unflatten(-1, (settings.groups, -1))
            best = grouped.topk(2, -1).values.sum(-1)
            margins.append(gap(best, settings.top_groups))
            kept = best.topk(settings.top_groups, -1).indices
            values = grouped.gather(1, kept.unsqueeze(-1).expand(-1, -1, grouped.shape[-1]))
            values = values.flatten(1)
        margins.append(gap(values, settings.chosen))

    for module in stage.modules():
        if isinstance(module, Router):
            module.register_forward_pre_hook(hook)
    return margins


def some_tokens() -> Tensor:
    return torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", EXPERTS)
def test_logits_and_gradients_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = save_model(tmp_path / "hf", kind, **SIZES | EXPERTS[kind])
    model, weights = read(tmp_path / "hf")
    stage, tokens = filled(model, weights), some_tokens()
    margins = watch_margins(stage)

    ours = logits_of(stage, model, tokens)
    out = theirs.train()(tokens, labels=tokens, output_router_logits=False)
    assert len(margins) >= len(model.expert_layers) > 0
    assert min(margins) > 1e-5
    assert out.logits.std() > 0.3
    largest = float(out.logits.detach().abs().max())
    torch.testing.assert_close(ours, out.logits, rtol=0, atol=1e-5 * largest)

    loss = F.cross_entropy(ours[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, out.loss, rtol=1e-5, atol=0)
    loss.backward()
    out.loss.backward()
    compared = compare_gradients(stage, theirs, tmp_path / "gradients")
    assert compared == weights.keys() - states_of(model)


@pytest.mark.parametrize("kind", EXPERTS)
def test_an_imported_and_exported_model_has_the_same_tensors_in_transformers(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = save_model(Path("hf"), kind, **SIZES | EXPERTS[kind])
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    said = capsys.readouterr().err
    proven = re.search(r"proven: the logits of (\d+) tokens", said)
    assert proven is not None and int(proven[1]) >= 24
    config = json.loads(Path("hf/config.json").read_text())
    assert ("router_aux_loss_coef=0.0" in said) == (config.get("router_aux_loss_coef", 0) > 0)
    assert checkpoint(["export", "run=t", "to=out"]) == 0
    again, found = transformers.AutoModelForCausalLM.from_pretrained(
        "out", output_loading_info=True
    )
    assert type(again) is type(theirs)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = theirs.state_dict()
    state = again.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    with torch.no_grad():
        tokens = some_tokens()
        assert torch.equal(again.eval()(tokens).logits, theirs.eval()(tokens).logits)


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_under_the_names_of_transformers_memory_are_the_same_model(
    kind: str, tmp_path: Path
) -> None:
    theirs = save_model(tmp_path / "hf", kind, **SIZES | EXPERTS[kind])
    theirs.save_pretrained(tmp_path / "joined", save_original_format=False)
    names = load_file(tmp_path / "joined/model.safetensors").keys()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    model, expected = read(tmp_path / "hf")
    again, found = read(tmp_path / "joined")
    assert again == model
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_joined_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    theirs = save_model(tmp_path, "mixtral", **SIZES | EXPERTS["mixtral"])
    theirs.save_pretrained(tmp_path, save_original_format=False)
    file = tmp_path / "model.safetensors"
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"{name} has shape \(5, 88, 32\), but .*\(6, 88, 32\)"):
        read(tmp_path)


@pytest.mark.parametrize("kind", WITH_BIAS)
def test_biases_of_routers_survive_bf16(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 numbers near 20 are 0.125 apart."""
    monkeypatch.chdir(tmp_path)
    save_model(Path("hf"), kind, **SIZES | EXPERTS[kind])
    tensors = load_file("hf/model.safetensors")
    names = [name for name in tensors if name.endswith("e_score_correction_bias")]
    for name in names:
        tensors[name] = 20 + 0.01 * torch.arange(len(tensors[name])).float().sin()
    save_file(tensors, "hf/model.safetensors", metadata={"format": "pt"})
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    state = read_full(Path("runs/t/checkpoints/step-00000000"), ("state",))
    assert len(state) == len(names) > 0
    assert checkpoint(["export", "run=t", "to=out", "dtype=bf16"]) == 0
    assert checkpoint(["import", "from=out", "run=again", "prove=false"]) == 0
    written = load_file("out/model.safetensors")
    for name in names:
        assert written[name].dtype == torch.float32
        assert torch.equal(written[name], tensors[name])
    assert {str(t.dtype) for n, t in written.items() if n not in names} == {"torch.bfloat16"}
    back = read_full(Path("runs/again/checkpoints/step-00000000"), ("state",))
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_an_imported_run_answers_under_every_tp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training needs sp=true on several tensor ranks; `tests/distributed` compares them."""
    monkeypatch.chdir(tmp_path)
    save_model(Path("hf"), "olmoe", **SIZES | {"vocab_size": 257} | EXPERTS["olmoe"])
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    for tp in (1, 2):
        config = CommandConfig(run="t", tp=tp)
        assert config_from_run(GENERATE, config, ["run=t", f"tp={tp}"], None).sp == (tp == 2)


def test_layers_of_multi_token_prediction_are_left_out_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(Path("hf"), "glm4_moe", **SIZES | EXPERTS["glm4_moe"])
    tensors = load_file("hf/model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(32, 64)
    save_file(tensors, "hf/model.safetensors", metadata={"format": "pt"})
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    assert "num_nextn_predict_layers=1: layers of multi-token" in capsys.readouterr().err
    path = Path("hf/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match=r"no place for the tensor model\.layers\.2\.eh_proj"):
        checkpoint(["import", "from=hf", "run=other"])


def test_experts_that_do_not_fit_their_router_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "dots1", **SIZES | EXPERTS["dots1"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_group": 3}))
    with pytest.raises(UserError, match=r"model\.router_groups=3 must divide model\.num_exp"):
        read_hf_config(tmp_path)


def test_files_of_an_export_are_as_large_as_their_tensors(tmp_path: Path) -> None:
    """Biases of routers have a wider dtype than other tensors."""
    save_model(tmp_path / "hf", "dots1", **SIZES | EXPERTS["dots1"])
    model, weights = read(tmp_path / "hf")
    settings = {"dtype": "bf16", "end_of_text": 60, "shard_bytes": 20_000}
    export_hf(model, lambda names: {n: weights[n] for n in names}, tmp_path / "out", **settings)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    sizes = [sum(t.nbytes for t in content.values()) for content in files]
    assert max(sizes) <= 20_000
    assert index["metadata"]["total_size"] == sum(sizes)


def test_experts_under_two_spellings_are_refused(tmp_path: Path) -> None:
    """If only some names have the prefix, transformers joins the experts of each spelling
    separately."""
    save_model(tmp_path, "mixtral", **SIZES | EXPERTS["mixtral"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    tensors[name.removeprefix("model.")] = tensors.pop(name)
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"experts\.2\.w3\.weight lacks the prefix"):
        read(tmp_path)
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, file)
    assert len(read(tmp_path)[1]) == len(tensors)
