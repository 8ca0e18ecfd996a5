"""Parses commands with verbs, such as `parallel3d checkpoint VERB key=value …`.

Neither Hydra nor torch is imported, so that help and error messages appear at once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import dedent

from parallel3d.checkpoint.manifest import reason
from parallel3d.config.fields import all_keys, nearest_key, show
from parallel3d.config.paths import at_home, check_path
from parallel3d.errors import UserError, nearest, nearest_hint, print_line
from parallel3d.files import plain
from parallel3d.run_config import Config

HELP = frozenset(("-h", "--help"))


@dataclass(frozen=True)
class Verb:
    """Describes a verb of a command, such as `ls` in `parallel3d checkpoint ls`.

    Attributes:
        about: the verb's description.
        keys: the verb's keys and their help texts.
        needs: the required keys.
        examples: command lines, one per line.
        names: the keys whose values may be given by position, without KEY=.
        free: whether overrides of the configuration are also accepted.
        paths: the keys whose values are paths, in which `~` is expanded.
    """

    about: str
    keys: Mapping[str, str]
    needs: tuple[str, ...]
    examples: str
    names: tuple[str, ...] = ()
    free: bool = False
    paths: tuple[str, ...] = ()


def run_verb(
    command: str,
    verbs: Mapping[str, Verb],
    argv: Sequence[str],
    run: Callable[[str, dict[str, str], list[str]], int],
) -> int:
    """Parses `argv` and calls `run` with the verb, its keys and the overrides.

    Returns the exit code, or prints help if `argv` asks for it. Raises UserError for invalid
    arguments, and for errors of the operating system.
    """
    if not argv or argv[0] in ("help", *HELP):
        print(_overview(command, verbs))
        return 0
    name = argv[0]
    if name not in verbs:
        hint = nearest_hint(name.lstrip("-"), verbs)
        raise UserError(
            f"{command} {name}: {name} is not a verb; it must be one of {', '.join(verbs)}{hint}"
        )
    if HELP & set(argv[1:]):
        print(verb_help(f"{command} {name}", verbs[name]))
        return 0
    given, overrides = parse(f"{command} {name}", verbs[name], argv[1:])
    with refusing(f"{command} {name}"):
        return run(name, given, overrides)


def parse(command: str, verb: Verb, argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the verb's own keys with their values, and the overrides of the configuration.

    `command` is the command with its verb, such as "checkpoint ls". Raises UserError for a key that
    is unknown or missing, and for a name that is given twice.
    """
    given: dict[str, str] = {}
    overrides = []
    left = list(verb.names)
    for arg in argv:
        if not verb.keys and not verb.free:
            raise UserError(f"{command} has no keys; give it without {show(arg)}")
        key, equals, value = arg.partition("=")
        if not equals and left and not arg.startswith("-"):
            key, value = left[0], arg
        elif not equals or not key:
            example = f"{next(iter(verb.keys))}={arg.lstrip('-=')}"
            raise UserError(
                f"{command}: {arg} is not of the form KEY=VALUE; the nearest is {example}"
            )
        if given.get(key, value) != value:
            both = f"{command}: {key} is given twice, as {given[key]} and as {value}"
            if key in ("run", *verb.names):
                raise UserError(f"{both}; leave one of them out")
            print_line(f"{both}, which counts")
        if key in verb.keys:
            if not value:
                raise UserError(f"{command}: {key}= is empty; give it a value: {verb.keys[key]}")
            given[key] = at_home(value) if key in verb.paths else value
            if key in verb.paths:
                check_path(key, given[key])
            left = [k for k in left if k != key]
        elif verb.free and _is_of_configuration(key):
            overrides.append(arg)
        else:
            raise UserError(f"{command}: {_unknown(verb, key)}")
    missing = [key for key in verb.needs if key not in given]
    if missing:
        wanted = " and ".join(f"{key}=… ({verb.keys[key]})" for key in missing)
        example = verb.examples.splitlines()[0]
        raise UserError(f"{command} needs {wanted}, as in: {example}")
    return given, overrides


@contextmanager
def refusing(command: str) -> Iterator[None]:
    """Turns OSError and MemoryError of a block into UserError, except that the reader is gone.

    `command` is the command with its verb, such as "checkpoint ls".
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        where = plain(f"{os.fsdecode(error.filename)}: ") if error.filename else ""
        full = "; make room there, or write to another disk" if error.errno == errno.ENOSPC else ""
        raise UserError(f"{command}: {where}{reason(error)}{full}") from None
    except MemoryError:
        raise UserError(
            f"{command} does not fit into this host's memory: end other programs here, or run it "
            "on a host with more"
        ) from None


def whole_number(
    key: str, given: Mapping[str, str], least: int = 0, most: int | None = None
) -> int | None:
    """Returns the number given for a key; None if the key is not given.

    Raises UserError unless it is a whole number from `least` to `most`. If `most` is None, there is
    no maximum.
    """
    text = given.get(key)
    if text is None:
        return None
    limits = f"of at least {least}" + ("" if most is None else f" and at most {most}")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise UserError(f"{key}={show(text)} must be a whole number {limits}")
    if int(text) < least or (most is not None and int(text) > most):
        near = least if int(text) < least else most
        raise UserError(
            f"{key}={text} must be a whole number {limits}; the nearest is {key}={near}"
        )
    return int(text)


def true_or_false(key: str, given: Mapping[str, str], default: bool) -> bool:
    """Returns the boolean given for a key, or `default` if the key is not given.

    Raises UserError unless the text is true or false.
    """
    text = given.get(key)
    if text is None:
        return default
    if text.lower() not in ("true", "false"):
        near = nearest(text.lower(), ("true", "false")) or str(default).lower()
        raise UserError(f"{key}={show(text)} must be true or false; the nearest is {key}={near}")
    return text.lower() == "true"


def _is_of_configuration(key: str) -> bool:
    bare = key.lstrip("+~")
    return (
        bare in all_keys(Config)
        or "." in bare
        or bare in {k.split(".")[0] for k in all_keys(Config)}
    )


def _unknown(verb: Verb, key: str) -> str:
    close = nearest(key.lstrip("-"), verb.keys)
    if close is None and verb.free:
        close = nearest_key(key, Config)
    hint = f"; the nearest is {close}" if close else ""
    return f"{key} is not one of its keys ({', '.join(verb.keys)}){hint}"


def _overview(command: str, verbs: Mapping[str, Verb]) -> str:
    width = max(map(len, verbs)) + 1
    rows = "\n".join(f"  {name:<{width}}{verb.about}" for name, verb in verbs.items())
    return (
        f"parallel3d {command} {'|'.join(verbs)} [key=value …]\n\n{rows}\n\n"
        f"parallel3d {command} VERB --help lists its keys."
    )


def verb_help(command: str, verb: Verb) -> str:
    """Returns the help text of a verb, or that of a command without verbs."""
    width = max(map(len, verb.keys), default=0)
    keys = "\n".join(f"  {key:<{width}}  {text}" for key, text in verb.keys.items())
    examples = "\n".join(f"  {line}" for line in dedent(verb.examples).splitlines())
    typed = f" {' '.join(verb.names).upper() or 'key=value …'}" if verb.keys else ""
    text = f"parallel3d {command}{typed}: {verb.about}.\n\nExamples\n{examples}"
    return f"{text}\n\nKeys, with their defaults in parentheses\n{keys}" if keys else text
