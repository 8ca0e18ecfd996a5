"""Provides `torch.simulated`, a device module with the interface of `torch.cuda`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from parallel3d.simulated_device.machine import DEVICES, SimulatedMachine

TYPE = "simulated"
NAME = "simulated accelerator"
PRIVATE_USE = 20  # value of c10::DeviceType::PrivateUse1
MEMORY = 80_000_000_000  # memory of a device in bytes


def this_machine() -> SimulatedMachine:
    return torch.get_device_module(TYPE).machine


def index_of(device: Any) -> int:
    """Returns the index of a device; None stands for the current device.

    Raises ValueError for a device of another type.
    """
    if device is None:
        return this_machine().device
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != TYPE:
        raise ValueError(f"Expected a {TYPE} device, but got: {device}")
    return this_machine().device if device.index is None else device.index


class SimulatedStream:
    """Runs kernels in order.

    Its `wait_*` methods delay the stream; only `synchronize` makes the host wait.
    """

    def __init__(self, device: Any = None, priority: int = 0, number: int | None = None) -> None:
        self.index = index_of(device)
        self.priority = priority
        machine = this_machine()
        self.number = machine.new_stream(self.index) if number is None else number

    @property
    def device(self) -> torch.device:
        return torch.device(TYPE, self.index)

    # FSDP2 of torch 2.15 identifies a stream by these three properties.

    @property
    def stream_id(self) -> int:
        return self.number

    @property
    def device_index(self) -> int:
        return self.index

    @property
    def device_type(self) -> int:
        return PRIVATE_USE

    def is_capturing(self) -> bool:
        """Returns False, because this device captures no graphs; torch's optimizers call it."""
        return False

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = SimulatedEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: SimulatedStream) -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        races = this_machine().races
        newest = races.syncs.current_sync_states.get(self.number, {}).get(self.number, 0)
        return races.is_past(self.number, newest)

    def synchronize(self) -> None:
        this_machine().wait_for_stream(self.number, "a stream's synchronize")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        return f"<stream {self.number} of {self.device}>"


class SimulatedEvent:
    """Marks a place in a stream, with the time of the host's clock at the call of `record`."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.timed = enable_timing
        machine = this_machine()
        self.number = machine.new_event()
        self._dropped = machine.dropped_events
        self.stream: int | None = None
        self.sequence = 0
        self.at = 0.0

    def __del__(self) -> None:
        self._dropped.append(self.number)

    def record(self, stream: SimulatedStream | None = None) -> None:
        self.stream = this_machine().stream_of() if stream is None else stream.number
        self.sequence = this_machine().record(self.number, self.stream)
        self.at = time.perf_counter()

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Makes the stream (by default the current one) wait for this event."""
        if self.stream is not None:
            machine = this_machine()
            number = machine.stream_of() if stream is None else stream.number
            machine.wait(number, self.number)

    def query(self) -> bool:
        """Returns whether the event has passed, which the host knows only after waiting for it."""
        return self.stream is None or this_machine().races.is_past(self.stream, self.sequence)

    def synchronize(self) -> None:
        this_machine().wait_for_event(self.number, "an event's synchronize")

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Returns the milliseconds from this event to `end`.

        Raises RuntimeError in the same cases as `torch.cuda`.
        """
        if not (self.timed and end.timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.query() and end.query()):
            raise RuntimeError("device not ready: the host has not waited for both events")
        return 1e3 * (end.at - self.at)


class SimulatedModule:
    """Implements `torch.get_device_module("simulated")`.

    Only `machine`, `fused_kernel` and `run_again` have no counterpart in `torch.cuda`.

    Attributes:
        run_again: see `RepeatedCalls.run`.
    """

    Stream = SimulatedStream
    Event = SimulatedEvent

    run_again: Callable[..., Any]

    def __init__(self, machine: SimulatedMachine) -> None:
        self.machine = machine

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return DEVICES

    def current_device(self) -> int:
        return self.machine.device

    def set_device(self, device: Any) -> None:
        if not isinstance(device, int) and torch.device(device).index is None:
            raise ValueError(
                f"Expected a torch.device with a specified index or an integer, but got:{device}"
            )
        self.machine.set_device(index_of(device))

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.machine.device
        self.machine.set_device(index_of(device))
        yield
        self.machine.set_device(before)

    def current_stream(self, device: Any = None) -> SimulatedStream:
        index = index_of(device)
        return SimulatedStream(index, number=self.machine.stream_of(index))

    def set_stream(self, stream: SimulatedStream) -> None:
        self.machine.set_stream(stream.index, stream.number)

    @contextmanager
    def stream(self, stream: SimulatedStream | None) -> Iterator[None]:
        """Sets the current stream; restores device and stream on exit, like `torch.cuda.stream`."""
        if stream is None:
            yield
            return
        machine = self.machine
        device, outer = machine.device, machine.stream_of()
        inner = machine.stream_of(stream.index)
        machine.set_stream(stream.index, stream.number)
        try:
            yield
        finally:
            machine.set_stream(stream.index, inner)
            machine.set_stream(device, outer)

    def synchronize(self, device: Any = None) -> None:
        self.machine.wait_for_device("synchronize")

    def set_sync_debug_mode(self, debug_mode: str) -> None:
        self.machine.warns_of_waits = {"default": False, "warn": True}[debug_mode]

    def manual_seed(self, seed: int) -> None:
        """Does nothing: this device generates no random numbers."""

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Does nothing: this device generates no random numbers, so it has no state to set."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Returns the dtypes of autocast; `torch.utils.checkpoint` asks for them."""
        return [torch.bfloat16, torch.float16]

    def get_device_name(self, device: Any = None) -> str:
        return NAME

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=NAME, total_memory=MEMORY, multi_processor_count=1)

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return (0, 0)

    def is_bf16_supported(self) -> bool:
        return True

    def empty_cache(self) -> None:
        """Does nothing: freed memory is not counted as reserved."""

    def memory_allocated(self, device: Any = None) -> int:
        self.machine.collect()
        return self.machine.usage[index_of(device)].live

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.machine.usage[index_of(device)].peak

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        usage = self.machine.usage[index_of(device)]
        usage.peak = usage.live = self.memory_allocated(device)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return MEMORY - self.memory_allocated(device), MEMORY

    @property
    def fused_kernel(self) -> Callable[[str], AbstractContextManager[None]]:
        return self.machine.fused_kernel
