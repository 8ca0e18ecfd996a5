"""Hydra's way from words to a job, once through it where once is enough."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.version import setbase
from omegaconf import DictConfig

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
