"""Compares dense families with transformers: logits, gradients, and tensors there and back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network
import transformers

from parallel3d.checkpoint.hf.config import from_hf
from parallel3d.checkpoint.hf.families import FAMILIES
from parallel3d.commands.checkpoint import proof
from parallel3d.commands.checkpoint.command import checkpoint
from tests.huggingface import (
    DIALECTS,
    compare_gradients,
    fill,
    filled,
    logits_of,
    read,
    save_model,
)

pytestmark = pytest.mark.slow
# Further models of a family; their logits are compared in the default set.
AGAIN = {
    *("mistral_window", "smollm3_window", "exaone4_full", "phi3_short"),
    *("dots1_window", "qwen2_window", "qwen3_types", "olmo_hybrid_nope"),
}

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "max_position_embeddings": 24,
    "bos_token_id": 60,
    "eos_token_id": 60,
}
# transformers gives the padding token's row of the embedding no gradient
SIZES["pad_token_id"] = None
# The experts of transformers multiply in fp32 at most.
IN_FP64 = [name for name in DIALECTS if "dots1" not in name]


# Sizes that a configuration class leaves open, or whose defaults no model can have.
OPEN: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 128},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_key_that_a_configuration_class_writes_is_read(kind: str) -> None:
    """Without transformers nobody can tell whether another key changes the model."""
    theirs = transformers.AutoConfig.for_model(kind, **OPEN.get(kind, {}))
    assert from_hf(json.loads(theirs.to_json_string(use_diff=False))).unread == {}


def some_tokens() -> Tensor:
    return torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", DIALECTS)
def test_logits_and_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = DIALECTS[name]
    theirs = save_model(tmp_path / "hf", kind, **SIZES | changes)
    model, weights = read(tmp_path / "hf")
    stage, tokens = filled(model, weights), some_tokens()

    ours = logits_of(stage, model, tokens)
    out = theirs.train()(tokens, labels=tokens)
    assert out.logits.std() > 0.3
    largest = float(out.logits.detach().abs().max())
    torch.testing.assert_close(ours, out.logits, rtol=0, atol=1e-5 * largest)

    loss = F.cross_entropy(ours[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, out.loss, rtol=1e-5, atol=0)
    loss.backward()
    out.loss.backward()
    assert compare_gradients(stage, theirs, tmp_path / "gradients") >= weights.keys() - {
        name for name in weights if name.endswith("router.bias")
    }


class InFp64(TorchFunctionMode):
    """Replaces fp32 in every call by fp64: norms, angles and softmax of transformers stay in fp32
    whatever the dtype of its weights."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        given = [torch.float64 if one is torch.float32 else one for one in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*given, **named)


@pytest.mark.parametrize("name", IN_FP64)
def test_logits_in_fp64_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = DIALECTS[name]
    saved = save_model(tmp_path / "hf", kind, **SIZES | changes)
    model, weights = read(tmp_path / "hf")
    stage, tokens = proof.blank_model(model, torch.float64), some_tokens()
    fill(stage, weights)
    with torch.no_grad():
        ours = logits_of(stage, model, tokens)
        torch.set_default_dtype(torch.float64)
        try:
            with InFp64():
                theirs = type(saved)(saved.config).eval()
                theirs.load_state_dict(saved.state_dict())
                expected = theirs(tokens).logits
        finally:
            torch.set_default_dtype(torch.float32)
    worst = float((ours - expected).abs().max())
    assert ours.dtype == expected.dtype == torch.float64
    assert worst <= 1e-9 * float(expected.abs().max())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly) if name in AGAIN else name for name in DIALECTS],
)
def test_an_imported_and_exported_model_has_the_same_tensors_in_transformers(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, changes = DIALECTS[name]
    theirs = save_model(Path("hf"), kind, **SIZES | changes)
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    assert "proven: the logits of " in capsys.readouterr().err
    assert checkpoint(["export", "run=t", "to=out"]) == 0
    again, found = transformers.AutoModelForCausalLM.from_pretrained(
        "out", output_loading_info=True
    )
    assert type(again) is type(theirs)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected, state = theirs.state_dict(), again.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    exported, imported = from_hf(config("out")), from_hf(config("hf"))
    if name == "phi3_short":  # transformers 4 takes the factor from the number of positions
        assert (exported.keys["seq_length"], imported.keys.pop("seq_length")) == (256, 24)
        del exported.keys["seq_length"]
    assert (exported.kind, exported.keys) == (imported.kind, imported.keys)
    with torch.no_grad():
        tokens = some_tokens()
        torch.testing.assert_close(
            again.eval()(tokens).logits, theirs.eval()(tokens).logits, rtol=0, atol=1e-6
        )


def config(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "config.json").read_text())
