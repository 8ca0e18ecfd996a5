"""Tests that frozen parameters have no gradients or states, that a run resumes with others frozen,
and that planted bugs of `optim.freeze` and `optim.groups` are caught; test_matrix trains with
both."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.checkpoint.init_from import load_initial
from parallel3d.checkpoint.manifest import list_checkpoints, read_manifest
from parallel3d.models.keys import ModelConfig
from parallel3d.optim.keys import OptimConfig, Treatment
from parallel3d.optim.optimizer import Optimizer
from parallel3d.parameters.segments import Segment
from parallel3d.parameters.spec import ShardSpec
from parallel3d.parameters.state import state_of
from parallel3d.run.directory import save_config
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import (
    References,
    check_cases,
    check_caught,
    make_trainer,
    plain_groups,
)
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    FIRST_TRAINED,
    FREEZE,
    LINEAR_BACKWARD,
    SEGMENT_BY_KIND,
    SHARE_OF_NORM,
    STEP,
    TREATMENT,
    UPDATE,
    Mutation,
    planted,
)
from tests.distributed.test_traffic import FIRST as FROZEN_FIRST
from tests.distributed.test_traffic import LOOPS, Sent, check, sent_in_steps

TREATED = Problem(
    "llama_tiny",
    "adamw",
    True,
    layers=2,
    steps=2,
    batch=12,
    optim=(
        ("clip_grad", 0.3),
        ("freeze", ("layers.*.attention.k.weight", "layers.0.mlp.down.weight")),
        ("groups", (("*.attention.q.*", (("lr_mult", 0.5),)),)),
    ),
)


@planted(UPDATE)
def frozen_matrices_decay(sound: Any, optimizer: Optimizer, rate: float, *rest: Any) -> None:
    """Weight decay applies to frozen parameters, too."""
    sound(optimizer, rate, *rest)
    for group in optimizer.groups:
        if group.treated.frozen:
            torch._foreach_mul_(group.masters, 1 - rate * group.weight_decay)


@planted(SHARE_OF_NORM)
def the_norm_counts_what_is_frozen(sound: Any, trainer: Trainer, *how: Any) -> Tensor:
    """Gradients of frozen parameters enter the norm, by which the others are clipped."""
    optimizer = trainer.optimizer
    every = [segment for group in optimizer.groups for segment in group.segments]
    kept, optimizer.segments = optimizer.segments, every
    share = sound(trainer, *how)
    optimizer.segments = kept
    return share


@planted(SEGMENT_BY_KIND)
def a_matrix_is_treated_as_the_one_before_it(
    sound: Any, segment: Segment, kind_of: Callable[[ShardSpec], Any]
) -> Any:
    """In fused matrices, k is treated like q (which learns slowly), and v like k (which is
    frozen)."""

    def kind_of_another(shard: ShardSpec) -> Any:
        name = shard.name.replace(".k.", ".q.").replace(".v.", ".k.")
        return kind_of(replace(shard, name=name))

    return sound(segment, kind_of_another)


@planted(TREATMENT)
def a_factor_of_another_group(sound: Any, settings: OptimConfig, name: str) -> Treatment:
    """Matrices with their own learning rate get the usual one, and vice versa."""
    found = sound(settings, name)
    return found if found.frozen else found._replace(lr_mult=1.5 - found.lr_mult)


@pytest.mark.more
@pytest.mark.parametrize(
    "mutation",
    [
        frozen_matrices_decay,
        the_norm_counts_what_is_frozen,
        a_matrix_is_treated_as_the_one_before_it,
        a_factor_of_another_group,
    ],
)
def test_a_planted_bug_is_caught(mutation: Mutation, pool: Pool, references: References) -> None:
    told_by = {"loss", "grad norm", "weights"}
    check_caught(mutation, (1, 1, 1), Case(TREATED), told_by, pool, references)


# A rank's parameter that is frozen as a whole has no gradient at all.


def frozen(*patterns: str, **how: Any) -> Problem:
    """Returns a problem of three layers in which tensors of these names are frozen."""
    optim = (*((("freeze", patterns),) if patterns else ()), *how.pop("optim", ()))
    return Problem(**{"preset": "llama_tiny", "optimizer": "sgd", "tied": False} | how, optim=optim)


BUT_THE_HEAD = ("embedding.*", "layers.*", "final_norm.*")
FIRST = ("embedding.*", "layers.0.*", "layers.1.attention.*", "layers.1.input_norm.*")
MOMENTS = {"optimizer": "adamw", "optim": (("ema_decay", 0.6), ("state", "bf16"))}
CLIPPED = (("clip_grad", 0.3),)
EXPERTS: dict[str, Any] = {
    "model": (("num_experts", 8), ("experts_per_token", 2), ("expert_ffn_size", 24)),
    "optim": CLIPPED,
    "moe": (("aux_loss", 0.1),),
    "layers": 2,
    "steps": 2,
}
BIASED = EXPERTS | {
    "model": (*EXPERTS["model"], ("router_score", "sigmoid"), ("router_bias", True)),
    "moe": (("bias_update_rate", 0.05),),
}
V = {"schedule": "zbv", "microbatches": 4}


def sharded(zero: int, *keys: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    return (("zero", zero), *keys)


# The matrix has some patterns with each of most settings, but no stage of frozen parameters alone,
# no V whose first stage on a rank has no backward while the last one has, and neither all experts
# of a layer frozen nor its router.
CASES = {
    (1, 3, 1): [Case(frozen("layers.2.*", "final_norm.*", "head.*"))],
    (2, 1, 2, 1, 4): [
        Case(frozen("*.experts.*", "*.input_norm.*", **EXPERTS), sp=True),
        Case(frozen("layers.1.*", "embedding.*", **BIASED), sp=True),
    ],
    (1, 2, 2): [
        Case(frozen(*BUT_THE_HEAD, layers=4, optim=CLIPPED), **V, keys=sharded(2, ("vpp", 2))),
        Case(frozen(*FIRST, layers=4), **V, keys=sharded(3, ("vpp", 2))),
        Case(frozen(*BUT_THE_HEAD, **MOMENTS), keys=sharded(1)),
    ],
}


@pytest.mark.nightly  # the matrix holds most of these in the set of every change
@pytest.mark.parametrize("sizes", CASES, ids=lambda s: "-".join(map(str, s)))
def test_training_equals_the_reference(
    sizes: tuple[int, ...], pool: Pool, references: References
) -> None:
    check_cases(sizes, CASES[sizes], pool, references)


def what_is_held(zero: int) -> list[tuple[str, bool, int, int, int, torch.dtype]]:
    """Returns for each parameter of a rank, after a step in bf16: its name, whether it is trained,
    the numbers of elements of gradients, masters and moments, and the dtype of a constant."""
    groups = plain_groups(Layout(dp=2))
    problem = frozen("layers.1.*", "embedding.*", precision="bf16", **MOMENTS)
    trainer = make_trainer(Case(problem, keys=sharded(zero)), groups)
    trainer.train_step()
    elements: dict[str, Counter[str]] = {name: Counter() for name in trainer.parameters}
    for group in trainer.optimizer.groups:
        for i, segment in enumerate(group.segments):
            for span in segment.spans:
                kinds = {"gradient", "master", *group.state}
                elements[span.name].update(dict.fromkeys(kinds, span.numel))
            assert all(state[i].numel() == segment.master.numel() for state in group.state.values())
    constants = {c.span.name: c.param.dtype for c in trainer.data_parallel.constants}
    found = []
    for name, parameter in trainer.parameters.items():
        of, grad = elements[name], state_of(parameter).main_grad
        gradients = of["gradient"] if grad is None else max(grad.numel(), of["gradient"])
        moments = of["exp_avg"] + of["exp_avg_sq"] + of["ema"]
        dtype = constants.get(name, torch.float32)
        found.append((name, parameter.requires_grad, gradients, of["master"], moments, dtype))
    groups.close()
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_frozen_parameter_has_no_gradient_master_or_moments(zero: int, pool: Pool) -> None:
    for of_rank in pool.run(2, what_is_held, zero):
        for name, trained, *elements, dtype in of_rank:
            assert trained is not name.startswith(("layers.1.", "embedding."))
            if trained:
                assert min(elements) > 0 or zero, name  # a shard may have no element of it
            else:
                assert elements == [0, 0, 0], name
                assert dtype == torch.bfloat16, name


def kept_bytes(patterns: Sequence[str]) -> int:
    """Returns the bytes that a forward keeps for its backward, without parameters."""
    groups = plain_groups(Layout())
    trainer = make_trainer(Case(frozen(*patterns), microbatches=1), groups)
    own = {p.untyped_storage().data_ptr() for p in trainer.parameters.values()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        [stage] = trainer.stages
        trainer.data_parallel.start_step(1)
        batch = trainer.train_batches.micro_batch(0, 0)
        stage(None, *batch, torch.ones((), dtype=torch.float64))
    groups.close()
    return sum(kept.values())


def test_inputs_of_frozen_layers_are_not_kept(pool: Pool) -> None:
    """Compares three layers: all trained, without gradients of the matrices, without backward."""
    every, matrices, head = (
        pool.run(1, kept_bytes, patterns)[0]
        for patterns in ((), ("*.attention.*", "*.mlp.*"), BUT_THE_HEAD)
    )
    model, tokens = Case(frozen("*")).config(Layout()).model, 24 * 16
    # The inputs of `qkv`, `out`, `up` and `down`, of 8 bytes an element. Attention's backward keeps
    # its result in another order.
    inputs = 3 * 8 * tokens * (3 * model.hidden_size + model.ffn_size)
    assert every - matrices == inputs
    assert head < 0.05 * every


def resumed_with_others_frozen(run_dir: Path) -> list[Any]:
    """Trains two steps with all parameters, one with layer 1 frozen and one with layer 0 frozen,
    from checkpoints; returns the kinds of saved tensors, and the changes of weights and moments."""
    groups = plain_groups(Layout())
    found: list[Any] = []
    every = ("run", run_dir.name), ("checkpoint.every", 1)
    run_dir.mkdir(exist_ok=True)
    for steps, patterns in ((2, ()), (1, ("layers.1.*",)), (1, ("layers.0.*",))):
        problem = frozen(*patterns, steps=4, optimizer="adamw", optim=(("ema_decay", 0.6),))
        trainer = make_trainer(Case(problem, keys=every), groups)
        checkpoints = Checkpoints(trainer.config, run_dir, groups, print)
        checkpoints.restore(trainer)
        before = {name: w.clone() for name, w in trainer.full_parameters().items()}
        started = {
            s.name: {kind: float(values.abs().sum()) for kind, values in s.values.items()}
            for s in trainer.parameter_slices()
        }
        for _ in range(steps):
            trainer.train_step()
            checkpoints.after_step(trainer)
        checkpoints.close()
        after = trainer.full_parameters()
        moved = {name: not torch.equal(w, before[name]) for name, w in after.items()}
        saved = {s.name: sorted(s.values) for s in trainer.saved_slices()}
        found.append((started, moved, saved))
    groups.close()
    return found


def test_a_run_resumes_with_others_frozen(pool: Pool, tmp_path: Path) -> None:
    """Moments of parameters that are frozen now are not read; moments that a checkpoint lacks begin
    at zero."""
    [[_, second, third]] = pool.run(1, resumed_with_others_frozen, tmp_path / "run")
    started, moved, saved = second
    name = "layers.{}.mlp.down.weight"
    assert [moved[name.format(layer)] for layer in range(3)] == [True, False, True]
    assert started[name.format(0)]["exp_avg"] > 0
    assert list(started[name.format(1)]) == ["parameter"]
    assert saved[name.format(1)] == ["ema", "parameter"]
    started, moved, _ = third
    assert [moved[name.format(layer)] for layer in range(3)] == [False, True, True]
    assert started[name.format(1)]["exp_avg"] == started[name.format(1)]["exp_avg_sq"] == 0
    assert started[name.format(1)]["ema"] == started[name.format(1)]["parameter"] > 0
    assert started[name.format(2)]["exp_avg"] > 0


# States of the model that no optimizer updates, and the age of a parameter's moments

ONE, EP_ZERO1, PP, EP_ZERO3 = (1, 1, 1), (1, 1, 2, 1, 2), (1, 2, 1), (1, 1, 2, 1, 2)
BIASES = [f"layers.{layer}.mlp.router.bias" for layer in range(2)]


def saved_with_biases(
    run_dir: Path, sizes: Any, patterns: Sequence[str], steps: int, keys: dict[str, Any]
) -> tuple[dict[str, float], dict[str, bool]]:
    """Trains a mixture from the newest checkpoint, saves, and returns by tensor the median change
    in the last step, in learning rates, and whether a router's bias has changed."""
    groups = plain_groups(Layout(*sizes))
    optimizer = keys.pop("optimizer", "adamw")
    own: Any = (("beta2", 0.999), ("weight_decay", 0.0), ("clip_grad", 0.0))
    own += (("freeze", tuple(patterns)),) if patterns else ()
    problem = frozen(**BIASED | {"optimizer": optimizer, "optim": own, "precision": "fp32"})
    keys = {"run": run_dir.name, "runs_dir": str(run_dir.parent), "checkpoint.every": 1} | keys
    run_dir.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(Case(problem, keys=tuple({"train.steps": 99, **keys}.items())), groups)
    checkpoints = Checkpoints(trainer.config, run_dir, groups, print)
    checkpoints.restore(trainer)
    if keys.get("init_from"):
        load_initial(trainer, groups)
    assert trainer.balance is not None
    biases = {name: bias.clone() for name, bias in trainer.balance.states.items()}
    before: dict[str, Tensor] = {}
    for _ in range(steps):
        before = {name: w.clone() for name, w in trainer.full_parameters().items()}
        trainer.train_step()
        checkpoints.after_step(trainer)
    assert checkpoints.close()
    if groups.rank == 0:
        save_config(trainer.config, run_dir)
    after, lr = trainer.full_parameters(), trainer.config.optim.lr
    moved = {n: float(((w - before[n]).abs() / lr).median()) for n, w in after.items()}
    changed = {n: not torch.equal(b, biases[n]) for n, b in trainer.balance.states.items()}
    groups.close()
    return moved, changed


@pytest.mark.parametrize(
    ("sizes", "keys"),
    [(ONE, {"optimizer": "muon"}), (EP_ZERO1, {"zero": 1}), (PP, {"optimizer": "sgd"})],
)
def test_frozen_routers_keep_their_biases_and_are_saved(
    sizes: Any, keys: dict[str, Any], pool: Pool, tmp_path: Path
) -> None:
    world = Layout(*sizes).world_size
    for number, (pattern, still) in enumerate(
        {"layers.0.*": {BIASES[0]}, "*router.bias": {*BIASES}}.items()
    ):
        folder = tmp_path / str(number)
        found = pool.run(world, saved_with_biases, folder, sizes, [pattern], 2, keys)
        assert {name for _, changed in found for name in changed} == {*BIASES}
        assert {name for _, changed in found for name, c in changed.items() if not c} == still


FREED, KEPT = "layers.0.mlp.experts.1.up.weight", "layers.1.attention.out.weight"


def test_moments_of_unfrozen_parameters_are_as_old_as_they_are(pool: Pool, tmp_path: Path) -> None:
    """The first step of AdamW is the learning rate; others count all steps of the run."""
    run = tmp_path / "run"
    pool.run(2, saved_with_biases, run, EP_ZERO1, ["layers.0.*"], 3, {"zero": 1})
    [one] = pool.run(1, saved_with_biases, tmp_path / "other", ONE, [], 1, {})
    assert [one[0][FREED], one[0][KEPT]] == pytest.approx([1.0, 1.0], abs=1e-3)
    twin = shutil.copytree(run, tmp_path / "twin")
    moved, changed = pool.run(2, saved_with_biases, run, EP_ZERO3, [], 1, {"zero": 3})[0]
    assert moved[FREED] == pytest.approx(1.0, abs=1e-3) and moved[KEPT] < 0.95
    assert all(changed.values())
    # The age is a part of the checkpoint: another start, and a new run with the optimizer's state.
    start = {"init_from": "run", "init_optimizer": True}
    [later] = pool.run(1, saved_with_biases, run, ONE, [], 1, {})
    [new] = pool.run(1, saved_with_biases, tmp_path / "new", ONE, [], 1, start)
    [in_one_go] = pool.run(1, saved_with_biases, twin, ONE, [], 2, {})
    assert later[0] == pytest.approx(in_one_go[0], abs=1e-3)
    assert new[0][FREED] > 0.48  # 0.38 with the run's number of updates
    # Frozen again, and freed again: its moments begin again.
    pool.run(1, saved_with_biases, run, ONE, [FREED], 1, {})
    [again] = pool.run(1, saved_with_biases, run, ONE, ["head.*"], 1, {})
    assert again[0][FREED] == pytest.approx(1.0, abs=1e-3)
    manifest = read_manifest(list_checkpoints(run)[0])
    assert manifest.progress["thaws"] == [[3, ["layers.0.*"]], [6, [FREED]]]


# Planted bugs


@planted(LINEAR_BACKWARD)
def nothing_passes_a_frozen_layer(sound: Any, split: str, grad: Tensor, *how: Any) -> Any:
    """A linear layer without a weight gradient omits its input gradient, too."""
    grad_x, grad_weight = sound(split, grad, *how)
    return grad_x if how[0] is not None else torch.zeros_like(grad_x), grad_weight


@planted(LINEAR_BACKWARD)
def not_summed_over_tp(
    sound: Any, split: str, grad: Tensor, x: Tensor | None, weight: Tensor, *how: Any
) -> Any:
    """The input gradient of a frozen column-parallel layer is not summed over ranks."""
    if x is None and split == "column":
        return grad @ weight, None
    return sound(split, grad, x, weight, *how)


@planted(FIRST_TRAINED)
def cut_above_a_trained_layer(sound: Any, model: ModelConfig, frozen: Any) -> int:
    """The first trained layer is treated as if it had no backward."""
    return sound(model, frozen) + 1


@planted(STEP)
def what_is_frozen_decays(sound: Any, trainer: Trainer) -> Any:
    result = sound(trainer)
    for values, _, _ in trainer.data_parallel.constants:
        values.mul_(1 - result.lr * trainer.config.optim.weight_decay)
    return result


@planted(STEP)
def a_copy_of_the_frozen_table_is_stepped(sound: Any, trainer: Trainer) -> Any:
    """The last stage steps its copy of the tied table, which is frozen."""
    result = sound(trainer)
    if trainer.groups.pp.index > 0:
        for values, span, _ in trainer.data_parallel.constants:
            values.sub_(result.lr * values.sign() if span.spec.tied else 0.0)
    return result


@planted(TREATMENT)
def a_frozen_table_is_trained(sound: Any, settings: OptimConfig, name: str) -> Treatment:
    found = sound(settings, name)
    return found._replace(frozen=False) if name == "embedding.word.weight" else found


SGD = {"steps": 2, "batch": 12}
TOLD = {"loss", "grad norm", "weights", "evaluation"}
MLPS, TABLE = frozen("*.mlp.*", **SGD), frozen("embedding.*", tied=True, **SGD)
UNTIED_TABLE = frozen("embedding.*", **SGD)
PLANTED = {
    "nothing-passes": (nothing_passes_a_frozen_layer, (1, 1, 1), MLPS, (), TOLD),
    "not-summed": (not_summed_over_tp, (2, 1, 1), MLPS, (), TOLD | {"replicas"}),
    "cut": (cut_above_a_trained_layer, (1, 3, 1), UNTIED_TABLE, (), TOLD),
    "decays": (what_is_frozen_decays, (1, 1, 2), frozen(*FIRST, **SGD), sharded(3), TOLD),
    "a-copy": (
        *(a_copy_of_the_frozen_table_is_stepped, (1, 2, 1)),
        *(TABLE, (), TOLD | {"replicas"}),
    ),
    "table": (a_frozen_table_is_trained, (1, 2, 1), TABLE, (), TOLD),
}


@pytest.mark.more
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_of_freezing_is_caught(name: str, pool: Pool, references: References) -> None:
    mutation, sizes, problem, keys, told_by = PLANTED[name]
    check_caught(mutation, sizes, Case(problem, keys=keys), told_by, pool, references)


@planted(FREEZE)
def one_thawed(sound: Any, stages: Any, names: Any) -> None:
    """A frozen parameter has a gradient and a bucket, and is reduced."""
    sound(stages, names - {"layers.1.attention.qkv.weight"})


@planted(FIRST_TRAINED)
def sent_to_frozen_stages(sound: Any, model: ModelConfig, frozen: Any) -> int:
    """Stages send gradients to earlier stages that have nothing to train."""
    return -1


def sent_with_a_bug(bug: Mutation, layout: Layout, changes: dict[str, Any]) -> Sent:
    with bug():
        return sent_in_steps({"": (layout, changes)})[""]


@pytest.mark.more
@pytest.mark.parametrize(
    ("bug", "layout", "changes"),
    [
        (one_thawed, Layout(dp=2), {"zero": 1, **FROZEN_FIRST}),
        (one_thawed, Layout(dp=2), {"zero": 3, **FROZEN_FIRST}),
        # The first of the four stages has nothing to train.
        (
            sent_to_frozen_stages,
            Layout(pp=2),
            {**LOOPS, **FROZEN_FIRST, "layers_per_stage": [1, 2, 1, 1]},
        ),
    ],
    ids=["a bucket", "a shard", "a message"],
)
def test_traffic_of_what_is_frozen_is_noticed(
    bug: Mutation, layout: Layout, changes: dict[str, Any], pool: Pool
) -> None:
    sent = pool.run(2, sent_with_a_bug, bug, layout, changes)
    with pytest.raises(AssertionError):
        check("planted", layout, changes, sent)
