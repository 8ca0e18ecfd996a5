"""Tests how a start names a model of the user's own, and the messages for bad ones."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import parallel3d as p3d
from parallel3d.checkpoint.identity import changes, of_all_ranks, refusal
from parallel3d.cli.command_line import main
from parallel3d.cli.continued import continued, given_by
from parallel3d.cli.overrides import check_overrides, compose_tree, composed, config_of
from parallel3d.cli.own_model import completed, imported, of_script, own_model_of, schema_of
from parallel3d.errors import UserError
from parallel3d.models.survey import OwnModelConfig, survey_of
from parallel3d.run.directory import read_config, save_config
from parallel3d.run_config import Config, check_config, saved_tree

MODULE = "models_of_a_user"
TARGET = f"model._target_={MODULE}.Chain"
CODE = '''
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Literal
import parallel3d as p3d
from torch import nn

imports = open("imported.txt", "a").write("once\\n")

@dataclass
class Chain(p3d.Model):
    """A chain of layers."""
    hidden: int = 8
    num_layers: int = 2
    seq_length: int = 16
    vocab_size: int = 257
    rate: float | None = None
    kind: Literal["short", "long"] = "short"
    sizes: tuple[int, ...] = (1, 2)
    names: list[str] = field(default_factory=list)
    bias: bool = True
    label: str = "plain"

    def __post_init__(self):
        if self.hidden == 13:
            raise ValueError("13 is no width")
        assert isinstance(self.sizes, tuple)

    def embedding(self, parallel):
        return nn.Embedding(self.vocab_size, self.hidden)

    def block(self, number, parallel):
        return nn.Linear(self.hidden, self.hidden, bias=self.bias)

    def head(self, parallel):
        return nn.Linear(self.hidden, self.vocab_size)

    def loss(self, outputs, inputs):
        return p3d.Loss(outputs.sum(), 1)

@dataclass
class Wide(Chain):
    width: int = field(kw_only=True)

class ByHand(p3d.Model):
    def __init__(self, hidden: int, num_layers: int = 1, *, scale=1.0):
        self.hidden, self.num_layers, self.scale = hidden, num_layers, scale
    embedding, block, head, loss = Chain.embedding, Chain.block, Chain.head, Chain.loss
    vocab_size, bias = 5, True

class WithoutLoss(Chain):
    loss = p3d.Model.loss

class WithoutHead(Chain):
    head = p3d.Model.head

class WithoutBlock(Chain):
    block = p3d.Model.block

class Fails(p3d.Model):
    def __init__(self, num_layers: int = 1):
        self.num_layers = num_layers
    def embedding(self, parallel):
        raise RuntimeError("no embedding today")

class NoModule(Fails):
    def embedding(self, parallel):
        return 3

class Untyped(p3d.Model):
    def __init__(self, hidden):
        pass

class OfDicts(p3d.Model):
    def __init__(self, hidden: dict[str, int]):
        pass

class Misspelled(p3d.Model):
    def __init__(self, hidden: Integer):
        pass

class Other:
    pass

class OfOthers(p3d.Model):
    def __init__(self, others: list[Other]):
        pass

number = 3
'''
EXITS = "import sys\nsys.exit(3)\n"
RAISES = "def far():\n    raise KeyError('weights')\nfar()\n"
WITHIN = "import torch\ntorch._refs.add(torch.ones(2), torch.ones(3))\n"
BROKEN = "class Chain(\n"
STARTS = "import parallel3d as p3d\np3d.fit(arguments=[])\n"
MODULES = {
    MODULE: CODE,
    "exits": EXITS,
    "raises": RAISES,
    "within": WITHIN,
    "broken": BROKEN,
    "starts": STARTS,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes modules of a user in the current folder, from which nothing stays imported."""
    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "needs_more.py").write_text("import there_is_no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in (*MODULES, "needs_more"):
        sys.modules.pop(name, None)


def own(config: Config) -> OwnModelConfig:
    assert isinstance(config.model, OwnModelConfig)
    return config.model


# Words that are refused before Hydra composes, and values that are refused later.
BAD = [
    (["model._target_=Chain"], "model._target_=Chain must be the name of a class with its module"),
    (["model._target_="], "must be the name of a class with its module"),
    (["model._target_=null"], "must be the name of a class with its module"),
    ([f"model._target_={MODULE}.chain"], f"has no chain; the nearest is {TARGET}"),
    ([f"model._target_={MODULE[:-1]}.Chain"], f"there is no module {MODULE[:-1]} in the current"),
    ([f"model._target_={MODULE[:-1]}.Chain"], f"the nearest is {MODULE}"),
    ([f"model._target_={MODULE}.sub.Chain"], f"there is no module {MODULE}.sub"),
    ([f"model._target_={MODULE}.Other"], "must be a class of p3d.Model, but is the class Other"),
    ([f"model._target_={MODULE}.WithoutLoss"], "has no loss: write loss(self, outputs, inputs), w"),
    (
        [f"model._target_={MODULE}.WithoutHead"],
        "WithoutHead has no head: write head(self, parallel)",
    ),
    (
        [f"model._target_={MODULE}.WithoutBlock"],
        "has no block: write block(self, number, parallel)",
    ),
    ([f"model._target_={MODULE}.number"], "must be a class of p3d.Model, but is a int"),
    (["model._target_=parallel3d.Model"], "must be a class of p3d.Model, but is the class Model"),
    (["model._target_=exits.Chain"], "importing exits ends the process (SystemExit: 3)"),
    (
        ["model._target_=raises.Chain"],
        "importing raises raises KeyError: 'weights' (raises.py, line 2)",
    ),
    # an error that torch raises is placed at the line that called torch
    (["model._target_=within.Chain"], "raises RuntimeError: Attempting to broadcast"),
    (["model._target_=within.Chain"], "(within.py, line 2)"),
    (["model._target_=starts.Chain"], "imports a script that calls fit: put the call below if"),
    (["model._target_=broken.Chain"], "importing broken raises SyntaxError"),
    (["model._target_=needs_more.Chain"], "ModuleNotFoundError: No module named 'there_is_no"),
    (
        [TARGET, "model.hiden=3"],
        "model.hiden=3: Chain has no field hiden; it has hidden, num_layers",
    ),
    ([TARGET, "model.hiden=3"], "the nearest is model.hidden"),
    ([TARGET, "model.hidden_size=3"], "Chain has no field hidden_size"),
    ([TARGET, "model.fields={hidden:3}"], "Chain has no field fields"),
    ([TARGET, "model=llama_tiny"], "model=llama_tiny chooses a preset of the transformer"),
    ([TARGET, "experiment=llama_3d"], "experiment=llama_3d chooses a preset of the transformer"),
    ([f"model={{_target_:{MODULE}.Chain}}"], "must be one of"),
    ([f"+{TARGET}"], "can be neither added nor deleted"),
    ([f"model._target_={MODULE}.Untyped"], "the field hidden has no type"),
    ([f"model._target_={MODULE}.OfDicts"], "the field hidden has the type dict"),
    ([f"model._target_={MODULE}.OfOthers"], "the field others has the type list"),
    (
        [f"model._target_={MODULE}.Misspelled"],
        "its fields cannot be read: NameError: name 'Integer' is not defined",
    ),
]
BAD_VALUES = [
    ([TARGET, "model.hidden=1.5"], "model.hidden=1.5: model.hidden must be a whole number"),
    ([TARGET, "model.hidden=null"], "model.hidden must be a whole number"),
    ([TARGET, "model.rate=x"], "model.rate must be null or a number"),
    ([TARGET, "model.bias=3.5"], "model.bias must be true or false"),
    ([TARGET, "model.sizes=3"], "model.sizes must be a list of whole numbers"),
    ([TARGET, "model.sizes=[a]"], "model.sizes must be a list of whole numbers"),
    ([TARGET, "model.kind=shrt"], "model.kind=shrt must be one of short, long; the nearest is"),
    ([TARGET, "model.num_layers=0"], "model.num_layers=0 must be a whole number of at least 1"),
    ([TARGET, "model.hidden=13"], "raises ValueError: 13 is no width"),
    ([f"model._target_={MODULE}.Wide"], "leaves model.width to you: give model.width=… (a whole"),
    ([f"model._target_={MODULE}.Wide", "model.width=a"], "model.width must be a whole number."),
    ([f"model._target_={MODULE}.Fails"], "building the parts of Fails raises RuntimeError: no emb"),
    ([f"model._target_={MODULE}.NoModule"], "embedding must return an nn.Module, but returned int"),
    (["model.fields={hidden:3}"], "give fields as model.NAME=VALUE."),
]


@pytest.mark.parametrize(("words", "said"), BAD)
def test_a_bad_class_or_name_is_refused_in_a_sentence(words: list[str], said: str) -> None:
    check_refusal(words, said)


@pytest.mark.nightly
@pytest.mark.parametrize(("words", "said"), BAD_VALUES)
def test_a_bad_value_is_refused_in_a_sentence(words: list[str], said: str) -> None:
    check_refusal(words, said)


def check_refusal(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as refused:
        check_config(composed(words))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ([TARGET], {}),
        ([TARGET, "model.hidden=32", "tp=2"], {"hidden": 32}),
        ([TARGET, "model.rate=1e-5"], {"rate": 1e-5}),
        ([TARGET, "model.kind=long", "model.label=0123"], {"kind": "long", "label": "0123"}),
        ([TARGET, "model.sizes=[3]", "model.names=[a,b]"], {"sizes": [3], "names": ["a", "b"]}),
        (["model.hidden=4", TARGET, "model.hidden=5"], {"hidden": 5}),
    ],
)
def test_fields_are_keys(words: list[str], fields: dict[str, Any]) -> None:
    model = own(check_config(composed(words)))
    usual = {"hidden": 8, "num_layers": 2, "seq_length": 16, "vocab_size": 257, "rate": None}
    usual |= {"kind": "short", "sizes": [1, 2], "names": [], "bias": True, "label": "plain"}
    assert model.fields == usual | fields
    assert (model.name, model.num_layers, model.seq_length) == ("Chain", 2, 16)
    assert {n: getattr(model.instance, n) for n in fields} == {
        n: tuple(v) if n == "sizes" else v for n, v in fields.items()
    }


@pytest.mark.nightly
def test_the_parameters_of_a_constructor_are_fields() -> None:
    model = own(composed([f"model._target_={MODULE}.ByHand", "model.hidden=3", "model.scale=2"]))
    assert model.fields == {"hidden": 3, "num_layers": 1, "scale": 2.0}


def _preset(folder: Path, name: str, text: str) -> None:
    path = folder / "mine" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["train", *words, "--cfg", "job"]) == 0
    return yaml.safe_load(capsys.readouterr().out)["model"]


@pytest.mark.slow
def test_files_of_the_user_name_the_class(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _preset(folder, "model/chain.yaml", f"_target_: {MODULE}.Chain\nhidden: 12\nrate: 1e-3\n")
    _preset(folder, "model/longer.yaml", "defaults: [chain]\nnum_layers: 7\n")
    experiment = "# @package _global_\ndefaults: [override /optim: sgd, override /model: longer]\n"
    experiment += "model: {hidden: 9}\n"
    _preset(folder, "experiment/mine.yaml", experiment)
    shown = _shown(["--config-dir", "mine", "model=chain"], capsys)
    assert (shown["_target_"], shown["hidden"], shown["rate"]) == (f"{MODULE}.Chain", 12, 1e-3)
    shown = _shown(["--config-dir=mine", "experiment=mine", "model.bias=false"], capsys)
    assert (shown["hidden"], shown["num_layers"], shown["bias"]) == (9, 7, False)
    _preset(folder, "model/bad.yaml", f"_target_: {MODULE}.Chain\nhiden: 12\n")
    assert main(["train", "--config-dir=mine", "model=bad"]) == 2
    said = capsys.readouterr().err
    assert "model.hiden" in said
    assert "nearest is model.hidden" in said


def test_help_lists_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TARGET, "--help"]) == 0
    said = capsys.readouterr().out
    assert "model.hidden=8" in said
    assert "model.hidden_size" not in said


@pytest.mark.slow
def test_a_run_of_the_transformer_imports_no_model_of_a_user(folder: Path) -> None:
    composed(["model=llama_tiny"])
    assert not (folder / "imported.txt").exists()


# Scripts


def _chain() -> Any:
    return imported(f"{MODULE}.Chain").cls


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (lambda cls: cls, {}),
        (lambda cls: functools.partial(cls, 6, label="x"), {"hidden": 6, "label": "x"}),
        (lambda cls: cls(hidden=6, sizes=(4,)), {"hidden": 6, "sizes": [4]}),
    ],
)
def test_typed_fields_replace_those_of_a_script(
    given: Any, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model, usual = given(_chain()), {"hidden": 8, "label": "plain", "sizes": [1, 2]}
    p3d.fit(["model.num_layers=3"], model=model, arguments=["model.label=typed", "--cfg", "job"])
    shown = yaml.safe_load(capsys.readouterr().out)["model"]
    assert shown["_target_"] == f"{MODULE}.Chain"
    wanted = usual | fields | {"label": "typed", "num_layers": 3}
    assert {name: shown[name] for name in wanted} == wanted


BAD_SCRIPTS = [
    (lambda cls: 3, "fit(model=int) must be a class of p3d.Model"),
    (lambda cls: len, "must be a class of p3d.Model"),
    (lambda cls: p3d.Model, "but is the class Model"),
    (lambda cls: functools.partial(cls, hiden=3), "unexpected keyword argument 'hiden'; fields of"),
    (lambda cls: functools.partial(cls, hidden="x"), "model.hidden=x must be a whole number"),
    (lambda cls: cls(hidden=2.5), "model.hidden=2.5 must be a whole number"),
    (
        lambda cls: sys.modules[cls.__module__].Untyped(3),
        "a Untyped has no attribute hidden, where this field's value would be; make Untyped a data",
    ),
]


@pytest.mark.parametrize(("given", "said"), BAD_SCRIPTS)
def test_a_bad_model_of_a_script_is_refused(given: Any, said: str) -> None:
    with pytest.raises(UserError) as refused:
        of_script(given(_chain()))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (3, "fit(loss=int) must be a function of (outputs, inputs) that returns p3d.Loss"),
        (lambda outputs: outputs, "fit(loss=<lambda>) must be a function of (outputs, inputs)"),
        (p3d.Loss, "fit(loss=Loss) must be a function of"),
    ],
)
def test_a_bad_loss_of_a_script_is_refused(loss: Any, said: str) -> None:
    with pytest.raises(UserError) as refused:
        of_script(_chain(), loss)
    assert said in str(refused.value)


@pytest.mark.slow
def test_a_loss_of_a_script_is_that_of_the_model() -> None:
    def loss(outputs: Any, inputs: Any) -> None:
        raise NotImplementedError

    script = of_script(imported(f"{MODULE}.WithoutLoss").cls, loss)
    schema, preset = schema_of(Config, [], None, script)
    config = completed(config_of(compose_tree(preset, schema=schema)), schema)
    assert own(config).instance.loss is loss


def test_a_loss_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        p3d.fit(loss=lambda outputs, inputs: None, arguments=[])  # type: ignore[arg-type, return-value]
    assert ended.value.code == 2
    assert "fit(loss=…) needs fit(model=…) beside it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model._target_=other.Chain"], "has no effect beside the model that the script gives"),
        (["model=llama_tiny"], "model=llama_tiny chooses a preset of the transformer"),
        (["model.hiden=3"], "Chain has no field hiden"),
        (["model.hidden=13"], "13 is no width"),
    ],
)
def test_words_beside_the_model_of_a_script(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        p3d.fit(["train.steps=1"], model=_chain(), arguments=words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# Runs


@pytest.mark.slow
def test_a_run_saves_the_class_and_its_fields(folder: Path) -> None:
    config = composed([TARGET, "model.rate=1e-5", "model.label='1e-3'", "model.names=[on,1]"])
    save_config(config, folder)
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    assert tree["model"] == {"_target_": f"{MODULE}.Chain", **own(config).fields}
    (folder / "imported.txt").unlink()
    sys.modules.pop(MODULE)
    read = read_config(folder / "config.yaml")
    assert not (folder / "imported.txt").exists()
    assert saved_tree(read) == saved_tree(config)
    assert own(read).instance is None
    with pytest.raises(UserError, match=f"give {TARGET}"):
        survey_of(read.model)
    assert "_target_" not in saved_tree(Config())["model"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ([TARGET], [TARGET, "model.hidden=9"], "model.hidden is 8 there, now 9"),
        ([TARGET], [f"model._target_={MODULE}.Wide", "model.width=1"], f"now {MODULE}.Wide"),
        ([TARGET], ["model=llama_tiny"], "there, now null"),
        (["model=llama_tiny"], [TARGET], f"model._target_ is null there, now {MODULE}.Chain"),
        ([TARGET, "model.bias=false"], [TARGET], "model.bias is false there, now true"),
        ([TARGET], [TARGET, "tp=2", "optim.lr=0.1"], None),
    ],
)
def test_a_resumed_run_keeps_its_model(there: list[str], here: list[str], said: str | None) -> None:
    old, new = json.loads(json.dumps(saved_tree(composed(there)))), composed(here)
    found = refusal("r", changes(old, new))
    assert (found is None) if said is None else said in str(found)
    assert str(found).count("model.") <= 1


def _resumed(there: list[str], words: list[str]) -> tuple[Config, str | None]:
    schema, preset = schema_of(Config, words, None, None)
    kept = check_overrides(words, schema=schema)
    config = config_of(compose_tree([*kept, *preset], schema=schema))
    given = given_by(words, None, own_model_of(schema))
    return continued(config, composed(there), given, None)


@pytest.mark.nightly
def test_fields_that_are_not_given_are_those_of_the_last_start() -> None:
    config, line = _resumed([TARGET, "model.hidden=5", "tp=2"], [TARGET, "model.bias=false"])
    assert (own(config).fields["hidden"], own(config).fields["bias"]) == (5, False)
    assert line is not None
    assert "model.hidden=5" in line
    config, _ = _resumed(
        [f"model._target_={MODULE}.Wide", "model.width=3"], [f"model._target_={MODULE}.Wide"]
    )
    assert own(config).fields["width"] == 3


@pytest.mark.slow
def test_the_class_of_a_run_is_only_imported_where_a_start_names_it() -> None:
    with pytest.raises(UserError, match=f"give {TARGET}"):
        _resumed([TARGET], ["train.steps=3"])


@pytest.mark.nightly
def test_ranks_compare_classes_and_fields() -> None:
    keys = of_all_ranks(composed([TARGET, "model.hidden=5"]))
    assert (keys["model._target_"], keys["model.hidden"]) == (f"{MODULE}.Chain", 5)
    assert "model.hidden_size" not in keys
