"""Tests that heads which ranks share are saved once, and that gathered q and k change no bit; the
matrix trains the options of the model in every layout."""

from __future__ import annotations

from collections import Counter

import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.checkpoint.storage import chunks_by_name
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import make_trainer, plain_groups
from tests.distributed.pool import Pool

# Key-value heads on two of four ranks.
NORMED_PAIRS = Problem(
    "llama_tiny",
    "adamw",
    tied=False,
    model=(("num_query_groups", 2), ("qk_norm", True), ("attention_gate", True)),
)
ZERO1 = (("zero", 1),)
GATHER_QK = (("tensor_parallel.attention", "gather_qk"),)


def trained_and_saved(sizes: tuple[int, int, int]) -> tuple[Counter[str], bool]:
    """Returns the elements that this rank writes into a checkpoint, by name, and whether two steps
    with gathered q and k give the same bits as two steps without."""
    groups = plain_groups(Layout(*sizes))
    ends = []
    for keys in ((), GATHER_QK):
        trainer = make_trainer(Case(NORMED_PAIRS, keys=(*keys, *ZERO1)), groups)
        losses = [trainer.train_step().loss for _ in range(2)]
        ends.append((losses, {n: p.detach().clone() for n, p in trainer.parameters.items()}))
    (losses, plain), (others, gathered) = ends
    equal = losses == others and all(torch.equal(plain[n], gathered[n]) for n in plain)
    saved: Counter[str] = Counter()
    for name, tensor in chunks_by_name(trainer.parameter_slices(), shared=True).items():
        saved[name] += sum(box.elements for box, _ in tensor.chunks)
    groups.close()
    return saved, equal


def test_shared_heads_are_saved_once_and_gather_qk_changes_no_bit(pool: Pool) -> None:
    sizes = (4, 1, 1)
    saved: Counter[str] = Counter()
    for found, equal in pool.run(4, trained_and_saved, sizes, timeout_s=900):
        saved += found
        assert equal
    model = Case(NORMED_PAIRS).config(Layout(*sizes)).model
    for kind in ("parameter", "exp_avg", "exp_avg_sq"):
        of_queries, of_keys = model.hidden_size, 2 * model.head_size
        rows = {"q": of_queries, "gate": of_queries, "k": of_keys, "v": of_keys}
        for matrix, outputs in rows.items():
            name = f"{kind}/layers.1.attention.{matrix}.weight"
            assert saved[name] == outputs * model.hidden_size, name
        for part in ("q_norm", "k_norm"):  # all four ranks have these parameters
            assert saved[f"{kind}/layers.1.attention.{part}.weight"] == model.head_size
