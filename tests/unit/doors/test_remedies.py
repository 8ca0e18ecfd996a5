"""Tests that what a refused row or file is told to do makes it readable, on that very input."""

from __future__ import annotations

import copy
import gzip
import lzma
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel3d.data.chat import Reader, RefusedRow
from parallel3d.errors import UserError
from parallel3d.run.launcher_environment import detect
from tests.chat_templates import home
from tests.unit.doors import test_chat, test_formats, test_launcher
from tests.unit.doors.files import tokenized
from tests.unit.doors.test_chat import opened
from tests.unit.doors.test_launcher import BATCH_OF_ONE, HET, MPICH, OMPI, SRUN, TORCHRUN

pytestmark = pytest.mark.nightly

Json = Any
Follow = Callable[[Json, Json, re.Match[str]], None]


def renamed(there: Json, key: str, new: str) -> None:
    there[new] = there.pop(key)


def told_apart(row: Json, key: str, value: Json) -> None:
    """Gives the messages the weights of a list, or the last message one weight."""
    weights = value if isinstance(value, list) else [value]
    for message, weight in zip(row["messages"][-len(weights) :], weights, strict=True):
        message["weight"] = weight if isinstance(weight, int) else 1


def in_order(row: Json) -> None:
    ids = [call["id"] for m in row["messages"] for call in m.get("tool_calls", ())]
    results = [m for m in row["messages"] if m["role"] == "tool"]
    ordered = iter(sorted(results, key=lambda m: ids.index(m["tool_call_id"])))
    row["messages"] = [next(ordered) if m["role"] == "tool" else m for m in row["messages"]]


def with_arguments(message: Json) -> None:
    for call in message["tool_calls"]:
        call.get("function", call)["arguments"] = {}


def with_roles(row: Json, message: Json, role: str) -> None:
    names = {"human": "user", "gpt": "assistant"}
    message["from"] = role
    row["messages"] = [
        {"role": names.get(m["from"], m["from"]), "content": m["value"]}
        for m in row.pop("conversations")
    ]


# What a sentence says, and what a user then does to the row and to the message that it names.
FOLLOWED: list[tuple[str, Follow]] = [
    (r"has (\w+), which is not read: use (\w+) instead", lambda r, m, f: renamed(r, f[1], f[2])),
    (r"the role (\w+) .*: write (\w+) instead", lambda r, m, f: m.update(role=f[2])),
    (r"turn from .* the role (\w+)$", lambda r, m, f: with_roles(r, m, f[1])),
    (r"from=\w+ .*the nearest is (\w+)", lambda r, m, f: m.update({"from": f[1]})),
    (r"has (\w+) and (\w+)( in message|:).*give one of them", lambda r, m, f: (m or r).pop(f[1])),
    (r"has (\w+) and (\w+)( in message|:).*give one of them", lambda r, m, f: (m or r).pop(f[2])),
    (r"has (\w+) and a message of .*: give one of them", lambda r, m, f: r.pop(f[1])),
    (r"has (\w+) and a message of .*: give one of them", lambda r, m, f: r["messages"].pop(0)),
    (r"key (\w+) in a part .*: remove it", lambda r, m, f: m["content"][0].pop(f[1])),
    (r"(\w+) .*or remove them", lambda r, m, f: m.pop("reasoning_details")),
    (r"has (\w+), which the chat template .*: remove them", lambda r, m, f: r.pop(f[1])),
    (r"key (\w+), .*thoughts belong in (\w+)$", lambda r, m, f: renamed(m, f[1], f[2])),
    (r"has (\w+), .*thoughts belong in (\w+) of a message",
     lambda r, m, f: r["messages"][-1].update({f[2]: r.pop(f[1])})),
    (r"has (\w+), .*belong in (chat_template_kwargs)",
     lambda r, m, f: r.update({f[2]: {f[1]: r.pop(f[1])}})),
    (r"key (\w+), .*it belongs in the row", lambda r, m, f: r.update({f[1]: m.pop(f[1])})),
    (r"key (\w+), .*words to learn belong in (\w+)", lambda r, m, f: renamed(m, f[1], f[2])),
    (r"has (history), .*earlier turns belong in messages",
     lambda r, m, f: r.update(messages=[
         {"role": role, "content": text} for turn in r.pop(f[1])
         for role, text in zip(("user", "assistant"), turn, strict=True)] + r["messages"])),
    (r"has (\w+), which is not read: use weight", lambda r, m, f: told_apart(r, f[1], r.pop(f[1]))),
    (r"has (\w+) in message \d+, .*use weight", lambda r, m, f: told_apart(r, f[1], m.pop(f[1]))),
    (r"has (\w+)=\S+ in message \d+: it must be 0, (1)", lambda r, m, f: m.update({f[1]: 1})),
    (r"write {} for a call", lambda r, m, f: with_arguments(m)),
    (r"put the results in the order", lambda r, m, f: in_order(r)),
]  # fmt: skip


def followed(row: Json, sentence: str) -> Iterator[Json]:
    """Yields the row after each remedy that the sentence offers."""
    number = re.search(r"message (\d+)", sentence)
    for says, follow in FOLLOWED:
        if found := re.search(says, sentence):
            tried = copy.deepcopy(row)
            turns = tried.get("messages") or tried.get("conversations")
            follow(tried, turns[int(number[1]) - 1] if number else None, found)
            yield tried


def refusal(reader: Reader, row: Json) -> str | None:
    try:
        reader.read(row)
    except RefusedRow as error:
        return str(error)
    return None


REMEDY = re.compile(r"\b(use|write|give|remove|belongs?|put|nearest)\b")
# The sentence says what to write, but only the user has it.
THEIRS = ("write messages as a list of objects", "`jq -c", "write messages with role and content")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return opened(home(tmp_path_factory.mktemp("qwen3"), "qwen3"))[0]


@pytest.mark.parametrize("name", test_chat.REFUSED)
def test_a_row_is_read_after_each_remedy(reader: Reader, name: str) -> None:
    row, _ = test_chat.REFUSED[name]
    said = refusal(reader, row)
    if said is None or not REMEDY.search(said) or any(word in said for word in THEIRS):
        return
    tried = list(followed(row, said))
    assert tried, said
    for mended in tried:
        again = refusal(reader, mended)
        assert again is None or again.endswith("except its end"), (said, mended, again)


def unpacked(path: Path) -> Path:
    content = path.read_bytes()
    while content.startswith((b"\x1f\x8b", b"\xfd7zXZ")):
        content = (gzip if content.startswith(b"\x1f\x8b") else lzma).decompress(content)
    parquet = content.startswith(b"PAR1")
    new = path.with_name(f"unpacked.{'parquet' if parquet else 'jsonl'}")
    new.write_bytes(content)
    return new


def converted(path: Path, encoding: str) -> Path:
    try:
        text = path.read_bytes().decode(encoding)
    except UnicodeError:
        text = "\0"
    if "\0" in text:  # the sentence says "if it is"
        text, path = "text", path.with_name("text.txt")
    new = path.with_name(f"new-{path.name}")
    new.write_text(text)
    return new


def named(path: Path, name: str) -> Path:
    return shutil.copy(path, path.with_name(name))


FOLLOWED_BY_FILES: list[tuple[str, Callable[[Path, re.Match[str]], list[str]]]] = [
    (r"name it (\S+?)(,|$)", lambda p, f: tokenized(str(named(p, f[1])))),
    (r"give format=(\w+)", lambda p, f: tokenized(str(p), kind=f[1])),
    (r"to keep its raw lines, give format=(\w+)", lambda p, f: tokenized(str(p), kind=f[1])),
    (r"holds \w+ inside its \w+: unpack it|, or unpack it",
     lambda p, f: tokenized(str(unpacked(p)))),
    (r"`iconv -f (UTF-16|ISO-2022-JP) -t", lambda p, f: tokenized(str(converted(p, f[1])))),
    (r"such as (\S+)$", lambda p, f: tokenized(str(p / f[1]))),
    (r"holds both (\S+) and (\S+), .*name one of them", lambda p, f: tokenized(str(p / f[1]))),
    (r"holds both (\S+) and (\S+), .*name one of them", lambda p, f: tokenized(str(p / f[2]))),
]  # fmt: skip
ELSEWHERE = re.compile(r"(fetch (it|the file)|the file|git lfs|fix (it|its|the|them))")


def check_files(path: Path, said: str) -> None:
    """Asserts that each remedy of a refused file or folder has documents."""
    found = [(re.search(says, said), says, follow) for says, follow in FOLLOWED_BY_FILES]
    is_known = "are read from" in said or "joined by commas" in said
    assert any(f for f, *_ in found) or ELSEWHERE.search(said) or is_known, said
    for match, says, follow in found:
        try:
            assert match is None or follow(path, match), (says, said)
        except UserError as again:  # a notebook, whose text is under another key
            assert "has no key text; its keys are cells" in str(again), (says, said)


def test_a_file_or_folder_has_documents_after_each_remedy(tmp_path: Path) -> None:
    for number, (name, content, _) in enumerate(test_formats.FILES):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        path.write_bytes(content)
        try:
            tokenized(str(path))
        except UserError as error:
            check_files(path, str(error))
    for number, (files, right, _) in enumerate(test_formats.FOLDERS.values()):
        if isinstance(right, str):
            root = test_formats.write(tmp_path / f"folder{number}", files)
            with pytest.raises(UserError) as caught:
                tokenized(str(root))
            check_files(root, str(caught.value))


Environ = dict[str, str]
HAND = {**test_launcher.HAND, "LOCAL_WORLD_SIZE": "4"}
PASSED_ON = {"srun": SRUN, "mpirun": OMPI, "mpiexec": MPICH}


def without(environ: Environ, names: str) -> Environ:
    """Returns the environment without variables that the pattern `names` matches."""
    return {name: value for name, value in environ.items() if not re.match(names, name)}


def launched(environ: Environ, said: str) -> Iterator[tuple[Environ, str | None, int | None]]:
    """Yields environment, address and port after each remedy that a refusal offers."""
    alone = without(environ, "SLURM_")
    if re.search(r"start (with )?(srun or )?torchrun", said):
        yield environ | TORCHRUN, None, None
    if "unset all SLURM_*" in said:
        yield alone, None, None
    for name in re.findall(r"unset ([A-Z]\w+)(?:[,;]|$)", said):
        yield without(environ, f"{name}$"), None, None
    if "unset it" in said:
        yield without(environ, said.partition("=")[0]), None, None
    if "unset those of the launcher" in said:  # the user knows which; here, one that then works
        both = []
        for part in said.partition(" contradict")[0].split(" and "):
            first = part.partition("=")[0]
            of_hand = first in ("RANK", "WORLD_SIZE")
            names = "|".join(f"{name}$" for name in HAND) if of_hand else first.split("_")[0] + "_"
            both.append((without(environ, names), None, None))
        yield next((one for one in both if not refusal_of(*one)), both[0])
    for names in re.findall(r"(?:export|set all of) ((?:[A-Z_]+,? ?(?:and )?)+)", said):
        found = [name for name in re.split(r"[, ]+(?:and )?", names) if name in HAND]
        yield environ | {name: HAND[name] for name in found}, None, None
    if "has not set LOCAL_RANK" in said:
        yield environ | {"LOCAL_RANK": "1"}, None, None
    if address := re.search(r"launch\.master_addr(?:=(\S+))?", said):
        yield environ, address[1] or "node3", None
    if "give it as launch.master_port" in said:
        yield environ, None, 29500
    if "put srun before" in said:
        yield environ | (HET if "components" in said else SRUN), None, None
    if "put mpirun before" in said:
        yield environ | OMPI, None, None
    if "submit with --nodes=1" in said:
        yield alone | BATCH_OF_ONE, None, None
    if passed := re.search(r"pass .*(?:of|variables) .*?\b(srun|mpirun|mpiexec)\b", said):
        yield environ | (HET if "components" in said else PASSED_ON[passed[1]]), None, None
    if "srun's own variables" in said:
        yield environ | SRUN, None, None
    if "give it as 2 or" in said:
        yield environ | {said.partition("=")[0]: "2"}, None, None


def refusal_of(environ: Environ, addr: str | None, port: int | None) -> str | None:
    try:
        detect(environ, addr, port, read=test_launcher.read)
    except UserError as error:
        return str(error)
    return None


def check_launch(
    environ: Environ, addr: str | None = None, port: int | None = None, steps: int = 6
) -> int:
    """Asserts that remedies end the refusal of an environment; returns how many were tried."""
    said = refusal_of(environ, addr, port)
    if said is None:
        return 0
    tried = list(launched(environ, said))
    plain = re.search(r"it must be|whole number; give|cannot exceed|must look like|NODEFILE", said)
    assert tried or plain, said
    assert steps or not tried, said
    return sum(
        1 + check_launch(each, given or addr, number or port, steps - 1)
        for each, given, number in tried
    )


@pytest.mark.parametrize("name", test_launcher.ROWS)
def test_an_environment_is_known_after_each_remedy(name: str) -> None:
    check_launch(test_launcher.ROWS[name][0])


def test_most_refused_environments_have_a_remedy_that_is_tried() -> None:
    refused = [environ for environ, right in test_launcher.ROWS.values() if isinstance(right, str)]
    assert sum(check_launch(environ) > 0 for environ in refused) >= 0.8 * len(refused)
