"""Makes the templates for the faults of whole commands, and the results of undisturbed commands."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.failures.command_cases import (
    KILLED_AFTER,
    RUN,
    Case,
    Stage,
    cases,
    kill_after,
    train_words,
)
from benchmarks.failures.command_checks import (
    FINAL,
    METRICS,
    TRACEBACK,
    Reference,
    curve_of,
    digest,
    given_again,
    silent,
    whole_ones,
)
from parallel3d.cli import command_line
from parallel3d.run import directory
from parallel3d.run.directory import last_config
from parallel3d.run_config import Config
from tests.tools.failing_files import Point


def remembered(typed: Callable[[Mapping[str, Any]], Config]) -> Callable[..., Config]:
    """Caches the conversion of a configuration's tree, in which OmegaConf spends a third of a
    command's time."""
    known: dict[str, Config] = {}

    def remembering(tree: Mapping[str, Any]) -> Config:
        text = json.dumps(tree)
        if text not in known:
            known[text] = typed(tree)
        return copy.deepcopy(known[text])

    return remembering


@dataclass
class World:
    """Templates, scenarios and expected results."""

    home: Path
    only: tuple[str, ...] = ()  # scenarios to use; none: all
    reference: Reference = field(default_factory=Reference)
    found: dict[str, list[Point]] = field(default_factory=dict)  # scenario → its calls

    def __post_init__(self) -> None:
        torch.set_num_threads(1)  # a pool of threads would not exist in forked processes
        self.home = Path(os.path.realpath(self.home))
        book = self.home / "book.txt"
        book.write_text("".join(f"{n} bottles of beer on the wall.\n" for n in range(300)))
        self.cases = {n: c for n, c in cases(str(book)).items() if n in self.only or not self.only}
        self._make_templates(book)
        directory.typed_config = remembered(directory.typed_config)
        stage = self.stage("counting")
        for name, case in self.cases.items():
            self.lay(stage, case)
            usual = stage.give(case)
            assert usual.code == 0 and TRACEBACK not in usual.err, (name, usual)
            self.reference.outs[name], self.reference.errs[name] = usual.out, usual.err
            wrong = [*silent(case, name, stage.folder, usual, self.reference)]
            wrong += [*given_again(case, name, stage, self.reference)]
            assert not wrong, (name, wrong)
            self.found[name] = usual.points
            if case.trains:
                last_config(stage.folder / RUN)  # forked processes inherit this
        gc.freeze()  # so that forked processes only collect their own objects

    def _make_templates(self, book: Path) -> None:
        plain = Case(train_words(str(book)), "empty")
        (self.template("empty")).mkdir(parents=True)
        (self.template("text")).mkdir()
        shutil.copy(book, self.template("text"))
        stage = self.stage("making")
        self.lay(stage, plain)
        with contextlib.chdir(stage.folder), contextlib.redirect_stdout(io.StringIO()):
            # Each command runs in this process first, so that forked processes need no imports.
            assert command_line.main(plain.words) == 0
        run_dir = stage.folder / RUN
        self.reference.weights = digest(run_dir / FINAL)
        self.reference.curve = curve_of(run_dir / METRICS)
        stage.folder.rename(self.template("finished"))
        self.template("cache").mkdir()
        shutil.copytree(self.template("finished") / "cache", self.template("cache") / "cache")
        dying = replace(stage, before=kill_after(KILLED_AFTER))
        self.lay(dying, plain)
        dying.give(plain)
        stage.folder.rename(self.template("killed"))
        assert len(whole_ones(self.template("killed") / RUN)) == 2

    def template(self, name: str) -> Path:
        return self.home / "templates" / name

    def stage(self, name: str) -> Stage:
        home = self.home / name
        home.mkdir(exist_ok=True)
        return Stage(home)

    def lay(self, stage: Stage, case: Case) -> None:
        stage.lay(self.template(case.template))
        case.prepare(stage.folder)
