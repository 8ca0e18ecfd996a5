"""Tests that text is kept as typed or written wherever it enters, `~` is a home, and the last
value of a key counts."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from parallel3d.cli import hydra_run
from parallel3d.cli.command_line import main
from parallel3d.cli.overrides import check_overrides, compose_tree, composed, config_of
from parallel3d.cli.verbs import Verb, parse
from parallel3d.cli.words import last_of_each
from parallel3d.config.fields import all_keys, check_fields, check_value
from parallel3d.config.paths import at_home
from parallel3d.config.user_files import read_given
from parallel3d.errors import UserError
from parallel3d.models.survey import TARGET
from parallel3d.run.checks import check_run_name
from parallel3d.run_config import Config
from tests.unit.doors.words import (
    GUESSED,
    LISTS,
    NAMED,
    PATHS,
    TEXT,
    taken_again,
    taken_by_verb,
    taken_from_file,
    taken_from_sweep,
    taken_from_words,
)

HOME = "/home/somebody"
WORDS = [word for word in GUESSED if "," not in word]


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", HOME)


@pytest.mark.nightly
@pytest.mark.parametrize("word", [*WORDS, "größe", "gro\u0308ße", "a;b", "a b", "#1", "1.10!"])
def test_every_text_key_passes_the_given_word_to_hydra(word: str) -> None:
    parser = OverridesParser.create()
    for kept in check_overrides([f"{key.name}={word}" for key in TEXT]):
        assert str(parser.parse_override(kept).value()) == word, kept


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, len(WORDS), 7))
def test_every_text_key_keeps_its_word_in_a_round_trip(first: int, tmp_path: Path) -> None:
    # None of the words can name a class with its module.
    kept = [key for key in TEXT if key.name != TARGET]
    words = {key.name: WORDS[(first + i) % len(WORDS)] for i, key in enumerate(kept)}
    sections: dict[str, list[str]] = {}
    for name, word in words.items():
        section, _, leaf = name.rpartition(".")
        sections.setdefault(section, []).append(f"{leaf}: {word}")
    lines = [*sections.pop("")]
    for section, inside in sections.items():
        lines += [f"{section}:", *(f"  {line}" for line in inside)]
    typed = taken_from_words([f"{name}={word}" for name, word in words.items()])
    written = taken_from_file("\n".join(lines), tmp_path)
    for config in (typed, written, taken_again(typed)):
        assert {name: attrgetter(name)(config) for name in words} == words


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "data.path"])
def test_a_sweep_keeps_the_given_words(name: str) -> None:
    words = WORDS[::9]
    assert taken_from_sweep(name, words) == words


@pytest.mark.nightly
@pytest.mark.parametrize("key", LISTS, ids=[key.name for key in LISTS])
def test_lists_keep_their_words(key: Any, tmp_path: Path) -> None:
    section, _, leaf = key.name.rpartition(".")
    typed = taken_from_words([f"{key.name}=[{','.join(WORDS)}]"])
    written = taken_from_file(f"{leaf}: [{', '.join(WORDS)}]\n", tmp_path, section)
    for config in (typed, taken_again(typed), written):
        assert attrgetter(key.name)(config) == WORDS


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*NAMED])
def test_names_in_braces_are_text(name: str, tmp_path: Path) -> None:
    words = [word for word in WORDS if ":" not in word]
    typed = taken_from_words([f"{name}={{{','.join(f'{w}:{NAMED[name]}' for w in words)}}}"])
    section, _, leaf = name.partition(".")
    value = NAMED[name].replace(":", ": ")
    lines = "".join(f"  {word}: {value}\n" for word in words)
    written = taken_from_file(f"{leaf}:\n{lines}", tmp_path, section)
    for config in (typed, taken_again(typed), written):
        assert [*attrgetter(name)(config)] == words


# The typed word, the key, its value.
TYPED = [
    ("run=null", "run", None),
    ("run=NULL", "run", None),
    ("run='null'", "run", "null"),
    ('run="1.10"', "run", "1.10"),
    ("run=a\\,b", "run", "a,b"),
    ("run=str(1.10)", "run", "1.10"),
    ("++run=1.10", "run", "1.10"),
    ("logger.notes= two  blanks ", "logger.notes", " two  blanks "),
    ("logger.notes=", "logger.notes", ""),
    ("logger.notes=1\n2", "logger.notes", "1\n2"),
    ("launch={master_addr:1.10}", "launch.master_addr", "1.10"),
    ("logger.tags=['1,2',1e3]", "logger.tags", ["1,2", "1e3"]),
    ("data.blend={2024:0.5,1.10:1e3}", "data.blend", {"2024": 0.5, "1.10": 1000.0}),
    ("data.blend={1:1,1.0:2,true:3}", "data.blend", {"1": 1, "1.0": 2, "true": 3}),
    ("data.blend={null:1,true:tokens}", "data.blend", {"null": 1, "true": "tokens"}),
    ("data.blend=tokens", "data.blend", "tokens"),
    ("data.blend={~/c:1,a b:2}", "data.blend", {f"{HOME}/c": 1, "a b": 2}),
    ("data.blend_stages={1e9:{1.10:0.5}}", "data.blend_stages", {10**9: {"1.10": 0.5}}),
    ("data.valid={web:1.10}", "data.valid", {"web": "1.10"}),
    ("data.valid={1.10:~/c/v}", "data.valid", {"1.10": f"{HOME}/c/v"}),
    ("optim.groups={1.10:{lr_mult:1e-1}}", "optim.groups", {"1.10": {"lr_mult": 0.1}}),
    ("train.batch_schedule={0:8,1e3:16}", "train.batch_schedule", {0: 8, 1000: 16}),
    ("train.batch_schedule={0:8,007:16}", "train.batch_schedule", {0: 8, 7: 16}),
    ("profile.ranks=[0,01]", "profile.ranks", [0, 1]),
    ("train.steps=0123", "train.steps", 123),
    ("optim.lr=1e-3", "optim.lr", 1e-3),
    ("tp=1_0", "tp", 10),
    ("runs_dir=~/runs", "runs_dir", f"{HOME}/runs"),
    ("runs_dir='~/runs'", "runs_dir", f"{HOME}/runs"),
    ("runs_dir=~", "runs_dir", HOME),
    ("runs_dir=./~", "runs_dir", "./~"),
    ("run=${oc.env:NO_SUCH,1.10}", "run", "1.10"),
    ("run=v${oc.env:NO_SUCH,1e3}", "run", "v1e3"),
    ("run='${oc.env:NO_SUCH, 007}'", "run", "007"),
    ("logger.tags=[${oc.env:NO_SUCH,1.10}]", "logger.tags", ["1.10"]),
    ("data.path=${oc.env:HOME}/1.10", "data.path", f"{HOME}/1.10"),
    ('data.path="~/a.txt,~/b.txt"', "data.path", f"{HOME}/a.txt,{HOME}/b.txt"),
    ("data.path=s3://bucket/1.10", "data.path", "s3://bucket/1.10"),
    ("data.path=C\\:\\\\a", "data.path", "C:\\a"),
    ("data.path=a=b.txt", "data.path", "a=b.txt"),
    ("data.path=~/lr=1e-3/1=2.jsonl", "data.path", f"{HOME}/lr=1e-3/1=2.jsonl"),
    ("data.valid={v:a=b.txt}", "data.valid", {"v": "a=b.txt"}),
    ("logger.tags=[lr=1e-3,1.10]", "logger.tags", ["lr=1e-3", "1.10"]),
    ("logger.tags=[\n  a b,\r\n  1.10\n]", "logger.tags", ["a b", "1.10"]),
    ("logger.tags=['a\nb',c]", "logger.tags", ["a\nb", "c"]),
    ("data.valid={a:x,\r\n  b:1.10}", "data.valid", {"a": "x", "b": "1.10"}),
    ("run=a\nb", "run", "a\nb"),
]


@pytest.mark.parametrize(("word", "name", "right"), TYPED, ids=[row[0] for row in TYPED])
def test_words_of_the_command_line_are_read_as_written(word: str, name: str, right: object) -> None:
    assert attrgetter(name)(taken_from_words([word])) == right


# A line of a user's own file, the key, its value.
WRITTEN = [
    ("run: null", "run", None),
    ("run: ~", "run", None),
    ("run: 'null'", "run", "null"),
    ("run: 2026-01-01", "run", "2026-01-01"),
    ("run: =", "run", "="),
    ("run: '${oc.env:NO_SUCH,1.10}'", "run", "1.10"),
    ("run: ${oc.env:NO_SUCH,5e10423}", "run", "5e10423"),
    ("runs_dir: ~/runs", "runs_dir", f"{HOME}/runs"),
    ("logger: {tags: [no, 007, 1.10], notes: 12:30}", "logger.tags", ["no", "007", "1.10"]),
    (
        "data: {blend: {2024: 0.5, 1.10: 1e0, on: 2}}",
        "data.blend",
        {"2024": 0.5, "1.10": 1.0, "on": 2},
    ),
    ("data: {valid: {1.10: ~/c}}", "data.valid", {"1.10": f"{HOME}/c"}),
    ("optim: {lr: 3e-4}", "optim.lr", 3e-4),
    ("tp: 0123", "tp", 123),
    ("seed: 0x10", "seed", 16),
    ("compile: on", "compile", True),
    ("compile: no", "compile", False),
    ("recompute: [norm, mlp]", "recompute", ["norm", "mlp"]),
    ("train: {batch_schedule: {0: 8, 1e3: 16}}", "train.batch_schedule", {0: 8, 1000: 16}),
]


@pytest.mark.parametrize(("line", "name", "right"), WRITTEN, ids=[row[0] for row in WRITTEN])
def test_lines_of_a_file_are_read_as_written(
    line: str, name: str, right: object, tmp_path: Path
) -> None:
    assert attrgetter(name)(taken_from_file(f"{line}\n", tmp_path)) == right


@pytest.mark.parametrize("line", ["tp: 1:30", "optim: {lr: 1:30}", "train: {steps: 1e3}"])
def test_text_that_is_not_a_number_is_refused_in_files(line: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="could not be converted"):
        taken_from_file(f"{line}\n", tmp_path)


def test_a_name_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="duplicate key 2024"):
        taken_from_file("data:\n  blend: {2024: 0.5, 2024: 0.6}\n", tmp_path)


# Arguments of one command, and parts of the refusing sentence.
REFUSED = [
    (["run=a", "tp=2", "run=b"], ["run=a and run=b", "given twice", "leave run=a out"]),
    (["train.batch_schedule={0:4"], ["nearest is 'train.batch_schedule={0:4}'"]),
    (['optim.groups={"layers.*":{lr_mult:0.5}'], ["is 'optim.groups={layers.*:{lr_mult:0.5}}'"]),
    (["logger.tags=[a,,b]"], ["nearest is 'logger.tags=[a,b]'"]),
    (["logger.tags=[a,b,"], ["nearest is 'logger.tags=[a,b]'"]),
    (["data.blend={a:1,a:2}"], ["a occurs twice in the same braces"]),
    (["data.blend={1.10:1,2:1,1.10:2}"], ["1.10 occurs twice"]),
    (["run=int(5)"], ["run is text", "'run=\"int(5)\"'"]),
    (["data.path=a,b"], ["one text as 'data.path=\"a,b\"'"]),
    (["data.path=[a,\r\nb]"], ["as 'data.path=\"[a, b]\"'", "as 'data.path=\"a,b\"'"]),
    (["run=it's"], ["""'run="it'"'"'s"'"""]),
    (["data.path=a,b='c"], ["'data.path=\"a,b='"]),
    (["run=[a]"], ["must be null or text", "'run=\"[a]\"'"]),
    (["run={a:1}"], ["must be null or text"]),
    (["logger.tags=1.10"], ["must be a list of words"]),
    (["runs_dir="], ["runs_dir= is empty"]),
    (
        ["runs_dir=~nobody-of-this-name/x"],
        ["this host knows no such home directory", "./~nobody-of-this-name/x"],
    ),
    (["runs_dir=$SCRATCH/x"], ["begins with $", "${oc.env:NAME}"]),
    (['data.path="~/a,~nobody-of-this-name/b"'], ["this host knows no such home directory"]),
    (
        ["runs_dir=/scratch/$USER/runs"],
        ["has $USER, which parallel3d does not expand", "${oc.env:USER}"],
    ),
    (["data.path=web/x-$USER.txt"], ["has $USER, which parallel3d does not expand"]),
    (["runs_dir=s3://bucket/runs"], ["is an address, but must be a path on this host"]),
    (["init_from=hf://someone/model"], ["is an address"]),
    (["run=x-${dp}"], ["run=x-${dp}: the reference ${…} has no value", "x-None"]),
    (["train.batch_schedule={0:8,0.0:16}"], ["0 and 0.0 are the same name"]),
    (["data.blend_stages={1e9:{a:1},1000000000:{b:1}}"], ["1e9 and 1000000000 are the same name"]),
]


@pytest.mark.parametrize(("words", "parts"), REFUSED, ids=[" ".join(row[0]) for row in REFUSED])
def test_a_refusal_gives_the_reason(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        check_fields(taken_from_words(words))
    assert [part for part in parts if part not in str(raised.value)] == [], raised.value


@pytest.mark.parametrize("run", ["exp-$SLURM_JOB_ID", "$USER", "${USER}-1"])
def test_a_run_that_is_named_by_a_variable_is_refused(run: str) -> None:
    """With `run: exp-$SLURM_JOB_ID` in a file, all jobs would be one run."""
    with pytest.raises(
        UserError, match=r"which parallel3d does not expand.*\$\{oc\.env:(SLURM|USER)"
    ):
        check_run_name(run, "runs")


def test_an_existing_path_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a$b.txt").touch()
    check_value("data.path", f"{tmp_path}/a$b.txt", Config)


@pytest.mark.parametrize("run", ["", " a", "a ", "~", "~a", "a/b", "..", "a\tb"])
def test_a_run_name_that_is_not_a_plain_folder_name_is_refused(run: str) -> None:
    with pytest.raises(UserError, match="must be the plain name of a folder"):
        check_run_name(run, "runs")


def test_a_preset_and_one_of_its_keys_are_no_repetition() -> None:
    assert check_overrides(["model=llama_tiny", "model.num_layers=1"]) == [
        "model=llama_tiny",
        "model.num_layers=1",
    ]


@pytest.mark.parametrize("home", ["", "relative"])
def test_a_missing_home_is_not_read_as_the_root(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    assert at_home("~/runs") == "~/runs"
    with pytest.raises(UserError, match="this host knows no such home directory"):
        check_value("runs_dir", at_home("~/runs"), Config)


def test_paths_are_known_from_the_schema() -> None:
    words = ("file", "folder", "prefix of", "file,")
    for key in all_keys(Config).values():
        says = key.kind is str and not key.meta["choices"] and key.meta["help"].startswith(words)
        assert not says or key.name in PATHS, key.name
    config = taken_from_words([f"{name}=~/1.10" for name in PATHS])
    assert {attrgetter(name)(config) for name in PATHS} == {f"{HOME}/1.10"}


def test_subcommands_keep_text_and_expand_homes_in_paths() -> None:
    for word in (*WORDS, "a=b", "ü"):
        assert taken_by_verb("run", word) == word
        assert taken_by_verb("runs_dir", f"~/{word}") == f"{HOME}/{word}"


# Arguments of one command, a key, its right value, and whether a line says which word counts.
REPEATED = [
    (["optim.lr=1e-3", "optim.lr=3e-4"], "optim.lr", 3e-4, True),
    (["tp=1", "++tp=2"], "tp", 2, True),
    (["+tp=4", "pp=2", "tp=2"], "tp", 2, True),
    (["tp=2", "pp=2", "tp=2"], "tp", 2, False),
    (["run=a", "run=a"], "run", "a", False),
    (["train={steps:1}", "train.steps=2"], "train.steps", 2, True),
    (["train.steps=2", "train={steps:1,log_every:3}"], "train.steps", 1, True),
    (["train={steps:1,log_every:3}", "train.steps=2"], "train.log_every", 3, True),
    (["data.path='a=b'", "data.path=c=d"], "data.path", "c=d", True),
]


@pytest.mark.parametrize(
    ("words", "name", "right", "is_said"), REPEATED, ids=[" ".join(row[0]) for row in REPEATED]
)
def test_the_last_of_two_values_counts(
    words: list[str], name: str, right: object, is_said: bool
) -> None:
    assert attrgetter(name)(taken_from_words(words)) == right
    _, lines = last_of_each(words)
    assert [words[-1] in line.partition(" is given twice, and ")[2] for line in lines] == (
        [True] if is_said else []
    )


@pytest.mark.slow
def test_the_last_of_two_presets_counts() -> None:
    model = composed(["model=gpt_tiny", "model.num_layers=1", "model=llama_tiny"]).model
    assert (model.name, model.num_layers) == ("llama_tiny", 1)


def test_the_last_value_of_a_verbs_key_counts(capfd: pytest.CaptureFixture[str]) -> None:
    verb = Verb("", {"run": "", "last": ""}, (), "")
    given, _ = parse("checkpoint ls", verb, ["run=a", "last=1", "run=a", "last=2"])
    assert given == {"run": "a", "last": "2"}
    assert "last is given twice, as 1 and as 2, which counts" in "".join(capfd.readouterr())
    with pytest.raises(UserError, match=r"run is given twice, as 1\.10 and as 1\.1; leave one"):
        parse("checkpoint ls", verb, ["run=1.10", "run=1.1"])


@pytest.mark.slow
def test_a_users_folder_is_read_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests Hydra itself: an experiment and a preset named like numbers, in a home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    files = {
        "experiment/1.10.yaml": "# @package _global_\ndefaults:\n  - override /data: 007\n"
        "run: 5e10423\nruns_dir: ~/runs\nlogger:\n  tags: [no, 1.10]\n",
        "data/007.yaml": "name: text\npath: ~/1.10\n",
    }
    for name, text in files.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    monkeypatch.setattr(hydra_run.OwnFolder, "path", None)
    line = ["--config-dir=~/mine", "experiment=1.10", "seed=7"]
    (flag, *words), own, _ = hydra_run.order_arguments(line)
    config = config_of(compose_tree(words))
    assert (flag, own) == (f"--config-dir={tmp_path}/mine", tmp_path / "mine")
    assert (config.run, config.runs_dir) == ("5e10423", f"{tmp_path}/runs")
    assert (config.data.path, config.logger.tags) == (f"{tmp_path}/1.10", ["no", "1.10"])


@pytest.mark.parametrize(
    "words",
    [["--version\r"], ["\ufeff--version"], ["--version", "\r"], ["--version", "run=[a,\r\nb]"]],
)
def test_marks_of_windows_are_no_part_of_a_word(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("parallel3d ") and "1 word of the command line had a carriage" in err


def test_a_file_that_a_user_wrote_has_no_marks_of_windows(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes("\ufeffn1 0 0\r\nn2 1 0\r\n".encode())
    assert read_given("rank_file", str(tmp_path / "hosts")) == "n1 0 0\nn2 1 0\n"


@pytest.mark.slow
def test_composed_reads_words_like_the_command_line() -> None:
    assert composed(["run=1.10", "data.path=~/1.10"]).data.path == f"{HOME}/1.10"
