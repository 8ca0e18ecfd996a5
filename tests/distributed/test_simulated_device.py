"""Tests that the simulated accelerator refuses the same calls as a GPU, and no others."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallel3d.simulated_device.device import SimulatedModule
from parallel3d.simulated_device.machine import ROUNDING, Race, SimulatedMachine
from tests.distributed.simulated import SimulatedPool, here

pytestmark = pytest.mark.nightly

# PyTorch calls the last one for every device that is not one of its own.
OWN_NAMES = {"machine", "fused_kernel", "run_again", "get_amp_supported_dtype"}


def test_the_module_has_no_name_that_torch_cuda_lacks() -> None:
    """Code that runs on it must not rely on names that a GPU's module lacks."""
    names = {name for name in dir(SimulatedModule(SimulatedMachine())) if not name.startswith("__")}
    assert names - OWN_NAMES <= set(dir(torch.cuda))
    for kind in ("Stream", "Event"):
        of_cuda = getattr(torch.cuda, kind)
        ours = {n for n in dir(getattr(SimulatedModule, kind)) if not n.startswith("_")}
        # A build without CUDA does not show names from C, and an older torch lacks new names.
        in_c = {"device", "device_index", "device_type", "stream_id"}
        new = {"is_capturing"}  # attributes of streams, from torch 2.15 on
        assert ours - in_c - new <= set(dir(of_cuda)), kind


def module() -> Any:
    return torch.get_device_module(here())


def raises(kind: type[Exception], words: str, action: Callable[[], object]) -> bool:
    with pytest.raises(kind, match=words):
        action()
    return True


def computes_as_the_host_does() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 4, generator=generator) for n in (6, 5))
    found = []
    for device in (torch.device("cpu"), here()):
        a, b = (t.detach().to(device).requires_grad_() for t in (x, w))
        y = F.layer_norm(F.linear(a, b).relu(), (5,)).cumsum(0)
        y.square().sum().backward()
        found.append([t.cpu() for t in (y.detach(), a.grad, b.grad)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def two_streams_are_ordered_or_refused() -> None:
    side, main = module().Stream(), module().current_stream()
    x = torch.zeros(1000, device=here())
    with module().stream(side):
        raises(Race, "add on stream .* is reading from memory that", lambda: x + 1)
    side.wait_stream(main)
    with module().stream(side):
        x + 1
    raises(Race, "add_ on stream .* writing to memory that add on stream", lambda: x.add_(1))
    main.wait_event(side.record_event())
    x.add_(1)
    with module().stream(side):
        raises(Race, "mul_", lambda: x.mul_(2))
    module().synchronize()  # the host has waited: all work that it queues now comes later
    with module().stream(side):
        x.mul_(2)


def ranges_of_one_storage_are_told_apart() -> None:
    side = module().Stream()
    bucket = torch.zeros(64, device=here())
    first, second = bucket[:32], bucket[32:]
    side.wait_stream(module().current_stream())
    with module().stream(side):
        first.add_(1)
    second.add_(1)  # this is next to the memory that the side stream writes
    raises(Race, "add_", lambda: bucket[16:48].add_(1))


def freed_memory_keeps_its_past() -> None:
    """A block returns to the pool of its stream while another stream still reads it."""
    side, main = module().Stream(), module().current_stream()

    def use(told: bool) -> None:
        x = torch.zeros(5000, device=here())
        side.wait_stream(main)
        with module().stream(side):
            x.sum()
        if told:
            x.record_stream(side)

    use(told=True)
    torch.zeros(5000, device=here())  # this is other memory
    use(told=False)
    raises(Race, "zero_|fill_|zeros", lambda: torch.zeros(5000, device=here()))
    main.wait_stream(side)
    torch.zeros(5000, device=here())


def devices_do_not_mix() -> None:
    x, other = torch.zeros(3, device=here()), torch.zeros(3, device="simulated:5")
    raises(RuntimeError, "same device.* cpu and simulated:0", lambda: x + torch.ones(3))
    raises(RuntimeError, "simulated:0 and simulated:5", lambda: x + other)
    assert (x + torch.tensor(2.0)).tolist() == [2.0] * 3  # scalars on the host may be arguments
    raises(TypeError, "can't convert simulated:0", lambda: x.numpy())


def a_tensor_is_not_copied_to_its_own_device() -> None:
    for place in ("simulated:0", "simulated:3"):
        x = torch.ones(3, device=place)
        assert x.to(place) is x.to(device=torch.device(place)) is x.to(place, torch.float32) is x
        assert x.to(place, torch.float64).device == x.to(torch.bfloat16).device == x.device
        assert x.to(place, copy=True) is not x


def the_host_waits_where_it_reads() -> None:
    x = torch.ones(3, device=here())
    pinned = torch.ones(3).pin_memory()

    def waits(action: Callable[[], object]) -> int:
        before = module().machine.host_waits
        action()
        return module().machine.host_waits - before

    assert waits(lambda: x * 2 + 1) == 0
    assert waits(lambda: x.tolist()) == 1
    assert waits(lambda: x.sum().item()) == 1
    assert waits(lambda: bool(x.isfinite().all())) == 1
    assert waits(lambda: x.nonzero()) == 1
    assert waits(lambda: x.cpu()) == 1
    assert waits(lambda: torch.ones(3).to(here())) == 1
    assert waits(lambda: torch.tensor(1.0).to(here())) == 1
    # Pageable memory may move.
    assert waits(lambda: torch.ones(3).to(here(), non_blocking=True)) == 1
    assert waits(lambda: pinned.to(here(), non_blocking=True)) == 0
    assert waits(lambda: torch.full((), 3.0, device=here())) == 0


def pytorch_warns_of_the_waits_that_it_sees() -> None:
    x = torch.ones(3, device=here())
    pageable = torch.zeros(3)

    def warned(action: Callable[[], object]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            action()
        assert {w.filename for w in caught} <= {__file__}
        return [str(w.message) for w in caught]

    module().set_sync_debug_mode("warn")
    seen = (x.tolist, x.sum().item, x.cpu, x.nonzero, module().current_stream().synchronize)
    for action in (*seen, lambda: pageable.to(here())):
        assert warned(action) == ["called a synchronizing CUDA operation"]
    event = module().current_stream().record_event()
    hidden = (event.synchronize, module().synchronize, dist.barrier)
    copies = (lambda: x.copy_(pageable, non_blocking=True), lambda: x + 1)
    for action in (*hidden, *copies, lambda: pageable.copy_(x, non_blocking=True)):
        assert warned(action) == []
    module().set_sync_debug_mode("default")
    assert warned(x.tolist) == []


def copies_to_pinned_memory_come_when_they_are_waited_for() -> None:
    x = torch.arange(4.0, device=here())
    pinned = torch.zeros(4, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert pinned.isnan().all()
    event = module().current_stream().record_event()
    assert not event.query()
    event.synchronize()
    assert event.query() and pinned.tolist() == [0.0, 1.0, 2.0, 3.0]
    before = module().machine.host_waits
    copy = x.to("cpu", non_blocking=True)
    assert copy.is_pinned() and copy.isnan().all() and module().machine.host_waits == before
    module().synchronize()
    assert copy.tolist() == [0.0, 1.0, 2.0, 3.0]


def pinned_memory_is_not_reused_too_early() -> None:
    pinned = torch.ones(4).pin_memory()
    pinned.to(here(), non_blocking=True)
    pinned.zero_()
    raises(RuntimeError, "overwritten before its copy", module().synchronize)
    again = torch.ones(4).pin_memory()
    again.to(here(), non_blocking=True)
    module().synchronize()
    again.zero_()
    module().synchronize()


def every_thread_has_a_device_of_its_own() -> None:
    module().set_device(3)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(module().current_device()))
    thread.start()
    thread.join()
    x = torch.ones(2, device="simulated:3", requires_grad=True)
    x.register_hook(lambda grad: seen.append(module().current_device()))
    (x * 2).sum().backward()
    assert seen == [0, 3]  # autograd's own threads are on the device of their work
    raises(ValueError, "specified index", lambda: module().set_device("simulated"))
    raises(RuntimeError, "invalid device ordinal 8", lambda: module().set_device(8))
    module().set_device(0)


def a_fused_kernel_is_one() -> None:
    x = torch.ones(1000, device=here())
    seen = []
    observer = type("", (), {"kernel": lambda self, k: seen.append(k)})()
    observer.allocating = observer.allocated = observer.freed = lambda block: None
    module().machine.observers.append(observer)
    try:
        with module().fused_kernel("both"):
            y = (x + 1).square_().sum()
    finally:
        module().machine.observers.remove(observer)
    (kernel,) = seen
    assert kernel.name == "both" and y.tolist() == 4000.0
    assert [use.nbytes for use in kernel.reads] == [4000]
    assert sum(use.nbytes for use in kernel.writes) == 4


def a_fused_kernel_allocates_its_results_alone() -> None:
    x = torch.ones(1000, device=here())
    module().reset_peak_memory_stats()
    before = module().memory_allocated()
    with module().fused_kernel("both"):
        y = (x + 1).square().sum()
    assert module().max_memory_allocated() == module().memory_allocated() == before + ROUNDING
    del y
    assert module().memory_allocated() == before
    assert (x + 1).square().sum().tolist() == 4000.0
    assert module().max_memory_allocated() >= before + 8000


def events_tell_times_only_once_waited_for() -> None:
    plain, first, last = (module().Event(enable_timing=t) for t in (False, True, True))
    first.record()
    torch.ones(3, device=here())
    last.record()
    plain.record()
    raises(RuntimeError, "device not ready", lambda: first.elapsed_time(last))
    module().synchronize()
    assert first.elapsed_time(last) >= 0
    raises(RuntimeError, "enable_timing", lambda: first.elapsed_time(plain))


ON_ONE_RANK = (
    computes_as_the_host_does,
    two_streams_are_ordered_or_refused,
    ranges_of_one_storage_are_told_apart,
    freed_memory_keeps_its_past,
    devices_do_not_mix,
    a_tensor_is_not_copied_to_its_own_device,
    the_host_waits_where_it_reads,
    pytorch_warns_of_the_waits_that_it_sees,
    copies_to_pinned_memory_come_when_they_are_waited_for,
    pinned_memory_is_not_reused_too_early,
    every_thread_has_a_device_of_its_own,
    a_fused_kernel_is_one,
    a_fused_kernel_allocates_its_results_alone,
    events_tell_times_only_once_waited_for,
)


@pytest.mark.parametrize("check", ON_ONE_RANK, ids=lambda check: check.__name__)
def test_behaviour_of_the_simulated_device_on_one_rank(
    check: Callable[[], None], simulated: SimulatedPool
) -> None:
    simulated.run(1, check)
