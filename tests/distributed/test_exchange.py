"""Tests exchanges outside of training: JSON, and shards as bytes, without pickle."""

from __future__ import annotations

import pickle
from typing import Any, Never

import pytest
import torch
import torch.distributed as dist

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.comm import exchange
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.parameters import gather
from parallel3d.parameters.spec import ShardSpec
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import make_trainer, plain_groups
from tests.distributed.pool import Pool

CPU = torch.device("cpu")
# Values of unequal lengths, one empty, one with a letter of several bytes.
WORDS = [None, ["a", (1, 2.5)], "die größte", {"x": [True] * 100}]
AS_JSON = [None, ["a", [1, 2.5]], "die größte", {"x": [True] * 100}]


def told() -> dict[str, Any]:
    rank = dist.get_rank()
    # A separate group, whose first member is not rank 0 of the world.
    pair, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    found = {
        "all": exchange.all_gather_json(WORDS[rank], dist.group.WORLD, CPU),
        "pair": exchange.all_gather_json(WORDS[rank], pair, CPU),
        "broadcast": exchange.broadcast_json(WORDS[rank], pair, CPU),
        "alone": exchange.all_gather_json((rank,), None, CPU),
    }
    dist.destroy_process_group(pair)
    return found


def test_every_member_gets_the_messages_of_the_others(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(4, told)):
        of_pair = AS_JSON[:2] if rank < 2 else AS_JSON[2:]
        assert found["all"] == AS_JSON
        assert found["pair"] == of_pair
        assert found["broadcast"] == of_pair[0]
        assert found["alone"] == [[rank]]


def refuse(*_: object, **__: object) -> Never:
    raise AssertionError("something is pickled")


Boxes = list[tuple[int, str, list[float]]]


def boxes_of_all() -> list[Boxes]:
    """Returns the shards of a small model as rank 0 gets them, in one message per rank and in
    many."""
    groups = plain_groups(Layout(tp=2, pp=2))
    trainer = make_trainer(Case(Problem("gpt_tiny", "sgd", tied=True)), groups)
    found = [boxes_in_messages(trainer, groups, message_bytes) for message_bytes in (1 << 26, 1000)]
    groups.close()
    return found


def boxes_in_messages(trainer: Trainer, groups: ProcessGroups, message_bytes: int) -> Boxes:
    """Returns the shards, gathered in messages of this size; asserts that nothing is pickled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "MESSAGE_BYTES", message_bytes)
        for name in ("Pickler", "Unpickler", "dumps", "loads"):
            patch.setattr(pickle, name, refuse)
        for module in (dist, dist.distributed_c10d):
            patch.setattr(module, "gather_object", refuse)
            patch.setattr(module, "_object_to_tensor", refuse, raising=False)
        boxes = gather.gather_shards(trainer.parameters.values(), groups)
        full = trainer.full_parameters()
    for _, piece, box in boxes:
        assert isinstance(piece, ShardSpec)
        assert torch.equal(box, piece.of_full(full[piece.name]))
    return [(rank, piece.name, box.flatten()[:2].tolist()) for rank, piece, box in boxes]


def test_boxes_arrive_whole_in_messages_of_any_size(pool: Pool) -> None:
    (at_once, in_many), *others = pool.run(4, boxes_of_all)
    assert others == [[[], []]] * 3
    assert [rank for rank, *_ in at_once] == sorted(rank for rank, *_ in at_once)
    assert {rank for rank, *_ in at_once} == {0, 1, 2, 3}
    assert in_many == at_once


def mixed_types() -> list[tuple[str, int]]:
    """A dtype of one byte precedes wider ones, so the data after it is not aligned in the
    message."""
    groups = plain_groups(Layout(tp=2))
    types = (torch.uint8, torch.bfloat16, torch.float64)
    boxes = [
        (ShardSpec(f"p{i}", (3,), (0,), (3,)), torch.full((3,), groups.rank + 1).to(dtype))
        for i, dtype in enumerate(types)
    ]
    found = gather._gather(boxes, CPU, groups)
    groups.close()
    return [(str(box.dtype), int(box.sum())) for _, _, box in found]


def test_boxes_keep_their_dtype(pool: Pool) -> None:
    names = [f"torch.{name}" for name in ("uint8", "bfloat16", "float64")]
    assert pool.run(2, mixed_types)[0] == [(n, 3) for n in names] + [(n, 6) for n in names]


def test_small_boxes_share_a_message_and_large_ones_do_not() -> None:
    spans = [list(span) for span in exchange.messages([4, 6, 1, 30, 2, 8, 1], 10)]
    assert spans == [[0, 1], [2], [3], [4, 5], [6]]
    assert list(exchange.messages([], 10)) == []
