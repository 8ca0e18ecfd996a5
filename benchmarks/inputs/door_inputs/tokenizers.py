"""Draws folders of tokenizers, foreign pairs, typed tokenizers and users' own samples.

The right answers are computed here from how each input was made.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inputs.door_inputs.answers import REFUSAL, Input
from parallel3d.data.corpus import Corpus, open_corpus
from parallel3d.data.indexed import IndexedWriter
from parallel3d.data.keys import DataConfig
from parallel3d.data.loader import checked
from parallel3d.data.sampler import Sample
from parallel3d.data.tokenizer import (
    FOLDER,
    FileTokenizer,
    Roles,
    check_same_tokens,
    keep_tokenizer,
    open_tokenizer,
)
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config

USUAL = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[EOS]")
OTHERS = ("<s>", "<pad>", "[UNK]", "<unk>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<bos>")
WORDS = "the quick brown fox jumps over the lazy dog, and 42 more of them follow it home. "


@functools.cache
def content(special: tuple[str, ...], post: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    """Returns a byte-level tokenizer.json; `post`: the special tokens that it puts before and
    after."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300 + len(special),
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator([WORDS * 5], trainer)
    before, behind = post
    if before or behind:
        parts = [*before, "$A", *behind]
        known = [(name, special.index(name)) for name in {*before, *behind}]
        inner.post_processor = processors.TemplateProcessing(
            single=" ".join(parts), pair=" ".join([*parts, "$B:1"]), special_tokens=known
        )
    return inner.to_str()


def folder_of(rng: random.Random, path: Path, which: int) -> Input:
    """Returns a folder whose files name the end of text in one way, several, none or wrongly."""
    special = tuple(rng.sample(USUAL, rng.choice((0, 1, 1, 1, 2)))) + tuple(
        rng.sample(OTHERS, rng.randint(0, 4))
    )
    special = tuple(rng.sample(special, len(special)))
    before = tuple(rng.sample(special, 1)) if special and rng.random() < 0.4 else ()
    behind = tuple(rng.sample(special, 1)) if special and rng.random() < 0.1 else ()
    where = path / f"tok{which}"
    where.mkdir()
    (where / "tokenizer.json").write_text(content(special, (before, behind)), encoding="utf-8")
    files: dict[str, dict[str, Any]] = {}
    right: object = None
    end: str | None = None
    ends: list[int] = []
    named = rng.random()
    if special and named < 0.5:
        end = rng.choice(special)
        form = rng.choice((end, {"content": end, "__type": "AddedToken"}))
        files[rng.choice(("tokenizer_config.json", "special_tokens_map.json"))] = {
            "eos_token": form
        }
    elif named < 0.6:
        files["tokenizer_config.json"] = {"eos_token": rng.choice((3, ["</s>"], "<nowhere>", True))}
        right = REFUSAL
    if special and rng.random() < 0.5:
        ends = [special.index(t) for t in rng.sample(special, rng.randint(1, min(2, len(special))))]
        told: object = ends if rng.random() < 0.6 or len(ends) > 1 else ends[0]
        if rng.random() < 0.15:
            told, right = rng.choice((str(ends[0]), [str(ends[0])], float(ends[0]), True)), REFUSAL
        files[rng.choice(("generation_config.json", "config.json"))] = {"eos_token_id": told}
    elif rng.random() < 0.1:
        files["generation_config.json"] = {"eos_token_id": rng.choice((5000, None))}
        if end is None and files["generation_config.json"]["eos_token_id"] == 5000:
            right = REFUSAL
    files.setdefault("tokenizer_config.json", {}).update(
        rng.choice(({}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}))
    )
    for name, found in files.items():
        (where / name).write_text(json.dumps(found))
    usual = [token for token in special if token in USUAL]
    common = end is not None and right is None
    if right is None and end is None:
        if ends:
            end = special[ends[0]]
        elif len(usual) == 1:
            end, common = usual[0], True
        else:
            right = REFUSAL
    if right is None:
        assert end is not None
        own = special.index(end)
        begin = [special.index(token) for token in before]
        right = (own, begin, sorted({own, *ends}))

    def take() -> object:
        tokenizer = open_tokenizer(str(where))
        assert isinstance(tokenizer, FileTokenizer)
        return tokenizer.eot, tokenizer.prefix, sorted(tokenizer.ends)

    return Input(f"{special} {before} {files}", take, right, common and right is not REFUSAL)


SPECIAL = ("<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")


def pair_of(rng: random.Random, path: Path, which: int) -> Input:
    """Returns a foreign pair with the labels that count, and the messages about its ends,
    beginnings and tokens."""
    begins = rng.random() < 0.3
    where = path / f"own{which}"
    where.mkdir()
    before = ("<s>",) if begins else ()
    (where / "tokenizer.json").write_text(content(SPECIAL, (before, ())), encoding="utf-8")
    (where / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    tokenizer = open_tokenizer(str(where))
    words = tokenizer.encode(WORDS.encode() * 3).tolist()
    end = rng.choice((None, 0, 0, 2, 4, 200))
    mixed = begins and rng.random() < 0.3
    beyond = rng.random() < 0.1
    count = rng.randint(8, 60)
    stream: list[int] = []
    borders: list[int] = []
    with IndexedWriter(where / "pair", np.dtype("<u2")) as writer:
        for number in range(count):
            first = rng.randrange(5)
            document = words[first : first + rng.randint(24, 50)]
            has_begin = begins and not (mixed and number % 3 == 0)
            document = [*([1] if has_begin else []), *document, *([] if end is None else [end])]
            if beyond and number == 0:
                document[3] = 60000
            borders.append(len(stream))
            stream += document
            writer.add(np.array(document, "<u2"))
    seq = rng.choice((16, 32, 48))
    windows = (len(stream) - 1) // seq
    inside = [at for at in borders if 0 < at <= windows * seq]
    refused = beyond or mixed
    data = DataConfig(
        *("corpus", str(where / "pair")),
        tokenizer=str(where),
        valid_fraction=0.0,
        eod_mask_loss=True,
        packing="concat",
    )

    def take() -> object:
        corpus = open_corpus(data, seq)
        assert isinstance(corpus, Corpus)
        config = Config(data=data, model=ModelConfig(seq_length=seq))
        source = corpus.samples(False, config.model.seq_length, config.data, config.seed)
        counted = sum(int(source.sample(i).loss_mask.sum()) for i in range(windows))
        said = any("sampled documents end in" in sentence for sentence in corpus.told)
        return counted, said, corpus.taught

    learned = (end,) if end in (2, 4) else ()
    right = windows * seq - len(inside), end != 0, Roles((1,) if begins else (), learned)
    text = f"pair of {count}, end={end} begins={begins} mixed={mixed} beyond={beyond} seq={seq}"
    return Input(text, take, REFUSAL if refused else right, not refused)


def typed_of(rng: random.Random, path: Path, which: int) -> Input:
    """Returns a tokenizer typed next to weights: the same, with more tokens, another end, another
    order."""
    kind = rng.choice(("same", "end", "more", "order", "renamed", "byte"))
    base = tuple(rng.sample((*USUAL, *OTHERS), 4))
    other = base
    if kind == "order":
        other = (base[1], base[0], *base[2:])
    elif kind == "renamed":
        other = (*base[:3], "<other>")
    where = path / f"typed{which}"
    facts = json.loads(content(other, ((), ())))
    if kind == "more":
        more = {key: False for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        number = 1 + max(facts["model"]["vocab"].values())
        facts["added_tokens"].append({"id": number, "content": "<tool>"} | more)
    ends = base[0], base[2] if kind == "end" else base[0]
    for name, found, end in (("there", content(base, ((), ())), ends[0]), ("here", facts, ends[1])):
        (where / name).mkdir(parents=True)
        text = found if isinstance(found, str) else json.dumps(found)
        (where / name / "tokenizer.json").write_text(text, encoding="utf-8")
        (where / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))

    def take() -> object:
        here = "byte" if kind == "byte" else str(where / "here")
        there = open_tokenizer(str(where / "there"))
        return check_same_tokens(there, open_tokenizer(here), "init_from=x") is None

    right: object = {"same": True, "end": False, "more": False}.get(kind, REFUSAL)
    return Input(f"{base} beside {kind}", take, right, right is not REFUSAL)


def roles_of(rng: random.Random, path: Path, which: int) -> Input:
    """Returns a run's tokenizer: how prompts begin, where generations end, and what an export
    writes."""
    where = path / f"run{which}"
    (where / "tok").mkdir(parents=True)
    puts, begins, came = rng.random() < 0.7, rng.random() < 0.5, rng.random() < 0.5
    begins = begins and puts
    before = ("<s>",) if puts else ()
    (where / "tok" / "tokenizer.json").write_text(content(SPECIAL, (before, ())), encoding="utf-8")
    (where / "tok" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    told = rng.choice((None, 0, [0], [4, 0], [0, 2]))
    if told is not None:
        (where / "tok" / "generation_config.json").write_text(json.dumps({"eos_token_id": told}))
    learned = tuple(rng.sample((0, 2, 4), rng.randint(0, 2)))

    def take() -> object:
        tokenizer = open_tokenizer(str(where / "tok"))
        roles = Roles((1,) if begins else (), learned)
        data = DataConfig(tokenizer=tokenizer.name)
        for _ in range(rng.randint(1, 3)):
            keep_tokenizer(data, where, tokenizer.digest, roles, came)
        kept = open_tokenizer(str(where / FOLDER))
        assert isinstance(kept, FileTokenizer)
        files = kept.to_export()
        own = files.get("generation_config.json")
        there = kept.all_ends(None) if own is None else json.loads(own)["eos_token_id"]
        export = sorted(there if isinstance(there, list) else [there])
        has_post = json.loads(files["tokenizer.json"])["post_processor"] is not None
        return kept.begin, sorted(kept.ends), export, has_post

    first = told[0] if isinstance(told, list) else told
    known = [0] if told is None else told if isinstance(told, list) else [told]
    keeps = puts and (begins or came)
    right = (
        [1] if keeps else [0],
        sorted({0, *known, *learned}),
        sorted({*known, *learned, 0}),
        keeps,
    )
    text = f"puts={puts} begins={begins} came={came} told={told} ({first}) learned={learned}"
    return Input(text, take, right, common=True)


def sample_of(rng: random.Random, path: Path, which: int) -> Input:
    """Returns a sample of a user's own source, with one thing changed."""
    length, vocabulary = rng.randint(2, 20), rng.choice((10, 300))
    tokens: Any = np.array([rng.randrange(vocabulary) for _ in range(length + 1)])
    mask: Any = np.array([rng.random() < 0.7 for _ in range(length)])
    change = rng.choice(
        ("", "ints", "ones", "int32", "weights", "beyond", "below", "float", "short")
    )
    expected = tokens.tolist(), mask.tolist()
    common = change in ("", "ints", "ones", "int32")
    if change == "ints":
        mask = mask.astype(np.int64)
    elif change == "ones":
        mask = mask.astype(np.float32)
    elif change == "int32":
        tokens = tokens.astype(np.int32)
    elif change == "weights":
        mask = mask.astype(float)
        mask[rng.randrange(length)] = rng.choice((0.5, 2.0, -1.0, float("nan")))
    elif change in ("beyond", "below"):
        tokens[rng.randrange(length + 1)] = (
            vocabulary if change == "beyond" else rng.choice((-1, -100))
        )
    elif change == "float":
        tokens = tokens.astype(float)
    elif change == "short":
        mask = mask[:-1]

    def take() -> object:
        found = checked(Sample(tokens, mask), 3, vocabulary)
        return found.tokens.tolist(), found.loss_mask.tolist()

    text = f"sample of {length}, {vocabulary} tokens, {change or 'as it must be'}"
    return Input(text, take, expected if common else REFUSAL, common)


KINDS: tuple[Callable[[random.Random, Path, int], Input], ...] = (
    *(folder_of, pair_of, typed_of, roles_of, sample_of),
)


def inputs(rng: random.Random, folder: Path) -> Iterator[Input]:
    """Yields inputs of all kinds in turn, without end."""
    which = 0
    while True:
        for kind in KINDS:
            yield kind(rng, folder, which)
            which += 1
