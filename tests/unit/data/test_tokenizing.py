"""Tests corpora made from text: their content, and equal bytes for any workers and after any
kill."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from parallel3d.data.indexed import IndexedCorpus, facts_beside, tokenizer_beside
from parallel3d.data.inputs import take_inputs
from parallel3d.data.preprocess import JournalEntry, PreprocessJob, tokenize
from parallel3d.data.tokenizer import open_tokenizer
from parallel3d.errors import UserError
from tests.tokenizers import PANIC, TEXT, folder, lines, panicking, trained

pytestmark = pytest.mark.nightly

TEXTS = [TEXT[i % 2][: 3 + 5 * i] + str(i) for i in range(30)]


def job(tmp_path: Path, to: str = "web", given: str = "in", **kwargs: object) -> PreprocessJob:
    tokenizer = str(folder(tmp_path / "tok"))
    settings = {"workers": 0, "shard_bytes": 300, "flush_bytes": 400} | kwargs
    inputs = tuple(take_inputs(str(tmp_path / given)).inputs)
    return PreprocessJob(inputs, settings.pop("tokenizer", tokenizer), tmp_path / to, **settings)


def made(asked: PreprocessJob) -> list[JournalEntry]:
    told: list[JournalEntry] = []
    tokenize(asked, told.append)
    return told


def files(to: Path) -> dict[str, bytes]:
    """Returns every file that belongs to a corpus, by its name after the prefix."""
    found = [p for p in to.parent.rglob("*") if p.is_file() and str(p).startswith(str(to))]
    return {str(path)[len(str(to)) :]: path.read_bytes() for path in found}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    root = tmp_path / "in"
    root.mkdir()
    (root / "a.jsonl").write_bytes(lines(TEXTS))
    for i in range(6):
        (root / f"b{i}.txt").write_text(TEXTS[i])
    return tmp_path


@pytest.mark.parametrize("tokenizer", ["file", "byte"])
def test_a_corpus_holds_every_document_with_its_end(text: Path, tokenizer: str) -> None:
    asked = job(text, **({"tokenizer": "byte"} if tokenizer == "byte" else {}))
    told = made(asked)
    corpus, facts = IndexedCorpus(asked.to), facts_beside(asked.to)
    cutter = open_tokenizer(tokenizer_beside(asked.to, facts))
    assert cutter.digest == facts.tokenizer == open_tokenizer(asked.tokenizer).digest
    parts = np.split(corpus.tokens[:], np.cumsum(corpus.lengths))[:-1]
    assert [cutter.decode(part) for part in parts] == TEXTS + TEXTS[:6]
    assert all(part[-1] == cutter.eot for part in parts)
    assert facts.documents == corpus.documents == 36 and facts.tokens == len(corpus)
    assert told[-1].read == sum(each.size for each in asked.inputs)
    assert set(files(asked.to)) == {".bin", ".idx", ".json"} | (
        {".tokenizer/tokenizer.json", ".tokenizer/tokenizer_config.json"}
        if tokenizer == "file"
        else set()
    )


@pytest.mark.parametrize("size", [1, 10**6])
def test_shards_of_another_size_make_the_same_bytes(text: Path, size: int) -> None:
    made(job(text))
    made(job(text, "other", shard_bytes=size))
    one, other = files(text / "web"), files(text / "other")
    assert one.pop(".json").replace(b"web", b"other") == other.pop(".json")
    assert one == other


def test_any_number_of_workers_makes_the_same_bytes(text: Path) -> None:
    made(job(text))
    made(job(text, "other", workers=3))
    for end in (".bin", ".idx"):
        assert files(text / "web")[end] == files(text / "other")[end]


KILLED = """
    import os, pathlib, signal, sys
    from parallel3d.data import indexed, preprocess as module
    from parallel3d.data.inputs import take_inputs
    from parallel3d.data.preprocess import PreprocessJob, tokenize

    class Files:  # what tokenizing calls of os, so that nobody else's calls are counted
        def __getattr__(self, name):
            return getattr(os, name)

    def dies_at(owner, name, count):
        real, calls = getattr(owner, name), []
        def call(*args, **kwargs):
            calls.append(args)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(owner, name, call)

    def make(where, count):
        module.os = Files()
        indexed.os = module.os
        owners = {"add": module.Journal, "fsync": module.os, "replace": module.os,
                  "rmtree": module.shutil, "write_index": indexed.IndexedWriter}
        dies_at(owners.get(where, module), where, count)
        inputs = tuple(take_inputs(str(root / "in")).inputs)
        tokenize(PreprocessJob(inputs, str(root / "tok"), root / "killed", workers=0,
                               shard_bytes=300, flush_bytes=400),
                 lambda done: None)

    root = pathlib.Path(sys.argv[1])
    for line in sys.stdin:  # a process each, forked of this one, which has imported all
        where, count = line.split()
        child = os.fork()
        if not child:
            make(where, int(count))
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
PLACES = (
    *("add 1", "add 4", "fsync 1", "fsync 2", "fsync 4", "replace_durably 1", "replace_durably 2"),
    *("write_index 1", "replace_durably 3", "replace 1", "replace 2", "replace 3", "replace 4"),
    "rmtree 2",
)


def test_a_kill_at_any_moment_loses_nothing(text: Path) -> None:
    """A corpus whose making is killed again and again, at different moments, ends up bit-equal."""
    made(job(text))
    whole = files(text / "web")
    killer = subprocess.Popen(
        (sys.executable, "-c", textwrap.dedent(KILLED), str(text)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    for place in PLACES:
        killer.stdin.write(f"{place}\n")
        killer.stdin.flush()
        assert int(killer.stdout.readline()) == -signal.SIGKILL, place
        if (text / "killed.idx").exists():
            assert (text / "killed.bin").exists(), "an index must not stand without its tokens"
        if place.split()[0] in ("replace", "rmtree"):  # the next moment is before this one
            made(job(text, "killed"))
            result = files(text / "killed")
            assert result.pop(".json").replace(b"killed", b"web") == whole[".json"]
            assert result == {name: content for name, content in whole.items() if name in result}
            assert len(result) == len(whole) - 1, "and nothing else was left behind"
            for name in (*result, ".json"):
                Path(f"{text / 'killed'}{name}").unlink()
            (text / "killed.tokenizer").rmdir()
    killer.stdin.close()
    assert killer.wait() == 0


def test_flushed_documents_are_not_tokenized_again(text: Path) -> None:
    class Enough(Exception):
        pass

    def stop(done: JournalEntry) -> None:
        if done.documents > 20:
            raise Enough

    with pytest.raises(Enough):
        tokenize(job(text), stop)
    journal = json.loads((text / "web.partial" / "journal.json").read_text())
    told = made(job(text))
    assert told[0].documents == journal["done"]["documents"] > 0


def test_workers_die_with_their_parent(text: Path) -> None:
    script = """
        import os, pathlib, sys
        from multiprocessing import active_children
        from parallel3d.data.inputs import take_inputs
        from parallel3d.data.preprocess import PreprocessJob, tokenize
        def wait(done):
            if children := active_children():
                print(*(process.pid for process in children), flush=True)
                sys.stdin.readline()
        if __name__ == "__main__":
            inputs = tuple(take_inputs(sys.argv[1] + "/in").inputs)
            to = pathlib.Path(sys.argv[1], "web")
            tokenize(PreprocessJob(inputs, "byte", to, workers=2, shard_bytes=300), wait)
    """
    path = text / "parent.py"
    path.write_text(textwrap.dedent(script))
    parent = subprocess.Popen(
        (sys.executable, str(path), str(text)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        text=True,
    )
    pids = [int(word) for word in parent.stdout.readline().split()]
    descriptors = [os.pidfd_open(pid) for pid in pids]
    parent.kill()
    parent.wait()
    assert descriptors
    for descriptor in descriptors:
        _ended(descriptor)


def _ended(descriptor: int) -> None:
    ready, _, _ = select.select([descriptor], [], [], 60)
    os.close(descriptor)
    assert ready, "a worker outlived its parent"


def test_a_worker_that_is_killed_is_one_sentence(text: Path) -> None:
    def kill(done: JournalEntry) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    with pytest.raises(UserError, match="was killed, perhaps because memory ran out"):
        tokenize(job(text, workers=1), kill)
    assert not multiprocessing.active_children()
    made(job(text))  # nothing is lost


def test_a_refusal_ends_the_workers(text: Path) -> None:
    def refuse(done: JournalEntry) -> None:
        if multiprocessing.active_children():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tokenize(job(text, workers=2), refuse)
    assert not multiprocessing.active_children()


# ---- what is refused


def test_an_existing_corpus_is_not_overwritten(text: Path) -> None:
    made(job(text))
    before = files(text / "web")
    with pytest.raises(UserError, match=r"web.* exists and is never overwritten"):
        made(job(text))
    (text / "web.idx").unlink()
    with pytest.raises(UserError, match="exists and is never overwritten"):
        made(job(text))
    assert files(text / "web") == {k: v for k, v in before.items() if k != ".idx"}


@pytest.mark.parametrize("what", ["tokenizer", "input", "text_key"])
def test_an_unfinished_corpus_is_not_continued_with_other_arguments(text: Path, what: str) -> None:
    with pytest.raises(ZeroDivisionError):
        tokenize(job(text), lambda done: 1 // (done.documents < 20))
    if what == "input":
        (text / "in" / "b0.txt").write_text("another text")
    other = {"tokenizer": {"tokenizer": "byte"}, "text_key": {"text_key": "t"}, "input": {}}[what]
    with pytest.raises(UserError, match=f"was begun with another {what}"):
        made(job(text, **other))


def test_two_processes_do_not_make_one_corpus(text: Path) -> None:
    def second(done: JournalEntry) -> None:
        with pytest.raises(UserError, match="is being written by another process"):
            made(job(text))

    tokenize(job(text), second)


@pytest.mark.parametrize(("bad", "refused"), [(0.01, True), (0.03, False)])
def test_more_bad_rows_than_the_stated_share_are_refused(
    tmp_path: Path, bad: float, refused: bool
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(lines(["a"] * 98) + b"{\n[]\n")
    asked = job(tmp_path, bad=bad)
    if not refused:
        assert made(asked)[-1].count.bad == 2
        return
    with pytest.raises(UserError) as caught:
        made(asked)
    for word in ("2 of the first 100 rows", "bad=0.01", "a.jsonl:99 is not JSON", "a.jsonl:100"):
        assert word in str(caught.value)
    assert not (tmp_path / "web.idx").exists()
    made(job(tmp_path, bad=0.5))  # continues: the share is not part of the corpus


@pytest.mark.parametrize("workers", [0, 1])
def test_a_document_on_which_the_tokenizer_fails_is_a_bad_row(tmp_path: Path, workers: int) -> None:
    """The library panics, and a panic is not an Exception."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b"\n\n" + lines(["x", PANIC, "y"]))
    tokenizer = str(folder(tmp_path / "odd", panicking()))
    asked = job(tmp_path, tokenizer=tokenizer, workers=workers, bad=0.5)
    count = made(asked)[-1].count
    assert (count.rows, count.bad, count.size) == (3, 1, 2)
    assert IndexedCorpus(asked.to).documents == 2
    (said,) = count.shown
    assert said.startswith(f"a.jsonl:4 cannot be encoded by tokenizer={tokenizer} (Onig: Regex")
    with pytest.raises(UserError, match="1 of the first 3 rows hold no document, more than bad=0"):
        made(job(tmp_path, "b", tokenizer=tokenizer, workers=workers, bad=0.1))


def test_a_full_disk_is_named(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space left") as full:
            made(job(text))
    assert full.value.filename == str(text / "web.partial")
    made(job(text))  # nothing is lost


def test_an_input_without_any_text_makes_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(lines(["", ""]))
    with pytest.raises(UserError, match="no usable text in any of its 2 rows"):
        made(job(tmp_path))
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("web")]


def test_a_vocabulary_beyond_16_bits_takes_32(tmp_path: Path) -> None:
    content = json.loads(trained())
    content["model"]["vocab"] |= {f"t{i}": i for i in range(400, 66_000)}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(lines(TEXTS))
    asked = job(tmp_path, tokenizer=str(folder(tmp_path / "wide", json.dumps(content))))
    made(asked)
    corpus = IndexedCorpus(asked.to)
    assert corpus.dtype == np.dtype("<i4")
    cutter = open_tokenizer(asked.tokenizer)
    assert cutter.decode(corpus.tokens[: corpus.lengths[:1][0]]) == TEXTS[0]
