"""Tests a run that resumes with another global batch: its length, its learning rate, its last
step."""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from parallel3d.checkpoint.checkpoints import to_go
from parallel3d.cli.continued import GivenKeys, continued
from parallel3d.config.fields import with_values
from parallel3d.config.length import Length, clock_of
from parallel3d.errors import UserError
from parallel3d.optim.optimizer import learning_rate
from parallel3d.run.directory import (
    check_run,
    last_config,
    left_out,
    make_run_directory,
    save_config,
)
from parallel3d.run_config import Config, check_config

SEQUENCE = 64
WINDOWS = 7000  # number of samples of an epoch

Batch = int | dict[int, int]  # sizes by samples: train.batch_schedule


class Case(NamedTuple):
    """The life of a run: (batch, steps done with it) for each start but the last, then `last`."""

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
    # budget, (batch, steps done with it) …, new batch, schedule
    Case(T, ((8, 745),), 16, COSINE),
    Case(T, ((8, 745),), 32, COSINE),
    Case(T, ((8, 745),), 4, COSINE),
    Case(T, ((8, 745),), 8, COSINE),
    Case(T, ((8, 1),), 16, COSINE),
    Case(T, ((8, 10),), 16, COSINE),  # within the warm-up
    Case(T, ((8, 20),), 16, COSINE),
    Case(T, ((8, 1999),), 16, COSINE),
    Case(T, ((8, 1999),), 1, COSINE),
    Case(T, ((8, 745),), 24, COSINE),  # a batch that does not divide the rest
    Case(T, ((8, 745),), 7, COSINE),
    Case(T, ((8, 745),), 1000, COSINE),
    Case(T, ((8, 745),), 20000, COSINE),  # one step is left
    Case(T, ((64, 100),), 8, COSINE),
    Case(T, ((64, 100),), 63, COSINE),
    Case(T, ((8, 100), (16, 400)), 4, COSINE),
    Case(T, ((8, 100), (16, 400), (4, 600)), 32, COSINE),
    Case(T, ((8, 100), (16, 400), (8, 401)), 8, COSINE),  # the batch is the first one again
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
    Case(T, ((8, 745),), {0: 4, 100: 16}, COSINE),  # the earlier steps were different
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
    if key == "epochs":  # `loader.with_length` does the same
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
    """Returns all steps of a run over its starts: samples read after each, and its rate."""

    samples: list[int]
    rates: list[float]
    length: Length


def lived(case: Case) -> Life:
    """Goes through the starts as the trainer does, with the clock in a checkpoint's JSON."""
    samples, rates, read, clock = [], [], 0, None
    for batch, until in [*case.starts, (case.last, None)]:
        config = config_of(case, batch)
        length = config.planned_length.after(len(samples), read, clock)
        for step in range(len(samples) + 1, (length.last_step if until is None else until) + 1):
            read += config.batch_sizes.at(read)
            samples.append(read)
            rates.append(learning_rate(config.optim, length.end, length.place(step)))
        kept = {"steps": len(samples), "consumed_samples": read}
        kept["clock"] = length.clock_at(len(samples), read)
        clock = clock_of(json.loads(json.dumps(kept)), dataclasses.asdict(config))
    return Life(samples, rates, length)


def planned(case: Case) -> Life:
    """Returns the life of the run if its first start had not ended."""
    first = case.starts[0][0] if case.starts else case.last
    return lived(case._replace(starts=(), last=first))


@pytest.mark.nightly
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


@pytest.mark.nightly
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
def test_a_run_with_an_unchanged_batch_has_the_rates_of_a_single_start(case: Case) -> None:
    config = config_of(case, case.last)
    steps = range(1, config.train_steps + 1)
    # Equal bit for bit.
    assert lived(case).rates == [learning_rate(config.optim, len(steps), step) for step in steps]


def test_a_checkpoint_without_a_clock_resumes() -> None:
    progress = {"steps": 745, "consumed_samples": 745 * 8}
    there = dataclasses.asdict(config_of(CASES[0], 8))
    clock = clock_of(progress, there)
    assert clock is not None and clock.place(745 * 8) == 745
    # The batch had changed and the batches of earlier steps are unknown, but the rate does not
    # jump.
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
def test_a_nonsensical_clock_is_ignored(clock: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        clock_of({"steps": 7, "consumed_samples": 56, "clock": clock}, {})


def make_run(runs: Path, name: str, **keys: object) -> Config:
    config = check_config(with_values(Config(run=name, runs_dir=str(runs)), keys))
    make_run_directory(config)
    return config


@pytest.mark.slow
def test_a_run_without_a_checkpoint_may_start_over_with_any_keys(tmp_path: Path) -> None:
    config = make_run(tmp_path, "a")
    other = check_config(with_values(config, {"seed": 9, "model.num_layers": 3}))
    check_run(other, may_resume=True)
    (tmp_path / "a" / "checkpoints" / "step-00000005").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot resume with another configuration: model"):
        check_run(other, may_resume=True)


@pytest.mark.parametrize(
    ("has_begun", "typed", "taken"),
    [
        (True, {"init_from": "old"}, "old@175"),  # the step that was chosen at first
        (False, {"init_from": "old"}, "old"),  # the new choice
        (False, {}, "old@175"),
        (True, {"init_from": "old@9"}, "old@9"),  # a later check refuses it
    ],
)
def test_a_resumed_run_keeps_its_source(
    has_begun: bool, typed: dict[str, object], taken: str
) -> None:
    there = check_config(Config(run="n1", init_from="old@175"), own_samples=True)
    here = with_values(Config(run="n1"), typed)
    config, _ = continued(here, there, GivenKeys({*typed}, set()), None, has_begun=has_begun)
    assert config.init_from == taken


def test_a_value_of_an_older_version_is_refused_unless_overridden() -> None:
    there, given = Config(run="a"), GivenKeys(set(), set())
    there.ddp.comm_hook = "powersgd"
    with pytest.raises(UserError) as refused:
        continued(Config(run="a"), there, given, None)
    assert str(refused.value) == (
        "run=a, at its last start: ddp.comm_hook=powersgd: powersgd is no longer a value of "
        "ddp.comm_hook; the nearest is ddp.comm_hook=bf16."
    )
    typed = with_values(Config(run="a"), {"ddp.comm_hook": "bf16"})
    config, _ = continued(typed, there, GivenKeys({"ddp.comm_hook"}, set()), None)
    assert config.ddp.comm_hook == "bf16"


def test_a_copied_run_has_the_name_of_its_folder() -> None:
    there = check_config(Config(run="a", seed=5), own_samples=True)
    config, line = continued(Config(run="b"), there, GivenKeys(set(), set()), None)
    assert config.run == "b" and line is not None and line.startswith("run=b: values kept")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("", None),
        ("trace: false\n", None),
        ("trace: true\n", "trace=true (now schedule.timeline)"),
        ("tensor_parallel:\n  symmetric_memory: true\n", "tensor_parallel.symmetric_memory=true ("),
        ("topology:\n  width: 80\n", None),  # options of another command
        ("ddp:\n  powersgd_rank: 4\n  powersgd_start: 10\n", None),  # not typed by the user
        ("ddp:\n  bucket_order: model\n", None),
        ("ddp:\n  bucket_order: measured\n", "ddp.bucket_order=measured (buckets are in "),
        ("train:\n  noise_scale: false\n", None),
        ("train:\n  noise_scale: true\n", "train.noise_scale=true (compare the losses of short "),
        ("ddp:\n  powersgd_rank: 2\n", "ddp.powersgd_rank=2 (PowerSGD is gone, and ddp.comm_hook="),
    ],
)
def test_removed_keys_of_an_old_configuration_are_left_out(
    tmp_path: Path, keys: str, said: str | None
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"run: a\nseed: 4\n{keys}")
    assert last_config(folder).seed == 4
    (folder / "config-2.yaml").write_text("tp: 2\nmodel: {")  # torn by a crash
    line = left_out(folder)
    assert line is None if said is None else line is not None and said in line
    assert said is None or str(line).startswith("run=a: keys that this version no longer has ")


@pytest.mark.slow
def test_the_last_start_is_the_last_one_that_reached_a_step(tmp_path: Path) -> None:
    """A refused start has left a newer configuration."""
    config = make_run(tmp_path, "a")
    folder = tmp_path / "a"
    save_config(with_values(config, {"optim.lr": 0.5}), folder, "config-2.yaml")
    assert last_config(folder).optim.lr == 0.5  # the record is missing
    start = {"first_step": 1, "started": "2026-11-27T17:00:00+00:00"}
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    assert last_config(folder).optim.lr == 0.5  # written by an older version
    lines = [json.dumps({**start, "config": "config.yaml"}), '{"account": 1, "step": 3}', "{torn"]
    (folder / "starts.jsonl").write_text("\n".join(lines))
    assert last_config(folder).optim.lr == config.optim.lr


def test_the_resume_line_has_the_steps_done_and_remaining() -> None:
    words = []
    for case, batch in ((CASES[0], 16), (Case(S, (), 16), 16), (Case(T, (), 16), GROWS)):
        config = config_of(case, batch)
        steps, samples = 745, config_of(case, GROWS).batch_sizes.samples(745)
        samples = samples if batch == GROWS else 745 * 8
        length, sizes = config.planned_length.after(steps, samples), config.batch_sizes
        words.append(to_go(length, sizes, config.model, steps, samples))
    assert words == [
        "381,440 of 1,024,000 tokens are done, 628 steps of 16 sequences to go",
        "745 of 2,000 steps are done, 1,255 steps of 16 sequences to go",
        "190,720 of 1,024,000 tokens are done, 1,318 steps of 4 to 16 sequences to go",
    ]
