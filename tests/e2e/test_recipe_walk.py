"""Copies a recipe, edits it and trains it from a Hugging Face folder, like docs/recipes.md."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from tests.e2e.command import Shell
from tests.e2e.forked import Forked, run_forked
from tests.e2e.here import answer
from tests.huggingface import save_model
from tests.pace import PATIENCE
from tests.tokenizers import END, folder, trained

pytestmark = pytest.mark.more

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'Q: ' + m.content + '\\n' }}{% else %}A:"
    "{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
# Values for this host, instead of eight H100 and 8 B parameters.
EDITS = {
    "dp": 1,
    "cp": 2,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "model": {
        **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8},
        **{"num_query_groups": 2, "ffn_hidden_size": 44, "vocab_size": 320, "seq_length": 64},
    },
}


def edit(recipe: Path) -> None:
    first, _, text = recipe.read_text("utf-8").partition("\n")
    values = yaml.safe_load(text.replace("???", "'???'"))
    model = values["model"] | EDITS["model"]
    recipe.write_text(f"{first}\n{yaml.safe_dump(values | EDITS | {'model': model})}")


def train_with_late_rank(shell: Shell, run: Path, words: list[str]) -> None:
    """Trains on two ranks; the second one finds the run folder that the first one has made."""
    forked = Forked(shell)
    forked.add_world(2, *words)
    late = forked.jobs.pop()
    forked.start()
    deadline = time.monotonic() + 60 * PATIENCE
    while not (run / "config.yaml").exists():
        assert time.monotonic() < deadline and forked.running[0].poll() is None
        time.sleep(0.05)
    forked.jobs.append(late)
    forked.start()
    forked.finish()


def test_a_copied_recipe_fine_tunes_a_small_model_on_conversations(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    base = shell.cwd / "base"
    grouped = {"num_key_value_heads": 2, "intermediate_size": 44, "rms_norm_eps": 1e-6}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    kind = {
        "vocab_size": 320,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
    }
    save_model(base, "qwen3", **SIZES, **grouped, **rope, **kind)
    folder(base, trained(), eos_token=END, chat_template=TEMPLATE)
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    rows = [json.dumps({"messages": talk * (1 + i % 3), "source": "web"}) for i in range(24)]
    (shell.cwd / "sft.jsonl").write_text("\n".join(rows))

    copied = answer(shell, capfd, "recipes", "copy", "qwen3_8b_sft", "to=mine")
    assert copied.code == 0, copied
    line = copied.out.splitlines()[-1].partition("parallel3d ")[2]
    assert line == "train --config-dir=mine experiment=qwen3_8b_sft init_from=… data.path=…"
    edit(shell.cwd / "mine" / "experiment" / "qwen3_8b_sft.yaml")
    words = line.replace("init_from=…", "init_from=base").replace("=…", "=sft.jsonl").split()
    words += "run=sft", "cluster=laptop", "device=cpu"
    run = shell.cwd / "runs" / "sft"
    train_with_late_rank(shell, run, words)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "grad_norm" in row]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["zero"] == 3 and config["precision"]["name"] == "bf16"
    assert config["optim"]["lr"] == 7e-6 and config["train"]["epochs"] == 2
    assert len(steps) > 1 and json.loads((run / "summary.json").read_text())["status"] == "finished"
    # Only the answer is learned, and the model is small, so every loss equals a random model's.
    assert all(4 < row["loss"] < 9 for row in steps)
    # The same line resumes the run: it gives a head_dim that the base model also has without it.
    ended = run_forked(shell, *words)
    assert ended.code == 0 and "run=sft is finished" in ended.err, ended
    assert "keys not read: source (24 rows)" in ended.err
