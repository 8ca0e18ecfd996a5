"""Small chat templates with the rules of published families, and a tokenizer for all of them.

`said` implements the families' rules a second time, in Python: it returns the assistant's turns, or
that a row cannot be shown.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tokenizers import END, folder, trained

SPECIAL = (
    *(END, "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end｜>"),
)
CONTENT = trained(360, SPECIAL)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Unknown roles are dropped; results of tools are shown as the user's.
QWEN2 = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
    {%- else %}{{- 'You are helpful.' }}{%- endif %}
    {{- "\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""  # noqa: E501
# Thoughts of turns before the last question are dropped; the last turn has a block of thoughts,
# which may be empty.
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""  # noqa: E501
# The generation prompt opens the thoughts.
PREFILLED = QWEN3.replace(
    """{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}""",  # noqa: E501
    "{{- '<|im_start|>assistant\n<think>\n' }}",
)
assert PREFILLED != QWEN3
# Blanks are cut; a turn has only one call; results are written as JSON.
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first_user_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""  # noqa: E501
# Tools and the system's words come before the last question; call ids have nine letters.
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{{- '{"type": "function", "function": ' + tool.function | tojson + "}" }}
                {%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
            {{- "]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}{{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" and message.tool_calls is defined %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
            {{- '{"name": ' + tool_call.function.name | tojson + ', "arguments": ' + tool_call.function.arguments | tojson + ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " + '"call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}
{%- endfor %}
"""  # noqa: E501
# The system's words are added to the first question; turns take parts of text.
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
    {%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
# Thoughts are dropped, arguments are JSON text, and the generation prompt opens the thoughts.
DEEPSEEK = """\
{{ bos_token }}
{%- for message in messages if message['role'] == 'system' %}{{ message['content'] }}{% endfor %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] %}
        {{- '<｜Assistant｜>' + (message['content'] or '') }}
        {%- for tool in message['tool_calls'] %}
            {{- 'function ' + tool['function']['name'] + '\n```json\n' }}
            {{- tool['function']['arguments'] + '\n```' }}
        {%- endfor %}
        {{- '<｜end｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<｜Assistant｜>' + content + '<｜end｜>' }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{{- 'result ' + message['content'] }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{%- endif %}
"""
# One of two templates by name: the other one shows tools.
TOOL_USE = (
    "<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "<|im_end|>\n{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls is defined %}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = [
    {"name": "default", "template": CHATML},
    {"name": "tool_use", "template": TOOL_USE},
]
# `{% generation %}` marks the assistant's words.
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES: dict[str, Any] = {
    "chatml": CHATML,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "prefilled": PREFILLED,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "hermes": HERMES,
    "tagged": TAGGED,
}
TOKENS = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "gemma": ("<s>", "<end_of_turn>"),
    "deepseek": ("<s>", "<｜end｜>"),
}


def home(path: Path, name: str) -> Path:
    """Writes a folder with the tokenizer and one of TEMPLATES."""
    begin, end = TOKENS.get(name, (END, "<|im_end|>"))
    return folder(path, CONTENT, bos_token=begin, eos_token=end, chat_template=TEMPLATES[name])


def dumps(value: Any) -> str:
    """Writes JSON like most programs, compactly, unlike the templates."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


TAKES_TEXT = ("qwen3", "prefilled", "deepseek")  # arguments as JSON text, shown as they are
SHOWS_TOOLS = ("qwen2", "qwen3", "prefilled", "llama3", "mistral", "hermes")
SHOWS_THOUGHTS = ("qwen3", "prefilled")


def given(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages with arguments of calls in the form that transformers passes to a
    template."""

    def spelled(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) and name not in TAKES_TEXT:
            arguments = json.loads(arguments)
        elif not isinstance(arguments, str) and name == "deepseek":
            arguments = json.dumps(arguments, ensure_ascii=False)
        return call | {"function": call["function"] | {"arguments": arguments}}

    return [
        m | ({"tool_calls": [spelled(c) for c in m["tool_calls"]]} if m.get("tool_calls") else {})
        for m in messages
    ]


def said(
    name: str,
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
    thinking: bool | None = None,
    learned: list[bool] | None = None,
) -> list[str] | None:
    """Returns the learned texts of a conversation; None if its template cannot show all of it.

    messages: role and content as text, tool_calls, reasoning_content. thinking: enable_thinking.
    """
    if not _is_shown(name, messages, tools):
        return None
    turns = []
    end = TOKENS.get(name, (END, "<|im_end|>"))[1]
    asked = max((n for n, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for number, message in enumerate(given(name, messages)):
        if message["role"] != "assistant" or not (learned is None or learned[number]):
            continue
        content, last = message.get("content") or "", number == len(messages) - 1
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        if not content.strip() and not calls:
            return None
        texts = [json.dumps(call["arguments"], ensure_ascii=False) for call in calls]
        names = [call["name"] for call in calls]
        if name in TAKES_TEXT:
            pairs = zip(calls, texts, strict=True)
            texts = [c["arguments"] if isinstance(c["arguments"], str) else t for c, t in pairs]
        pairs_of = list(zip(names, texts, strict=True))
        if name == "qwen2" and calls:
            parts = [content] if content else []
            turns.append("\n".join(parts + [_call_of_qwen(*pair) for pair in pairs_of]) + end)
        elif name in SHOWS_THOUGHTS:
            thought = message.get("reasoning_content")
            if thought is None and "</think>" in content:
                before, _, content = content.rpartition("</think>")
                thought = before.split("<think>")[-1].strip("\n")
                content = content.lstrip("\n")
            block = ""
            if number > asked and (last or thought):
                block = f"<think>\n{(thought or '').strip(chr(10))}\n</think>\n\n"
                content = content.lstrip("\n")
            if name == "prefilled":
                block = block.removeprefix("<think>\n")
            elif last and thinking is False and not thought:
                block = ""
            made = "\n".join(
                [*([content] if content else []), *(_call_of_qwen(*p) for p in pairs_of)]
            )
            turns.append(block + made + end)
        elif name == "llama3":
            call = "".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in pairs_of)
            turns.append((call or content.strip()) + end)
        elif name == "mistral":
            ids = [call["id"] for call in message.get("tool_calls") or ()]
            some = [
                f'{{"name": "{n}", "arguments": {a}, "id": "{i}"}}'
                for (n, a), i in zip(pairs_of, ids, strict=True)
            ]
            turns.append(
                (f"[TOOL_CALLS] [{', '.join(some)}]" if calls else f" {content.strip()}") + end
            )
        elif name == "gemma":
            turns.append(content.strip() + end)
        elif name == "deepseek":
            shown = content if calls else content.split("</think>")[-1]
            turns.append(
                shown + "".join(f"function {n}\n```json\n{a}\n```" for n, a in pairs_of) + end
            )
        elif name == "hermes" and calls:
            made = "".join(
                f'<tool_call>{{"name": "{n}", "arguments": {a}}}</tool_call>' for n, a in pairs_of
            )
            turns.append(made + end)
        else:
            turns.append(content + end)
    return turns


def _call_of_qwen(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _is_shown(name: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> bool:
    roles = [message["role"] for message in messages]
    calls = any(message.get("tool_calls") for message in messages)
    if tools and name not in SHOWS_TOOLS:
        return False
    if any(m.get("reasoning_content") for m in messages) and name not in SHOWS_THOUGHTS:
        return False
    if name in ("chatml", "tagged") or (name == "hermes" and tools is None):
        return not calls
    both = any(m.get("tool_calls") and (m.get("content") or "").strip() for m in messages)
    if name == "hermes":
        return not both
    if name == "llama3":
        some = any(len(m.get("tool_calls") or "a") != 1 for m in messages)
        return not both and not some
    if name == "gemma":
        turns = roles[1:] if roles[0] == "system" else roles
        alternate = all((role == "user") == (n % 2 == 0) for n, role in enumerate(turns))
        return alternate and not calls
    if name == "mistral":
        ids = [c.get("id", "") for m in messages for c in m.get("tool_calls") or ()]
        results = [m.get("tool_call_id") for m in messages if m["role"] == "tool"]
        known = set(roles) <= {"user", "assistant", "tool"}
        return known and not both and all(len(i) == 9 for i in ids) and all(results)
    known = {"user", "assistant", "system", "tool"}
    return set(roles) <= known
