"""Changes files during a run or between its starts, one run for each kind of file, moment and
change.

    python -m benchmarks.changing_files [--only KIND …] [--jobs 2] [--every N] [--out found.json]

Each case trains a tiny model in a process forked from this one. Its file changes while the run has
it open (before the first step, between two steps, before an evaluation), or before the start that
resumes from a checkpoint. One of three outcomes is right: the losses are those of an undisturbed
run to the last bit; or the run ends with one sentence and an exit code other than 0, and reaches
the undisturbed losses once the file is restored; or the run prints a sentence about the file.
Anything else is a silent difference, and wrong. Files behind HTTP are served from the loopback.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from benchmarks.failures.command_cases import HERE, SETTINGS, STEPS, composed, without_hydra
from benchmarks.failures.command_checks import CURVE, TRACEBACK
from parallel3d.build import Trainer
from parallel3d.cli import command_line
from parallel3d.data import remote
from parallel3d.data.indexed import HEADER
from parallel3d.host.processes import die_with_parent
from parallel3d.metrics import recorder
from tests.corpora import like_pair
from tests.e2e.ready_process import NEEDED
from tests.http_files import ETAG, MODIFIED, Server, use_some_http
from tests.tokenizers import folder as tokenizer_folder

FIRST, BETWEEN, EVALUATION, RESUME = "first step", "two steps", "evaluation", "next start"
MOMENTS = (FIRST, BETWEEN, EVALUATION, RESUME)
CHANGED_BEFORE, STOPPED_AFTER = 3, 3  # number of steps; the evaluation is after step 3
SAME, TOLD, SAID, ENDED = "same bits", "same bits, said", "other bits, said", "ended, then resumed"
SILENT, BAD = "SILENT", "BAD ENDING"
OUTCOMES = (SAME, TOLD, SAID, ENDED, SILENT, BAD)
METRICS = "runs/run/metrics.jsonl"
Curve = dict[tuple[int, bool], list[object]]
Row = tuple[str, str, str, str, str]  # kind, moment, how, outcome, sentence
CONFIG = "tokenizer_config.json"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
LIMIT_S = 120
Change = Callable[[Path], None]


# Changes of a file's content that keep its size. Most replace it by `other`; `edited` does not.


def reversed_text(content: bytes) -> bytes:
    return content[::-1]


def other_tokens(content: bytes) -> bytes:
    """Returns tokens of documents of the same lengths, with other bytes."""
    tokens = np.frombuffer(content, "<u2")
    return np.where(tokens < 256, 255 - tokens, tokens).astype("<u2").tobytes()


def other_lengths(content: bytes) -> bytes:
    """Returns the index of documents in the opposite order."""
    count = (len(content) - HEADER.size - 8) // 20
    lengths = np.frombuffer(content, "<i4", count, HEADER.size)[::-1]
    begins = 2 * (np.cumsum(lengths, dtype="<i8") - lengths)
    body = lengths.astype("<i4").tobytes() + begins.astype("<i8").tobytes()
    return content[: HEADER.size] + body + content[HEADER.size + 12 * count :]


def other_digits(content: bytes) -> bytes:
    """Changes digits, except first ones, as in digests and counts."""
    text = content.decode()
    return "".join(
        str((int(c) + 1) % 10) if c in "123456789" and text[k - 1] in "0123456789abcdef" else c
        for k, c in enumerate(text)
    ).encode()


def other_letters(content: bytes) -> bytes:
    """Changes the words of conversations to others of the same length."""
    return content.replace(b"bottles", b"barrels").replace(b"beer", b"wine")


def other_template(content: bytes) -> bytes:
    return content.replace(b"role }}:", b"role }};")


def other_vocabulary(content: bytes) -> bytes:
    """Swaps two tokens of a tokenizer.json."""
    swapped = content.replace(b'"A":', b'"\0":').replace(b'"B":', b'"A":')
    return swapped.replace(b'"\0":', b'"B":')


def flipped(content: bytes) -> bytes:
    return bytes(byte ^ 1 for byte in content)


def partly(content: bytes, other: bytes) -> bytes:
    """Returns `other`, except for the places that the fingerprint of a pair samples: eight places
    of 512 tokens, from `content`."""
    kept, places = bytearray(other), 8
    for place in range(places):
        at = place * max(0, len(content) - 1024) // (places - 1)
        begin, end = max(0, at - 64), at + 1024 + 64
        kept[begin:end] = content[begin:end]
    return bytes(kept)


def in_place(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)


def by_rename(path: Path, content: bytes) -> None:
    made = path.with_name(f".{path.name}.new")
    made.write_bytes(content)
    made.chmod(path.stat().st_mode)
    os.replace(made, path)


def at_an_old_time(path: Path, content: bytes) -> None:
    before = path.stat()
    by_rename(path, content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    `make` writes the files of a run into a folder, `words` are the overrides that read them, and
    `file` is a glob of the file that changes. `tells`: the headers that a server sends about it;
    None for a local file.
    """

    name: str
    file: str
    other: Callable[[bytes], bytes]
    make: Callable[[Path], None]
    words: tuple[str, ...]
    tells: tuple[str, ...] | None = None
    sampled: bool = False  # true if the fingerprint only samples places of the file

    def hows(self) -> dict[str, Change]:
        def edit(path: Path) -> None:
            content = path.read_bytes()
            other = self.other(content)
            if self.sampled:
                in_place(path, partly(content, other))
            else:  # changes the last half, if it contains something to change
                half = content[: len(content) // 2] + other[len(content) // 2 :]
                in_place(path, other if half == content else half)

        return {
            "replaced": lambda path: by_rename(path, self.other(path.read_bytes())),
            "truncated": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
            "appended": lambda path: in_place(path, path.read_bytes() + path.read_bytes()[:1000]),
            "same size": lambda path: in_place(path, self.other(path.read_bytes())),
            "old mtime": lambda path: at_an_old_time(path, self.other(path.read_bytes())),
            "edited": edit,
        }


def make_pair(folder: Path) -> None:
    like_pair(folder / "web", 1)
    like_pair(folder / "code", 2)


def make_bare_pair(folder: Path) -> None:
    make_pair(folder)
    (folder / "web.json").unlink()


def make_served(folder: Path) -> None:
    like_pair(folder / "served" / "web", 1)


def make_bare_served(folder: Path) -> None:
    make_served(folder)
    (folder / "served" / "web.json").unlink()


def make_book(folder: Path) -> None:
    lines = [f"{n} bottles of beer on the wall, {n * n} of wine.\n" for n in range(700)]
    (folder / "book.txt").write_text("".join(lines))
    (folder / "texts").mkdir()
    for n in range(7):
        (folder / "texts" / f"{n}.txt").write_text("".join(lines[n * 100 : n * 100 + 100]))
    tokenizer_folder(folder / "tok", chat_template=TEMPLATE)
    rows = [
        {"role": "user", "content": f"{n}?"},
        {"role": "assistant", "content": "bottles of beer"},
    ]
    talks = ({"messages": [rows[0] | {"content": f"{n} bottles?"}, rows[1]]} for n in range(200))
    (folder / "sft.jsonl").write_text("".join(f"{json.dumps(talk)}\n" for talk in talks))


TEXT = ("data=text", "data.path=book.txt")
PAIR = ("data=corpus", "data.path=web", "data.document_mask=true")
BARE = (*PAIR, "data.tokenizer=byte")
TOK = ("data.tokenizer=tok", "model.vocab_size=512")
PACKS = (*PAIR, "data.packing=best_fit", "data.cut_documents=true")
CHAT = ("data=chat", "data.path=sft.jsonl", *TOK, "data.cut_documents=true")
FAR = ("data=corpus", "data.path={address}/web", "data.tokenizer=byte")


def kinds() -> list[Kind]:
    here = [
        Kind("pair .bin", "web.bin", other_tokens, make_pair, PAIR, sampled=True),
        Kind("pair .bin, no .json", "web.bin", other_tokens, make_bare_pair, BARE, sampled=True),
        Kind("pair .idx", "web.idx", other_lengths, make_pair, PAIR),
        Kind("pair .json", "web.json", other_digits, make_pair, PAIR),
        Kind(
            *("blend's part .bin", "code.bin", other_tokens, make_pair),
            ("data=blend", "data.blend={web:0.5,code:0.5}"),
            sampled=True,
        ),
        Kind("text", "book.txt", reversed_text, make_book, TEXT),
        Kind(
            *("folder of texts", "texts/3.txt", reversed_text, make_book),
            ("data=text", "data.path=texts"),
        ),
        Kind("token cache", "cache/*.bin", flipped, make_book, TEXT),
        Kind("tokenized cache", "cache/*.bin", flipped, make_book, (*TEXT, *TOK)),
        Kind("tokenizer.json", "tok/tokenizer.json", other_vocabulary, make_book, (*TEXT, *TOK)),
        Kind(
            *("run's tokenizer", "runs/run/tokenizer/tokenizer.json", other_vocabulary, make_book),
            (*TEXT, *TOK),
        ),
        Kind("chat rows", "sft.jsonl", other_letters, make_book, CHAT),
        Kind("chat template", f"tok/{CONFIG}", other_template, make_book, CHAT),
        Kind(
            *("run's chat template", f"runs/run/tokenizer/{CONFIG}", other_template, make_book),
            CHAT,
        ),
        Kind("packing plan", "cache/*.packs", flipped, make_pair, PACKS),
    ]
    servers = {"ETag": (ETAG,), "time": (MODIFIED,), "both": (ETAG, MODIFIED)}
    far = [
        Kind(
            *(f"http, {name}", "served/web.bin", other_tokens, make_bare_served, FAR, tells),
            sampled=True,
        )
        for name, tells in servers.items()
    ]
    return [*here, *far]


@dataclass
class Cell:
    kind: Kind
    moment: str
    how: str


@dataclass
class Given:
    """A command's messages, and the files that it left."""

    code: int
    err: str

    def sentences(self) -> list[str]:
        # Lines that each start prints, with its device and the files of a folder that it reads.
        usual = ("resumes at step", "is a new run", "stopped by", "device: ", ": text: ")
        lines = [line for line in self.err.splitlines() if line.startswith("parallel3d: ")]
        return [line for line in lines if not any(word in line for word in usual)]


@dataclass
class Stage:
    """A folder in which runs are made, one kind of file after another."""

    home: Path

    @property
    def disk(self) -> Path:
        return self.home / "disk"

    def lay(self, kind: Kind) -> None:
        shutil.rmtree(self.disk, ignore_errors=True)
        self.disk.mkdir()
        kind.make(self.disk)

    def train(self, words: tuple[str, ...], before: Callable[[], None] = lambda: None) -> Given:
        """Makes one start of the run, in a process of its own; `before` prepares that process."""
        composed(words)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._live(words, before)
        deadline = time.monotonic() + LIMIT_S
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        return Given(os.waitstatus_to_exitcode(ended[1]), (self.home / "err").read_text())

    def _live(self, words: tuple[str, ...], before: Callable[[], None]) -> None:
        code = 1
        try:
            for name, number in (("out", 1), ("err", 2)):
                with open(self.home / name, "w") as file:
                    os.dup2(file.fileno(), number)
            os.chdir(self.disk)
            recorder.provenance = lambda: HERE
            before()
            command_line._run_hydra = without_hydra(composed(words))  # type: ignore[assignment]
            code = command_line.main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def curve(self) -> Curve:
        """Returns the reproducible part of each line of figures; a later start's line replaces an
        earlier one's.

        Lines with the parts of a blend are left out.
        """
        path = self.disk / METRICS
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        kept = [row for row in rows if "loss" in row or "eval_loss" in row]
        return {(row["step"], "loss" in row): [row.get(name) for name in CURVE] for row in kept}


def at(step: int, evaluates: bool, do: Callable[[], None]) -> Callable[[], None]:
    """Makes the process call `do` before a step, or before the first evaluation."""

    def install() -> None:
        name = "score" if evaluates else "train_step"
        plain, left = getattr(Trainer, name), [do]

        def wrapped(self: Trainer, *args: object) -> object:
            if left and (evaluates or self.steps_done + 1 == step):
                left.pop()()
            return plain(self, *args)

        setattr(Trainer, name, wrapped)

    return install


def stopping() -> None:
    """Makes the run save and stop after a step, as if a scheduler had asked for it."""
    at(STOPPED_AFTER, False, lambda: os.kill(os.getpid(), signal.SIGTERM))()


class Bench:
    """Makes undisturbed runs, and classifies disturbed ones."""

    def __init__(
        self, home: Path, addresses: dict[tuple[str, ...], str], starts: Sequence[int]
    ) -> None:
        """`addresses`: addresses of servers, by the headers that they send."""
        self.stage, self.addresses, self.starts = Stage(home), addresses, starts
        self.usual: dict[str, Curve] = {}

    def words(self, kind: Kind) -> tuple[str, ...]:
        where = ("run=run", "runs_dir=runs", "data.cache_dir=cache")
        data = kind.words
        if kind.tells is not None:
            data = tuple(word.format(address=self.addresses[kind.tells]) for word in data)
        return ("train", *where, *SETTINGS, *data)

    def undisturbed(self, kind: Kind) -> Curve:
        """Returns the curve of a run in one start, which equals that of a run in two starts;
        neither prints a message."""
        if kind.name not in self.usual:
            curves = []
            for starts in self.starts:
                self.stage.lay(kind)
                if starts == 2:
                    self.stage.train(self.words(kind), stopping)
                given = self.stage.train(self.words(kind))
                assert not given.sentences(), given.err
                assert given.code == 0 and TRACEBACK not in given.err, given.err
                curves.append(self.stage.curve())
            assert curves[0] == curves[-1] and len(curves[0]) > STEPS, kind.name
            self.usual[kind.name] = curves[0]
        return self.usual[kind.name]

    def cell(self, cell: Cell) -> tuple[str, str]:
        """Returns the outcome of a disturbed run, and its last message."""
        kind, usual = cell.kind, self.undisturbed(cell.kind)
        words, change = self.words(kind), kind.hows()[cell.how]
        self.stage.lay(kind)
        backup = self.stage.home / "backup"
        backup.unlink(missing_ok=True)

        def target() -> Path:
            found = sorted(self.stage.disk.glob(kind.file))
            assert found, kind.file
            return found[0]

        def disturb() -> None:
            shutil.copy2(target(), backup)
            change(target())
            assert target().read_bytes() != backup.read_bytes()

        if cell.moment == RESUME:
            first = self.stage.train(words, stopping)
            assert first.code in (0, 130), first.err
            disturb()
            given = self.stage.train(words)
        else:
            step = {FIRST: 1, BETWEEN: CHANGED_BEFORE, EVALUATION: 0}[cell.moment]
            given = self.stage.train(words, at(step, cell.moment == EVALUATION, disturb))
        assert backup.exists(), f"{cell}: the run never came to the moment of the change"
        sentences = given.sentences()
        last = sentences[-1] if sentences else ""
        if TRACEBACK in given.err or given.code < 0 or (given.code and not sentences):
            return BAD, given.err[-2000:]
        if given.code == 0:
            if self.stage.curve() == usual:
                return (TOLD if sentences else SAME), last
            about = any(target().name in sentence for sentence in sentences)
            return (SAID if about else SILENT), last
        os.replace(backup, target())
        again = self.stage.train(words)
        if again.code or self.stage.curve() != usual:
            return BAD, f"{last} / put back: {again.err[-2000:]}"
        return ENDED, last


@contextmanager
def bench(starts: Sequence[int]) -> Iterator[Bench]:
    """Makes a bench with a folder of its own, and starts a process that serves this folder."""
    with tempfile.TemporaryDirectory(prefix="parallel3d-changing-") as home:
        path = Path(os.path.realpath(home))
        servers = []
        addresses = {}
        for kind in kinds():
            if kind.tells is None or kind.tells in addresses:
                continue
            server = Server(path / "disk" / "served", kind.tells)
            listening = server.listening()
            addresses[kind.tells] = server.address
            pid = os.fork()
            if pid == 0:
                die_with_parent()
                listening.serve_forever()
            servers.append(pid)
            listening.server_close()
        try:
            yield Bench(path, addresses, starts)
        finally:
            for pid in servers:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def cells_of(only: Sequence[str], every: int) -> list[Cell]:
    found = [
        Cell(kind, moment, how)
        for kind in kinds()
        for moment in MOMENTS
        for how in kind.hows()
        if not only or any(word in f"{kind.name}/{moment}/{how}" for word in only)
    ]
    return found[::every]


def run_cells(names: list[tuple[str, str, str]], starts: Sequence[int] = (1, 2)) -> list[Row]:
    """Returns the outcome of the cases with these names, (kind, moment, how); `starts`: number of
    starts of an undisturbed run."""
    torch.set_num_threads(1)  # forked processes would lack the threads of a pool
    for name in NEEDED:
        importlib.import_module(name)
    use_some_http()
    # A file of several blocks: some are fetched when the run begins, others later.
    remote.BLOCK = 1000
    remote.PAUSES_S = (0.0,) * len(remote.PAUSES_S)
    by_name, found = {kind.name: kind for kind in kinds()}, []
    with bench(starts) as one:
        for name, moment, how in names:
            outcome, last = one.cell(Cell(by_name[name], moment, how))
            found.append((name, moment, how, outcome, last))
            print(f"{name} | {moment} | {how} | {outcome} | {last}", flush=True)
    return found


def table(rows: Sequence[Row]) -> str:
    """Returns a line for each kind of file: the number of cases by outcome."""
    counts = Counter((row[0], row[3]) for row in rows)
    lines = [f"| | {' | '.join(OUTCOMES)} |", "|---" * (len(OUTCOMES) + 1) + "|"]
    for kind in dict.fromkeys(row[0] for row in rows):
        lines.append(f"| {kind} | {' | '.join(str(counts[kind, o]) for o in OUTCOMES)} |")
    totals = Counter(row[3] for row in rows)
    lines.append(f"| all {len(rows)} | {' | '.join(str(totals[o]) for o in OUTCOMES)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of KIND/MOMENT/HOW")
    parser.add_argument("--every", type=int, default=1, help="run only every N-th case")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--starts", type=int, nargs="*", default=[1, 2], help="undisturbed")
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON")
    given = parser.parse_args()
    cells = cells_of(given.only, given.every)
    shares: dict[str, list[tuple[str, str, str]]] = {}
    for cell in cells:  # keeps the cases of a kind together, because they share its undisturbed run
        shares.setdefault(cell.kind.name, []).append((cell.kind.name, cell.moment, cell.how))
    started = time.monotonic()
    with get_context("fork").Pool(min(given.jobs, len(shares))) as pool:
        run = functools.partial(run_cells, starts=given.starts)
        rows = [row for share in pool.imap(run, shares.values()) for row in share]
    print(f"\n{table(rows)}\n\n{time.monotonic() - started:.0f} s")
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1))
    return int(any(row[3] in (SILENT, BAD) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
