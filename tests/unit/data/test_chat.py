"""Tests that the tokens of conversations equal transformers', and that only the assistant's are
learned."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import transformers

from parallel3d.data import corpus as planned
from parallel3d.data.chat import ChatTemplate, Reader, RefusedRow
from parallel3d.data.corpus import check_data, open_corpus
from parallel3d.data.keys import DataConfig
from parallel3d.data.tokenizer import open_tokenizer
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config, check_config
from tests.corpora import heard
from tests.sources import sources_of
from tests.tokenizers import END, PANIC, folder, panicking, trained

TURNS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin|>")
CONTENT = trained(330, (END, *TURNS))
# Each has `{% generation %}` around the assistant's words, by which transformers marks them.
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama": "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_end|>\n\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot_id|>"
    "{% endgeneration %}{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}",
    "words": "{% for m in messages %}{% if m.role == 'user' %}{{ 'Q: ' + m.content + '\n' }}"
    "{% else %}A:{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
    # A turn that is not the last one is spelled differently.
    "thinking": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{% if loop.last %}<think>\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}
TALKS = [
    [("user", "héllo"), ("assistant", "wörld 漢字")],
    [("user", "a\n\nb "), ("assistant", "def f():\n    return"), ("user", "c"), ("assistant", "d")],
    [("user", "a"), ("assistant", "a"), ("assistant", "b"), ("user", "unanswered")],
    [("user", "same"), ("assistant", "same"), ("user", "same"), ("assistant", "same")],
]  # fmt: skip


def row(talk: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {"messages": [{"role": who, "content": what} for who, what in talk]}


def home(path: Path, template: str | None, **config: object) -> Path:
    names = {"eos_token": END, "bos_token": TURNS[3]} | config
    return folder(path, CONTENT, **names, **({"chat_template": template} if template else {}))


def reader(path: Path) -> Reader:
    tokenizer = open_tokenizer(str(path))
    return Reader(tokenizer, ChatTemplate(tokenizer))


@pytest.mark.parametrize("template", TEMPLATES)
def test_tokens_and_labels_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    path = home(tmp_path, TEMPLATES[template])
    ours, peer = reader(path), transformers.PreTrainedTokenizerFast.from_pretrained(path)
    for talk in TALKS:
        found = ours.read(row(talk))
        theirs = peer.apply_chat_template(
            row(talk)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        assert found.tokens.tolist() == theirs["input_ids"], talk
        assert found.spoken.astype(int).tolist() == theirs["assistant_masks"], talk


def bare(template: str) -> str:
    """Returns one of TEMPLATES without its tags."""
    return TEMPLATES[template].replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("template", TEMPLATES)
def test_without_tags_the_same_tokens_are_learned(tmp_path: Path, template: str) -> None:
    without = reader(home(tmp_path, bare(template)))
    with_tags = reader(home(tmp_path / "tagged", TEMPLATES[template]))
    for talk in TALKS:
        found, tagged = without.read(row(talk)), with_tags.read(row(talk))
        learned = found.tokens[found.spoken].tolist()
        assert learned == tagged.tokens[tagged.spoken].tolist(), talk


def test_blanks_after_the_end_of_a_turn_are_not_learned(tmp_path: Path) -> None:
    """Tests a token that ends a turn and that nothing follows, which templates do not mark."""
    path = home(tmp_path, bare("chatml"))
    found = reader(path).read(row(TALKS[1]))
    tokenizer = open_tokenizer(str(path))
    said = np.split(found.tokens, np.flatnonzero(np.diff(found.spoken.astype(int))) + 1)[1::2]
    assert [tokenizer.decode(part) for part in said] == [what for _, what in TALKS[1][1::2]]
    assert all(part[-1] == tokenizer.special["<|im_end|>"] for part in said)


def test_a_message_that_spells_special_tokens_cannot_end_its_turn(tmp_path: Path) -> None:
    path = home(tmp_path, TEMPLATES["chatml"])
    spelled = f"x<|im_end|>\n<|im_start|>assistant\ny{END}<|im_end|>"
    tokenizer = open_tokenizer(str(path))
    for talk in ([("user", spelled), ("assistant", "z")], [("user", "z"), ("assistant", spelled)]):
        found = reader(path).read(row(talk))
        numbers = [token for token in found.tokens if token in tokenizer.special.values()]
        names = {number: name for name, number in tokenizer.special.items()}
        assert [names[n] for n in numbers] == ["<|im_start|>", "<|im_end|>"] * 2
        said = found.tokens[found.spoken]
        assert tokenizer.decode(said) == talk[1][1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "is not an object"),
        ({"message": []}, "has no messages; the nearest key is message"),
        ({"messages": "a"}, "has messages as text that is not JSON"),
        ({"messages": ["a"]}, "has messages, which must be a list of objects"),
        ({"messages": [{"role": "user", "content": 3}]}, "whose content must be text"),
        (row([("user", "a")]), "has no message of role assistant"),
        (row([]), "has no message of role assistant"),
        (row([("system", "a"), ("assistant", "b")]), "no system here"),
    ],
)
def test_an_invalid_conversation_is_refused_with_the_reason(
    tmp_path: Path, given: Any, words: str
) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}"
    path = home(tmp_path, f"{template}{{% endif %}}{TEMPLATES['chatml']}")
    with pytest.raises(RefusedRow, match=words):
        reader(path).read(given)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}", ["cannot be parsed", "line 1"]),
        ("{{ messages |", ["cannot be parsed"]),
        (None, ["data=chat needs a chat template", "chat_template.jinja"]),
    ],
)
def test_a_template_that_does_not_parse_is_one_sentence(
    tmp_path: Path, template: str | None, words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        reader(home(tmp_path, template))
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_a_template_cannot_reach_out_of_its_sandbox_nor_read_the_clock(tmp_path: Path) -> None:
    for number, evil in enumerate(
        (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.append(1) }}",
            "{{ strftime_now('%d') }}",
            "{{ range(10**9) | list }}",
        )
    ):
        with pytest.raises(RefusedRow):
            reader(home(tmp_path / str(number), evil)).read(row(TALKS[0]))


def test_a_template_may_be_a_file_of_its_own_or_one_of_several(tmp_path: Path) -> None:
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ 1 }}"}]
    for name, config, text in (
        ("a", {"chat_template": several}, "{{ 1 }}"),
        ("b", {"chat_template": "{{ 2 }}"}, "{{ 2 }}"),
        ("c", {"chat_template": "{{ 2 }}"}, "{{ 3 }}"),
    ):
        home(tmp_path / name, None, **config)
        if name == "c":
            (tmp_path / name / "chat_template.jinja").write_text("{{ 3 }}")
        tokenizer = open_tokenizer(str(tmp_path / name))
        assert ChatTemplate(tokenizer).text == text
        tokenizer.save(tmp_path / "copies" / name)
        assert ChatTemplate(open_tokenizer(str(tmp_path / "copies" / name))).text == text


# ---- samples of a run


def data(tmp_path: Path, rows: Sequence[Any], **kwargs: object) -> DataConfig:
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    tokenizer = str(home(tmp_path / "tok", TEMPLATES["chatml"]))
    settings = {"packing": "padded", "cache_dir": str(tmp_path / "cache")} | kwargs
    return DataConfig("chat", str(tmp_path / "chat.jsonl"), tokenizer=tokenizer, **settings)


def samples(given: DataConfig, seq_length: int) -> tuple[Any, Any]:
    corpus = open_corpus(given, seq_length)
    model = ModelConfig(seq_length=seq_length, vocab_size=corpus.vocab_size)
    train, valid, _ = sources_of(corpus, Config(data=given, model=model))
    return train, valid


ROWS = [row([*TALKS[i % 4], ("user", f"q{i}"), ("assistant", f"a{i}")]) for i in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_every_assistant_turn_is_learned_once_an_epoch(tmp_path: Path, packing: str) -> None:
    given = data(tmp_path, ROWS, packing=packing, document_mask=packing == "best_fit")
    train, valid = samples(given, 200)
    read = [reader(Path(given.tokenizer)).read(each) for each in ROWS]
    expected = sorted(tuple(one.tokens[one.spoken].tolist()) for one in read)
    learned = []
    for source in (train, valid):
        count = source.windows
        assert count < len(ROWS) or packing == "padded"
        for number in range(count):
            sample = source.sample(number)
            assert sample.tokens.max() < 400
            ends = [*np.unique(sample.starts), 200]
            for begin, end in itertools.pairwise(ends):
                mask = sample.loss_mask[begin:end]
                learned.append(tuple(sample.tokens[begin + 1 : end + 1][mask].tolist()))
    learned = sorted(labels for labels in learned if labels)
    assert learned == expected, "the labels of all that is learned are what the assistant said"


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concat", "best_fit", "padded"])
@pytest.mark.parametrize("typed", [None, False, True])
def test_packed_conversations_do_not_see_each_other_unless_asked(
    tmp_path: Path, packing: str, typed: bool | None
) -> None:
    given = data(tmp_path, ROWS, packing=packing, document_mask=typed, valid_fraction=0.4)
    wanted = packing != "padded" if typed is None else typed
    config = check_config(Config(data=given, model=ModelConfig(seq_length=200, vocab_size=400)))
    assert config.data.document_mask is wanted, "the value is kept with the run"
    told = [line for line in open_corpus(given, 200).told if "document_mask" in line]
    assert len(told) == (packing != "padded")
    assert all(f"data.document_mask={str(wanted).lower()}" in line for line in told)
    train, _ = samples(given, 200)
    several = max(len(np.unique(train.sample(i).starts)) for i in range(train.windows))
    assert packing != "concat" or (several > 1) == wanted
    for name in ("text", "corpus", "blend", "stdlib"):
        assert not dataclasses.replace(given, name=name, document_mask=None).masks_documents


def test_an_epoch_of_padded_conversations_has_one_sample_each(tmp_path: Path) -> None:
    train, valid = samples(data(tmp_path, ROWS), 200)
    assert train.windows + valid.windows == len(ROWS)
    first = {tuple(train.sample(i).tokens) for i in range(train.windows)}
    second = {tuple(train.sample(i).tokens) for i in range(len(first), 2 * len(first))}
    assert first == second and len(first) == train.windows


@pytest.mark.slow
def test_another_template_or_row_has_another_fingerprint(tmp_path: Path) -> None:
    first = open_corpus(data(tmp_path, ROWS), 200).fingerprint
    assert open_corpus(data(tmp_path, ROWS), 200).fingerprint == first
    assert open_corpus(data(tmp_path, ROWS[1:]), 200).fingerprint != first
    again = data(tmp_path, ROWS)
    home(tmp_path / "tok", TEMPLATES["llama"])
    assert open_corpus(again, 200).fingerprint != first


@pytest.mark.parametrize(
    ("rows", "kwargs", "words"),
    [
        ([ROWS[0], row([("user", "a")])], {}, ["chat.jsonl:2", "no message of role assistant"]),
        ([ROWS[0]], {}, ["has one conversation"]),
        ([ROWS[0], 3], {}, ["chat.jsonl:2 is not an object"]),
        (ROWS, {"tokenizer": "byte"}, ["data=chat needs a tokenizer", "data.tokenizer is byte"]),
        (ROWS, {"tokenizer": None}, ["data=chat needs a tokenizer", "data.tokenizer is null"]),
        ([ROWS[0], row([("user", "x" * 300), ("assistant", "a")])], {}, ["longer than the 201"]),
    ],
)
def test_a_row_that_is_not_a_chat_is_refused_in_one_sentence(
    tmp_path: Path, rows: list[Any], kwargs: dict[str, Any], words: list[str]
) -> None:
    given = data(tmp_path, rows)
    for key, value in kwargs.items():
        setattr(given, key, value)
    with pytest.raises(UserError) as caught:
        check_data(given, 200, vocab_size=400)
        open_corpus(given, 200)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


LONG = row([("user", "x" * 300), ("assistant", "a")])  # its first piece of 201 tokens has no answer
FIRST = row([("assistant", "a"), ("user", "x" * 300)])  # its last piece has no answer


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_pieces_without_assistant_words_are_left_out(tmp_path: Path, packing: str) -> None:
    kwargs = {"packing": packing, "document_mask": packing == "best_fit", "cut_documents": True}
    given = data(tmp_path, [LONG, FIRST, *ROWS[:4], LONG], **kwargs)
    with heard() as said:
        corpus = open_corpus(given, 200)
    train, valid, _ = sources_of(corpus, Config(data=given, model=ModelConfig(
        seq_length=200, vocab_size=corpus.vocab_size)))  # fmt: skip
    for source in (train, valid):
        for number in range(source.windows):
            assert source.sample(number).loss_mask.any()
    assert valid.windows == 1
    plain = dataclasses.replace(corpus, marked=False)  # an earlier version's plan is not used
    names = [planned._plan_key(one, False, given, 201) for one in (corpus, plain)]
    assert names[0] != names[1]
    words = [sentence for sentence in said if "left out" in sentence]
    assert words == [
        f"left out of the {part} samples, because the assistant says nothing in them: {some} "
        "pieces of conversations"
        for part, some in (("training", "2 of 8"), ("held-out", "1 of 2"))
    ]


def test_a_held_out_part_without_assistant_words_is_refused(tmp_path: Path) -> None:
    """Its answer is in the remainder, which fills no window."""
    given = data(tmp_path, [*ROWS, LONG], packing="concat")
    with pytest.raises(UserError, match="says nothing in the samples that are held out"):
        open_corpus(given, 200)
    given = data(tmp_path, ROWS, packing="concat")
    with pytest.raises(UserError, match=r"held-out conversations have .* give data.packing=padded"):
        open_corpus(given, 1000)
    # In packs the first token of a piece is never a label, and the piece has no other token of this
    # answer.
    given = data(tmp_path, ROWS, cut_documents=True)
    with (
        patch("parallel3d.data.corpus.learned", lambda _, starts, __: starts < 0),
        pytest.raises(UserError, match="says nothing in the samples that are trained on"),
    ):
        open_corpus(given, 100)


@pytest.mark.nightly
def test_an_invalid_row_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = data(tmp_path, [*ROWS, row([("user", PANIC), ("assistant", "a")])])
    (tmp_path / "tok" / "tokenizer.json").write_text(panicking())
    with pytest.raises(UserError, match=r"chat.jsonl:21 cannot be encoded by its tokenizer \(Onig"):
        open_corpus(given, 200)
    given = data(tmp_path, ROWS)
    monkeypatch.setattr("parallel3d.data.chat.LONGEST", 100)
    with pytest.raises(UserError, match=r"chat.jsonl:1 has more than 100 bytes"):
        open_corpus(given, 200)


def test_rows_may_be_packed_files(tmp_path: Path) -> None:
    given = data(tmp_path, ROWS)
    first = open_corpus(given, 200).fingerprint
    path = tmp_path / "chat.jsonl.gz"
    path.write_bytes(gzip.compress(Path(given.path).read_bytes()))
    given.path = str(path)
    assert open_corpus(given, 200).fingerprint == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "bad", "words"),
    [
        (
            0.0,
            1,
            [
                "chat.jsonl:2 has nothing to learn",
                "fix or remove this row, or give data.skip_bad_rows",
            ],
        ),
        (0.01, 1, ["1 of the first 21 rows", "more than data.skip_bad_rows=0.01", "chat.jsonl:2"]),
        (0.05, 1, []),
        (0.05, 2, ["2 of the first 22 rows"]),
        (1.0, 9, []),
    ],
)
def test_bad_rows_are_left_out_up_to_a_share(
    tmp_path: Path, share: float, bad: int, words: list[str]
) -> None:
    empty = [row([("user", "a"), ("assistant", "")])] * bad
    given = data(tmp_path, [ROWS[0], *empty, *ROWS[1:]], skip_bad_rows=share)
    if words:
        with pytest.raises(UserError) as caught:
            open_corpus(given, 200)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        return
    for _ in range(2):  # an existing cache gives the same notes
        corpus = open_corpus(given, 200)
        assert corpus.told == (
            f"data.path={given.path}: {bad} of {20 + bad} rows are left out by data.skip_bad_rows, "
            "beginning with this one: chat.jsonl:2 has nothing to learn in message 2 of role "
            "assistant except its end",
        )
    assert corpus.fingerprint == open_corpus(data(tmp_path, ROWS), 200).fingerprint


def test_bad_rows_are_no_json_too_long_or_without_words_to_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = data(tmp_path, ROWS, skip_bad_rows=0.5)
    monkeypatch.setattr("parallel3d.data.chat.LONGEST", 1000)
    unlearned = {"messages": [{"role": "assistant", "content": "a", "weight": 0}]}
    with open(given.path, "a") as file:
        file.write(
            f"{{\n\n{json.dumps(unlearned)}\n{json.dumps(row([('user', 'a' * 1000)]))}\n[]\n"
        )
        file.write('{"messages": [], "messages": []}\n')
    (sentence,) = open_corpus(given, 200).told
    assert ": 5 of 25 rows are left out by" in sentence


def test_keys_that_are_not_read_are_counted(tmp_path: Path) -> None:
    given = data(tmp_path, [{**ROWS[0], "id": 1}, *({**each, "source": "a"} for each in ROWS[1:])])
    assert open_corpus(given, 200).told == (
        f"data.path={given.path}: keys not read: source (19 rows), id (1 row)",
    )
