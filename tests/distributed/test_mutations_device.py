"""Plants bugs that only a GPU would show: each is caught on the simulated accelerator.

On the CPU the loss is right with all of them: streams, pinned memory, the device of a thread and
the order of a communicator do not exist there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups, shards_and_replicas
from parallel3d.data.loader import Batches, MicroBatch
from parallel3d.data_parallel.comm_hooks import SideStream
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.device import accelerator
from parallel3d.faults.health import Health
from parallel3d.models.dropout import Dropout
from parallel3d.pipeline.p2p import PendingTransfer
from parallel3d.schedules.actions import Action
from parallel3d.simulated_device.device import this_machine
from parallel3d.simulated_device.machine import Kernel, Observer
from parallel3d.versions import parts
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import make_trainer, plain_groups
from tests.distributed.pool import WorkerFailure
from tests.distributed.seams import (
    ADDED_ROWS,
    BUCKET,
    CLOSED_GROUPS,
    DROPOUT,
    FINISH_STEP,
    FUSED,
    GATHERED_PARAMETERS,
    GLOBAL_TOKENS,
    MADE_GROUP,
    MESSAGES,
    MICRO_BATCH,
    REPLICAS,
    SIDE_STREAM,
    STAGE,
    START_STEP,
    TO_DEVICE,
    WIDE_PRODUCTS,
    Mutation,
    planted,
)
from tests.distributed.simulated import SimulatedPool, here
from tests.distributed.simulated_runs import DROPS, waits_a_step

pytestmark = pytest.mark.more

Sizes = tuple[int, int, int]
LLAMA = Problem("llama_tiny", "adamw", True, layers=2)


def train(sizes: Sizes, keys: Sequence[tuple[str, Any]], mutation: Mutation, steps: int) -> None:
    """Runs steps with the bug in place, and a save at the same time if checkpoints are asked
    for."""
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


@planted(FINISH_STEP)
def sums_are_read_before_they_are_there(_: Any, engine: BucketedDataParallel) -> list[str]:
    """The step continues without waiting for its buckets."""
    for index in engine.reducer.rest():
        engine.reduce_bucket(index)
    return []


@contextmanager
def layers_do_not_wait_for_their_parameters() -> Iterator[None]:
    on_their_way: list[Any] = []

    def all_gather_params(sound: Any, engine: BucketedDataParallel) -> None:
        sound(engine)
        on_their_way.append(engine.gathers.works)
        engine.gathers.works = {}

    with GATHERED_PARAMETERS.replaced(all_gather_params):
        yield


@planted(REPLICAS)
def sums_over_copies_may_be_overwritten(_: Any, flat: Tensor, copies: Group) -> None:
    """A unit's reduced gradients may be freed while they are summed over the copies."""
    collectives.all_reduce(flat, copies)


@dataclass
class NeverWaited:
    """A handle whose `wait` does nothing."""

    work: collectives.Work

    def wait(self) -> None: ...


@planted(SIDE_STREAM)
def nobody_waits_for_the_side_stream(sound: Any, *given: Any) -> NeverWaited:
    return NeverWaited(sound(*given))


@planted(SIDE_STREAM)
def the_side_stream_does_not_wait(sound: Any, hook: SideStream, tensor: Tensor, start: Any) -> Any:
    """A hook's first phase reads gradients that the backward may still be writing."""
    if hook.stream is None:
        hook.stream = accelerator.module(tensor.device).Stream(tensor.device)
    with accelerator.on_stream(hook.stream):  # the stream waits for itself
        return sound(hook, tensor, start)


@planted(SIDE_STREAM)
def an_event_of_another_stream(sound: Any, hook: SideStream, tensor: Tensor, start: Any) -> Any:
    """The event after a sum is recorded on the compute stream."""
    queued = sound(hook, tensor, start)
    queued.done = accelerator.module(tensor.device).current_stream().record_event()
    return queued


@planted(START_STEP)
def a_side_stream_writes_what_the_other_reads(
    sound: Any, engine: BucketedDataParallel, microbatches: int
) -> None:
    """Gradients are cleared on a separate stream, to save time."""
    device = engine.buckets[0].grad.device
    with accelerator.on_stream(accelerator.module(device).Stream(device)):
        sound(engine, microbatches)


RACES = {
    sums_are_read_before_they_are_there: ((1, 1, 2), ()),
    # On two stages, the last one's sum of tokens comes after the gathers on the same stream.
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


# Mutations that are harmless from some version of torch on. FSDP2 of 2.15 keeps the tensors that it
# passes to the hook of an all-reduce until the unit's next backward.
HARMLESS = {sums_over_copies_may_be_overwritten: (2, 15)}


@pytest.mark.parametrize("mutation", RACES, ids=lambda mutation: mutation.__name__)
def test_unordered_accesses_are_caught(mutation: Mutation, simulated: SimulatedPool) -> None:
    sizes, keys = RACES[mutation]
    harms = parts(torch.__version__) < HARMLESS.get(mutation, (99,))
    race = pytest.raises(WorkerFailure, match=r"Race: .* nothing orders the two")
    with race if harms else nullcontext():
        simulated.run(sizes[0] * sizes[1] * sizes[2], train, sizes, keys, mutation, 3)


# --- the communicator ------------------------------------------------------------------------


@planted(GLOBAL_TOKENS)
def a_tensor_of_the_host_is_summed(
    _: Any, trainer: Trainer, batches: Batches, first: int
) -> Tensor:
    count = torch.tensor(float(batches.token_count(first)), dtype=torch.float64)
    return collectives.all_reduce(count, trainer.groups.dp).to(trainer.device)


@planted(MESSAGES)
def one_stage_sends_in_another_order(
    sound: Any, messages: Sequence[tuple[Action, Tensor]], *where: Any
) -> list[PendingTransfer]:
    """Two activations are swapped in the list of the first stage."""
    if dist.get_rank() > 0:
        return sound(messages, *where)
    named = {other(action): action for action, _ in messages}
    transfers = sound([(other(action), tensor) for action, tensor in messages], *where)
    for transfer in transfers:
        transfer.action = named[transfer.action]
    return transfers


def other(action: Action) -> Action:
    """Swaps them for the other one of two micro-batches."""
    return Action(action.kind, action.microbatch ^ 1, action.chunk)


@planted(MADE_GROUP)
def one_rank_leaves_out_a_group(sound: Any, maker: Any, kind: str, *ranks: Any) -> Any:
    return None if dist.get_rank() == 1 and kind == "dp" else sound(maker, kind, *ranks)


@planted(CLOSED_GROUPS)
def groups_are_closed_in_another_order(_: Any, groups: ProcessGroups) -> None:
    """Groups are closed in the order of addresses, which differ between ranks."""
    handles = [g.handle for g in (groups.tp, groups.dp) if g.handle is not None]
    for handle in handles if groups.rank else handles[::-1]:
        dist.destroy_process_group(handle)


@planted(BUCKET)
def a_bucket_more_on_one_rank(sound: Any, engine: BucketedDataParallel, index: int) -> None:
    if dist.get_rank() == 1 and not engine.works:
        collectives.all_reduce_async(engine.buckets[-1].grad, engine.buckets[-1].data)
    sound(engine, index)


@planted(MICRO_BATCH)
def tensors_on_another_device(sound: Any, *which: Any) -> MicroBatch:
    """The rank computes on the device of its neighbour."""
    batch = sound(*which)
    own = batch.inputs.samples.device
    neighbours = torch.device(own.type, (own.index + 1) % 8)

    def moved(x: Any) -> Any:
        return x.cpu().to(neighbours) if isinstance(x, Tensor) else x

    inputs = replace(batch.inputs, samples=moved(batch.inputs.samples))
    return MicroBatch(*map(moved, batch[:3]), inputs)


REFUSED = {
    a_tensor_of_the_host_is_summed: ((1, 1, 2), "No backend type associated with device type cpu"),
    one_stage_sends_in_another_order: ((1, 2, 1), r"Mismatch: .* receives .* with tag"),
    one_rank_leaves_out_a_group: ((2, 1, 2), r"Mismatch: .* calls .* where member"),
    groups_are_closed_in_another_order: ((2, 1, 2), r"destroyed its groups in the order"),
    a_bucket_more_on_one_rank: ((1, 1, 2), r"Mismatch: .* calls .* where member"),
    tensors_on_another_device: ((1, 1, 2), r"Expected all tensors to be on the same device"),
}


# An error in a hook of autograd may end the process before it is reported: PyTorch's stream guard
# calls Python on its way out, with the error still set, and may not raise. So this one is detected
# after the backward.
AFTER_BACKWARD = {a_bucket_more_on_one_rank: (("ddp.overlap", False),)}


@pytest.mark.parametrize("mutation", REFUSED, ids=lambda mutation: mutation.__name__)
def test_bugs_of_collectives_are_refused_by_the_communicator(
    mutation: Mutation, simulated: SimulatedPool
) -> None:
    sizes, words = REFUSED[mutation]
    with pytest.raises(WorkerFailure, match=words):
        keys = AFTER_BACKWARD.get(mutation, ())
        simulated.run(sizes[0] * sizes[1] * sizes[2], train, sizes, keys, mutation, 2)


# --- the host --------------------------------------------------------------------------------


@planted(STAGE)
def the_loss_is_read_after_each_forward(sound: Any, *given: Any) -> Tensor:
    out = sound(*given)
    out.sum().item()
    return out


@planted(DROPOUT)
def a_mask_is_made_of_a_number_of_the_host(
    sound: Any, dropout: Dropout, x: Tensor, *more: Any
) -> Tensor:
    dropout.site.to(x.device)
    return sound(dropout, x, *more)


def waits_with(sizes: Sizes, case: Case, mutation: Mutation) -> list[list[str]]:
    with mutation():
        return waits_a_step(sizes, case)


@pytest.mark.parametrize(
    "mutation", [the_loss_is_read_after_each_forward, a_mask_is_made_of_a_number_of_the_host]
)
def test_unnecessary_waits_of_the_host_are_caught(
    mutation: Mutation, simulated: SimulatedPool
) -> None:
    case = Case(DROPS, microbatches=3)
    for steps in simulated.run(2, waits_with, (1, 2, 1), case, mutation):
        assert all(len(waits) > case.microbatches for waits in steps)


@contextmanager
def one_pinned_buffer_for_all_batches() -> Iterator[None]:
    buffers: dict[Any, Tensor] = {}

    def moved(_: Any, tensor: Tensor, device: torch.device) -> Tensor:
        key = (tensor.shape, tensor.dtype)
        buffer = buffers.setdefault(key, torch.empty_like(tensor).pin_memory())
        return buffer.copy_(tensor).to(device, non_blocking=True)

    with TO_DEVICE.replaced(moved):
        yield


def test_pinned_memory_that_is_reused_too_early_is_caught(simulated: SimulatedPool) -> None:
    with pytest.raises(WorkerFailure, match="pinned memory was overwritten before its copy"):
        simulated.run(1, train, (1, 1, 1), (), one_pinned_buffer_for_all_batches, 2)


# --- bits and passes -------------------------------------------------------------------------

WHOLE_TABLE = Case(Problem("llama_tiny", "adamw", False, "fp32"), embedding="replicated")


@contextmanager
def sound() -> Iterator[None]:
    yield


@planted(ADDED_ROWS)
def rows_are_added_in_any_order(
    sound: Any, table: Tensor, ids: Tensor, rows: Tensor, deterministic: bool
) -> None:
    sound(table, ids, rows, deterministic=False)


def drifts(mutation: Mutation) -> list[str]:
    """Returns which replicas hold other bits, after some steps at tp=2."""
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
    """Collects names, and bytes read and written, of the kernels that run."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, Any]] = []

    def kernel(self, kernel: Kernel) -> None:
        moved = sum(use.nbytes for use in (*kernel.reads, *kernel.writes))
        self.found.append((kernel.name, moved, kernel.call))


@planted(WIDE_PRODUCTS)
def products_are_rounded_before_they_are_added(*_: Any) -> bool:
    return False


@planted(FUSED)
def the_loss_goes_operator_by_operator(*_: Any) -> bool:
    return False


def kernels_of_a_step(mutation: Mutation) -> list[tuple[str, int, int]]:
    """Returns (name, bytes, elements of the result) of the kernels of one bf16 step."""
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


def test_weight_gradients_are_added_by_the_gemm_itself(simulated: SimulatedPool) -> None:
    """A product that is rounded first would be a separate matrix, followed by an addition."""
    weights = 32 * 32  # the smallest matrix to which a product is added
    for mutation, is_sound in ((sound, True), (products_are_rounded_before_they_are_added, False)):
        (kernels,) = simulated.run(1, kernels_of_a_step, mutation)
        products = [name for name, _, _ in kernels if name == "addmm"]
        additions = [n for name, _, n in kernels if name == "add_" and n >= weights]
        assert (len(products) > 0) is is_sound
        assert (not additions) is is_sound


def test_the_loss_moves_few_bytes_for_each_logit(simulated: SimulatedPool) -> None:
    """One pass over the logits forward and one backward, not counting GEMMs."""
    problem_tokens = Problem("gpt_tiny", "sgd", True).tokens
    logits = 4000 * problem_tokens
    for mutation, is_sound in ((sound, True), (the_loss_goes_operator_by_operator, False)):
        (kernels,) = simulated.run(1, kernels_of_a_step, mutation)
        # Logits of a micro-batch, in bf16 or wider: no other tensor is as large.
        a_loss = logits // 3
        moved = sum(b for name, b, _ in kernels if b > a_loss and "mm" not in name)
        assert (moved / logits < 12) is is_sound, moved / logits
