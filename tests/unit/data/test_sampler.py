"""Tests that the order of samples has each window once per epoch, equal for every caller."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest

from parallel3d.data.sampler import Sampler, document_starts, permuted

EOT = 256


def key(seed: int) -> bytes:
    return hashlib.blake2b(str(seed).encode(), digest_size=32).digest()


def sampler(tokens: int = 1001, seq: int = 10, seed: int = 7, **kwargs: bool) -> Sampler:
    settings = {"shuffle": True, "eod_mask_loss": False} | kwargs
    return Sampler(np.arange(tokens, dtype="<u2"), seq, seed, eot=EOT, **settings)


def test_permutation_is_a_bijection() -> None:
    for n in (*range(1, 70), 99, 100, 101, 255, 256, 257, 1000, 4095, 4097):
        for seed in range(3 if n < 1000 else 1):
            images = sorted(permuted(x, n, key(seed)) for x in range(n))
            assert images == list(range(n)), (n, seed)


@pytest.mark.parametrize("n", [2**31 + 11, 2**40 - 1, 2**63 + 5])
def test_permutation_of_huge_ranges_stays_in_range_without_repeats(n: int) -> None:
    images = {permuted(x, n, key(1)) for x in (*range(50), *range(n - 50, n))}
    assert len(images) == 100 and min(images) >= 0 and max(images) < n
    assert max(images) > n // 2 > min(images)


@pytest.mark.parametrize("n", [2, 3, 5, 12, 40])
def test_permutation_sends_a_window_anywhere_with_equal_chance(n: int) -> None:
    draws = 200 * n
    counts = Counter(permuted(n // 2, n, key(seed)) for seed in range(draws))
    chi_square = sum((counts[x] - 200) ** 2 / 200 for x in range(n))
    # Chi-square with n - 1 degrees of freedom: mean n - 1, variance 2(n - 1); five sigmas.
    assert chi_square < (n - 1) + 5 * (2 * (n - 1)) ** 0.5 + 5


def test_each_window_comes_exactly_once_an_epoch_and_epochs_differ() -> None:
    source = sampler()
    assert source.windows == 100
    epochs = [[source.window(e * 100 + i) for i in range(100)] for e in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] != list(range(100))


def test_every_token_but_the_first_is_a_label_once_an_epoch() -> None:
    source = sampler(tokens=1001)
    labels = np.concatenate([source.sample(i).tokens[1:] for i in range(source.windows)])
    assert sorted(labels.tolist()) == list(range(1, 1001))


def test_a_sample_depends_on_seed_and_index_alone() -> None:
    order = [17, 3, 250, 3, 0, 99, 100]
    first = [sampler().sample(i).tokens.tolist() for i in order]
    one = sampler()
    for i in reversed(range(300)):
        one.sample(i)
    assert [one.sample(i).tokens.tolist() for i in order] == first
    assert [sampler(seed=8).sample(i).tokens.tolist() for i in order] != first


def test_without_shuffle_windows_come_in_order_and_start_over() -> None:
    source = sampler(shuffle=False)
    assert [source.window(i) for i in (0, 1, 99, 100, 205)] == [0, 1, 99, 0, 5]
    assert source.sample(2).tokens.tolist() == list(range(20, 31))


@pytest.mark.parametrize(("tokens", "windows"), [(11, 1), (20, 1), (21, 2), (30, 2), (31, 3)])
def test_windows_never_run_past_the_end(tokens: int, windows: int) -> None:
    source = sampler(tokens=tokens, shuffle=False)
    assert source.windows == windows
    assert source.sample(windows - 1).tokens.shape == (11,)


def test_too_few_tokens_for_one_window_are_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 11 tokens, but got 10"):
        sampler(tokens=10)


def test_negative_indices_are_refused() -> None:
    with pytest.raises(IndexError):
        sampler().sample(-1)


def test_mask_is_false_exactly_where_the_input_is_end_of_text() -> None:
    tokens = np.array([1, EOT, 2, 3, EOT, 4, EOT], dtype="<u2")
    masked = Sampler(tokens, 6, 0, shuffle=False, eot=EOT, eod_mask_loss=True)
    sample = masked.sample(0)
    assert sample.tokens.tolist() == tokens.tolist() and sample.tokens.dtype == np.int64
    assert sample.loss_mask.tolist() == [True, False, True, True, False, True]
    plain = Sampler(tokens, 6, 0, shuffle=False, eot=EOT, eod_mask_loss=False)
    assert plain.sample(0).loss_mask.tolist() == [True] * 6
    assert (masked.masks, plain.masks) == (True, False)


@pytest.mark.parametrize("masks", [False, True])
def test_a_document_begins_after_each_end_of_text(masks: bool) -> None:
    """Includes documents that end at once, or begin with the sample's last input."""
    rng = np.random.default_rng(3)
    for tokens in (
        np.array([1, EOT, 2, 3, EOT, EOT, 4], dtype="<u2"),
        np.array([EOT, 1, 2, 3, EOT, 5, EOT], dtype="<u2"),
        np.array([1, 2, 3, 4, 5, EOT, 6], dtype="<u2"),
        *rng.choice([EOT, 7, 8], size=(20, 7)).astype("<u2"),
    ):
        source = Sampler(tokens, 6, 0, False, EOT, masks, document_mask=True)
        sample = source.sample(0)
        expected, begin = [], 0
        for p in range(6):
            begin = p if p and tokens[p - 1] == EOT else begin
            expected.append(begin)
        assert sample.starts.tolist() == expected and sample.starts.dtype == np.int32
        assert sample.loss_mask.all() != (masks and EOT in tokens[:-1])
    assert sampler().sample(0).starts is None


def test_starts_come_from_beginnings_in_any_order() -> None:
    assert document_starts(np.array([5, 2]), 7).tolist() == [0, 0, 2, 2, 2, 5, 5]
    assert document_starts(np.array([], dtype=int), 3).tolist() == [0, 0, 0]
