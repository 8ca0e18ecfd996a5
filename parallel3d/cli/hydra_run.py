"""Hydra's way from words to a job, once through it where once is enough."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.version import setbase
from omegaconf import DictConfig, OmegaConf

from parallel3d.config.fields import unknown_key
from parallel3d.errors import UserError

VERSION = "1.3"  # whose defaults Hydra has
NAME = "config"


def run(job: Callable[[DictConfig], None], words: Sequence[str], conf: Path) -> None:
    """Composes `words`, which are those of `sys.argv` too, over `conf` and runs `job` on it.

    `@hydra.main` composes everything a first time to see whether `hydra.mode` asks for a sweep, a
    tenth of a second before each single job. Words that neither are for Hydra itself nor may be a
    sweep's values go without: then what was composed for the job says whether it is one.
    """
    if not any(map(_is_hydras, words)) and _ran_single(job, words, conf):
        return
    hydra.main(version_base=VERSION, config_path=str(conf), config_name=NAME)(job)()


def check_shown(words: Sequence[str], conf: Path) -> None:
    """Raises UserError where `--cfg` or `--info` would print keys that a run refuses.

    Hydra prints what it has composed and calls no job, which is what knows the keys: `+new.key=1`
    makes one of any name. Values are not looked at, for one may wait for a sweep to give it.
    """
    asked = get_args_parser().parse_args(words)
    if asked.cfg is None and asked.info not in ("all", "config"):
        return
    setbase(VERSION)
    search_path = create_automatic_config_search_path(None, None, str(conf))
    if asked.config_dir is not None:
        folder, schema = f"file://{Path(asked.config_dir).absolute()}", SearchPathQuery("schema")
        search_path.prepend("command-line", folder, schema)
    try:
        hydra = Hydra.create_main_hydra2(NAME, search_path)
        composed = hydra.compose_config(asked.config_name or NAME, asked.overrides, RunMode.RUN)
        HydraConfig.instance().set_config(composed)  # which `${hydra:…}` reads
        _check_keys(hydra.get_sanitized_cfg(composed, "job"), "")
    finally:
        GlobalHydra.instance().clear()


def _check_keys(section: DictConfig, prefix: str) -> None:
    """Raises UserError for the key that `config.fields.check_fields` would name of a run."""
    type = OmegaConf.get_type(section)
    if not dataclasses.is_dataclass(type):
        return
    known = {f.name for f in dataclasses.fields(type)}
    for name in map(str, section):
        if name not in known:
            value = section[name]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            raise UserError(unknown_key(prefix + name, value))
    for name in known:
        inside = None if OmegaConf.is_missing(section, name) else section._get_node(name)
        if isinstance(inside, DictConfig) and not inside._is_none():
            _check_keys(inside, f"{prefix}{name}.")


def _is_hydras(word: str) -> bool:
    """Whether a word may be Hydra's: a flag, one of its keys, several values, as 1,2 or range()."""
    return word.startswith("-") or "hydra" in word or bool(set(",(") & set(word))


def _ran_single(job: Callable[[DictConfig], None], words: Sequence[str], conf: Path) -> bool:
    """False, and nothing was run, where a file of `conf` says that it is a sweep."""
    begun, collects = False, gc.isenabled()

    def told(composed: DictConfig) -> None:
        nonlocal begun
        begun = True
        if collects:
            gc.enable()
        job(composed)

    gc.disable()  # composing makes little garbage, and takes a fifth longer if one looks for it
    setbase(VERSION)
    search_path = create_automatic_config_search_path(None, None, str(conf))
    try:
        Hydra.create_main_hydra2(job.__module__, search_path).run(NAME, told, list(words))
    except AssertionError:  # that hydra.mode is a single run's
        if begun:
            raise
        return False
    finally:
        if collects:
            gc.enable()
        GlobalHydra.instance().clear()
    return True
