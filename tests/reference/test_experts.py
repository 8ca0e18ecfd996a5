"""Tests the reference's experts: transformers' blocks, choices by hand, finite differences."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.dots1 import modeling_dots1 as dots1
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from tests.reference.mlp import Experts, Router, Routing, balance, best
from tests.reference.model import ReferenceModel
from tests.reference.test_reference import gpt, llama
from tests.reference.train import ReferenceRun, batch_loss, build, train_reference, used_tokens

PLAIN = {
    "num_experts": 8,
    "experts_per_token": 3,
    "expert_ffn_size": None,
    "shared_expert_size": 0,
    "shared_expert_gate": False,
    "router_score": "softmax",
    "router_normalize": True,
    "router_scale": 1.0,
    "router_bias": False,
    "router_groups": 1,
    "router_top_groups": 1,
    "dense_layers": [],
}
DEEPSEEK = {
    "router_score": "sigmoid",
    "router_scale": 2.5,
    "router_bias": True,
    "router_groups": 4,
    "router_top_groups": 2,
    "shared_expert_size": 10,
    "dense_layers": [0],
}


def sparse(**changes: object) -> SimpleNamespace:
    """Returns a Llama with experts as in Qwen3-MoE."""
    return llama(**(PLAIN | changes))


# ------------------------------------------------------------------ transformers' blocks


class Family(NamedTuple):
    """A block of transformers, its configuration, and the equal configuration of the reference."""

    module: object
    block: str
    config: str
    theirs: dict[str, object]
    ours: dict[str, object]


GROUPED = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
V3 = DEEPSEEK | {"shared_expert_size": 2 * 12}
V2 = {"router_score": "softmax", "router_bias": False, "router_normalize": False}
FAMILIES = {
    "qwen3": Family(
        qwen3_moe,
        "Qwen3MoeSparseMoeBlock",
        "Qwen3MoeConfig",
        {"num_experts": 8, "norm_topk_prob": True},
        {},
    ),
    "mixtral": Family(
        mixtral, "MixtralSparseMoeBlock", "MixtralConfig", {"num_local_experts": 8}, {}
    ),
    "olmoe": Family(
        olmoe,
        "OlmoeSparseMoeBlock",
        "OlmoeConfig",
        {"num_experts": 8, "norm_topk_prob": False},
        {"router_normalize": False},
    ),
    "qwen2": Family(
        qwen2_moe,
        "Qwen2MoeSparseMoeBlock",
        "Qwen2MoeConfig",
        {"num_experts": 8, "norm_topk_prob": False, "shared_expert_intermediate_size": 20},
        {"router_normalize": False, "shared_expert_size": 20, "shared_expert_gate": True},
    ),
    "dots1": Family(
        dots1,
        "Dots1MoE",
        "Dots1Config",
        GROUPED | {"n_group": 1, "topk_group": 1},
        V3 | {"router_groups": 1, "router_top_groups": 1},
    ),
    "deepseek_v3": Family(deepseek_v3, "DeepseekV3MoE", "DeepseekV3Config", GROUPED, V3),
    "deepseek_v2": Family(
        deepseek_v2,
        "DeepseekV2Moe",
        "DeepseekV2Config",
        GROUPED | {"topk_method": "group_limited_greedy"},
        V3 | V2,
    ),
}


def drawn(module: nn.Module, seed: int = 3) -> dict[str, Tensor]:
    """Draws random values for parameters and buffers, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(values.shape, generator=generator, dtype=torch.float64) * 0.4
        for name, values in module.state_dict().items()
    }


def named_as_ours(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of one of transformers' blocks under our names."""
    found = {}
    for name, values in theirs.items():
        if name == "experts.gate_up_proj":
            for e, both in enumerate(values):
                found[f"experts.{e}.gate.weight"], found[f"experts.{e}.up.weight"] = both.chunk(2)
        elif name == "experts.down_proj":
            found |= {f"experts.{e}.down.weight": one for e, one in enumerate(values)}
        else:
            for old, new in (
                ("gate.e_score_correction_bias", "router.bias"),
                ("shared_expert_gate.", "shared_gate."),
                ("shared_experts.", "shared."),
                ("shared_expert.", "shared."),
                ("_proj.", "."),
            ):
                name = name.replace(old, new)
            found["router.weight" if name == "gate.weight" else name] = values
    return found


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_output_and_gradients_are_those_of_transformers(family: Family) -> None:
    """The scores of transformers are in fp32; with a larger margin both choose the same experts."""
    sizes = {"hidden_size": 16, "moe_intermediate_size": 12, "num_experts_per_tok": 3}
    sizes["num_attention_heads"] = 4
    if family.block.startswith(("Mixtral", "Olmoe")):
        sizes["intermediate_size"] = sizes.pop("moe_intermediate_size")
    config = getattr(family.module, family.config)(**sizes, **family.theirs)
    config._experts_implementation = "eager"
    theirs = getattr(family.module, family.block)(config).double().eval()
    ours = Experts(sparse(hidden_size=16, expert_ffn_size=12, **family.ours)).double()
    values = drawn(theirs)
    theirs.load_state_dict(values)
    ours.load_state_dict(named_as_ours(values))
    torch.manual_seed(0)
    x, direction = torch.randn(2, 2, 9, 16, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    expected = theirs(inputs[0])
    found, routing = ours(inputs[1])
    assert 1e-5 < routing.margin < 1e-1
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for output in (expected, found):
        (output * direction).sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-6, atol=1e-5)
    gradients = named_as_ours({name: p.grad for name, p in theirs.named_parameters()})
    parameters = dict(ours.named_parameters())
    assert gradients.keys() == parameters.keys()
    for name, parameter in parameters.items():
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=1e-6, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


# ------------------------------------------------------------------ choices made by hand


def test_among_equal_scores_the_lower_index_is_chosen() -> None:
    assert best([1.0, 3.0, 3.0, 2.0], 3) == ([1, 2, 3], 1.0)
    assert best([3.0, 1.0, 3.0, 3.0], 2) == ([0, 2], 0.0)
    assert best([0.0, -0.0, 1.0], 2) == ([2, 0], 0.0)
    assert best([1.0, 5.0], 2) == ([1, 0], math.inf)
    assert best([1.0, -math.inf], 1) == ([0], math.inf)


def decided(logits: list[list[float]], **keys: object) -> Routing:
    """Routes one sequence whose tokens have these logits."""
    experts = len(logits[0])
    shape = sparse(num_experts=experts, hidden_size=experts, **keys)
    router = Router(shape).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(experts))
        if shape.router_bias:
            router.bias.copy_(torch.tensor(keys["router_bias"], dtype=torch.float64))
    return router(torch.tensor([logits], dtype=torch.float64))


def of_chances(*chances: float) -> list[float]:
    """Returns the logits with these sigmoids."""
    return [math.log(p / (1 - p)) for p in chances]


def test_softmax_normalised_is_softmax_over_the_chosen() -> None:
    found = decided([[1.0, 4.0, 2.0, 3.0]], experts_per_token=2)
    assert found.chosen.tolist() == [[[1, 3]]]
    e = math.e
    assert found.weights[0, 0].tolist() == pytest.approx([e / (e + 1), 1 / (e + 1)], rel=1e-14)
    total = e + e**2 + e**3 + e**4
    assert found.margin == pytest.approx((e**3 - e**2) / total, rel=1e-13)
    plain = decided(
        [[1.0, 4.0, 2.0, 3.0]], experts_per_token=2, router_normalize=False, router_scale=3.0
    )
    assert plain.weights[0, 0].tolist() == pytest.approx([3 * e**4 / total, 3 * e**3 / total])


def test_ties_go_to_the_lower_index_and_have_no_margin() -> None:
    found = decided([[0.0] * 4, [1.0, 2.0, 2.0, 2.0], [2.0, 1.0, 3.0, 2.0]], experts_per_token=2)
    assert found.chosen.tolist() == [[[0, 1], [1, 2], [2, 0]]]
    assert found.margin == 0.0
    assert found.weights[0, 0].tolist() == [0.5, 0.5]


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    keys = {"router_score": "sigmoid", "experts_per_token": 2, "router_scale": 2.0}
    logits = [of_chances(0.8, 0.5, 0.4, 0.1)]
    found = decided(logits, **keys, router_bias=[-0.7, 0.0, 0.0, 0.35])
    assert found.chosen.tolist() == [[[1, 3]]]  # 0.1, 0.5, 0.4, 0.45
    assert found.weights[0, 0].tolist() == pytest.approx([2 * 0.5 / 0.6, 2 * 0.1 / 0.6])
    assert found.margin == pytest.approx(0.05)
    weights = decided(logits, **(keys | {"router_normalize": False})).weights
    assert weights[0, 0].tolist() == pytest.approx([1.6, 1.0])


def test_a_group_counts_by_its_two_largest_with_sigmoid_and_by_its_largest_with_softmax() -> None:
    """Groups of three: sums of two 0.9, 1.05 and 0.8; the largest of the first is above all."""
    chances = [0.85, 0.05, 0.04, 0.6, 0.45, 0.01, 0.3, 0.5, 0.02]
    keys = {"experts_per_token": 1, "router_groups": 3}
    by_two = decided([of_chances(*chances)], **keys, router_score="sigmoid")
    assert by_two.chosen.tolist() == [[[3]]]
    assert by_two.margin == pytest.approx(0.15)  # 1.05 - 0.9, 0.6 - 0.45
    by_one = decided([[math.log(c) for c in chances]], **keys)
    assert by_one.chosen.tolist() == [[[0]]]
    assert by_one.margin == pytest.approx(0.25 / sum(chances))
    both = decided([of_chances(*chances)], **keys, router_score="sigmoid", router_bias=[0.3] * 9)
    assert both.margin == pytest.approx(0.15)
    moved = decided(
        [of_chances(*chances)],
        **keys,
        router_score="sigmoid",
        router_bias=[0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    )
    assert moved.chosen.tolist() == [[[0]]]  # 0.85 + 0.25 > 1.05


def test_an_expert_below_zero_is_taken_before_one_outside_of_the_kept_groups() -> None:
    """Zeros outside, as older releases of transformers had, would win against s + b < 0."""
    keys = {"router_score": "sigmoid", "router_groups": 2, "experts_per_token": 2}
    found = decided([of_chances(0.9, 0.2, 0.3, 0.3)], **keys, router_bias=[0.0, -0.25, -0.1, -0.1])
    assert found.chosen.tolist() == [[[0, 1]]]
    equal = decided([of_chances(0.3, 0.2, 0.2, 0.3)], **keys)
    assert equal.chosen.tolist() == [[[0, 1]]]
    assert equal.margin == 0.0


# ------------------------------------------------------------------ losses, counts and biases


class Padded:
    """Random tokens; odd samples end in padding, which is masked and a document by itself."""

    def __init__(self, shape: SimpleNamespace, padding: int = 0) -> None:
        self.shape, self.padding = shape, padding

    def sample(self, i: int) -> SimpleNamespace:
        rng = np.random.default_rng([11, i])
        length = self.shape.seq_length
        tokens = rng.integers(1, self.shape.vocab_size, length + 1)
        mask, starts = rng.random(length) > 0.3, np.zeros(length, dtype=np.int64)
        used = length - 2 if i % 2 else None
        if used is not None:
            tokens[used:], mask[used - 1 :], starts[used:] = self.padding, False, used
        return SimpleNamespace(tokens=tokens, loss_mask=mask, starts=starts, used=used)


SAMPLES = 3
SHAPES = {
    "softmax": sparse(),
    "plain_relu": gpt(
        **PLAIN | {"router_normalize": False, "expert_ffn_size": 5, "dense_layers": [1]},
        activation="relu",
    ),
    "sigmoid_groups": sparse(**DEEPSEEK, num_layers=3),
    "gated_share": sparse(shared_expert_size=7, shared_expert_gate=True, router_score="sigmoid"),
}


def settings(shape: SimpleNamespace, **changes: object) -> SimpleNamespace:
    """Returns a configuration with large losses of the router; `changes`: by name of the key."""
    optim = {
        "name": "sgd",
        "lr": 0.05,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "momentum": 0.9,
        "muon_scale": "match_rms_adamw",
        "clip_grad": 0.0,
        "state": "fp32",
        "ema_decay": None,
        "freeze": [],
        "groups": {},
    }
    moe = {"aux_loss": 0.3, "z_loss": 0.2, "bias_update_rate": 0.05}
    optim, moe = ({k: changes.get(k, v) for k, v in keys.items()} for keys in (optim, moe))
    return SimpleNamespace(
        model=shape,
        optim=SimpleNamespace(**optim),
        loss=SimpleNamespace(label_smoothing=0.0, z_loss=0.0),
        moe=SimpleNamespace(**moe),
        train=SimpleNamespace(batch_schedule=None),
        seed=1,
        global_batch_size=SAMPLES,
    )


def trained(
    shape: SimpleNamespace, steps: int = 1, padding: int = 0, **changes: object
) -> ReferenceRun:
    weights = changes.pop("weights", None) or drawn(ReferenceModel(shape))
    config = settings(shape, **changes)
    return train_reference(config, weights, Padded(shape, padding), steps, torch.float64)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_first_gradients_are_those_of_finite_differences(shape: SimpleNamespace) -> None:
    """Compares gradients of the loss with both losses of the router, which is smooth while no
    choice changes."""
    weights, run = drawn(ReferenceModel(shape)), trained(shape)
    assert run.margin > 1e-4
    parts = ("router.weight", "experts.0.up", "experts.5.down", "shared", "0.attention.q.weight")
    names = [name for name in run.first_gradients if any(part in name for part in parts)]
    assert len(names) >= 4
    generator = torch.Generator().manual_seed(5)
    for name in names:
        direction = torch.randn(weights[name].shape, generator=generator, dtype=torch.float64)
        around = []
        for step in (1e-5, -1e-5):
            moved = trained(shape, weights=weights | {name: weights[name] + step * direction})
            for layer, counts in run.counts[0].items():
                assert torch.equal(moved.counts[0][layer], counts)
            around.append(moved.losses[0] + 0.3 * moved.aux[0] + 0.2 * moved.z[0])
        numeric = (around[0] - around[1]) / 2e-5
        analytic = (run.first_gradients[name] * direction).sum().item()
        assert analytic == pytest.approx(numeric, rel=1e-6, abs=1e-8), name


def in_numpy(
    routed: dict[int, Routing], used: list[int | None]
) -> tuple[dict[int, list[int]], float, float]:
    """Computes counts, auxiliary and z-loss from the logits by loops over sequences, experts and
    tokens."""
    counts, aux, z = {}, 0.0, 0.0
    for layer, routing in routed.items():
        logits, chosen = routing.logits.detach().numpy(), routing.chosen.numpy()
        scores = routing.scores.detach().numpy()
        batch, length, experts = logits.shape
        k = chosen.shape[2]
        counts[layer] = [0] * experts
        squares = []
        for b in range(batch):
            tokens = range(length if used[b] is None else used[b])
            for e in range(experts):
                n = sum(int(chosen[b, t, slot] == e) for t in tokens for slot in range(k))
                share = [scores[b, t, e] / np.sum(scores[b, t]) for t in tokens]
                aux += experts * n / (k * len(tokens)) * np.mean(share) / batch
                counts[layer][e] += n
            squares += [math.log(np.sum(np.exp(logits[b, t]))) ** 2 for t in tokens]
        z += np.mean(squares)
    return counts, aux, z


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_losses_and_counts_are_the_formulas_over_used_tokens(shape: SimpleNamespace) -> None:
    source, weights = Padded(shape), drawn(ReferenceModel(shape))
    routed: dict[int, Routing] = {}
    model = build(shape, weights, torch.float64)
    loss = batch_loss(model, source, 0, SAMPLES, settings(shape).loss, routed=routed)
    used = used_tokens(source, range(SAMPLES))
    assert used == [None, 4, None]
    counts, aux, z = in_numpy(routed, used)
    run = trained(shape)
    assert {layer: n.tolist() for layer, n in run.counts[0].items()} == counts
    assert {sum(n) for n in counts.values()} == {shape.experts_per_token * (6 + 4 + 6)}
    layers = set(range(shape.num_layers)) - set(shape.dense_layers)
    assert counts.keys() == layers
    assert run.aux[0] == pytest.approx(aux, rel=1e-12)
    assert run.z[0] == pytest.approx(z, rel=1e-12)
    assert run.losses[0] == loss.item()  # without both
    without = trained(shape, aux_loss=0.0, z_loss=0.0)
    assert (without.losses, without.aux, without.z) == (run.losses, run.aux, run.z)
    assert without.grad_norms[0] != pytest.approx(run.grad_norms[0], rel=1e-3)


def test_equal_scores_of_all_experts_have_an_auxiliary_loss_of_one() -> None:
    """f is 8/3 for the first three of eight experts, P is 1/8 for all; z is (log 8)²."""
    shape = sparse()
    weights = drawn(ReferenceModel(shape))
    for name in weights:
        if name.endswith("router.weight"):
            weights[name].zero_()
    run = trained(shape, weights=weights)
    assert [n.tolist() for n in run.counts[0].values()] == [[16, 16, 16, 0, 0, 0, 0, 0]] * 2
    assert run.aux[0] == pytest.approx(2.0, rel=1e-14)
    assert run.z[0] == pytest.approx(2 * math.log(8) ** 2, rel=1e-14)
    assert run.margin == 0.0


def test_padding_is_routed_without_any_effect() -> None:
    """Changes the tokens of the padding: choices differ there; losses, counts and gradients are the
    same."""
    shape = SHAPES["sigmoid_groups"]
    first, second = (trained(shape, padding=token, aux_loss=1.0, z_loss=1.0) for token in (0, 5))
    for figures in ("losses", "aux", "z"):
        assert getattr(first, figures) == pytest.approx(getattr(second, figures), rel=1e-13)
    for layer, counts in first.counts[0].items():
        assert torch.equal(counts, second.counts[0][layer])
    for name, gradient in first.first_gradients.items():
        torch.testing.assert_close(gradient, second.first_gradients[name], rtol=1e-13, atol=1e-15)
    model = build(shape, drawn(ReferenceModel(shape)), torch.float64)
    chosen = []
    for token in (0, 5):
        routed: dict[int, Routing] = {}
        batch_loss(model, Padded(shape, token), 0, SAMPLES, routed=routed)
        chosen.append(torch.stack([routing.chosen for routing in routed.values()]))
    assert chosen[0].shape == (2, SAMPLES, 6, 3)
    differs = (chosen[0] != chosen[1]).any(dim=-1).any(dim=0)
    assert differs.nonzero().tolist() == [[1, 4], [1, 5]]
    nothing = balance(routed, [0] * SAMPLES)
    assert (nothing.aux.item(), nothing.z.item()) == (0.0, 0.0)
    assert not torch.stack(list(nothing.counts.values())).any()


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_an_expert_without_tokens_has_a_gradient_of_zero_and_decays(name: str) -> None:
    shape = sparse(router_bias=True, router_score="sigmoid")
    weights = drawn(ReferenceModel(shape))
    weights["layers.1.mlp.router.bias"][2] = -10.0
    run = trained(shape, steps=2, name=name, weights=weights)
    unused = [n for n in weights if n.startswith("layers.1.mlp.experts.2.")]
    assert len(unused) == 3
    assert all(step[1][2] == 0 for step in run.counts)
    for each in unused:
        assert not run.first_gradients[each].any()
        if name == "sgd":  # L2 decay, with momentum
            expected = weights[each] * (0.995 - 0.05 * (0.09 + 0.1 * 0.995))
        else:
            expected = weights[each] * 0.995**2
        torch.testing.assert_close(run.weights[each], expected, rtol=1e-13, atol=0.0)
    assert all(torch.isfinite(values).all() for values in run.weights.values())


def test_muon_takes_each_experts_matrix_and_not_the_routers() -> None:
    """Compares the change of a matrix with the change from its gradient alone, which for AdamW is ±
    lr at first."""
    shape = SHAPES["sigmoid_groups"]
    weights = drawn(ReferenceModel(shape))
    run = trained(shape, name="muon", weight_decay=0.0)
    for name in ("layers.1.mlp.experts.3.up.weight", "layers.2.mlp.shared.down.weight"):
        gradient = run.first_gradients[name]
        u, _, v = torch.linalg.svd(gradient, full_matrices=False)
        change = u.T @ (weights[name] - run.weights[name]) @ v.T
        largest = max(gradient.shape) ** 0.5 * 0.2 * 0.05
        assert (change.diagonal() / largest).abs().max() < 1.3
        torch.testing.assert_close(change, change.diagonal().diag(), rtol=0, atol=1e-10)
    for name in ("layers.1.mlp.router.weight", "layers.2.mlp.router.weight"):
        gradient = run.first_gradients[name]
        expected = 0.05 * gradient / (gradient.abs() + 1e-8)  # `eps` of the settings
        torch.testing.assert_close(weights[name] - run.weights[name], expected)


def test_the_bias_moves_towards_equal_counts_after_each_step() -> None:
    shape = SHAPES["sigmoid_groups"]
    weights = drawn(ReferenceModel(shape))
    run = trained(shape, steps=3)
    assert run.biases.keys() == {"layers.1.mlp.router.bias", "layers.2.mlp.router.bias"}
    assert not run.biases.keys() & run.weights.keys()
    for layer in (1, 2):
        name = f"layers.{layer}.mlp.router.bias"
        expected = weights[name].clone()
        for step in run.counts:
            total = int(step[layer].sum())
            for e, n in enumerate(step[layer].tolist()):
                expected[e] += 0.05 * ((8 * n < total) - (8 * n > total))
        torch.testing.assert_close(run.biases[name], expected, rtol=0, atol=1e-15)
        assert not torch.equal(run.biases[name], weights[name])
    still = trained(shape, steps=3, bias_update_rate=0.0)
    assert all(torch.equal(still.biases[name], weights[name]) for name in still.biases)
    assert still.losses[0] == run.losses[0] and still.losses[1] != run.losses[1]


def test_the_bias_starts_at_zero_where_none_is_given() -> None:
    shape = SHAPES["sigmoid_groups"]
    weights = drawn(ReferenceModel(shape))
    without = {n: w for n, w in weights.items() if not n.endswith("router.bias")}
    zeros = {n: torch.zeros_like(w) for n, w in weights.items() if n not in without}
    runs = [trained(shape, weights=given) for given in (without, without | zeros)]
    assert runs[0].losses == runs[1].losses
    assert all(torch.equal(bias, runs[1].biases[n]) for n, bias in runs[0].biases.items())
    with pytest.raises(RuntimeError, match=r"router\.weight"):
        trained(shape, weights={n: w for n, w in weights.items() if "1.mlp.router.w" not in n})


def test_a_step_that_is_not_finite_leaves_the_bias() -> None:
    shape = SHAPES["sigmoid_groups"]
    weights = drawn(ReferenceModel(shape))
    weights["head.weight"][0, 0] = math.inf
    run = trained(shape, weights=weights)
    assert not math.isfinite(run.grad_norms[0])
    assert all(torch.equal(bias, weights[name]) for name, bias in run.biases.items())


def test_a_dense_model_has_no_counts_no_losses_of_routers_and_no_margin() -> None:
    dense = trained(llama(), steps=2)
    assert (dense.counts, dense.aux, dense.z) == ([{}, {}], [0.0, 0.0], [0.0, 0.0])
    assert (dense.biases, dense.margin) == ({}, math.inf)
    again = trained(sparse(dense_layers=[0, 1]), steps=2)
    assert again.losses == dense.losses and again.grad_norms == dense.grad_norms
