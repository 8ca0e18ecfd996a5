"""Mistakes that only a GPU would show, planted: each is caught on the simulated accelerator.

A loss on the CPU is right under all of them: streams, pinned memory, the device of a thread and the
order of a communicator do not exist there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.process_groups import ProcessGroups, shards_and_replicas
from parallel3d.data.loader import Batches
from parallel3d.data_parallel import comm_hooks, engine, fully_sharded
from parallel3d.data_parallel.comm_hooks import SideStream
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.device import accelerator, fused
from parallel3d.faults.health import Health
from parallel3d.models.dropout import Dropout
from parallel3d.models.transformer import Stage
from parallel3d.parameters import gradients
from parallel3d.pipeline.p2p import P2PRoute
from parallel3d.simulated_device.device import this_machine
from parallel3d.simulated_device.machine import Kernel, Observer
from parallel3d.tensor_parallel import embedding
from parallel3d.topology.layout import Layout
from parallel3d.trainer import Trainer
from parallel3d.versions import parts
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import make_trainer, plain_groups
from tests.distributed.pool import WorkerFailure
from tests.distributed.simulated import SimulatedPool, here
from tests.distributed.simulated_runs import DROPS, waits_a_step

Sizes = tuple[int, int, int]
Mutation = Callable[[], Any]
LLAMA = Problem("llama_tiny", "adamw", True)


def train(sizes: Sizes, keys: Sequence[tuple[str, Any]], mutation: Mutation, steps: int) -> None:
    """Steps with the mistake in place, and a save beside them if checkpoints are asked for."""
    layout, keys = Layout(*sizes), dict(keys)
    with mutation():
        shards = keys.get("ddp.shard_size")
        levels = None if shards is None else shards_and_replicas(layout, shards)
        groups = ProcessGroups.create(layout, here().type, 60.0, levels=levels)
        trainer = make_trainer(Case(LLAMA, keys=tuple(keys.items()), bucket_cap_mb=0.02), groups)
        for _ in range(steps):
            trainer.train_step()
        trainer.full_parameters()
        groups.close()
        dist.destroy_process_group()


# --- streams ----------------------------------------------------------------------------------


@contextmanager
def sums_are_read_before_they_are_there() -> Iterator[None]:
    """The step goes on without waiting for its buckets."""

    def finish_step(self: BucketedDataParallel) -> list[str]:
        for index in self.reducer.rest():
            self._reduce(index)
        return []

    with patch.object(BucketedDataParallel, "finish_step", finish_step):
        yield


@contextmanager
def layers_do_not_wait_for_their_parameters() -> Iterator[None]:
    with patch.object(engine.BucketedDataParallel, "pre_forward", lambda self, part: None):
        yield


@contextmanager
def sums_over_copies_may_be_overwritten() -> Iterator[None]:
    """Nothing keeps a unit's reduced gradients while they are summed over the copies."""

    def sum_over_copies(flat: Tensor, copies: Any) -> None:
        collectives.all_reduce(flat, copies)

    with patch.object(fully_sharded, "_sum_over_replicas", sum_over_copies):
        yield


@contextmanager
def nobody_waits_for_the_side_stream() -> Iterator[None]:
    with patch.object(comm_hooks._Queued, "wait", lambda self: None):
        yield


@contextmanager
def the_side_stream_does_not_wait() -> Iterator[None]:
    """Its first phase reads gradients that the backward may still be writing."""
    plain = SideStream.run

    def run(self: SideStream, tensor: Tensor, start: Any) -> Any:
        if self.stream is None:
            self.stream = accelerator.module(tensor.device).Stream(tensor.device)
        with patch.object(type(self.stream), "wait_stream", lambda *_: None):
            return plain(self, tensor, start)

    with patch.object(SideStream, "run", run):
        yield


@contextmanager
def an_event_of_another_stream() -> Iterator[None]:
    """The mark behind a sum is put on the stream that computes."""
    plain = SideStream.run

    def run(self: SideStream, tensor: Tensor, start: Any) -> Any:
        queued = plain(self, tensor, start)
        queued.done = accelerator.module(tensor.device).current_stream().record_event()
        return queued

    with patch.object(SideStream, "run", run):
        yield


@contextmanager
def a_side_stream_writes_what_the_other_reads() -> Iterator[None]:
    """Gradients are cleared on a stream of their own, to save time."""
    plain = BucketedDataParallel.start_step

    def start_step(self: BucketedDataParallel, microbatches: int) -> None:
        device = self.buckets[0].grad.device
        with accelerator.on_stream(accelerator.module(device).Stream(device)):
            plain(self, microbatches)

    with patch.object(BucketedDataParallel, "start_step", start_step):
        yield


RACES = {
    sums_are_read_before_they_are_there: ((1, 1, 2), ()),
    # On two stages: the last one's sum of tokens comes behind the gathers on the same stream.
    layers_do_not_wait_for_their_parameters: ((1, 2, 2), (("zero", 1),)),
    sums_over_copies_may_be_overwritten: (
        (1, 1, 4),
        (("zero", 2), ("ddp.shard_size", 2), ("ddp.reduce_every_microbatch", False)),
    ),
    nobody_waits_for_the_side_stream: ((1, 1, 2), (("ddp.comm_hook", "bf16"),)),
    the_side_stream_does_not_wait: ((1, 1, 2), (("ddp.comm_hook", "bf16"),)),
    an_event_of_another_stream: ((1, 1, 2), (("ddp.comm_hook", "bf16"),)),
    a_side_stream_writes_what_the_other_reads: ((1, 1, 1), ()),
}


# Mutations that harm nothing from a version of torch on. FSDP2 of 2.15 keeps what it hands to the
# hook of an all-reduce until the unit's next backward.
HARMLESS = {sums_over_copies_may_be_overwritten: (2, 15)}


@pytest.mark.parametrize("mutation", RACES, ids=lambda mutation: mutation.__name__)
def test_accesses_that_nothing_orders(mutation: Mutation, simulated: SimulatedPool) -> None:
    sizes, keys = RACES[mutation]
    harms = parts(torch.__version__) < HARMLESS.get(mutation, (99,))
    race = pytest.raises(WorkerFailure, match=r"Race: .* nothing orders the two")
    with race if harms else nullcontext():
        simulated.run(sizes[0] * sizes[1] * sizes[2], train, sizes, keys, mutation, 3)


# --- the communicator ------------------------------------------------------------------------


@contextmanager
def a_tensor_of_the_host_is_summed() -> Iterator[None]:
    def global_tokens(self: Trainer, batches: Any, first: int) -> Tensor:
        count = torch.tensor(float(batches.token_count(first)), dtype=torch.float64)
        return collectives.all_reduce(count, self.groups.dp).to(self.device)

    with patch.object(Trainer, "_global_tokens", global_tokens):
        yield


@contextmanager
def one_stage_sends_in_another_order() -> Iterator[None]:
    """Two activations change places in the list of the first stage."""
    plain = P2PRoute.tag

    def tag(self: P2PRoute, action: Any) -> int:
        # Two stages: a number of a micro-batch more is four of the tag.
        return plain(self, action) ^ 4 if dist.get_rank() == 0 else plain(self, action)

    with patch.object(P2PRoute, "tag", tag):
        yield


@contextmanager
def one_rank_leaves_out_a_group() -> Iterator[None]:
    plain = dist.split_group

    def split_group(**how: Any) -> Any:
        if dist.get_rank() == 1 and how["group_desc"] == "dp":
            return None
        return plain(**how)

    with patch.object(dist, "split_group", split_group):
        yield


@contextmanager
def groups_are_closed_in_another_order() -> Iterator[None]:
    """As where their order is that of addresses."""

    def close(self: ProcessGroups) -> None:
        handles = [g.handle for g in (self.tp, self.dp) if g.handle is not None]
        for handle in handles if self.rank else handles[::-1]:
            dist.destroy_process_group(handle)

    with patch.object(ProcessGroups, "close", close):
        yield


@contextmanager
def a_bucket_more_on_one_rank() -> Iterator[None]:
    plain = BucketedDataParallel._reduce

    def reduce(self: BucketedDataParallel, index: int) -> None:
        if dist.get_rank() == 1 and not self.works:
            collectives.all_reduce_async(self.buckets[-1].grad, self.dp)
        plain(self, index)

    with patch.object(BucketedDataParallel, "_reduce", reduce):
        yield


@contextmanager
def tensors_on_another_device() -> Iterator[None]:
    """The rank computes on the device of its neighbour."""

    def micro_batch(self: Batches, *where: int) -> Any:
        index = (self._device.index + 1) % 8
        with patch.object(self, "_device", torch.device(self._device.type, index)):
            return plain(self, *where)

    plain = Batches.micro_batch
    with patch.object(Batches, "micro_batch", micro_batch):
        yield


REFUSED = {
    a_tensor_of_the_host_is_summed: ((1, 1, 2), "No backend type associated with device type cpu"),
    one_stage_sends_in_another_order: ((1, 2, 1), r"Mismatch: .* receives .* with tag"),
    one_rank_leaves_out_a_group: ((2, 1, 2), r"Mismatch: .* calls .* where member"),
    groups_are_closed_in_another_order: ((2, 1, 2), r"destroyed its groups in the order"),
    a_bucket_more_on_one_rank: ((1, 1, 2), r"Mismatch: .* calls .* where member"),
    tensors_on_another_device: ((1, 1, 2), r"Expected all tensors to be on the same device"),
}


# An error in a hook of autograd may end the process before it is told: PyTorch's stream guard calls
# Python on its way out, with the error still set, and may not raise. So this one is met behind the
# backward.
AFTER_BACKWARD = {a_bucket_more_on_one_rank: (("ddp.overlap", False),)}


@pytest.mark.parametrize("mutation", REFUSED, ids=lambda mutation: mutation.__name__)
def test_what_a_communicator_refuses(mutation: Mutation, simulated: SimulatedPool) -> None:
    sizes, words = REFUSED[mutation]
    with pytest.raises(WorkerFailure, match=words):
        keys = AFTER_BACKWARD.get(mutation, ())
        simulated.run(sizes[0] * sizes[1] * sizes[2], train, sizes, keys, mutation, 2)


# --- the host --------------------------------------------------------------------------------


@contextmanager
def the_loss_is_read_after_each_forward() -> Iterator[None]:
    plain = Stage.forward

    def forward(self: Stage, *args: Any) -> Tensor:
        out = plain(self, *args)
        out.sum().item()
        return out

    with patch.object(Stage, "forward", forward):
        yield


@contextmanager
def a_mask_is_made_of_a_number_of_the_host() -> Iterator[None]:
    plain = Dropout.forward

    def forward(self: Dropout, x: Tensor, *more: Any) -> Tensor:
        self.site.to(x.device)
        return plain(self, x, *more)

    with patch.object(Dropout, "forward", forward):
        yield


def waits_with(sizes: Sizes, case: Case, mutation: Mutation) -> list[list[str]]:
    with mutation():
        return waits_a_step(sizes, case)


@pytest.mark.parametrize(
    "mutation", [the_loss_is_read_after_each_forward, a_mask_is_made_of_a_number_of_the_host]
)
def test_waits_of_the_host(mutation: Mutation, simulated: SimulatedPool) -> None:
    case = Case(DROPS, microbatches=3)
    for steps in simulated.run(2, waits_with, (1, 2, 1), case, mutation):
        assert all(len(waits) > case.microbatches for waits in steps)


@contextmanager
def one_pinned_buffer_for_all_batches() -> Iterator[None]:
    buffers: dict[Any, Tensor] = {}

    def moved(tensor: Tensor, device: torch.device) -> Tensor:
        key = (tensor.shape, tensor.dtype)
        buffer = buffers.setdefault(key, torch.empty_like(tensor).pin_memory())
        return buffer.copy_(tensor).to(device, non_blocking=True)

    with patch.object(accelerator, "moved", moved):
        yield


def test_pinned_memory_that_is_used_again_too_early(simulated: SimulatedPool) -> None:
    with pytest.raises(WorkerFailure, match="pinned memory was overwritten before its copy"):
        simulated.run(1, train, (1, 1, 1), (), one_pinned_buffer_for_all_batches, 2)


# --- bits and passes -------------------------------------------------------------------------

WHOLE_TABLE = Case(Problem("llama_tiny", "adamw", False, "fp32"), embedding="replicated")


@contextmanager
def sound() -> Iterator[None]:
    yield


@contextmanager
def rows_are_added_in_any_order() -> Iterator[None]:
    def add_rows(table: Tensor, ids: Tensor, rows: Tensor, in_order: bool) -> None:
        table.index_add_(0, ids, rows)

    with patch.object(embedding, "add_rows", add_rows):
        yield


def drifts(mutation: Mutation) -> list[str]:
    """What is said of replicas that hold other bits, after some steps at tp=2."""
    groups = plain_groups(Layout(2, 1, 1))
    said: list[str] = []
    with mutation():
        trainer = make_trainer(WHOLE_TABLE, groups)
        checkpoints = SimpleNamespace()
        for _ in range(3):
            trainer.train_step()
        Health(trainer, checkpoints, said.append).compare_replicas(3)
    groups.close()
    return said


@pytest.mark.parametrize(
    ("mutation", "says"), [(sound, False), (rows_are_added_in_any_order, True)]
)
def test_replicated_tables_stay_equal(
    mutation: Mutation, says: bool, simulated: SimulatedPool
) -> None:
    said = simulated.run(2, drifts, mutation)[0]
    assert bool(said) is says
    assert not says or "embedding.word.weight" in said[0]


class Kernels(Observer):
    """Names, and bytes read and written, of what runs."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, Any]] = []

    def kernel(self, kernel: Kernel) -> None:
        moved = sum(use.nbytes for use in (*kernel.reads, *kernel.writes))
        self.found.append((kernel.name, moved, kernel.call))


@contextmanager
def products_are_rounded_before_they_are_added() -> Iterator[None]:
    with patch.object(gradients, "supports_wide_addmm", lambda *_: False):
        yield


@contextmanager
def the_loss_goes_operator_by_operator() -> Iterator[None]:
    with patch.object(fused, "fuses", lambda device: False):
        yield


def kernels_of_a_step(mutation: Mutation) -> list[tuple[str, int, int]]:
    """(name, bytes, elements of the result) of the kernels of one bf16 step."""
    observer = Kernels()
    with mutation():
        case = Case(Problem("llama_tiny", "adamw", True, "bf16", (("vocab_size", 4000),)))
        trainer = make_trainer(case, plain_groups(Layout(1, 1, 1)))
        this_machine().observers.append(observer)
        trainer.train_step()
        this_machine().observers.remove(observer)
    return [
        (name, moved, call[3].numel() if call and isinstance(call[3], Tensor) else 0)
        for name, moved, call in observer.found
    ]


def test_weight_gradients_are_added_by_the_product_itself(simulated: SimulatedPool) -> None:
    """A product that is rounded first is a matrix of its own, and an addition behind it."""
    weights = 32 * 32  # the smallest matrix that a product adds to
    for mutation, is_sound in ((sound, True), (products_are_rounded_before_they_are_added, False)):
        (kernels,) = simulated.run(1, kernels_of_a_step, mutation)
        products = [name for name, _, _ in kernels if name == "addmm"]
        additions = [n for name, _, n in kernels if name == "add_" and n >= weights]
        assert (len(products) > 0) is is_sound
        assert (not additions) is is_sound


def test_the_loss_moves_few_bytes_a_logit(simulated: SimulatedPool) -> None:
    """One pass over the logits forward and one backward, GEMMs not counted."""
    problem_tokens = Problem("gpt_tiny", "sgd", True).tokens
    logits = 4000 * problem_tokens
    for mutation, is_sound in ((sound, True), (the_loss_goes_operator_by_operator, False)):
        (kernels,) = simulated.run(1, kernels_of_a_step, mutation)
        a_loss = logits // 3  # of a micro-batch, in bf16 or wider: nothing else is as large
        moved = sum(b for name, b, _ in kernels if b > a_loss and "mm" not in name)
        assert (moved / logits < 12) is is_sound, moved / logits
