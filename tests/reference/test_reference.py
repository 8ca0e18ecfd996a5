"""Tests the reference itself: finite differences, causality, masks, torch's attention and
optimizers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.reference.model import (
    Attention,
    ReferenceModel,
    frequencies,
    objective_losses,
    rotate,
    token_losses,
)
from tests.reference.train import batch_loss, train_reference


def gpt(**changes: object) -> SimpleNamespace:
    """Returns a GPT small enough for finite differences."""
    shape = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_query_groups": None,
        "ffn_hidden_size": 12,
        "seq_length": 6,
        "max_position_embeddings": None,
        "vocab_size": 11,
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "position_embedding": "learned",
        "rotary_percent": 1.0,
        "rotary_base": 100.0,
        "rope_scaling_factor": 1.0,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
        "rope_original_length": 40,
        "head_dim": None,
        "qk_norm": False,
        "attention_bias": None,
        "activation": "gelu",
        "bias": True,
        "tie_embeddings": True,
        "dropout": 0.0,
        "num_experts": 0,
    }
    return SimpleNamespace(**(shape | changes))


def llama(**changes: object) -> SimpleNamespace:
    """Returns a Llama with grouped queries."""
    kind = {
        "norm": "rmsnorm",
        "position_embedding": "rope",
        "activation": "swiglu",
        "bias": False,
        "tie_embeddings": False,
        "num_query_groups": 2,
    }
    return gpt(**(kind | changes))


class Source:
    """Returns random tokens; the mask drops about a third, differently in each sample."""

    def __init__(self, shape: SimpleNamespace) -> None:
        self.shape = shape

    def sample(self, i: int) -> SimpleNamespace:
        rng = np.random.default_rng([7, i])
        length = self.shape.seq_length
        return SimpleNamespace(
            tokens=rng.integers(0, self.shape.vocab_size, length + 1),
            loss_mask=rng.random(length) > 0.3,
        )


def weights_of(shape: SimpleNamespace) -> dict[str, Tensor]:
    """Sets large random weights in fp64, so that every path matters."""
    generator = torch.Generator().manual_seed(3)
    model = ReferenceModel(shape).double()
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4
        for name, p in model.named_parameters()
    }


def model_of(shape: SimpleNamespace) -> ReferenceModel:
    model = ReferenceModel(shape).double()
    model.load_state_dict(weights_of(shape))
    return model


SHAPES = {
    "gpt": gpt(),
    "gpt_relu_untied": gpt(activation="relu", tie_embeddings=False, max_position_embeddings=9),
    "llama": llama(),
    "llama_half_rotary_bias": llama(rotary_percent=0.5, hidden_size=16, bias=True),
    "no_positions": gpt(position_embedding="none"),
    "gpt_tanh": gpt(activation="gelu_tanh"),
    "normed_wide_scaled": llama(
        qk_norm=True, head_dim=6, attention_bias="qkv", rope_scaling_factor=8.0
    ),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_gradients_are_those_of_finite_differences(shape: SimpleNamespace) -> None:
    model, source = model_of(shape), Source(shape)
    loss = batch_loss(model, source, 0, 3)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    generator = torch.Generator().manual_seed(5)
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        around = []
        with torch.no_grad():
            for step in (1e-5, -1e-5):
                parameter.add_(direction, alpha=step)
                around.append(batch_loss(model, source, 0, 3).item())
                parameter.sub_(direction, alpha=step)
        numeric = (around[0] - around[1]) / 2e-5
        analytic = (gradient * direction).sum().item()
        assert analytic == pytest.approx(numeric, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_token_changes_its_own_logits_and_later_ones_only(shape: SimpleNamespace) -> None:
    model = model_of(shape)
    tokens = torch.as_tensor(Source(shape).sample(0).tokens[None, :-1])
    changed = tokens.clone()
    changed[0, 3] = (changed[0, 3] + 1) % shape.vocab_size
    difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
    assert (difference[:3] == 0).all()
    assert (difference[3:] > 0).all()


def test_masked_labels_count_neither_in_the_sum_nor_in_the_number() -> None:
    shape = gpt()
    model, source = model_of(shape), Source(shape)
    samples = [source.sample(i) for i in range(3)]
    total, count = 0.0, 0
    for sample in samples:
        logits = model(torch.as_tensor(sample.tokens[None, :-1]))[0]
        for t in np.flatnonzero(sample.loss_mask):
            total -= logits[t].log_softmax(-1)[sample.tokens[t + 1]].item()
            count += 1
    assert 0 < count < 3 * shape.seq_length
    assert batch_loss(model, source, 0, 3).item() == pytest.approx(total / count, rel=1e-13)
    mean_of_means = np.mean([batch_loss(model, source, i, 1).item() for i in range(3)])
    assert mean_of_means != pytest.approx(total / count, rel=1e-6)


def test_token_losses_are_torchs_cross_entropy() -> None:
    logits, labels = torch.randn(2, 3, 7, dtype=torch.float64), torch.randint(0, 7, (2, 3))
    theirs = torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none")
    torch.testing.assert_close(token_losses(logits, labels), theirs, rtol=1e-13, atol=1e-13)


def test_smoothed_losses_are_torchs_and_z_loss_is_the_log_of_the_sum_squared() -> None:
    logits, labels = torch.randn(2, 3, 7, dtype=torch.float64), torch.randint(0, 7, (2, 3))
    theirs = torch.nn.functional.cross_entropy(
        logits.mT, labels, reduction="none", label_smoothing=0.3
    )
    torch.testing.assert_close(objective_losses(logits, labels, 0.3, 0.0), theirs)
    with_z = theirs + 0.1 * logits.exp().sum(-1).log().square()
    torch.testing.assert_close(objective_losses(logits, labels, 0.3, 0.1), with_z)


def test_rope_scores_depend_on_the_distance_alone() -> None:
    """With one query and one key vector at every position, the score is constant along each
    diagonal."""
    shape = llama(rotary_base=10000.0)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 10, 8)
    scores = (rotate(q, shape) @ rotate(k, shape).mT)[0, 0]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])
    assert (scores[0, 1:] - scores[0, :-1]).abs().min() > 1e-6


def test_rope_pairs_d_with_d_plus_half_and_leaves_the_rest() -> None:
    shape = llama(rotary_percent=0.7, rotary_base=100.0)
    x = torch.zeros(1, 1, 4, 6, dtype=torch.float64)
    x[..., 0], x[..., 5] = 1, 7
    turned = rotate(x, shape)[0, 0]  # rot = int(4.2) = 4: pairs (0, 2) and (1, 3)
    position = torch.arange(4, dtype=torch.float64)
    torch.testing.assert_close(turned[:, 0], position.cos())
    torch.testing.assert_close(turned[:, 2], position.sin())
    assert (turned[:, 5] == 7).all() and (turned[:, [1, 3, 4]] == 0).all()
    x[..., 0], x[..., 1] = 0, 1
    slower = rotate(x, shape)[0, 0]
    torch.testing.assert_close(slower[:, 3], (position / 100**0.5).sin())


def test_scaled_rope_slows_long_waves_keeps_short_ones_and_mixes_between() -> None:
    """With waves of 2π, 2π·10 = 62.8 and 2π·100 positions, the limits are 10 and 40; then, with 40
    and 160, the second wave lies in between."""
    shape = llama(rotary_base=1000.0, rope_scaling_factor=8.0)
    assert frequencies(shape, 3, 1) == pytest.approx([1, 0.1 / 8, 0.01 / 8])
    shape.rope_original_length = 160
    smooth = (160 / (20 * math.pi) - 1) / 3
    assert frequencies(shape, 3, 1)[1] == pytest.approx(0.1 * (smooth + (1 - smooth) / 8))


def test_norms_of_heads_see_each_head_alone() -> None:
    shape = llama(qk_norm=True, position_embedding="none", hidden_size=16)
    attention = Attention(shape).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    expected = attention(x)
    with torch.no_grad():  # a norm removes a head's own scale
        attention.q.weight[4:8] *= 1000
    torch.testing.assert_close(attention(x), expected, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        attention.q_norm.weight *= 3
    assert (attention(x) - expected).abs().max() > 1e-3


def test_grouped_attention_is_torchs_attention_with_repeated_heads() -> None:
    shape = llama(
        hidden_size=32, num_attention_heads=8, num_query_groups=2, position_embedding="none"
    )
    torch.manual_seed(1)
    attention = Attention(shape).double()
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    q, k, v = (
        part(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        for part in (attention.q, attention.k, attention.v)
    )
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1), is_causal=True
    )
    theirs = attention.out(theirs.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), theirs)


@pytest.mark.parametrize("clip_grad", [0.0, 0.05])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_five_steps_are_those_of_torchs_optimizers(name: str, clip_grad: float) -> None:
    shape = llama()
    optim = SimpleNamespace(
        name=name,
        lr=0.05,
        weight_decay=0.1,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        momentum=0.9,
        clip_grad=clip_grad,
        state="fp32",
        ema_decay=None,
        freeze=[],
        groups={},
    )
    loss = SimpleNamespace(label_smoothing=0.0, z_loss=0.0)
    train = SimpleNamespace(batch_schedule=None)
    parts = {"model": shape, "optim": optim, "loss": loss, "train": train}
    config = SimpleNamespace(**parts, seed=1, global_batch_size=4)
    rates = [0.05, 0.04, 0.03, 0.02, 0.01]
    ours = train_reference(config, weights_of(shape), Source(shape), 5, torch.float64, rates)
    model = model_of(shape)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if name == "adamw":
        theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    else:
        theirs = torch.optim.SGD(groups, lr=1.0, momentum=0.9, weight_decay=0.1)
    for step, rate in enumerate(rates):
        theirs.zero_grad()
        loss = batch_loss(model, Source(shape), 4 * step, 4)
        loss.backward()
        limit = clip_grad if clip_grad > 0 else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        assert ours.losses[step] == pytest.approx(loss.item(), rel=1e-12)
        assert ours.grad_norms[step] == pytest.approx(norm.item(), rel=1e-12)
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(
            ours.weights[parameter_name], parameter.detach(), rtol=1e-10, atol=1e-13
        )
        assert not torch.equal(ours.weights[parameter_name], weights_of(shape)[parameter_name])
