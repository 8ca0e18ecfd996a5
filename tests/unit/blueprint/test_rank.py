"""Tests what a rank of the blueprint keeps."""

from __future__ import annotations

import pytest

from parallel3d.blueprint.rank import PipelineRank
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config


@pytest.mark.parametrize(
    ("zero", "dp", "microbatches", "every", "expected"),
    [
        (3, 2, 4, False, (True, True)),
        (2, 2, 4, False, (True, True)),
        (3, 2, 4, True, (True, False)),
        (3, 2, 1, False, (True, False)),
        (1, 2, 4, False, (False, False)),
        (3, 1, 4, False, (False, False)),
    ],
)
def test_fsdp_keeps_whole_gradients_of_all_micro_batches_unless_each_is_reduced(
    zero: int, dp: int, microbatches: int, every: bool, expected: tuple[bool, bool]
) -> None:
    """Two replicas are enough to shard the parameters."""
    config = Config(dp=dp, zero=zero, micro_batch_size=1, global_batch_size=dp * microbatches)
    config.ddp.reduce_every_microbatch = every if zero > 1 else None
    rank = PipelineRank(blueprint_of(config), 0)
    assert (rank.fully_sharded, rank.accumulates) == expected
