"""Tests that templates with today's date show the run's date, with transformers' tokens."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import date, datetime
from pathlib import Path
from unittest.mock import patch

import pytest
import transformers
from transformers.utils import chat_template_utils

from parallel3d.checkpoint.checkpoints import compared_with
from parallel3d.checkpoint.manifest import Manifest
from parallel3d.data.chat import ChatTemplate, Reader, RefusedRow, find_chat, with_date
from parallel3d.data.corpus import check_data, open_corpus
from parallel3d.data.keys import DataConfig
from parallel3d.data.same_text import facts_of
from parallel3d.data.tokenizer import open_tokenizer
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from tests.unit.data.test_chat import TALKS, home, row

TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATED = {
    "called": "{% set today = strftime_now('%d %B %Y') %}{{ 'Today: ' ~ today ~ '\n' }}",
    "with another date in its place": (
        "{% if not date_string is defined %}{% if strftime_now is defined %}"
        "{% set date_string = strftime_now('%d %b %Y') %}{% else %}"
        "{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}{{ date_string ~ '\n' }}"
    ),
    "with the hour": "{{ strftime_now('%Y-%m-%dT%H:%M') ~ '\n' }}",
    "yesterday too": (
        "{% macro said() %}{{ strftime_now('%A') }}{% endmacro %}{{ said() ~ '\n' }}"
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
        "{{ {'b': [1, 'é'], 'a': 2} | tojson(indent=1, sort_keys=True) }}"
        "{{ [1, 2] | tojson(true) }}"
    ),
}


class Stopped(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: object = None) -> Stopped:
        return cls(2031, 2, 3, 4, 5)


@pytest.mark.parametrize("name", DATED)
@pytest.mark.parametrize("more", [{}, {"date_string": "1 Jan 2001"}])
def test_tokens_are_those_of_transformers_on_that_date(
    tmp_path: Path, name: str, more: dict[str, str]
) -> None:
    tokenizer = open_tokenizer(str(home(tmp_path, DATED[name] + TURNS)))
    asked = {**row(TALKS[1]), "chat_template_kwargs": more}
    found = Reader(tokenizer, ChatTemplate(tokenizer, "2031-02-03T04:05")).read(asked)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    with patch.object(chat_template_utils, "datetime", Stopped):
        expected = theirs.apply_chat_template(asked["messages"], return_dict=True, **more)
    assert found.tokens.tolist() == expected["input_ids"]


def chat(path: Path, template: str, **keys: str) -> DataConfig:
    path.mkdir(exist_ok=True)
    rows = [json.dumps(row(talk)) for talk in TALKS]
    (path / "chat.jsonl").write_text("\n".join(rows))
    folder = str(home(path / "tok", template))
    return DataConfig(
        "chat", str(path / "chat.jsonl"), tokenizer=folder, cache_dir=str(path), **keys
    )


def test_the_first_start_gives_the_date_and_says_so(tmp_path: Path) -> None:
    dated, lines = with_date(chat(tmp_path, DATED["called"] + TURNS))
    assert dated.chat_date == date.today().isoformat()
    assert [f"data.chat_date={dated.chat_date}" in line for line in lines] == [True]
    assert with_date(dated) == (dated, []), "the next start keeps it without a word"
    bare = chat(tmp_path / "bare", TURNS)
    assert with_date(bare) == (bare, [])


@pytest.mark.parametrize("name", ["dated", "bare"])
def test_a_run_with_another_date_names_it(tmp_path: Path, name: str) -> None:
    template = DATED["called"] + TURNS if name == "dated" else TURNS
    first = replace(chat(tmp_path, template, chat_date="2026-11-29"), packing="padded")
    model = ModelConfig(seq_length=200)
    configs = [Config(data=replace(first, chat_date=day), model=model) for day in
               ("2026-11-29", "2026-11-30")]  # fmt: skip
    texts = [open_corpus(config.data, 200) for config in configs]
    saved = Manifest(1, {"consumed_samples": 0}, asdict(configs[0]), facts_of(texts[0]), "", {}, ())
    refusal = compared_with(saved, configs[1], texts[1]).refusal
    if name == "bare":
        assert refusal is None
        return
    assert refusal is not None and "give data.chat_date=2026-11-29 as there" in refusal
    assert compared_with(saved, configs[0], texts[0]).refusal is None


def test_a_run_from_before_the_key_is_told_the_date_that_its_template_showed(
    tmp_path: Path,
) -> None:
    template = DATED["with another date in its place"] + TURNS
    first = replace(chat(tmp_path, template, chat_date="2024-07-26"), packing="padded")
    config = Config(data=first, model=ModelConfig(seq_length=200))
    text = open_corpus(first, 200)
    before = asdict(config)
    del before["data"]["chat_date"]
    saved = Manifest(1, {"consumed_samples": 0}, before, facts_of(text), "", {}, ())
    assert compared_with(saved, config, text).refusal is None
    # The folder of the cache does not choose the text, so it is not named.
    now = replace(first, chat_date="2026-11-29", cache_dir=str(tmp_path / "cache"))
    refusal = compared_with(saved, replace(config, data=now), open_corpus(now, 200)).refusal
    assert refusal is not None and "; give data.chat_date=2024-07-26 as there, or" in refusal


def test_the_cache_is_of_one_date(tmp_path: Path) -> None:
    days = ("2026-11-29", "2026-11-30")
    for name, template, count in (("dated", DATED["called"] + TURNS, 2), ("bare", TURNS, 1)):
        given = chat(tmp_path / name, template)
        assert len({find_chat(replace(given, chat_date=day)).key for day in days}) == count


def test_without_a_date_the_remedy_is_a_key(tmp_path: Path) -> None:
    given = chat(tmp_path, DATED["called"] + TURNS)
    with pytest.raises(UserError, match=r"data\.chat_date=2026-11-29"):
        check_data(given, 200)
    check_data(chat(tmp_path, DATED["called"] + TURNS, chat_date="2026-11-29"), 200)
    tokenizer = open_tokenizer(str(given.tokenizer))
    with pytest.raises(RefusedRow, match=r"data\.chat_date=2026-11-29"):
        Reader(tokenizer, ChatTemplate(tokenizer)).read(row(TALKS[0]))
