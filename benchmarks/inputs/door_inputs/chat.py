"""Rows of conversations, spelled as in many formats and mutated, for templates of many families.

A talk is drawn with its meaning; each mutation changes the row, and the meaning if needed. The
right answer is derived from the meaning: tokens by transformers, labels by the families' rules.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inputs.door_inputs.answers import REFUSAL, Input
from parallel3d.data.chat import ChatTemplate, Reader, Refused
from parallel3d.data.tokenizer import FileTokenizer, open_tokenizer
from parallel3d.errors import UserError
from tests.chat_templates import TEMPLATES, dumps, given, home, said

WORDS = ("hello", "Rome", "héllo", "漢字", "1 + 1 = 2", "def f():\n    return", "yes", "why?", "a")
FUNCTIONS = ("weather", "get_time", "search_web")


@dataclass
class Drawn:
    """A row and its meaning; no meaning if it must be refused.

    everyday: whether all of its changes are common in practice. ignored: whether transformers would
    show the row without the field for which it must be refused here.
    """

    row: dict[str, Any]
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    thinking: bool | None = None
    learned: list[bool] = field(default_factory=list)
    is_refused: bool = False
    ignored: bool = False
    everyday: bool = True
    done: tuple[str, ...] = ()


def _words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))


def _talk(rng: random.Random) -> Drawn:
    """Draws a conversation in the newest spelling."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": _words(rng)})
    calls, thinks = rng.random() < 0.4, rng.random() < 0.3
    names = rng.sample(FUNCTIONS, rng.randint(1, 2))
    for number in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": _words(rng)})
        if calls and rng.random() < 0.7:
            call = {
                "id": f"call{number:05}",
                "type": "function",
                "function": {
                    "name": rng.choice(names),
                    "arguments": {"city": _words(rng), "days": rng.randint(0, 9)},
                },
            }
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            result = {"role": "tool", "tool_call_id": call["id"], "content": _words(rng)}
            messages.append(result)
        answer: dict[str, Any] = {"role": "assistant", "content": _words(rng)}
        if thinks and rng.random() < 0.7:
            thought = _words(rng)
            if rng.random() < 0.5:
                answer["content"] = f"<think>\n{thought}\n</think>\n\n{answer['content']}"
            else:
                answer["reasoning_content"] = thought
        messages.append(answer)
    tools = None
    if calls:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        tools = [
            {
                "type": "function",
                "function": {"name": name, "description": _words(rng), "parameters": schema},
            }
            for name in names
        ]
    row: dict[str, Any] = {"messages": copy.deepcopy(messages)}
    if tools is not None:
        row["tools"] = copy.deepcopy(tools)
    return Drawn(row, messages, tools, learned=[True] * len(messages))


# Mutations: each changes the row in place, and returns the new meaning, or None if it does not
# apply.


Mutation = Callable[[random.Random, Drawn], Drawn | None]


def _turns(drawn: Drawn) -> list[dict[str, Any]]:
    """Returns the messages of the row in their present spelling; none in another layout."""
    turns = drawn.row.get("messages")
    return turns if isinstance(turns, list) and len(turns) == len(drawn.messages) else []


def _refused(drawn: Drawn, ignored: bool = False) -> Drawn:
    return replace(drawn, is_refused=True, ignored=ignored, everyday=False)


def tools_as_text(rng: random.Random, drawn: Drawn) -> Drawn | None:
    if not isinstance(drawn.row.get("tools"), list):
        return None
    drawn.row["tools"] = rng.choice((dumps, json.dumps))(drawn.row["tools"])
    return drawn


def tools_as_texts(rng: random.Random, drawn: Drawn) -> Drawn | None:
    tools = drawn.row.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return None
    drawn.row["tools"] = [dumps(tool) for tool in tools]
    return drawn


def tools_as_text_of_text(rng: random.Random, drawn: Drawn) -> Drawn | None:
    if not drawn.row.get("tools"):
        return None
    drawn.row["tools"] = dumps(dumps(drawn.row["tools"]))
    return _refused(drawn)


def one_tool(rng: random.Random, drawn: Drawn) -> Drawn | None:
    tools = drawn.row.get("tools")
    if not isinstance(tools, list) or len(tools) != 1:
        return None
    drawn.row["tools"] = tools[0]
    return drawn


def parameters_as_text(rng: random.Random, drawn: Drawn) -> Drawn | None:
    tools = drawn.row.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return None
    for tool in tools:
        if isinstance(tool["function"]["parameters"], str):
            return None
        tool["function"]["parameters"] = dumps(tool["function"]["parameters"])
    return drawn


def tools_as_words(rng: random.Random, drawn: Drawn) -> Drawn | None:
    drawn.row["tools"] = rng.choice(
        ("weather", 3, True, ["weather"], {"weather": {}}, [[]], "{'a'")
    )
    return _refused(drawn)


def no_tools(rng: random.Random, drawn: Drawn) -> Drawn | None:
    if drawn.row.get("tools") is not None:
        return None
    drawn.row["tools"] = rng.choice((None, "", "null"))
    return drawn


def functions(rng: random.Random, drawn: Drawn) -> Drawn | None:
    tools = drawn.row.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return None
    del drawn.row["tools"]
    drawn.row["functions"] = [tool["function"] for tool in tools]
    return drawn


def arguments_as_text(rng: random.Random, drawn: Drawn) -> Drawn | None:
    found = False
    for turn, message in zip(_turns(drawn), drawn.messages, strict=False):
        for call, meant in zip(
            turn.get("tool_calls") or (), message.get("tool_calls") or (), strict=False
        ):
            if not isinstance(call, dict) or isinstance(call["function"]["arguments"], str):
                continue
            text = rng.choice((dumps, json.dumps))(call["function"]["arguments"])
            call["function"]["arguments"] = text
            meant["function"] = meant["function"] | {"arguments": text}
            found = True
    return drawn if found else None


def arguments_as_words(rng: random.Random, drawn: Drawn) -> Drawn | None:
    for turn in _turns(drawn):
        for call in turn.get("tool_calls") or ():
            if isinstance(call, dict):
                call["function"]["arguments"] = rng.choice(
                    ("Rome", "[1]", "{'city': 'Rome'}", 3, ["a"], '"{}"', '{"a": 1, "a": 2}')
                )
                return _refused(drawn)
    return None


def calls_as_text(rng: random.Random, drawn: Drawn) -> Drawn | None:
    found = False
    for turn in _turns(drawn):
        if isinstance(turn.get("tool_calls"), list) and turn["tool_calls"]:
            turn["tool_calls"] = dumps(turn["tool_calls"])
            found = True
    return drawn if found else None


def content_of_calls(rng: random.Random, drawn: Drawn) -> Drawn | None:
    found, how = False, rng.choice(("null", "missing"))
    for turn, message in zip(_turns(drawn), drawn.messages, strict=False):
        if turn.get("tool_calls") and turn.get("content") == "":
            message.pop("content", None)
            turn["content"] = None
            if how == "missing":
                del turn["content"]
            found = True
    return drawn if found else None


def drop_content(rng: random.Random, drawn: Drawn) -> Drawn | None:
    turns = [turn for turn in _turns(drawn) if not turn.get("tool_calls")]
    if not turns:
        return None
    turn = rng.choice(turns)
    turn["content"] = rng.choice((None, 3, {"a": 1}, True))
    if rng.random() < 0.3:
        del turn["content"]
    return _refused(drawn)


def empty_answer(rng: random.Random, drawn: Drawn) -> Drawn | None:
    turns = [turn for turn in _turns(drawn) if turn.get("role") == "assistant"]
    if not turns or not all(drawn.learned) or any("reasoning_content" in turn for turn in turns):
        return None
    turn = rng.choice(turns)
    turn["content"] = rng.choice(("", " ", "\n"))
    turn.pop("tool_calls", None)
    return _refused(drawn)


def parts(rng: random.Random, drawn: Drawn) -> Drawn | None:
    turns = [turn for turn in _turns(drawn) if isinstance(turn.get("content"), str)]
    turns = [turn for turn in turns if turn["content"] and turn["role"] != "tool"]
    if not turns:
        return None
    for turn in turns if rng.random() < 0.5 else turns[:1]:
        turn["content"] = [{"type": "text", "text": turn["content"]}]
    return drawn


def parts_that_are_no_text(rng: random.Random, drawn: Drawn) -> Drawn | None:
    if not _turns(drawn):
        return None
    other = rng.choice(
        (
            {"type": "image_url", "image_url": {"url": "a"}},
            {"type": "image"},
            {"type": "input_audio", "input_audio": {}},
            {"type": "tool_use", "name": "a", "input": {}},
            {"type": "thinking", "thinking": "a"},
            {"type": "text", "text": None},
            {"text": "a"},
            "a",
        )
    )
    turn = rng.choice(_turns(drawn))
    turn["content"] = [{"type": "text", "text": "a"}, other]
    return _refused(drawn)


def sharegpt(rng: random.Random, drawn: Drawn) -> Drawn | None:
    turns = _turns(drawn)
    plain = all(
        set(turn) <= {"role", "content"} and isinstance(turn["content"], str) for turn in turns
    )
    if not turns or not plain or any(turn["role"] == "tool" for turn in turns):
        return None
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    del drawn.row["messages"]
    drawn.row["conversations"] = [
        {"from": names[turn["role"]], "value": turn["content"]} for turn in turns
    ]
    return drawn


def another_list(rng: random.Random, drawn: Drawn) -> Drawn | None:
    if not _turns(drawn):
        return None
    drawn.row["conversations"] = drawn.row.pop("messages")
    return drawn


def rename_list(rng: random.Random, drawn: Drawn) -> Drawn | None:
    if not _turns(drawn):
        return None
    name = rng.choice(("message", "Messages", "dialog", "turns", "chat", "msgs", "data"))
    drawn.row[name] = drawn.row.pop("messages")
    return _refused(drawn)


def rename_key(rng: random.Random, drawn: Drawn) -> Drawn | None:
    """Spells a key of the row in other letters."""
    names = {"tools": ("tool", "Tools", "TOOLS", "tools_")}
    for key, others in names.items():
        if drawn.row.get(key):
            drawn.row[rng.choice(others)] = drawn.row.pop(key)
            return _refused(drawn, ignored=True)
    return None


def keys_that_nobody_knows(rng: random.Random, drawn: Drawn) -> Drawn | None:
    """Adds a field that no reader knows, however close it is to one that is read."""
    turns = [turn for turn in _turns(drawn) if turn.get("role") == "assistant"]
    draw = rng.random()
    value: Any
    if draw < 0.2 and isinstance(drawn.row.get("tools"), list):
        drawn.row["toolss"] = drawn.row.pop("tools")
        return replace(drawn, tools=None, everyday=False)
    if draw < 0.6 and turns:
        key, value = rng.choice(
            (("wieght", 0), ("messages", []), ("reasoning_contents", "a"), ("tools_calls", []))
        )
        rng.choice(turns)[key] = value
    else:
        key, value = rng.choice(
            (
                ("chat_template_kwarg", {"enable_thinking": False}),
                ("document", [{"text": "b"}]),
                ("system_prompts", "be brief"),
                ("mesages", []),
                ("conversation_s_id", 3),
                ("enable_thinkin", False),
            )
        )
        drawn.row[key] = value
    return replace(drawn, everyday=False)


def rename_keys_of_messages(rng: random.Random, drawn: Drawn) -> Drawn | None:
    turns = _turns(drawn)
    if not turns:
        return None
    turn = rng.choice(turns)
    named = [key for key in ("role", "content", "tool_calls") if turn.get(key)]
    if not named:
        return None
    key = rng.choice(named)
    others = {
        "role": ("Role", "speaker", "roles", "author"),
        "content": ("text", "Content", "contents", "value", "message"),
        "tool_calls": ("tool_call", "toolCalls", "Tool_Calls", "tools_calls"),
    }
    if key == "content" and turn.get("tool_calls"):
        return None
    turn[rng.choice(others[key])] = turn.pop(key)
    return _refused(drawn)


def roles_of_another_format(rng: random.Random, drawn: Drawn) -> Drawn | None:
    turns = [turn for turn in _turns(drawn) if turn.get("role") in ("user", "assistant")]
    if not turns:
        return None
    others = {"user": ("human", "User", "USER"), "assistant": ("gpt", "bot", "Assistant", "model")}
    turn = rng.choice(turns)
    turn["role"] = rng.choice(others[turn["role"]])
    return _refused(drawn)


def weights(rng: random.Random, drawn: Drawn) -> Drawn | None:
    turns = _turns(drawn)
    spoken = [n for n, turn in enumerate(turns) if turn.get("role") == "assistant"]
    if not spoken or "weights" in drawn.done:
        return None
    key, yes, no = rng.choice(
        (("weight", 1, 0), ("weight", 1.0, 0.0), ("train", True, False), ("loss", True, False))
    )
    left = [number for number in spoken if rng.random() < 0.5] or [rng.choice(spoken)]
    learned = list(drawn.learned)
    for number in spoken:
        learned[number] = number in left
        if number not in left or rng.random() < 0.5:
            turns[number][key] = yes if number in left else no
    if rng.random() < 0.3 and turns[0]["role"] != "assistant":
        turns[0][key] = no
    return replace(drawn, learned=learned)


def bad_weights(rng: random.Random, drawn: Drawn) -> Drawn | None:
    turns = _turns(drawn)
    if not turns:
        return None
    spoken = [turn for turn in turns if turn.get("role") == "assistant"]
    asked = [turn for turn in turns if turn.get("role") != "assistant"]
    draw = rng.random()
    if draw < 0.4 and spoken:
        key, value = rng.choice(
            (("weight", 0.5), ("weight", 2), ("weight", "0"), ("train", "no"), ("loss", [0]))
        )
        rng.choice(spoken)[key] = value
    elif draw < 0.7 and spoken:
        key = rng.choice(("loss_mask", "mask", "loss_weight", "Weight", "train_detail", "weights"))
        rng.choice(spoken)[key] = 0
    elif asked:
        rng.choice(asked)[rng.choice(("weight", "train"))] = 1
    else:
        return None
    return _refused(drawn, ignored=True)


def keys_that_do_nothing(rng: random.Random, drawn: Drawn) -> Drawn:
    drawn.row |= {
        rng.choice(("source", "id", "meta", "prompt", "dataset", "lang", "score", "uuid")): "a"
    }
    return drawn


def keys_that_would_do(rng: random.Random, drawn: Drawn) -> Drawn:
    key, value = rng.choice(
        (
            ("images", ["a.png"]),
            ("image", "a.png"),
            ("audio", "a.wav"),
            ("enable_thinking", False),
            ("documents", [{"title": "a", "text": "b"}]),
            ("history", [["a", "b"]]),
            ("loss_mask", [0, 1]),
            ("weight", 0),
            ("label", False),
            ("chat_template_kwargs", "words"),
            ("chat_template_kwargs", {"add_generation_prompt": True}),
            ("systemPrompt", "be brief"),
        )
    )
    drawn.row[key] = value
    return _refused(drawn, ignored=key != "chat_template_kwargs")


def keys_of_messages_that_would_do(rng: random.Random, drawn: Drawn) -> Drawn | None:
    turns = [turn for turn in _turns(drawn) if turn.get("role") == "assistant"]
    if not turns:
        return None
    key, value = rng.choice(
        (
            ("images", ["a.png"]),
            ("audio", {"id": "a"}),
            ("prefix", True),
            ("refusal", "no"),
            ("function_call", {"name": "weather"}),
            ("thought", "hm"),
            ("cot", "hm"),
            ("reasoning_details", [{"type": "reasoning.encrypted", "data": "a"}]),
        )
    )
    turn = rng.choice(turns)
    if key == "reasoning_details" and any(
        name in turn for name in ("reasoning", "thinking", "reasoning_content")
    ):
        return None
    turn[key] = value
    return _refused(drawn, ignored=True)


def nulls(rng: random.Random, drawn: Drawn) -> Drawn:
    for turn in _turns(drawn):
        for key in ("name", "weight", "audio", "function_call", "refusal", "reasoning"):
            if key not in turn and rng.random() < 0.5:
                turn[key] = None
        if "tool_calls" not in turn and rng.random() < 0.3:
            turn["tool_calls"] = rng.choice((None, []))
    return drawn


def system_beside(rng: random.Random, drawn: Drawn) -> Drawn | None:
    turns = _turns(drawn)
    if not turns or turns[0]["role"] == "system" or "system" in drawn.row:
        return None
    text = _words(rng)
    drawn.row[rng.choice(("system", "system_prompt"))] = text
    messages = [{"role": "system", "content": text}, *drawn.messages]
    return replace(drawn, messages=messages, learned=[True, *drawn.learned])


def two_systems(rng: random.Random, drawn: Drawn) -> Drawn | None:
    turns = _turns(drawn)
    if not turns or turns[0]["role"] != "system":
        return None
    drawn.row["system"] = "another"
    return _refused(drawn, ignored=True)


def no_thinking(rng: random.Random, drawn: Drawn) -> Drawn | None:
    if "chat_template_kwargs" in drawn.row:
        return None
    wanted = rng.random() < 0.3
    value: Any = {"enable_thinking": wanted}
    drawn.row["chat_template_kwargs"] = rng.choice((value, dumps(value)))
    return replace(drawn, thinking=wanted)


def thoughts_by_other_names(rng: random.Random, drawn: Drawn) -> Drawn | None:
    found = False
    for turn in _turns(drawn):
        if turn.get("reasoning_content"):
            text, found = turn.pop("reasoning_content"), True
            turn.pop("reasoning", None)
            how = rng.choice(("reasoning", "thinking", "reasoning_details"))
            turn[how] = (
                text if how != "reasoning_details" else [{"type": "reasoning.text", "text": text}]
            )
    return drawn if found else None


def dropped_role(rng: random.Random, drawn: Drawn) -> Drawn | None:
    """Uses a role that a template may show or drop: its output is searched for the words."""
    turns = [n for n, turn in enumerate(_turns(drawn)) if turn.get("role") == "system"]
    if not turns:
        return None
    role = rng.choice(("developer", "ipython", "function", "critic"))
    drawn.row["messages"][turns[0]]["role"] = role
    drawn.messages[turns[0]]["role"] = role
    return replace(drawn, everyday=False)


EVERYDAY: tuple[Mutation, ...] = (
    *(tools_as_text, tools_as_texts, one_tool, no_tools, functions, parameters_as_text),
    *(arguments_as_text, calls_as_text, content_of_calls, parts, sharegpt, another_list, weights),
    *(keys_that_do_nothing, nulls, system_beside, no_thinking, thoughts_by_other_names),
)
OTHERS: tuple[Mutation, ...] = (
    *(tools_as_text_of_text, tools_as_words, arguments_as_words, drop_content, empty_answer),
    *(parts_that_are_no_text, rename_list, rename_key, rename_keys_of_messages, bad_weights),
    *(roles_of_another_format, keys_that_would_do, keys_of_messages_that_would_do, two_systems),
    *(dropped_role, keys_that_nobody_knows),
)


def _mutated(rng: random.Random) -> Drawn:
    drawn = _talk(rng)
    for last in (False, False, True):
        if rng.random() < 0.3:
            continue
        some = EVERYDAY if not last or rng.random() < 0.5 else OTHERS
        mutation = rng.choice(some)
        changed = mutation(rng, drawn)
        if changed is not None:
            drawn = replace(changed, done=(*drawn.done, mutation.__name__))
    return drawn


def inputs(rng: random.Random, folder: Path) -> Iterator[Input]:
    """Yields rows with their right answers: learned texts, and tokens."""
    import transformers  # imported here because it loads slowly

    opened = {}
    for name in TEMPLATES:
        path = home(folder / name, name)
        tokenizer = open_tokenizer(str(path))
        assert isinstance(tokenizer, FileTokenizer)
        reader = Reader(tokenizer, ChatTemplate(tokenizer))
        opened[name] = tokenizer, reader, transformers.AutoTokenizer.from_pretrained(path)
    while True:
        drawn, name = _mutated(rng), rng.choice(list(TEMPLATES))
        tokenizer, reader, peer = opened[name]
        text = f"{name}, {' '.join(drawn.done) or 'as drawn'}: {json.dumps(drawn.row)}"
        shown = _shown(name, drawn, peer)
        right = REFUSAL if drawn.is_refused else shown
        yield Input(
            text,
            partial(_taken, drawn.row, reader, tokenizer._inner),
            right,
            common=right is not REFUSAL and drawn.everyday,
            accepted=drawn.ignored and shown is not REFUSAL,
        )


def _shown(name: str, drawn: Drawn, peer: Any) -> Any:
    """Returns the learned texts and the tokens of a row by its meaning; REFUSAL if none show it."""
    talk = drawn.messages, drawn.tools, drawn.thinking, drawn.learned
    turns = said(name, *talk)
    if turns is None or not turns:
        return REFUSAL
    more = {} if drawn.thinking is None else {"enable_thinking": drawn.thinking}
    for messages in (drawn.messages, [{"content": "", **m} for m in drawn.messages]):
        try:
            made = peer.apply_chat_template(
                given(name, messages), tools=drawn.tools, return_dict=True, **more
            )
        except Exception:  # a template may raise any error; some fail without a content
            continue
        return turns, made["input_ids"]
    return REFUSAL


def _taken(row: Any, reader: Reader, inner: Any) -> Any:
    try:
        found = reader.read(json.loads(json.dumps(row)))
    except Refused as error:
        raise UserError(str(error)) from None
    edges = np.flatnonzero(np.diff(found.spoken.astype(int), prepend=0, append=0)).reshape(-1, 2)
    texts = [
        inner.decode(found.tokens[begin:end].tolist(), skip_special_tokens=False)
        for begin, end in edges
    ]
    return texts, found.tokens.tolist()
