"""The figures of Li et al. 2020, measured with our DistributedDataParallel: docs/ddp.md."""
