"""Every subcommand once on the simulated accelerator, or on what a run on it has left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from parallel3d.cli.command_line import SUBCOMMANDS
from tests.e2e.command import TINY, Ended, Shell
from tests.e2e.forked import run_forked

SMALL = """
from parallel3d.run.worker import APPS
APPS["calibrate"] = "tests.e2e.small_figures", "calibrate"
import sys
from parallel3d.__main__ import main
sys.exit(main())
"""
DEVICE = "device=simulated"
LLAMA = ("model=llama_tiny", *TINY, "model.num_query_groups=2", "model.ffn_hidden_size=48", DEVICE)
TRAIN = ("train.steps=2", "checkpoint.every=1", "tp=2")
ROW = '{"context": "a", "choices": ["b", "c"], "answer": 0}'
BENCH = ("dp=2", "bench.budget_s=0.1", "bench.sizes=[4096]", "bench.iterations=1", "bench.warmup=0")


class Command(NamedTuple):
    """The words of a subcommand, what it then says, and as how many ranks a launcher starts it; 1:
    it is typed, and starts its own."""

    words: tuple[str, ...]
    says: str
    ranks: int = 1


# In this order: later ones read what earlier ones have left.
COMMANDS = {
    "train": Command((*LLAMA, "TEXT", *TRAIN, "run=mine"), "simulated accelerator", 2),
    "verify": Command((*LLAMA, "TEXT", "tp=2", "sp=true", "verify.steps=1"), "does not change the"),
    "bench comm": Command((*BENCH, DEVICE), "simulated_nccl", 2),
    "calibrate": Command(
        ("calibrate.file=here.yaml", "calibrate.passes=1", DEVICE), "here.yaml", 2
    ),
    "generate": Command(("run=mine", "generate.max_tokens=2", "prompt=the", "tp=2", DEVICE), "the"),
    "eval": Command(("run=mine", "tasks=rows.jsonl", DEVICE), "acc_norm"),
    "report": Command(("run=mine",), "report.html"),
    "topology": Command(("tp=2", DEVICE), "placement"),
    "schedule": Command(("pp=2", DEVICE), "1f1b"),
    "plan": Command((*LLAMA, "cluster=dgx_h100", "cluster.nodes=1"), "tp"),
    "dryrun": Command((*LLAMA, "train.steps=2"), "The host waits for the GPU 1 time a step"),
    "checkpoint ls": Command(("run=mine",), "2"),
    "checkpoint verify": Command(("run=mine",), "step-00000002  whole"),
    "checkpoint export": Command(("run=mine", "to=exported"), "exported"),
    "checkpoint import": Command(("from=exported", "run=taken", *LLAMA[1:]), "taken"),
    "checkpoint branch": Command(("mine@2", "run=cooled"), "cooled"),
    "checkpoint average": Command(("run=mine", "last=2"), "mine-average"),
    "checkpoint diff": Command(("mine", "mine@2"), "21 of them equal"),
    "data train-tokenizer": Command(("input=book.txt", "vocab_size=300", "to=tok.json"), "tok"),
    "data tokenize": Command(("input=book.txt", "tokenizer=tok.json", "to=corpus"), "corpus"),
    "data show": Command(("corpus",), "document"),
    "init slurm": Command(("scripts",), "train.sbatch"),
    "recipes list": Command((), "llama3_1_8b"),
    "recipes show": Command(("qwen3_8b",), "override /model: qwen3_8b"),
    "recipes copy": Command(("qwen3_8b", "to=mine"), "--config-dir=mine experiment=qwen3_8b"),
}


def run(shell: Shell, name: str, command: Command) -> Ended:
    words = [w for word in command.words for w in (shell.text() if word == "TEXT" else [word])]
    words = list({word.split("=")[0]: word for word in words}.values())  # of equal keys the last
    started = ("-c", SMALL) if command.ranks > 1 else ()
    return run_forked(shell, *started, *name.split(), *words, ranks=command.ranks)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    """What each of them said, in one directory."""
    shell = Shell(tmp_path_factory.mktemp("commands"), tmp_path_factory.mktemp("scratch"))
    (shell.cwd / "rows.jsonl").write_text(ROW)
    try:
        yield {name: run(shell, name, command) for name, command in COMMANDS.items()}
    finally:
        shell.end_all()


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_it_runs(name: str, ended: dict[str, Ended]) -> None:
    """A subcommand that is not in the table is missing here."""
    found = ended[name]
    assert found.code == 0, found
    assert COMMANDS[name].says in found.out + found.err, found


def test_calibrate_shows_progress_where_its_output_is_no_terminal(ended: dict[str, Ended]) -> None:
    """One line from rank 0 at the start; the next follows only after many seconds."""
    assert ended["calibrate"].err.count("parallel3d: calibrate: all_reduce over 2 ranks") == 1
