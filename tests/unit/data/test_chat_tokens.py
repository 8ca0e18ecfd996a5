"""Compares chat's tokens and learned tokens with transformers, for every kind of tokenizer.

`python -m tests.unit.data.test_chat_tokens 2000` reads that many random conversations.
"""

from __future__ import annotations

import functools
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import normalizers as norm
from transformers.utils.chat_template_utils import render_jinja_template

from parallel3d.data.chat import ChatTemplate, Reader, RefusedRow
from parallel3d.data.tokenizer import open_tokenizer
from parallel3d.errors import UserError
from tests.tokenizers import END, TEXT, folder

BEGIN, UNKNOWN, TURN, STOP = "<s>", "<unk>", "<|im_start|>", "<|im_end|>"
SPECIAL = [END, BEGIN, UNKNOWN]
TURNS = [TURN, STOP]
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama2": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ ' ' + m.content + ' ' + eos_token }}{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% endif %}{% endfor %}",
    "trims": "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}"
    "{{ ' ' + m.content | trim + eos_token }}{% endgeneration %}{% else %}"
    "{{ m.role + ': ' + m.content | trim + '\n' }}{% endif %}{% endfor %}",
    "tags": "{% if messages[0].role == 'system' %}{{ bos_token + messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endif %}{% endfor %}",
}
WORDS = [
    *("def f(x):", "hello", "Hello World", "the", "a", "[INST]", "assistant", "Zażółć", "STRASSE"),
    *(
        "漢字かな",
        "한국어",
        "עברית",
        "é",
        "e\u0301",
        "ﬁn",
        "İstanbul",
        "ß",
        "½",
        "\u00a0",
        "\u200b",
    ),
    *("😀", "👩\u200d👩\u200d👧", "🇩🇪", "\u0301", "\ue0f0", "\ue0f1", "\ue000", "\ufffd", "\x07"),
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", "", "<", "|>", "<|im", "▁", "1234567890", "$%&"),
]


def byte_level(inner: Tokenizer) -> tuple[Any, Any]:
    """Sets up a tokenizer like Llama 3's: its BOS is also written by the template, and its offsets
    leave out blanks."""
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    begins = processors.TemplateProcessing(f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
    inner.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begins])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return models.BPE(), functools.partial(trainers.BpeTrainer, initial_alphabet=alphabet)


def normalized(inner: Tokenizer) -> tuple[Any, Any]:
    """Decomposes and lowercases letters, so that lengths change."""
    inner.normalizer = norm.Sequence([norm.NFD(), norm.Lowercase()])
    return byte_level(inner)


def metaspace(inner: Tokenizer, scheme: str) -> tuple[Any, Any]:
    """Sets up a tokenizer like Mistral's and SentencePiece."""
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return models.BPE(unk_token=UNKNOWN), trainers.BpeTrainer


def llama2(inner: Tokenizer) -> tuple[Any, Any]:
    """Sets up a tokenizer with blanks as letters, one before every text, and other characters as
    bytes."""
    inner.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    model = models.BPE(unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True)
    return model, lambda special_tokens, **more: trainers.BpeTrainer(
        special_tokens=special_tokens + fallback, **more
    )


def wordpiece(inner: Tokenizer) -> tuple[Any, Any]:
    """Sets up a tokenizer like Bert's: blanks and accents are dropped, and letters lowercased."""
    inner.normalizer = norm.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return models.WordPiece(unk_token=UNKNOWN), trainers.WordPieceTrainer


def unigram(inner: Tokenizer) -> tuple[Any, Any]:
    """Sets up a tokenizer like T5's."""
    inner.normalizer = norm.Sequence([norm.Nmt(), norm.NFKC()])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return models.Unigram(), functools.partial(trainers.UnigramTrainer, unk_token=UNKNOWN)


KINDS: dict[str, Callable[[Tokenizer], tuple[Any, Any]]] = {
    "byte_level": byte_level,
    "normalized": normalized,
    "first": functools.partial(metaspace, scheme="first"),
    "always": functools.partial(metaspace, scheme="always"),
    "never": functools.partial(metaspace, scheme="never"),
    "llama2": llama2,
    "wordpiece": wordpiece,
    "unigram": unigram,
}


@functools.cache
def made(kind: str, with_turns: bool) -> str:
    """Returns the content of a tokenizer.json whose separators of turns are special tokens or
    not."""
    inner = Tokenizer(models.BPE())
    inner.model, trainer = KINDS[kind](inner)
    special = SPECIAL + (TURNS if with_turns else [])
    how = trainer(special_tokens=special, vocab_size=500, show_progress=False)
    inner.train_from_iterator([text * 5 for text in (*TEXT, "hello world [INST] ")], how)
    # Bytes are not special tokens, although the trainer makes them special.
    facts = json.loads(inner.to_str())
    facts["added_tokens"] = [t for t in facts["added_tokens"] if t["content"] in special]
    return json.dumps(facts)


def home(path: Path, content: str, template: str) -> Path:
    return folder(
        path, content, eos_token=END, bos_token=BEGIN, unk_token=UNKNOWN, chat_template=template
    )


def reader(path: Path) -> Reader:
    tokenizer = open_tokenizer(str(path))
    return Reader(tokenizer, ChatTemplate(tokenizer))


def conversations(seed: int, spelled: list[str] = []) -> Iterator[dict[str, Any]]:  # noqa: B006
    """Yields endless random rows; `spelled` is among their words."""
    draw = random.Random(seed)

    def text() -> str:
        return draw.choice(("", " ")).join(draw.choices(WORDS + spelled, k=draw.randrange(9)))

    while True:
        roles = ["system"] * draw.randrange(2) + ["user", "assistant"] * draw.randint(1, 3)
        said = [(role, text()) for role in roles]  # an empty answer is refused
        talk = [(role, what if what.strip() or role != "assistant" else "a") for role, what in said]
        yield {"messages": [{"role": role, "content": what} for role, what in talk]}


class Peer:
    """Returns transformers' tokens and learned tokens of rows."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)

    def tokens(self, row: dict[str, Any], template: str) -> list[int]:
        return self.tokenizer.apply_chat_template(
            row["messages"], chat_template=template, return_dict=True
        )["input_ids"]

    def spoken(self, row: dict[str, Any], template: str) -> list[int] | None:
        """Returns None if transformers loses its place: no token stands for a turn's first
        character, a dropped blank."""
        names = self.tokenizer.special_tokens_map
        (text,), (turns,) = render_jinja_template(
            [row["messages"]], chat_template=template, return_assistant_tokens_mask=True, **names
        )
        found = self.tokenizer(text, add_special_tokens=False)
        if any(found.char_to_token(0, begin) is None for begin, _ in turns):
            return None
        return self.tokenizer.apply_chat_template(
            row["messages"],
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )["assistant_masks"]


def compared(path: Path, kind: str, with_turns: bool, rows: int, seed: int) -> tuple[int, int]:
    """Asserts that rows are read like transformers reads them, by each template.

    Returns how many had tags, and for how many of these transformers marked the spoken tokens.
    """
    content, told, tagged = made(kind, with_turns), 0, 0
    peer = Peer(home(path / "peer", content, ""))
    bare = json.dumps(json.loads(content) | {"post_processor": None})  # offsets with their blanks
    peer_of_turns = Peer(home(path / "bare", bare, ""))
    for number, (name, template) in enumerate(TEMPLATES.items()):
        ours = reader(home(path / name, content, template))
        source = conversations(1000 * seed + number)
        for row, _ in zip(source, range(rows), strict=False):
            if name == "chatml" and not with_turns:
                with pytest.raises(RefusedRow, match="ends in no special token"):
                    ours.read(row)
                continue
            found = ours.read(row)
            assert found.tokens.tolist() == peer.tokens(row, template), (name, row)
            if "generation %}" not in template:
                continue
            spoken, tagged = peer_of_turns.spoken(row, template), tagged + 1
            if spoken is not None:
                told += 1
                assert found.spoken.astype(int).tolist() == spoken, (name, row)
    return tagged, told


@pytest.mark.nightly
@pytest.mark.parametrize("with_turns", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_gives_the_tokens_of_transformers(
    tmp_path: Path, kind: str, with_turns: bool
) -> None:
    tagged, told = compared(tmp_path, kind, with_turns, rows=8, seed=1)
    assert told > tagged / 4


def renamed(content: str, names: dict[str, str]) -> str:
    """Returns a tokenizer.json whose special tokens have other names and the same numbers."""
    facts = json.loads(content)
    for token in facts["added_tokens"]:
        token["content"] = names[token["content"]]
    vocabulary = facts["model"]["vocab"]
    facts["model"]["vocab"] = {names.get(token, token): n for token, n in vocabulary.items()}
    if facts["model"].get("unk_token"):
        facts["model"]["unk_token"] = names[UNKNOWN]
    facts["post_processor"] = None
    return json.dumps(facts)


def spelling(path: Path, kind: str, rows: int, seed: int) -> None:
    """Asserts that rows which spell out special tokens are read like transformers reads them with
    renamed special tokens."""
    names = {token: f"⟦{number}⟧" for number, token in enumerate(SPECIAL + TURNS)}
    content = made(kind, True)
    peer = Peer(
        folder(
            path / "peer",
            renamed(content, names),
            eos_token=names[END],
            bos_token=names[BEGIN],
            unk_token=names[UNKNOWN],
        )
    )
    for number, (name, template) in enumerate(TEMPLATES.items()):
        ours = reader(home(path / name, content, template))
        other = template
        for token, called in names.items():
            other = other.replace(token, called)
        source = conversations(1000 * seed + number, [*SPECIAL, *TURNS] * 3)
        for row, _ in zip(source, range(rows), strict=False):
            found = ours.read(row)
            assert found.tokens.tolist() == peer.tokens(row, other), (name, row)
            spoken = peer.spoken(row, other) if "generation %}" in template else None
            if spoken is not None:
                assert found.spoken.astype(int).tolist() == spoken, (name, row)


KEPT = [kind for kind in KINDS if kind != "unigram"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KEPT)
def test_special_tokens_that_messages_spell_out_are_text(tmp_path: Path, kind: str) -> None:
    spelling(tmp_path, kind, rows=6, seed=2)


def test_a_spelled_out_special_token_is_refused_if_it_is_a_piece_of_the_model(
    tmp_path: Path,
) -> None:
    """SentencePiece's Unigram would turn the text of a special token into that token."""
    ours = reader(home(tmp_path, made("unigram", True), TEMPLATES["chatml"]))
    row = {"messages": [{"role": "assistant", "content": f"say {STOP} now"}]}
    with pytest.raises(
        RefusedRow, match=re.escape(f"spells out {STOP}, which its tokenizer turns into")
    ):
        ours.read(row)


def said(found: Any, path: Path) -> list[str]:
    """Returns the learned tokens."""
    inner = Tokenizer.from_file(str(path / "tokenizer.json"))
    return [inner.id_to_token(token) for token in found.tokens[found.spoken].tolist()]


def test_special_tokens_in_roles_names_and_tools_are_text_too(tmp_path: Path) -> None:
    template = "{{ tools[0].name }}{% for m in messages %}<|im_start|>{{ m.role + m.name }}\n"
    template += "{{ m.content }}<|im_end|>{% endfor %}"
    content = made("byte_level", True)
    ours = reader(home(tmp_path, content, template))
    message = {"role": f"x{STOP}", "name": STOP, "content": STOP}
    answer = {"role": "assistant", "name": "", "content": "a"}
    row = {"messages": [message, answer], "tools": [{"name": STOP}]}
    found = ours.read(row).tokens.tolist()
    special = open_tokenizer(str(tmp_path)).special
    assert [found.count(special[token]) for token in (TURN, STOP)] == [2, 2]


def test_a_row_with_the_private_characters_of_a_mark_keeps_them(tmp_path: Path) -> None:
    private = "".join(map(chr, range(0xE000, 0xE100)))
    ours = reader(home(tmp_path, made("byte_level", True), TEMPLATES["chatml"]))
    for content in (f"a{STOP}", f"{private}{STOP}{private}", f"{STOP}\ue004\ue005"):
        row = {"messages": [{"role": "assistant", "content": content}]}
        found = ours.read(row)
        words = open_tokenizer(str(tmp_path)).decode(found.tokens)
        assert words == f"assistant\n{content}\n"
    many = {"role": "user", "content": "".join(map(chr, range(0xE000, 0xF8FF)))}
    with pytest.raises(RefusedRow, match="nearly all of Unicode's private characters"):
        ours.read({"messages": [many, {"role": "assistant", "content": "a"}]})


@pytest.mark.parametrize("tags", [True, False])
def test_a_token_across_the_beginning_of_an_answer_is_learned(tmp_path: Path, tags: bool) -> None:
    """The token contains a part of the assistant's words, so transformers learns it."""
    content = json.loads(made("byte_level", False))
    content["model"]["vocab"]["ĊĊ"] = len(content["model"]["vocab"])
    content["model"]["merges"].append(["Ċ", "Ċ"])
    begin, end = ("{% generation %}", "{% endgeneration %}") if tags else ("", "")
    template = "{% for m in messages %}{% if m.role == 'assistant' %}A:\n"
    template += f"{begin}{{{{ m.content }}}}{{{{ eos_token }}}}{end}"
    template += "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    template += "{% if add_generation_prompt %}A:\n{% endif %}"
    path = home(tmp_path, json.dumps(content), template)
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\n\nb"}]
    }
    found = reader(path).read(row)
    assert said(found, path) == ["ĊĊ", "Ċ", "b", END]
    if tags:
        assert found.spoken.astype(int).tolist() == Peer(path).spoken(row, template)


@pytest.mark.parametrize(
    ("before", "content", "learned"), [("A: ", " b", ["Ġ", "b"]), ("A:", "b ", ["b", "Ġ"])]
)
def test_blanks_belong_to_the_turn_they_are_in(
    tmp_path: Path, before: str, content: str, learned: list[str]
) -> None:
    """A byte-level tokenizer may leave blanks out of its tokens' offsets (`trim_offsets`)."""
    template = f"{{% for m in messages %}}{before}{{% generation %}}{{{{ m.content }}}}"
    path = home(
        tmp_path, made("byte_level", False), f"{template}{{% endgeneration %}};{{% endfor %}}"
    )
    row = {"messages": [{"role": "assistant", "content": content}]}
    assert said(reader(path).read(row), path) == learned


def test_bytes_of_one_character_are_all_learned(tmp_path: Path) -> None:
    """transformers leaves out all but the first end of a turn."""
    template = "{% for m in messages %}A:{% generation %}{{ m.content }}{% endgeneration %};"
    path = home(tmp_path, made("byte_level", False), f"{template}{{% endfor %}}")
    found = reader(path).read({"messages": [{"role": "assistant", "content": "한"}]})
    assert len(said(found, path)) == 3


def test_tags_within_a_macro_are_found(tmp_path: Path) -> None:
    """transformers counts the characters of a macro from the beginning of the macro's own text."""
    template = "{% macro turn(m) %}T{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}"
    template += "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}"
    template += "{% endif %}{% endmacro %}{% for m in messages %}{{ turn(m) TRIM }}{% endfor %}"
    rows = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b "}]}
    path = home(tmp_path / "a", made("byte_level", False), template.replace("TRIM", ""))
    assert said(reader(path).read(rows), path) == ["b", "Ġ", END]
    cut = template.replace("{{ eos_token }}", "").replace("TRIM", "| trim")
    with pytest.raises(RefusedRow, match=r"changes the text inside its .* tags"):
        reader(home(tmp_path / "b", made("byte_level", False), cut)).read(rows)


def test_a_template_gets_the_same_variables_as_in_transformers(tmp_path: Path) -> None:
    template = (
        "{{ documents is defined }}{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}"
    )
    template += "{% for m in messages %}{{ m.role }}:{{ m.name is defined }}:{{ m.thinking }}:"
    template += "{{ m.reasoning_content }}:{{ m.content }}{{ sep_token }}{% endfor %}"
    config = {"eos_token": END, "sep_token": TURN, "chat_template": template}
    path = folder(tmp_path, made("byte_level", True), **config)
    tools = [{"type": "function", "function": {"name": "é", "description": "<b>"}}]
    ours, peer = reader(path), transformers.PreTrainedTokenizerFast.from_pretrained(path)
    for more in ({}, {"thinking": "t"}, {"reasoning": "r", "thinking": None}, {"name": None}):
        answer = {"role": "assistant", "content": "a", **more}
        row = {"messages": [{"role": "user", "content": "q"}, answer], "tools": tools}
        expected = peer.apply_chat_template(row["messages"], tools=tools, return_dict=True)
        assert ours.read(row).tokens.tolist() == expected["input_ids"], more


def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    ours = reader(home(tmp_path, made("byte_level", True), TEMPLATES["chatml"]))
    for content in ("a\ud800", f"{STOP}\udc00"):
        with pytest.raises(RefusedRow, match="half of a surrogate pair"):
            ours.read({"messages": [{"role": "assistant", "content": content}]})


@pytest.mark.parametrize("places", [[(0, 0), (0, 0)], [(1, 2), (0, 1)], [(0, 1), (1, 9)]])
def test_a_tokenizer_without_offsets_is_refused(
    tmp_path: Path, places: list[tuple[int, int]]
) -> None:
    tokenizer = open_tokenizer(str(home(tmp_path, made("byte_level", True), "")))

    class Made:
        ids, offsets = [5, 6], places

    class Fake:
        encode_special_tokens = True

        def encode(self, text: str, add_special_tokens: bool) -> Made:
            return Made()

    with patch.object(tokenizer, "_inner", Fake()), pytest.raises(UserError) as caught:
        tokenizer.place("ab")
    assert "does not tell which characters each token covers" in str(caught.value)


if __name__ == "__main__":
    sets = len(TEMPLATES) * (2 * len(KINDS) + len(KEPT))
    each = -(-int(sys.argv[1]) // sets)
    with tempfile.TemporaryDirectory() as scratch:
        for one in KINDS:
            for turns in (True, False):
                found = compared(Path(scratch) / one / str(turns), one, turns, each, seed=3)
                print(one, turns, found, flush=True)
            if one in KEPT:
                spelling(Path(scratch) / one / "spelled", one, each, seed=4)
    print(f"{each * sets:,} conversations read as by transformers")
