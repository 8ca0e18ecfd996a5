"""Judges the command line's answer to a configuration: accepted, refused in a sentence, or a bug.

A bug is an exception that is not a UserError, more than two seconds, or a sentence that names no
key, does not say what to do, or has control characters for a terminal.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from benchmarks.inputs.fuzz_words import Drawn
from parallel3d.cli import command_line, hydra_run
from parallel3d.cli.overrides import composing_error, config_of, groups, presets, register
from parallel3d.config.fields import all_keys, sections_of
from parallel3d.errors import UserError, readable
from parallel3d.run.failure import full_stop
from parallel3d.run_config import Config, check_config, conf_dir

SECONDS = 2.0
LONGEST = 2000  # maximum number of characters of a sentence
SAYS_WHAT_TO_DO = re.compile(
    "must|nearest|the default is|of the form|what fits|an even split|docs/configuration|give |set "
    "|instead|works|there are|lists"
)
TAKEN, REFUSED, BUG = "taken", "refused", "bug"


class TooLong(BaseException):
    """Raised for more CPU time than an answer may take. It is not an Exception, which other code
    might catch."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one configuration; `text` is the sentence, or a description of the bug."""

    kind: str
    text: str = ""
    config: Config | None = None


class Composer:
    """Composes overrides like `hydra.main`, with a base for each choice of presets made once.

    Composing the presets takes most of Hydra's time and is the same for most configurations. A base
    is kept pickled: unpickling takes a third of a deep copy's time.
    """

    def __init__(self) -> None:
        register()
        self._parser = OverridesParser.create()
        self._bases: dict[tuple[str, ...], bytes] = {}

    def __call__(self, words: Sequence[str]) -> DictConfig:
        ordered, *_ = hydra_run.order_arguments([hydra_run.without_alias(word) for word in words])
        chosen = tuple(word for word in ordered if _is_of_groups(word))
        if not all(_is_a_choice(word) for word in chosen):
            return _composed(ordered)
        if chosen not in self._bases:
            self._bases[chosen] = pickle.dumps(_composed(chosen))
        made = pickle.loads(self._bases[chosen])
        OmegaConf.set_struct(made, True)
        overrides = self._parser.parse_overrides([word for word in ordered if word not in chosen])
        ConfigLoaderImpl.validate_sweep_overrides_legal(overrides, RunMode.RUN, from_shell=True)
        ConfigLoaderImpl._apply_overrides_to_config(overrides, made)
        return made


def _composed(words: Sequence[str]) -> DictConfig:
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(words))


def _is_a_choice(word: str) -> bool:
    """Returns whether a word is `group=preset`, both of which exist."""
    name, _, value = word.partition("=")
    return name in groups() and value in presets(name)


def _is_of_groups(word: str) -> bool:
    """Returns whether an override may be about presets, or about Hydra itself."""
    name = word.partition("=")[0].lstrip("+~/").partition("@")[0].strip()
    return name in groups() or name.startswith(("hydra", "schema", "_self_", "defaults"))


def outcome(drawn: Drawn, compose_words: Callable[[Sequence[str]], DictConfig]) -> Outcome:
    """Composes and checks one configuration, like the beginning of `parallel3d train`."""

    def checked() -> Outcome:
        try:
            config = config_of(compose_words(drawn.words))
        except Exception as error:
            raise composing_error(error, drawn.words) from None
        return Outcome(TAKEN, config=check_config(config, drawn.world_size))

    return judged(checked, drawn.words)


def outcome_by_hand(values: dict[str, Any], world_size: Any) -> Outcome:
    """Checks a `Config` with these values by key, like a user of the library."""

    def checked() -> Outcome:
        made = Config()
        for name, value in values.items():
            section, _, leaf = name.rpartition(".")
            setattr(functools.reduce(getattr, filter(None, section.split(".")), made), leaf, value)
        return Outcome(TAKEN, config=check_config(made, world_size))

    return judged(checked, tuple(values))


def outcome_of_command(drawn: Drawn, cwd: Path) -> Outcome:
    """Returns the output of `parallel3d train WORDS`, typed in `cwd`, before it makes a run
    directory."""

    class Accepted(BaseException):
        """Raised when the run directory would be made."""

    def accepted(*_: object, **__: object) -> NoReturn:
        raise Accepted

    said = io.StringIO()

    def answer() -> Outcome:
        with (
            mock.patch.object(command_line, "make_run_directory", accepted),
            # launch.timeout_s=1e-8 would end this process, as a file server that is gone would.
            mock.patch.object(command_line, "_time_limit", lambda *_: contextlib.nullcontext()),
            mock.patch.object(sys, "argv", list(sys.argv)),
            contextlib.chdir(cwd),
            contextlib.redirect_stderr(said),
        ):
            try:
                code = command_line.main(["train", *drawn.words])
            except Accepted:
                return Outcome(TAKEN)
        if code == 2:
            raise UserError(said.getvalue().removeprefix("parallel3d: ").removesuffix("\n"))
        return Outcome(BUG, f"ended with code {code}: {said.getvalue()[:LONGEST]!a}")

    return judged(answer, drawn.words)


def judged(answer: Callable[[], Outcome], words: Sequence[str]) -> Outcome:
    """Returns `answer()`, or the refusal that it raises; a bug if it ends in any other way or too
    late."""
    try:
        with _at_most(SECONDS):
            return answer()
    except UserError as refusal:
        sentence = readable(full_stop(str(refusal)))
        wrong = fault(sentence, words)
        return (
            Outcome(BUG, f"{wrong}: {sentence[:LONGEST]!a}")
            if wrong
            else Outcome(REFUSED, sentence)
        )
    except TooLong:
        return Outcome(BUG, f"takes more than {SECONDS:g} s")
    except Exception as error:  # any error is of interest here
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/parallel3d/" in frame.filename] or frames
        at = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        return Outcome(BUG, f"{type(error).__name__} at {at}: {str(error)[:200]!a}")


def fault(sentence: str, words: Sequence[str]) -> str | None:
    """Returns a fault of a refusal, or None."""
    if not sentence.isprintable():
        return "it contains control characters or several lines"
    if len(sentence) > LONGEST:
        return f"has {len(sentence)} characters"
    if sentence.startswith("The configuration cannot be read"):
        return "it is Hydra's sentence, not ours"
    names = {name for key in all_keys(Config) for name in (key, key.rpartition(".")[2])}
    names |= {
        *sections_of(Config),
        *groups(),
        "world size",
        "KEY=VALUE",
        "configuration.md",
        "group of presets",
    }
    if not any(name in sentence for name in names):
        return "names no key"
    if not SAYS_WHAT_TO_DO.search(sentence):
        return "it does not say what is allowed"
    return None


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises TooLong after this many seconds of this process's CPU time."""

    def raise_it(*_: object) -> NoReturn:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, raise_it)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
