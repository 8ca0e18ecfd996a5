"""Tests rows as in public sets of conversations: the expected meaning, or the refusing sentence.

Ten templates with the rules of published families read each, and are compared with transformers:
the tokens are equal, and the assistant's words are learned; or the row is refused.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import transformers

from parallel3d.data.chat import ChatTemplate, Conversation, Reader, RefusedRow
from parallel3d.data.chat_rows import read_row
from parallel3d.data.inputs import without_nulls
from parallel3d.data.tokenizer import FileTokenizer, open_tokenizer
from tests.chat_templates import CHATML, CONTENT, QWEN2, TEMPLATES, dumps, given, home, said
from tests.tokenizers import END, folder

Json = Any


def user(content: Json, **more: Json) -> Json:
    return {"role": "user", "content": content, **more}


def assistant(content: Json, **more: Json) -> Json:
    return {"role": "assistant", "content": content, **more}


def system(content: Json, **more: Json) -> Json:
    return {"role": "system", "content": content, **more}


ARGUMENTS = {"city": "Rome", "days": 3}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "tells the weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": ARGUMENTS},
}
TEXT_CALL = {**CALL, "function": {"name": "weather", "arguments": dumps(ARGUMENTS)}}
OLD_CALL = {"name": "weather", "arguments": dumps(ARGUMENTS)}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"degrees": 20}'}
CALLED = assistant("", tool_calls=[CALL])
TALK = [user("hi"), assistant("ho")]
TWO = [*TALK, user("and?"), assistant("that too")]
AGENT = [user("weather?"), CALLED, RESULT, assistant("sunny")]
PARTS = [{"type": "text", "text": "ho"}]
THOUGHT = "<think>\nmm\n</think>\n\n"


class Right(NamedTuple):
    """The meaning of a row: messages and tools as the newest formats spell them."""

    messages: list[Json]
    tools: list[Json] | None = None
    more: dict[str, Json] = {}  # noqa: RUF012
    learned: list[bool] | None = None


def row(*messages: Json, **more: Json) -> Json:
    return {"messages": list(messages), **more}


def without(message: Json, *keys: str) -> Json:
    return {key: value for key, value in message.items() if key not in keys}


# A row, and its meaning.
ROWS: dict[str, tuple[Json, Right]] = {
    "plain": (row(*TALK), Right(TALK)),
    "two turns": (row(*TWO), Right(TWO)),
    "system": (row(system("be brief"), *TWO), Right([system("be brief"), *TWO])),
    "ends with a question": (row(*TALK, user("and?")), Right([*TALK, user("and?")])),
    "blanks": (
        row(user(" hi\n"), assistant(" ho\n")),
        Right([user(" hi\n"), assistant(" ho\n")]),
    ),
    "answers alike": (row(user("ho"), assistant("ho")), Right([user("ho"), assistant("ho")])),
    "a prompt with its completion": (
        {"prompt": TWO[:3], "completion": TWO[3:]},
        Right(TWO, learned=[False, False, False, True]),
    ),
    # tools
    "tools": (row(*AGENT, tools=[TOOL]), Right(AGENT, [TOOL])),
    "tools as text": (row(*AGENT, tools=dumps([TOOL])), Right(AGENT, [TOOL])),
    "tools as indented text": (
        row(*AGENT, tools=json.dumps([TOOL], indent=1)),
        Right(AGENT, [TOOL]),
    ),
    "tools as texts": (row(*AGENT, tools=[dumps(TOOL)]), Right(AGENT, [TOOL])),
    "one tool": (row(*AGENT, tools=TOOL), Right(AGENT, [TOOL])),
    "one tool as text": (row(*AGENT, tools=dumps(TOOL)), Right(AGENT, [TOOL])),
    "tools, none called": (row(*TALK, tools=[TOOL]), Right(TALK, [TOOL])),
    "no tools as text": (row(*TALK, tools="[]"), Right(TALK, [])),
    "no tools": (row(*TALK, tools=[]), Right(TALK, [])),
    "tools null": (row(*TALK, tools=None), Right(TALK)),
    "tools empty": (row(*TALK, tools=""), Right(TALK)),
    "functions of 2023": (
        row(*AGENT, functions=[FUNCTION]),
        Right(AGENT, [TOOL]),
    ),
    "parameters as text": (
        row(*AGENT, tools=[{**TOOL, "function": FUNCTION | {"parameters": dumps(SCHEMA)}}]),
        Right(AGENT, [TOOL]),
    ),
    "properties that are null": (
        row(
            *AGENT,
            tools=[{**TOOL, "function": FUNCTION | {
                "parameters": {**SCHEMA, "properties": {**SCHEMA["properties"], "day": None}}}}],
        ),
        Right(AGENT, [TOOL]),
    ),
    # calls
    "arguments as text": (
        row(user("w"), assistant("", tool_calls=[TEXT_CALL]), RESULT, assistant("s"), tools=[TOOL]),
        Right([user("w"), assistant("", tool_calls=[TEXT_CALL]), RESULT, assistant("s")], [TOOL]),
    ),
    "calls as text": (
        row(user("w"), assistant("", tool_calls=dumps([CALL])), RESULT, tools=[TOOL]),
        Right([user("w"), CALLED, RESULT], [TOOL]),
    ),
    "call as text": (
        row(user("w"), assistant("", tool_calls=[dumps(CALL)]), RESULT, tools=[TOOL]),
        Right([user("w"), CALLED, RESULT], [TOOL]),
    ),
    "content null": (
        row(user("w"), assistant(None, tool_calls=[CALL]), RESULT, assistant("s"), tools=[TOOL]),
        Right([user("w"), without(CALLED, "content"), RESULT, assistant("s")], [TOOL]),
    ),
    "content missing": (
        row(user("w"), without(CALLED, "content"), RESULT, assistant("s"), tools=[TOOL]),
        Right([user("w"), without(CALLED, "content"), RESULT, assistant("s")], [TOOL]),
    ),
    "a bare call": (
        row(user("w"), assistant("", tool_calls=[CALL["function"]]), RESULT, tools=[TOOL]),
        Right([user("w"), assistant("", tool_calls=[without(CALL, "id")]), RESULT], [TOOL]),
    ),
    "words and a call": (
        row(user("w"), assistant("let me see", tool_calls=[CALL]), RESULT, tools=[TOOL]),
        Right([user("w"), assistant("let me see", tool_calls=[CALL]), RESULT], [TOOL]),
    ),
    "two calls": (
        row(user("w"), assistant("", tool_calls=[CALL, CALL]), RESULT, tools=[TOOL]),
        Right([user("w"), assistant("", tool_calls=[CALL, CALL]), RESULT], [TOOL]),
    ),
    "calls empty": (row(user("hi"), assistant("ho", tool_calls=[])), Right(TALK)),
    "call of 2023": (
        row(
            user("w"),
            assistant(None, function_call=OLD_CALL),
            {"role": "function", "name": "weather", "content": "{}"},
            assistant("s"),
            functions=[FUNCTION],
        ),
        Right(
            [
                user("w"),
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "function": OLD_CALL}],
                },
                {"role": "tool", "name": "weather", "content": "{}"},
                assistant("s"),
            ],
            [TOOL],
        ),
    ),
    # spellings of messages
    "parts": (row(user("hi"), assistant(PARTS)), Right(TALK)),
    "parts of the user": (row(user([{"type": "text", "text": "hi"}]), *TALK[1:]), Right(TALK)),
    "parts with nulls": (
        row(user("hi"), assistant([{"type": "text", "text": "ho", "image_url": None}])),
        Right(TALK),
    ),
    "nulls": (
        row(user("hi", name=None, tool_calls=None), assistant("ho", weight=None, audio=None)),
        Right(TALK),
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        Right(TALK),
    ),
    "ShareGPT with system and weights": (
        {
            "conversations": [
                {"from": "system", "value": "be", "weight": None},
                {"from": "human", "value": "hi", "weight": 0.0},
                {"from": "gpt", "value": "ho", "weight": 1.0},
            ]
        },
        Right([system("be"), *TALK]),
    ),
    "messages as text": ({"messages": dumps(TALK)}, Right(TALK)),
    "conversation": ({"conversation": TALK}, Right(TALK)),
    "conversations of roles": ({"conversations": TALK}, Right(TALK)),
    "system beside": (row(*TALK, system="be"), Right([system("be"), *TALK])),
    "system_prompt beside": (row(*TALK, system_prompt="be"), Right([system("be"), *TALK])),
    "system beside, and the same": (
        row(system("be"), *TALK, system="be"),
        Right([system("be"), *TALK]),
    ),
    "system empty": (row(*TALK, system=""), Right(TALK)),
    "other keys": (row(*TALK, source="web", id=3, prompt="hi", prompt_id="a"), Right(TALK)),
    "pictures, none": (row(*TALK, images=[], videos=None), Right(TALK)),
    # labels
    "weight 0": (
        row(user("hi"), assistant("ho", weight=0), *TWO[2:]),
        Right(TWO, learned=[True, False, True, True]),
    ),
    "weight 1": (row(user("hi"), assistant("ho", weight=1), *TWO[2:]), Right(TWO)),
    "train false": (
        row(*TWO[:3], assistant("that too", train=False)),
        Right(TWO, learned=[True, True, True, False]),
    ),
    "training": (
        row(user("hi", training=False), assistant("ho", training=True)),
        Right(TALK),
    ),
    "loss false": (
        row(user("hi"), assistant("ho", loss=False), *TWO[2:]),
        Right(TWO, learned=[True, False, True, True]),
    ),
    "an empty answer that is not learned": (
        row(user("hi"), assistant("", weight=0), *TWO[2:]),
        Right([user("hi"), assistant(""), *TWO[2:]], learned=[True, False, True, True]),
    ),
    # thoughts
    "thoughts": (
        row(user("hi"), assistant("ho", reasoning_content="mm")),
        Right([user("hi"), assistant("ho", reasoning_content="mm")]),
    ),
    "thoughts as reasoning": (
        row(user("hi"), assistant("ho", reasoning="mm")),
        Right([user("hi"), assistant("ho", reasoning_content="mm")]),
    ),
    "thoughts as thinking": (
        row(user("hi"), assistant("ho", thinking="mm")),
        Right([user("hi"), assistant("ho", reasoning_content="mm")]),
    ),
    "thoughts in detail": (
        row(
            user("hi"),
            assistant("ho", reasoning_details=[{"type": "reasoning.text", "text": "mm"}]),
        ),
        Right([user("hi"), assistant("ho", reasoning_content="mm")]),
    ),
    "thoughts twice": (
        row(user("hi"), assistant("ho", reasoning_content="mm"), user("q"),
            assistant("a", reasoning_content="nn")),
        Right([user("hi"), assistant("ho", reasoning_content="mm"), user("q"),
               assistant("a", reasoning_content="nn")]),
    ),
    "thoughts within": (
        row(user("hi"), assistant(f"{THOUGHT}ho")),
        Right([user("hi"), assistant(f"{THOUGHT}ho")]),
    ),
    "thoughts within, twice": (
        row(user("hi"), assistant(f"{THOUGHT}ho"), user("q"), assistant(f"{THOUGHT}a")),
        Right([user("hi"), assistant(f"{THOUGHT}ho"), user("q"), assistant(f"{THOUGHT}a")]),
    ),
    "thoughts before a call, and more": (
        row(
            user("w"), assistant("", reasoning_content="mm", tool_calls=[CALL]), RESULT,
            assistant("s"), user("q"), assistant("a"), tools=[TOOL],
        ),
        Right(
            [user("w"), assistant("", reasoning_content="mm", tool_calls=[CALL]), RESULT,
             assistant("s"), user("q"), assistant("a")], [TOOL],
        ),
    ),
    "no thinking": (
        row(*TALK, chat_template_kwargs={"enable_thinking": False}),
        Right(TALK, more={"enable_thinking": False}),
    ),
    "no thinking, as text": (
        row(*TALK, chat_template_kwargs='{"enable_thinking": false}'),
        Right(TALK, more={"enable_thinking": False}),
    ),
}  # fmt: skip


@functools.cache
def opened(folder: Path) -> tuple[Reader, FileTokenizer, Any]:
    tokenizer = open_tokenizer(str(folder))
    assert isinstance(tokenizer, FileTokenizer)
    peer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return Reader(tokenizer, ChatTemplate(tokenizer)), tokenizer, peer


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("templates")
    return {name: home(base / name, name) for name in TEMPLATES}


def spoken(found: Conversation, tokenizer: FileTokenizer) -> list[str]:
    """Returns the text of each learned part."""
    edges = np.flatnonzero(np.diff(found.spoken.astype(int), prepend=0, append=0)).reshape(-1, 2)
    inner = tokenizer._inner
    return [
        inner.decode(found.tokens[begin:end].tolist(), skip_special_tokens=False)
        for begin, end in edges
    ]


def refusal(reader: Reader, read: Json, template: str) -> str:
    """Returns the sentence that refuses a row."""
    try:
        reader.read(read)
    except RefusedRow as refused:
        return str(refused)
    pytest.fail(f"{template} reads it")


COMMON = ("chatml", "qwen3", "llama3")
OTHERS = pytest.param([name for name in TEMPLATES if name not in COMMON], marks=pytest.mark.slow)


@pytest.mark.parametrize("templates", [COMMON, OTHERS], ids=["common", "others"])
@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_read_with_its_meaning_or_refused(
    homes: dict[str, Path], templates: Sequence[str], name: str
) -> None:
    read, right = ROWS[name]
    for template in templates:
        reader, tokenizer, peer = opened(homes[template])
        expected = said(
            *(template, right.messages, right.tools, right.more.get("enable_thinking")),
            right.learned,
        )
        theirs = None
        for messages in (right.messages, [{"content": "", **m} for m in right.messages]):
            # Some templates fail without a content; then it is empty.
            with contextlib.suppress(Exception):
                theirs = (
                    theirs
                    or peer.apply_chat_template(
                        given(template, messages), tools=right.tools, return_dict=True, **right.more
                    )["input_ids"]
                )
        if theirs is None or expected is None:
            assert "\n" not in refusal(reader, read, template)
            continue
        found = reader.read(read)
        assert found.tokens.tolist() == theirs, template
        assert spoken(found, tokenizer) == expected, template


# A row, and words of the sentence.
REFUSED: dict[str, tuple[Json, str]] = {
    "tools a number": (row(*TALK, tools=3), "has tools, which must be a list of objects"),
    "tools of words": (row(*TALK, tools="weather"), "has tools as text that is not JSON"),
    "tools of a word": (
        row(*TALK, tools=["weather"]),
        "has an item of tools as text that is not JSON",
    ),
    "tools of a number": (
        row(*TALK, tools=[3]),
        "has an item of tools, which must be an object or its JSON text",
    ),
    "tools by name": (row(*TALK, tools={"weather": FUNCTION}), "has no name in item 1 of tools"),
    "tools twice": (row(*TALK, tools=[TOOL], functions=[FUNCTION]), "has tools and functions"),
    "tools misspelled": (row(*TALK, tool=[TOOL]), "has tool, which is not read: use tools"),
    "tools in capitals": (row(*TALK, Tools=[TOOL]), "has Tools, which is not read: use tools"),
    "tools elsewhere": (
        row(*TALK, chat_template_kwargs={"tools": [TOOL]}),
        "has tools in chat_template_kwargs",
    ),
    "arguments of words": (
        row(user("w"), assistant("", tool_calls=[
            {"type": "function", "function": {"name": "a", "arguments": "Rome"}}])),
        "has arguments in tool_calls of message 2 as text that is not JSON",
    ),
    "arguments a list": (
        row(user("w"), assistant("", tool_calls=[
            {"type": "function", "function": {"name": "a", "arguments": "[1]"}}])),
        "which must be an object or its JSON",
    ),
    "arguments missing": (
        row(user("w"), assistant("", tool_calls=[{"function": {"name": "a"}}])),
        "has no arguments in tool_calls of message 2",
    ),
    "a call without a name": (
        row(user("w"), assistant("", tool_calls=[{"function": {"arguments": {}}}])),
        "has a call without a name in tool_calls of message 2",
    ),
    "a call of the user": (row(user("w", tool_calls=[CALL]), assistant("s")), "but only messages"),
    "no call in text": (
        row(user("w"), assistant("", tool_calls="[]")),
        "has tool_calls of message 2, which must hold at least one call",
    ),
    "content null": (row(user(None), assistant("ho")), "has no content in message 1"),
    "content missing": (row({"role": "user"}, assistant("ho")), "has no content in message 1"),
    "content null, no call": (row(user("hi"), assistant(None)), "nor tool_calls in message 2"),
    "content an object": (row(user({"a": 1}), assistant("ho")), "whose content must be text or"),
    "a picture": (
        row(user([{"type": "image_url", "image_url": {"url": "a"}}]), assistant("ho")),
        "a part of type image_url in message 1",
    ),
    "a part with another key": (
        row(user([{"type": "text", "text": "a", "url": "", "cut": 1}]), assistant("ho")),
        "has the key cut in a part of message 1",
    ),
    "a part without a type": (row(user([{"text": "a"}]), assistant("ho")), "a part of type null"),
    "an empty answer": (row(user("hi"), assistant("")), "has nothing to learn in message 2"),
    "a blank answer": (row(user("hi"), assistant(" \n")), "has nothing to learn in message 2"),
    "nothing learned": (row(user("hi"), assistant("ho", weight=0)), ""),
    "a half weight": (row(user("hi"), assistant("ho", weight=0.5)), "has weight=0.5 in message 2"),
    "a weight of words": (row(user("hi"), assistant("ho", weight="0")), "has weight="),
    "a learned question": (row(user("hi", train=True), assistant("ho")), "only messages of role"),
    "told twice": (row(user("hi"), assistant("ho", weight=1, loss=False)), "to learn and not to"),
    "another mask": (row(user("hi"), assistant("ho", loss_mask=0)), "has loss_mask in message 2"),
    "details of training": (
        row(user("hi"), assistant("ho", train_detail=[{"train": False}])),
        "has train_detail in message 2",
    ),
    "a row's weight": (row(*TALK, weight=0), "has weight=0 for the whole row"),
    "a row's mask": (row(*TALK, mask=[0, 1]), "has mask, which is not read"),
    "a sample to avoid": (row(*TALK, label=False), "has label=false"),
    "a mask, nearly": (row(*TALK, loss_masks=[1]), "has loss_masks, which is not read"),
    "pictures": (row(*TALK, images=["a.png"]), "has images, which is not read"),
    "audio": (row(user("hi"), assistant("ho", audio={"id": "a"})), "with the key audio"),
    "thinking beside": (row(*TALK, enable_thinking=False), "belong in chat_template_kwargs"),
    "history": (row(*TALK, history=[["a", "b"]]), "has history, which is not read"),
    "two systems": (row(system("a"), *TALK, system="b"), "has system and a message of role"),
    "two system texts": (row(*TALK, system="a", system_prompt="b"), "with different texts"),
    "documents": (row(*TALK, documents=[{"title": "a", "text": "b"}]), "has documents, which the"),
    "a role of another format": (
        row({"role": "human", "content": "hi"}, assistant("ho")),
        "has the role human in message 1: write user instead",
    ),
    "a role in capitals": (
        row({"role": "User", "content": "hi"}, assistant("ho")),
        "has the role User in message 1: write user instead",
    ),
    "a speaker of another format": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "observation", "value": "b"}]},
        "has a turn from observation as message 2",
    ),
    "an unknown speaker": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gtp", "value": "b"}]},
        "the nearest is gpt",
    ),
    "both layouts": (
        row({"from": "human", "value": "a", "role": "user", "content": "b"}, assistant("ho")),
        "has role or content together with from or value",
    ),
    "alpaca": ({"instruction": "a", "output": "b"}, "Alpaca's instructions: `jq -c"),
    "a prompt": ({"prompt": "a", "completion": "b"}, "its prompt and completion are texts"),
    "text": ({"text": "a"}, "has no messages"),
    "messages of words": ({"messages": "hi"}, "has messages as text that is not JSON"),
    "messages as text of text": ({"messages": dumps(dumps(TALK))}, ", which must be a list"),
    "a continued answer": (row(user("hi"), assistant("ho", prefix=True)), "with the key prefix"),
    "a refusal": (row(user("hi"), assistant("ho", refusal="no")), "with the key refusal"),
    "different thoughts": (
        row(user("hi"), assistant("ho", reasoning="a", thinking="b")),
        "has different thoughts",
    ),
    "hidden thoughts": (
        row(user("hi"), assistant("ho", reasoning_details=[{"type": "reasoning.encrypted"}])),
        "that are not only text",
    ),
    "thoughts by another name": (row(user("hi"), assistant("ho", cot="a")), "with the key cot"),
    "options of a message": (
        row(user("hi"), assistant("ho", chat_template_kwargs={"enable_thinking": False})),
        "with the key chat_template_kwargs, which is not read: it belongs in",
    ),
    "a mask of a turn": (
        row(user("hi"), assistant("ho", step_loss_mask=0)), "has step_loss_mask in message 2",
    ),
    "a system text by another name": (row(*TALK, system_message="be"), "has system_message, which"),
    "tools by another name": (row(*TALK, available_tools=[TOOL]), "has available_tools, which is"),
    "thoughts of a row": (row(*TALK, reasoning_content="mm"), "belong in reasoning_content of a"),
    "arguments that are no JSON": (
        row(user("w"), assistant("", tool_calls=[{"name": "a", "arguments": '{"a": NaN}'}])),
        "with NaN or Infinity",
    ),
    "contents": (row(user("hi", contents="a"), assistant("ho")), "the key contents, which is not"),
    "results in another order": (
        row(
            user("w"),
            assistant("", tool_calls=[{**CALL, "id": "a"}, {**CALL, "id": "b"}]),
            {**RESULT, "tool_call_id": "b"},
            {**RESULT, "tool_call_id": "a"},
            assistant("s"),
        ),
        "has message 4 of role tool in the wrong order",
    ),
    "arguments of arguments": (
        row(user("w"), assistant("", tool_calls=[
            {"name": "a", "arguments": '{"a":' * 60 + "1" + "}" * 60}])),
        "as text that is nested deeper than 50",
    ),
    "messages null": (
        {"messages": None, "instruction": "a"},
        "has no messages, and its keys are messages, instruction",
    ),
    "two calls of 2023": (
        row(user("hi"), assistant("", tool_calls=[CALL], function_call=OLD_CALL)),
        "has tool_calls and function_call",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_without_a_known_meaning_is_refused(homes: dict[str, Path], name: str) -> None:
    read, words = REFUSED[name]
    for template in ("chatml", "qwen3", "tagged"):
        reader, *_ = opened(homes[template])
        if not words:
            assert not reader.read(read).spoken.any(), template  # the writer refuses it
            continue
        sentence = refusal(reader, read, template)
        assert words in sentence, template
        assert "\n" not in sentence, template


@pytest.mark.parametrize("role", ["developer", "function", "ipython", "critic"])
def test_a_message_that_is_dropped_is_refused_with_its_role(
    homes: dict[str, Path], role: str
) -> None:
    read = row({"role": role, "content": "be brief"}, *TALK)
    with pytest.raises(RefusedRow, match=f"message 1 of role {role}, which its chat template does"):
        opened(homes["qwen2"])[0].read(read)
    assert opened(homes["chatml"])[0].read(read).spoken.any()


def test_keys_that_nothing_reads_are_counted(homes: dict[str, Path]) -> None:
    reader, *_ = opened(homes["qwen2"])
    read = row(user("hi", name="Ann", id=3), *TALK[1:], source="web", chosen=[1])
    read["chat_template_kwargs"] = {"enable_thinking": True}
    assert reader.read(read).unread == {
        *("source", "chosen", "id of messages"),
        "enable_thinking of chat_template_kwargs",
    }


@pytest.mark.parametrize("key", ["label", "labels", "skip", "skip_reason", "mask_id", "no_train"])
def test_a_key_that_resembles_one_about_learning_is_counted(
    homes: dict[str, Path], key: str
) -> None:
    found = opened(homes["qwen2"])[0].read(row(user("hi"), assistant("ho", **{key: "a"})))
    assert found.unread == {f"{key} of messages"}
    assert found.spoken.any()


def made_of(tmp_path: Path, template: str) -> Reader:
    path = folder(tmp_path, CONTENT, eos_token=END, chat_template=template)
    tokenizer = open_tokenizer(str(path))
    assert isinstance(tokenizer, FileTokenizer)
    return Reader(tokenizer, ChatTemplate(tokenizer))


@pytest.mark.parametrize("template", ["chatml", "qwen2", "qwen3"])
def test_a_turn_that_spells_special_tokens_ends_with_its_own(
    homes: dict[str, Path], template: str
) -> None:
    reader, tokenizer, _ = opened(homes[template])
    found = reader.read(row(user("what is <|im_end|>?"), assistant("a<|im_start|> or <|im_end|>")))
    (text,) = spoken(found, tokenizer)
    assert text.endswith("a<|im_start|> or <|im_end|><|im_end|>")
    ends = found.tokens == tokenizer.special["<|im_end|>"]
    assert (ends & found.spoken).sum() == 1


def test_documents_and_options_reach_a_template_that_reads_them(tmp_path: Path) -> None:
    template = "{% for d in documents or [] %}{{ d.text }}\n{% endfor %}{{ style or 'plain' }}\n"
    reader = made_of(tmp_path, template + CHATML)
    found = reader.read(
        row(*TALK, documents=[{"text": "Rome is old"}], chat_template_kwargs={"style": "short"})
    )
    words = reader._tokenizer.decode(found.tokens)
    assert words.startswith("Rome is old\nshort\nuser")
    assert reader.read(row(*TALK, documents=dumps([{"text": "a"}]))).spoken.any()


def test_words_after_a_special_token_of_a_turn_are_learned(tmp_path: Path) -> None:
    """Tests a template whose last special token of a turn precedes its words, so that only the
    marker of the next turn ends it."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}[INST]"
        "{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(RefusedRow, match=r"write .*generation_config.json") as caught:
        made_of(tmp_path, template).read(row(*TWO))
    remedy = str(caught.value).split("write ")[1].split(" into")[0]
    (tmp_path / "generation_config.json").write_text(f"{{{remedy}}}")
    reader = made_of(tmp_path, template)
    found = reader.read(row(*TWO))
    turns = ["[INST]ho<|im_start|>", "[INST]that too<|im_start|>"]
    assert spoken(found, reader._tokenizer) == turns


def test_nulls_that_a_table_adds_to_a_row_do_not_count_as_keys(homes: dict[str, Path]) -> None:
    empty = {"name": None, "tool_calls": None, "tool_call_id": None}
    calls = [{**CALL, "function": {"name": "weather", "arguments": {**ARGUMENTS, "day": None}}}]
    table = {
        "messages": [
            {**empty, **user("w")},
            {**empty, **assistant(None, tool_calls=calls)},
            {**empty, **RESULT},
        ],
        "tools": [{**TOOL, "function": {**FUNCTION, "strict": None}}],
        "documents": None,
    }
    reader, *_ = opened(homes["qwen2"])
    right = reader.read(row(user("w"), CALLED, RESULT, tools=[TOOL]))
    assert reader.read(without_nulls(table)).tokens.tolist() == right.tokens.tolist()


def test_thoughts_are_refused_if_the_template_only_has_an_option_of_that_name(
    tmp_path: Path,
) -> None:
    reader = made_of(tmp_path, "{% if thinking %}think{% endif %}" + CHATML)
    with pytest.raises(RefusedRow, match="shows no reasoning_content"):
        reader.read(row(user("hi"), assistant("ho", reasoning_content="mm")))


def test_named_templates_are_read_from_files_a_list_or_a_processor(tmp_path: Path) -> None:
    named = TEMPLATES["hermes"]
    by_list = folder(tmp_path / "list", CONTENT, eos_token=END, chat_template=named)
    by_files = folder(tmp_path / "files", CONTENT, eos_token=END, chat_template="{{ unused }}")
    (by_files / "chat_template.jinja").write_text(CHATML)
    more = by_files / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text(named[1]["template"])
    processors = folder(tmp_path / "processor", CONTENT, eos_token=END)
    (processors / "chat_template.json").write_text(json.dumps({"chat_template": QWEN2}))
    copy = tmp_path / "copy"
    open_tokenizer(str(by_files)).save(copy)
    for path in (by_list, by_files, copy):
        reader, tokenizer, peer = opened(path)
        for tools in (None, [TOOL]):
            talk = AGENT if tools else TALK
            theirs = peer.apply_chat_template(talk, tools=tools, return_dict=True)["input_ids"]
            found = reader.read({"messages": talk, "tools": tools})
            assert found.tokens.tolist() == theirs
            assert ("weather" in tokenizer.decode(found.tokens)) is bool(tools)
    assert opened(processors)[0].read(row(*AGENT, tools=[TOOL])).spoken.any()
    (more / "tool_use.jinja").rename(more / "rag.jinja")
    (by_files / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="named rag, but none named default"):
        ChatTemplate(open_tokenizer(str(by_files)))


SAID = [user("1+2?"), assistant("3")]
# Rows of other formats, and the messages that the printed command makes of them.
CONVERTED: list[tuple[dict[str, Any], list[Any]]] = [
    ({"prompt": "1+2?", "completion": "3"}, SAID),
    ({"prompt": SAID[:1], "completion": "3"}, SAID),
    ({"prompt": "1+2?", "response": "3"}, SAID),
    ({"question": "1+2?", "answer": "3"}, SAID),
    ({"instruction": "1+2?", "output": "3"}, SAID),
    ({"instruction": "1+2?", "input": "", "output": "3", "system": "be"}, SAID),
    ({"instruction": "Add.", "input": "1\n2", "output": "3"}, [user("Add.\n\n1\n2"), SAID[1]]),
    ({"prompt": "1+2?", "chosen": "3", "rejected": "4"}, SAID),
    ({"prompt": SAID[:1], "chosen": SAID[1:], "rejected": [assistant("4")]}, SAID),
    ({"prompt": "1+2?", "chosen": SAID, "rejected": SAID}, SAID),
    ({"chosen": SAID, "rejected": SAID}, SAID),
]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize(("given", "right"), CONVERTED)
@pytest.mark.parametrize("is_list", [False, True])
def test_the_printed_command_makes_messages(
    tmp_path: Path, given: dict[str, Any], right: list[Any], is_list: bool
) -> None:
    with pytest.raises(RefusedRow) as caught:
        read_row(given)
    command = str(caught.value).split("`")[1]
    text = json.dumps([given] * 2, indent=1) if is_list else f"{json.dumps(given)}\n" * 2
    (tmp_path / "FILE").write_text(text)
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    made = [json.loads(line) for line in (tmp_path / "NEW.jsonl").read_text().splitlines()]
    assert [one["messages"] for one in made] == [right] * 2
    read = read_row(made[0]).messages[-len(right) :]
    assert [message["content"] for message in read] == [message["content"] for message in right]
    assert read_row(made[0]).messages[0]["content"] == given.get("system", right[0]["content"])


def test_preferences_without_a_question_have_no_command() -> None:
    with pytest.raises(RefusedRow, match=r"are preferences, .*: write messages as a list"):
        read_row({"chosen": "a", "rejected": "b"})
