"""The covering array: a few trainings in which every two settings that can be combined are
combined.

Bugs of parallel training occur where two features meet. `FACTORS` are the features, `RULES` forbid
combinations of their levels, `case` makes a training of one level of each, and `chosen` returns few
combinations that hold every allowed pair, in addition to the layouts and schedules of `SPINE`;
`often` returns those that run for each change. A new dimension or feature is one more factor, with
its rules, its lines in `case`, and the combinations that `--write` adds to `matrix.json`.

    python -m tests.distributed.matrix               # the factors, the cases, what is uncovered
    python -m tests.distributed.matrix --write       # adds the combinations that a change needs
    python -m tests.distributed.matrix --write 500   # looks 500 times for fewer of them too
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.run_config import Config
from parallel3d.schedules.schedule import ONE_CHUNK, V_SHAPED
from tests.distributed.cases import OPTIM, Case, Problem
from tests.distributed.covering import Cover, Level, Levels, Rule
from tests.distributed.covering import allowed as allowed_by
from tests.distributed.harness import Sizes, cover, plain_groups, with_copies_of_two

RANKS = 8  # an upper limit of the number of ranks
SIZES = ("tp", "pp", "dp", "cp")
PLAIN = ("1f1b", "gpipe")  # schedules of one chunk, with whole backwards
MLP = "[norm,attention,mlp]"
UNROTATED = ("learned", "none")  # positions
FROZEN = ("by name", "first frozen", "norms frozen")  # treatments

# Factors and their levels, by subject. The first level is the default; a layout that has no use for
# a factor keeps it.
SUBJECTS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "layout": {
        "tp": (1, 2, 4),
        "pp": (1, 2, 3, 4),
        "dp": (1, 2, 4),
        "cp": (1, 2, 3, 4),
    },
    "pipeline": {
        "schedule": (*PLAIN, "interleaved", "zb_h1", "interleaved_zb", "zbv", "v_half"),
        "chunks": (1, 2, 4),  # number of stages of a rank
        "micro-batches": ("one", "more", "as many as stages", "many"),
        "samples": (2, 1),  # number of sequences in a micro-batch
        "stages": ("balanced", "uneven"),
        "slices": (False, True),
    },
    "tensor parallelism": {
        "sp": ("no", "whole", "in pieces"),
        "attention": ("heads", "gather_qk"),
        "table": ("vocab_parallel", "replicated"),
        "logits": ("parallel", "whole"),
    },
    "sequences": {
        "style": ("gather", "heads", "ring"),
        "balance": (True, False),
        "documents": (False, True),
        "length": (16, 13, 15),
    },
    "data parallelism": {
        "zero": (0, 1, 2, 3),
        "copies": ("one", "several"),  # number of copies of a sharded model (HSDP)
        # reduce-scatter in every micro-batch, or once per step
        "reduced": ("by default", "otherwise"),
        "buckets": ("whole", "small", "alone"),
        "sums": ("flat", "hierarchical", "bf16"),
    },
    "memory": {
        "recompute": ("none", "full", MLP, "[norm,activation]", "[mlp]", "selective"),
        "recomputed layers": ("all", "some"),
        "MLP": ("whole", "in chunks"),
        "offload": (False, True),
        "loss chunks": (False, True),
    },
    "model": {
        "activation": ("gelu", "relu", "swiglu", "geglu"),
        "positions": (
            *("learned", "rope", "partial rope", "scaled rope", "linear rope", "yarn", "longrope"),
            "none",
        ),
        "temperature": (False, True),
        "layer types": (
            *("full", "sliding", "alternating", "two of three", "nope", "nope in windows"),
            "delta",
        ),
        # window, smaller or larger than a piece of a sequence over two ranks
        "window": ("short", "long"),
        "norm": ("layernorm", "rmsnorm"),
        "norm position": ("before", "after", "both"),
        "norm weight": ("around 1", "around 0"),
        "qk_norm": ("none", "head", "full"),  # width of the norm
        "attention gate": (False, True),
        "attention sinks": (False, True),
        "score cap": (False, True),
        "scales": ("none", "all"),
        "logit cap": (False, True),
        "heads": (8, 12),
        "kv heads": ("all", "some", "one"),
        "bias": ("all", "none", "qkv", "attention"),
        "padding": (8, 128),
        "tied": (True, False),
        "dropout": (0.0, 0.2),
        "loss": ("plain", "smoothed"),
    },
    "experts": {
        "experts": (0, 8, 16),
        "ep": (1, 2, 4, 8),
        "dispatch": ("gather", "all_to_all"),
        "router": ("softmax", "unnormalised", "sigmoid", "groups"),
        # biases of experts and of the router's logits, and with swiglu a limit
        "gpt-oss": (False, True),
        "balancing": ("none", "auxiliary", "both losses"),
        "shared expert": ("none", "plain", "gated"),
        "expert layers": ("all", "some"),
    },
    "optimizer": {
        "optimizer": ("sgd", "momentum", "adamw", "muon"),
        "treatment": ("plain", "averaged", "by name", "first frozen", "norms frozen", "scheduled"),
        "batches": ("same", "grow", "shrink"),
    },
    "computation": {
        "kernel": ("auto", "math", "flash"),
        "deterministic": (False, True),
        "precision": ("fp64", "fp32", "bf16", "fp16"),
        "compile": (False, True),
    },
}
FACTORS = {name: levels for factors in SUBJECTS.values() for name, levels in factors.items()}
EXACT = {"precision": "fp64", "compile": False}


# Rules that combinations must not break.


def microbatches(pp: int, count: str) -> int:
    """Returns the micro-batches of a step: enough, with `more` and `many`, that schedules
    differ."""
    return {"one": 1, "more": pp + 1, "as many as stages": pp, "many": 3 * pp - 1}[count]


def batch_sizes(count: int, batches: str) -> tuple[int, ...]:
    """Returns the micro-batches of the first steps; the last number holds for all later ones."""
    return {"same": (count,), "grow": (1, count), "shrink": (count, -(-count // 2), count)}[batches]


def kv_heads(heads: int, kv: str) -> int:
    """Returns the number of key-value heads."""
    return {"all": heads, "some": {8: 2, 12: 4}[heads], "one": 1}[kv]


def _has_chunks(schedule: str, chunks: int) -> bool:
    if schedule in V_SHAPED:
        return chunks == 2
    return chunks == 1 or schedule not in ONE_CHUNK


def _splits_heads(tp: int, cp: int, style: str, heads: int, kv: str) -> bool:
    queries, keys = heads // tp, max(1, kv_heads(heads, kv) // tp)
    return cp == 1 or style != "heads" or (queries % cp == 0 and 0 in (keys % cp, cp % keys))


def _splits_tokens(tp: int, cp: int, sp: str, length: int) -> bool:
    return tp == 1 or cp > 1 or length % {"no": 1, "whole": tp, "in pieces": 2 * tp}[sp] == 0


def _without_experts(name: str, off: Any) -> Rule:
    """Returns the rule by which the check refuses another level of a factor with experts."""
    return Rule(
        f"experts have no other {name}",
        ("experts", name),
        lambda experts, level: not experts or level == off,
    )


# The configuration's own check refuses combinations that break one of these, and no others: see
# test_matrix.
REFUSED = (
    Rule("chunks of a schedule", ("schedule", "chunks"), _has_chunks),
    Rule("heads are split", ("tp", "cp", "style", "heads", "kv heads"), _splits_heads),
    Rule("tokens are split", ("tp", "cp", "sp", "length"), _splits_tokens),
    Rule(
        "a ring has no dropout",
        ("cp", "style", "dropout"),
        lambda cp, style, dropout: cp == 1 or style != "ring" or not dropout,
    ),
    Rule(
        "no flash kernel caps scores",
        ("kernel", "score cap"),
        lambda kernel, cap: kernel != "flash" or not cap,
    ),
    Rule(
        "gathered q and k are of whole sequences",
        ("cp", "attention"),
        lambda cp, attention: cp == 1 or attention == "heads",
    ),
    Rule(
        "gathered q and k are not compiled",
        ("attention", "compile"),
        lambda attention, compiled: attention == "heads" or not compiled,
    ),
    Rule(
        "weights of LayerNorms are around 1",
        ("norm", "norm weight"),
        lambda norm, weight: norm == "rmsnorm" or weight == "around 1",
    ),
    Rule(
        "only some layers of a model with RoPE lack positions",
        ("positions", "layer types"),
        lambda positions, types: not types.startswith("nope") or positions not in UNROTATED,
    ),
    Rule(
        "an MLP in chunks is recomputed",
        ("MLP", "recompute"),
        lambda mlp, recompute: mlp == "whole" or recompute in (MLP, "[mlp]"),
    ),
    Rule(
        "an MLP in chunks has the sequence in one piece",
        ("MLP", "sp"),
        lambda mlp, sp: mlp == "whole" or sp != "in pieces",
    ),
    Rule(
        "an MLP in chunks is not compiled",
        ("MLP", "compile"),
        lambda mlp, compiled: mlp == "whole" or not compiled,
    ),
    Rule(
        "layers that recompute something",
        ("recompute", "recomputed layers"),
        lambda recompute, layers: recompute != "none" or layers == "all",
    ),
    Rule(
        "copies are of a sharded model",
        ("zero", "copies"),
        lambda zero, copies: zero > 1 or copies == "one",
    ),
    Rule(
        "sharded gradients are reduced early or late",
        ("zero", "reduced"),
        lambda zero, reduced: zero > 1 or reduced == "by default",
    ),
    Rule(
        "hooks sum whole gradients",
        ("zero", "sums"),
        lambda zero, sums: zero == 0 or sums == "flat",
    ),
    Rule(
        "experts need each token on one rank",
        ("tp", "sp", "experts"),
        lambda tp, sp, experts: not experts or tp == 1 or sp != "no",
    ),
    Rule(
        "experts have no biases",
        ("bias", "experts"),
        lambda bias, experts: not experts or bias != "all",
    ),
    Rule(
        "groups of experts divide the ranks of a stage",
        ("tp", "dp", "cp", "ep"),
        lambda tp, dp, cp, ep: tp * dp * cp % ep == 0,
    ),
    Rule(
        "only experts are divided",
        ("experts", "ep"),
        lambda experts, ep: ep == 1 or (experts > 0 and experts % ep == 0),
    ),
    _without_experts("MLP", "whole"),
    _without_experts("copies", "one"),
    Rule(
        "experts are not summed in two levels",
        ("experts", "sums"),
        lambda experts, sums: not experts or sums != "hierarchical",
    ),
)

# The check refuses this too; a narrower rule of `IDLE` keeps the search from trying it.
REFUSED_WHERE_IDLE = (
    Rule(
        "copies on two ranks each",
        ("dp", "cp", "copies"),
        lambda dp, cp, copies: copies == "one" or dp * cp == 1 or dp * cp % 2 == 0,
    ),
)


def _only_split(size: str, *names: str) -> Iterator[Rule]:
    """Yields rules by which factors keep their defaults if a dimension is not split."""
    for name in names:
        yield Rule(
            f"{name} is idle without {size}",
            (size, name),
            lambda size, level, name=name: size > 1 or level == FACTORS[name][0],
        )


def _only_with_replicas(*names: str) -> Iterator[Rule]:
    for name in names:
        yield Rule(
            f"{name} is idle without replicas",
            ("dp", "cp", name),
            lambda dp, cp, level, name=name: dp * cp > 1 or level == FACTORS[name][0],
        )


def _only_with_experts(*names: str) -> Iterator[Rule]:
    for name in names:
        yield Rule(
            f"{name} is idle without experts",
            ("experts", name),
            lambda experts, level, name=name: experts > 0 or level == FACTORS[name][0],
        )


# Allowed combinations that compute the same as another one.
IDLE = (
    *_only_with_experts("dispatch", "router", "gpt-oss", "balancing"),
    *_only_with_experts("shared expert", "expert layers"),
    Rule(
        "experts on one rank are not dispatched",
        ("ep", "dispatch"),
        lambda ep, dispatch: ep > 1 or dispatch == "gather",
    ),
    Rule(
        "full layers have no window",
        ("layer types", "window"),
        lambda types, window: types not in ("full", "delta") or window == "short",
    ),
    *_only_split("tp", "sp", "attention", "table", "logits", "slices"),
    *_only_split("pp", "schedule", "chunks", "stages", "slices"),
    *_only_split("cp", "style", "balance"),
    *_only_with_replicas("zero", "buckets", "sums"),
    Rule(
        "one stage tells two counts apart",
        ("pp", "micro-batches"),
        lambda pp, count: pp > 1 or count in ("one", "more"),
    ),
    Rule(
        "slices are of whole sequences",
        ("sp", "slices"),
        lambda sp, slices: sp == "no" or not slices,
    ),
    Rule(
        "documents are balanced",
        ("documents", "balance"),
        lambda documents, balance: documents or balance,
    ),
    Rule(
        "split heads are balanced",
        ("style", "balance"),
        lambda style, balance: style != "heads" or balance,
    ),
    Rule(
        "two levels of two replicas",
        ("dp", "cp", "copies", "sums"),
        lambda dp, cp, copies, sums: (
            (copies == "one" and sums != "hierarchical") or (dp * cp > 2 and dp * cp % 2 == 0)
        ),
    ),
    Rule(
        "a batch of one micro-batch has one size",
        ("micro-batches", "batches"),
        lambda count, batches: count != "one" or batches == "same",
    ),
    Rule(
        "one micro-batch is reduced once",
        ("micro-batches", "reduced"),
        lambda count, reduced: count != "one" or reduced == "by default",
    ),
)
# Allowed combinations that another test compares, or that would take long.
# these have whole and split backwards, and chunks
COMPILED = ("1f1b", "interleaved", "zb_h1", "zbv")
LEFT_OUT = (
    Rule("at most eight ranks", SIZES, lambda *sizes: math.prod(sizes) <= RANKS),
    Rule(
        "rounding changes the choice of experts",
        ("experts", "precision"),
        lambda experts, precision: not experts or precision == "fp64",
    ),
    Rule(
        "rounded sums are near the reference where all is rounded",
        ("sums", "precision"),
        lambda sums, precision: sums != "bf16" or precision == "bf16",
    ),
    Rule(
        "a rank compiles for seconds, so at most two do",
        (*SIZES, "compile"),
        lambda tp, pp, dp, cp, compiled: not compiled or tp * pp * dp * cp <= 2,
    ),
    Rule(
        "a compiled block tells no other schedules apart",
        ("schedule", "compile"),
        lambda schedule, compiled: not compiled or schedule in COMPILED,
    ),
)
RULES = (*REFUSED, *IDLE, *LEFT_OUT)


def allowed(levels: Levels) -> bool:
    """Returns whether levels, for some factors or for all, break no rule."""
    return allowed_by(levels, RULES)


# Sizes of tp, pp, dp, cp and ep in which the groups of experts cross the other groups in every way.
EXPERT_LAYOUTS = (
    *((1, 1, 4, 1, 1), (2, 1, 1, 2, 1), (2, 2, 1, 1, 1)),
    *((1, 1, 4, 1, 2), (1, 2, 2, 1, 2), (2, 1, 2, 1, 2), (4, 1, 1, 1, 2)),
    *((2, 1, 4, 1, 4), (2, 1, 2, 2, 4), (4, 1, 1, 1, 4), (1, 2, 2, 2, 4)),
    *((2, 1, 4, 1, 8), (2, 1, 2, 2, 8)),
)
# Every layout with both plain schedules, layouts with split sequences, and every schedule with
# every number of stages and chunks.
SPINE: list[Levels] = [
    *(
        {"tp": tp, "pp": pp, "dp": dp, "cp": 1, "schedule": schedule, **EXACT}
        for tp, pp, dp in product((1, 2, 4), repeat=3)
        for schedule in (PLAIN if pp > 1 else PLAIN[:1])
        if tp * pp * dp <= RANKS
    ),
    *(
        {"tp": tp, "pp": pp, "dp": dp, "cp": cp, **EXACT}
        for tp, pp, dp, cp in product((1, 2), (1, 2), (1, 2), (2, 3, 4))
        if tp * pp * dp * cp <= RANKS
    ),
    *(
        {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep, "experts": experts, **EXACT}
        for (tp, pp, dp, cp, ep), experts in zip(EXPERT_LAYOUTS, cycle((8, 16)), strict=False)
    ),
    *(
        {"pp": pp, "schedule": schedule, "chunks": chunks, **EXACT}
        for pp, schedule, chunks in product((2, 3, 4), FACTORS["schedule"], FACTORS["chunks"])
        if _has_chunks(schedule, chunks)
    ),
]


def ranks_of(levels: Levels) -> int:
    """Returns the number of ranks of a combination."""
    return math.prod(levels[name] for name in SIZES)


def cost(levels: Levels) -> float:
    """Returns the root of a training's approximate duration.

    The duration itself would favour many small trainings with few pairs, and for each of them the
    reference takes about as long as a rank.
    """
    visits = levels["chunks"] * microbatches(levels["pp"], levels["micro-batches"])
    ranks = ranks_of(levels)
    seconds = 2 + ranks * (1 + visits / 4 + (levels["zero"] > 1) + 10 * levels["compile"])
    # more than four ranks are for pairs of sizes that need them
    return math.sqrt(seconds) * (2 if ranks > 4 else 1)


# Three ranks and more differ from two where sizes meet, and hardly where one meets a feature; so do
# four chunks from two.
LARGE = [
    *((name, size) for name in (*SIZES, "ep") for size in FACTORS[name] if size > 2),
    ("chunks", 4),
]


# A variety of RoPE is another table of angles, one of windows another mask, one of a router another
# number for each expert, one of experts another formula, and each is computed in one place.
# What cuts sequences or heads may meet it, and so may the number of a layer in its stage, which is
# of chunks and stages; the rest hardly. Gated DeltaNet has trainings of its own besides
# (test_gated_deltanet).
VARIETIES = [
    *(("positions", level) for level in FACTORS["positions"] if level not in ("rope", *UNROTATED)),
    *(("layer types", level) for level in ("two of three", "nope", "nope in windows", "delta")),
    *(("router", level) for level in ("unnormalised", "groups")),
    ("gpt-oss", True),
]
ELSEWHERE = {
    name
    for subject in ("pipeline", "data parallelism", "memory", "optimizer", "computation")
    for name in SUBJECTS[subject]
    if name not in ("chunks", "stages")
}
# Two levels take four replicas, and so eight ranks with a factor of another dimension.
TWO_LEVELS = (("copies", "several"), ("sums", "hierarchical"))
ACROSS = ("tp", "pp", *SUBJECTS["pipeline"], *SUBJECTS["tensor parallelism"])


def is_later(one: Level, other: Level) -> bool:
    """Returns whether a pair need not be in the combinations of every change."""
    return any(
        (a in LARGE and b[0] not in (*SIZES, "ep"))
        or (a in VARIETIES and b[0] in ELSEWHERE)
        or (a in TWO_LEVELS and b[0] in ACROSS and b[1] != FACTORS[b[0]][0])
        for a, b in ((one, other), (other, one))
    )


# The combinations are in a file, since finding few of them takes minutes: those of every change
# first, a line each, without levels that are the default.
ARRAY = Path(__file__).with_name("matrix.json")


def searched(found: Sequence[Levels], first: int) -> Cover:
    """Returns a search that begins with these combinations."""
    low = [("precision", level) for level in FACTORS["precision"] if level != "fp64"]
    return Cover(
        FACTORS,
        RULES,
        cost,
        usual=EXACT,
        early=(*SIZES, "experts", "ep", "sp"),
        rounded=[*low, ("sums", "bf16")],
        later=is_later,
        tries=8,
        found=found,
        first=first,
    )


@functools.cache
def chosen() -> Cover:
    """Returns the combinations of the file."""
    lines = json.loads(ARRAY.read_text("utf-8"))
    both = [
        [{name: one.get(name, FACTORS[name][0]) for name in FACTORS} for one in lines[part]]
        for part in ("first", "rest")
    ]
    return searched([*both[0], *both[1]], len(both[0]))


def write(rounds: int) -> None:
    """Makes the file anew: keeps its combinations that are still allowed, adds those that are
    missing, and looks `rounds` times for fewer."""
    known, first = (chosen().found, chosen().first) if ARRAY.exists() else ([], 0)
    sound = [
        allowed(levels) and all(levels[name] in FACTORS[name] for name in FACTORS)
        for levels in known
    ]
    cover = searched(
        [one for one, good in zip(known, sound, strict=True) if good], sum(sound[:first])
    )
    cover.fill()
    if rounds:
        cover.shrink(rounds)
    cover.fill(SPINE)
    parts = {"first": cover.found[: cover.first], "rest": cover.found[cover.first :]}
    text = {
        name: ",\n".join(
            json.dumps({name: level for name, level in one.items() if level != FACTORS[name][0]})
            for one in part
        )
        for name, part in parts.items()
    }
    lists = ",\n".join(f'"{name}": [\n{lines}\n]' for name, lines in text.items())
    ARRAY.write_text("{\n" + lists + "\n}\n", "utf-8")
    chosen.cache_clear()


# Settings on which streams, events and the order of a communicator depend.
ON_STREAMS = (
    *("schedule", "sp", "style", "zero", "buckets", "offload", "dropout"),
    *("experts", "dispatch", "layer types"),
)


def on_streams() -> list[Levels]:
    """Returns few combinations of at most four ranks that have each of those levels that any
    combination has.

    A simulated device has no compiler, and no flash kernel in fp64. Its storages have no address,
    by which FSDP2 recognises the memory of shards that it has padded, as among three ranks.
    """
    small = {
        at: frozenset((name, levels[name]) for name in ON_STREAMS)
        for at, levels in enumerate(chosen().found)
        if math.prod(layout(levels)[:4]) <= 4
        and not levels["compile"]
        and levels["kernel"] != "flash"
        and (levels["zero"] < 2 or levels["cp"] != 3)
    }
    return [chosen().found[at] for at in cover(small)]


def often() -> list[Levels]:
    """Returns the combinations that run for each change: those that hold each pair which is not
    later exactly, and few others.

    A training in low precision is only compared to a hundredth, so for most features it shows no
    more than the exact training with the feature. The exceptions keep or sum numbers of several
    dtypes: each precision is there once, and bf16 with each level of `zero`. A compiled one takes
    long.
    """
    found = chosen().found[: chosen().first]
    rounded = {
        at: frozenset((levels["precision"], level) for level in ("any", levels["zero"]))
        if levels["precision"] == "bf16"
        else frozenset({(levels["precision"], "any")})
        for at, levels in enumerate(found)
        if levels["precision"] != "fp64" and not levels["compile"]
    }
    few = cover(rounded)
    return [
        levels
        for at, levels in enumerate(found)
        if (levels["precision"] == "fp64" and not levels["compile"]) or at in few
    ]


def together(found: Sequence[Levels]) -> dict[str, list[Levels]]:
    """Returns combinations of equal layouts and groups, which ranks train one after the other, by a
    short name."""
    groups: dict[str, list[Levels]] = {}
    for levels in found:
        name = "-".join(f"{name}{levels[name]}" for name in SIZES if levels[name] > 1)
        name = (name or "one rank") + (f"-ep{levels['ep']}" if levels["experts"] else "")
        name += "-in-two-levels" if groups_of(levels) is with_copies_of_two else ""
        groups.setdefault(name, []).append(levels)
    return dict(sorted(groups.items(), key=lambda item: -ranks_of(item[1][0]) * len(item[1])))


def groups_of(levels: Levels) -> Callable[[Layout], ProcessGroups]:
    """Returns the function that creates the groups of a combination, in two levels if it needs
    them."""
    two = levels["copies"] == "several" or levels["sums"] == "hierarchical"
    return with_copies_of_two if two else plain_groups


# The training of a combination.


ACTIVATIONS: Mapping[str, dict[str, Any]] = {
    "gelu": {"activation": "gelu"},
    "relu": {"activation": "relu", "ffn_hidden_size": None},
    "swiglu": {"activation": "swiglu"},
    "geglu": {"activation": "geglu"},
}
ROPE = {"position_embedding": "rope"}
POSITIONS: Mapping[str, dict[str, Any]] = {
    "learned": {"position_embedding": "learned", "max_position_embeddings": 24},
    "rope": ROPE,
    "partial rope": {**ROPE, "rotary_percent": 0.7, "rotary_base": 500.0},
    "scaled rope": {
        **ROPE,
        **{"rotary_base": 100.0, "rope_scaling_factor": 4.0, "rope_original_length": 8},
    },
    "linear rope": {**ROPE, "rope_scaling": "linear", "rope_scaling_factor": 3.0},
    # Pairs of the first dimensions are unchanged, the last ones slowed, others between.
    "yarn": {
        **ROPE,
        **{"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_length": 8},
        **{"rotary_base": 100.0, "rope_beta_fast": 1.5, "rope_beta_slow": 0.1},
    },
    "longrope": {
        **ROPE,
        **{"rope_scaling": "longrope", "rope_scaling_factor": 2.0, "rope_original_length": 8},
    },
    "none": {"position_embedding": "none"},
}
LONGROPE = {"rope_short_factors": (1.0, 1.2, 1.4), "rope_long_factors": (1.5, 3.0, 2.0)}
SCALES = {
    **{"embedding_scale": 3.0, "residual_scale": 0.6, "attention_scale": 0.3},
    "logit_scale": 0.7,
}
LAYER_TYPES: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "sliding": ("sliding",),
    "alternating": ("sliding", "full"),
    "two of three": ("sliding", "sliding", "full"),
    "nope": ("sliding", "full_nope"),
    "nope in windows": ("sliding_nope", "full"),
    "delta": ("gated_deltanet", "full"),
}
# With four ranks, two share a key head.
DELTA = {
    **{"delta_key_heads": 2, "delta_value_heads": 4},
    **{"delta_key_size": 4, "delta_value_size": 6},
}
WINDOWS = {"short": 3, "long": 9}
OPTIMIZERS: Mapping[str, dict[str, Any]] = {
    "sgd": {"lr": 1.0},
    "momentum": {"momentum": 0.9, "lr": 0.3, "clip_grad": 0.0},
    # If RoPE turns a part of a head, the rest of a key bias only has rounding as its gradient; a
    # large eps keeps it from being stepped.
    "adamw": {"eps": 1e-6, "clip_grad": 0.3},
    "muon": {"eps": 1e-6},
}
TREATMENTS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "averaged": {"ema_decay": 0.6, "state": "bf16"},
    "by name": {
        "freeze": ("layers.0.attention.k.weight", "layers.0.mlp.up.weight"),
        "groups": (
            ("*.attention.v.*", (("lr_mult", 0.3),)),
            ("layers.*", (("lr_mult", 1.2), ("wd_mult", 4.0))),
            ("embedding.*", (("lr_mult", 0.5), ("wd_mult", 0.0))),
        ),
    },
    "first frozen": {},  # FIRST_FROZEN describes them
    "norms frozen": {"freeze": ("*norm*",)},
    "scheduled": {
        **{"lr_decay_style": "cosine", "lr_decay_steps": 5, "lr_warmup_steps": 1},
        **{"beta1": 0.8, "beta2": 0.9},
    },
}
EIGHT = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 24}
# These heads are as wide as the residual stream together.
SIXTEEN = {"num_experts": 16, "experts_per_token": 4, "expert_ffn_size": 32}
ROUTERS: Mapping[str, dict[str, Any]] = {
    "softmax": {},
    "unnormalised": {"router_normalize": False, "router_scale": 1.5},
    "sigmoid": {"router_score": "sigmoid", "router_bias": True},
    "groups": {
        **{"router_score": "sigmoid", "router_bias": True, "router_scale": 2.5},
        **{"router_groups": 4, "router_top_groups": 2},
    },
}
BALANCING: Mapping[str, tuple[tuple[str, float], ...]] = {
    "none": (),
    "auxiliary": (("aux_loss", 0.1), ("bias_update_rate", 0.05)),
    "both losses": (("aux_loss", 0.1), ("z_loss", 0.01), ("bias_update_rate", 0.05)),
}
# Nothing in the first of several layers has a backward, and a part of the next one.
FIRST_FROZEN = {
    False: ("embedding.*", "layers.0.attention.*"),
    True: ("embedding.*", "layers.0.*", "layers.1.attention.*", "layers.1.input_norm.*"),
}
EXPERTS_FROZEN = ("layers.0.attention.k.weight", "layers.0.mlp.experts.1.*")
SMOOTHED = (("label_smoothing", 0.1), ("z_loss", 0.01))


def layout(levels: Levels) -> Sizes:
    """Returns (tp, pp, dp), with cp if sequences are split, and with ep if there are experts."""
    tp, pp, dp, cp = (levels[name] for name in SIZES)
    if levels["experts"]:
        return (tp, pp, dp, cp, levels["ep"])
    return (tp, pp, dp) if cp == 1 else (tp, pp, dp, cp)


def _model(levels: Levels) -> dict[str, Any]:
    model = {
        **ACTIVATIONS[levels["activation"]],
        **POSITIONS[levels["positions"]],
        "norm": levels["norm"],
        "num_attention_heads": levels["heads"],
        "num_query_groups": kv_heads(levels["heads"], levels["kv heads"]),
        "bias": levels["bias"] == "all",
        "seq_length": levels["length"],
        "vocab_multiple": levels["padding"],
    }
    if levels["heads"] == 12:  # wider than the residual stream
        model["head_dim"] = 6
    if levels["positions"] == "longrope":  # a factor for each pair of dimensions of a head
        pairs = {8: 2, 12: 3}[levels["heads"]]
        model |= {name: factors[:pairs] for name, factors in LONGROPE.items()}
    if levels["temperature"]:
        model = {"rope_original_length": 4, **model, "query_temperature": 0.4}
    if levels["norm position"] != "before":
        model["norm_position"] = levels["norm position"]
    if levels["norm position"] == "after":
        # The first outputs are small. Norms that divided by them would make gradients, and rounding
        # errors in them, a hundred times as large.
        model["norm_eps"] = 0.1
    if levels["norm weight"] == "around 0":
        model["norm_zero_centered"] = True
    if types := LAYER_TYPES[levels["layer types"]]:
        window = {"sliding_window": WINDOWS[levels["window"]]}
        model |= {"layer_types": types, **(DELTA if "gated_deltanet" in types else window)}
        if levels["layer types"] == "two of three" and levels["positions"] not in UNROTATED:
            model["sliding_rotary_base"] = 50.0
    if levels["qk_norm"] != "none":
        model |= {"qk_norm": True, "qk_norm_width": levels["qk_norm"]}
    if levels["attention gate"]:
        model["attention_gate"] = True
    if levels["score cap"]:
        model["attention_logit_cap"] = 0.5
    if levels["attention sinks"]:
        model["attention_sinks"] = True
    if levels["scales"] == "all":
        model |= SCALES
    if levels["logit cap"]:
        model["logit_cap"] = 3.0
    if levels["bias"] in ("qkv", "attention"):
        model["attention_bias"] = "all" if levels["bias"] == "attention" else "qkv"
    if levels["dropout"]:
        model["dropout"] = levels["dropout"]
    if levels["experts"]:
        model |= EIGHT if levels["experts"] == 8 else SIXTEEN
        model |= ROUTERS[levels["router"]]
        if levels["gpt-oss"]:
            model |= {"expert_bias": True, "router_logit_bias": True}
            model |= {"swiglu_limit": 0.2} if levels["activation"] == "swiglu" else {}
        if levels["shared expert"] != "none":
            model |= {"shared_expert_size": 16}
            model |= {"shared_expert_gate": True} if levels["shared expert"] == "gated" else {}
        if levels["expert layers"] == "some":
            model["dense_layers"] = (1,)
    return model


def problem(levels: Levels) -> Problem:
    """Returns the problem of a combination, with a number of layers that the stages do not
    divide."""
    pp, batches = levels["pp"], ()
    counts = batch_sizes(microbatches(pp, levels["micro-batches"]), levels["batches"])
    sizes = [levels["samples"] * levels["dp"] * count for count in counts]
    # each size applies from one sample after the beginning of the preceding step
    if len(sizes) > 1:
        begins = [0, *(sum(sizes[:step]) + 1 for step in range(len(sizes) - 1))]
        batches = tuple(zip(begins, sizes, strict=True))
    optimizer = "sgd" if levels["optimizer"] == "momentum" else levels["optimizer"]
    optim = OPTIM[optimizer] | OPTIMIZERS[levels["optimizer"]] | TREATMENTS[levels["treatment"]]
    if levels["experts"] and levels["treatment"] == "by name":
        optim["freeze"] = EXPERTS_FROZEN
    # Each further layer is a further graph to compile.
    layers = max(
        pp * levels["chunks"] + (not levels["compile"] or levels["stages"] == "uneven"),
        2 if levels["expert layers"] == "some" else 1,
        len(LAYER_TYPES[levels["layer types"]]),
    )
    if levels["treatment"] == "first frozen":
        there = "attention_output_norm" if levels["norm position"] == "after" else "input_norm"
        frozen = FIRST_FROZEN[layers > 1]
        optim["freeze"] = tuple(name.replace("input_norm", there) for name in frozen)
        optim["clip_grad"] = min(optim["clip_grad"], 0.3)  # fewer gradients have a smaller norm
    if levels["treatment"] == "scheduled":  # its rates are lower in all steps but one
        optim["lr"] *= 2
    if levels["precision"] != "fp64":
        # Rounding errors grow where a step is so long that the loss rises: with momentum steps are
        # not clipped, and AdamW's are as long at a small gradient as at a large one.
        optim["lr"] /= {"momentum": 8, "sgd": 2, "adamw": 4}.get(levels["optimizer"], 1)
    return Problem(
        "llama_tiny" if levels["activation"] in ("swiglu", "geglu") else "gpt_tiny",
        optimizer,
        levels["tied"],
        levels["precision"],
        model=tuple(_model(levels).items()),
        optim=tuple((k, v) for k, v in optim.items() if v != OPTIM[optimizer].get(k)),
        layers=layers,
        loss=SMOOTHED if levels["loss"] == "smoothed" else (),
        moe=BALANCING[levels["balancing"]],
        # The second step reads leftovers of the first.
        steps=max(2, len(sizes)),
        batch=sizes[-1],
        batches=batches,
        documents=levels["documents"],
        ranks=levels["cp"],
    )


def _keys(levels: Levels) -> Iterator[tuple[str, Any]]:
    """Yields keys of the configuration and their values."""
    zero, sums = levels["zero"], levels["sums"]
    # a number for each stage
    some = [1 - stage % 2 for stage in range(levels["pp"] * levels["chunks"])]
    yield "vpp", levels["chunks"]
    yield "moe.dispatch", levels["dispatch"] if levels["ep"] > 1 else "auto"
    yield "zero", zero
    yield "recompute", levels["recompute"]
    yield "recompute_layers", some if levels["recomputed layers"] == "some" else None
    yield "mlp_chunk_tokens", 7 if levels["MLP"] == "in chunks" else None
    yield "offload_layers", some if levels["offload"] else None
    yield "schedule.slices", levels["slices"] or None
    yield "tensor_parallel.chunks", 2 if levels["sp"] == "in pieces" else 1
    yield "tensor_parallel.attention", levels["attention"]
    yield "context_parallel.style", levels["style"]
    yield "context_parallel.balance", levels["balance"]
    yield "loss.chunk_tokens", 7 if levels["loss chunks"] else None
    yield "ddp.shard_size", 2 if levels["copies"] == "several" else None
    yield "ddp.reduce_every_microbatch", zero < 3 if levels["reduced"] == "otherwise" else None
    yield "ddp.hierarchical", sums == "hierarchical"
    yield "ddp.comm_hook", "bf16" if sums == "bf16" else "none"
    # With more tokens, gradients would overflow, and a step would be skipped: see test_precision.
    yield "precision.initial_loss_scale", 1024.0 if levels["precision"] == "fp16" else 65536.0
    yield "attention_kernel", levels["kernel"]
    yield "deterministic", levels["deterministic"]


def case(levels: Levels) -> Case:
    """Returns the training of a combination."""
    stages, plain = levels["pp"] * levels["chunks"], Config()
    # The last stage has the head in addition to two layers.
    is_uneven = levels["stages"] == "uneven" and levels["pp"] > 1
    uneven = (*[1] * (stages - 1), 2) if is_uneven else None
    return Case(
        problem(levels),
        levels["schedule"],
        sp=levels["sp"] != "no",
        microbatches=microbatches(levels["pp"], levels["micro-batches"]),
        embedding=levels["table"],
        parallel_output=levels["logits"] == "parallel",
        bucket_cap_mb=None if levels["buckets"] == "whole" else 0.02,
        overlap=levels["buckets"] != "alone",
        layers_per_stage=uneven,
        compile=levels["compile"],
        keys=tuple(
            (name, value)
            for name, value in _keys(levels)
            if value != functools.reduce(getattr, name.split("."), plain)
        ),
    )


def name_of(levels: Levels) -> str:
    """Returns a short name, the layout first; the case shows the rest."""
    sizes = "-".join(f"{name}{levels[name]}" for name in SIZES if levels[name] > 1) or "one rank"
    words = [sizes]
    if levels["experts"]:
        words.append(f"{levels['experts']} experts ep{levels['ep']}")
    if levels["pp"] > 1:
        chunks = f" x{levels['chunks']}" if levels["chunks"] > 1 else ""
        words.append(f"{levels['schedule']}{chunks}")
    if levels["zero"]:
        words.append(f"zero{levels['zero']}")
    if levels["cp"] > 1:
        words.append(levels["style"])
    words += [levels["optimizer"], levels["precision"]]
    return " ".join(words + ["compiled"] * levels["compile"])


def summary() -> str:
    """Returns the factors, with the number of levels of each, and the number of cases."""
    lines = [
        f"- {subject}: {', '.join(f'{name} ({len(levels)})' for name, levels in factors.items())}"
        for subject, factors in SUBJECTS.items()
    ]
    ranks = sum(map(ranks_of, chosen().found))
    return "\n".join(
        [
            f"{len(FACTORS)} factors with {sum(map(len, FACTORS.values()))} levels:",
            *("", *lines, ""),
            f"{len(chosen().found)} cases of {ranks} ranks in all; {len(often())} of them are in "
            f"the default set, with {sum(map(ranks_of, often()))} ranks, the others in `nightly`; "
            f"{len(on_streams())} run on simulated devices too.",
        ]
    )


def main() -> None:
    """Prints the factors, the excluded combinations, the number of cases, and the uncovered
    pairs."""
    words = sys.argv[1:]
    if words[:1] == ["--write"]:
        write(int(words[1]) if words[1:] else 0)
    print(summary())
    print("\nLeft out, though the configuration allows it:")
    for rule in (*IDLE, *LEFT_OUT):
        print(f"- {rule.why} ({', '.join(rule.factors)})")
    uncovered = chosen().uncovered()
    print("\nPairs that no combination holds:")
    for one, other in chosen().impossible:
        print("- {} {}, {} {}".format(*one, *other))
    print(f"\nAllowed pairs that are uncovered: {uncovered or 'none'}")


if __name__ == "__main__":
    main()
