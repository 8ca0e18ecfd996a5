"""Draws configurations to try: the words of a command line, over all keys, many of them hostile.

A seed and a number identify a configuration.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.inputs.fuzz_values import HUGE, NUMBERS, OBJECTS, ODD, REFERENCES, TEXTS
from parallel3d.cli.overrides import groups, presets
from parallel3d.config.fields import Key, all_keys, sections_of
from parallel3d.run_config import CONFLICTS, Config

# Keys of the machine, of paths, of other subcommands, and of the length of the run.
NOT_THE_ENGINES = (
    *("tp", "pp", "dp", "cp", "vpp", "run", "device", "compile", "placement", "prompt"),
    *("rank_file", "cluster.", "data.", "logger.", "launch.", "verify.", "topology."),
    *("bench.", "generate.", "train.steps", "model.num_layers", "model.vocab_"),
    *("model.hidden_size", "recovery.watchdog_s"),
)


@dataclass(frozen=True)
class Drawn:
    """One configuration: overrides as typed, and the ranks that a launcher would have."""

    words: tuple[str, ...]
    world_size: int | None


def draw(seed: object, number: int) -> Drawn:
    """Returns the configuration `number`: its first key is number `number` of all keys,
    cyclically."""
    rng = random.Random(f"{seed} {number}")
    keys = list(all_keys(Config).values())
    first = keys[number % len(keys)]
    kind = rng.choices((hostile, sensible, large, odd, excluded), weights=(4, 3, 2, 1, 1))[0]
    words = kind(first, rng)
    rng.shuffle(words)
    if rng.random() < 0.98:  # otherwise a key might be given twice
        words = list({word.partition("=")[0].lstrip("+"): word for word in words}.values())
    world_size = rng.choice((None, None, 1, 2, 3, 4, 64, 10**6, 2**61 - 1, 0, -1))
    return Drawn(tuple(words), world_size)


def trainable(rng: random.Random) -> Drawn:
    """Returns a tiny model on up to four ranks, with some settings of the engines drawn."""
    tp, pp, dp = rng.choice(
        [(t, p, d) for t in (1, 2, 4) for p in (1, 2, 4) for d in (1, 2, 4) if t * p * d <= 4]
    )
    keys = [key for key in all_keys(Config).values() if not key.name.startswith(NOT_THE_ENGINES)]
    words = [f"tp={tp}", f"pp={pp}", f"dp={dp}"]
    for key in rng.sample(keys, rng.randint(2, 7)):
        value = sensible_value(key, rng)
        if not (value.isdecimal() and int(value) > 16):
            words.append(_assign(key, value, rng, quotes=False))
    return Drawn(tuple(words), tp * pp * dp)


def by_hand(seed: object, number: int) -> tuple[dict[str, Any], Any]:
    """Returns values by key of a `Config` that a user fills in in Python, and a world size."""
    rng = random.Random(f"{seed} {number}")
    keys = list(all_keys(Config).values())
    values = {
        key.name: _object(key, rng) for key in (keys[number % len(keys)], *_more(rng, (0, 2)))
    }
    if rng.random() < 0.05:
        values[rng.choice((*sections_of(Config), "nope", "model.nope"))] = rng.choice(OBJECTS)
    return values, rng.choice((None, None, 1, 4, *OBJECTS))


def _object(key: Key, rng: random.Random) -> Any:
    if rng.random() < 0.3:
        return key.default
    number = rng.choice(HUGE) * rng.choice((1, -1))
    return rng.choice((*OBJECTS, number, rng.uniform(-1, 1) * 10 ** rng.randrange(300)))


def hostile(first: Key, rng: random.Random) -> list[str]:
    """Returns an impossible or extreme value for one key or two, and possible ones for others."""
    words = [_assign(key, _any_value(rng), rng) for key in (first, *_more(rng, (0, 0, 1)))]
    return words + [_assign(key, sensible_value(key, rng), rng) for key in _more(rng, (0, 1, 3))]


def sensible(first: Key, rng: random.Random) -> list[str]:
    """Returns values of which each is possible; together they may contradict each other."""
    chosen = (first, *_more(rng, (0, 1, 2, 4, 8)))
    words = [_assign(key, sensible_value(key, rng), rng) for key in chosen]
    if rng.random() < 0.3:
        group = rng.choice(groups())
        words.append(f"{group}={rng.choice(presets(group))}")
    return words


def large(first: Key, rng: random.Random) -> list[str]:
    """Returns sizes far beyond any machine, which divide each other or do not."""
    numeric = [key for key in all_keys(Config).values() if key.kind in (int, float)]
    sizes = [key for key in numeric if "." not in key.name or key.name.startswith("model.")]
    unit = rng.choice(HUGE)
    words = [_assign(first, _any_value(rng) if rng.random() < 0.1 else str(unit), rng)]
    for key in rng.sample(sizes, rng.randint(1, 5)) + rng.sample(numeric, rng.randint(0, 2)):
        value = rng.choice((unit, unit, unit - 1, 2 * unit, rng.choice(HUGE), 1, 2, 6))
        words.append(_assign(key, str(value), rng))
    return words


def excluded(first: Key, rng: random.Random) -> list[str]:
    """Returns settings that exclude each other by a row of `CONFLICTS`, and a value of another
    key."""
    keys = all_keys(Config)
    words = [_assign(first, sensible_value(first, rng), rng)]
    for name, condition in rng.choice(CONFLICTS).settings.items():
        value = condition.example(keys[name].default, keys[name].tried)
        words.append(keys[name].spelled(value))
    return words


def odd(first: Key, rng: random.Random) -> list[str]:
    """Returns a word that is not KEY=VALUE, or whose key does not exist or is misspelled."""
    if rng.random() < 0.5:
        return [rng.choice(ODD), _assign(first, sensible_value(first, rng), rng)]
    letters = list(first.name)
    letters[rng.randrange(len(letters))] = rng.choice(("", "_", ".", "x", "-", "é", "\x1b"))
    return ["".join(letters) + "=" + rng.choice(("1", "true", "x", "null", "[1]"))]


def sensible_value(key: Key, rng: random.Random) -> str:
    """Returns a value of the right type and mostly in range, as typed."""
    if key.optional and rng.random() < 0.2:
        return "null"
    if key.meta["choices"]:
        return rng.choice(key.meta["choices"])
    makers: dict[type, Callable[[], Any]] = {
        bool: lambda: rng.choice(("true", "false")),
        int: lambda: _whole(key, rng),
        float: lambda: rng.choice((0, 0.1, 0.5, 0.99, 1, 1.5, 3, 100, 65536, 1e-8)),
        str: lambda: rng.choice(("a", "book.txt", "file", "tp-cp-pp-dp", "tp2-dp2", "/tmp/x", "7")),
        list: lambda: rng.choice(("[]", "[1,1]", "[2,2]", "[4]", "[tp]", "[a]", "[dp.max_ctas:8]")),
        dict: lambda: rng.choice(
            ("{}", "{a:1}", "{a:.5,b/c:tokens}", "{a:-1}", "{9:{a:1}}", "{a:}")
        ),
    }
    return str(makers[key.kind]())


def _whole(key: Key, rng: random.Random) -> int:
    number = rng.choice((0, 1, 2, 2, 3, 4, 4, 8, 12, 16, 64, 512))
    return max(int(key.meta["minimum"] or 0), number)


def _more(rng: random.Random, counts: tuple[int, ...]) -> list[Key]:
    return rng.sample(list(all_keys(Config).values()), rng.choice(counts))


def _any_value(rng: random.Random) -> str:
    return rng.choice(rng.choice((NUMBERS, TEXTS, REFERENCES)))


def _assign(key: Key, value: str, rng: random.Random, *, quotes: bool = True) -> str:
    """Returns KEY=VALUE, sometimes with quotes, as users who know Hydra would type it."""
    name = key.name.removesuffix(".name") if key.meta["choices"] else key.name
    name = key.name if name in sections_of(Config) and rng.random() < 0.5 else name
    if quotes and rng.random() < 0.25:
        value = rng.choice((f"'{value}'", '"' + value.replace('"', '\\"') + '"'))
    return f"{name}={value}"
