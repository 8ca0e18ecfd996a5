"""Tests `parallel3d recipes`, the listed experiments, a user's own folders, and toy defaults."""

from __future__ import annotations

import dataclasses
import functools
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import parallel3d
from parallel3d.cli.command_line import main
from parallel3d.cli.overrides import composed, left_open, presets
from parallel3d.commands.recipes import recipe
from parallel3d.dryrun.keys import DryrunConfig
from parallel3d.errors import UserError
from parallel3d.estimate.memory import peak_stage
from parallel3d.estimate.search import planned
from parallel3d.loop.notices import toy_defaults
from parallel3d.run_config import check_config, conf_dir
from tests.unit.dry_runs import dry_runs

pytestmark = pytest.mark.nightly

DOCS = Path(__file__).parents[3] / "docs"
RECIPES = presets("experiment")
FOLDER = conf_dir() / "experiment"
ON_GPUS = [path.stem for path in sorted(FOLDER.glob("*.yaml")) if "/cluster:" in path.read_text()]
config_of = functools.cache(recipe)  # composing all of them takes seconds
Lines = Callable[[], tuple[list[str], str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Lines:
    """Returns the output since the last call: the lines of stdout, and stderr."""

    def read() -> tuple[list[str], str]:
        out, error = capsys.readouterr()
        return out.splitlines(), error

    return read


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_and_passes_the_checks_for_the_gpus_that_it_names(name: str) -> None:
    named = config_of(name)
    assert bool(named.cluster.gpu) == (name in ON_GPUS)
    gpus = named.tp * named.pp * named.cp * (named.dp or 1)
    assert gpus % (named.cluster.gpus_per_node or 1) == 0
    keys = left_open(name)
    path = "given" if "data.path" in keys else None
    filled = dataclasses.replace(named, data=dataclasses.replace(named.data, path=path))
    assert check_config(filled, gpus).dp == named.dp
    continues = name.endswith(("_sft", "_128k"))
    assert keys == ["init_from"] * continues + ["data.path"] * (name in ON_GPUS)


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_recipe_for_gpus_fits_and_sets_what_a_large_model_needs(name: str) -> None:
    config = config_of(name)
    memory = 1e9 * (config.cluster.gpu_memory_gb or 0) - 1e9 * DryrunConfig().reserve_gb
    if not config.model.num_experts:  # these figures are in the page's rows, which a dry run counts
        assert peak_stage(planned(config))[1].total < memory
    assert toy_defaults(config) is None
    assert config.precision.name == "bf16"
    assert config.optim.lr_warmup_steps or config.optim.lr_warmup_fraction
    decays = config.optim.min_lr > 0 or config.optim.lr_decay_style == "linear"
    assert decays or "init_from" in left_open(name)


def test_the_list_has_a_line_for_each_and_fits_100_columns(
    said: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel3d.commands.recipes.recipe", config_of)
    assert main(["recipes"]) == 0
    lines, _ = said()
    assert [line.split()[0] for line in lines[1 : len(RECIPES) + 1]] == RECIPES
    assert max(map(len, lines)) <= 100
    assert main(["recipes", "list", "--help"]) == 0
    assert said()[0][0].startswith("parallel3d recipes list: list the recipes")
    row = next(line for line in lines if line.startswith("llama3_1_70b "))
    assert "256 (dgx_h100)" in row and "tp=8 pp=4 vpp=5 dp=8 zero=1" in row
    assert "8.39 M" in row and row.endswith("bf16")


def test_a_copy_composes_in_its_folder_and_wins_over_the_packages_own_once_edited(
    tmp_path: Path, said: Lines
) -> None:
    assert main(["recipes", "show", "llama3_1_8b"]) == 0
    original = "\n".join(said()[0]) + "\n"
    assert main(["recipes", "copy", "llama3_1_8b", f"to={tmp_path}"]) == 0
    line = f"next: parallel3d train --config-dir={tmp_path} experiment=llama3_1_8b data.path=…"
    assert said()[0][-1] == line
    copied = tmp_path / "experiment" / "llama3_1_8b.yaml"
    assert copied.read_text() == original == (FOLDER / copied.name).read_text()
    copied.write_text(original.replace("dp: 32", "dp: 16"))
    typed = ["train", f"--config-dir={tmp_path}", "experiment=llama3_1_8b"]
    assert main([*typed, "--cfg", "job"]) == 0
    shown = OmegaConf.create("\n".join(said()[0]))
    assert (shown.dp, shown.model.name, shown.optim.lr) == (16, "llama3_1_8b", 3e-4)
    # the package's recipe again
    assert main(["train", "experiment=llama3_1_8b", "--cfg", "job"]) == 0
    assert OmegaConf.create("\n".join(said()[0])).dp == 32


def test_an_existing_file_is_never_overwritten(tmp_path: Path, said: Lines) -> None:
    mine = tmp_path / "experiment" / "qwen3_8b.yaml"
    mine.parent.mkdir()
    mine.symlink_to(tmp_path / "elsewhere")  # a dangling link counts as well
    assert main(["recipes", "copy", "qwen3_8b", str(tmp_path)]) == 2
    assert f"{mine} already exists and is not overwritten" in said()[1]
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["recipes", "copy", "llama3_8b"], "the nearest is llama3_1_8b"),
        (["recipes", "copi"], "the nearest is copy"),
        (["recipes", "copy"], "needs name=…"),
        (["recipes", "list", "all"], "recipes list has no keys; give it without all"),
        (["train", "--config-dir={}/none"], "is not a folder; give one with experiment/"),
        (["train", "--config-dir={}", "experiment=mne"], "the nearest is experiment=mine"),
        (["train", "--config-dir={}", "experiment=mine"], "=mine leaves run and data.path to you"),
        (["train", "--config-dir={}", "experiment=more"], "=more leaves run and data.path to you"),
        (["train", "--config-dir={}", "experiment=late"], "line must be '# @package _global_'"),
        (["train", "--config-dir={}", "experiment=torn"], "torn.yaml, line 1, must be YAML"),
        (["train", "--config-dir={}", "model=torn"], "torn.yaml, line 2, must be YAML"),
        (["train", "--config-dir={}", "experiment=there"], "must not lead back to the file itself"),
        (["train", "experiment=llama_1b"], "experiment=llama_1b leaves data.path to you: give"),
        (["train", "experiment=llama_1b", "data=blend"], "data.blend"),
        (["train", "--config-dir={}/whole"], "would replace all defaults"),
    ],
)
def test_a_line_that_cannot_work_is_one_sentence(
    tmp_path: Path, said: Lines, words: list[str], sentence: str
) -> None:
    for name, text in (
        (
            "experiment/mine",
            "# @package _global_\nrun: ???\ntp: ???\ndata:\n  name: corpus\n  path: ???",
        ),
        (
            "experiment/late",
            "# Mine.\n# @package _global_\ndefaults: [{override /model: gpt_tiny}, _self_]",
        ),
        ("experiment/more", "# @package _global_\ndefaults: [mine, _self_]\ntp: 2"),
        ("experiment/torn", "data: {path: ???}"),
        ("experiment/there", "# @package _global_\ndefaults: [back, _self_]"),
        ("experiment/back", "# @package _global_\ndefaults: [there, _self_]"),
        ("model/torn", "_target_: [a.B"),
        ("whole/config", "tp: 2"),
    ):
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text + "\n")
    words = [word.replace("{}", str(tmp_path)) for word in words]
    assert main([*words, "tp=1"] if words[0] == "train" else words) == 2
    out, refusal = said()
    assert sentence in refusal and refusal.count("\n") == 1 and not out


def test_the_page_has_each_recipe_for_gpus_and_each_fits() -> None:
    made = runpy.run_path(str(DOCS / "recipes.py"))
    page = (DOCS / "recipes.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if " × NVIDIA" in line]
    assert [row[:3] for row in rows] == [made["counted"](name, config_of(name)) for name in ON_GPUS]
    assert [row[made["HEAD"].index("fits")] for row in rows] == ["yes"] * len(ON_GPUS)
    assert all(f"`{name}`" in page.partition("## Sources")[2] for name in RECIPES)


@pytest.mark.more
def test_a_row_of_the_page_is_what_a_dry_run_gives() -> None:
    made, name = runpy.run_path(str(DOCS / "recipes.py")), "gpt2_124m_sft"
    (facts,) = dry_runs([config_of(name)])
    cells = made["counted"](name, config_of(name)) + made["estimated"](facts)
    assert made["line"](cells) in (DOCS / "recipes.md").read_text("utf-8")


def test_the_files_of_the_page_on_own_configurations_compose_as_it_says(
    tmp_path: Path, said: Lines
) -> None:
    page = (DOCS / "own_configuration.md").read_text("utf-8")
    for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        file = tmp_path / re.findall(r"# mine/(\S+\.yaml)", text)[0]
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    typed = ["train", f"--config-dir={tmp_path}", "experiment=small"]
    assert main(typed) == 2 and "experiment=small leaves run to you" in said()[1]
    assert main([*typed, "run=first", "optim.lr=2e-4", "--cfg", "job"]) == 0
    shown = OmegaConf.create("\n".join(said()[0]))
    assert (shown.optim.lr, shown.dp, shown.precision.name) == (2e-4, 8, "bf16")
    assert (shown.model.num_layers, shown.model.norm, shown.model.vocab_size) == (
        *(24, "rmsnorm"),
        128256,
    )
    assert shown.data.blend == {"corpora/web": 0.8, "s3://ours/corpora/code": 0.2}
    assert (shown.cluster.rail_gb_per_s, shown.cluster.nvlink_gb_per_s) == (25, 450)


@pytest.mark.parametrize(
    ("overrides", "length", "warmup"),
    [
        ([], (None, None, 2), (0.03, 0)),
        (["train.steps=20"], (20, None, None), (0.03, 0)),
        (["train.tokens=1e9", "train.epochs=null"], (None, 1e9, None), (0.03, 0)),
        (["optim.lr_warmup_steps=5"], (None, None, 2), (0.0, 5)),
        (["optim.lr_warmup_steps=0", "train.tokens=null"], (None, None, 2), (0.03, 0)),
    ],
)
def test_length_and_warm_up_on_the_command_line_replace_the_recipes(
    overrides: list[str], length: tuple[object, ...], warmup: tuple[float, int]
) -> None:
    config = composed(["experiment=llama_1b_sft", *overrides])
    assert (config.train.steps, config.train.tokens, config.train.epochs) == length
    assert (config.optim.lr_warmup_fraction, config.optim.lr_warmup_steps) == warmup


OWN_FILES = {
    "circle": ("defaults: [circle, _self_]", "must not lead back to the file itself; give it"),
    "key": ("train: {stepz: 3}", "/key.yaml: train.stepz: train.stepz is not a key of the conf"),
    "value": (
        "dp: four",
        "/value.yaml: dp: Value 'four' of type 'str' could not be converted to Integer: dp must",
    ),
    "section": ("train: 3", "/section.yaml: Merge error: int is not a subclass of TrainConfig"),
    "group": (
        "defaults: [override /modle: gpt_tiny]",
        "/group.yaml: Could not override 'modle'. No match in the defaults list; docs/",
    ),
    "preset": ("defaults: [override /model: gpt_tony]", "the nearest is model=gpt_tiny"),
    "twice": ("defaults: [/model: llama_tiny]", "use 'override model: llama_tiny'"),
    "package": ("", "experiment/package.yaml: its first line must be '# @package _global_'"),
}


@pytest.mark.parametrize("name", OWN_FILES)
def test_errors_in_a_users_file_name_the_file(tmp_path: Path, said: Lines, name: str) -> None:
    text, sentence = OWN_FILES[name]
    (tmp_path / "experiment").mkdir()
    lines = ["# @package _global_", text, "tp: 2"] if text else ["tp: 2"]
    (tmp_path / "experiment" / f"{name}.yaml").write_text("\n".join(lines) + "\n")
    assert main(["train", f"--config-dir={tmp_path}", f"experiment={name}"]) == 2
    refusal = said()[1]
    assert sentence in refusal and refusal.count("\n") == 1


def test_python_refuses_what_a_recipe_leaves_open() -> None:
    with pytest.raises(UserError, match=r"leaves data\.path to you: give data\.path=… \("):
        parallel3d.compose("experiment=qwen3_8b")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["model=llama3_1_8b"],
            "precision=fp32, optim.lr=0.001, optim.lr_warmup_steps=0, global_batch_size=16, "
            "data=stdlib (read as bytes)",
        ),
        (
            ["model=gpt2_124m", "optim.lr=6e-4", "global_batch_size=512"],
            "precision=fp32, optim.lr_warmup_steps=0, data=stdlib (read as bytes)",
        ),
        (
            ["model=gpt2_124m", "optim.lr_warmup_fraction=0.1", "data.tokenizer=gpt2.json"],
            "precision=fp32, optim.lr=0.001, global_batch_size=16",
        ),
        (["model=gpt2_124m", "precision=bf16", "optim.lr=6e-4"], "data=stdlib (read as bytes)"),
        (["experiment=megatron_345m", "data.tokenizer=gpt2.json"], ""),
        (["model=gpt_tiny"], ""),
        (["model=llama_tiny", "model.vocab_size=320"], ""),
        (["model.vocab_size=128256"], "data=stdlib (read as bytes)"),
    ],
)
def test_a_large_model_reports_each_default_of_the_small_one(
    overrides: list[str], told: str
) -> None:
    sentence = toy_defaults(composed(overrides))
    if not told:
        assert sentence is None
        return
    assert sentence is not None and "\n" not in sentence
    middle = sentence.partition("a model of 859 k: ")[2].partition("; parallel3d recipes")[0]
    assert middle == told
