"""DistributedDataParallel for any module."""
