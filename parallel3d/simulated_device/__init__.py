"""Simulates an accelerator on the CPU, to find errors in GPU code without a GPU.

`device=simulated` trains on it. Tensors keep their values on the CPU, or have none (`dryrun`), but
belong to a separate device with streams and events, a current device for each thread, pinned
memory, and a process-group backend that orders streams like NCCL. Data races, reads of results
that are not ready and mismatched collectives raise errors.
"""

from parallel3d.simulated_device.enable import enable

__all__ = ["enable"]
