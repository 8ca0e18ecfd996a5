"""Tests folders of tokenizers: each gives its beginning and ends, or a refusal."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers

from parallel3d.commands.evaluate.rows import encode_pair
from parallel3d.data.chat_template import ChatTemplate
from parallel3d.data.keys import DataConfig
from parallel3d.data.tokenizer import (
    FOLDER,
    FileTokenizer,
    Roles,
    begun,
    check_same_tokens,
    keep_tokenizer,
    open_tokenizer,
)
from parallel3d.data.tokenizer_check import unlike_theirs
from parallel3d.errors import UserError
from tests.tokenizers import trained

END, BOS, EOS, TURN = "<|endoftext|>", "<s>", "</s>", "<|im_end|>"
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
GENERATION, MODEL = "generation_config.json", "config.json"
TEXTS = (
    "def f(x):\n    return x\n",
    "héllo wörld, 漢字 and 😀",
    " two  blanks",
    "",
    "1234.5\t\r\n",
)


@functools.cache
def content(special: tuple[str, ...], post: str, more: tuple[str, ...] = ()) -> str:
    """Returns a tokenizer.json with these special tokens, a post-processor and more added
    tokens."""
    from tokenizers import AddedToken, Tokenizer, processors

    inner = Tokenizer.from_str(trained(320, special))
    inner.add_tokens([AddedToken(token, special=False) for token in more])
    if post == "bytes":
        inner.post_processor = processors.ByteLevel(trim_offsets=False)
    elif post:
        names = [part for part in post.split() if part != "$A"]
        known = [(name, inner.token_to_id(name)) for name in dict.fromkeys(names)]
        inner.post_processor = processors.TemplateProcessing(
            single=post, pair=f"{post} $B:1", special_tokens=known
        )
    return inner.to_str()


class Row(NamedTuple):
    """A folder; `begin` and `ends` are tokens by name, `words` the words of a refusal."""

    name: str
    special: tuple[str, ...]
    post: str
    files: dict[str, dict[str, Any]]
    begin: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


LLAMA = (BOS, EOS)
QWEN = (END, "<|im_start|>", TURN)
CLASS = "tokenizer_class"
ROWS = (
    Row("gpt2", (END,), "bytes", {CONFIG: {"eos_token": END}}, (), (END,)),
    Row("bare gpt2", (END,), "", {}, (), (END,)),
    Row("llama", LLAMA, f"{BOS} $A", {CONFIG: {"eos_token": EOS}}, (BOS,), (EOS,)),
    Row("bare llama", LLAMA, f"{BOS} $A", {}, (BOS,), (EOS,)),
    Row(
        "add_bos_token beside a bare tokenizer.json, which decides",
        *(LLAMA, "bytes", {CONFIG: {"eos_token": EOS, "bos_token": BOS, "add_bos_token": True}}),
        *((), (EOS,)),
    ),
    Row(
        "add_bos_token=false beside a post-processor, which decides",
        *(LLAMA, f"{BOS} $A", {CONFIG: {"eos_token": EOS, "add_bos_token": False}}),
        *((BOS,), (EOS,)),
    ),
    Row("begin and end", LLAMA, f"{BOS} $A {EOS}", {CONFIG: {"eos_token": EOS}}, (BOS,), (EOS,)),
    Row("an end before texts", (EOS,), f"{EOS} $A", {CONFIG: {"eos_token": EOS}}, (EOS,), (EOS,)),
    Row(
        "a class that drops the post-processor",
        *(LLAMA, f"{BOS} $A", {CONFIG: {"eos_token": EOS, CLASS: "GPTNeoXTokenizerFast"}}),
        *((), (EOS,)),
    ),
    Row(
        "instruct: the turn's end is first",
        *(QWEN, "bytes", {CONFIG: {"eos_token": TURN}, GENERATION: {"eos_token_id": [2, 0]}}),
        *((), (TURN, END)),
    ),
    Row(
        "base with a chat template",
        *(QWEN, "bytes", {CONFIG: {"eos_token": END}, GENERATION: {"eos_token_id": 0}}),
        *((), (END,)),
    ),
    Row("config.json alone", QWEN, "", {MODEL: {"eos_token_id": [2, 0]}}, (), (TURN, END)),
    Row(
        "the map counts first",
        QWEN,
        "",
        {CONFIG: {"eos_token": END}, MAP: {"eos_token": TURN}},
        (),
        (TURN,),
    ),
    Row(
        "a config that lists its tokens counts first",
        *(QWEN, ""),
        {CONFIG: {"eos_token": END, "added_tokens_decoder": {}}, MAP: {"eos_token": TURN}},
        *((), (END,)),
    ),
    Row(
        "an end as object",
        QWEN,
        "",
        {CONFIG: {"eos_token": {"content": TURN, "__type": "AddedToken"}}},
        (),
        (TURN,),
    ),
    Row("[UNK] alone", ("[UNK]",), "", {}, words=("[UNK]", "none of them a known", "eos_token")),
    Row("<pad> alone", ("<pad>",), "", {}, words=("<pad>", "none of them a known", CONFIG)),
    Row("two usual ends", (END, EOS), "", {}, words=("several", f"{END} and {EOS}")),
    Row("no special token", (), "", {}, words=("no special token", "eos_token")),
    Row(
        "an end that is no token",
        (END,),
        "",
        {CONFIG: {"eos_token": EOS}},
        words=(EOS, "must be a token"),
    ),
    Row(
        "an end that is a list",
        QWEN,
        "",
        {CONFIG: {"eos_token": [END]}},
        words=("eos_token", "text"),
    ),
    Row("an end as number", QWEN, "", {CONFIG: {"eos_token": 0}}, words=("eos_token", "is 0")),
    Row("a number as text", QWEN, "", {GENERATION: {"eos_token_id": "2"}}, words=("eos_token_id",)),
    Row(
        "a number too large",
        QWEN,
        "",
        {GENERATION: {"eos_token_id": 999}},
        words=("999", "must be a token"),
    ),
    Row(
        "true as number", QWEN, "", {MODEL: {"eos_token_id": True}}, words=("eos_token_id", "true")
    ),
)


def made(path: Path, row: Row) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(content(row.special, row.post), encoding="utf-8")
    for name, found in row.files.items():
        (path / name).write_text(json.dumps(found), encoding="utf-8")
    return path


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_folder_gives_begin_and_end_tokens_or_is_refused(tmp_path: Path, row: Row) -> None:
    path = str(made(tmp_path / "tok", row))
    if row.words:
        with pytest.raises(UserError) as caught:
            open_tokenizer(path)
        assert all(word in str(caught.value) for word in (f"data.tokenizer={path}", *row.words))
        return
    tokenizer = open_tokenizer(path)
    assert isinstance(tokenizer, FileTokenizer)
    assert tokenizer.prefix == [row.special.index(token) for token in row.begin]
    assert tokenizer.eot_text == row.ends[0]
    assert tokenizer.ends == {row.special.index(token) for token in row.ends}
    assert tokenizer.bos == ([] if tokenizer.prefix == [tokenizer.eot] else tokenizer.prefix)


@pytest.mark.nightly
@pytest.mark.parametrize("row", [r for r in ROWS if not r.words], ids=lambda row: row.name)
def test_prompts_and_ends_are_those_of_transformers(tmp_path: Path, row: Row) -> None:
    """Tests the folder that a run exports, too."""
    transformers.utils.logging.set_verbosity_error()
    path = made(tmp_path / "tok", row)
    tokenizer = open_tokenizer(str(path))
    assert isinstance(tokenizer, FileTokenizer)
    copy = tmp_path / "export"
    copy.mkdir()
    for name, found in tokenizer.to_export().items():
        (copy / name).write_bytes(found)
    for folder in (path, copy):
        if CONFIG in row.files or folder == copy:
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
            for text in TEXTS:
                ours = [*tokenizer.prefix, *tokenizer.encode_prompt(text.encode())]
                suffix = tokenizer._suffix
                assert theirs(text)["input_ids"] == [*ours, *suffix]
            assert theirs.eos_token_id == tokenizer.eot


def changed(path: list[Any], value: Any) -> str:
    """Returns a tokenizer.json of QWEN with another value at a path of keys."""
    whole = json.loads(content(QWEN, ""))
    at = whole
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(whole)


# The fault of a tokenizer.json → words of the sentence.
NUMBERS = (
    (["added_tokens", 2, "id"], 5000, "gives its added token <|im_end|> the id 5000, but"),
    (["model", "vocab", "zz"], 5, "gives the id 5 to several tokens"),
    (["model", "dropout"], 0.1, "has dropout=0.1, which makes the tokens of a text random"),
)


@pytest.mark.parametrize(("path", "value", "words"), NUMBERS)
def test_invalid_token_numbers_are_refused(
    tmp_path: Path, path: list[Any], value: Any, words: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(changed(path, value))
    (tmp_path / CONFIG).write_text(json.dumps({"eos_token": END}))
    with pytest.raises(UserError) as caught:
        open_tokenizer(str(tmp_path))
    assert words in str(caught.value)


def of_letters() -> str:
    """Returns a tokenizer.json without bytes and without a token for unknown characters."""
    from tokenizers import Tokenizer, models

    inner = Tokenizer(models.BPE({letter: n for n, letter in enumerate("abc ")}, []))
    inner.add_special_tokens([END])
    return inner.to_str()


# A tokenizer.json, files beside it → words of the line, and of the refusal of data=chat.
NAMED = (
    (content(QWEN, ""), {CONFIG: {"eos_token": END, "pad_token": "[PAD]"}}, "lacks, [PAD]", ""),
    (
        content(QWEN, ""),
        {CONFIG: {"eos_token": END}, "added_tokens.json": {"<x>": 9}},
        "<x>",
        "<x>",
    ),
    (content(QWEN, ""), {MAP: {"eos_token": END, "extra_special_tokens": ["<x>"]}}, "<x>", "<x>"),
    (content(QWEN, ""), {CONFIG: {"eos_token": "def"}}, "spells out def ends there", ""),
    (of_letters(), {CONFIG: {"eos_token": END}}, "are left out of texts", ""),
)


@pytest.mark.parametrize(("inner", "files", "words", "refused"), NAMED)
def test_named_tokens_that_do_not_exist_are_reported(
    tmp_path: Path, inner: str, files: dict[str, Any], words: str, refused: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(inner, encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}<x>{{ m.content }}")
    for name, found in files.items():
        (tmp_path / name).write_text(json.dumps(found))
    tokenizer = open_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, FileTokenizer)
    (line,) = tokenizer.doubts()
    assert words in line
    with pytest.raises(
        UserError, match=f"writes {refused}, but this token" if refused else "cannot be"
    ):
        ChatTemplate(tokenizer)


DOUBTS = (
    ("add_bos_token beside a bare tokenizer.json, which decides", "add_bos_token=true"),
    ("add_bos_token=false beside a post-processor, which decides", "add_bos_token=false"),
    ("begin and end", "</s> (1) after every text"),
    ("llama", None),
    ("gpt2", None),
    ("instruct: the turn's end is first", None),
)


@pytest.mark.parametrize(("name", "words"), DOUBTS)
def test_a_contradiction_is_reported(tmp_path: Path, name: str, words: str | None) -> None:
    row = next(row for row in ROWS if row.name == name)
    tokenizer = open_tokenizer(str(made(tmp_path / "tok", row)))
    assert isinstance(tokenizer, FileTokenizer)
    said = tokenizer.doubts()
    assert len(said) == (words is not None) and (words or "") in "".join(said)


LLAMA_ROW = ROWS[2]
# The beginning of documents, whether other training came before → the beginning of prompts and of
# the export.
BEGINS = (
    ((BOS,), False, [0], [0]),
    ((BOS,), True, [0], [0]),
    ((), True, [0], [0]),
    ((), False, [], []),
)


@pytest.mark.parametrize(("documents", "is_begun", "begin", "exported"), BEGINS)
def test_prompts_begin_like_the_documents_of_the_run(
    tmp_path: Path,
    documents: tuple[str, ...],
    is_begun: bool,
    begin: list[int],
    exported: list[int],
) -> None:
    tokenizer = open_tokenizer(str(made(tmp_path / "tok", LLAMA_ROW)))
    data, roles = DataConfig(tokenizer=tokenizer.name), Roles((0,) if documents else (), ())
    for again in range(2):  # a resume changes nothing
        lines = keep_tokenizer(data, tmp_path, tokenizer.digest, roles, is_begun and not again)
        assert f"{BOS} (0)" in lines[0]
        kept = open_tokenizer(str(tmp_path / FOLDER))
        assert isinstance(kept, FileTokenizer) and kept.prefix == begin
    first = begin or [kept.eot]
    # Documents that are made later begin as usual.
    assert kept.begin == first and kept.bos == [0]
    assert encode_pair(kept, "", "ab")[0][: len(first)] == first
    context, _ = encode_pair(kept, "def", " f")
    assert context == [*begin, *kept.encode_prompt(b"def f")]
    inner = json.loads(kept.to_export()["tokenizer.json"])
    assert (inner["post_processor"] is not None) == bool(exported)
    config = json.loads(kept.to_export()[CONFIG])
    assert config.get("bos_token") == (None if exported else EOS)


def test_a_begin_token_spelled_out_in_a_prompt_is_not_doubled() -> None:
    assert begun([5, 6], [0]) == [0, 5, 6] and begun([0, 5], [0]) == [0, 5]
    assert begun([], [0]) == [0] and begun([0], [0, 1]) == [0, 1, 0]


# eos_token_id of generation_config.json, learned ends → eos_token_id of the export.
LEARNED = (
    (0, (2,), [0, 2]),
    (0, (0,), 0),
    (0, (), 0),
    ([2, 0], (2,), [2, 0]),
    ([0], (), [0]),
    (None, (2,), [0, 2]),
)


@pytest.mark.parametrize(("told", "learned", "exported"), LEARNED)
def test_the_end_of_learned_turns_stops_generate_and_an_export(
    tmp_path: Path, told: Any, learned: tuple[int, ...], exported: Any
) -> None:
    files = {CONFIG: {"eos_token": END}, GENERATION: {"eos_token_id": told, "top_k": 20}}
    tokenizer = open_tokenizer(str(made(tmp_path / "tok", Row("", QWEN, "bytes", files))))
    data = DataConfig(tokenizer=tokenizer.name)
    lines = keep_tokenizer(data, tmp_path, tokenizer.digest, Roles((), learned), True)
    assert [TURN in line for line in lines] == [True] * (2 in learned)
    kept = open_tokenizer(str(tmp_path / FOLDER))
    assert isinstance(kept, FileTokenizer) and kept.ends >= {0, *learned}
    generation = json.loads(kept.to_export()[GENERATION])
    assert generation == {"eos_token_id": exported, "top_k": 20}
    assert kept.all_ends(told) == exported  # the value of config.json


def test_roles_that_are_damaged_are_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "tok", LLAMA_ROW)
    for found in ({"begin": [0]}, {"begin": [999], "ends": []}, {"begin": ["0"], "ends": []}):
        (path / "roles.json").write_text(json.dumps(found))
        with pytest.raises(UserError, match=r"roles\.json must list ids"):
            open_tokenizer(str(path))


def typed(path: Path, special: tuple[str, ...], more: tuple[str, ...] = (), **config: Any) -> Any:
    path.mkdir()
    (path / "tokenizer.json").write_text(content(special, "bytes", more), encoding="utf-8")
    (path / CONFIG).write_text(json.dumps(config))
    return open_tokenizer(str(path))


def test_a_given_tokenizer_must_have_the_tokens_of_the_weights(tmp_path: Path) -> None:
    base = typed(tmp_path / "base", QWEN, eos_token=END)
    same = typed(tmp_path / "same", QWEN, eos_token=END, chat_template="{{ messages }}")
    instruct = typed(tmp_path / "instruct", QWEN, eos_token=TURN)
    longer = typed(tmp_path / "longer", QWEN, ("<tool>",), eos_token=END)
    other = typed(tmp_path / "other", (END, EOS, BOS), eos_token=END)
    assert check_same_tokens(base, same, "init_from=x") is None
    assert "ends a text with token 2 instead of 0" in (check_same_tokens(base, instruct, "x") or "")
    assert "has 1 more tokens" in (check_same_tokens(base, longer, "x") or "")
    for there, here in ((base, other), (base, open_tokenizer("byte")), (longer, base)):
        with pytest.raises(UserError, match=r"differs from the tokenizer of init_from=x"):
            check_same_tokens(there, here, "init_from=x")


THEIRS = (
    ("gpt2", "GPT2Tokenizer", None),
    ("llama", "PreTrainedTokenizerFast", None),
    ("begin and end", "GPT2Tokenizer", "tokenize 200 of 200 texts differently"),
    ("llama", "BertTokenizerFast", "cannot load the tokenizer"),
)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "made_by", "words"), THEIRS)
def test_differences_from_transformers_are_reported(
    tmp_path: Path, name: str, made_by: str, words: str | None
) -> None:
    path = made(tmp_path / "tok", next(row for row in ROWS if row.name == name))
    facts = {"eos_token": END if name == "gpt2" else EOS, CLASS: made_by}
    (path / CONFIG).write_text(json.dumps(facts))
    tokenizer = open_tokenizer(str(path))
    assert isinstance(tokenizer, FileTokenizer)
    said = unlike_theirs(tokenizer, path)
    assert said is None if words is None else words in str(said)
