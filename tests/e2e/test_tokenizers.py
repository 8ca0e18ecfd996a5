"""Tests a run with its own tokenizer: it trains, generates, is exported, imported and resumed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parallel3d.commands.checkpoint.command import checkpoint
from parallel3d.data.tokenizer import open_tokenizer
from parallel3d.errors import UserError
from tests.e2e.command import TINY, Shell
from tests.e2e.forked import run_forked
from tests.e2e.here import answer
from tests.tokenizers import folder, trained

pytestmark = pytest.mark.nightly

LLAMA = ("model=llama_tiny", *TINY, "model.num_query_groups=2", "model.ffn_hidden_size=48")
GREEDY = ("prompt=def é", "generate.temperature=0", "generate.max_tokens=12", "device=cpu")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A run `mine` of two ranks, whose tokenizer file was removed afterwards."""
    shell = Shell(tmp_path_factory.mktemp("trained"), tmp_path_factory.mktemp("scratch"))
    folder(shell.cwd / "tok", chat_template="{{ messages }}")
    size = open_tokenizer(str(shell.cwd / "tok")).vocab_size
    words = ("tokenizer=tok", f"model.vocab_size={size + 4}", "checkpoint.every=3", "optim.lr=0.01")
    words = ("tp=2", "checkpoint.async=false", *words)
    ended = run_forked(shell, "train", "run=mine", *LLAMA, *words, *shell.text(), ranks=2)
    assert ended.code == 0, ended
    assert f"tok: {size} tokens, 4 of model.vocab_size={size + 4} are padding" in ended.out
    (shell.cwd / "tok").rename(shell.cwd / "gone")
    yield shell
    shell.end_all()


def test_a_run_generates_and_is_exported_with_its_own_tokenizer(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers generates the same text, and so does the run that is made from the export."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(shell.cwd)
    ended = run_forked(shell, "generate", "run=mine", *GREEDY)
    assert ended.code == 0, ended
    assert checkpoint(["export", "run=mine", f"to={tmp_path}/hf"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert tokenizer.chat_template == "{{ messages }}"
    assert model.config.eos_token_id == tokenizer.eos_token_id == 0
    prompt = [0, *tokenizer("def é")["input_ids"]]  # an end of text precedes every text
    made = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(made[0], skip_special_tokens=True) == ended.out.removesuffix("\n")

    assert checkpoint(["import", f"from={tmp_path}/hf", "run=back"]) == 0
    own = shell.cwd / "runs" / "back" / "tokenizer"
    mine = open_tokenizer(str(shell.cwd / "runs" / "mine" / "tokenizer"))
    assert open_tokenizer(str(own)).digest == mine.digest
    again = run_forked(shell, "generate", "run=back", *GREEDY)
    assert (again.code, again.out) == (0, ended.out), again


def test_a_run_resumes_with_its_own_tokenizer_only(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    size = open_tokenizer(str(shell.cwd / "gone")).vocab_size
    words = ("run=mine", *LLAMA, f"model.vocab_size={size + 4}", "checkpoint.async=false")
    words = (*words, "checkpoint.every=3", "optim.lr=0.01", *shell.text())
    folder(shell.cwd / "other", trained(300))
    for tokenizer in ("byte", "other"):
        ended = answer(shell, capfd, "train", *words, f"tokenizer={tokenizer}")
        assert (ended.code, len(ended.errors)) == (2, 1), ended
        assert f"data.tokenizer={tokenizer} differs from the tokenizer of run=mine" in ended.err
    ended = run_forked(shell, "train", *words, "train.steps=4")
    assert ended.code == 0, ended
    assert "step 4/4" in ended.out


def test_a_vocabulary_larger_than_the_models_is_refused_at_once(
    shell: Shell, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = open_tokenizer(str(shell.cwd / "gone")).vocab_size
    words = (*LLAMA, "tokenizer=gone", f"model.vocab_size={size - 1}", *shell.text())
    ended = answer(shell, capfd, "train", *words)
    assert (ended.code, len(ended.errors)) == (2, 1), ended
    assert f"model.vocab_size={size - 1} must be at least {size}" in ended.err
    monkeypatch.chdir(shell.cwd)
    assert checkpoint(["export", "run=mine", f"to={tmp_path}/hf"]) == 0
    more = tuple(f"<{number}>" for number in range(9))
    larger = folder(tmp_path / "larger", trained(320, ("<|endoftext|>", *more)))
    shutil.copy(larger / "tokenizer.json", tmp_path / "hf")
    with pytest.raises(UserError, match=r"model\.vocab_size=\d+ must be at least \d+"):
        checkpoint(["import", f"from={tmp_path}/hf", "run=small"])
    assert not (shell.cwd / "runs" / "small").exists()
