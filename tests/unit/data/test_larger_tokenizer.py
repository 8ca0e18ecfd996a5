"""Tests tokenizers with added tokens beyond the model's table, as Gemma 3 1B's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel3d.data.corpus import check_data, open_corpus
from parallel3d.data.keys import DataConfig
from parallel3d.data.tokenizer import check_tokens, check_vocabulary, open_tokenizer
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from tests.tokenizers import END, folder, trained
from tests.unit.data.test_chat import ROWS, TALKS, row

LATE = "<image_soft_token>"
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def home(path: Path, template: str = TURNS, special: bool = True) -> tuple[str, int]:
    """Makes a tokenizer whose last token has no row in the table; returns its name and the rows."""
    content = json.loads(trained(330, (END, "<|im_start|>", "<|im_end|>")))
    size = 1 + max(content["model"]["vocab"].values())
    last = {**content["added_tokens"][-1], "id": size, "content": LATE, "special": special}
    content["added_tokens"].append(last)
    folder(path, json.dumps(content), eos_token=END, chat_template=template)
    return str(path), size


def text(path: Path, rows: list[object], kind: str = "chat", **keys: str) -> DataConfig:
    path.mkdir(exist_ok=True)
    file = path / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return DataConfig(kind, str(file), cache_dir=str(path), **keys)


def test_a_token_that_nothing_emits_is_a_line(tmp_path: Path) -> None:
    name, size = home(tmp_path / "tok")
    documents = [{"text": f"some words {i} {'and more' * 40}"} for i in range(20)]
    for given in (
        text(tmp_path / "a", ROWS, tokenizer=name, packing="padded"),
        text(tmp_path / "b", documents, "text", tokenizer=name),
        text(tmp_path / "c", [*documents, {"text": f"{LATE} spelled"}], "text", tokenizer=name),
    ):
        lines = check_data(given, 200, vocab_size=size)
        assert [LATE in line and f"vocab_size={size}" in line for line in lines] == [True]
        corpus = open_corpus(given, 200, vocab_size=size)
        corpus.sources(ModelConfig(seq_length=200, vocab_size=size), given, 1)


def test_a_template_that_emits_it_is_refused_where_it_does(tmp_path: Path) -> None:
    image = TURNS.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.image %}" + LATE + "{% endif %}"
    )
    name, size = home(tmp_path / "tok", image)
    messages = row(TALKS[0])["messages"]
    shown = {"messages": [{**messages[0], "image": True}, *messages[1:]]}
    given = text(tmp_path / "a", [*ROWS[:3], shown, *ROWS[3:]], tokenizer=name, packing="padded")
    with pytest.raises(UserError, match=rf"conversation 4 has the token {LATE} \({size}\)"):
        open_corpus(given, 200, vocab_size=size)
    assert open_corpus(
        text(tmp_path / "a", ROWS, tokenizer=name, packing="padded"), 200, vocab_size=size
    )


def test_a_document_that_holds_it_is_refused_where_it_does(tmp_path: Path) -> None:
    name, size = home(tmp_path / "tok", special=False)
    rows = [{"text": f"{i} words " * 50} for i in range(9)]
    rows[4]["text"] += LATE
    given = text(tmp_path / "a", rows, "text", tokenizer=name)
    with pytest.raises(UserError, match=rf"document 5 has the token {LATE} \({size}\)"):
        open_corpus(given, 100, vocab_size=size)


def test_another_token_beyond_the_table_is_refused(tmp_path: Path) -> None:
    name, size = home(tmp_path / "tok")
    tokenizer = open_tokenizer(name)
    assert check_vocabulary(tokenizer, size + 1) == []
    assert len(check_vocabulary(tokenizer, size)) == 1
    with pytest.raises(UserError, match=rf"vocab_size={size - 1} must be at least {size + 1}"):
        check_vocabulary(tokenizer, size - 1)
    with pytest.raises(
        UserError, match=rf"prompt has the token {LATE} \({size}\).*vocab_size={size + 1}"
    ):
        check_tokens(tokenizer.encode_prompt(f"a{LATE}".encode()), tokenizer, size, "prompt")
