"""Tests blends of pairs: the times and orders in which parts are read, and refusals before any
step."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel3d.checkpoint.checkpoints import compared_with
from parallel3d.checkpoint.manifest import Manifest
from parallel3d.data.blend import BlendedSamples, WeightPeriod
from parallel3d.data.corpus import Blend, check_data, open_corpus
from parallel3d.data.keys import DataConfig
from parallel3d.data.same_text import facts_of
from parallel3d.data.sampler import Sampler
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from tests.corpora import pair
from tests.sources import sources_of
from tests.unit.data.blend_oracle import oracle

SEQ = 16
WEIGHTS = {"web": 0.7, "code": 0.2, "books": 0.1}


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate((*WEIGHTS, "math")):
        pair(tmp_path / name, seed, documents=40 + 20 * seed)
    return tmp_path


def blend_of(
    weights: dict[str, Any], stages: dict[Any, Any] | None = None, **more: Any
) -> DataConfig:
    return DataConfig(name="blend", blend=weights, blend_stages=stages, **more)


def config_of(data: DataConfig, seed: int = 1) -> Config:
    model = ModelConfig(seq_length=SEQ, vocab_size=257)
    return Config(data=data, model=model, seed=seed, run="mine")


def order(data: DataConfig, samples: int, seed: int = 1, first: int = 0) -> list[bytes]:
    blend = open_corpus(data, SEQ)
    train = sources_of(blend, config_of(data, seed)).train
    return [train.sample(i).tokens.tobytes() for i in range(first, first + samples)]


class Numbers:
    """A data set in which sample i is the number i."""

    seq_length, windows, masks = SEQ, 10, False

    def sample(self, i: int) -> int:
        return i


def test_stages_continue_each_part_and_share_like_the_oracle() -> None:
    stages = [
        WeightPeriod(0, {0: 7, 1: 2, 2: 1}),
        WeightPeriod(37, {1: 1, 3: 1}),
        WeightPeriod(90, {0: 1, 2: 3, 3: 5}),
    ]
    blended = BlendedSamples([Numbers()] * 4, stages)
    expected: list[tuple[int, int]] = []
    had: Counter[int] = Counter()
    for stage, end in zip(stages, (37, 90, 200), strict=True):
        for owner in islice(oracle(list(stage.weights.values())), end - stage.first):
            part = list(stage.weights)[owner]
            expected.append((part, had[part]))
            had[part] += 1
    assert [blended.at(i) for i in range(200)] == expected
    for samples in (0, 1, 36, 37, 38, 90, 91, 200):
        counted = Counter(part for part, _ in expected[:samples])
        assert blended.counts(samples) == [counted[part] for part in range(4)]


def test_the_last_of_several_stages_at_the_same_sample_counts(corpora: Path) -> None:
    stages = open_corpus(blend_of(WEIGHTS, {1: {"web": 1}, 9: {"math": 2}}), SEQ).stages
    assert [stage.first for stage in stages] == [0, 1]
    usual = open_corpus(blend_of(WEIGHTS, {16: {"math": 7}}), SEQ)
    assert stages == usual.stages


def test_each_part_has_its_share_and_a_permutation_per_epoch(corpora: Path) -> None:
    data = blend_of(WEIGHTS)
    blend = open_corpus(data, SEQ)
    source = sources_of(blend, config_of(data)).train
    read = source.read(1000)
    assert {name: part["tokens"] // SEQ for name, part in read.items()} == pytest.approx(
        {"web": 700, "code": 200, "books": 100}, abs=2
    )
    for part, corpus in zip(source.parts, blend.corpora, strict=True):
        epochs = [[part.window(e * part.windows + i) for i in range(part.windows)] for e in (0, 1)]
        assert [sorted(e) for e in epochs] == [list(range(part.windows))] * 2
        assert epochs[0] != epochs[1]
        alone = Sampler(corpus.train, SEQ, 1, True, 256, False)
        assert [alone.window(i) for i in range(part.windows)] != epochs[0]
        had = read[corpus.name]
        assert had["epochs"] == round(had["tokens"] / SEQ / part.windows, 4)


def test_order_does_not_depend_on_names_paths_scale_or_spelling(
    corpora: Path,
) -> None:
    usual = order(blend_of(WEIGHTS), 200)
    assert order(blend_of({"books": 1, "code": 2, "web": 7}), 200) == usual
    for end in ("bin", "idx", "json"):
        os.rename(f"web.{end}", f"zebra.{end}")
    assert order(blend_of({"zebra": 0.7, "code": 0.2, "books": 0.1}), 200) == usual
    assert order(blend_of({"zebra": 0.7, "code": 0.2, "books": 0.1}), 200, seed=2) != usual


def test_the_weight_tokens_is_the_parts_number_of_tokens(corpora: Path) -> None:
    data = blend_of({"web": "tokens", "code": "tokens"})
    blend = open_corpus(data, SEQ)
    (stage,) = blend.stages
    lengths = [Fraction(len(corpus.train)) for corpus in blend.corpora]
    assert Fraction(*stage.weights.values()) == lengths[0] / lengths[1]
    counted = open_corpus(blend_of({"web": "tokens", "code": len(blend.corpora[0].train)}), SEQ)
    assert sum(counted.stages[0].weights.values()) > 0


def test_held_out_samples_are_the_ends_of_the_parts_heaviest_first(corpora: Path) -> None:
    data = blend_of(WEIGHTS, {800: {"math": 1}}, held_out_sets=3)
    blend = open_corpus(data, SEQ)
    sources = sources_of(blend, config_of(data))
    assert list(sources.held_out) == ["web", "code", "books"]
    by_name = {corpus.name: corpus for corpus in blend.corpora}
    for name, source in sources.held_out.items():
        tail = by_name[name].valid[: SEQ + 1]
        assert np.array_equal(source.sample(0).tokens, tail)
    assert not sources_of(blend, config_of(blend_of(WEIGHTS, held_out_sets=0))).held_out


def manifest(data: DataConfig, samples: int) -> Manifest:
    blend = open_corpus(data, SEQ)
    progress = {"steps": samples // 4, "consumed_samples": samples}
    config = dataclasses.asdict(config_of(data))
    return Manifest(samples // 4, progress, config, facts_of(blend), "", {}, ())


def answer(before: DataConfig, after: DataConfig, samples: int = 100) -> str | None:
    there, text = manifest(before, samples), open_corpus(after, SEQ)
    return compared_with(there, config_of(after), text).refusal


def test_past_samples_are_fixed_and_future_samples_may_change(corpora: Path) -> None:
    usual = blend_of(WEIGHTS)
    assert answer(usual, usual) is None
    assert answer(usual, blend_of({"books": 10, "code": 20, "web": 70})) is None
    late = {100 * SEQ: {"math": 0.5, "web": 0.5}}
    assert answer(usual, blend_of(WEIGHTS, late)) is None
    assert answer(blend_of(WEIGHTS, late), usual) is None  # the part had not begun at the save
    began = answer(blend_of(WEIGHTS, late), usual, samples=104)
    early = answer(usual, blend_of(WEIGHTS, {99 * SEQ: {"math": 1}}))
    other = answer(usual, blend_of(WEIGHTS | {"web": 0.6}))
    more = answer(usual, blend_of(WEIGHTS | {"math": 0.6}))
    assert all(
        sentence and "cannot resume with another blend" in sentence
        for sentence in (began, early, other, more)
    )
    assert other and "'data.blend_stages={1600:{…}}'" in other
    assert "another text" in str(answer(usual, DataConfig(name="corpus", path="web")))


def refused(data: DataConfig, **more: Any) -> str:
    with pytest.raises(UserError) as raised:
        check_data(data, SEQ, vocab_size=257, **more)
    return str(raised.value)


def test_a_part_too_small_for_its_share_is_reported_with_its_epochs(corpora: Path) -> None:
    data = blend_of({"web": 1, "books": 1})
    windows = {c.name: (len(c.train) - 1) // SEQ for c in open_corpus(data, SEQ).corpora}
    assert check_data(data, SEQ, samples=7 * windows["web"]) == []
    (said,) = check_data(data, SEQ, samples=10 * windows["web"])
    assert f"data.blend's web is small for its share: its {windows['web']} samples" in said
    assert "read 5.0 times" in said
    strict = blend_of({"web": 1, "books": 1}, most_epochs=3.0)
    assert "5.0 times, more than data.most_epochs=3;" in refused(
        strict, samples=10 * windows["web"]
    )


def test_an_impossible_blend_is_refused(corpora: Path) -> None:
    pair(corpora / "small", 9, documents=1)
    pair(corpora / "foreign", 10, tokenizer="0123456789abcdef")
    pair(corpora / "wide", 11, vocab_size=512)
    pair(corpora / "nameless", 12, facts=False)
    for end in ("bin", "idx", "json"):
        os.link(f"web.{end}", f"twin.{end}")
    cases = {
        "nowhere": "data.blend's nowhere does not exist (there is no nowhere.idx)",
        "small": "data.blend's small is too short for model.seq_length=16",
        "foreign": "were made with different tokenizers",
        "wide": "model.vocab_size=257 must be at least 512 for the tokens of data.blend's wide",
        "nameless": "has no nameless.json that names its tokenizer: give data.tokenizer",
        "twin": "hold the same tokens: give one of them",
    }
    for name, words in cases.items():
        assert words in refused(blend_of({"web": 1, name: 1})), name
    assert open_corpus(blend_of({"web": 1, "nameless": 1}, tokenizer="byte"), SEQ)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"tokens": 7}, "belongs to another dataset"),
        ({"vocab_size": "many"}, "cannot be read (it has no counts)"),
        ({"eot": None}, "cannot be read (it has no counts)"),
        ({"tokenizer_file": "../tok.json"}, "its tokenizer is not next to it"),
        ({"tokenizer_file": "/etc/tok.json"}, "its tokenizer is not next to it"),
    ],
)
def test_facts_that_do_not_fit_a_pair_are_refused(
    tmp_path: Path, said: dict[str, Any], words: str
) -> None:
    data = DataConfig(name="corpus", path=str(pair(tmp_path / "p", 0, **said)))
    assert words in refused(data)
    Path(f"{data.path}.json").write_text("[" * 100)
    assert "p.json cannot be read (" in refused(data)


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    prefix = str(pair(tmp_path / "p", 0, tokenizer="0123456789abcdef"))
    data = DataConfig(name="corpus", path=prefix, tokenizer="byte")
    assert "made with another tokenizer than data.tokenizer=byte: their digests are" in refused(
        data
    )


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    prefix = pair(tmp_path / "p", 0, facts=False)
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(14)
        file.write((999).to_bytes(2, "little"))
    data = DataConfig(name="corpus", path=str(prefix), tokenizer="byte")
    assert "has token 999 in document 0, but data.tokenizer=byte has 257 tokens" in refused(data)


def test_a_corpus_of_one_pair_is_windows_of_its_stream(tmp_path: Path) -> None:
    data = DataConfig(name="corpus", path=str(pair(tmp_path / "p", 3)))
    corpus = open_corpus(data, SEQ)
    assert not isinstance(corpus, Blend) and json.loads(json.dumps(facts_of(corpus)))
    source = sources_of(corpus, config_of(data, 5)).train
    plain = np.fromfile(f"{data.path}.bin", "<u2")[: len(corpus.train)]
    alike = Sampler(plain, SEQ, 5, True, 256, False)
    assert all(np.array_equal(source.sample(i).tokens, alike.sample(i).tokens) for i in range(200))
