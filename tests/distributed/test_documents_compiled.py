"""Documents in compiled blocks: the reference still, and new documents need no new code.

Attention within documents is an operator of its own there. The kernels around it are
TorchInductor's in the first case alone, PyTorch's in the others, which are then traced in no time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.topology.layout import Layout
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, check_cases, make_trainer
from tests.distributed.pool import Pool
from tests.kernels import no_kernels

LLAMA = Problem("llama_tiny", "sgd", True, layers=2, steps=2, batch=12, documents=True)
GPT = Problem("gpt_tiny", "adamw", False, layers=2, steps=2, batch=12, documents=True)
DROPS = replace(LLAMA, model=(("dropout", 0.2),))


def compiled(problem: Problem, **way: Any) -> Case:
    keys = tuple((name, way.pop(name)) for name in ("recompute", "vpp", "zero") if name in way)
    return Case(problem, compile=True, keys=keys, bucket_cap_mb=0.02, **way)


def test_compiled_kernels_rotate_by_positions_that_restart(
    pool: Pool, references: References
) -> None:
    one = replace(LLAMA, layers=1, optimizer="adamw")  # which is not evaluated: no third graph
    check_cases((1, 1, 1), [compiled(one)], pool, references)


def test_compiled_blocks_keep_documents_apart(pool: Pool, references: References) -> None:
    cases = [
        compiled(DROPS, sp=True, recompute="[norm,activation,attention]"),
        compiled(GPT, recompute="full"),
    ]
    check_cases((2, 1, 1), cases, pool, references, no_kernels)


def test_compiled_blocks_attend_across_split_sequences(pool: Pool, references: References) -> None:
    """Gathered keys are kept by the recomputed forward; heads are exchanged around dropout."""
    cases = [
        replace(case, keys=(*case.keys, ("context_parallel.style", style)))
        for case, style in (
            (compiled(GPT, recompute="full"), "gather"),
            (compiled(DROPS), "heads"),
        )
    ]
    check_cases((1, 1, 1, 2), cases, pool, references, no_kernels)


def test_compiled_stages_put_weight_gradients_off(pool: Pool, references: References) -> None:
    """What a weight gradient still has to read is not written again, nor are the documents of a
    micro-batch between its forwards and backwards."""
    problem = replace(GPT, layers=4)
    check_cases(
        (1, 2, 1),
        [compiled(problem, schedule="zbv", microbatches=3, vpp=2)],
        pool,
        references,
        no_kernels,
    )


def graphs_by_step() -> list[int]:
    """How many graphs there are after each of three steps."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    groups = ProcessGroups.create(Layout(1, 1, 1), "cpu", timeout_s=300)
    trainer = make_trainer(compiled(replace(LLAMA, steps=3), recompute="full"), groups)
    seen, counts = [], set()
    load = trainer.train_batches.micro_batch

    def micro_batch(first: int, m: int) -> Any:
        batch = load(first, m)
        counts.add(int(batch.documents.blocks.table[0, 0, 0]))
        return batch

    trainer.train_batches.micro_batch = micro_batch
    with no_kernels():
        for _ in range(3):
            trainer.train_step()
            seen.append(counters["stats"]["unique_graphs"])
    groups.close()
    assert len(counts) > 2, "the micro-batches have equally many documents"
    return seen


def test_other_documents_need_no_other_graph(pool: Pool) -> None:
    assert pool.run(1, graphs_by_step) == [[1, 1, 1]]
