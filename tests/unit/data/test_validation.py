"""Tests validation sets: every token counts once, bytes of tokens, figures, names and paths."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from parallel3d.checkpoint.identity import changes
from parallel3d.data.corpus import check_sets, open_corpus, open_sets, sets_of
from parallel3d.data.keys import DataConfig
from parallel3d.data.sampler import FirstSamples
from parallel3d.data.tokenizer import open_tokenizer
from parallel3d.errors import UserError
from parallel3d.loop.keys import TrainConfig
from parallel3d.metrics.jsonl import finite
from parallel3d.metrics.loggers import figures_of
from parallel3d.models.keys import ModelConfig
from parallel3d.optim.keys import OptimConfig
from parallel3d.run_config import Config, check_config
from parallel3d.trainer import Score
from tests.corpora import pair
from tests.sources import part_of, sources_of
from tests.unit.checkpoint.test_identity import refused

SEQ = 16
SHARES = (("web", 0.7), ("code", 0.2), ("books", 0.1))
TEXT = "Grüße, naïve 北京 and words; x = f(1.5e-3)\n🙂 done"


def config_of(data: DataConfig) -> Config:
    return Config(dp=1, data=data, model=ModelConfig(seq_length=SEQ, vocab_size=300))


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_every_token_of_a_set_is_a_label_once(tmp_path: Path, packing: str) -> None:
    (tmp_path / "t.txt").write_bytes(bytes(range(48, 58)) * 20)
    (tmp_path / "v.txt").write_bytes(
        bytes(range(32, 127)) + b"abcde"
    )  # 101 tokens are not a multiple of 16
    pair(tmp_path / "p", 3, documents=9)
    more = {"cache_dir": str(tmp_path / "cache"), "packing": packing, "cut_documents": True}
    sets = {"text": str(tmp_path / "v.txt"), "pair": str(tmp_path / "p")}
    data = DataConfig(name="text", path=str(tmp_path / "t.txt"), valid=sets, **more)
    training = open_corpus(data, SEQ)
    assert training.valid_tokens == 0 and training.train_tokens == 201
    assert sources_of(training, config_of(data)).valid is None
    opened = open_sets(data, training, SEQ, 300)
    assert list(opened) == ["text", "pair"] and opened["pair"].name == sets["pair"]
    for corpus in opened.values():
        source = part_of(corpus, config_of(data), held_out=True)
        samples = [source.sample(i) for i in range(source.windows)]
        labels = np.concatenate([s.tokens[1:][s.loss_mask] for s in samples])
        stream = corpus.valid[:]
        if packing == "concat":
            assert labels.tolist() == stream[1:].tolist()
        else:  # the first token of a document has no label
            plan = corpus.plans[1]
            lengths = [n for k in range(plan.packs) for n in plan.pack(k)[1]]
            assert labels.size == sum(lengths) - len(lengths) and plan.packs == source.windows
        more_than_all = FirstSamples(source, source.windows)
        assert not more_than_all.sample(source.windows).loss_mask.any()
        assert more_than_all.sample(0).loss_mask.sum() == samples[0].loss_mask.sum()


def test_a_set_may_be_shorter_than_a_sample(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("ab")
    data = DataConfig(name="text", path=str(tmp_path / "v.txt"), valid_fraction=1.0)
    corpus = open_corpus(data, SEQ)
    source = part_of(corpus, config_of(data), held_out=True)
    sample = source.sample(0)
    assert source.windows == 1 and sample.loss_mask.tolist() == [True] * 2 + [False] * 14
    assert sample.tokens.tolist() == [*b"ab", *[256] * 15]


def test_without_a_share_held_out_all_is_trained_on(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"x" * SEQ)
    data = DataConfig(name="text", path=str(tmp_path / "t.txt"), valid_fraction=0.0)
    assert open_corpus(data, SEQ).train_tokens == SEQ + 1
    with pytest.raises(
        UserError, match=r"one sample needs 18; model.seq_length must be at most 16"
    ):
        open_corpus(data, SEQ + 1)


def test_valid_fraction_is_0_with_sets_unless_it_is_given() -> None:
    sets = {"web": "web.txt"}
    for data, share in (
        (DataConfig(), 0.05),
        (DataConfig(valid=sets), 0.0),
        (DataConfig(valid=sets, valid_fraction=0.1), 0.1),
    ):
        assert check_config(Config(data=data)).data.valid_fraction == share


def test_the_kind_of_a_set_follows_its_files(tmp_path: Path) -> None:
    pair(tmp_path / "p", 1)
    sets = {"pair": str(tmp_path / "p"), "far": "s3://bucket/p", "else": "x.jsonl"}
    for name, other in (("text", "text"), ("blend", "text"), ("chat", "chat")):
        found = sets_of(DataConfig(name=name, valid=sets, blend={"a": 1}))
        assert [one.name for one in found.values()] == ["corpus", "corpus", other]
        assert all(one.valid is None and one.held_out == 1.0 for one in found.values())


def test_impossible_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"x" * 99)
    data = DataConfig(name="text", path=str(tmp_path / "t.txt"), cache_dir=str(tmp_path))
    missing = dataclasses.replace(data, valid={"web": str(tmp_path / "no.txt")})
    with pytest.raises(UserError, match=r"set web of data\.valid: .* does not exist"):
        check_sets(missing, SEQ, 300)
    own = byte_level(tmp_path)
    mixed = dataclasses.replace(data, valid={"web": data.path}, tokenizer=own)
    with pytest.raises(
        UserError,
        match=r"its tokenizer is .* must be that of the training text, .* as data.tokenizer",
    ):
        open_sets(mixed, open_corpus(data, SEQ), SEQ, 300)
    for config, words in (
        (
            Config(data=DataConfig(valid={"a": 3})),
            "must give the prefix of an indexed dataset or the path of a text",
        ),
        (Config(data=DataConfig(valid={"a b": "x"})), "the nearest is a_b"),
        (Config(data=DataConfig(valid={0: "x"})), "the nearest is set_0"),
        (Config(data=DataConfig(valid={"..": "x"})), "the nearest is set"),
        (
            Config(
                data=DataConfig(name="blend", blend={"ema": 1}), optim=OptimConfig(ema_decay=0.9)
            ),
            "no part named ema",
        ),
        (Config(train=TrainConfig(eval_only=True)), "requires run="),
        (Config(run="a", train=TrainConfig(eval_only=True, eval_batches=0)), "eval_batches=null"),
    ):
        with pytest.raises(UserError, match=words):
            check_config(config)


def test_only_an_evaluation_may_have_other_data() -> None:
    other = Config(data=DataConfig(valid_fraction=0.2), seed=3)
    found = changes(dataclasses.asdict(Config(dp=1)), other)
    assert refused(found)
    other.train.eval_only = True
    assert not refused(changes(dataclasses.asdict(Config(dp=1)), other))
    other.model.num_layers = 9
    assert [c.key for c in refused(changes(dataclasses.asdict(Config(dp=1)), other))] == [
        "model.num_layers"
    ]


def byte_level(folder: Path) -> str:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(
            vocab_size=290, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
        ),
    )
    return saved(made, folder / "level")


def saved(made: Tokenizer, folder: Path) -> str:
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return str(folder)


def with_fallback(folder: Path) -> str:
    """Makes a tokenizer like SentencePiece's: blanks are letters, and bytes have tokens of their
    own."""
    pieces = ["<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁and", "words"]
    pieces += list("Grüße,naivword;xf(1.5e-3)=\n")
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(models.Unigram([(p, -float(i)) for p, i in vocabulary.items()], 0, True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(["<|endoftext|>"])
    return saved(made, folder / "fallback")


@pytest.mark.parametrize("make", [byte_level, with_fallback])
def test_bytes_of_tokens_add_up_to_the_bytes_of_the_text(make, tmp_path: Path) -> None:
    name = make(tmp_path)
    tokenizer = open_tokenizer(name)
    sizes = tokenizer.sizes()
    tokens = tokenizer.encode(TEXT.encode())
    assert len(set(tokens.tolist())) > 20
    assert sizes[tokens].sum() == len(TEXT.encode())
    assert sizes[tokenizer.eot] == 0 and sizes.shape == (tokenizer.vocab_size,)


def test_tokens_of_the_byte_tokenizer_are_one_byte_each() -> None:
    assert open_tokenizer("byte").sizes().tolist() == [1] * 256 + [0]


def test_a_blends_evaluation_ends_before_a_part_repeats(tmp_path: Path) -> None:
    weights = {str(pair(tmp_path / name, k, 20 + 30 * k)): w for k, (name, w) in enumerate(SHARES)}
    data = DataConfig(name="blend", blend=weights, valid_fraction=0.5, cache_dir=str(tmp_path))
    held_out = sources_of(open_corpus(data, SEQ), config_of(data)).valid
    limits = [part.windows for part in held_out.parts]
    end = held_out.windows
    assert 3 < end < sum(limits)
    assert all(map(operator.le, held_out.counts(end), limits))
    assert not all(map(operator.le, held_out.counts(end + 1), limits))


def test_loggers_name_figures_by_set() -> None:
    line = {"step": 2, "eval_loss": None, "valid": {"web": finite(Score(1e9, 1).row())}}
    assert figures_of(line) == {
        "step": 2,
        "valid/web/loss": 1e9,
        "valid/web/perplexity": math.inf,
        "valid/web/tokens": 1,
    }


def test_figures_of_a_set() -> None:
    row = Score(nats=20.0, tokens=10, bytes=40).row()
    assert row == {
        "loss": 2.0,
        "perplexity": pytest.approx(math.exp(2), rel=1e-15),
        "bits_per_byte": pytest.approx(0.5 / math.log(2), rel=1e-15),
        "tokens": 10,
    }
    nothing = {"loss": None, "perplexity": None, "bits_per_byte": None, "tokens": 0}
    assert Score(0.0, 0).row() == nothing
    assert Score(1e9, 1).row()["perplexity"] == math.inf
