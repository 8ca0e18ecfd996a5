"""Tests moments in bf16: rounded without bias, by bits that depend on the element and not on its
rank."""

from __future__ import annotations

import torch

from parallel3d.optim.keys import OptimConfig
from parallel3d.optim.optimizer import Optimizer
from parallel3d.parameters.rounding import AT_ONCE, pieces_of, store_rounded
from parallel3d.parameters.segments import ParameterSpan, Segment
from parallel3d.parameters.spec import ParameterSpec, ShardSpec
from tests.reference.rounding import chances, rounded


def stored(values: torch.Tensor, bits: torch.Tensor, half: int = 0) -> torch.Tensor:
    out = torch.empty_like(values, dtype=torch.bfloat16)
    store_rounded(out, values, bits, half)
    return out


def matrix(rows: int, width: int, start: tuple[int, int], name: str = "w") -> ParameterSpec:
    """Returns a shard of 40 rows of 3 · width columns; the local parameter has a row of padding."""
    shard = ShardSpec(name, (40, 3 * width), start, (rows, width))
    return ParameterSpec((rows + 1, width), (shard,), replicated=False)


def segment_of(*spans: ParameterSpan, dtype: torch.dtype = torch.float32) -> Segment:
    flat = torch.zeros(sum(p.numel for p in spans), dtype=dtype)
    return Segment(flat, flat.clone(), flat, list(spans))


def bits_of(segment: Segment, seed: int, update: int) -> torch.Tensor:
    pieces = pieces_of(segment, seed)
    assert [p.start for p in pieces[1:]] == [p.end for p in pieces[:-1]]
    return torch.cat([p.random_bits(update) for p in pieces])


def test_rounding_has_no_bias_and_leaves_bf16_as_it_is() -> None:
    spec = matrix(31, 4000, (9, 4000))
    bits = bits_of(segment_of(ParameterSpan("w", spec, 0, 31 * 4000)), seed=3, update=5)
    assert bits.unique().numel() > 0.99 * bits.numel()
    low, step = 1.0, 2.0**-7  # spacing of bf16's numbers in [1, 2)
    for half in (0, 1):
        for share in (0.25, 0.01, 1 / 3):
            value = torch.full_like(bits, low + share * step, dtype=torch.float32)
            up = (stored(value, bits, half).float() - low) / step
            assert set(up.unique().tolist()) == {0.0, 1.0}
            error = (share * (1 - share) / up.numel()) ** 0.5
            assert abs(up.mean().item() - share) < 4 * error
            assert torch.equal(stored(-value, bits, half), -stored(value, bits, half))
    draws = [(bits >> 16 * half & 0xFFFF).double() for half in (0, 1)]
    halves = torch.corrcoef(torch.stack(draws))[0, 1]
    assert abs(halves) < 4 / bits.numel() ** 0.5  # the bits of the two states are independent
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exact = every[~every.isnan()]
    noise = bits[: exact.numel()]
    assert torch.equal(stored(exact.float(), noise), exact)
    assert torch.equal(stored(exact.double(), noise), exact)


def test_bits_and_rounding_equal_the_reference() -> None:
    """Includes tiny numbers, whose neighbours are equally far, and fp64."""
    generator = torch.Generator().manual_seed(0)
    shape = (40, 30)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-40, 5, shape, generator=generator)
    spec = matrix(40, 30, (0, 0))
    whole = segment_of(ParameterSpan("w", spec, 0, 40 * 30))
    whole_spec = ShardSpec("w", shape, (0, 0), shape)
    whole.spans = [ParameterSpan("w", ParameterSpec(shape, (whole_spec,), False), 0, 1200)]
    bits = bits_of(whole, seed=7, update=2).view(shape)
    for half in (0, 1):
        theirs = rounded(values, chances(shape, 7, 2, "w", half))
        assert torch.equal(stored(values, bits, half).double(), theirs)


def test_bits_follow_the_element_wherever_a_shard_begins() -> None:
    spec, seed, update = matrix(20, 10, (20, 10)), 7, 11
    whole = matrix(40, 30, (0, 0))
    everything = bits_of(segment_of(ParameterSpan("w", whole, 0, 40 * 30)), seed, update)
    mine = everything.view(40, 30)[20:, 10:20]
    vector = ParameterSpec((50,), (ShardSpec("v", (100,), (50,), (50,)),), replicated=False)
    full = ParameterSpec((100,), (ShardSpec("v", (100,), (0,), (100,)),), replicated=False)
    of_vector = bits_of(segment_of(ParameterSpan("v", full, 0, 100)), seed, update)[50:]
    parts = ParameterSpan("w", spec, 13, 150), ParameterSpan("v", vector, 7, 40)
    found = bits_of(segment_of(*parts), seed, update)
    assert torch.equal(found[:150], mine.flatten()[13:163])
    assert torch.equal(found[150:], of_vector[7:47])
    padding = bits_of(segment_of(ParameterSpan("w", spec, 190, 20)), seed, update)
    assert torch.equal(padding[:10], mine.flatten()[190:])
    assert not stored(torch.zeros(20), padding).any()


def test_cutting_large_matrices_into_pieces_does_not_change_bits() -> None:
    rows = 3 * AT_ONCE // 64
    shard = ShardSpec("w", (rows, 64), (0, 0), (rows, 64))
    spec = ParameterSpec((rows, 64), (shard,), replicated=False)
    segment = segment_of(ParameterSpan("w", spec, 5, rows * 64 - 5))
    pieces = pieces_of(segment, 0)
    assert len(pieces) >= 3 and max(p.end - p.start for p in pieces) <= AT_ONCE
    first = bits_of(segment, 0, 1)
    last = bits_of(segment_of(ParameterSpan("w", spec, 64 * (rows - 1), 64)), 0, 1)
    assert torch.equal(first[-64:], last)
    assert not torch.equal(first, bits_of(segment, 0, 2))
    assert not torch.equal(first, bits_of(segment, 1, 1))


def test_a_small_second_moment_grows_and_the_update_uses_unrounded_states() -> None:
    """0.999 times a moment is nearer to the moment than to its neighbour: rounding to the nearest
    would not change it."""
    shape = (64, 100)
    spec = ParameterSpec(shape, (ShardSpec("w", shape, (0, 0), shape),), replicated=False)
    means = {}
    for state in ("fp32", "bf16"):
        segment = segment_of(ParameterSpan("w", spec, 0, 6400))
        optim = OptimConfig(state=state, beta2=0.999, weight_decay=0.0, clip_grad=0.0)
        optimizer = Optimizer(optim, [segment])
        segment.grad.fill_(1.0)
        optimizer.step(0.1, 80.0)
        assert torch.allclose(segment.master, torch.tensor(-0.1), rtol=1e-6)
        segment.grad.zero_()
        for _ in range(200):
            optimizer.step(0.0, 0.0)
        square = optimizer.groups[0].state["exp_avg_sq"][0]
        assert square.dtype == (torch.float32 if state == "fp32" else torch.bfloat16)
        means[state] = square.double().mean().item()
    assert abs(means["bf16"] / means["fp32"] - 1) < 1e-3
