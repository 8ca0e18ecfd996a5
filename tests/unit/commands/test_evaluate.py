"""Tests rows of `parallel3d eval`: refusals, tokens split like lm-evaluation-harness, figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, processors

from parallel3d.cli import command_line
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.evaluate.command import (
    Request,
    batches_of,
    check_finite,
    requests_of,
    score_requests,
    table,
)
from parallel3d.commands.evaluate.rows import (
    Likelihood,
    TaskRow,
    encode_pair,
    figures_of,
    read_rows,
    take_rows,
)
from parallel3d.commands.from_run import EVAL, config_from_run
from parallel3d.commands.options import CommandConfig
from parallel3d.data.tokenizer import ByteTokenizer, open_tokenizer
from parallel3d.errors import UserError
from parallel3d.models.decoding import blank_stage
from parallel3d.models.keys import ModelConfig
from parallel3d.resolve import blueprint_of
from parallel3d.run.launcher_environment import RankAssignment
from parallel3d.run_config import Config
from tests.unit.data.test_validation import TEXT, byte_level

BAD = (
    ("{", "line 1 is not JSON"),
    ('["a"]', "line 1 has no text under context"),
    ('["a"]\n["b"]', "line 1 has no text under context"),
    ('{"context": 1}', "has no text under context"),
    ('{"context": "a"}', "neither choices nor a continuation"),
    ('{"context": "a", "continuation": ""}', "neither choices nor a continuation"),
    ('{"context": "a", "choices": ["b"], "answer": 0}', "at least two texts"),
    ('{"context": "a", "choices": ["b", ""], "answer": 0}', "at least two texts"),
    ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "answer=2 must be the number"),
    ('{"context": "a", "choices": ["b", "b"], "answer": "b"}', "from 0 to 1, or its text"),
    ('{"context": "a", "continuation": "\\ud83d"}', "lone surrogate, which is not text"),
    ('{"context": "a", "continuation": "b", "task": "x\\u001b[31m"}', "must be a name on one line"),
    ('{"context": "a", "continuation": "b", "task": null}', "must be a name on one line"),
    (
        '{"context": "a", "choices": ["b", "c"], "answer": 0, "answer": 1}',
        "has the key answer twice",
    ),
    ('{"context": "a", "continuation": "b", "answer": 0}', "has an answer but no choices"),
    (
        '{"context": "a", "choices": ["b", "c"], "answer": 0, "continuation": "b"}',
        "choices and a continuation, but may have one only",
    ),
    ("\n\n", "has no rows"),
)


@pytest.mark.parametrize(("line", "words"), BAD)
def test_an_invalid_row_is_refused(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(UserError, match=words):
        read_rows(str(path))


def test_rows(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    first = {"context": "a", "choices": [" b", " c"], "answer": " c", "subject": "x"}
    path.write_text(f'{json.dumps(first)}\n\n{{"context":"","continuation":"x","task":"t"}}\n')
    place = f"tasks={path}, line"
    taken = take_rows(str(path))
    assert taken.lines == [f"tasks={path}: keys not read: subject (1 row)"]
    assert taken.rows == [
        TaskRow("mine", "a", (" b", " c"), 1, f"{place} 1"),
        TaskRow("t", "", ("x",), None, f"{place} 3"),
    ]
    with pytest.raises(UserError, match=r"cannot be read .*give rows such as"):
        read_rows(str(tmp_path / "none"))


@pytest.mark.parametrize("with_bos", [False, True])
def test_tokens_are_split_as_the_harness_splits_them(with_bos: bool, tmp_path: Path) -> None:
    name = byte_level(tmp_path)
    theirs = Tokenizer.from_file(f"{name}/tokenizer.json")
    if with_bos:
        end = theirs.token_to_id("<|endoftext|>")
        theirs.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
        )
        theirs.save(f"{name}/tokenizer.json")
    tokenizer = open_tokenizer(name)
    assert len(tokenizer.prefix) == with_bos
    for context, continuation in (
        (TEXT[:14], TEXT[14:]),
        (TEXT[:15], TEXT[15:]),  # the context ends with a blank, which the continuation takes
        (f"{TEXT} \n ", "and words"),
        ("and", "words"),  # a token may span both
    ):
        tokens, first = encode_pair(tokenizer, context, continuation)
        bare = context.rstrip()
        assert tokens == theirs.encode(context + continuation).ids
        assert first == len(theirs.encode(bare).ids)
    alone = theirs.encode(TEXT, add_special_tokens=False).ids
    assert encode_pair(tokenizer, "", TEXT) == ([tokenizer.eot, *alone], 1)
    blank = theirs.encode("  and", add_special_tokens=False).ids
    # Nothing precedes it.
    assert encode_pair(tokenizer, "  ", "and") == ([tokenizer.eot, *blank], 1)
    assert encode_pair(tokenizer, "", f"<|endoftext|>{TEXT}") == ([tokenizer.eot, *alone], 1)


def test_contexts_are_cut_from_the_left() -> None:
    row = TaskRow("t", "abcdef", ("gh", "i"), 0, "line 1")
    long, short = requests_of([row], ByteTokenizer(), 4)
    assert long == Request(0, 0, [*b"defgh"], 3)
    assert short == Request(0, 1, [*b"cdefi"], 4)
    with pytest.raises(UserError, match=r"5 tokens .* must have from 1 to model\.seq_length=4"):
        requests_of([TaskRow("t", "x", ("abcde",), None, "line 1")], ByteTokenizer(), 4)


def test_batches_hold_their_padding() -> None:
    requests = [Request(i, 0, [0] * n, 1) for i, n in enumerate((9, 5, 5, 3, 2, 2))]
    sizes = [[len(r.tokens) for r in batch] for batch in batches_of(requests, 12)]
    assert sizes == [[9], [5, 5], [3, 2, 2]]


def test_a_batch_has_rows_of_one_set_of_rotary_factors() -> None:
    requests = [Request(i, 0, [0] * n, 1) for i, n in enumerate((9, 6, 5, 5, 4))]
    sizes = [[len(r.tokens) for r in batch] for batch in batches_of(requests, 100, 4)]
    assert sizes == [[9, 6], [5, 5, 4]]


def test_a_row_that_would_need_other_rotary_factors_is_not_cut() -> None:
    row = TaskRow("t", "abcdef", ("gh",), 0, "line 1")
    assert requests_of([row], ByteTokenizer(), 4, 8)[0].tokens == [*b"defgh"]
    with pytest.raises(
        UserError, match=r"line 1 has 8 tokens, .* for up to 7 tokens; give shorter"
    ):
        requests_of([row], ByteTokenizer(), 4, 7)


def test_figures() -> None:
    row = TaskRow("t", "x", ("ab", "abcd", "é"), 1, "")
    likelihoods = [Likelihood(-2.0, 2, False), Likelihood(-3.0, 4, True), Likelihood(-1.9, 1, True)]
    alone = TaskRow("t", "x", ("ab",), None, "")
    found = figures_of([(row, likelihoods), (alone, [Likelihood(-1.0, 1, True)])])
    # The third choice is the likeliest but, with its two bytes, not the likeliest per byte.
    assert found == {
        "rows": 2,
        "acc": 0.5,
        "acc_norm": 1.0,
        "loglikelihood_per_token": -0.8,
        "perplexity": pytest.approx(math.exp(0.8)),
        "tokens": 5,
    }
    assert figures_of([(alone, [Likelihood(-1.0, 1, False)])])["acc_norm"] is None
    assert table({"t": found}).splitlines()[1].split() == [
        "t",
        "2",
        "0.5000",
        "1.0000",
        "-0.8000",
        "2.2255",
    ]


def test_nan_weights_are_refused() -> None:
    config, groups = Config(model=ModelConfig(num_layers=1), dp=1, run="a"), ProcessGroups.single()
    stage = blank_stage(blueprint_of(config), groups, torch.device("cpu"))
    with torch.no_grad():
        stage.head.norm.weight.fill_(math.nan)
    scores = score_requests(
        [Request(0, 0, [1, 2, 3], 1)], stage, groups, 8192, config.model.hidden_size
    )
    with pytest.raises(UserError, match=r"run=a: .* not finite; give step="):
        check_finite(scores.values(), "a")


def test_impossible_input_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eval takes model\.num_layers from the run"):
        config_from_run(EVAL, Config(), ["model.num_layers=3"], None)
    with pytest.raises(UserError, match="eval needs run="):
        config_from_run(EVAL, Config(runs_dir=str(tmp_path)), [], None)


@pytest.mark.parametrize(
    ("rank", "hidden", "said"), [(0, 1024, True), (1, 1024, False), (0, 64, False)]
)
def test_the_first_rank_of_a_launcher_names_the_bytes_of_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    rank: int, hidden: int, said: bool,
) -> None:  # fmt: skip
    model = ModelConfig(num_layers=4, hidden_size=hidden)
    config = CommandConfig(model=model, tp=2, dp=1)
    for name, answer in (("config_from_run", config), ("run_joined", 0), ("_checked_here", "cpu")):
        monkeypatch.setattr(command_line, name, lambda *_, answer=answer: answer)
    place = RankAssignment("torchrun", rank, rank, 2, 2, "h", 29500)
    assert command_line._run_on_run(command_line.SUBCOMMANDS["eval"], config, [], place) == 0
    line = "weights: 0.103 GB on the fullest rank of tp=2 × pp=1, in fp32, in which eval computes"
    assert (line in capsys.readouterr().err) == said
