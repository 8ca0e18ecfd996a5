"""Tests which keys a run may change when it resumes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from parallel3d.checkpoint.identity import ConfigChange, changes, of_all_ranks, refusal
from parallel3d.data.keys import DataConfig
from parallel3d.models.keys import ModelConfig
from parallel3d.optim.keys import OptimConfig
from parallel3d.run_config import Config
from parallel3d.schedules.keys import ScheduleConfig


def there(config: Config) -> dict:
    """Returns a configuration as a checkpoint stores it: through JSON."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def refused(found: list[ConfigChange]) -> list[ConfigChange]:
    return [change for change in found if change.kind == "refused"]


def reported(found: list[ConfigChange]) -> list[ConfigChange]:
    return [change for change in found if change.kind == "reported"]


def test_layout_and_launcher_are_free() -> None:
    old = Config(tp=2, zero=1, schedule=ScheduleConfig(layers_per_stage=[1, 3]))
    assert changes(there(old), old) == []
    new = Config(
        pp=2, run="x", device="cpu", micro_batch_size=2, attention_kernel="math",
        data=DataConfig(path="moved"),
    )  # fmt: skip
    found = changes(there(old), new)
    assert refused(found) == [] and reported(found) == []
    assert refusal("x", found) is None
    assert {c.key for c in found if c.is_layout} == {"tp", "pp", "zero", "micro_batch_size"}


def test_a_null_key_of_the_model_equals_its_effective_value() -> None:
    null = Config()
    model = null.model
    for key, value in model.in_effect.items():
        given = Config(model=dataclasses.replace(model, **{key: value}))
        assert changes(there(null), given) == changes(there(given), null) == []
        assert of_all_ranks(given) == of_all_ranks(null)
    other = Config(model=dataclasses.replace(model, head_dim=2 * model.head_size))
    for found in (changes(there(null), other), changes(there(other), null)):
        assert [(c.key, c.kind) for c in found] == [("model.head_dim", "refused")]
    wider = Config(model=dataclasses.replace(model, hidden_size=2 * model.hidden_size))
    assert [c.key for c in changes(there(null), wider)] == ["model.hidden_size"]


def test_changes_to_the_next_steps_are_reported() -> None:
    new = Config(global_batch_size=32, optim=OptimConfig(lr=5e-4, clip_grad=0.5))
    new.train.steps = 900
    new.precision.name = "bf16"
    found = changes(there(Config()), new)
    assert refused(found) == []
    assert {c.key for c in reported(found)} == {
        *("global_batch_size", "optim.lr", "optim.clip_grad", "train.steps", "precision.name")
    }


@pytest.mark.parametrize("hook", ["none", "powersgd"])
def test_hooks_that_change_gradients_are_reported(hook: str) -> None:
    """Works also for a configuration that this version no longer has, with a key of its own."""
    old, new = there(Config()), Config()
    old["ddp"] |= {"comm_hook": hook, "powersgd_rank": 2}
    new.ddp.comm_hook, new.ddp.overlap = "bf16", False
    found = changes(old, new)
    assert refused(found) == []
    assert [str(c) for c in reported(found)] == [f"ddp.comm_hook is {hook} there, now bf16"]


def test_model_data_seed_and_optimizer_are_the_run_itself() -> None:
    old = Config()
    for key, new in {
        "seed": Config(seed=7),
        "model.seq_length": Config(model=ModelConfig(seq_length=64)),
        "model.norm_eps": Config(model=ModelConfig(norm_eps=1e-6)),
        "model.vocab_size": Config(model=ModelConfig(vocab_size=300)),
        "data.valid_fraction": Config(data=DataConfig(valid_fraction=0.1)),
        "optim.name": Config(optim=OptimConfig(name="sgd")),
        "optim.momentum": Config(optim=OptimConfig(momentum=0.9)),
    }.items():
        found = changes(there(old), new)
        assert [c.key for c in refused(found)] == [key]
        assert f"{key} is " in (refusal("mine", found) or "")
        assert reported(found) == []


@pytest.mark.parametrize("key", ["seed", "model.seq_length", "model.hidden_size"])
def test_a_refusal_names_the_start_that_keeps_the_weights(key: str) -> None:
    new = Config(seed=7) if key == "seed" else Config(model=ModelConfig(**{key[6:]: 32}))
    said = refusal("mine", changes(there(Config()), new)) or ""
    assert "; choose another run=" in said
    assert said.endswith("with init_from=mine to begin from these weights") == (
        key[6:] != "hidden_size"
    )


def test_changes_of_a_blend_are_reported_as_they_were_given() -> None:
    old = json.loads(json.dumps(there(Config(data=DataConfig(blend_stages={90: {"a": 1}})))))
    new = DataConfig(blend={"a": 1}, blend_stages={90: {"a": 1}})
    (change,) = changes(old, Config(data=new))
    assert str(change) == "data.blend is null there, now {a:1}"
    new.blend_stages = {90: {"b": 1}}
    found = changes(old, Config(data=new))
    assert not refused(found) and [c.key for c in reported(found)] == [
        "data.blend",
        "data.blend_stages",
    ]


def test_momentum_may_change_but_not_be_added_or_removed() -> None:
    found = changes(
        there(Config(optim=OptimConfig(momentum=0.8))), Config(optim=OptimConfig(momentum=0.9))
    )
    assert refused(found) == []
    assert [c.key for c in reported(found)] == ["optim.momentum"]


def test_keys_that_a_checkpoint_does_not_know_have_their_defaults() -> None:
    old = there(Config())
    del old["model"]["bias"], old["recovery"]
    assert changes(old, Config()) == []
    assert [c.key for c in changes(old, Config(model=ModelConfig(bias=False)))] == ["model.bias"]


def test_models_from_before_scaled_rope_and_norms_of_heads_have_neither() -> None:
    old = there(Config())
    for key in ("head_dim", "qk_norm", "attention_bias", "rope_scaling_factor"):
        del old["model"][key]
    assert changes(old, Config()) == []
    found = changes(old, Config(model=ModelConfig(rope_scaling_factor=8.0, qk_norm=True)))
    assert [c.key for c in refused(found)] == ["model.qk_norm", "model.rope_scaling_factor"]
