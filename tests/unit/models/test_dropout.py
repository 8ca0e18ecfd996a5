"""Tests masks that are a function of seed, site, sample, head, position and channel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.models.attention import AttentionOptions, causal_attention
from parallel3d.models.dropout import Dropout
from parallel3d.models.layer_inputs import LayerInputs
from tests.reference.dropout import dropped


def samples(*numbers: int) -> LayerInputs:
    return LayerInputs(torch.tensor(numbers))


def test_masks_follow_the_formula() -> None:
    numbers = (0, 7, 2**33 + 5)
    hidden, probabilities = torch.randn(3, 5, 40).double(), torch.rand(3, 2, 5, 5).double() + 1
    for x in (hidden, probabilities):
        ours = Dropout(11, "layers.3.mlp", 0.3)(x, samples(*numbers))
        theirs = dropped(x, numbers, 0.3, 11, "layers.3.mlp")
        torch.testing.assert_close(ours, theirs, rtol=1e-15, atol=0)
    everything = Dropout(11, "embedding", 0.5)(torch.ones(1, 4, 64), samples(3))
    assert set(everything.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("p", [1 - 2**-31, 1 - 2**-33, 1 - 2**-53])
def test_a_probability_next_to_1_drops_everything(p: float) -> None:
    """The number of compared values, 2³¹, does not fit into an int32."""
    x = torch.ones(2, 8, 64, dtype=torch.float64)
    assert not Dropout(1, "a", p)(x, samples(0, 1)).any()


def test_a_parts_mask_is_a_part_of_the_whole_mask() -> None:
    x, numbers = torch.ones(4, 8, 6, 10), samples(4, 5, 6, 7)
    whole = Dropout(1, "a", 0.4)(x, numbers)
    heads = Dropout(1, "a", 0.4, first_head=4)(x[:, 4:], numbers)
    positions = Dropout(1, "a", 0.4, part=1)(x[:, :, 3:], numbers)
    assert torch.equal(heads, whole[:, 4:]) and torch.equal(positions, whole[:, :, 3:])
    assert torch.equal(Dropout(1, "a", 0.4)(x[2:], samples(6, 7)), whole[2:])


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_share_dropped_is_p_everywhere(p: float) -> None:
    """Drops the right share over every index alone, within five standard deviations, and without
    correlation between neighbours along any index."""
    shape, count = (16, 8, 32, 64), 16 * 8 * 32 * 64
    gone = (Dropout(5, "b", p)(torch.ones(shape), samples(*range(16))) == 0).double() - p
    for dim, size in enumerate(shape):
        deviation = (p * (1 - p) * size / count) ** 0.5
        over = gone.mean([d for d in range(4) if d != dim])
        assert over.abs().max() < 5 * deviation
        pairs = gone.narrow(dim, 1, size - 1) * gone.narrow(dim, 0, size - 1)
        assert pairs.mean().abs() < 5 * p * (1 - p) / pairs.numel() ** 0.5


def test_seed_site_and_sample_change_the_mask() -> None:
    x = torch.ones(1, 16, 64)
    base = Dropout(1, "a", 0.5)(x, samples(3))
    for other, number in ((Dropout(2, "a", 0.5), 3), (Dropout(1, "b", 0.5), 3)):
        assert 0.4 < (other(x, samples(number)) == base).float().mean() < 0.6
    assert 0.4 < (Dropout(1, "a", 0.5)(x, samples(4)) == base).float().mean() < 0.6


def test_the_gradient_has_the_same_mask_as_the_value() -> None:
    x = torch.randn(2, 8, 16, requires_grad=True)
    y = Dropout(1, "a", 0.3)(x, samples(0, 1))
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, y.detach() / x.detach())


def test_without_sample_indices_nothing_is_dropped() -> None:
    x = torch.randn(2, 8, 16)
    assert Dropout(1, "a", 0.3)(x, LayerInputs()) is x
    qkv = torch.randn(2, 8, 3 * 16).double()

    def attend(dropout: Dropout | None, inputs: LayerInputs) -> Tensor:
        return causal_attention(qkv, (2, 2, 8), inputs, AttentionOptions(dropout=dropout))

    plain = attend(None, LayerInputs())
    torch.testing.assert_close(attend(Dropout(1, "a", 0.3), LayerInputs()), plain)
    nothing = Dropout(1, "a", 1e-12)  # the path that writes out the probabilities
    torch.testing.assert_close(attend(nothing, samples(0, 1)), plain)


class Copies(TorchDispatchMode):
    """Records the copies between devices inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        sources = {a.device.type for a in args if isinstance(a, Tensor) and a.dim() > 0}
        moves = func.overloadpacket.__name__ in ("_to_copy", "copy_", "_local_scalar_dense")
        if moves and (sources | {args[0].device.type}) != {out.device.type}:
            self.found.append(func)
        return out


@pytest.mark.parametrize("compiled", [False, True])
def test_the_host_copies_nothing_to_the_device(compiled: bool) -> None:
    """The number of the site is an argument of the kernel: a copy would make the host wait."""
    drop = Dropout(1, "a", 0.3)
    x = torch.empty(2, 8, 16, device="meta")
    numbers = torch.empty(2, dtype=torch.int64, device="meta")
    with Copies() as copies:
        if compiled:  # the function that a compiled block calls
            y = torch.ops.parallel3d.dropout(x, numbers, drop.site, None, 0, 0, 0.3)
        else:
            y = drop(x, LayerInputs(numbers))
    assert y.device.type == "meta" and not copies.found
