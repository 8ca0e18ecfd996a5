"""A run that goes on with another global batch: its length, its learning rate, its last step."""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from parallel3d.config.length import Length, clock_of
from parallel3d.config.schema import Config
from parallel3d.optim import learning_rate

SEQUENCE = 64
WINDOWS = 7000  # samples of an epoch

Batch = int | dict[int, int]  # sizes by samples: train.batch_schedule


class Case(NamedTuple):
    """One life of a run: (batch, steps done with it) for each start but the last, then `last`."""

    budget: str  # KEY=VALUE of train
    starts: tuple[tuple[Batch, int], ...]
    last: Batch
    optim: Mapping[str, object] = {}


COSINE = {"lr_warmup_steps": 20}
FRACTION = {"lr_warmup_fraction": 0.02}
LINEAR = {"lr_decay_style": "linear", "lr_warmup_steps": 50}
WSD = {"lr_decay_style": "wsd", "lr_warmup_fraction": 0.01, "wsd_decay_fraction": 0.2}
WSD_STEPS = {"lr_decay_style": "wsd", "lr_warmup_steps": 10, "wsd_decay_steps": 300}
ROOT = {"lr_decay_style": "wsd", "wsd_decay_fraction": 0.1, "wsd_decay_style": "minus_sqrt"}
MEGATRON = {"lr_decay_style": "wsd", "wsd_decay_fraction": 0.3, "wsd_decay_style": "exponential"}
WHOLE = {"lr_decay_steps": 2000}
GROWS = {0: 4, 4000: 8, 9000: 16}

T = "tokens=1024000"  # 16,000 samples: 2,000 steps of 8
E = "epochs=0.5"  # 3,500 samples
S = "steps=2000"

CASES = [
    # budget, (batch, steps done) …, new batch, schedule
    Case(T, ((8, 745),), 16, COSINE),
    Case(T, ((8, 745),), 32, COSINE),
    Case(T, ((8, 745),), 4, COSINE),
    Case(T, ((8, 745),), 8, COSINE),
    Case(T, ((8, 1),), 16, COSINE),
    Case(T, ((8, 10),), 16, COSINE),  # within the warm-up
    Case(T, ((8, 20),), 16, COSINE),
    Case(T, ((8, 1999),), 16, COSINE),
    Case(T, ((8, 1999),), 1, COSINE),
    Case(T, ((8, 745),), 24, COSINE),  # divides nothing
    Case(T, ((8, 745),), 7, COSINE),
    Case(T, ((8, 745),), 1000, COSINE),
    Case(T, ((8, 745),), 20000, COSINE),  # one step
    Case(T, ((64, 100),), 8, COSINE),
    Case(T, ((64, 100),), 63, COSINE),
    Case(T, ((8, 100), (16, 400)), 4, COSINE),
    Case(T, ((8, 100), (16, 400), (4, 600)), 32, COSINE),
    Case(T, ((8, 100), (16, 400), (8, 401)), 8, COSINE),  # and back
    Case(T, ((8, 100), (8, 300), (8, 400)), 8, COSINE),
    Case(T, ((8, 745),), 16, FRACTION),
    Case(T, ((8, 20),), 32, FRACTION),
    Case(T, ((8, 39),), 32, FRACTION),
    Case(T, ((8, 745),), 4, LINEAR),
    Case(T, ((8, 30),), 64, LINEAR),
    Case(T, ((8, 745),), 32, WSD),
    Case(T, ((8, 1599),), 32, WSD),
    Case(T, ((8, 1700),), 32, WSD),  # within the decay
    Case(T, ((8, 1700),), 4, WSD),
    Case(T, ((8, 1700), (16, 1750)), 4, WSD),
    Case(T, ((8, 745),), 32, WSD_STEPS),
    Case(T, ((8, 1850),), 16, WSD_STEPS),
    Case(T, ((8, 1850),), 4, WSD_STEPS),
    Case(T, ((8, 745),), 16, ROOT),
    Case(T, ((8, 1900),), 32, ROOT),
    Case(T, ((8, 745),), 16, MEGATRON),
    Case(T, ((8, 1700),), 5, MEGATRON),
    Case(T, ((8, 745),), 16, WHOLE),
    Case(T, ((8, 745),), 24, WHOLE),
    Case(T, ((GROWS, 500),), GROWS, COSINE),
    Case(T, ((GROWS, 500),), 16, COSINE),
    Case(T, ((GROWS, 1200),), 4, COSINE),
    Case(T, ((GROWS, 1700),), 32, WSD),
    Case(T, ((8, 745),), {0: 8, 8000: 16, 12000: 32}, COSINE),
    Case(T, ((8, 745),), {0: 4, 100: 16}, COSINE),  # its past was another
    Case(T, ((GROWS, 500),), {0: 4, 4000: 8, 9000: 32}, COSINE),
    Case(T, ((GROWS, 500), (16, 600)), 8, WSD),
    Case("tokens=1e6", ((8, 745),), 16, COSINE),
    Case("tokens=1000001", ((8, 745),), 16, COSINE),
    Case("tokens=64", (), 16, {}),
    Case(T, (), 8, COSINE),
    Case(T, (), GROWS, COSINE),
    Case(E, ((64, 20),), 32, FRACTION),
    Case(E, ((64, 55),), 32, FRACTION),  # finished: 3,520 samples
    Case(E, ((64, 55),), 128, FRACTION),
    Case(E, ((7, 200), (70, 210)), 3, WSD),
    Case("epochs=1", ((16, 200),), 48, COSINE),
    Case("epochs=2.5", ((16, 200),), 4, COSINE),
    Case(S, ((8, 745),), 16, COSINE),
    Case(S, ((8, 745), (16, 900)), 4, WSD),
    Case(S, ((8, 2000),), 4, WSD),
    Case(S, ((GROWS, 900),), GROWS, LINEAR),
]


def config_of(case: Case, batch: Batch) -> Config:
    config = Config()
    key, _, words = case.budget.partition("=")
    train = {"tokens": float(words)} if key == "tokens" else {"steps": int(float(words))}
    if key == "epochs":  # as `loader.with_length` has it
        train = {"tokens": float(words) * WINDOWS * SEQUENCE}
    last = batch if isinstance(batch, int) else list(batch.values())[-1]
    train["batch_schedule"] = None if isinstance(batch, int) else batch
    return dataclasses.replace(
        config,
        global_batch_size=last,
        model=dataclasses.replace(config.model, seq_length=SEQUENCE),
        train=dataclasses.replace(config.train, **train),
        optim=dataclasses.replace(config.optim, lr=1e-3, min_lr=1e-5, **case.optim),
    )


class Life(NamedTuple):
    """All steps of a run over its starts: samples read after each, and its rate."""

    samples: list[int]
    rates: list[float]
    length: Length


def lived(case: Case) -> Life:
    """Goes through the starts as the trainer does, with the clock in a checkpoint's JSON."""
    samples, rates, read, clock = [], [], 0, None
    for batch, until in [*case.starts, (case.last, None)]:
        config = config_of(case, batch)
        length = Length.of_run(config, len(samples), read, clock)
        for step in range(len(samples) + 1, (length.last_step if until is None else until) + 1):
            read += config.batch_sizes.at(read)
            samples.append(read)
            rates.append(learning_rate(config.optim, length.end, length.place(step)))
        kept = {"steps": len(samples), "consumed_samples": read}
        kept["clock"] = length.clock_at(len(samples), read)
        clock = clock_of(json.loads(json.dumps(kept)), dataclasses.asdict(config))
    return Life(samples, rates, length)


def planned(case: Case) -> Life:
    """Returns the life that the first start would have had to the end."""
    first = case.starts[0][0] if case.starts else case.last
    return lived(case._replace(starts=(), last=first))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_ends_where_its_length_says_with_its_rate_at_the_end(case: Case) -> None:
    life, config = lived(case), config_of(case, case.last)
    if config.budget is None:
        assert len(life.samples) == 2000
    else:  # rounded up to a step
        before = life.samples[-2] if len(life.samples) > 1 else 0
        assert before < config.budget <= life.samples[-1]
    assert life.length.last_step == len(life.samples)
    assert life.length.samples == life.samples[-1]
    assert len(life.rates) == 1 or life.rates[-1] == pytest.approx(1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.starts], ids=str)
def test_the_rate_is_what_the_first_start_would_have_had_at_that_sample(case: Case) -> None:
    life, first = lived(case), planned(case)
    if life.length.budget is not None:
        places = [bisect.bisect_left(first.samples, read) for read in life.samples]
    else:
        places = list(range(len(life.samples)))
    rates = [1e-5, *first.rates, first.rates[-1]]
    for place, rate in zip(places, life.rates, strict=True):
        near = rates[place : place + 3]
        assert min(near) - 1e-12 <= rate <= max(near) + 1e-12, place


@pytest.mark.parametrize(
    "case", [c for c in CASES if all(batch == c.last for batch, _ in c.starts)], ids=str
)
def test_a_run_whose_batch_stays_has_the_rates_of_one_start(case: Case) -> None:
    config = config_of(case, case.last)
    steps = range(1, config.train_steps + 1)
    # Bit for bit.
    assert lived(case).rates == [learning_rate(config.optim, len(steps), step) for step in steps]


def test_a_checkpoint_from_before_clocks_goes_on() -> None:
    progress = {"steps": 745, "consumed_samples": 745 * 8}
    there = dataclasses.asdict(config_of(CASES[0], 8))
    clock = clock_of(progress, there)
    assert clock is not None and clock.place(745 * 8) == 745
    # Its batch had changed: what its steps were before is not known, and its rate does not jump.
    changed = clock_of(progress | {"consumed_samples": 9999}, there)
    assert changed is not None and changed.place(9999) == 745
    assert clock_of({"steps": 0, "consumed_samples": 0}, there) is None


@pytest.mark.parametrize(
    "clock",
    [
        {"steps": 0, "samples": 0, "sizes": []},
        {"steps": 0, "samples": 0, "sizes": [[5, 8]]},
        {"steps": 0, "samples": 0, "sizes": [[0, 0]]},
        {"steps": -1, "samples": 0, "sizes": [[0, 8]]},
        {"steps": 0, "samples": 0, "sizes": [[0, 8], [0, 4]]},
        {"steps": 0, "samples": 0, "sizes": 3},
        {"sizes": [[0, 8]]},
        "no clock",
    ],
)
def test_a_clock_that_makes_no_sense_is_no_clock(clock: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        clock_of({"steps": 7, "consumed_samples": 56, "clock": clock}, {})
