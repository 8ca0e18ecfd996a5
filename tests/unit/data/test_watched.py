"""Tests files of a run that change during it, or between its starts: reported or refused, never
unnoticed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel3d.checkpoint.checkpoints import compared_with
from parallel3d.checkpoint.manifest import Manifest
from parallel3d.data import chat as chat_corpus
from parallel3d.data import tokens
from parallel3d.data.corpus import Corpus, open_corpus
from parallel3d.data.indexed import HEADER
from parallel3d.data.keys import DataConfig
from parallel3d.data.same_text import facts_of
from parallel3d.data.tokenizer import keep_tokenizer
from parallel3d.data.tokens import TextComparison, compare, look_at, marks_of
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from tests.corpora import like_pair, pair
from tests.tokenizers import folder

SEQ = 16
FREE = 2000  # a byte of such a .bin that no fingerprint samples


def data_of(tmp_path: Path, **more: Any) -> DataConfig:
    own = {"name": "corpus", "path": str(tmp_path / "web"), "cache_dir": str(tmp_path / "cache")}
    return DataConfig(**own | more)


def opened(data: DataConfig) -> Corpus:
    corpus = open_corpus(data, SEQ)
    assert isinstance(corpus, Corpus)
    return corpus


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    like_pair(tmp_path / "web", 1)
    return data_of(tmp_path)


def edit(path: Path, at: int, count: int = 1) -> None:
    """Changes bytes in place; the time of change differs, whatever the clock's resolution."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        content = bytes(byte ^ 1 for byte in file.read(count))
        file.seek(at)
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def touch(path: Path) -> None:
    edit(path, 0, 0)


def without_facts(data: DataConfig) -> DataConfig:
    Path(f"{data.path}.json").unlink()
    data.tokenizer = "byte"
    return data


def test_unchanged_files_are_not_reported(data: DataConfig) -> None:
    corpus = opened(data)
    assert look_at(corpus.files) == []
    assert compare(opened(data).watched, marks_of(corpus.watched)) == TextComparison()


def test_edit_outside_the_places_of_the_fingerprint_is_logged_under_a_run(
    data: DataConfig,
) -> None:
    corpus = opened(without_facts(data))
    edit(Path(f"{data.path}.bin"), FREE)
    assert opened(data).fingerprint == corpus.fingerprint
    assert look_at(corpus.files) == [
        f"{data.path}.bin was written to or touched during the run: its size and samples "
        "of its content are unchanged, but the rest is unknown"
    ]
    assert look_at(corpus.files) == []  # once


def test_edit_outside_the_places_of_the_fingerprint_is_logged_at_the_next_start(
    data: DataConfig,
) -> None:
    marks = marks_of(opened(without_facts(data)).watched)
    edit(Path(f"{data.path}.bin"), FREE)
    assert compare(opened(data).watched, marks).note == (
        f"{data.path}.bin may have changed since the last checkpoint, by time of change, inode or "
        "version: sizes and samples of the content are unchanged, but the rest is unknown"
    )


def test_an_edit_with_a_restored_modification_time_is_still_reported(data: DataConfig) -> None:
    corpus, path = opened(without_facts(data)), Path(f"{data.path}.bin")
    marks, before = marks_of(corpus.watched), path.stat()
    edit(path, FREE)
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # a clock with a coarse resolution
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert compare(opened(data).watched, marks).note is not None
    assert len(look_at(corpus.files)) == 1


def test_edit_of_a_pair_with_a_known_digest_is_noticed_in_the_run_and_at_the_next_start(
    data: DataConfig,
) -> None:
    corpus = opened(data)
    edit(Path(f"{data.path}.bin"), FREE)
    with pytest.raises(UserError, match=r"web\.bin was changed during the run, at the same size"):
        look_at(corpus.files)
    refusal = compare(opened(data).watched, marks_of(corpus.watched)).refusal
    assert (
        refusal is not None and "web.bin was changed since the last checkpoint: restore" in refusal
    )
    edit(Path(f"{data.path}.bin"), FREE)  # changed back
    assert look_at(corpus.files) == []


def test_a_changed_pair_too_large_to_verify_is_reported(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "PROVED", 1000)
    corpus = opened(data)
    edit(Path(f"{data.path}.bin"), FREE)
    assert len(look_at(corpus.files)) == 1


@pytest.mark.parametrize("part", ["pointers", "documents"])
def test_an_index_that_became_inconsistent_ends_the_run(data: DataConfig, part: str) -> None:
    corpus = opened(data)
    there = marks_of(corpus.watched)
    at = HEADER.size + 800 * (4 if part == "pointers" else 12) + 8 * 700
    edit(Path(f"{data.path}.idx"), at + (0 if part == "pointers" else 1))
    with pytest.raises(
        UserError, match=r"web\.idx does not match its \.bin: .*make the dataset again"
    ):
        look_at(corpus.files)
    corpus.files[1].mark = "another"
    assert "does not match its .bin" in compare(corpus.watched, there).refusal


@pytest.mark.slow
@pytest.mark.parametrize("end", [".bin", ".idx"])
@pytest.mark.parametrize("change", ["places", "shorter", "longer"])
def test_a_pair_with_other_content_ends_the_run(data: DataConfig, end: str, change: str) -> None:
    corpus, path = opened(data), Path(f"{data.path}{end}")
    size = path.stat().st_size
    if change == "places":
        edit(path, 40 if end == ".idx" else 0, 1)
    else:
        os.truncate(path, size + (8 if change == "longer" else -8))
    with pytest.raises(UserError, match=rf"web\{end} was changed during the run") as raised:
        look_at(corpus.files)
    if change != "places":
        assert f"from {size:,} bytes to {path.stat().st_size:,}" in str(raised.value)
    assert f"`parallel3d data show {data.path}`" in str(raised.value)


def test_a_pair_replaced_during_a_run_is_read_to_its_end_and_reported(
    data: DataConfig, tmp_path: Path
) -> None:
    corpus = opened(data)
    was = corpus.train[:]
    like_pair(tmp_path / "other", 2)
    for end in (".bin", ".idx"):
        os.replace(tmp_path / f"other{end}", f"{data.path}{end}")
    assert look_at(corpus.files) == [
        f"{data.path}{end} was replaced or removed: this run continues with the file that it "
        "opened, but a later start would read another"
        for end in (".bin", ".idx")
    ]
    assert np.array_equal(corpus.train[:], was)


def test_a_moved_or_restored_pair_is_reported_once_and_not_refused(
    data: DataConfig, tmp_path: Path
) -> None:
    marks = marks_of(opened(data).watched)
    for end in (".bin", ".idx", ".json"):
        shutil.copy2(f"{data.path}{end}", tmp_path / f"copy{end}")
    data.path = str(tmp_path / "copy")
    there = opened(data).watched
    compared = compare(there, marks)
    assert compared.refusal is None  # their digest verifies the tokens
    assert compared.note.startswith(f"{data.path}.idx may have changed since the last checkp")
    assert compare(there, marks_of(there)) == TextComparison()


def text(tmp_path: Path, **more: Any) -> DataConfig:
    (tmp_path / "book.txt").write_text("".join(f"{n} bottles of beer\n" for n in range(300)))
    return data_of(tmp_path, name="text", path=str(tmp_path / "book.txt"), **more)


def packed_text(tmp_path: Path) -> DataConfig:
    return text(tmp_path, tokenizer=str(folder(tmp_path / "tok")))


def packs(tmp_path: Path) -> DataConfig:
    like_pair(tmp_path / "web", 1)
    return data_of(tmp_path, packing="best_fit", cut_documents=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "end"),
    [(text, "bin"), (packed_text, "bin"), (packed_text, "idx"), (packs, "packs")],
)
def test_a_changed_cache_file_ends_the_run_and_is_rebuilt(
    tmp_path: Path, make: Callable[[Path], DataConfig], end: str
) -> None:
    data = make(tmp_path)
    corpus = opened(data)
    marks, fingerprint = marks_of(corpus.watched), corpus.fingerprint
    (path, *_) = sorted((tmp_path / "cache").glob(f"*.{end}"))
    touch(path)
    assert look_at(corpus.files) == []  # nothing to report, because the whole file is read again
    edit(path, path.stat().st_size // 2, 2)
    with pytest.raises(UserError) as raised:
        look_at(corpus.files)
    assert str(raised.value) == (
        f"{path} was changed during the run, at the same size: remove it and start again: it "
        "will be rebuilt"
    )
    assert opened(data).fingerprint == fingerprint
    for left in (tmp_path / "cache").iterdir():
        left.unlink()
    assert opened(data).fingerprint == fingerprint
    # Another file, whose content is verified.
    assert compare(opened(data).watched, marks) == TextComparison()


def test_a_cache_too_large_to_verify_is_compared_by_its_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "PROVED", 64)
    data = text(tmp_path)
    corpus = opened(data)
    marks = marks_of(corpus.watched)
    (path,) = (tmp_path / "cache").glob("*.bin")
    assert marks and compare(opened(data).watched, marks) == TextComparison()
    touch(path)
    assert len(look_at(corpus.files)) == 1
    assert compare(opened(data).watched, marks).note.startswith(f"{path} may have changed")


@pytest.mark.nightly
def test_a_packing_plan_is_not_used_for_a_pair_edited_since(tmp_path: Path) -> None:
    count, at = 6000, HEADER.size
    index = Path(f"{pair(tmp_path / 'web', 1, documents=count, longest=6)}.idx")
    data = data_of(tmp_path, packing="best_fit", cut_documents=True)
    before = opened(data)
    content = bytearray(index.read_bytes())
    lengths = np.frombuffer(content, "<i4", count, at).copy()
    # The fingerprint also samples 8 × 512 of the lengths.
    swapped = next(k for k in range(600, 700) if lengths[k] != lengths[k + 1])
    lengths[swapped], lengths[swapped + 1] = lengths[swapped + 1], lengths[swapped]
    begins = 2 * (np.cumsum(lengths, dtype="<i8") - lengths)
    content[at : at + 12 * count] = lengths.tobytes() + begins.tobytes()
    index.write_bytes(content)
    after = opened(data)
    assert after.fingerprint.split()[0] == before.fingerprint.split()[0]
    assert after.plans[0].digest != before.plans[0].digest


def manifest(corpus: Corpus, **data: Any) -> Manifest:
    config = {"model": {}, "data": {}}
    return Manifest(1, {"consumed_samples": 0}, config, facts_of(corpus) | data, "", {}, ())


def test_a_checkpoint_holds_the_marks_and_one_without_them_is_accepted(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel3d.checkpoint.identity.changes", lambda *_: [])
    config = Config(data=data, model=ModelConfig(seq_length=SEQ, vocab_size=257))
    corpus = opened(without_facts(data))
    kept = manifest(corpus)
    assert json.loads(json.dumps(kept.data)) == kept.data
    assert compared_with(kept, config, corpus) == TextComparison()
    edit(Path(f"{data.path}.bin"), FREE)
    again = opened(data)
    compared = compared_with(kept, config, again)
    assert compared.refusal is None and "may have changed" in compared.note
    old = dict(kept.data)
    del old["files"]
    assert compared_with(manifest(corpus, **{"files": ""}), config, again) == TextComparison()
    old_manifest = Manifest(1, {"consumed_samples": 0}, kept.config, old, "", {}, ())
    assert compared_with(old_manifest, config, again) == TextComparison()
    edit(Path(f"{data.path}.bin"), 0)
    other = compared_with(old_manifest, config, opened(data)).refusal
    assert "cannot resume with another text" in other


def test_the_end_of_text_in_a_pairs_json_must_be_its_tokenizers(data: DataConfig) -> None:
    facts = Path(f"{data.path}.json")
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"eot": 7}))
    with pytest.raises(UserError, match=r"web\.json has eot=7, but its tokenizer has 256"):
        opened(data)


def test_tokenizer_that_changes_while_a_run_starts_is_not_kept(tmp_path: Path) -> None:
    run, tok = tmp_path / "run", folder(tmp_path / "tok")
    run.mkdir()
    with pytest.raises(UserError, match="changed while the run was starting"):
        keep_tokenizer(DataConfig(tokenizer=str(tok)), run, "of the corpus")
    assert not any(run.iterdir())


def test_conversations_that_change_while_they_are_read_leave_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    tok, rows = folder(tmp_path / "tok", chat_template=template), tmp_path / "a.jsonl"
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows.write_text(f"{json.dumps(talk)}\n" * 40)
    data = data_of(tmp_path, name="chat", path=str(rows), tokenizer=str(tok))
    data.packing = "padded"
    read = chat_corpus.Reader.read

    def grows(self: Any, row: Any) -> Any:
        touch(rows)
        return read(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(chat_corpus.Reader, "read", grows)
        with pytest.raises(UserError, match=r"a\.jsonl changed while it was being read"):
            open_corpus(data, 64)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"]
    assert len(opened_chat(data).train)


def opened_chat(data: DataConfig) -> Corpus:
    corpus = open_corpus(data, 64)
    assert isinstance(corpus, Corpus)
    return corpus
