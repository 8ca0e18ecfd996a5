"""Tests that thousands of configurations, most of them hostile, are accepted or refused in one
sentence.

The first bugs that this found have tests of their own above, with exact answers.
"""

from __future__ import annotations

import resource
import warnings
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.inputs import fuzz_answers as fuzz
from benchmarks.inputs.fuzz_words import Drawn, by_hand, draw
from parallel3d.config.fields import all_keys
from parallel3d.errors import closest, readable
from parallel3d.run_config import Config

COUNT = 600
HUGE = str(2**61 - 1)


@pytest.fixture(scope="module")
def composer() -> fuzz.Composer:
    return fuzz.Composer()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["model=3"], ["model=3 must be one of", "gpt_tiny"]),
        (["precision=[[1]]"], ["precision=[[1]] must be one of", "fp32"]),
        (["logger=${oc.env:NO_SUCH,null}"], ["logger=${oc.env:NO_SUCH,null} must be one of none"]),
        (["tp=" + "9" * 5000], ["tp=999", "…", "whole number of at least 1", "default is tp=1."]),
        (["model.norm_eps=1" + "0" * 400], ["model.norm_eps=1000", "…", "a number above 0"]),
        (["cluster.nodes=1" + "0" * 40], ["cluster.nodes=0x", "fit into 64 bits"]),
        (["~nope"], ["nope is not a key of the configuration"]),
        ([""], ["'' is not of the form KEY=VALUE; the nearest is tp=1."]),
        (
            ["+tp=2"],
            ["+tp=2: tp is always there: it can be neither added nor deleted; the nearest"],
        ),
        (["~"], ["~ is not of the form KEY=VALUE; the nearest is tp=1."]),
        ([".uns_dir=x"], [".uns_dir is not a key of the configuration; the nearest is runs_dir."]),
        (["tp=<<"], ["tp=<<: tp must be a whole number of at least 1; the default is tp=1."]),
        (["run=\x1b[31mred"], ["run=\\x1b[31mred"]),
        (["x" * 5000 + "=1"], ["…", "is not a key of the configuration"]),
        (["tp=${nope:1}"], ["tp=${nope:1}: Unsupported", "tp must be a whole"]),
        (
            ["zero=${oc.env:HOME}"],
            ["zero=${oc.env:HOME}: its value has another type: zero must be"],
        ),
        (
            [f"tp={HUGE}", f"model.hidden_size={HUGE}", f"model.num_attention_heads={HUGE}"],
            ["must divide the rows of the padded vocabulary", "is tp=1,"],
        ),
        (
            ["model.num_layers=4096", "pp=4096", "schedule.layers_per_stage=[1]"],
            ["schedule.layers_per_stage=[1] has 1 entries", "give schedule.layers_per_stage=null"],
        ),
        (
            ["tp=2", "sp=true", "tensor_parallel.chunks=7", "model.seq_length=1000000000000"],
            ["tensor_parallel.chunks=7 must divide", "the nearest is tensor_parallel.chunks=8."],
        ),
        (
            ["zero=2", "dp=1000000000000", "ddp.shard_size=7", "global_batch_size=4000000000000"],
            ["ddp.shard_size=7 must divide dp=1000000000000", "the nearest is ddp.shard_size=8."],
        ),
    ],
)
def test_fuzzed_inputs_that_once_crashed_or_hung_are_refused_in_one_sentence(
    composer: fuzz.Composer, words: list[str], parts: list[str]
) -> None:
    found = fuzz.outcome(Drawn(tuple(words), None), composer)
    assert found.kind == fuzz.REFUSED, found.text
    assert [part for part in parts if part not in found.text] == [], found.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("model=3",),
        ("tp=" + "9" * 5000,),
        ("model.norm_eps=1" + "0" * 400,),
        ("tp=${nope:1}",),
        ("tp=range(0,9)",),
    ],
)
def test_the_command_ends_in_a_sentence_where_hydra_raises(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    found = fuzz.outcome_of_command(Drawn(words, None), tmp_path)
    assert found.kind == fuzz.REFUSED, found.text
    assert words[0][:20] in found.text


def test_the_value_of_an_environment_variable_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, composer: fuzz.Composer
) -> None:
    monkeypatch.setenv("KEY_OF_SOMETHING", "5ec4e7")
    found = fuzz.outcome(Drawn(("tp=${oc.env:KEY_OF_SOMETHING}",), None), composer)
    assert found.kind == fuzz.REFUSED
    assert "5ec4e7" not in found.text


def kinds_of(numbers: range) -> Counter[str]:
    """Returns how many of these configurations are accepted and refused, up to the first bug."""
    composer, kinds = fuzz.Composer(), Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with warnings.catch_warnings(action="ignore"):  # oc.deprecated is one of the interpolations
        for number in numbers:
            drawn = draw(f"unit-{number}", number)
            found = fuzz.outcome(drawn, composer)
            assert found.kind != fuzz.BUG, f"{number}: {found.text}; {drawn!a:.500}"
            kinds[found.kind] += 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB
    return kinds


@pytest.mark.more
@pytest.mark.nightly
def test_no_bug_among_hundreds() -> None:
    kinds = kinds_of(range(COUNT // 2))
    assert kinds.total() == COUNT // 2
    assert min(kinds[fuzz.TAKEN], kinds[fuzz.REFUSED]) > COUNT / 40, kinds


@pytest.mark.more
@pytest.mark.nightly
def test_no_bug_among_configurations_made_in_python() -> None:
    for number in range(COUNT // 2):
        values, world_size = by_hand(f"unit-{number}", number)
        found = fuzz.outcome_by_hand(values, world_size)
        assert found.kind != fuzz.BUG, f"{number}: {found.text}; {list(values)}"


def test_every_key_is_drawn() -> None:
    words = [word for number in range(COUNT) for word in draw(f"unit-{number}", number).words]
    typed = {word.partition("=")[0] for word in words}
    missing = [key for key in all_keys(Config) if not {key, key.removesuffix(".name")} & typed]
    assert missing == []


@pytest.mark.nightly
def test_the_short_way_answers_as_the_command_does(tmp_path: Path, composer: fuzz.Composer) -> None:
    """The tests above shorten composing; the command only adds steps after it."""
    for number in range(0, COUNT, COUNT // 6):
        drawn = Drawn(draw(f"unit-{number}", number).words, None)
        short, command = fuzz.outcome(drawn, composer), fuzz.outcome_of_command(drawn, tmp_path)
        assert command.kind != fuzz.BUG, command.text
        if short.kind == fuzz.REFUSED:
            assert command == short


def test_a_sentence_is_one_line_that_a_terminal_prints() -> None:
    sentence = "a\x1b[31mb\nc\u202e\udc80 " + "x" * 1000 + " é."
    shown = readable(sentence)
    assert shown.startswith("a\\x1b[31mb\\nc\\u202e\\udc80 xxx")
    assert shown.endswith("xxx é.")
    assert shown.isprintable()
    assert len(shown) < 400
    assert len(readable("x " * 10_000)) <= 2000


def test_the_search_for_the_nearest_choice_has_a_time_limit() -> None:
    assert closest(7, lambda n: 12 % n == 0, 12) == 6
    assert closest(2**40, lambda n: n == 1, 2**60) is None
