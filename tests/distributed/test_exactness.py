"""Layout never changes the model: each (tp, pp, dp) of {1, 2, 4}³ up to 8 ranks is the reference.

In fp64 the losses, gradient norms and all weights after three steps agree to 1e-9 relative (weights
by tensor: max|a - b| <= 1e-9 · max|b|); in fp32 the losses to 1e-5 and the gradient norms to 1e-4.
Initial weights are those of one process bit for bit. An optimizer without a state of its own takes
two steps: the second reads all that the first has left, and the others of its layout take three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, cycle, product

import pytest

from parallel3d.topology.layout import Layout
from tests.distributed.cases import STEPS, Case, Problem
from tests.distributed.harness import References, differences, run_cases
from tests.distributed.pool import Pool

LAYOUTS = [sizes for sizes in product((1, 2, 4), repeat=3) if sizes[0] * sizes[1] * sizes[2] <= 8]
MODELS = ("gpt_tiny", "llama_tiny")
OPTIMIZERS = ("sgd", "adamw")
# By pp: micro-batches that let GPipe and 1F1B differ, and layers that no pp > 1 divides.
MICROBATCHES = {1: 2, 2: 3, 4: 4}
LAYERS = {1: 2, 2: 3, 4: 5}
SELECTIVE = (("recompute", "selective"),)
NOISE_SCALE = (("train.noise_scale", True),)
ALIKE = (("deterministic", True), ("attention_kernel", "math"))


def ways(tp: int, pp: int) -> list[dict[str, object]]:
    """Every schedule × sequence parallelism that the layout tells apart."""
    schedules = ("1f1b", "gpipe") if pp > 1 else ("1f1b",)
    sps = (False, True) if tp > 1 else (False,)
    return [{"schedule": schedule, "sp": sp} for schedule, sp in product(schedules, sps)]


def levels(case: Case) -> tuple[bool, ...]:
    """Where a case stands in each of the five factors."""
    problem = case.problem
    gpt, sgd = problem.preset == "gpt_tiny", problem.optimizer == "sgd"
    return gpt, sgd, problem.tied, case.schedule == "gpipe", case.sp


def main_cases(tp: int, pp: int, dp: int) -> list[Case]:
    """Model × optimizer × tied × schedule × sp in fp64, as far as the layout tells them apart.

    On more than two ranks, where a case takes longest, a part of them in which any two factors
    are fully crossed. Which part takes turns, so that each combination runs on some such layout.
    On every second of these layouts Muon stands for AdamW, by which it steps tables and vectors.
    """
    many = [s for s in LAYOUTS if math.prod(s) > 2]
    muon = (tp, pp, dp) in many[::2]
    optimizers = ("sgd", "muon") if muon else OPTIMIZERS
    noisy = {"gpipe": NOISE_SCALE, "1f1b": ()}
    cases = [
        Case(
            Problem(model, optimizer, tied), microbatches=MICROBATCHES[pp],
            keys=noisy[way["schedule"]], **way,
        )
        for model, optimizer, tied in product(MODELS, optimizers, (True, False))
        for way in ways(tp, pp)
    ]  # fmt: skip
    if tp * pp * dp <= 2 or tp == pp == 1:
        return cases
    turn = alike(tp, pp).index((tp, pp, dp))
    return [case for case in cases if is_chosen(levels(case), turn, both=min(tp, pp) > 1)]


def alike(tp: int, pp: int) -> list[tuple[int, ...]]:
    """The layouts of more than two ranks that tell the same factors apart."""
    kind = tp > 1, pp > 1
    return [s for s in LAYOUTS if math.prod(s) > 2 and (s[0] > 1, s[1] > 1) == kind]


def is_chosen(levels: tuple[bool, ...], turn: int, both: bool) -> bool:
    """Whether a turn's part has a combination of five factors (`both` tensor and pipeline) or four.

    Of five: the quarter in which two of the factors follow from the other three by parity. Of four:
    those with one or four levels set, counted after flipping the first two. Both by turns: with all
    four turns there is no combination left.
    """
    odd = (turn % 2 == 1, turn // 2 == 1)
    if both:
        a, b, c, d, e = levels
        return (a ^ b ^ d, a ^ c ^ e) == odd
    flips = (*odd, False, False, False)
    return sum(a != b for a, b in zip(levels, flips, strict=True)) in (1, 4)


def in_turn(problems: Sequence[Problem], tp: int, pp: int) -> list[Case]:
    """Each problem in one way, the ways taking turns."""
    turns = cycle(reversed(ways(tp, pp)))
    return [Case(p, microbatches=MICROBATCHES[pp], **next(turns)) for p in problems]


def fp32_cases(tp: int, pp: int, dp: int, turn: int) -> list[Case]:
    """Half of the models × optimizers in fp32, the other half at the next turn.

    On more than two ranks, one of the four.
    """
    problems = (
        Problem("gpt_tiny", "sgd", True, "fp32"),
        Problem("llama_tiny", "adamw", True, "fp32"),
        Problem("gpt_tiny", "adamw", False, "fp32"),
        Problem("llama_tiny", "sgd", False, "fp32"),
    )
    if tp * pp * dp > 2:
        return in_turn([problems[turn % 4]], tp, pp)
    return in_turn(problems[:2] if turn % 2 else problems[2:], tp, pp)


def odd_problems() -> list[Problem]:
    """The spellings and optimizer settings that the two presets leave out."""
    relu = {"activation": "relu", "max_position_embeddings": 24, "num_query_groups": 4}
    rope = {"position_embedding": "rope", "rotary_percent": 0.5, "bias": False}
    plain = {"position_embedding": "none", "norm": "rmsnorm", "ffn_hidden_size": None}
    bias = {"bias": True, "rotary_percent": 0.5, "rotary_base": 500.0}
    heads = {"num_query_groups": 8, "norm": "layernorm", "vocab_multiple": 128}
    momentum = {"clip_grad": 0.0, "momentum": 0.9, "lr": 0.05}
    kept = {"state": "bf16", "ema_decay": 0.6}
    # With RoPE on half of a head, half of a key bias has no gradient but rounding: a large eps
    # keeps AdamW from making steps of it.
    betas = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
    moving_rate = {"clip_grad": 0.3, "lr_decay_style": "cosine", "lr_warmup_steps": 2, **betas}
    # Parts of fused matrices, both copies of a tied table; matrices, as a bias that stays zero has
    # no relative difference.
    part = {
        "freeze": ("embedding.word.weight", "layers.*.attention.k.weight", "layers.1.mlp.*.weight")
    }
    slow = ("embedding.*", (("lr_mult", 0.3), ("wd_mult", 0.0)))
    fast = ("*.mlp.gate.*", (("lr_mult", 1.5),))
    some = {
        "groups": (
            slow,
            fast,
            ("layers.0.*", (("wd_mult", 5.0),)),
        ),
        "freeze": ("layers.*.mlp.down.weight", "layers.1.attention.q.weight"),
    }
    head = {"groups": (("head.*", (("lr_mult", 0.5),)), ("*.attention.v.*", (("wd_mult", 9.0),)))}
    return [
        Problem(preset, optimizer, tied, "fp64", tuple(model.items()), tuple(optim.items()))
        for preset, optimizer, tied, model, optim in (
            ("gpt_tiny", "sgd", True, relu, momentum | kept | part),
            ("gpt_tiny", "adamw", False, rope, moving_rate),
            ("gpt_tiny", "sgd", True, plain, {}),
            ("llama_tiny", "adamw", True, bias, moving_rate | kept | some),
            ("llama_tiny", "sgd", False, heads, momentum | head),
        )
    ]


def odd_cases(tp: int, pp: int, dp: int, turn: int) -> list[Case]:
    """The odd problems, each placed in an odd way; with the turn other pairs meet.

    On four ranks two of the five, on eight one, in turn.
    """
    stages = {1: (None, None), 2: ((1, 2), (2, 1)), 4: ((2, 1, 1, 1), (1, 1, 2, 1))}[pp]
    whole_table = {"embedding": "replicated"}
    whole_logits = {"parallel_output": False}
    small_buckets = {"bucket_cap_mb": 0.02}
    placements = [
        {**whole_table, **small_buckets, "layers_per_stage": stages[0]},
        {**whole_logits, **small_buckets, "overlap": False, "microbatches": 1},
        {**whole_table, **whole_logits, "layers_per_stage": stages[1], "keys": SELECTIVE},
        {**whole_logits, **small_buckets, "microbatches": 2},
        {**whole_table, "microbatches": 6 if tp == 1 else 3, "overlap": False, "keys": ALIKE},
    ]
    cases = in_turn(odd_problems(), tp, pp)
    shift = turn % len(placements)
    placed = [
        replace(case, **placement)
        for case, placement in zip(cases, placements[shift:] + placements[:shift], strict=True)
    ]
    world = tp * pp * dp
    some = {4: 2, 8: 1}.get(world, 5)
    first = some * [s for s in LAYOUTS if math.prod(s) == world].index((tp, pp, dp))
    return [placed[(first + i) % 5] for i in range(some)]


def all_cases(tp: int, pp: int, dp: int) -> list[Case]:
    """Everything that a layout runs."""
    turn = LAYOUTS.index((tp, pp, dp))
    cases = main_cases(tp, pp, dp) + fp32_cases(tp, pp, dp, turn) + odd_cases(tp, pp, dp, turn)
    return [replace(c, problem=at_length(c.problem, LAYERS[pp])) for c in cases]


def at_length(problem: Problem, layers: int) -> Problem:
    """With so many layers, and as many steps as its optimizer's state needs."""
    stateless = problem.optimizer == "sgd" and not dict(problem.optim).get("momentum")
    return replace(problem, layers=layers, steps=2 if stateless else STEPS)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda s: "tp{}-pp{}-dp{}".format(*s))
def test_layout_trains_as_the_reference_does(
    sizes: tuple[int, int, int],
    pool: Pool,
    references: References,
) -> None:
    cases = all_cases(*sizes)
    world = sizes[0] * sizes[1] * sizes[2]
    by_rank = pool.run(world, run_cases, sizes, cases, timeout_s=900)
    failures = []
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        expected = references.of(case.problem)
        for quantity, where in differences(outcomes, expected, case.problem).items():
            failures.append(f"{case}: {quantity}: {where}")
    assert not failures, f"{len(failures)} differences:\n" + "\n".join(failures)


def test_the_matrix_is_what_it_says() -> None:
    """17 layouts, factors fully crossed (any two on many ranks), sizes that divide badly."""
    assert len(LAYOUTS) == 17
    on_many: dict[tuple[int, ...], set[tuple[bool, ...]]] = {}
    odd_on: dict[int, set[Problem]] = {4: set(), 8: set()}
    for sizes in LAYOUTS:
        tp, pp, dp = sizes
        seen = {levels(case) for case in main_cases(*sizes)}
        number = (2, 2, 2, min(pp, 2), min(tp, 2))
        if tp * pp * dp <= 2:
            assert len(seen) == math.prod(number)
        else:
            on_many.setdefault(number, set()).update(seen)
            for f, g in combinations(range(5), 2):
                crossed = {(levels[f], levels[g]) for levels in seen}
                assert len(crossed) == number[f] * number[g]
            problems = {replace(c.problem, layers=0) for c in all_cases(*sizes)}
            odd_on[tp * pp * dp] |= {p for p in problems if p.model or p.optim}
        for case in all_cases(*sizes):
            model = case.config(Layout(*sizes)).model
            assert pp == 1 or model.num_layers % pp != 0
            assert tp == 1 or model.vocab_size % tp != 0
    assert {number: len(seen) for number, seen in on_many.items()} == {
        number: math.prod(number) for number in product((2,), (2,), (2,), (1, 2), (1, 2))
    }
    assert [len(odd) for odd in odd_on.values()] == [len(odd_problems())] * 2
    llama = Case(Problem("llama_tiny", "sgd", False)).config(Layout(1, 1, 1)).model
    assert llama.num_query_groups < llama.num_attention_heads  # grouped queries
