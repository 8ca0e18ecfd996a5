"""Tests templates whose turns end in the next role's marker, or whose end is not always printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from parallel3d.data.chat import ChatTemplate, Reader, RefusedRow
from parallel3d.data.corpus import open_corpus
from parallel3d.data.keys import DataConfig
from parallel3d.data.tokenizer import FileTokenizer, open_tokenizer
from parallel3d.errors import UserError
from tests.tokenizers import END, folder, trained
from tests.unit.data.test_chat import samples

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
CONTENT = trained(340, (END, "[gMASK]", "<sop>", "<eot>", *ROLES))
STOPS = (END, "<|user|>", "<|observation|>")
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
GLM4 = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "{{ m.content }}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}<|{{ m.role }}|>\n"
    "{{ m.content }}{% endif %}{% endfor %}" + PROMPT
)
TAGGED = GLM4.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}", 1)
# Thoughts before the last question are left out; calls and results have markers of their own.
GLM45 = """\
[gMASK]<sop>
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{%- if loop.index0 > ns.last and m.reasoning_content %}{{ '\n<think>' + m.reasoning_content.strip() + '</think>' }}
{%- else %}{{ '\n<think></think>' }}{%- endif %}
{%- if m.content and m.content.strip() %}{{ '\n' + m.content.strip() }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '\n' + call.function.arguments | tojson + '\n</tool_call>' }}{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{%- endif %}"""  # noqa: E501
# The end of a turn is printed only between turns.
BETWEEN = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if not loop.last %}<eot>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<eot>\n<|assistant|>\n{% endif %}"
)
LINES = GLM4.replace("{{ m.content }}", "{{ m.content }}\n", 3)  # a line ends before the marker


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CALL = {"type": "function", "function": {"name": "find", "arguments": {"x": 1}}}
RESULT = {"role": "tool", "content": "2"}
TWO = [user("1+2?"), said("3"), user("3+4?"), said("7")]


def made(path: Path, template: str, stops: tuple[str, ...] = STOPS) -> tuple[Reader, FileTokenizer]:
    folder(path, CONTENT, eos_token=END, chat_template=template)
    inner = open_tokenizer(str(path))
    assert isinstance(inner, FileTokenizer)
    ends = {"eos_token_id": [inner.special[stop] for stop in stops]}
    (path / "generation_config.json").write_text(json.dumps(ends))
    tokenizer = open_tokenizer(str(path))
    assert isinstance(tokenizer, FileTokenizer)
    return Reader(tokenizer, ChatTemplate(tokenizer)), tokenizer


def learned(path: Path, template: str, messages: list[Any], stops: Any = STOPS) -> list[str]:
    """Returns the learned parts; the tokens are transformers', but for an end of the last turn."""
    reader, tokenizer = made(path, template, stops)
    found = reader.read({"messages": messages})
    kept = [{k: v for k, v in m.items() if k != "weight"} for m in messages]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    ids = theirs.apply_chat_template(kept, return_dict=True)["input_ids"]
    assert found.tokens.tolist()[: len(ids)] == ids
    assert len(found.tokens) <= len(ids) + 1
    edges = np.flatnonzero(np.diff(found.spoken.astype(int), prepend=0, append=0)).reshape(-1, 2)
    inner = tokenizer._inner
    return [
        inner.decode(found.tokens[begin:end].tolist(), skip_special_tokens=False)
        for begin, end in edges
    ]


@pytest.mark.parametrize(
    ("template", "messages", "parts"),
    [
        (GLM4, TWO, ["\n3<|user|>", "\n7<|user|>"]),
        (GLM4, TWO[:3], ["\n3<|user|>"]),
        (GLM4, [*TWO[:2], RESULT, said("5")], ["\n3<|observation|>", "\n5<|user|>"]),
        (GLM4, [user("a"), said("b", weight=0), *TWO[2:]], ["\n7<|user|>"]),
        (GLM4, [*TWO[:2], user("c"), said("d", weight=0)], ["\n3<|user|>"]),
        (LINES, TWO, ["\n3\n<|user|>", "\n7\n<|user|>"]),
        (TAGGED, TWO, ["3<|user|>", "7<|user|>"]),
        (GLM45, TWO, ["\n<think></think>\n3<|user|>", "\n<think></think>\n7<|user|>"]),
        (
            GLM45,
            [*TWO[:3], said("7", reasoning_content="mm")],
            ["\n<think></think>\n3<|user|>", "\n<think>mm</think>\n7<|user|>"],
        ),
        (
            GLM45,
            [user("a"), said("", tool_calls=[CALL]), RESULT, said("5")],
            [
                '\n<think></think>\n<tool_call>find\n{"x": 1}\n</tool_call><|observation|>',
                "\n<think></think>\n5<|user|>",
            ],
        ),
        (
            GLM45,
            [user("a"), said("b", tool_calls=[CALL])],
            ['\n<think></think>\nb\n<tool_call>find\n{"x": 1}\n</tool_call><|observation|>'],
        ),
    ],
)
def test_the_next_roles_marker_ends_a_turn(
    tmp_path: Path, template: str, messages: list[Any], parts: list[str]
) -> None:
    assert learned(tmp_path, template, messages) == parts


def test_a_spelled_marker_ends_no_turn(tmp_path: Path) -> None:
    reader, tokenizer = made(tmp_path, GLM4)
    found = reader.read({"messages": [user("a"), said("b<|user|>")]})
    assert (found.tokens[found.spoken] == tokenizer.special["<|user|>"]).sum() == 1
    assert found.tokens[-1] == tokenizer.special["<|user|>"]


def test_an_end_that_is_printed_only_between_turns_is_learned(tmp_path: Path) -> None:
    parts = learned(tmp_path, BETWEEN, TWO, (END, "<eot>"))
    assert parts == ["3<eot>", "7<eot>"]


@pytest.mark.parametrize(("template", "marker"), [(GLM4, "<|user|>"), (BETWEEN, "<eot>")])
@pytest.mark.parametrize("messages", [TWO, TWO[:2]])
def test_a_marker_that_is_no_end_is_refused_and_its_remedy_works(
    tmp_path: Path, template: str, marker: str, messages: list[Any]
) -> None:
    reader, tokenizer = made(tmp_path, template, (END,))
    with pytest.raises(RefusedRow, match=r"write .* into the generation_config.json") as caught:
        reader.read({"messages": messages})
    remedy = json.loads("{" + str(caught.value).split("write ")[1].split(" into")[0] + "}")
    assert remedy["eos_token_id"] == sorted({tokenizer.eot, tokenizer.special[marker]})
    parts = learned(tmp_path, template, messages, (END, marker))
    assert all(part.endswith(marker) for part in parts)


def test_turns_without_any_end_are_refused(tmp_path: Path) -> None:
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + PROMPT
    bare = bare.replace("<|assistant|>", "assistant: ")
    with pytest.raises(RefusedRow, match=r"write \{\{ eos_token \}\}"):
        made(tmp_path, bare)[0].read({"messages": TWO})
    learned(tmp_path, bare.replace("}\n{", "}{{ eos_token }}\n{"), TWO)
    tags = "{% generation %}{{ m.content }}{% endgeneration %}"
    assert learned(tmp_path, bare.replace("{{ m.content }}", tags), TWO[:2]) == ["1+2?", "3"]


@pytest.mark.parametrize("packing", ["padded", "best_fit", "concat"])
def test_every_packed_turn_ends_and_generation_stops_there(tmp_path: Path, packing: str) -> None:
    _, tokenizer = made(tmp_path / "tok", GLM4)
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': TWO})}\n" * 40)
    given = DataConfig(
        *("chat", str(tmp_path / "a.jsonl")),
        tokenizer=str(tmp_path / "tok"),
        packing=packing,
        cache_dir=str(tmp_path),
        valid_fraction=0.3,
    )
    corpus = open_corpus(given, 60)
    assert tokenizer.special["<|user|>"] in tokenizer.ends.intersection(corpus.roles.ends)
    assert not [line for line in corpus.told if "will not learn" in line]
    train, _ = samples(given, 60)
    stops = sum(
        int((s.tokens[1:][s.loss_mask] == tokenizer.special["<|user|>"]).sum())
        for s in map(train.sample, range(train.windows))
    )
    assert stops >= 2 * 20


def test_the_refusal_does_not_offer_to_leave_rows_out(tmp_path: Path) -> None:
    made(tmp_path / "tok", GLM4, (END,))
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': TWO})}\n" * 4)
    given = DataConfig(
        "chat", str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path / "tok"), cache_dir=str(tmp_path)
    )
    with pytest.raises(UserError, match=r"a.jsonl:1 has message 2") as caught:
        open_corpus(given, 60)
    assert "skip_bad_rows" not in str(caught.value)
