"""Runs the first section of docs/data.md as it stands: from jsonl to text that transformers
writes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from tests.e2e.command import ROOT, TINY, Shell
from tests.e2e.forked import run_forked

pytestmark = pytest.mark.more

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## From jsonl to text\n")[1].split("\n## ")[0]
# The parts of the page that are smaller here: its sources, its vocabulary, its run.
KEPT = [word for word in TINY if not word.startswith(("train.steps", "checkpoint.every"))]
OF_LLAMA = ("model.num_query_groups=2", "model.ffn_hidden_size=48", "optim.lr=0.01")
SMALLER = {
    '"*.py"': '"[bc]*.py"',
    "vocab_size=4096": "vocab_size=400",
    "train.steps=300": " ".join((*KEPT, *OF_LLAMA, "train.steps=20", "checkpoint.every=20")),
}


def blocks() -> Iterator[str]:
    """Yields the commands and code of the section, in order, made smaller."""
    section = SECTION
    for large, small in SMALLER.items():
        assert large in section
        section = section.replace(large, small)
    for language, block in re.findall(r"```(\w*)\n(.*?)```", section, re.DOTALL):
        yield block if language == "python" else block.replace("\\\n", " ")


def test_from_jsonl_to_the_text_that_transformers_writes(shell: Shell) -> None:
    """Replaces the texts from the network by local ones with the same characters."""
    shell.environ["HF_HUB_OFFLINE"] = "1"
    sources, commands, theirs = blocks()
    assert run_forked(shell, "-c", sources).code == 0
    said = {}
    for line in commands.splitlines():
        program, *words = shlex.split(line)
        assert program == "parallel3d"
        if words[0] == "generate":
            words.append("device=cpu")
        ended = run_forked(shell, *words, ranks=4 if words[0] == "train" else 1)
        assert ended.code == 0, (line, ended)
        said[words[0]] = ended.out
    assert re.search(r"tp 2 .* pp 2 .* dp 1", said["train"]), said["train"]
    ended = run_forked(shell, "-c", theirs)
    assert ended.code == 0, ended
    assert ended.out == said["generate"]
    assert len(ended.out) > len("def \n")
