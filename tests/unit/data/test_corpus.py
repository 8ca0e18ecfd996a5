"""Tests the corpus: packing, the split, the cache on disk, and each sentence about bad data."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from parallel3d import files
from parallel3d.data import cache
from parallel3d.data.corpus import Corpus, check_data, open_corpus
from parallel3d.data.inputs import take_inputs
from parallel3d.data.keys import DataConfig
from parallel3d.data.sources import take_documents
from parallel3d.data.tokenizer import ByteTokenizer
from parallel3d.errors import UserError
from tests.corpora import heard
from tests.pace import in_time
from tests.tools.privileges import give_up_capabilities

EOT = 256
KEPT = [".bin", ".idx", ".json", ".lock"]
SPAWN = multiprocessing.get_context("spawn")  # the suite's own process may have threads of torch


def text(tmp_path: Path, path: str | Path, **kwargs: object) -> DataConfig:
    settings = {"cache_dir": str(tmp_path / "cache"), "path": str(path)} | kwargs
    return DataConfig(name="text", **settings)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def letters(seed: int, size: int) -> bytes:
    """Returns text without two equal pieces."""
    return np.random.default_rng(seed).integers(97, 123, size, np.uint8).tobytes()


def stream(corpus: Corpus) -> np.ndarray:
    return np.concatenate([corpus.train, corpus.valid])


def documents_of(corpus: Corpus) -> list[bytes]:
    """Returns the documents in the stream, in its order; each must end with an end-of-text
    token."""
    tokens = stream(corpus)
    assert tokens[-1] == EOT
    parts = np.split(tokens, np.flatnonzero(tokens == EOT) + 1)[:-1]
    return [part[:-1].astype(np.uint8).tobytes() for part in parts]


def cache_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache").glob("*.bin")
    return file


# ---- packing and the split


def test_every_byte_of_every_document_is_packed_and_ended(tmp_path: Path) -> None:
    contents = {f"d{i}/f{i}": letters(i, 50 + i) for i in range(9)}
    for name, content in contents.items():
        write(tmp_path / "text" / name, content)
    corpus = open_corpus(text(tmp_path, tmp_path / "text"), 20)
    assert sorted(documents_of(corpus)) == sorted(contents.values())
    assert documents_of(corpus) != [contents[name] for name in sorted(contents)]
    assert (corpus.vocab_size, corpus.eot) == (257, EOT)
    assert corpus.train[:3].dtype == np.uint16 and not corpus.train[:3].flags.writeable


def test_order_and_fingerprint_depend_only_on_names_and_text(tmp_path: Path) -> None:
    names = [f"f{i}" for i in range(12)]
    for folder, order in (("a", names), ("b", names[::-1])):
        for name in order:
            write(tmp_path / folder / "sub" / name, name.encode() * 40)
    first, second = (open_corpus(text(tmp_path, tmp_path / f), 20) for f in ("a", "b"))
    assert np.array_equal(stream(first), stream(second))
    assert first.fingerprint == second.fingerprint
    write(tmp_path / "b" / "sub" / "f3", b"other")
    assert open_corpus(text(tmp_path, tmp_path / "b"), 20).fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("size", "seq", "fraction", "held_out"),
    [(999, 9, 0.05, 50), (999, 9, 0.5, 500), (999, 99, 0.05, 100), (999, 499, 0.05, 500)],
)
def test_split_is_the_tail_and_never_overlaps(
    tmp_path: Path, size: int, seq: int, fraction: float, held_out: int
) -> None:
    content = bytes(32 + i % 95 for i in range(size))
    path = write(tmp_path / "long.txt", content)
    corpus = open_corpus(text(tmp_path, path, valid_fraction=fraction), seq)
    assert len(corpus.valid) == held_out
    assert stream(corpus).tolist() == [*content, EOT]


def test_text_longer_than_a_block_is_whole(tmp_path: Path) -> None:
    content = letters(0, 5_000_000)
    path = write(tmp_path / "long.txt", content)
    with heard() as reports:
        for _ in range(2):
            corpus = open_corpus(text(tmp_path, path), 100)
            assert documents_of(corpus) == [content]
    assert len(reports) == 1


def test_tokenizer_reads_back_what_it_wrote() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("héllo".encode())
    assert tokenizer.decode(np.append(tokens, EOT)) == "héllo"


def test_files_folders_globs_and_commas_reach_each_file_once(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "sub/c.txt", "sub/.hidden", "sub/.git/d.txt", "odd,name.txt"):
        write(tmp_path / "t" / name, name.encode() * 9)
    (tmp_path / "t" / "sub" / "loop").symlink_to(tmp_path / "t" / "sub")
    root = tmp_path / "t"

    def found(path: str) -> list[str]:
        return sorted(document.name for document in take_documents(text(tmp_path, path)).documents)

    assert found(f"{root}") == ["a.txt", "b.md", "odd,name.txt", "sub/c.txt"]
    assert found(f"{root}/*.txt") == ["a.txt", "odd,name.txt"]
    assert found(f"{root}/**/*.txt") == ["a.txt", "odd,name.txt", "sub/c.txt"]
    assert found(f"{root}/s*") == ["sub/c.txt"]
    assert found(f"{root}/b.md, {root}/sub,{root}/sub/c.txt") == ["b.md", "c.txt"]
    assert found(f"{root}/odd,name.txt") == ["odd,name.txt"]


@pytest.mark.slow
def test_stdlib_is_python_source_without_tests_and_quickly_checked(tmp_path: Path) -> None:
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    names = [document.name for document in take_documents(data).documents]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "__pycache__", "idlelib", "lib2to3"}
    assert all(name.endswith(".py") for name in names)
    started = time.perf_counter()
    check_data(data, 256)
    assert in_time(time.perf_counter() - started, 0.3)
    assert not (tmp_path / "cache").exists()
    corpus = open_corpus(data, 256)
    assert len(corpus.train) > 19 * len(corpus.valid) - 20 > 1_000_000


@pytest.mark.slow
def test_the_check_imports_neither_torch_nor_the_configuration() -> None:
    code = "import sys, parallel3d.data.corpus; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "omegaconf", "hydra"} & set(run.stdout.split())


# ---- the cache


def test_the_private_cache_is_built_once_and_again_for_changed_text(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", b"abc" * 100)
    with heard() as reports:
        for _ in range(2):
            open_corpus(text(tmp_path, path), 20)
    assert len(reports) == 1 and "building" in reports[0]
    folder = tmp_path / "cache"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in folder.iterdir()} == {0o600}
    before = path.stat()
    write(path, b"xyz" * 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert documents_of(open_corpus(text(tmp_path, path), 20)) == [b"xyz" * 100]


def test_cache_folder_follows_key_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t.txt", b"abc" * 100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    open_corpus(text(tmp_path, path, cache_dir=None), 20)
    open_corpus(text(tmp_path, path), 20)
    for folder in ("xdg/parallel3d", "cache"):
        assert len(list((tmp_path / folder).glob("*.bin"))) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.folder_of(DataConfig()) == tmp_path / "home" / ".cache" / "parallel3d"


def damage_at(position: float) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        at = int(position * (len(content) - 1))
        return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]

    return flip


DAMAGES = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "zeroed tail": lambda content: content[:-20] + bytes(20),
    "grown": lambda content: content + b"x",
    "flip at the start": damage_at(0),
    "flip in the middle": damage_at(0.5),
    "flip at the end": damage_at(1),
}


@pytest.mark.parametrize(
    ("end", "damage"),
    [*((".bin", d) for d in DAMAGES), (".idx", "flip in the middle"), (".json", "truncated")],
)
def test_damaged_cache_is_detected_and_rebuilt(tmp_path: Path, end: str, damage: str) -> None:
    path = write(tmp_path / "t.txt", b"abc" * 1000)
    open_corpus(text(tmp_path, path), 20)
    file = cache_file(tmp_path).with_suffix(end)
    intact = file.read_bytes()
    file.write_bytes(DAMAGES[damage](intact))
    assert file.read_bytes() != intact
    with heard() as reports:
        corpus = open_corpus(text(tmp_path, path), 20)
    assert documents_of(corpus) == [b"abc" * 1000]
    assert file.read_bytes() == intact
    assert any("damaged" in report for report in reports)


def build_slowly(data: DataConfig, results: multiprocessing.Queue, start: object) -> None:
    """Waits for the other one, then opens the corpus; runs in a process of its own."""

    def report(sentence: str) -> None:
        if "building the" in sentence and "another" not in sentence:
            # the other process arrives during this time, unless something holds it back
            time.sleep(0.5)

    start.wait()
    with heard(report) as reports:
        corpus = open_corpus(data, 20)
    results.put((corpus.fingerprint, int(stream(corpus).sum()), reports))


@pytest.mark.slow
def test_two_processes_at_the_same_time_make_one_build_and_one_intact_cache(
    tmp_path: Path,
) -> None:
    content = letters(3, 300_000)
    data = text(tmp_path, write(tmp_path / "t.txt", content))
    results, start = SPAWN.Queue(), SPAWN.Barrier(2)
    processes = [SPAWN.Process(target=build_slowly, args=(data, results, start)) for _ in "ab"]
    for process in processes:
        process.start()
    answers = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert answers[0][:2] == answers[1][:2] and answers[0][1] == sum(content) + EOT
    sentences = [sentence for answer in answers for sentence in answer[2]]
    assert sum(s.startswith("building the token cache") for s in sentences) == 1
    assert sum("waiting" in s for s in sentences) == 1
    assert sorted(f.suffix for f in (tmp_path / "cache").iterdir()) == KEPT


def build_and_die(data: DataConfig) -> None:
    with heard(lambda sentence: os._exit(9)):
        open_corpus(data, 20)


@pytest.mark.slow
def test_a_crashed_builder_does_not_block_the_next_and_its_leftovers_are_removed(
    tmp_path: Path,
) -> None:
    data = text(tmp_path, write(tmp_path / "t.txt", b"abc" * 100))
    process = SPAWN.Process(target=build_and_die, args=(data,))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert {f.suffix for f in (tmp_path / "cache").iterdir()} == {".lock", ".partial"}
    assert documents_of(open_corpus(data, 20)) == [b"abc" * 100]
    assert sorted(f.suffix for f in (tmp_path / "cache").iterdir()) == KEPT


def test_an_interrupted_builder_leaves_no_half_file(tmp_path: Path) -> None:
    def interrupt(sentence: str) -> None:
        raise KeyboardInterrupt

    data = text(tmp_path, write(tmp_path / "t.txt", b"abc" * 100))
    with pytest.raises(KeyboardInterrupt), heard(interrupt):
        open_corpus(data, 20)
    assert [f.suffix for f in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("change", ["shrunk", "grown", "rewritten", "gone"])
def test_text_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: str) -> None:
    path = write(tmp_path / "t.txt", b"abc" * 100)

    def meddle(sentence: str) -> None:
        if change == "gone":
            path.unlink()
        else:
            write(path, {"shrunk": b"a", "grown": b"a" * 900, "rewritten": b"x" * 300}[change])
            os.utime(path, ns=(1, 1))

    with pytest.raises(UserError, match=f"{path} (changed while|cannot be read)"), heard(meddle):
        open_corpus(text(tmp_path, path), 20)
    assert not list((tmp_path / "cache").glob("*.bin"))


def as_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process appear as another user, whose new files belong to that user."""
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(files, "status_of_new_file", lambda folder: None)


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Gives a file or folder to another user; only root can."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    yield lambda path: os.chown(path, 4711, 4711)


def test_cache_file_that_others_may_write_is_not_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", b"abc" * 100)
    data = text(tmp_path, path)
    intact = open_corpus(data, 20).fingerprint
    forged = write(tmp_path / "forged.txt", b"xyz" * 100)
    open_corpus(text(tmp_path, forged, cache_dir=str(tmp_path / "other")), 20)
    (poison,) = (tmp_path / "other").glob("*.bin")
    for end in (".bin", ".idx", ".json"):
        own = cache_file(tmp_path).with_suffix(end)
        own.write_bytes(poison.with_suffix(end).read_bytes())
    assert open_corpus(data, 20).fingerprint != intact  # the premise: it is well-formed
    cache_file(tmp_path).chmod(0o666)
    with heard() as reports:
        assert open_corpus(data, 20).fingerprint == intact
    assert "can be changed by other users, so it is built again" in reports[0]
    assert stat.S_IMODE(cache_file(tmp_path).stat().st_mode) == 0o600


def test_cache_file_of_another_user_is_not_taken(
    tmp_path: Path, foreign: Callable[[Path], None]
) -> None:
    data = text(tmp_path, write(tmp_path / "t.txt", b"abc" * 100))
    open_corpus(data, 20)
    foreign(cache_file(tmp_path))
    with heard() as reports:
        open_corpus(data, 20)
    assert "can be changed by other users" in reports[0] and "building" in reports[-1]
    assert cache_file(tmp_path).stat().st_uid == os.geteuid()


def test_cache_folder_of_another_user_is_refused_and_another_is_proposed(
    tmp_path: Path, foreign: Callable[[Path], None]
) -> None:
    path = write(tmp_path / "t.txt", b"abc" * 100)
    folder = tmp_path / "cache"
    folder.mkdir()
    foreign(folder)
    sentence = refused(text(tmp_path, path))
    assert f"data.cache_dir={folder} cannot hold the token cache: it belongs to ano" in sentence
    own = Path(tempfile.gettempdir()) / f"parallel3d-cache-{os.geteuid()}"
    assert sentence.endswith(f"such as data.cache_dir={own}")
    assert "such as" not in str(cache.unusable(own, "it belongs to another user"))


def test_cache_of_root_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a file of root's")
    data = text(tmp_path, write(tmp_path / "t.txt", b"abc" * 100))
    open_corpus(data, 20)
    as_another_user(monkeypatch)
    with heard() as reports:
        open_corpus(data, 20)
    assert reports == []


def test_a_cache_is_accepted_on_a_file_system_without_owners_and_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = text(tmp_path, write(tmp_path / "t.txt", b"abc" * 100))
    open_corpus(data, 20)
    cache_file(tmp_path).chmod(0o777)
    everything = cache_file(tmp_path).stat()  # CIFS reports this for any file
    monkeypatch.setattr(files, "status_of_new_file", lambda folder: everything)
    with heard() as reports:
        open_corpus(data, 20)
    assert reports == []


def test_other_bytes_of_the_same_size_and_time_are_other_text(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", b"abc" * 100)
    os.utime(path, ns=(1, 1))
    before = open_corpus(text(tmp_path, path), 20).fingerprint
    write(path, b"xyz" * 100)
    os.utime(path, ns=(1, 1))
    assert open_corpus(text(tmp_path, path), 20).fingerprint != before
    moved = write(tmp_path / "new.txt", b"uvw" * 100)
    os.utime(moved, ns=(1, 1))
    os.replace(moved, path)
    assert documents_of(open_corpus(text(tmp_path, path), 20)) == [b"uvw" * 100]


def test_a_glob_visits_folders_that_link_to_themselves_once(tmp_path: Path) -> None:
    root = tmp_path / "t"
    for name in ("a.txt", "b.md", "sub/c.txt", "sub/deep/d.txt"):
        write(root / name, name.encode() * 9)
    for link in ("x", "y", "sub/z"):
        (root / link).symlink_to(root)

    def found(path: str) -> list[str]:
        return sorted(document.name for document in take_documents(text(tmp_path, path)).documents)

    assert found(f"{root}/**/*.txt") == ["a.txt", "sub/c.txt", "sub/deep/d.txt"]
    assert found(f"{root}/**/deep") == ["sub/deep/d.txt"]
    assert found(f"{root}/**/deep/**/*.txt") == ["sub/deep/d.txt"]
    assert found(f"{root}/s*/**") == ["sub/c.txt", "sub/deep/d.txt"]
    assert found(f"{root}/**/[ab].*") == ["a.txt", "b.md"]
    assert "matches no file" in refused(text(tmp_path, f"{root}/**/*.tex"))


def test_a_cache_that_is_truncated_in_use_is_an_error_and_not_a_bus_error(tmp_path: Path) -> None:
    content = letters(0, 100_000)
    corpus = open_corpus(text(tmp_path, write(tmp_path / "t.txt", content)), 20)
    assert np.array_equal(corpus.valid[:9], stream(corpus)[len(corpus.train) :][:9])
    assert corpus.train[-3:].tobytes() == stream(corpus)[: len(corpus.train)][-3:].tobytes()
    assert len(corpus.train[5:5]) == 0
    os.truncate(cache_file(tmp_path), 50_000)
    assert (
        corpus.train[:9].tobytes() == np.frombuffer(content[:9], np.uint8).astype("<u2").tobytes()
    )
    with pytest.raises(OSError, match=r"\.bin was cut short while it was in use"):
        corpus.train[90_000:90_020]


# ---- bad input: one sentence that names key, value and a way out


def refused(data: DataConfig, seq: int = 20) -> str:
    """Returns the sentence, which must be the same from the launcher's check and from the run
    itself."""
    with pytest.raises(UserError) as check:
        check_data(data, seq)
    with pytest.raises(UserError) as run:
        open_corpus(data, seq)
    assert str(check.value) == str(run.value)
    assert "\n" not in str(check.value)
    return str(check.value)


def test_missing_path_names_the_nearest_one(tmp_path: Path) -> None:
    write(tmp_path / "books" / "moby_dick.txt", b"x" * 900)
    sentence = refused(text(tmp_path, tmp_path / "books" / "mobydick.txt"))
    assert f"data.path={tmp_path}/books/mobydick.txt does not exist" in sentence
    assert "moby_dick.txt" in sentence
    assert f"the nearest is {tmp_path}/books)" in refused(
        text(tmp_path, tmp_path / "boks" / "moby_dick.txt")
    )
    assert "has nothing like it" in refused(text(tmp_path, tmp_path / "qqqqqqqqqqq"))


def test_one_missing_path_among_several_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"x" * 900)
    assert f"data.path={tmp_path}/b does not exist" in refused(
        text(tmp_path, f"{path},{tmp_path}/b")
    )
    assert "has an empty item: give files" in refused(text(tmp_path, f"{path},"))


def test_a_file_taken_for_a_folder_and_a_dangling_link_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"x" * 900)
    assert f"{path} is not a folder" in refused(text(tmp_path, path / "b"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "link is a dangling link" in refused(text(tmp_path, tmp_path / "link"))


def test_empty_files_and_folders_are_refused(tmp_path: Path) -> None:
    empty = write(tmp_path / "t" / "empty.txt", b"")
    assert f"data.path={empty} has only empty files" in refused(text(tmp_path, empty))
    assert "has only empty files, pipes or devices (1)" in refused(text(tmp_path, tmp_path / "t"))
    (tmp_path / "none").mkdir()
    write(tmp_path / "none" / ".hidden", b"x" * 900)
    assert "holds no files" in refused(text(tmp_path, tmp_path / "none"))
    assert "matches no file" in refused(text(tmp_path, tmp_path / "t" / "*.md"))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "empty files, pipes or devices (1)" in refused(text(tmp_path, tmp_path / "pipe"))


@pytest.mark.parametrize("count", [1, 3])
def test_too_short_text_names_its_size_and_a_length_that_fits(tmp_path: Path, count: int) -> None:
    for i in range(count):
        write(tmp_path / "t" / f"{i}", b"x" * 50)
    tokens = 51 * count
    longest = tokens // 2 - 1
    data = text(tmp_path, tmp_path / "t", valid_fraction=0.5)
    sentence = refused(data, longest + 1)
    assert f"model.seq_length={longest + 1}: it has {tokens} tokens" in sentence
    assert f"need {2 * (longest + 2)}" in sentence
    assert f"model.seq_length must be at most {longest}" in sentence
    check_data(data, longest)
    corpus = open_corpus(data, longest)
    assert min(len(corpus.train), len(corpus.valid)) >= longest + 1


def test_text_too_short_for_any_length_says_so(tmp_path: Path) -> None:
    assert "no model.seq_length is short" in refused(text(tmp_path, write(tmp_path / "a", b"x")), 1)


def test_unusable_cache_folder_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", b"abc" * 100)
    for bad in (path, path / "below"):
        data = text(tmp_path, path, cache_dir=str(bad))
        with pytest.raises(UserError, match=f"data.cache_dir={bad} cannot hold the token cache"):
            check_data(data, 20)
        with pytest.raises(UserError, match=f"data.cache_dir={bad} cannot hold the token cache"):
            open_corpus(data, 20)


def test_a_user_without_a_home_is_told_to_give_a_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # as in a container with a bare uid
    path = write(tmp_path / "t.txt", b"abc" * 100)
    assert "data.cache_dir is null" in refused(text(tmp_path, path, cache_dir=None))


def refused_by_modes(data: DataConfig, results: multiprocessing.Queue) -> None:
    give_up_capabilities()
    sentences = []
    for ask in (check_data, open_corpus, lambda data, _: take_inputs(str(data.path)).inputs):
        try:
            ask(data, 20)
        except UserError as error:
            sentences.append(str(error))
    results.put(sentences)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["file", "folder", "folder inside", "cache"])
def test_unreadable_text_and_unwritable_cache_are_refused(tmp_path: Path, what: str) -> None:
    path = write(tmp_path / "t" / "a.txt", b"abc" * 100)
    inside = write(tmp_path / "t" / "more" / "b.txt", b"abc" * 100).parent
    cache_dir = tmp_path / "cache"
    cache_dir.mkdir()
    folders = {"folder": path.parent, "folder inside": inside, "cache": cache_dir}
    locked = {"file": path, **folders}[what]
    locked.chmod(0o000)
    data = text(tmp_path, path.parent, cache_dir=str(cache_dir))
    results = SPAWN.Queue()
    process = SPAWN.Process(target=refused_by_modes, args=(data, results))
    process.start()
    sentences = results.get(timeout=300)
    process.join(60)
    locked.chmod(0o755)
    if what != "cache":  # `data tokenize` reads these files, too
        tokenized = sentences.pop()
        assert f"input={tmp_path}/t" in tokenized and "(Permission denied)" in tokenized
    key = f"data.cache_dir={cache_dir}" if what == "cache" else f"data.path={tmp_path}/t"
    assert len(sentences) == 2
    assert all(key in s and str(locked) in s for s in sentences)
    assert all("ermission denied" in s or "not writable" in s for s in sentences)
