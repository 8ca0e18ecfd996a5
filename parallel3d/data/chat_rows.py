"""Reads rows of conversations key by key: each key is used, counted as not read, or refused.

Two layouts are known: messages with role and content (OpenAI, TRL, axolotl, ms-swift), and
ShareGPT's turns with from and value. A key that affects the shown or learned text is never ignored:
it is obeyed, or the row is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from parallel3d.config.fields import show
from parallel3d.errors import nearest
from parallel3d.files import check_depth, plain
from parallel3d.text import count

SYSTEM = "system"
DEVELOPER = "developer"
USER = "user"
ASSISTANT = "assistant"
TOOL = "tool"
FUNCTION = "function"
MESSAGES = "messages"
# Keys under which a row may hold its messages. If a row has several, the first is read, since the
# others hold earlier states of the conversation.
LISTS = (MESSAGES, "conversations", "conversation")
SYSTEMS = ("system", "system_prompt")
TOOLS = "tools"
FUNCTIONS = "functions"
DOCUMENTS = "documents"
KWARGS = "chat_template_kwargs"
FROM, VALUE = "from", "value"
# Templates read the first key; transformers fills it from the others.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
DETAILS = "reasoning_details"
CALLS = "tool_calls"
CALL_OF_2023 = "function_call"
CALL_ID = "tool_call_id"
# ShareGPT's names of roles.
SPEAKERS = {
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "assistant": ASSISTANT,
    "system": SYSTEM,
    "tool": TOOL,
}
# Names of roles in other formats, which a template would show unchanged or leave out.
OTHER_ROLES = {
    **dict.fromkeys(("human", "prompter", "customer", "instruction", "question"), USER),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model", "answer", "output"), ASSISTANT),
    **dict.fromkeys(("observation", "tool_response", "tool_result", "function_response"), TOOL),
    **dict.fromkeys(("function_call", "tool_call"), "assistant with tool_calls"),
}
ROLES = (SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL, FUNCTION)
# Keys that determine whether a message is learned: OpenAI's weight, axolotl's train and training,
# ms-swift's loss. True and 1 mean that it is learned, false and 0 that it is not.
LEARNED = ("weight", "train", "training", "loss")
FLAGS: tuple[tuple[Any, bool], ...] = ((False, False), (True, True), (0, False), (1, True))

# Refused keys: they are not read, although they would change the shown or learned text. Empty
# values count as missing.
_NOT_TEXT = "image images video videos audio audios"
_LEARNING = (
    "weights loss_weight loss_scale loss_mask loss_masks step_loss_mask mask masked mask_loss "
    "trainable train_detail training_detail train_on_input train_on_inputs train_on_turn "
    "should_train assistant_masks "
    "learn learned supervise supervised no_loss ignore_loss compute_loss calculate_loss is_target"
)
_SYSTEMS = (
    "system_message system_msg system_instruction system_instructions sys sys_prompt sysprompt "
    "developer_message"
)
_TOOLS = (
    "tool available_tools tools_json tool_list tools_list tool_definitions tool_schemas tool_defs"
)
_OPTIONS = "enable_thinking reasoning_effort thinking_budget thinking_mode add_generation_prompt"
_OTHER_THOUGHTS = "thought thoughts think cot chain_of_thought rationale reasoning_text"


def _each(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


_LEARN_BY = f"use {', '.join(LEARNED[:-1])} or {LEARNED[-1]} of a message to select what is learned"
REFUSED_OF_ROWS = {
    **_each(_NOT_TEXT, "conversations are learned only from text"),
    **_each(_LEARNING, _LEARN_BY),
    **_each(_OPTIONS, f"options of a template belong in {KWARGS}"),
    "continue_final_message": "an answer that is to be continued cannot be learned",
    "chat_template": "the template of the tokenizer is used",
    "history": f"earlier turns belong in {MESSAGES}",
    **_each(_SYSTEMS, f"use {SYSTEM} instead, or a first message of this role"),
    **_each(_TOOLS, f"use {TOOLS} instead"),
    **_each("thinking reasoning_content", f"thoughts belong in {THOUGHTS[0]} of a message"),
}
REFUSED_OF_MESSAGES = {
    **_each(f"{_NOT_TEXT} file files attachments", "conversations are learned only from text"),
    **_each(_OTHER_THOUGHTS, f"thoughts belong in {THOUGHTS[0]}"),
    **_each("prefix partial", "an answer that is to be continued cannot be learned"),
    **_each(f"tools functions documents {KWARGS}", f"it belongs in the row, next to {MESSAGES}"),
    **_each("refusal contents", "words to learn belong in content"),
    **_each("channel recipient end_turn", "remove it, or use a chat template that reads it"),
}
_NEVER_OF_MESSAGES = _each(_LEARNING, _LEARN_BY)  # refused even if a template reads them
LABEL = "label"  # true or false in rows of unpaired preferences
# Keys that `chat_template_kwargs` must not hold, because a row has them elsewhere or because they
# change tokens.
_ARGUMENTS = (
    "messages conversation tools documents chat_template add_generation_prompt tokenize "
    "continue_final_message return_dict return_tensors return_assistant_tokens_mask padding "
    "truncation max_length sanitize_control_tokens tokenizer_kwargs"
)
RESERVED = frozenset(_ARGUMENTS.split())
# TRL's rows with the messages before the answer and those of the answer, which alone is learned.
PROMPT, COMPLETION = "prompt", "completion"


class OtherFormat(NamedTuple):
    """A format whose rows have no messages.

    Attributes:
        names: the keys by which a row is recognised.
        kind: what these keys hold, for errors.
        asked: key of the text or the messages before the answer.
        answer: key of the answer's text or messages.
        text: jq's expression for the text before the answer, if that is not the value of `asked`.
    """

    names: tuple[str, str]
    kind: str
    asked: str
    answer: str
    text: str = ""


_WITH_INPUT = '(.instruction + (if (.input // "") == "" then "" else "\\n\\n" + .input end))'
OTHER_FORMATS = (
    OtherFormat(
        ("chosen", "rejected"),
        "preferences, of which only one answer can be learned",
        *(PROMPT, "chosen"),
    ),
    OtherFormat(
        (PROMPT, COMPLETION), "texts, which no chat template is meant for", PROMPT, COMPLETION
    ),
    OtherFormat(
        ("instruction", "output"), "Alpaca's instructions", "instruction", "output", _WITH_INPUT
    ),
    OtherFormat((PROMPT, "response"), "texts", PROMPT, "response"),
    OtherFormat(("question", "answer"), "questions with answers", "question", "answer"),
)
EMPTY: tuple[Any, ...] = (None, "", [], {})
# Options for which false counts as missing; for other keys, false may have a meaning.
SWITCHES = ("prefix", "partial", "end_turn", "continue_final_message", "add_generation_prompt")

Message = Mapping[str, Any]


class RefusedRow(ValueError):
    """Raised for messages that a template does not accept, or a row that is not a conversation."""


class UnfitTemplate(RefusedRow):
    """Raised for a template or tokenizer that cannot be learned from; other rows do not help."""


class ChatRow(NamedTuple):
    """A row in the form that is passed to a template.

    Attributes:
        messages: each has a role and, unless it has only calls, a content (text or a list of
            parts).
        names: the name of each message in errors.
        learned: for each message, whether it is learned if its role is assistant.
        tools: an object for each tool, or None if the row has none.
        documents: an object for each document, or None if the row has none.
        more: further variables for the template.
        optional: keys of messages that have an effect only if the template reads them.
        unread: keys that nothing reads.
    """

    messages: list[Message]
    names: list[str]
    learned: list[bool]
    tools: list[Any] | None
    documents: list[Any] | None
    more: dict[str, Any]
    optional: frozenset[str]
    unread: frozenset[str]


# JSON text


def parse(text: str | bytes) -> Any:
    """Parses JSON text.

    Raises RefusedRow if the text is not JSON, if an object has a key twice, or if lists and objects
    are nested too deep.
    """
    try:
        content = json.loads(text, object_pairs_hook=_once)
    except RefusedRow:
        raise
    except (ValueError, RecursionError):
        raise RefusedRow("is not JSON") from None
    try:
        check_depth(content)
    except ValueError as error:
        raise RefusedRow(f"is {error}") from None
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RefusedRow(f"has the key {show(plain(twice))} twice")
    return found


def _spelled(value: Any, kind: type, what: str) -> Any:
    """Returns a value of type `kind`, which may be given as JSON text.

    Raises RefusedRow; the error calls the value `what`.
    """
    if isinstance(value, str):
        try:
            value = parse(value)
        except RefusedRow as error:
            raise RefusedRow(f"has {what} as text that {error}") from None
    if not isinstance(value, kind):
        named = "an object" if kind is dict else "a list of objects"
        raise RefusedRow(f"has {what}, which must be {named} or its JSON text")
    return value


def _objects(value: Any, what: str) -> list[dict[str, Any]] | None:
    """Returns a list of objects, or None if `value` is null or blank text.

    `value` is a list, one object, or the JSON text of either; each object in a list may be JSON
    text, too. Raises RefusedRow; the error calls the value `what`.
    """
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = parse(value)
        except RefusedRow as error:
            raise RefusedRow(f"has {what} as text that {error}") from None
    if value is None:
        return None
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list):
        raise RefusedRow(f"has {what}, which must be a list of objects or its JSON text")
    return [_spelled(item, dict, f"an item of {what}") for item in items]


# Rows


def read_row(row: Any) -> ChatRow:
    """Returns a row in the form that is passed to a template.

    Raises RefusedRow with a message whose subject is the row, such as "is not an object".
    """
    if not isinstance(row, dict):
        raise RefusedRow("is not an object")
    listed = [name for name in LISTS if row.get(name) is not None]
    parts: list[Any] = [row.get(PROMPT), row.get(COMPLETION)]
    is_split = not listed and all(isinstance(part, list) for part in parts)
    if not listed and not is_split:
        raise RefusedRow(_without_messages(row))
    turns = parts[0] + parts[1] if is_split else row[listed[0]]
    tools = _tools(row)
    unread = set(listed[1:])
    if isinstance(turns, str):
        turns = _spelled(turns, list, listed[0])
    if not isinstance(turns, list) or not all(isinstance(m, dict) for m in turns):
        named = f"{PROMPT} and {COMPLETION}" if is_split else listed[0]
        raise RefusedRow(f"has {named}, which must be a list of objects")
    split = {PROMPT, COMPLETION} if is_split else set()
    known = {*split, *LISTS, *SYSTEMS, TOOLS, FUNCTIONS, DOCUMENTS, KWARGS, *LEARNED}
    for key, value in row.items():
        if key in known or _is_empty(key, value):
            continue
        _check_not_meant(key, known, REFUSED_OF_ROWS, "")
        if key == LABEL and isinstance(value, bool):
            raise RefusedRow(
                f"has {LABEL}={show(value)}, but preferred and rejected rows are not distinguished"
            )
        unread.add(plain(key))
    for key in LEARNED:
        if _flag(row.get(key), key, "") is False:
            raise RefusedRow(f"has {key}={show(row[key])} for the whole row, so nothing is learned")
    optional: set[str] = set()
    messages, learned = [], []
    for number, turn in enumerate(turns, 1):
        message, is_learned = _message(turn, number, optional)
        messages.append(message)
        learned.append(is_learned and not (is_split and number <= len(parts[0])))
    more = {} if row.get(KWARGS) in EMPTY else _spelled(row[KWARGS], dict, KWARGS)
    if taken := RESERVED & more.keys():
        raise RefusedRow(f"has {min(taken)} in {KWARGS}, where it cannot be given")
    names = [f"message {number} of role {plain(m['role'])}" for number, m in enumerate(messages, 1)]
    first = _system(row, messages)
    if first is not None:
        messages.insert(0, {"role": SYSTEM, "content": first})
        learned.insert(0, True)
        names.insert(0, "a system text")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise RefusedRow(f"has no message of role {ASSISTANT} to learn from")
    documents = _objects(row.get(DOCUMENTS), DOCUMENTS)
    return ChatRow(
        messages=messages,
        names=names,
        learned=learned,
        tools=tools,
        documents=documents,
        more=more,
        optional=frozenset(optional),
        unread=frozenset(unread),
    )


def _without_messages(row: Mapping[str, Any]) -> str:
    how = f"write {MESSAGES} as a list of objects with role and content"
    for other in OTHER_FORMATS:
        if all(row.get(name) is not None for name in other.names):
            jq = _jq_of(row, other)
            remedy = f"`{jq} FILE > NEW.jsonl` makes {MESSAGES} of them" if jq else how
            return f"has no {MESSAGES}; its {' and '.join(other.names)} are {other.kind}: {remedy}"
    close = nearest(MESSAGES, [key for key in row if key != MESSAGES])
    if close:
        return f"has no {MESSAGES}; the nearest key is {show(plain(close))}"
    keys = ", ".join(plain(key) for key in list(row)[:5]) or "none"
    more = " …" if len(row) > 5 else ""
    return f"has no {MESSAGES}, and its keys are {keys}{more}: {how}"


def _jq_of(row: Mapping[str, Any], other: OtherFormat) -> str:
    """Returns the command of jq that adds messages to rows such as this, or "" if none can.

    It keeps the other keys, such as system and tools, and reads objects as well as a list of them.
    """
    asked, answer = row.get(other.asked), row[other.answer]
    parts = []
    if isinstance(asked, str):
        parts.append(f'[{{role: "user", content: {other.text or f".{other.asked}"}}}]')
    elif isinstance(asked, list):
        parts.append(f".{other.asked}")
    if isinstance(answer, str):
        parts.append(f'[{{role: "assistant", content: .{other.answer}}}]')
    elif isinstance(answer, list) and answer and isinstance(answer[0], dict):
        # Preferences often repeat the question in front of each answer.
        is_whole = answer[0].get("role", ASSISTANT) != ASSISTANT
        parts = [*([] if is_whole else parts), f".{other.answer}"]
    else:
        return ""
    if len(parts) == 1 and isinstance(answer, str):
        return ""
    added = f". + {{{MESSAGES}: ({' + '.join(parts)})}}"
    return f"jq -c '(if type == \"array\" then .[] else . end) | {added}'"


def _is_empty(key: str, value: Any) -> bool:
    return value in EMPTY or (value is False and key in SWITCHES)


def _check_not_meant(key: str, known: Collection[str], refused: Mapping[str, str], of: str) -> None:
    """Raises RefusedRow for a key of `refused`, and for a known key in other letters (`Tools`)."""
    bare = {_bare(name): name for name in (*known, *refused)}
    meant = bare.get(_bare(key))
    if meant is not None:
        why = refused.get(meant) or f"use {meant} instead"
        raise RefusedRow(f"has {show(plain(key))}{of}, which is not read: {why}")


def _bare(key: str) -> str:
    return "".join(letter for letter in key.lower() if letter.isalnum())


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    """Returns the tools of a row as objects with a name, or None if no tools are given.

    Functions in OpenAI's format of 2023 become tools. Raises RefusedRow.
    """
    tools = _objects(row.get(TOOLS), TOOLS)
    functions = _objects(row.get(FUNCTIONS), FUNCTIONS)
    if tools and functions:
        raise RefusedRow(f"has {TOOLS} and {FUNCTIONS}: give one of them")
    for key, some in ((TOOLS, tools), (FUNCTIONS, functions)):
        for number, tool in enumerate(some or (), 1):
            if not name_of(tool):
                raise RefusedRow(f"has no name in item {number} of {key}")
    if functions:
        return [{"type": FUNCTION, FUNCTION: _with_schema(one)} for one in functions]
    return tools and [_with_schema(tool) for tool in tools]


def _with_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool whose parameters are an object, parsed if they were given as JSON text.

    Raises RefusedRow.
    """
    if FUNCTION in tool:
        return {**tool, FUNCTION: _with_schema(tool[FUNCTION])}
    given, what = dict(tool), f"parameters of the tool {plain(name_of(tool))}"
    if isinstance(given.get("parameters"), str):
        given["parameters"] = _spelled(given["parameters"], dict, what)
    schema = given.get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if isinstance(properties, str):
        properties = _spelled(properties, dict, f"properties in {what}")
    if isinstance(schema, dict) and isinstance(properties, dict):
        # A null is not a schema: it comes from a table where all tools have the same columns.
        own = {key: value for key, value in properties.items() if value is not None}
        given["parameters"] = {**schema, "properties": own}
    return given


def name_of(called: Mapping[str, Any]) -> str:
    """Returns the name of a tool or of a call, or "" if it has none."""
    function = called.get(FUNCTION, called)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _system(row: Mapping[str, Any], messages: Sequence[Message]) -> str | None:
    """Returns the system text to put before a row's messages.

    Returns None if the row has no such text, or if the first message already has it. Raises
    Refused.
    """
    given = {key: row[key] for key in SYSTEMS if row.get(key) not in EMPTY}
    for key, text in given.items():
        if not isinstance(text, str):
            raise RefusedRow(f"has {key}, which must be text")
    if not given:
        return None
    key, text = next(iter(given.items()))
    if len(set(given.values())) > 1:
        raise RefusedRow(f"has {' and '.join(given)} with different texts")
    own = [message for message in messages if message["role"] in (SYSTEM, DEVELOPER)]
    if not own:
        return text
    if own[0].get("content") != text or own[0] is not messages[0]:
        raise RefusedRow(f"has {key} and a message of role {own[0]['role']}: give one of them")
    return None


# Messages


def _message(turn: Mapping[str, Any], number: int, optional: set[str]) -> tuple[Message, bool]:
    """Returns a turn as a message, and whether it is learned.

    Adds to `optional` the keys that have an effect only if the template reads them. Nulls count as
    missing, as in transformers. Raises RefusedRow.
    """
    given = {key: value for key, value in turn.items() if value is not None}
    of = f" in message {number}"
    if FROM in given or VALUE in given:
        if "role" in given or "content" in given:
            raise RefusedRow(f"has role or content together with {FROM} or {VALUE}{of}")
        given = {"role": _speaker(given, number), **given}
        given.pop(FROM)
        if VALUE in given:
            given["content"] = given.pop(VALUE)
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise RefusedRow(f"has message {number}, whose role must be a name such as {USER}")
    meant = OTHER_ROLES.get(role) or next((r for r in ROLES if _bare(r) == _bare(role)), role)
    if meant != role:
        raise RefusedRow(f"has the role {show(plain(role))}{of}: write {meant} instead")
    flags = {key: _flag(given.pop(key, None), key, of) for key in LEARNED}
    told = {flag for flag in flags.values() if flag is not None}
    if len(told) > 1:
        raise RefusedRow(f"says both to learn and not to learn message {number}")
    if True in told and role != ASSISTANT:
        raise RefusedRow(
            f"asks to learn message {number} of role {plain(role)}: only messages of role "
            f"{ASSISTANT} are learned"
        )
    _put_calls(given, role, number)
    _put_thoughts(given, number)
    given["content"] = _content(given, number)
    if given["content"] is None:
        del given["content"]
    read = ("role", "content", CALLS, CALL_OF_2023, *THOUGHTS)
    for key, value in given.items():
        if key in read:
            continue
        if key not in REFUSED_OF_MESSAGES:
            _check_not_meant(key, (*read, *LEARNED), _NEVER_OF_MESSAGES, of)
        elif _is_empty(key, value):
            continue
        optional.add(key)
    return given, False not in told


def _speaker(given: Mapping[str, Any], number: int) -> str:
    """Returns the role of a turn in ShareGPT's layout. Raises RefusedRow."""
    who = given.get(FROM)
    if isinstance(who, str) and who in SPEAKERS:
        return SPEAKERS[who]
    if isinstance(who, str) and who in OTHER_ROLES:
        raise RefusedRow(
            f"has a turn from {who} as message {number}: write {MESSAGES} with role and content, "
            f"and give this one the role {OTHER_ROLES[who]}"
        )
    close = nearest(who, SPEAKERS) if isinstance(who, str) else None
    hint = f"; the nearest is {close}" if close else ""
    raise RefusedRow(
        f"has {FROM}={show(who)} in message {number}: it must be one of {', '.join(SPEAKERS)}{hint}"
    )


def _flag(value: Any, key: str, of: str) -> bool | None:
    """Returns whether a flag is set, or None if it is missing. Raises RefusedRow if invalid."""
    if value is None:
        return None
    for flag, learned in FLAGS:
        if type(value) in (bool, int, float) and value == flag:
            return learned
    raise RefusedRow(f"has {key}={_short(value)}{of}: it must be 0, 1, true or false")


def _short(value: Any) -> str:
    text = show(value)
    return plain(text if len(text) <= 40 else f"{text[:40]}…")


def _put_thoughts(given: dict[str, Any], number: int) -> None:
    """Writes thoughts under the keys that templates read, as in transformers. Raises RefusedRow."""
    details = given.pop(DETAILS, None)
    if details not in EMPTY:
        parts = _objects(details, DETAILS) or []
        texts = [part.get("text") for part in parts if part.get("type") == "reasoning.text"]
        words = [text for text in texts if isinstance(text, str)]
        if not any(given.get(name) for name in THOUGHTS):
            if len(words) < len(parts):
                raise RefusedRow(
                    f"has {DETAILS} in message {number} that are not only text: write the "
                    f"thoughts as {THOUGHTS[0]}, or remove them"
                )
            given[THOUGHTS[0]] = "".join(words)
    found = {name: given[name] for name in THOUGHTS if name in given}
    for name, text in found.items():
        if not isinstance(text, str):
            raise RefusedRow(f"has message {number}, whose {name} must be text")
    if len(set(found.values())) > 1:
        raise RefusedRow(f"has different thoughts as {' and '.join(found)} in message {number}")
    if found:
        thought = next(iter(found.values()))
        given |= {"thinking": thought, "reasoning_content": thought}


def _content(given: Mapping[str, Any], number: int) -> Any:
    """Returns a message's content (text or a list of parts), or None if it has only calls.

    Raises RefusedRow.
    """
    content, role = given.get("content"), given["role"]
    if isinstance(content, str):
        return content
    if content is None or content == []:
        if role == ASSISTANT and (given.get(CALLS) or given.get(CALL_OF_2023)):
            return None
        lacks = f"neither content nor {CALLS}" if role == ASSISTANT else "no content"
        raise RefusedRow(f"has {lacks} in message {number} of role {plain(role)}")
    if not isinstance(content, list):
        raise RefusedRow(
            f"has message {number} of role {plain(role)}, whose content must be text or a list of "
            "parts"
        )
    return [_part(part, number) for part in content]


def _part(part: Any, number: int) -> dict[str, Any]:
    """Returns a part of a message's content, which must be text. Raises RefusedRow."""
    if not isinstance(part, dict):
        raise RefusedRow(f"has a part of message {number} that is not an object with type and text")
    part = {key: value for key, value in part.items() if value is not None}
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise RefusedRow(
            f"has a part of type {_short(kind)} in message {number}: only parts of type text can "
            "be learned"
        )
    if not isinstance(text, str):
        raise RefusedRow(f"has a part of message {number} without text")
    known = ("type", "text", "cache_control", "annotations")
    if more := [key for key, each in part.items() if key not in known and each not in EMPTY]:
        raise RefusedRow(f"has the key {plain(more[0])} in a part of message {number}: remove it")
    return {"type": "text", "text": text}


def _put_calls(given: dict[str, Any], role: str, number: int) -> None:
    """Rewrites the calls of a message, which may be JSON text, as objects. Raises RefusedRow."""
    for key in (CALLS, CALL_OF_2023):
        if key in given and given[key] in EMPTY:
            del given[key]
    if CALLS in given and CALL_OF_2023 in given:
        raise RefusedRow(f"has {CALLS} and {CALL_OF_2023} in message {number}: give one of them")
    key = CALLS if CALLS in given else CALL_OF_2023
    if key not in given:
        return
    if role != ASSISTANT:
        raise RefusedRow(
            f"has {key} in message {number} of role {plain(role)}, but only messages of role "
            f"{ASSISTANT} call tools"
        )
    what = f"{key} of message {number}"
    calls = [_call(call, what) for call in _objects(given[key], what) or ()]
    if not calls or (key == CALL_OF_2023 and len(calls) > 1):
        needed = "one call" if key == CALL_OF_2023 else "at least one call"
        raise RefusedRow(f"has {what}, which must hold {needed}")
    given[key] = calls if key == CALLS else calls[0]


def _call(call: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Returns a call, which must have a name and arguments. Raises RefusedRow."""
    call = {key: value for key, value in call.items() if value is not None}
    if call.get("type", FUNCTION) != FUNCTION:
        raise RefusedRow(
            f"has a call of type {_short(call['type'])} in {what}: its type must be {FUNCTION}"
        )
    if not name_of(call):
        raise RefusedRow(f"has a call without a name in {what}")
    if FUNCTION not in call:
        return call | {"arguments": _arguments(call, f"arguments in {what}")}
    function = call[FUNCTION]
    return call | {FUNCTION: function | {"arguments": _arguments(function, f"arguments in {what}")}}


def _arguments(function: Mapping[str, Any], what: str) -> Any:
    """Returns the arguments of a call, which are an object or its JSON text. Raises RefusedRow."""
    given = function.get("arguments")
    if given is None:
        raise RefusedRow(f"has no {what}: write {{}} for a call without arguments")
    if given == "":
        return {}
    if any(
        number != number or abs(number) == float("inf")
        for number in _floats(_spelled(given, dict, what))
    ):
        raise RefusedRow(f"has {what} with NaN or Infinity, which are not JSON")
    return given


def _floats(value: Any) -> Iterator[float]:
    """Yields all floats in a value."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _floats(each)


def as_of_today(messages: Sequence[Message]) -> list[Message]:
    """Converts messages from OpenAI's format of 2023.

    A `function_call` becomes `tool_calls`, and the role function becomes tool.
    """
    if not any(CALL_OF_2023 in message for message in messages):
        return list(messages)
    return [_of_today(message) for message in messages]


def _of_today(message: Message) -> Message:
    given = dict(message)
    if CALL_OF_2023 in given:
        given[CALLS] = [{"type": FUNCTION, FUNCTION: given.pop(CALL_OF_2023)}]
    return given | ({"role": TOOL} if given["role"] == FUNCTION else {})


# Sentences about rows, which are logged at the start of a run


class RowReport:
    """Counts rows, rows that are left out, and keys that nothing reads."""

    def __init__(self) -> None:
        self.rows = 0
        self.bad = 0
        self.first = ""  # the first row that is left out, and the reason
        self._unread = Counter[str]()
        self._thoughts = 0  # number of rows with thoughts that the template leaves out

    def count(self, unread: Iterable[str], dropped_thoughts: bool) -> None:
        self._unread.update(unread)
        self._thoughts += dropped_thoughts

    def lines(self) -> list[str]:
        """Returns notes for the user about the rows, one sentence each."""
        found = keys_not_read(self._unread)
        if self._thoughts:
            found.append(f"the chat template leaves out thoughts in {_rows(self._thoughts)}")
        if self.bad:
            found.append(
                f"{self.bad:,} of {self.rows:,} rows are left out by data.skip_bad_rows, "
                f"beginning with this one: {self.first}"
            )
        return found


SHOWN = 12  # maximum number of keys in a sentence


def keys_not_read(unread: Mapping[str, int]) -> list[str]:
    """Returns a list with a sentence on the keys that nothing reads, or [] if there are none."""
    if not unread:
        return []
    many = sorted(unread.items(), key=lambda item: (-item[1], item[0]))
    keys = ", ".join(f"{key} ({_rows(number)})" for key, number in many[:SHOWN])
    more = f" and {len(many) - SHOWN:,} others" if len(many) > SHOWN else ""
    return [f"keys not read: {keys}{more}"]


def _rows(number: int) -> str:
    return count(number, "row")


Has = Callable[[str], bool]


def unread_of(row: ChatRow, reads: Has, takes: Has) -> frozenset[str]:
    """Returns the keys of a row that nothing reads.

    `reads` returns whether the template reads a key, and `takes` whether it reads a variable.
    Raises RefusedRow for a key that would change the shown text, and for results of calls in the
    wrong order.
    """
    found = row.unread | {f"{plain(key)} of {KWARGS}" for key in row.more if not takes(key)}
    for key in row.optional:
        if reads(key):
            continue
        pairs = zip(row.names, row.messages, strict=True)
        name = next(name for name, message in pairs if key in message)
        if key in REFUSED_OF_MESSAGES:
            raise RefusedRow(
                f"has {name} with the key {key}, which is not read: {REFUSED_OF_MESSAGES[key]}"
            )
        found |= {f"{plain(key)} of messages"}
    if row.documents and not takes(DOCUMENTS):
        raise RefusedRow(f"has {DOCUMENTS}, which the chat template does not show: remove them")
    if not reads(CALL_ID):
        _check_order(row)
    return found


def _check_order(row: ChatRow) -> None:
    """Raises RefusedRow for results of calls that are not in the order of the calls.

    A template that shows no ids would attribute such a result to another call.
    """
    calls: list[Any] = []
    last = -1
    for name, message in zip(row.names, row.messages, strict=True):
        if message["role"] == ASSISTANT:
            calls, last = [call.get("id") for call in message.get(CALLS, ())], -1
        elif message.get(CALL_ID) is not None and message[CALL_ID] in calls:
            at = calls.index(message[CALL_ID])
            if at < last:
                raise RefusedRow(
                    f"has {name} in the wrong order: its chat template does not show the ids of "
                    "calls, so put the results in the order of the calls"
                )
            last = at
