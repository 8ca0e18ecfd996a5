"""Tests that mistakes in a user's own model are refused, or named by `verify` with their cause."""

from __future__ import annotations

import io
import json
import re
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from parallel3d.blueprint.layout import Layout
from parallel3d.commands.verify import compared, maker_of_trainers
from parallel3d.config.fields import with_values
from parallel3d.errors import UserError
from parallel3d.loop.own_parts import OwnParts
from parallel3d.models.keys import ModelConfig
from parallel3d.models.own_model import own_config
from parallel3d.run_config import Config, check_config
from tests.distributed import planted_models as planted
from tests.distributed.harness import plain_groups
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

TP, DP, PP = {"tp": 2}, {"dp": 2}, {"pp": 2}
KEYS = {"micro_batch_size": 2, "global_batch_size": 8, "device": "cpu", "data.name": "own"}
KEYS |= {"precision.name": "fp64"}


def verified(
    name: str, sizes: dict[str, Any], masked: bool, more: Mapping[str, Any] | None = None
) -> tuple[int, str]:
    """Returns the exit code of `verify` on this rank, and what it has said or why it refused."""
    try:
        model = own_config(ModelConfig(), getattr(planted, name)())
        config = with_values(Config(model=model), KEYS | sizes | dict(more or {}))
        config = check_config(config, own_samples=True)
    except UserError as error:
        return 2, str(error)
    groups = plain_groups(Layout(**sizes))
    own = OwnParts(train=planted.Samples(masked))
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        code = compared(config, groups, 2, Path(folder), lambda _: None, own)
        if groups.rank:
            return code, ""
        found: dict[str, Any] = json.loads(Path(folder, "verify.json").read_text())
    return code, "; ".join([found["failure"] or "", *found.get("own_model", ())])


CASES = [
    ("Sound", TP | DP, True, 0, "^$"),
    (
        "MissingSum",
        TP,
        False,
        1,
        r"sum of the parts .* p3d\.sum_gradients_over\(layers\.0\.of_heads",
    ),
    ("MissingSumOfAParameter", TP, False, 1, r"p3d\.sum_gradients_over\(layers\.0\.factor, para"),
    ("SumOfAParameter", TP, False, 0, "^$"),
    ("SummedTwice", TP, False, 1, r"layers\.0\.norm\.weight.* 2 times .* Leave out"),
    ("ProcessDropout", DP, False, 1, r"layers\.0\.drop draws from .* use parallel\.dropout"),
    (
        "FunctionalDropout",
        DP,
        False,
        1,
        r"layers\.1 returns other values when .* parallel\.dropout",
    ),
    ("DropoutByRank", TP, False, 1, r"output of layers\.1 .* rank 1 \(.*tp 1\).*generator of its"),
    ("DropoutByRank", DP, False, 1, r"output of layers\.1 .* rank 1 \(.*dp 1.*generator of its"),
    ("DropoutByRankBeforeANorm", DP, False, 1, r"output of layers\.1 .*generator of its"),
    ("InitialValuesByRank", DP, False, 1, r"initial values of head\.out\.weight on rank 1 "),
    ("BatchStatistic", DP, False, 1, r"layers\.1 .*as layers\.1\.batch does.*statistic over the"),
    ("MovingBuffer", DP, False, 1, r"layers\.1 .*changes its buffer batch\.num"),
    ("MeanOverMicroBatch", DP, False, 1, r"averages over a micro-batch.*their number"),
    ("RandomLoss", DP, False, 1, r"the loss returns other values when it is called twice"),
    (
        "LossOfAnotherPart",
        PP,
        False,
        1,
        r"the loss computes with embedding\.project\.weight, a parameter of embedding",
    ),
    ("LossOfAnotherPart", DP, False, 0, r"the loss computes with embedding"),
    ("LossOfNoPart", PP, False, 1, r"the loss computes with a tensor of shape \(3,\) .* no part"),
    ("LossOfASlice", TP, False, 1, r"loss of a micro-batch is the first to differ"),
    ("NamedOutputs", DP, False, 0, "^$"),
    ("SamplesSecond", PP, True, 0, "^$"),
    ("SamplesTogether", PP, True, 0, "^$"),
    ("MeanOfOne", DP, True, 1, r"averages over a micro-batch.*micro_batch_size"),
    ("LossOverRanks", TP, False, 1, r"loss of a micro-batch is the first to differ"),
    (
        "BackwardByRank",
        DP,
        False,
        1,
        r"gradient of .*layers\.0.* differs on rank .* although all outputs agree: a backward of",
    ),
    (
        "EnlargedRoundingOfOutputs",
        TP,
        False,
        1,
        r"output of layers\.0 is the first to differ from one process, by rounding alone",
    ),
    ("CountOverRanks", TP, False, 1, r"all gradients are 2 times .* the loss or its count"),
    ("UnusedOnARank", TP, False, 1, r"only some ranks call.*no gradient reaches layers\.0\.extra"),
    ("UnusedOnARank", DP, False, 1, r"output of layers\.0 .*rank 1 .*only some ranks call"),
    ("NormOfSplitFeatures", TP, False, 1, r"layers\.0 .*ranks of tp agree.*a norm"),
    (
        "SharedWeight",
        PP,
        False,
        2,
        r"head\.table\.weight is the same parameter as embedding\.table",
    ),
    (
        "Closure",
        PP,
        False,
        1,
        r"layers\.1 computes with layers\.0\.norm\.weight.*module of its own",
    ),
    ("OfNoPart", PP, False, 1, r"layers\.0 computes with a tensor of shape .* to no part"),
    ("InPlaceOfLabels", DP, False, 1, r"the loss of .* changes inputs\.batch\[.y.\] in place"),
    ("InPlace", PP, False, 1, r"layers\.1 .*changes its input in place"),
    ("InPlaceOfSamples", DP, False, 1, r"embedding .*changes its input in place"),
    ("WrongShape", PP, False, 1, r"layers\.1.*\(2, 3, 5\)"),
    ("LostSamples", DP, False, 1, r"layers\.0 .*no dimension of samples"),
    ("OneTensorMore", DP, False, 1, r"embedding .* it returns another number of tensors"),
    ("SamplesTwice", DP, False, 1, r"embedding .* shape \(2, 2, 3, 8\) and \(1, 1, 3, 8\)"),
    ("NoTensor", DP, False, 1, r"layers\.0 of NoTensor must return a tensor .* not dict"),
    ("NamesTwice", DP, False, 2, r"two dropouts named mlp"),
]


@pytest.mark.parametrize(
    ("name", "sizes", "masked", "code", "said"),
    CASES,
    ids=[f"{name}-{'-'.join(sizes)}" for name, sizes, *_ in CASES],
)
def test_a_mistake_in_a_users_own_model_is_named_with_its_cause(
    pool: Pool, name: str, sizes: dict[str, Any], masked: bool, code: int, said: str
) -> None:
    ranks = 1
    for size in sizes.values():
        ranks *= size
    found = pool.run(ranks, verified, name, sizes, masked)
    first_code, sentence = found[0]
    assert first_code == code, sentence
    assert re.search(said, sentence, re.DOTALL), sentence
    assert "\n" not in sentence


def test_rounding_that_a_model_enlarges_is_told_from_a_mistake(pool: Pool) -> None:
    code, sentence = pool.run(
        2, verified, "EnlargedRounding", TP, False, {"precision.name": "fp32"}
    )[0]
    assert code == 1
    assert re.search(r"; all steps agree in fp64, so they differ in fp32 by rounding", sentence)


def test_a_gradient_of_rounding_alone_is_told_from_a_mistake(pool: Pool) -> None:
    keys = {"optim.name": "adamw", "optim.eps": 1e-30}
    code, sentence = pool.run(2, verified, "NothingToLearn", TP, False, keys)[0]
    assert code == 1
    assert re.search(r"and so do the steps of SGD: .* or it enlarges the rounding of a", sentence)


def built(name: str, sizes: dict[str, Any]) -> str:
    """Builds a trainer on this rank, and returns the error that it ends with."""
    groups = plain_groups(Layout(**sizes))
    model = own_config(ModelConfig(), getattr(planted, name)())
    config = check_config(with_values(Config(model=model), KEYS | sizes), own_samples=True)
    make, _ = maker_of_trainers(config, OwnParts(train=planted.Samples()), groups.device)
    try:
        make(config, groups)
    except Exception as error:
        return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    finally:
        groups.close()
    return ""


@pytest.mark.parametrize(
    ("name", "here", "there"),
    [
        (
            "NoTensorAtTheEnd",
            r"^\w+: layers\.1 of NoTensorAtTheEnd must return a tensor",
            r"^\w+: layers\.1 of NoTensorAtTheEnd must return a tensor",
        ),
        (
            "WrongShape",
            r"^RuntimeError: stage 1 of the pipeline failed on a remote rank",
            r"raised in layers\.1 of WrongShape .*given x of shape \(2, 3, 5\)",
        ),
    ],
)
def test_a_stage_that_fails_ends_all_ranks_of_its_pipeline(
    pool: Pool, name: str, here: str, there: str
) -> None:
    first, last = pool.run(2, built, name, PP)
    assert re.search(here, first), first
    assert re.search(there, last), last


def test_samples_of_micro_batches_of_one_are_called_together(pool: Pool) -> None:
    keys = {"micro_batch_size": 1}
    code, sentence = pool.run(2, verified, "BatchStatistic", DP, False, keys)[0]
    assert code == 1
    assert re.search(r"layers\.1 .*as layers\.1\.batch does.*statistic over the", sentence)
