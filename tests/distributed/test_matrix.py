"""Tests that every training of the covering array equals the reference, and that it holds every
pair."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.blueprint.layout import Layout
from parallel3d.errors import UserError
from parallel3d.run_config import check_config
from tests.distributed import matrix
from tests.distributed.conditions import of_matrix
from tests.distributed.covering import Levels
from tests.distributed.covering import allowed as allowed_by
from tests.distributed.harness import References, check_cases
from tests.distributed.pool import Pool

pytestmark = pytest.mark.first

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
FOUND = matrix.chosen().found


OFTEN = matrix.together(matrix.often())
SELDOM = matrix.together([levels for levels in FOUND if levels not in matrix.often()])


def check(found: list[Levels], pool: Pool, references: References) -> None:
    """Trains combinations of one layout one after the other, and compares each."""
    cases = [matrix.case(levels) for levels in found]
    cases = [replace(case, problem=references.well_conditioned(case.problem)) for case in cases]
    sizes, groups = matrix.layout(found[0]), matrix.groups_of(found[0])
    check_cases(sizes, cases, pool, references, of_matrix, groups)


@pytest.mark.parametrize("name", OFTEN)
def test_trainings_equal_the_reference(name: str, pool: Pool, references: References) -> None:
    check(OFTEN[name], pool, references)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SELDOM)
def test_more_trainings_equal_the_reference(name: str, pool: Pool, references: References) -> None:
    check(SELDOM[name], pool, references)


def test_the_matrix_holds_every_allowed_pair_and_the_spine() -> None:
    remedy = "run `python -m tests.distributed.matrix --write`"
    assert matrix.chosen().uncovered() == [], remedy
    assert matrix.chosen().uncovered(first=True) == [], remedy
    assert all(matrix.allowed(levels) for levels in FOUND)
    for cell in matrix.SPINE:
        assert any(cell.items() <= levels.items() for levels in FOUND), cell


def refused(levels: Levels) -> str | None:
    """Returns the sentence by which the configuration's check refuses a combination."""
    try:
        layout = Layout(*(levels[name] for name in matrix.SIZES))
        config = matrix.case(levels).config(layout)
        config.ep = levels["ep"]
        check_config(config, layout.world_size, own_samples=True)
    except UserError as error:
        return str(error)
    return None


def test_the_rules_refuse_exactly_what_the_check_refuses() -> None:
    """Draws combinations that differ from the cases in one to three levels, idle ones included."""
    rng = random.Random(0)
    told = {True: 0, False: 0}
    for _ in range(600):
        levels = dict(rng.choice(FOUND))
        for name in rng.sample(list(matrix.FACTORS), k=rng.randint(1, 3)):
            levels[name] = rng.choice(matrix.FACTORS[name])
        sentence = refused(levels)
        rules = (*matrix.REFUSED, *matrix.REFUSED_WHERE_IDLE)
        broken = [rule.why for rule in rules if not allowed_by(levels, [rule])]
        assert bool(sentence) == bool(broken), (sentence, broken, levels)
        told[bool(broken)] += 1
    assert min(told.values()) > 50, told


def test_the_contributors_page_has_the_factors_and_the_number_of_cases() -> None:
    assert matrix.summary() in PAGE.read_text("utf-8"), (
        "put what `python -m tests.distributed.matrix` prints first into CONTRIBUTING.md"
    )
