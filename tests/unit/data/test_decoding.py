"""Tests text streamed token by token: it is complete at the end, and never cuts a character."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from parallel3d.data.tokenizer import ByteTokenizer, Decoding, open_tokenizer
from parallel3d.data.tokenizer import Tokenizer as AnyTokenizer
from tests.tokenizers import END, TEXT, folder, trained


def joined_words() -> str:
    """Makes a tokenizer that spells blanks as ▁ and leaves out the first one, like
    SentencePiece."""
    words = [*"▁ab漢é", "▁héllo", "▁wörld", "▁a", "▁and"]
    pieces = [("<unk>", 0.0), *((word, -float(len(word) == 1)) for word in words)]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    inner = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    blanks, first = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence([blanks, decoders.ByteFallback(), decoders.Fuse(), first])
    inner.add_special_tokens(["</s>"])
    return inner.to_str()


@pytest.fixture(params=["byte", "byte-level", "joined words"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> AnyTokenizer:
    if request.param == "byte":
        return ByteTokenizer()
    content = trained() if request.param == "byte-level" else joined_words()
    return open_tokenizer(str(folder(tmp_path, content)))


def pieces(tokenizer: AnyTokenizer, prompt: bytes, tokens: list[int]) -> list[str]:
    decoding = Decoding(tokenizer)
    return [decoding.begin(prompt), *map(decoding.add, tokens), decoding.end()]


@pytest.mark.parametrize("prompt", ["", "wörld a"])
def test_pieces_are_whole_characters_and_make_the_text(
    tokenizer: AnyTokenizer, prompt: str
) -> None:
    for text in (*TEXT, " wörld 漢 héllo😀ab"):
        tokens = tokenizer.encode_prompt(text.encode())
        said = pieces(tokenizer, prompt.encode(), tokens)
        assert not any("\ufffd" in piece for piece in said), said
        if prompt:
            whole = tokenizer.decode([*tokenizer.encode_prompt(prompt.encode()), *tokens])
            assert "".join(said) == whole
        else:
            assert "".join(said) == tokenizer.decode(tokens)
        assert len([piece for piece in said if piece]) > 3, "it came all at once"


def test_random_tokens_give_the_same_text_one_by_one_as_all_at_once(
    tokenizer: AnyTokenizer,
) -> None:
    """The text is equal except for replacement characters, and for a tokenizer that changes earlier
    text."""
    generator = random.Random(3)
    for _ in range(50):
        tokens = [generator.randrange(tokenizer.vocab_size) for _ in range(40)]
        said = "".join(pieces(tokenizer, b"a", tokens))
        whole = tokenizer.decode([*tokenizer.encode_prompt(b"a"), *tokens])
        if tokenizer.vocab_size > 290 or tokenizer.name == "byte":
            assert said.replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_a_prompt_of_bytes_may_end_inside_a_character() -> None:
    euro = "€".encode()
    assert "".join(pieces(ByteTokenizer(), b"1 " + euro[:1], [*euro[1:], 256])) == "1 €"
    assert pieces(ByteTokenizer(), b"", [0xE2])[-1] == "\ufffd"


def test_a_prompt_may_spell_special_tokens_and_they_are_not_shown(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(folder(tmp_path)))
    assert tokenizer.encode_prompt(f"a{END}".encode())[-1] == tokenizer.eot
    assert tokenizer.encode(f"a{END}".encode())[-1] != tokenizer.eot
    assert pieces(tokenizer, b"a", [tokenizer.eot]) == ["a", "", ""]


def test_the_tokenizers_prefix_begins_a_prompt(tmp_path: Path) -> None:
    content = json.loads(trained(320, (END, "<s>")))
    first = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, first],
        "pair": [first, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    tokenizer = open_tokenizer(str(folder(tmp_path / "a", json.dumps(content), eos_token=END)))
    assert tokenizer.begin == [1] and tokenizer.eot == 0
    assert open_tokenizer(str(folder(tmp_path / "b"))).begin == [0]


def test_a_generation_may_end_by_several_tokens(tmp_path: Path) -> None:
    folder(tmp_path / "a", trained(320, (END, "<turn>")), eos_token=END)
    (tmp_path / "a" / "generation_config.json").write_text('{"eos_token_id": [0, 1, 5000]}')
    tokenizer = open_tokenizer(str(tmp_path / "a"))
    assert tokenizer.ends == {0, 1}
    tokenizer.save(tmp_path / "b")
    assert open_tokenizer(str(tmp_path / "b")).ends == {0, 1}
