"""Writes docs/what_goes_with_what.md: which features work together, and what refuses the others.

python docs/compatibility.py > docs/what_goes_with_what.md

Each pair of features is composed into a small configuration and given to `check_config`, as every
start does. A test compares the committed page with this text.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # of the tests, whose cases say what is proven

from parallel3d.blueprint.layout import Layout  # noqa: E402
from parallel3d.config.checks import check_config  # noqa: E402
from parallel3d.config.fields import Key, all_keys, spell, typed_name  # noqa: E402
from parallel3d.config.schema import Config  # noqa: E402
from parallel3d.config.values import NARROW, spelled  # noqa: E402
from parallel3d.errors import UserError  # noqa: E402
from tests.distributed.exact_cases import exact_cases  # noqa: E402

# Sections and keys that change nothing of what a step computes, or how.
ELSEWHERE = ("bench", "calibrate", "cluster", "dryrun", "generate", "plan", "topology", "verify")
ELSEWHERE += ("launch", "checkpoint", "recovery", "logger", "layout", "placement", "preflight")
ELSEWHERE += ("schedule.timeline", "schedule.of_model", "train.progress", "train.save_weights")
# Values of keys that have neither choices nor true and false.
VALUES: dict[str, tuple[Any, ...]] = {
    "tp": (2,),
    "pp": (2,),
    "dp": (2,),
    "cp": (2,),
    "zero": (1, 2, 3),
    "recompute": ("selective", "full", "[norm,attention,mlp]"),
    "recompute_layers": ([1],),
    "offload_layers": ([1],),
    "mlp_chunk_tokens": (1024,),
    "init_from": ("old",),
    "model.dropout": (0.1,),
    "model.num_query_groups": (2,),
    "model.rope_scaling_factor": (4.0,),
    "data.valid": ({"web": "corpora/web"},),
    "optim.momentum": (0.9,),
    "optim.freeze": (["embedding.*"],),
    "optim.groups": ({"embedding.*": {"lr_mult": 0.1}},),
    "optim.wsd_decay_steps": (2,),
    "optim.ema_decay": (0.99,),
    "train.tokens": (512,),
    "train.batch_schedule": ({0: 4, 4: 8},),
    "train.epochs": (1.0,),
    "schedule.layers_per_stage": ([3, 1],),
    "precision.loss_scale": (1024.0,),
    "tensor_parallel.chunks": (2,),
    "loss.label_smoothing": (0.1,),
    "loss.z_loss": (0.0001,),
    "ddp.shard_size": (2,),
    "profile.steps": ([1, 2],),
}
# What a feature needs to do anything: its keys → others that are set beside it. A schedule that is
# read from a file behaves as the one that it holds.
WITHOUT_A_ROW = ("schedule=file",)
CHUNKS = {"pp": 2, "vpp": 2}
CORPUS = {"data.path": "corpora/web"}
MOMENTUM = {"optim.momentum": 0.95}
MUON = {"optim.name": "muon", **MOMENTUM}
BRINGS: dict[str, dict[str, Any]] = {
    "sp=true": {"tp": 2},
    "recompute_layers=[1]": {"recompute": "full"},
    "mlp_chunk_tokens=1024": {"recompute": "[norm,attention,mlp]"},
    "tensor_parallel.chunks=2": {"tp": 2, "sp": True},
    "tensor_parallel.attention=gather_qk": {"tp": 2},
    **{f"context_parallel.style={style}": {"cp": 2} for style in ("heads", "ring", "auto")},
    "context_parallel.balance=false": {"cp": 2, "data.document_mask": True},
    "model.rope_scaling_factor=4.0": {"model.position_embedding": "rope"},
    "init_optimizer=true": {"init_from": "old"},
    "optim.momentum=0.9": {"optim.name": "sgd"},
    "optim=muon": MOMENTUM,
    "optim.muon_scale=original": MUON,
    "optim.muon_dtype=bf16": MUON,
    "optim.muon_dtype=fp32": MUON,
    "optim.wsd_decay_steps=2": {"optim.lr_decay_style": "wsd"},
    "train.tokens=512": {"train.steps": None},
    "train.epochs=1.0": {"train.steps": None},
    "train.eval_only=true": {"run": "old"},
    "precision.loss_scale=1024.0": {"precision.name": "fp16"},
    "precision.lm_cross_entropy=fp16": {"precision.name": "fp16"},
    "schedule.layers_per_stage=[3,1]": {"pp": 2},
    "schedule.slices=true": {"pp": 2, "tp": 2},
    "schedule=gpipe": {"pp": 2},
    "schedule=zb_h1": {"pp": 2},
    "schedule=auto": {"pp": 2},
    **{f"schedule={name}": CHUNKS for name in ("interleaved", "interleaved_zb", "zbv", "v_half")},
    **{f"zero={stage}": {"dp": 2} for stage in (1, 2, 3)},
    "ddp.shard_size=2": {"dp": 4, "zero": 3},
    "ddp.reduce_every_microbatch=true": {"dp": 2, "zero": 2},
    "ddp.hierarchical=true": {"dp": 2},
    "ddp.comm_hook=bf16": {"dp": 2},
    "profile.memory=true": {"profile.steps": [1, 2]},
    "data.cut_documents=true": {"data.packing": "best_fit"},
    "data=text": {"data.path": "book.txt"},
    "data=corpus": CORPUS,
    "data=chat": {"data.path": "sft.jsonl", "data.tokenizer": "tokenizer.json"},
    "data=blend": {"data.blend": {"corpora/web": 1}},
    **{
        f"attention_kernel={kernel}": {"device": "cuda", "precision.name": "bf16"}
        for kernel in NARROW
    },
}
BASE = {"micro_batch_size": 1, "global_batch_size": 8, "model.seq_length": 16, "train.steps": 4}


@dataclass(frozen=True)
class Feature:
    """A key with its value; `brings`: other keys that it needs."""

    key: str
    value: Any = field(hash=False)
    brings: Mapping[str, Any] = field(hash=False, default_factory=dict)

    @property
    def name(self) -> str:
        return spell(self.key, self.value)

    def is_on(self, config: Config) -> bool:
        """Whether a configuration has it; of sizes and weights any other than the default.

        A kernel of GPUs is another one on the CPU, a schedule of chunks has several of them, and
        layers by stage have a stage a rank.
        """
        key, found = all_keys()[self.key], _get(config, self.key)
        device, chunks = self.brings.get("device", config.device), self.brings.get("vpp", 1)
        if device != config.device or chunks > config.vpp:
            return False
        if self.key == "schedule.layers_per_stage":
            return found is not None and len(found) == config.pp
        if self.key == "recompute":
            parts = self.value.startswith("[")
            return spelled(found).startswith("[") if parts else spelled(found) == self.value
        if key.meta["choices"] or isinstance(self.value, bool) or self.key == "zero":
            return bool(found == self.value)
        return found not in (key.default, 1 if self.key == "dp" else key.default)


def _get(config: Config, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), config)


def _values(key: Key) -> tuple[Any, ...]:
    """The values of a key that are features; none for sizes, rates, names and files."""
    if key.name in VALUES:
        return VALUES[key.name]
    if any(key.name == name or key.name.startswith(f"{name}.") for name in ELSEWHERE):
        return ()
    values = key.meta["choices"] or ((True, False) if key.kind is bool else ())
    off = (key.default, False) if key.optional and key.kind is bool else (key.default,)
    return tuple(v for v in values if v not in off)


@functools.cache
def features() -> tuple[Feature, ...]:
    """All features, in the order of the configuration's keys."""
    found = [Feature(key.name, v) for key in all_keys().values() for v in _values(key)]
    names = {feature.name for feature in found}
    assert names >= BRINGS.keys(), BRINGS.keys() - names
    kept = [f for f in found if f.name not in WITHOUT_A_ROW]
    return tuple(Feature(f.key, f.value, BRINGS.get(f.name, {})) for f in kept)


def composed(*chosen: Feature, without: str | None = None) -> Config:
    """A small configuration that has the features, and what they need but for `without`."""
    keys: dict[str, Any] = dict(BASE)
    for feature in chosen:
        for name, value in feature.brings.items():
            larger = isinstance(value, int) and not isinstance(value, bool)
            keys[name] = max(value, keys.get(name, 0)) if larger else value
    keys = {name: value for name, value in keys.items() if name != without}
    keys |= {feature.key: feature.value for feature in chosen}
    config = Config()
    for name, value in keys.items():
        section, _, leaf = name.rpartition(".")
        setattr(_get(config, section) if section else config, leaf, value)
    if config.ddp.shard_size is not None and config.dp is not None:
        config.dp = max(4, config.dp)
    return config


def sentence(*chosen: Feature, without: str | None = None) -> str | None:
    """The sentence that refuses the features together; None if they work."""
    try:
        check_config(composed(*chosen, without=without))
    except UserError as error:
        return str(error)
    return None


Pair = tuple[Feature, Feature]


@functools.cache
def refused() -> dict[Pair, str]:
    """The pairs that are refused, with the sentence. Two values of one key are no pair."""
    pairs = ((a, b) for a, b in combinations(features(), 2) if a.key != b.key)
    said = {(a, b): sentence(a, b) for a, b in pairs}
    return {pair: found for pair, found in said.items() if found is not None}


def needs() -> Iterator[tuple[Feature, str, str]]:
    """Features that are refused without a key that they bring, with that key and the sentence."""
    for feature in features():
        for name in feature.brings:
            if found := sentence(feature, without=name):
                yield feature, name, found


@functools.cache
def proven() -> frozenset[Pair]:
    """The pairs that a test trains together and compares with the reference.

    Samples of those tests are their own, so that what reads data (`data=`, `data.packing`) is
    never among them; `tests/unit/data` and `tests/e2e` hold it.
    """
    found: set[Pair] = set()
    for sizes, case in exact_cases():
        config = case.config(Layout(*sizes))
        found.update(combinations([f for f in features() if f.is_on(config)], 2))
    return frozenset(found)


# Refusals outside of the checks, read off the code

# What the checks are and call, what does not train, and sentences about the folder of a run.
NOT_OF_A_RUN = ("config", "schedules", "estimate", "commands", "topology")
OF_FOLDERS = {"run", "runs_dir"}


def _text(node: ast.expr) -> str:
    """An expression's literal text, with … where a value stands."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return "…"


def _keys_in(text: str) -> set[str]:
    known = {typed_name(name) for name in all_keys()}
    return {key for key in re.findall(r"(?<![\w.])([a-z][\w.]*)=", text) if key in known}


def later() -> Iterator[tuple[str, str]]:
    """Yields (file, sentence) of refusals outside of the checks that name two keys or more."""
    package = ROOT / "parallel3d"
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package).as_posix()
        if where.startswith(NOT_OF_A_RUN):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            raised = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(raised, ast.Call) and getattr(raised.func, "id", "") == "UserError":
                text = _text(raised.args[0])
                if len(_keys_in(text) - OF_FOLDERS) > 1:
                    yield where, text


# The page

INTRO = """\
# Compatibility of features

Which features of a run work together, and the sentence that refuses those that do not. This page
is written by `python docs/compatibility.py > docs/what_goes_with_what.md` from the checks
themselves: it composes a small configuration with each two features (and with what they need) and
checks it as every start does, before any process is started. A refused pair ends with exit code 2
and the sentence.
"""

MATRIX = """\
## Matrix

Each feature beside those that refuse something.

- **●** proven: a test trains both together and compares losses, gradient norms and, in fp64,
  weights with the reference (`tests/distributed/exact_cases.py` lists these tests)
- **○** allowed: the checks let both pass; no test of these trains both together
- **✗** refused, with the sentence below
- blank: two values of one key, or the feature itself
"""

REST = """\
All pairs of features that have no column work too: {proven} of them are proven, {allowed} are
allowed. Of {pairs} pairs in all {refused} are refused, {works} work, and {tested} of these are
proven. What the samples of a run are (`data`, `data.packing`) changes nothing of what a step does
with them; `tests/unit/data` holds it. Rounding hides errors, so exactness is proven in
fp64, and bf16 and fp16 are compared with fp32, as is what rounds by intent (`ddp.comm_hook=bf16`).
Options that need a GPU (`attention_kernel`, `precision=tf32`, `device=cuda`) cannot be proven so.

`schedule=file` goes with what the schedule goes with that the file holds. Values that are not
implemented yet stand in [Configuration keys](configuration.md#not-yet).
"""

REFUSED = """\
## Refused pairs

The first of several sentences, where a pair breaks several rules.
"""

# (feature, feature, what it would take); a test checks that the pair is refused.
NOT_BUILT = (
    ("zero=3", "schedule=auto", "FSDP2 reduces in the backward what gradients are there, so that "
     "backwards are whole; `schedule=auto` would have to search among whole ones. All named "
     "schedules run, with B for I and W"),
    ("zero=1", "ddp.comm_hook=bf16", "a reduce-scatter of rounded buckets that adds in fp32"),
    ("zero=1", "ddp.hierarchical=true", "a reduce-scatter in two levels, whose shards lie in the "
     "order of the domains; `zero=2` and `zero=3` have `ddp.shard_size`"),
    ("zero=3", "train.noise_scale=true", "norms of what FSDP2 is about to reduce, unit by unit"),
    ("optim.freeze=[embedding.*]", "train.noise_scale=true", "norms by parameter, not by bucket"),
    ("compile=true", "tensor_parallel.attention=gather_qk", "an operator for the gather; the form "
     "is there to be compared with, so nobody should need it"),
)  # fmt: skip
COULD = """\
## Refused, and could be built

The other pairs contradict each other, or ask for what a kernel or a device does not have.
"""

NEEDS = """\
## What a feature needs

Refused without the key in the second column.
"""

LATER = """\
## Refused when a run starts

What no check of the configuration alone can know, as it depends on files. (Which attention
kernels a GPU and its installed packages have is found there too: `attention_kernel=…` is tried
once, and refused with the reason.)
"""


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped) + "\n"


def mark(a: Feature, b: Feature) -> str:
    """The sign of a pair in the matrix."""
    order = features().index
    pair = (a, b) if order(a) < order(b) else (b, a)
    if a.key == b.key:
        return ""
    return "✗" if pair in refused() else "●" if pair in proven() else "○"


def columns() -> list[Feature]:
    """The features that refuse another."""
    return [f for f in features() if any(f in pair for pair in refused())]


def _matrix() -> str:
    heads = columns()
    head = ("feature", *(f"{i + 1}" for i in range(len(heads))))
    rows = []
    for feature in features():
        number = f" ({heads.index(feature) + 1})" if feature in heads else ""
        rows.append((f"`{feature.name}`{number}", *(mark(feature, other) for other in heads)))
    return _table(head, rows)


def _rest() -> str:
    heads = set(columns())
    pairs = [pair for pair in combinations(features(), 2) if pair[0].key != pair[1].key]
    works = [pair for pair in pairs if pair not in refused()]
    other = [pair for pair in works if not heads & {*pair}]
    tested = sum(pair in proven() for pair in other)
    return REST.format(
        proven=tested, allowed=len(other) - tested, pairs=len(pairs), refused=len(refused()),
        works=len(works), tested=sum(pair in proven() for pair in works),
    )  # fmt: skip


def page() -> str:
    """The whole text of docs/what_goes_with_what.md."""
    pairs = [(f"`{a.name}`", f"`{b.name}`", text) for (a, b), text in refused().items()]
    could = [(f"`{a}`", f"`{b}`", text) for a, b, text in NOT_BUILT]
    brings = [(f"`{f.name}`", f"`{typed_name(key)}`", text) for f, key, text in needs()]
    return "\n".join(
        [
            *(INTRO, MATRIX, _matrix(), _rest()),
            *(REFUSED, _table(("feature", "and", "sentence"), pairs)),
            *(COULD, _table(("feature", "and", "what it would take"), could)),
            *(NEEDS, _table(("feature", "needs", "sentence"), brings)),
            *(LATER, _table(("found in", "sentence"), [(f"`{w}`", t) for w, t in later()])),
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(page())
