"""Measures the figures of Li et al. 2020 with our DistributedDataParallel (docs/ddp.md)."""
