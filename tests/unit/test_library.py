"""The front door: what `import parallel3d` offers, and that the page about it runs as it stands."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import parallel3d
from parallel3d.config.schema import Config
from parallel3d.errors import UserError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
TRAINS, OWN_SAMPLES, PROOF = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_door_opens_without_anything_heavy() -> None:
    code = (
        "import sys, parallel3d; print(dir(parallel3d)); parallel3d.Layout(tp=2); "
        "print({'torch', 'numpy', 'hydra', 'omegaconf', 'wandb', 'rich'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed, heavy = out.stdout.splitlines()
    assert set(parallel3d.__all__) < set(ast.literal_eval(listed))
    assert heavy == "set()"


def test_every_name_is_there_and_a_type_checker_finds_it_in_the_same_place() -> None:
    tree = ast.parse(Path(parallel3d.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == parallel3d._HOME
    assert sorted([*typed, "__version__"]) == sorted(parallel3d.__all__)
    for name, module in typed.items():
        assert getattr(parallel3d, name).__module__ == module


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainor'"):
        _ = parallel3d.Trainor


def test_the_page_names_what_the_door_offers() -> None:
    table = "\n".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))
    assert set(re.findall(r"`(\w+)", table)) == set(parallel3d.__all__) - {"__version__"}


def test_composing_is_what_the_command_does() -> None:
    config = parallel3d.compose("tp=2", "model=llama_tiny", "train.steps=7", world_size=4)
    assert isinstance(config, Config)
    assert (config.tp, config.dp, config.train.steps) == (2, 2, 7)
    assert config.model.activation == "swiglu"
    assert parallel3d.compose().dp == 1


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("tpp=2", "nearest is tp"),
        ("tp=3", "tp=3 must divide"),
        ("tp=1,2", "several values"),
        ("model=gpt_tinny", "nearest is model=gpt_tiny"),
        ("--tp=2", "without dashes"),
    ],
)
def test_a_word_that_cannot_work_is_one_sentence(word: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        parallel3d.compose(word)


def run(folder: Path, script: str, *command: str) -> str:
    """What the script prints, in a folder with a book, with three steps for a hundred."""
    shorter = script.replace('"train.steps=100"', '"train.steps=3"')
    assert shorter != script
    (folder / "small.py").write_text(shorter, encoding="utf-8")
    (folder / "book.txt").write_text(PAGE * 4, encoding="utf-8")
    paths = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        (sys.executable, *command, "small.py"),
        cwd=folder,
        env=os.environ | paths,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_page_trains_the_same_model_on_one_process_and_on_two(tmp_path: Path) -> None:
    """On two with what else the page shows, before the groups are closed."""
    assert len(TRAINS.splitlines()) <= 30
    alone = run(tmp_path, TRAINS)
    assert (tmp_path / "weights.pt").stat().st_size > 1_000_000
    training, closing = TRAINS.split("groups.close()")
    whole = "\n".join((training, OWN_SAMPLES, PROOF, "groups.close()" + closing))
    launched = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    both = run(tmp_path, whole, *launched)
    losses = [
        [float(loss) for loss in re.findall(r"^step \d: loss (.*)$", out, re.MULTILINE)]
        for out in (alone, both)
    ]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    assert "The layout does not change the model." in both
    assert (tmp_path / "verify.json").exists()
