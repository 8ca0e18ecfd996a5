"""Simulates an accelerator on the CPU, to find without a GPU what a GPU would object to.

`device=pretend` trains on it. Tensors have their values on the CPU, or nowhere (`dryrun`), but they
are on a device of its own: with streams and events, a current device for each thread, pinned
memory, and a process-group backend that orders streams as NCCL does. Accesses that nothing orders,
a result that is read too early and a collective that the ranks do not call alike are errors.
"""

from parallel3d.simulated_device.enable import enable

__all__ = ["enable"]
